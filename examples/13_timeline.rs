//! What a device did: a trace of three tasks, as a picture, a report, and files for a browser.
//!
//! Two tasks run chains of kernels on streams of their own; a third one copies the result of one of them to the host, and so waits for
//! it on the device. Prints a lane for each stream, where the time went, and which stream waited for whom. Writes `timeline.json`
//! (chrome://tracing, ui.perfetto.dev), `timeline.pftrace` (ui.perfetto.dev) and `timeline.html` (any browser) into the folder that is given, or the system's for
//! temporary files.

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
    let left = async {
        for _ in 0..10 {
            scale.launch(&a, 2.0, &mut x).queued()?;
        }
        // It waits on the device for the last launch, and for no other stream.
        let sum: f32 = reader.download(&x).await?.iter().sum();
        Ok::<_, gpu_await::Error>(sum)
    };
    let right = async {
        for _ in 0..10 {
            scale.launch(&b, 0.5, &mut y).await?;
        }
        Ok(())
    };
    let (sum, ()) = tokio::try_join!(left, right)?;
    assert_eq!(sum, 1024.0 * N as f32);

    let trace = device.timeline().snapshot()?;
    println!("{}", trace.picture(100));
    println!("{}", trace.report());
    println!("times of the device are off by at most {:?}", trace.clock_error());
    let folder = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let [json, pftrace, html] =
        ["json", "pftrace", "html"].map(|kind| folder.join("timeline").with_extension(kind));
    trace.write_chrome_json(&mut BufWriter::new(File::create(&json)?))?;
    trace.write_perfetto(&mut BufWriter::new(File::create(&pftrace)?))?;
    trace.write_html(&mut BufWriter::new(File::create(&html)?))?;
    println!("written: {}, {}, {}", json.display(), pftrace.display(), html.display());
    Ok(())
}
