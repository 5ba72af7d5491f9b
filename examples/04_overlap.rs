//! Host and GPU at work at the same time.
//!
//! A kernel keeps the device busy while the host computes something of its own. Prints how long
//! each takes alone, how long both take together, and a picture of when each was busy:
//!
//! ```text
//! device |##################################################|
//! host   |#########################################         |
//! ```

use std::time::{Duration, Instant};

use gpu_await::{Device, Op, Stream, kernels};

const GPU_TIME: Duration = Duration::from_millis(150);
const WIDTH: f64 = 50.0;

#[tokio::main]
async fn main() -> gpu_await::Result<()> {
    let device = Device::from_env()?;
    let stream = device.stream()?;
    let spin = kernels::spin::load(&device).await?;
    println!("device: {device}\n");

    // So much host work that it takes about as long as the kernel.
    let mut steps = 1_000_000;
    while timed(|| host_work(steps)).1 < GPU_TIME * 3 / 4 {
        steps = steps * 3 / 2;
    }
    let (expected, host_alone) = timed(|| host_work(steps));
    let (from, to) = device_work(&stream, &spin).await?;
    let device_alone = to - from;

    let start = Instant::now();
    let op = device_work(&stream, &spin); // on the device from here on
    let host_from = start.elapsed();
    let result = host_work(steps); // ... while the host does this
    let host_to = start.elapsed();
    let (from, to) = op.await?;
    let together = start.elapsed();
    let (from, to) = (from - start, to - start);

    let serial = device_alone + host_alone;
    println!("device alone      {device_alone:>9.1?}");
    println!("host alone        {host_alone:>9.1?}");
    println!("both together     {together:>9.1?}    one after the other: {serial:.1?}\n");
    println!("device {}", bar(from, to, together));
    println!("host   {}", bar(host_from, host_to, together));

    assert_eq!(result, expected);
    let overlap = to.min(host_to).saturating_sub(from.max(host_from));
    let shorter = (to - from).min(host_to - host_from);
    assert!(overlap > shorter / 2, "they were busy together for {overlap:?} of {shorter:?} only");
    Ok(())
}

/// A kernel between two host functions that read the clock when the stream gets to them.
fn device_work(stream: &Stream, spin: &kernels::spin) -> Op<(Instant, Instant)> {
    stream.batch(|q| {
        let from = q.host_fn(Instant::now)?;
        spin.launch(q, GPU_TIME.as_nanos() as u64)?;
        let to = q.host_fn(Instant::now)?;
        Ok((from, to))
    })
}

/// Something that the compiler cannot skip: a linear congruential generator.
fn host_work(steps: u64) -> u64 {
    (0..std::hint::black_box(steps)).fold(1, |state: u64, step| {
        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(step)
    })
}

fn timed<R>(work: impl FnOnce() -> R) -> (R, Duration) {
    let start = Instant::now();
    let result = std::hint::black_box(work());
    (result, start.elapsed())
}

fn bar(from: Duration, to: Duration, whole: Duration) -> String {
    let column = |at: Duration| (at.div_duration_f64(whole) * WIDTH).round().min(WIDTH) as usize;
    let (from, to) = (column(from), column(to));
    format!("|{}{}{}|", " ".repeat(from), "#".repeat(to - from), " ".repeat(WIDTH as usize - to))
}
