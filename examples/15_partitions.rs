//! What does a small kernel wait for beside one that fills the GPU? And what if each has multiprocessors of its own?
//!
//! A kernel of 8 blocks is awaited again and again, alone and beside one whose blocks run for 2 ms and fill the GPU:
//!
//! | beside it | the small kernel's stream |
//! |---|---|
//! | nothing | any |
//! | the hog | as any other, equal priority |
//! | the hog | has the highest priority: its blocks are next, when one of the hog's ends |
//! | the hog, in a partition | in another partition: its multiprocessors are free |
//!
//! Prints the time of an await for each, at the median and the 99th percentile. A host device has partitions in name alone: there the numbers
//! say nothing.

use std::time::{Duration, Instant};

use gpu_await::{Device, DeviceKind, LaunchConfig, Result, Stream, kernel};

kernel! {
    /// Keeps each block busy for so long.
    unsafe fn spin(duration_ns: u64);
    ptx = include_str!("../kernels/spin.ptx");
    host = |_: &gpu_await::Grid, ns: u64| std::thread::sleep(Duration::from_nanos(ns));
}

/// What the small kernel and the hog run for.
const SMALL_NS: u64 = 5_000;
const HOG_NS: u64 = 2_000_000;

/// Fills the multiprocessors of a stream, a few launches ahead, for ever.
async fn hog(spin: spin, stream: Stream) -> Result<()> {
    // Two blocks of 1024 threads are all that a multiprocessor holds.
    let config = LaunchConfig::new(8 * 2 * stream.multiprocessors(), 1024);
    loop {
        spin.launch(&stream, config, HOG_NS).queued()?;
        stream.throttle(3).await?;
    }
}

/// Awaits the small kernel for a second and a half.
async fn awaits(spin: &spin, stream: &Stream) -> Result<Vec<Duration>> {
    let (mut times, end) = (Vec::new(), Instant::now() + Duration::from_millis(1500));
    while Instant::now() < end {
        let start = Instant::now();
        spin.launch(stream, LaunchConfig::new(8, 128), SMALL_NS).await?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times)
}

async fn measure(what: &str, spin: &spin, small: &Stream, beside: Option<Stream>) -> Result<()> {
    let hog = beside.map(|stream| tokio::spawn(hog(spin.clone(), stream)));
    tokio::time::sleep(Duration::from_millis(20)).await;
    let times = awaits(spin, small).await?;
    if let Some(hog) = hog {
        hog.abort();
    }
    small.device().done().await?;
    let [p50, p99] = [50, 99].map(|part| times[times.len() * part / 100].as_secs_f64() * 1e6);
    println!("{what:<34} {p50:>10.1} {p99:>10.1}   ({} awaits)", times.len());
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::from_env()?;
    println!("{device}: {} multiprocessors", device.multiprocessors());
    if device.kind() == DeviceKind::Host {
        println!("a host device: partitions are nominal, and these are no results");
    }
    let spin = spin::load(&device).await?;
    let (lowest, highest) = device.priority_range();
    let stream = |priority| device.stream_builder().priority(priority).build();
    println!("{:<34} {:>10} {:>10}", "awaiting a kernel of 8 blocks", "p50 us", "p99 us");
    measure("alone", &spin, &stream(lowest)?, None).await?;
    measure("beside a hog, equal priority", &spin, &stream(lowest)?, Some(stream(lowest)?)).await?;
    measure("beside a hog, highest priority", &spin, &stream(highest)?, Some(stream(lowest)?))
        .await?;
    let all = device.multiprocessors();
    let small = device.reserve_partition(16.min(all / 2).max(1)).await?;
    let rest = all - small.multiprocessors();
    if rest == 0 {
        println!("nothing is left for a hog in another partition");
        return Ok(());
    }
    let rest = device.reserve_partition(rest).await?;
    let sizes = (small.multiprocessors(), rest.multiprocessors());
    let what = format!("in a partition of {}, the hog in {}", sizes.0, sizes.1);
    measure(&what, &spin, &small.stream()?, Some(rest.stream()?)).await
}
