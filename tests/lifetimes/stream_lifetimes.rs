//! How long a stream lives: until its last handle is gone and its work is complete, and no longer.
//!
//! Streams that come and go are what a service makes of requests; the weights that they read stay.

use std::future::Future;
use std::sync::{Arc, mpsc};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, FaultHandle, Gate};
use gpu_await::{
    Completion, Device, DeviceKind, Event, Grid, InOut, Kernel, LaunchConfig, Op, Result, Stream,
};

use crate::under_test::host_threads::threads_of_host;

const SOON: Duration = Duration::from_secs(10);
const MANY: usize = 300;

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < end, "{what}: not within {SOON:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The threads that run a host device's streams; 0 for a GPU.
fn workers(device: &Device) -> usize {
    if device.kind() == DeviceKind::Host { threads_of_host(device.ordinal()) } else { 0 }
}

/// A device that has made what it makes with its first streams and keeps: doorbells. And the driver has room for all
/// streams of a test: making more of it waits for the kernels that run, a gate among them.
fn device() -> Device {
    warm(testing::device())
}

fn warm(device: Device) -> Device {
    let streams = if device.kind() == DeviceKind::Cuda { 120 } else { 20 };
    drop((0..streams).map(|_| device.stream()).collect::<Vec<_>>());
    device
}

/// Streams of the device, and threads for them.
fn alive(device: &Device) -> (usize, usize) {
    (device.stats().streams, workers(device))
}

/// Whether no more is alive than before; but for threads that did not have their names yet, then.
fn are_gone(device: &Device, (streams, workers): (usize, usize)) -> bool {
    let now = alive(device);
    now.0 <= streams && now.1 <= workers + 20
}

/// Makes `MANY` streams, does `with` on each and drops it; they go while what they used stays.
async fn come_and_go(device: &Device, what: &str, mut with: impl AsyncFnMut(Stream)) {
    // The first makes what its like share.
    with(device.stream().unwrap()).await;
    device.done().await.unwrap();
    eventually(what, || alive(device).0 <= 2).await;
    let before = alive(device);
    for _ in 0..MANY {
        with(device.stream().unwrap()).await;
    }
    eventually(what, || are_gone(device, before)).await;
}

#[tokio::test]
async fn readers_that_go_leave_no_stream() {
    let device = device();
    let x = device.full(1000, 7u32).await.unwrap();
    come_and_go(&device, "readers", async |stream| {
        assert_eq!(soon(stream.download(&x)).await.unwrap()[999], 7);
    })
    .await;
}

