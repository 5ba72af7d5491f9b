//! What a device did: a trace of two tasks, as a report, and files for a browser.
//!
//! Each runs a chain of kernels on a stream of its own; one copies its result to the host on a third stream, which so waits for
//! the kernels on the device. Prints where the time went, and which stream waited for whom. Writes `timeline.pftrace` (ui.perfetto.dev) and
//! `timeline.html` (any browser; a lane for each stream) into the folder that is given, or the system's for temporary files.

use gpu_await::{Device, kernels};
use std::{fs::File, io::BufWriter, path::PathBuf};

const N: usize = 1 << 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let device = Device::from_env()?;
    let scale = kernels::scale::load(&device).await?;
    let [a, b, reader] = ["left", "right", "reader"].map(|name| device.stream_builder().name(name));
    let (a, b, reader) = (a.build()?, b.build()?, reader.build()?);
    let mut x = a.full(N, 1.0f32).await?;
    let mut y = b.full(N, 1.0f32).await?;

    device.timeline().start(10_000)?;
    let (left_scale, right_scale) = (scale.clone(), scale);
    let left = tokio::spawn(async move {
        for _ in 0..10 {
            left_scale.launch(&a, 2.0, &mut x).queued()?;
        }
        // It waits on the device for the last launch, and for no other stream.
        let sum: f32 = reader.download(&x).await?.iter().sum();
        Ok::<_, gpu_await::Error>((sum, x))
    });
    let right = tokio::spawn(async move {
        for _ in 0..10 {
            right_scale.launch(&b, 0.5, &mut y).await?;
        }
        Ok::<_, gpu_await::Error>(y)
    });
    // With their buffers, so that these are in all of the trace.
    let (left, right) = tokio::try_join!(left, right)?;
    let ((sum, _x), _y) = (left?, right?);
    assert_eq!(sum, 1024.0 * N as f32);

    let trace = device.timeline().snapshot()?;
    println!("{}", trace.report());
    println!("times of the device are off by at most {:?}", trace.clock_error());
    let folder = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let [pftrace, html] =
        ["pftrace", "html"].map(|kind| folder.join("timeline").with_extension(kind));
    trace.write_perfetto(&mut BufWriter::new(File::create(&pftrace)?))?;
    trace.write_html(&mut BufWriter::new(File::create(&html)?))?;
    println!("written: {}, {}", pftrace.display(), html.display());
    Ok(())
}
