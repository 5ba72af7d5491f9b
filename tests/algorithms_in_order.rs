//! Algorithms behind gates: what they wait for, and that the host waits for none of it. Apart from the other tests of
//! algorithms, because those load kernels, which waits for all gates of a process on a GPU.

#[path = "under_test/alone.rs"]
mod alone;

use futures::executor::block_on;
use gpu_await::testing::Gate;
use gpu_await::{AlgorithmFamily, Compare, DeviceBuffer, Stream};

fn up(stream: &Stream, x: &[u32]) -> DeviceBuffer<u32> {
    stream.upload(x.to_vec()).queued().expect("memory")
}

/// A device's algorithms go to its current stream; one that is named is another.
#[test]
fn on_the_current_stream() {
    let device = alone::device();
    let (named, current) = (device.stream().expect("a stream"), device.stream().expect("a stream"));
    device_is_warm(&named);
    let x = up(&named, &[3u32, 1, 2]);
    let gate = Gate::close(&current).expect("a gate");
    let sum = named.sum(&x).synchronize().expect("a sum");
    let held = current.scope_sync(|| device.sum(&x));
    assert_eq!(sum, 6);
    assert!(!held.is_complete());
    gate.open();
    assert_eq!(held.synchronize().expect("a sum"), 6);
}

/// Whatever they are chained to, algorithms leave the host alone: their stream is held up all the while.
#[test]
fn nothing_waits_in_a_chain() {
    let device = alone::device();
    device_is_warm(&device.stream().expect("a stream"));
    let stream = device.stream().expect("a stream");
    let x: Vec<u32> = (0..20_000).rev().collect();
    let x = up(&stream, &x);
    let mut kept = stream.zeros::<u32>(20_000).queued().expect("memory");
    let mut count = stream.empty::<u64>(1).queued().expect("memory");
    let gate = Gate::close(&stream).expect("a gate");
    stream.copy_if_into(&x, Compare::Less(10_000), &mut kept, &mut count).queued().expect("queued");
    stream.sort(&mut kept.up_to_mut(&count).expect("one")).queued().expect("queued");
    let sum = stream.sum(&kept.up_to(&count).expect("one"));
    assert!(!sum.is_complete());
    gate.open();
    assert_eq!(sum.synchronize().expect("a sum"), 10_000 * 9_999 / 2);
}

/// Loading kernels waits for what runs, and a gate waits for the host.
fn device_is_warm(stream: &Stream) {
    let families = [
        AlgorithmFamily::Reduce,
        AlgorithmFamily::Scan,
        AlgorithmFamily::Select,
        AlgorithmFamily::Sort,
    ];
    block_on(stream.device().preload::<u32>(&families)).expect("loaded");
    let mut x = up(stream, &[1u32; 20_000]);
    let mut kept = stream.zeros::<u32>(20_000).queued().expect("memory");
    let count = stream.copy_if(&x, Compare::Less(2), &mut kept).synchronize().expect("a count");
    stream.sort(&mut x).queued().expect("a sort");
    assert_eq!(stream.sum(&x).synchronize().expect("a sum"), count as u64);
}
