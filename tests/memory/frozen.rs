//! Buffers that nobody writes any more.

use std::pin::pin;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{Device, DeviceBuffer, ErrorDetail, ErrorKind, Frozen, Stream, Uses, kernels};

const SOON: Duration = Duration::from_secs(15);
const LEN: usize = 5000;
const BYTES: u64 = 4 * LEN as u64;

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

/// Waits until the device has given everything back.
async fn settled(device: &Device) {
    let back = async {
        loop {
            let stats = device.stats();
            if stats.lent_bytes + stats.pending_bytes + stats.allocations == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    if tokio::time::timeout(SOON, back).await.is_err() {
        panic!("never given back: {:?}", device.stats());
    }
}

/// Sees to it that memory is kept back, for as long as a poller would need to free it many times.
async fn stays_retired(device: &Device, what: &str) {
    stays_retired_until(device, what, Instant::now() + Gate::LIMIT).await;
}

/// Looks for a while, but not after `end`.
async fn stays_retired_until(device: &Device, what: &str, end: Instant) {
    for _ in 0..30 {
        let stats = device.stats();
        if Instant::now() >= end {
            return;
        }
        assert!(stats.pending_bytes >= BYTES, "{what}: freed early: {stats:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn weights(stream: &Stream) -> Frozen<f32> {
    soon(stream.full(LEN, 3.0f32).queued().unwrap().freeze()).await.unwrap()
}

#[tokio::test]
async fn a_frozen_buffer_is_ready_when_its_writers_are() {
    let device = testing::device();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let mut x = a.zeros::<f32>(LEN).await.unwrap();
    let gates = [Gate::close(&a).unwrap(), Gate::close(&b).unwrap()];
    let (mut left, mut right) = x.split_at_mut(100).unwrap();
    a.fill(&mut left, 1.0).queued().unwrap();
    b.fill(&mut right, 2.0).queued().unwrap();
    let mut frozen = x.freeze();
    let [first, second] = &gates;
    assert!((&mut frozen).now_or_never().is_none(), "both writers are held");
    first.open();
    let early = tokio::time::timeout(Duration::from_millis(50), &mut frozen).await;
    assert!(early.is_err(), "a writer is held");
    second.open();
    let frozen = soon(frozen).await.unwrap();
    assert!(!first.timed_out() && !second.timed_out());
    let back = device.stream().unwrap().download(&frozen).await.unwrap();
    assert_eq!((back[99], back[100]), (1.0, 2.0));
}

#[tokio::test]
async fn frozen_memory_is_read_like_a_buffer_by_every_stream() {
    let device = testing::device();
    let axpy = kernels::axpy::load(&device).await.unwrap();
    let stream = device.stream().unwrap();
    let frozen = weights(&stream).await;
    assert_eq!((frozen.len(), frozen.size_bytes(), frozen.is_empty()), (LEN, 4 * LEN, false));
    let tasks = (0..4).map(|n| {
        let (device, axpy, frozen) = (device.clone(), axpy.clone(), frozen.clone());
        tokio::spawn(async move {
            let stream = device.stream().unwrap();
            let mut y = stream.full(LEN, n as f32).queued().unwrap();
            axpy.launch(&stream, 2.0, &frozen, &mut y).queued().unwrap();
            assert_eq!(stream.download(&y).await.unwrap()[LEN - 1], n as f32 + 6.0);
            let part = frozen.slice(10..20).unwrap();
            assert_eq!(stream.download_vec(&part).await.unwrap(), [3.0; 10]);
            let bits = frozen.view().cast::<u32>().unwrap();
            assert_eq!(stream.download(&bits).await.unwrap()[0], 3.0f32.to_bits());
            let mut z = stream.empty::<f32>(LEN).queued().unwrap();
            stream.copy(&frozen, &mut z).queued().unwrap();
            assert_eq!(stream.download_staged(&z).await.unwrap()[7], 3.0);
            assert_eq!(stream.download_staged(&frozen).await.unwrap()[7], 3.0);
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        soon(task).await.unwrap();
    }
    assert_eq!(frozen.slice(10..LEN + 1).unwrap_err().kind(), ErrorKind::InvalidCall);
    drop(frozen);
    settled(&device).await;
}

#[tokio::test]
async fn what_cannot_be_read_cannot_be_frozen() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let x = stream.empty::<f32>(LEN).queued().unwrap();
    let error = x.freeze().await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");

    let axpy = kernels::axpy::load(&device).await.unwrap();
    let x = stream.zeros::<f32>(LEN).queued().unwrap();
    let mut y = stream.zeros::<f32>(LEN + 1).queued().unwrap();
    axpy.launch(&stream, 1.0, &x, &mut y).queued().unwrap_err();
    let error = y.freeze().await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");

    let none: DeviceBuffer<f32> = stream.empty(0).queued().unwrap();
    assert!(none.freeze().await.unwrap().is_empty());
    drop(x);
    settled(&device).await;
    let x = stream.zeros::<f32>(LEN).queued().unwrap();
    device.close(SOON).await.unwrap();
    assert_eq!(x.freeze().await.unwrap_err().kind(), ErrorKind::Closed);
}

#[tokio::test]
async fn a_frozen_buffer_outlives_the_reads_of_a_held_stream() {
    let device = testing::device();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let frozen = weights(&a).await;
    let clone = frozen.clone();
    let gate = Gate::close(&b).unwrap();
    let read = b.download(&frozen);
    drop(frozen);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(device.stats().pending_bytes, 0, "there is another handle");
    drop(clone);
    stays_retired(&device, "a held stream reads it").await;
    assert!(!gate.timed_out());
    gate.open();
    assert_eq!(soon(read).await.unwrap()[..], [3.0; LEN]);
    settled(&device).await;
}

#[tokio::test]
async fn a_frozen_buffer_outlives_the_reads_of_a_dropped_stream() {
    const HELD: Duration = Duration::from_secs(1);
    let device = testing::device();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let axpy = kernels::axpy::load(&device).await.unwrap();
    let spin = kernels::spin::load(&device).await.unwrap();
    let frozen = weights(&a).await;
    let streams = device.stats().streams;
    let end = Instant::now() + HELD;
    // Not a gate: its word is lent, and the stream would stay for that.
    spin.launch(&b, HELD.as_nanos() as u64).queued().unwrap();
    let mut y = b.empty::<f32>(LEN).queued().unwrap();
    b.copy(&frozen, &mut y).queued().unwrap();
    axpy.launch(&b, 1.0, &frozen, &mut y).queued().unwrap();
    // Its home, and its only user.
    drop(y);
    drop(b);
    assert_eq!(device.stats().streams, streams, "nobody has it any more, and its work goes on");
    drop(frozen);
    stays_retired_until(&device, "a dropped stream reads it", end).await;
    settled(&device).await;
    while device.stats().streams != streams - 1 {
        assert!(Instant::now() < end + SOON, "its work is complete: {:?}", device.stats());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(a.download(&weights(&a).await).await.unwrap()[1], 3.0);
}

#[tokio::test]
async fn a_frozen_buffer_outlives_the_reads_of_another_device() {
    let (device, other) = (testing::device(), testing::peer_device());
    device.enable_peer(&other).await.unwrap();
    other.enable_peer(&device).await.unwrap();
    let (s, t) = (device.stream().unwrap(), other.stream().unwrap());
    let frozen = weights(&s).await;
    let mut y = t.zeros::<f32>(LEN).await.unwrap();
    let gate = Gate::close(&t).unwrap();
    t.copy(&frozen, &mut y).queued().unwrap();
    drop(frozen);
    stays_retired(&device, "another device reads it").await;
    assert!(!gate.timed_out());
    gate.open();
    assert_eq!(soon(t.download(&y)).await.unwrap()[..], [3.0; LEN]);
    settled(&device).await;
}

#[tokio::test]
async fn a_freeze_that_nobody_awaits_gives_the_memory_back() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let gate = Gate::close(&stream).unwrap();
    drop(stream.full(LEN, 3.0f32).queued().unwrap().freeze());
    let mut polled = stream.full(LEN, 3.0f32).queued().unwrap().freeze();
    assert!((&mut polled).now_or_never().is_none());
    drop(polled);
    gate.open();
    settled(&device).await;
}

/// Work that nobody ends before `ended` was told.
fn held_work(stream: &Stream) -> Sender<()> {
    let (ended, is_ended) = channel();
    // SAFETY: it uses no memory.
    let work = unsafe {
        stream.enqueue(Uses::new("theirs"), move |queue, ()| {
            queue.host(move || is_ended.recv().unwrap_or_default())
        })
    };
    work.queued().expect("it is accepted");
    ended
}

/// Once a wait had to include later work; it shows that the host waits for the memory of that stream.
#[tokio::test]
async fn the_host_waits_for_no_work_behind_the_uses_of_memory() {
    // In each of those an event may be there by chance.
    const LEARNS: u32 = 30;
    let freezes = Device::host().stream().expect("a stream");
    let maps = Device::host().stream().expect("a stream");
    // No call of a library: before one that may take long an event is recorded.
    let behind = |stream: &Stream, learns: bool| {
        if learns {
            drop(stream.full(LEN, 0u32).queued().expect("it is accepted"));
        }
        (!learns).then(|| held_work(stream))
    };
    for round in 0..LEARNS + 3 {
        // None of the uses is complete when the host asks.
        let gate = Gate::close(&freezes).expect("a gate");
        let x = freezes.full(LEN, 7u32).queued().expect("it is accepted");
        let work = behind(&freezes, round < LEARNS);
        let frozen = x.freeze();
        gate.open();
        soon(frozen).await.expect("nobody waits for that work");
        drop(work);

        let mut y = maps.pinned::<u32>(LEN).expect("memory").into_mapped();
        let gate = Gate::close(&maps).expect("a gate");
        maps.fill(&mut y, round).queued().expect("it is accepted");
        let work = behind(&maps, round < LEARNS);
        {
            let mut host = pin!(y.host());
            assert!((&mut host).now_or_never().is_none());
            gate.open();
            let host = soon(host).await.expect("nobody waits for that work");
            assert_eq!(*host, [round; LEN]);
        }
        drop(work);
    }
}