#[tokio::test]
async fn writers_that_go_leave_no_stream() {
    let device = device();
    let mut x = device.full(1000, 7u32).await.unwrap();
    come_and_go(&device, "writers", async |stream| {
        soon(stream.fill(&mut x, 8)).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn users_of_views_that_go_leave_no_stream() {
    let device = device();
    let mut x = device.full(1000, 7u32).await.unwrap();
    let mut at = 0;
    come_and_go(&device, "views", async |stream| {
        at = (at + 7) % 900;
        soon(stream.fill(&mut x.slice_mut(at..at + 5).unwrap(), 8)).await.unwrap();
        soon(stream.download(&x.slice(at + 3..at + 50).unwrap())).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn readers_of_frozen_memory_leave_no_stream() {
    let device = device();
    let x = device.full(1000, 7u32).await.unwrap().freeze().await.unwrap();
    come_and_go(&device, "frozen", async |stream| {
        soon(stream.download(&x)).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn readers_on_a_peer_leave_no_stream() {
    let (device, peer) = (device(), warm(testing::peer_device()));
    let x = device.full(1000, 7u32).await.unwrap();
    let frozen = device.full(1000, 8u32).await.unwrap().freeze().await.unwrap();
    let mut y = peer.zeros::<u32>(1000).await.unwrap();
    come_and_go(&peer, "a peer's", async |stream| {
        soon(stream.copy(&x, &mut y)).await.unwrap();
        soon(stream.copy(&frozen, &mut y)).await.unwrap();
    })
    .await;
}

/// What was made on a stream stays, and is freed without it.
#[tokio::test]
async fn buffers_keep_no_stream() {
    let device = device();
    let before = alive(&device);
    let mut buffers = Vec::new();
    for number in 0..50u32 {
        let stream = device.stream().unwrap();
        buffers.push(soon(stream.full(1000, number)).await.unwrap());
    }
    eventually("their streams", || are_gone(&device, before)).await;
    for (number, buffer) in (0u32..).zip(&buffers) {
        assert_eq!(soon(device.download(buffer)).await.unwrap()[999], number);
    }
    drop(buffers);
    eventually("their memory", || {
        let stats = device.stats();
        stats.allocations == 0 && stats.pending_bytes == 0
    })
    .await;
}

/// Nobody awaits them: the poller finds out that they are complete.
#[tokio::test]
async fn readers_that_nobody_awaits_leave_no_stream() {
    let device = device();
    let x = device.full(1000, 7u32).await.unwrap();
    come_and_go(&device, "not awaited", async |stream| {
        stream.download(&x).abandon();
    })
    .await;
}

/// The poller has no quiet moment in which it lets go of everything.
#[tokio::test]
async fn streams_go_while_another_one_is_waited_for() {
    let device = device();
    let x = device.full(1000, 7u32).await.unwrap();
    let held = device.stream().unwrap();
    let gate = Gate::close(&held).unwrap();
    let mut behind = held.done();
    assert!((&mut behind).now_or_never().is_none());
    let before = alive(&device);
    for _ in 0..50 {
        let stream = device.stream().unwrap();
        soon(stream.download(&x)).await.unwrap();
        stream.download(&x).abandon();
    }
    eventually("beside a wait", || are_gone(&device, before)).await;
    assert!((&mut behind).now_or_never().is_none());
    gate.open();
    soon(behind).await.unwrap();
}

/// Events and futures say that their point is complete; they need no stream for that.
#[tokio::test]
async fn complete_points_keep_no_stream() {
    let device = device();
    let (mut events, mut ops): (Vec<Event>, Vec<Op<()>>) = (Vec::new(), Vec::new());
    let before = alive(&device);
    for _ in 0..50 {
        let stream = device.stream().unwrap();
        events.push(stream.record_timed().unwrap());
        ops.push(stream.host_fn(|| ()));
        // Leaked after it was polled.
        let mut leaked = stream.done();
        drop((&mut leaked).now_or_never());
        std::mem::forget(leaked);
        soon(stream.done()).await.unwrap();
    }
    eventually("points", || are_gone(&device, before)).await;
    for event in &events {
        assert!(event.is_complete());
        soon(event.done()).await.unwrap();
        device.default_stream().wait(event).queued().unwrap();
        assert!(event.elapsed_since(&events[0]).is_ok());
    }
    for op in ops {
        assert!(op.is_complete());
        soon(op).await.unwrap();
    }
}

/// Dropped with work pending, awaited or not, the streams go when that is complete.
#[tokio::test]
async fn pending_points_of_dropped_streams_resolve() {
    let device = device();
    let before = alive(&device);
    let mut points = Vec::new();
    let mut gates = Vec::new();
    for round in 0..3 {
        let stream = device.stream().unwrap();
        gates.push(Gate::close(&stream).unwrap());
        let mut op = stream.host_fn(|| ());
        if round % 2 == 0 {
            assert!((&mut op).now_or_never().is_none());
        }
        let mut event = stream.record().unwrap().done();
        assert!((&mut event).now_or_never().is_none());
        points.push((op, event));
    }
    for (op, event) in &mut points {
        assert!(op.now_or_never().is_none() && event.now_or_never().is_none());
    }
    drop(gates);
    for (op, event) in points {
        soon(op).await.unwrap();
        soon(event).await.unwrap();
    }
    eventually("the streams", || are_gone(&device, before)).await;
}

#[tokio::test]
async fn the_owner_of_an_adopted_stream_goes_before_what_it_read() -> Result<()> {
    struct Owner(mpsc::Sender<()>, #[expect(dead_code, reason = "kept")] Stream);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.send(()).ok();
        }
    }
    let device = device();
    let mut x = device.full(1000, 7u32).await?;
    let before = alive(&device);
    for pending in [false, true] {
        let theirs = device.stream()?;
        let (sender, dropped) = mpsc::channel();
        // SAFETY: the owner keeps the stream, and nobody captures it.
        let handle = unsafe { theirs.as_raw() };
        let owner = Owner(sender, theirs);
        // SAFETY: as above.
        let adopted = unsafe { Stream::from_raw(&device, handle, owner) }?;
        soon(adopted.download(&x)).await?;
        let gate = if pending { Some(Gate::close(&adopted)?) } else { None };
        adopted.fill(&mut x, 8).queued()?;
        if let Some(gate) = gate {
            drop(adopted);
            assert!(dropped.try_recv().is_err(), "its work is pending");
            gate.open();
        } else {
            soon(adopted.done()).await?;
            drop(adopted);
        }
        dropped.recv_timeout(SOON).expect("nobody needs it any more");
    }
    eventually("theirs", || are_gone(&device, before)).await;
    assert_eq!(soon(device.download(&x)).await?[999], 8);
    Ok(())
}

/// A device that only read another one's memory goes, while that memory stays.
#[tokio::test]
async fn a_device_goes_before_what_it_read() {
    fn made_and_gone(handle: &FaultHandle) -> (usize, usize) {
        let calls = handle.calls();
        let count = |name| calls.iter().filter(|call| **call == name).count();
        (count("stream_create"), count("stream_destroy"))
    }
    let device = Device::host();
    let x = device.full(1000, 7u32).await.unwrap();
    let (faults, handle) = testing::faults();
    handle.record();
    let reader = testing::host_with(faults);
    let stream = reader.stream().unwrap();
    let mut y = stream.zeros::<u32>(1000).queued().unwrap();
    soon(stream.copy(&x, &mut y)).await.unwrap();
    drop((y, stream, reader));
    eventually("its streams", || {
        let (made, gone) = made_and_gone(&handle);
        made == gone
    })
    .await;
    assert_eq!(soon(device.download(&x)).await.unwrap()[0], 7);
}

/// And one whose memory another one reads stays until that is through, whatever was dropped.
#[tokio::test]
async fn a_device_stays_while_another_one_reads_it() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let x = soon(device.full(1000, 7u32)).await.unwrap();
    let reader = testing::device();
    if reader.kind() != DeviceKind::Host {
        return;
    }
    let stream = reader.stream().unwrap();
    let mut y = stream.zeros::<u32>(1000).queued().unwrap();
    let gate = Gate::close(&stream).unwrap();
    handle.record();
    let copy = stream.copy(&x, &mut y);
    drop((x, device));
    let freed = || handle.calls().contains(&"free");
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(!freed(), "it is still to be read");
    }
    gate.open();
    soon(copy).await.unwrap();
    assert_eq!(soon(stream.download(&y)).await.unwrap()[999], 7);
    eventually("the memory", freed).await;
    eventually("the device", || handle.calls().contains(&"stream_destroy")).await;
}

/// Its handles are gone, and nobody awaits anything of it: what it does is ordered all the same.
#[tokio::test]
async fn a_dropped_stream_orders_what_comes_behind() {
    let device = device();
    let mut x = device.full(1000, 7u32).await.unwrap();
    let y = device.full(1000, 5u32).await.unwrap();
    let before = alive(&device);
    let stream = device.stream().unwrap();
    let gate = Gate::close(&stream).unwrap();
    stream.fill(&mut x, 8).abandon();
    stream.download(&y).abandon();
    drop(stream);
    for round in 0..3 {
        // The poller looks at it again and again.
        tokio::time::sleep(Duration::from_millis(3)).await;
        assert!(device.stats().in_flight > 0, "round {round}");
        let next = device.stream().unwrap();
        next.fill(&mut x.slice_mut(round..round + 1).unwrap(), 9).abandon();
        assert!(!next.is_idle(), "round {round}");
    }
    let mut read = device.download(&x);
    assert!((&mut read).now_or_never().is_none());
    gate.open();
    let read = soon(read).await.unwrap();
    assert_eq!(read[..4], [9, 9, 9, 8]);
    assert!(!gate.timed_out());
    eventually("the streams", || are_gone(&device, before)).await;
}

/// Whatever runs first, of what may.
#[test]
fn a_dropped_stream_orders_what_comes_behind_stepped() {
    for choose in 0..4 {
        let (device, step) = testing::manual();
        let mut x = device.full(4, 7u32).queued().unwrap();
        step.run_until_idle();
        let streams = device.stats().streams;
        let first = device.stream().unwrap();
        let opens = device.stream().unwrap();
        first.wait(&opens.host_fn(|| ())).queued().unwrap();
        first.fill(&mut x, 8).queued().unwrap();
        drop((first, opens));
        let second = device.stream().unwrap();
        second.fill(&mut x, 9).queued().unwrap();
        drop(second);
        let mut read = device.download(&x);
        while step.step(choose) {}
        step.run_until_idle();
        let read = (&mut read).now_or_never().expect("complete").unwrap();
        assert_eq!(read, [9; 4], "choosing {choose}");
        assert_eq!(device.stats().streams, streams, "choosing {choose}");
    }
}

#[test]
fn a_loss_resolves_points_of_dropped_streams() {
    let (faults, handle) = testing::faults();
    let (device, step) = testing::manual_with_faults(faults);
    let stream = device.stream().unwrap();
    let mut polled = stream.host_fn(|| ());
    assert!((&mut polled).now_or_never().is_none());
    let event = stream.record().unwrap();
    let fresh = stream.done();
    drop(stream);
    handle.lose_device("on purpose");
    step.run_until_idle();
    for op in [polled, fresh, event.done()] {
        let error = op.now_or_never().expect("a loss is told").unwrap_err();
        assert!(error.is_device_lost(), "{error}");
    }
    assert_eq!(device.stats().streams, 1, "the default stream");
}

/// Its work will never run: that is said, to futures and to whoever would have to come after it.
#[test]
fn points_that_nobody_steps_any_more_resolve() {
    let (device, step) = testing::manual();
    let mut x = device.full(4, 7u32).queued().unwrap();
    step.run_until_idle();
    let stream = device.stream().unwrap();
    let mut polled = stream.fill(&mut x, 8);
    assert!((&mut polled).now_or_never().is_none());
    let fresh = stream.done();
    drop(stream);
    drop(step);
    for op in [polled, fresh, device.fill(&mut x, 9)] {
        let error = op.now_or_never().expect("told").unwrap_err();
        assert_eq!(error.kind(), gpu_await::ErrorKind::Closed, "{error}");
    }
}

/// Its streams are there, and whoever waits for them: each is woken, and told.
#[test]
fn every_future_resolves_without_its_stepper() {
    for completion in
        [Completion::Adaptive, Completion::Event, Completion::Word, Completion::Callback]
    {
        let (device, step) = testing::manual_with(completion);
        let stream = device.stream().unwrap();
        let x = stream.full(4, 7u32).queued().unwrap();
        step.run_until_idle();
        let (mut download, mut done) = (stream.download(&x), device.done());
        let mut throttle = Box::pin(stream.throttle(0));
        let mut close = Box::pin(device.close(Duration::MAX));
        assert!((&mut done).now_or_never().is_none() && (&mut throttle).now_or_never().is_none());
        assert!((&mut close).now_or_never().is_none());
        let (sender, woken) = mpsc::channel();
        let waker = Waker::from(Arc::new(Told(sender)));
        let mut cx = Context::from_waker(&waker);
        // Whether it checks for itself or is registered: it is woken.
        assert!(download.poll_unpin(&mut cx).is_pending());
        woken.try_iter().count();
        drop(step);
        assert!(woken.try_recv().is_ok(), "{completion:?}");
        let refused = stream.zeros::<u8>(1);
        let told = [
            download.now_or_never().map(|result| result.map(drop)),
            done.now_or_never(),
            throttle.now_or_never(),
            close.now_or_never(),
            refused.now_or_never().map(|result| result.map(drop)),
        ];
        for (index, result) in told.into_iter().enumerate() {
            let error = result.unwrap_or_else(|| panic!("{index} is pending")).unwrap_err();
            assert_eq!(error.kind(), gpu_await::ErrorKind::Closed, "{index}: {error}");
        }
    }
}

struct Told(mpsc::Sender<()>);

impl Wake for Told {
    fn wake(self: Arc<Self>) {
        self.0.send(()).ok();
    }
}

/// What was lent at the loss stays mapped, and keeps neither device nor streams.
#[tokio::test]
async fn a_lost_device_leaves_no_threads() -> Result<()> {
    if testing::device().kind() != DeviceKind::Host {
        return Ok(()); // the loss of a GPU is the whole process's
    }
    for gated in [false, true] {
        let device = device();
        let ordinal = device.ordinal();
        let stream = device.stream()?;
        let x = stream.zeros::<u32>(1000).queued()?;
        let gate = gated.then(|| Gate::close(&device.stream()?)).transpose()?;
        let lost = stream.host_fn(|| ());
        let boom = Kernel::<(InOut<u32>,)>::host(&device, "boom", |_: &Grid, _: &mut [u32]| {
            panic!("on purpose")
        })?;
        let mut y = stream.zeros::<u32>(10).queued()?;
        let held = Gate::close(&stream)?;
        let op = stream.launch(&boom, LaunchConfig::new(1, 1), (&mut y,));
        // Behind the fault: its memory is lent when the device is lost.
        stream.download(&x).abandon();
        held.open();
        assert!(op.await.unwrap_err().is_device_lost());
        drop((lost, x, y, boom, stream, gate, held));
        drop(device);
        eventually("its threads have ended", || threads_of_host(ordinal) == 0).await;
    }
    Ok(())
}
