//! Stream priorities: what they do, and what they do not.
//!
//! Two streams each launch ten kernels of 2160 blocks of 1024 threads, which compete for the GPU.
//! Prints when each was done, in three runs, with a picture of the last:
//!
//! ```text
//! a high, b low
//!   a |##########################                        |
//!   b |##################################################|
//! ```
//!
//! A block that waits goes in the order of priority, so the high stream takes about half the time of
//! the low one, and equal streams as long as each other. A block that is resident is left alone:
//! behind one launch whose blocks fill the GPU for long a high stream waits like anybody (shown in
//! `tests/streams/priorities.rs`). Priorities have no effect on copies, and none on a host device.

use std::time::Duration;

use gpu_await::{Device, DeviceKind, LaunchConfig, Result, kernel, kernels};

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

/// When each of two streams of these priorities was done, from the same start on.
async fn contend(
    device: &Device,
    churn: &churn,
    priorities: [i32; 2],
    (elements, steps): (usize, u32),
) -> Result<[Duration; 2]> {
    let spin = kernels::spin::load(device).await?;
    let a = device.stream_builder().priority(priorities[0]).build()?;
    let b = device.stream_builder().priority(priorities[1]).build()?;
    let x = a.full(elements, 0.5f32).await?;
    let (mut y, mut z) = (a.zeros(elements).await?, b.zeros(elements).await?);
    // Everything is queued before the device starts.
    spin.launch(&a, 1_000_000).queued()?;
    let start = a.record_timed()?;
    b.wait(&start).queued()?;
    let config = LaunchConfig::new(2160, 1024);
    for _ in 0..10 {
        churn.launch(&a, config, &x, &mut y, steps).queued()?;
        churn.launch(&b, config, &x, &mut z, steps).queued()?;
    }
    let ends = [a.record_timed()?, b.record_timed()?];
    tokio::try_join!(ends[0].done(), ends[1].done())?;
    Ok([ends[0].elapsed_since(&start)?, ends[1].elapsed_since(&start)?])
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::from_env()?;
    let churn = churn::load(&device).await?;
    let (low, high) = device.priority_range();
    println!("device: {device}, priorities {low} (low) to {high} (high)");
    let load = match device.kind() {
        DeviceKind::Cuda => (1 << 20, 2000),
        _ => {
            println!("priorities have no effect on a host device: its streams are equal");
            (1 << 10, 10)
        }
    };
    for (name, priorities) in
        [("a high, b low", [high, low]), ("equal", [low, low]), ("a low, b high", [low, high])]
    {
        println!("\n{name}");
        let mut last = [Duration::ZERO; 2];
        for run in 1..=3 {
            last = contend(&device, &churn, priorities, load).await?;
            let ratio = last[0].as_secs_f64() / last[1].as_secs_f64();
            let [a, b] = last.map(|took| took.as_secs_f64() * 1e3);
            println!("  run {run}: a {a:7.2} ms, b {b:7.2} ms, a/b {ratio:.2}");
        }
        let whole = last[0].max(last[1]).as_secs_f64();
        for (name, took) in ["a", "b"].iter().zip(last) {
            let part = (took.as_secs_f64() / whole * 50.0).round() as usize;
            println!("  {name} |{:50}|", "#".repeat(part.min(50)));
        }
    }
    Ok(())
}
