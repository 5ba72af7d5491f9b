//! Algorithms behind gates: what they wait for, and that the host waits for none of it. Apart from the other tests of
//! algorithms, because those load kernels, which waits for all gates of a process on a GPU.

use futures::executor::block_on;
use gpu_await::testing::Gate;
use gpu_await::{DeviceBuffer, DeviceKind, Stream, join_all};
use gpu_await_algorithms::{
    AlgorithmFamily, Algorithms, Compare, Preload, ReduceOp, Sequence, SequenceMut, transform,
};

use crate::under_test::alone;

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

/// A kernel that starts while the one before it ends waits for what that writes, and what is behind it for both.
#[test]
fn each_waits_for_what_is_before_it() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    // On a host device they are one after the other anyway.
    let (lengths, rounds): (&[usize], u32) = match device.kind() {
        DeviceKind::Host => (&[1, 1_000], 20),
        _ => (&[1, 1_000, 20_000, 1_000_003], 200),
    };
    for &n in lengths {
        let mut all = [(); 4].map(|()| stream.empty::<u32>(n).queued().expect("memory"));
        let [x, y, scanned, sorted] = &mut all;
        let (mut sums, mut greatest, mut sorted_sums) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..rounds {
            stream.fill(x, round).queued().expect("a fill");
            stream.transform(transform!(|x| x + 1), (&*x,), &mut *y).queued().expect("a transform");
            sums.push(stream.sum(y));
            stream.inclusive_scan(y, ReduceOp::Sum, scanned).queued().expect("a scan");
            greatest.push(stream.max(&scanned.slice(n - 1..).expect("the last")));
            stream.copy(y, sorted).queued().expect("a copy");
            stream.sort(sorted).queued().expect("a sort");
            sorted_sums.push(stream.sum(sorted));
            // Too early, it would be seen in what was read above.
            stream.fill(y, u32::MAX).queued().expect("a fill");
        }
        let (sums, sorted_sums) =
            (join_all(sums).synchronize(), join_all(sorted_sums).synchronize());
        let expected: Vec<u64> = (1..=u64::from(rounds)).map(|each| each * n as u64).collect();
        assert_eq!(sums.expect("sums"), expected, "{n} elements");
        assert_eq!(sorted_sums.expect("sums"), expected, "{n} elements, sorted");
        let greatest = join_all(greatest).synchronize().expect("values");
        for (greatest, sum) in greatest.iter().zip(&expected) {
            assert_eq!(*greatest, *sum as u32, "{n} elements, scanned");
        }
    }
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
