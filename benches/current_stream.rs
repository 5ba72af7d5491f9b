//! What does a verb on a device cost more than one on a stream that is named?
//!
//! Compared in one process, on one thread, per call: looking for the current stream against cloning
//! a stream; then a fill of four bytes on a named stream, on the device with no scope around it, and
//! on the device inside of three scopes. The last figures are ratios. The device does the same in each
//! case.

#[path = "measure.rs"]
mod measure;

use std::hint::black_box;
use std::time::Instant;

use gpu_await::{DeviceBuffer, Result, Stream};
use measure::{print, rounds};

/// Nanoseconds a call: the least of several rounds.
fn best(mut call: impl FnMut() -> Result<()>, settle: &Stream) -> Result<f64> {
    const CALLS: u32 = 500;
    let mut best = f64::INFINITY;
    for _ in 0..rounds(40, 4) {
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(CALLS));
        // Below the driver's limit of launches.
        settle.synchronize()?;
    }
    Ok(best)
}

/// Makes the stream for somebody.
fn keep(stream: Stream) -> Result<()> {
    drop(black_box(stream));
    Ok(())
}

fn main() -> Result<()> {
    let device = measure::device();
    let (outer, middle, stream) = (device.stream()?, device.stream()?, device.stream()?);
    let mut x: DeviceBuffer<u32> = stream.zeros(1).queued()?;
    // A buffer for each stream: nothing here crosses streams.
    let mut y: DeviceBuffer<u32> = device.zeros(1).queued()?;
    device.synchronize()?;

    let clone = best(|| keep(stream.clone()), &stream)?;
    let look = best(|| keep(device.current_stream()), &stream)?;
    let nested = |work: &mut dyn FnMut() -> Result<f64>| {
        outer.scope_sync(|| middle.scope_sync(|| stream.scope_sync(work)))
    };
    let look_nested = nested(&mut || best(|| keep(device.current_stream()), &stream))?;
    print("current_stream.clone_ns", clone, "ns");
    print("current_stream.look_ns", look, "ns");
    print("current_stream.look_in_three_scopes_ns", look_nested, "ns");

    let named = best(|| stream.fill(&mut x, 1).queued(), &stream)?;
    let on_device = best(|| device.fill(&mut y, 1).queued(), device.default_stream())?;
    let scoped = nested(&mut || best(|| device.fill(&mut x, 1).queued(), &stream))?;
    print("current_stream.fill_on_a_named_stream_ns", named, "ns");
    print("current_stream.fill_on_the_device_over_named", on_device / named, "ratio");
    print("current_stream.fill_in_three_scopes_over_named", scoped / named, "ratio");
    Ok(())
}
