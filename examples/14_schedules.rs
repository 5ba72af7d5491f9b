//! Why do two streams not overlap? Three schedules, and what the device did.
//!
//! | schedule | shows |
//! |---|---|
//! | `apart` | two streams whose kernels run at once |
//! | `library` | the same, with a fill on the legacy default stream now and then, as a library might put one there: streams that are made to wait for that stream (`non_blocking(false)`) take turns, and the report says so |
//! | `priority` | kernels that fill the device, on a stream of high priority beside one of low: a block that waits goes in the order of priority (a GPU alone has priorities) |
//!
//! Prints a report of each, and writes `apart.html`, `library.html`, `priority.html` (any browser; a lane for each stream) into the folder that
//! is given, or the system's for temporary files.

use std::{fs::File, io::BufWriter, path::PathBuf};

use gpu_await::{Device, DeviceKind, LaunchConfig, Result, Stream, kernel, kernels};

kernel! {
    /// Keeps every thread busy for so many steps.
    unsafe fn churn(x: &[f32], y: &mut [f32], steps: u32, n: u64 = y.len())
        where x.len() == y.len();
    ptx = include_str!("../kernels/churn.ptx");
    host = twin::churn;
}

mod twin {
    pub(super) fn churn(_: &gpu_await::Grid, x: &[f32], y: &mut [f32], steps: u32, _n: u64) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = (0..steps).fold(*x, |v, _| v.mul_add(0.999, 0.001));
        }
    }
}

/// Kernels of 200 µs on two streams, and now and then a fill on a third one.
async fn two_streams(a: &Stream, b: &Stream, third: Option<&Stream>) -> Result<()> {
    let spin = kernels::spin::load(&a.device()).await?;
    let mut x = a.zeros::<u8>(1024).await?;
    for _ in 0..12 {
        spin.launch(a, 200_000).queued()?;
        if let Some(third) = third {
            third.fill(&mut x, 1).queued()?;
        }
        spin.launch(b, 200_000).queued()?;
        if let Some(third) = third {
            third.fill(&mut x, 2).queued()?;
        }
    }
    tokio::try_join!(a.done(), b.done()).map(drop)
}

/// Kernels of 2160 blocks of 1024 threads on both streams.
async fn contend(a: &Stream, b: &Stream) -> Result<()> {
    let (device, on_cuda) = (a.device(), a.device().kind() == DeviceKind::Cuda);
    let (elements, steps) = if on_cuda { (1 << 20, 2000) } else { (1 << 10, 10) };
    let churn = churn::load(&device).await?;
    let x = a.full(elements, 0.5f32).await?;
    let (mut y, mut z) = (a.zeros(elements).await?, b.zeros(elements).await?);
    let config = LaunchConfig::new(2160, 1024);
    for _ in 0..10 {
        churn.launch(b, config, &x, &mut z, steps).queued()?;
        churn.launch(a, config, &x, &mut y, steps).queued()?;
    }
    tokio::try_join!(a.done(), b.done()).map(drop)
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let device = Device::from_env()?;
    let folder = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let named = |name| device.stream_builder().name(name);
    let (low, high) = device.priority_range();
    // The first memory of a device takes longer.
    device.zeros::<u8>(1024).await?;
    for schedule in ["apart", "library", "priority"] {
        device.timeline().start(10_000)?;
        match schedule {
            "apart" => two_streams(&named("a").build()?, &named("b").build()?, None).await?,
            "library" => {
                let (a, b) = (named("a").non_blocking(false), named("b").non_blocking(false));
                let legacy = device.legacy_stream()?;
                two_streams(&a.build()?, &b.build()?, Some(&legacy)).await?;
            }
            _ => {
                let (a, b) = (named("high").priority(high), named("low").priority(low));
                contend(&a.build()?, &b.build()?).await?;
            }
        }
        let trace = device.timeline().snapshot()?;
        println!("== {schedule}\n{}", trace.report());
        let page = folder.join(schedule).with_extension("html");
        trace.write_html(&mut BufWriter::new(File::create(&page)?))?;
        println!("written: {}\n", page.display());
    }
    Ok(())
}
