//! Work of other libraries as operations: what its closure may do, what is ordered, and what becomes of what it
//! uses when it fails, panics, or is not waited for.

use std::error::Error as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{
    Device, DeviceBuffer, DeviceKind, DlpackConsumer, ErrorDetail, ErrorKind, In, InOut, RawQueue,
    RawSlice, Readable, Region, Result, Stream, Uses, Writable, kernels,
};

use crate::SOON;
use crate::under_test::eventually::eventually;

const LEN: usize = 1000;

/// What the other library of these tests returns.
type Theirs = std::result::Result<(), TheirError>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TheirError(i32);

impl std::fmt::Display for TheirError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "their status {}", self.0)
    }
}

impl std::error::Error for TheirError {}

/// The other library's copy: by the driver on a GPU, by a twin on a host device.
fn their_copy(queue: &RawQueue<'_>, from: RawSlice<u8>, to: RawSlice<u8>) -> Theirs {
    if queue.kind() == DeviceKind::Host {
        let copy = move || {
            // SAFETY: the stream runs this in an operation that declared it as read.
            let from = unsafe { from.as_slice() };
            // SAFETY: likewise, as written.
            let to = unsafe { to.as_mut_slice() };
            to.copy_from_slice(from);
        };
        return queue.host(copy).map_err(|_| TheirError(-1));
    }
    let stream = queue.stream() as cudarc::driver::sys::CUstream;
    // SAFETY: live ranges of that length, and a live stream.
    let copied = unsafe {
        cudarc::driver::result::memcpy_dtod_async(to.address(), from.address(), to.len(), stream)
    };
    copied.map_err(|error| TheirError(error.0 as i32))
}

/// An operation of the other library.
fn copy(
    stream: &Stream,
    from: &impl Readable<u8>,
    to: &mut impl Writable<u8>,
) -> gpu_await::Op<()> {
    let uses = Uses::new("their copy").reads(from).writes(to);
    // SAFETY: the copy reads and writes what is declared, on the stream.
    unsafe { stream.enqueue(uses, |queue, (from, to)| their_copy(queue, from, to)) }
}

/// An operation of the other library that fails.
fn fail(stream: &Stream, from: &DeviceBuffer<u8>, to: &mut DeviceBuffer<u8>) -> gpu_await::Op<()> {
    let uses = Uses::new("their copy").reads(from).writes(to);
    // SAFETY: nothing is put on the stream.
    unsafe { stream.enqueue(uses, |_, _| Theirs::Err(TheirError(7))) }
}

fn setup() -> Result<(Device, Stream, DeviceBuffer<u8>, DeviceBuffer<u8>)> {
    let device = testing::device();
    let stream = device.stream()?;
    let (x, y) = (stream.full(LEN, 3u8).queued()?, stream.empty(LEN).queued()?);
    Ok((device, stream, x, y))
}

// ---- order --------------------------------------------------------------------------------------

#[tokio::test]
async fn ordered_by_what_is_declared() -> Result<()> {
    let (device, stream, mut x, mut y) = setup()?;
    let (producer, consumer) = (device.stream()?, device.stream()?);
    let gate = Gate::close(&producer)?;
    producer.fill(&mut x, 5).queued()?;
    let op = copy(&stream, &x, &mut y);
    let seen = consumer.download(&y);
    assert!(!op.is_complete() && !seen.is_complete());
    gate.open();
    assert_eq!(seen.await?, [5; LEN]);
    op.await?;
    assert!(!gate.timed_out());
    Ok(())
}

/// What each part uses is ordered, kept, and fails with the whole; there are more parts than a tuple has elements.
#[tokio::test]
async fn any_number_of_parts() -> Result<()> {
    const PARTS: usize = 20;
    let (device, stream, mut x, _) = setup()?;
    let (producer, consumer) = (device.stream()?, device.stream()?);
    let made: Result<Vec<_>> = (0..PARTS).map(|_| stream.zeros::<u8>(LEN).queued()).collect();
    let mut all = made?;
    let gate = Gate::close(&producer)?;
    producer.fill(&mut x, 5).queued()?;
    let (kept, dropped) = told();
    let mut uses = Uses::new("their copies").commands(PARTS as u32);
    let mut part = |y| uses.includes(Uses::new("a part").reads(&x).writes(y));
    let mut parts: Vec<_> = all.iter_mut().map(&mut part).collect();
    uses.includes(Uses::new("a value").keeps(kept));
    // SAFETY: the copies read and write what is declared, on the stream.
    let op = unsafe {
        stream.enqueue(uses, |queue, ()| {
            parts.drain(..).try_for_each(|(from, to)| their_copy(queue, from, to))
        })
    };
    let seen: Vec<_> = all.iter().map(|y| consumer.download(y)).collect();
    assert!(!op.is_complete() && seen.iter().all(|seen| !seen.is_complete()));
    assert!(dropped.try_recv().is_err());
    gate.open();
    for seen in seen {
        assert_eq!(seen.await?, [5; LEN]);
    }
    op.await?;
    dropped.recv_timeout(SOON).expect("it is dropped");
    let mut uses = Uses::new("their copies");
    for y in &mut all {
        uses.includes(Uses::new("a part").writes(y));
    }
    // SAFETY: nothing is put on the stream.
    let op = unsafe { stream.enqueue(uses, |_, ()| Theirs::Err(TheirError(7))) };
    assert_eq!(op.await.unwrap_err().kind(), ErrorKind::Foreign);
    for y in &all {
        let failed = consumer.download(y).await.unwrap_err();
        assert!(matches!(failed.detail(), ErrorDetail::Upstream { .. }), "{failed}");
    }
    assert!(!gate.timed_out());
    Ok(())
}

/// Two readers of one buffer, and writers of its halves, run side by side.
#[tokio::test]
async fn ordered_by_range() -> Result<()> {
    let (device, stream, x, mut y) = setup()?;
    let other = device.stream()?;
    let gate = Gate::close(&stream)?;
    let (mut left, mut right) = y.split_at_mut(LEN / 2)?;
    let held_up = copy(&stream, &x.slice(..LEN / 2)?, &mut left);
    copy(&other, &x.slice(LEN / 2..)?, &mut right).await?;
    assert!(!held_up.is_complete());
    gate.open();
    held_up.await
}

#[tokio::test]
async fn the_value_comes_when_the_work_is_complete() -> Result<()> {
    let (_device, stream, x, mut y) = setup()?;
    let gate = Gate::close(&stream)?;
    let uses = Uses::new("their copy").reads(&x).writes(&mut y);
    // SAFETY: as in `copy`.
    let mut op = unsafe {
        stream.enqueue(uses, |queue, (from, to)| their_copy(queue, from, to).map(|()| to.len()))
    };
    assert!(op.try_take().is_none());
    gate.open();
    assert_eq!(op.await?, LEN);
    Ok(())
}

#[tokio::test]
async fn in_a_batch_and_on_a_device() -> Result<()> {
    let (device, stream, x, mut y) = setup()?;
    let host = stream
        .batch(|q| {
            let uses = Uses::new("their copy").reads(&x).writes(&mut y);
            // SAFETY: as in `copy`.
            unsafe { q.enqueue(uses, |queue, (from, to)| their_copy(queue, from, to)) }?;
            q.download(&y)
        })
        .await?;
    assert_eq!(host, [3; LEN]);
    let mut z = stream.empty(LEN).queued()?;
    let uses = Uses::new("their copy").reads(&y).writes(&mut z);
    // SAFETY: as in `copy`.
    unsafe { device.enqueue(uses, |queue, (from, to)| their_copy(queue, from, to)) }.queued()?;
    assert_eq!(device.default_stream().submitted(), 1);
    assert_eq!(stream.download(&z).await?, [3; LEN]);
    Ok(())
}

// ---- addresses ----------------------------------------------------------------------------------

#[tokio::test]
async fn the_closure_gets_what_device_ptr_says() -> Result<()> {
    let (device, stream, x, mut y) = setup()?;
    let frozen = stream.full(10, 1u16).queued()?.freeze().await?;
    let base = x.device_ptr();
    assert_eq!(x.slice(100..)?.device_ptr(), base + 100);
    assert_eq!(x.slice(100..)?.slice(4..)?.cast::<u32>()?.device_ptr(), base + 104);
    assert_eq!(y.slice_mut(8..)?.device_ptr(), y.device_ptr() + 8);
    let pinned = stream.pinned::<f32>(16)?;
    let expected = [
        base + 100,
        y.device_ptr(),
        frozen.device_ptr(),
        frozen.device_ptr() + 4,
        pinned.device_ptr(),
    ];
    let view = x.slice(100..200)?;
    let words = frozen.slice(2..4)?;
    let uses =
        Uses::new("look").reads(&view).writes(&mut y).reads(&frozen).reads(&words).lends(&pinned);
    // SAFETY: nothing is put on the stream, and nobody reads `y`.
    let op = unsafe {
        stream.enqueue(uses.commands(0), |queue, (x, y, all, part, pinned)| {
            let seen = [x.address(), y.address(), all.address(), part.address(), pinned.address()];
            let lens = [x.len(), y.len(), all.len(), part.size_bytes(), pinned.len()];
            assert_eq!((seen, lens), (expected, [100, LEN, 10, 4, 16]));
            assert!(!x.is_empty());
            Ok::<_, TheirError>((queue.stream(), queue.context(), queue.ordinal()))
        })
    };
    let (handle, context, ordinal) = op.await?;
    // SAFETY: only looked at.
    assert_eq!((handle, ordinal), (unsafe { stream.as_raw() }, device.ordinal()));
    assert_eq!(context != 0, device.kind() == DeviceKind::Cuda);
    Ok(())
}

/// What the device reads under the device address is what the host wrote, and it stays although the buffer
/// and the future are gone.
#[tokio::test]
async fn lent_pinned_memory() -> Result<()> {
    let (_device, stream, _, mut y) = setup()?;
    let mut pinned = stream.pinned::<u8>(LEN)?;
    pinned.fill(9);
    let gate = Gate::close(&stream)?;
    let uses = Uses::new("their copy").lends(&pinned).writes(&mut y);
    // SAFETY: as in `copy`; nobody writes the pinned memory.
    let op = unsafe { stream.enqueue(uses, |queue, (from, to)| their_copy(queue, from, to)) };
    drop(op);
    drop(pinned);
    // It is not what the pool gives to the next.
    let mut next = stream.pinned::<u8>(LEN)?;
    next.fill(1);
    gate.open();
    assert_eq!(stream.download(&y).await?, [9; LEN]);
    Ok(())
}

// ---- failures -----------------------------------------------------------------------------------

#[tokio::test]
async fn an_error_is_the_source_of_ours() -> Result<()> {
    let (device, stream, x, mut y) = setup()?;
    let error = fail(&stream, &x, &mut y).await.unwrap_err();
    assert_eq!((error.kind(), error.is_device_lost()), (ErrorKind::Foreign, false));
    let theirs = error.source().and_then(|source| source.downcast_ref::<TheirError>());
    assert_eq!(theirs, Some(&TheirError(7)));
    assert_eq!(error.detail().to_string(), "their copy: their status 7");
    // Readers of what it would have written fail, on every stream; readers of what it read do not.
    let other = device.stream()?;
    let failed = other.download(&y).await.unwrap_err();
    assert!(matches!(failed.detail(), ErrorDetail::Upstream { .. }), "{failed}");
    assert_eq!(failed.kind(), ErrorKind::Foreign);
    assert_eq!(other.download(&x).await?, [3; LEN]);
    // What overwrites it heals it.
    copy(&stream, &x, &mut y).queued()?;
    assert_eq!(other.download(&y).await?, [3; LEN]);
    Ok(())
}

#[test]
fn an_error_of_ours_stays_as_it_is() -> Result<()> {
    let (_device, stream, x, _) = setup()?;
    // SAFETY: nothing is put on the stream.
    let op = unsafe {
        stream.enqueue(Uses::new("cut").reads(&x), |_, _| {
            Err::<(), _>(x.slice(LEN + 1..).unwrap_err())
        })
    };
    let error = op.queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::OutOfBounds { .. }), "{error}");
    Ok(())
}

#[tokio::test]
async fn a_text_is_an_error_as_well() -> Result<()> {
    let (_device, stream, ..) = setup()?;
    // SAFETY: nothing is put on the stream.
    let op = unsafe { stream.enqueue(Uses::new("plan"), |_, ()| Err::<(), _>("no such plan")) };
    let error = op.await.unwrap_err();
    assert_eq!(error.detail().to_string(), "plan: no such plan");
    Ok(())
}

#[tokio::test]
async fn a_panic_goes_on_after_the_unlock() -> Result<()> {
    let (_device, stream, x, mut y) = setup()?;
    let uses = Uses::new("their copy").reads(&x).writes(&mut y);
    // SAFETY: nothing is put on the stream.
    let run = || unsafe { stream.enqueue(uses, |_, _| -> Theirs { panic!("out of patience") }) };
    let payload = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"out of patience"));
    let failed = stream.download(&y).await.unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Panicked);
    assert!(failed.to_string().contains("out of patience"), "{failed}");
    copy(&stream, &x, &mut y).queued()?;
    assert_eq!(stream.download(&y).await?, [3; LEN]);
    Ok(())
}

#[tokio::test]
async fn a_refused_call_calls_nothing() -> Result<()> {
    let (device, stream, x, mut y) = setup()?;
    let other = testing::peer_device();
    let theirs = other.stream()?.full(LEN, 1u8).await?;
    let error = copy(&stream, &theirs, &mut y).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    // It would have been written.
    assert_eq!(
        copy(&stream, &y, &mut stream.empty(LEN).queued()?).await.unwrap_err().kind(),
        ErrorKind::InvalidCall
    );
    let unwritten = stream.empty(LEN).queued()?;
    let never = |_: &RawQueue<'_>, _: (RawSlice<u8>,)| -> Theirs { unreachable!("it is refused") };
    let kept = Arc::new(());
    // SAFETY: it is never called.
    let op =
        unsafe { stream.enqueue(Uses::new("read").reads(&unwritten).keeps(kept.clone()), never) };
    let error = op.await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    assert_eq!(Arc::strong_count(&kept), 1);
    device.close(SOON).await?;
    // SAFETY: it is never called.
    let op = unsafe { stream.enqueue(Uses::new("read").reads(&x), never) };
    assert_eq!(op.await.unwrap_err().kind(), ErrorKind::Closed);
    Ok(())
}

#[tokio::test]
async fn a_twin_that_panics_loses_the_device() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let x = stream.full(LEN, 3u8).queued()?;
    // SAFETY: it touches nothing.
    let op = unsafe {
        stream.enqueue(Uses::new("crash").reads(&x), |queue, _| queue.host(|| panic!("a fault")))
    };
    let error = op.await.unwrap_err();
    assert!(error.is_device_lost() && error.to_string().contains("a fault"), "{error}");
    assert!(error.to_string().contains("crash"), "it names the operation: {error}");
    Ok(())
}

/// The other library notices first: the operation's error is the loss all the same.
#[tokio::test]
async fn a_loss_is_told_as_the_loss() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let (x, mut y) = (stream.full(LEN, 3u8).queued()?, stream.empty::<u8>(LEN).queued()?);
    stream.done().await?;
    let uses = Uses::new("their copy").reads(&x).writes(&mut y);
    // SAFETY: nothing is put on the stream.
    let op = unsafe {
        stream.enqueue(uses, |_, _| {
            handle.lose_device("unplugged");
            Theirs::Err(TheirError(13))
        })
    };
    assert!(op.await.unwrap_err().is_device_lost());
    Ok(())
}

#[tokio::test]
async fn a_driver_that_refuses_the_bracket() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let (x, mut y) = (stream.full(LEN, 3u8).queued()?, stream.empty::<u8>(LEN).queued()?);
    for after_effect in [false, true] {
        match after_effect {
            true => handle.fail_nth_after_effect(DriverCall::Foreign, 1, ErrorKind::Driver),
            false => handle.fail_nth(DriverCall::Foreign, 1, ErrorKind::Driver),
        }
        let error = copy(&stream, &x, &mut y).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Driver);
        assert!(stream.download(&y).await.is_err());
    }
    copy(&stream, &x, &mut y).await?;
    assert_eq!(stream.download(&y).await?, [3; LEN]);
    Ok(())
}

// ---- what is kept -------------------------------------------------------------------------------

/// Tells, when it is dropped, on which thread.
struct Told(Sender<Option<String>>);

impl Drop for Told {
    fn drop(&mut self) {
        self.0.send(std::thread::current().name().map(str::to_owned)).ok();
    }
}

fn told() -> (Told, Receiver<Option<String>>) {
    let (sender, receiver) = channel();
    (Told(sender), receiver)
}

#[tokio::test]
async fn kept_until_complete() -> Result<()> {
    let (_device, stream, x, mut y) = setup()?;
    let (kept, dropped) = told();
    let gate = Gate::close(&stream)?;
    let uses = Uses::new("their copy").reads(&x).writes(&mut y).keeps(kept);
    // SAFETY: as in `copy`.
    let op = unsafe { stream.enqueue(uses, |queue, (from, to)| their_copy(queue, from, to)) };
    drop((op, x, y));
    stream.wait(&stream).queued()?;
    assert!(dropped.try_recv().is_err());
    gate.open();
    let thread = dropped.recv_timeout(SOON).expect("it is dropped");
    assert_eq!(thread.as_deref(), Some("gpu-await-reaper"));
    Ok(())
}

#[tokio::test]
async fn kept_after_an_error() -> Result<()> {
    let (_device, stream, ..) = setup()?;
    let gate = Gate::close(&stream)?;
    let (kept, dropped) = told();
    // SAFETY: nothing is put on the stream.
    let op = unsafe {
        stream.enqueue(Uses::new("plan").keeps(kept), |_, ()| Theirs::Err(TheirError(1)))
    };
    assert_eq!(op.await.unwrap_err().kind(), ErrorKind::Foreign);
    assert!(dropped.try_recv().is_err(), "a part may be on the stream");
    gate.open();
    dropped.recv_timeout(SOON).expect("it is dropped");
    Ok(())
}

#[tokio::test]
async fn kept_until_the_device_is_lost() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let gate = Gate::close(&stream)?;
    let (kept, dropped) = told();
    // SAFETY: nothing is put on the stream.
    let op = unsafe { stream.enqueue(Uses::new("plan").keeps(kept), |_, ()| Theirs::Ok(())) };
    handle.lose_device("unplugged");
    assert!(op.await.unwrap_err().is_device_lost());
    assert_eq!(device.stats().unreturned, 0);
    gate.open();
    // A host device's commands may use it until the device is gone.
    drop((stream, device, gate));
    dropped.recv_timeout(SOON).expect("it is dropped");
    Ok(())
}

// ---- inside the closure -------------------------------------------------------------------------

#[tokio::test]
async fn whatever_submits_inside_is_refused() -> Result<()> {
    let (device, stream, x, mut y) = setup()?;
    let other = device.stream()?;
    let refused = |error: gpu_await::Error| {
        let text = error.to_string();
        assert!(matches!(error.detail(), ErrorDetail::WrongThread { .. }), "{text}");
        assert!(text.contains("inside the closure of `enqueue`"), "{text}");
    };
    let uses = Uses::new("their copy").reads(&x).writes(&mut y);
    let call = |queue: &RawQueue<'_>, (from, to): (RawSlice<u8>, RawSlice<u8>)| {
        refused(stream.zeros::<u8>(10).queued().unwrap_err());
        refused(other.zeros::<u8>(10).queued().unwrap_err());
        refused(other.synchronize().unwrap_err());
        refused(device.stream().unwrap_err());
        refused(other.record_timed().unwrap_err());
        // SAFETY: it is not called.
        let inner = unsafe { other.enqueue(Uses::new("inner"), |_, ()| Theirs::Ok(())) };
        refused(inner.queued().unwrap_err());
        their_copy(queue, from, to)
    };
    // SAFETY: as in `copy`.
    unsafe { stream.enqueue(uses, call) }.await?;
    // The thread is as before.
    assert_eq!(other.download(&y).await?, [3; LEN]);
    Ok(())
}

#[tokio::test]
async fn drops_inside_the_closure_only_enqueue() -> Result<()> {
    let (device, stream, x, _) = setup()?;
    let crossed = stream.full(LEN, 1u8).queued()?;
    let (other, lone) = (device.stream()?, device.stream()?);
    other.download(&crossed).abandon();
    let event = stream.record()?;
    let garbage =
        (crossed, stream.full(LEN, 2u8).queued()?, stream.done(), other.download(&x), event, lone);
    // SAFETY: nothing is put on the stream.
    let op = unsafe {
        stream.enqueue(Uses::new("drop").reads(&x), move |_, _| {
            drop(garbage);
            Theirs::Ok(())
        })
    };
    op.await?;
    drop((x, other));
    eventually("all of it is freed", || {
        stream.zeros::<u8>(1).abandon();
        device.memory().is_ok_and(|memory| memory.pending_bytes == 0)
    });
    Ok(())
}

/// Nobody else waits for a closure that takes its time.
#[test]
fn a_slow_closure_holds_up_nobody_else() -> Result<()> {
    let (device, stream, x, mut y) = setup()?;
    let other = device.stream()?;
    let (entered, inside) = channel();
    let (leave, left) = channel::<()>();
    std::thread::scope(|threads| {
        let slow = threads.spawn({
            let (stream, x) = (&stream, &x);
            move || {
                let uses = Uses::new("their copy").reads(x).writes(&mut y);
                // SAFETY: as in `copy`.
                let op = unsafe {
                    stream.enqueue(uses, |queue, (from, to)| {
                        entered.send(()).unwrap();
                        left.recv_timeout(SOON).expect("nobody hangs");
                        their_copy(queue, from, to)
                    })
                };
                op.synchronize()
            }
        });
        inside.recv_timeout(SOON).expect("it runs");
        other.wait(&stream).synchronize()?;
        other.download(&x).synchronize()?;
        stream.record()?.synchronize()?;
        device.done().synchronize()?;
        stream.scope_sync(|| ());
        assert!(stream.completed() > 0);
        leave.send(()).unwrap();
        slow.join().unwrap()
    })
}

/// The closure runs on the caller's thread: its work counts as submitted when the device is closed meanwhile.
#[test]
fn close_waits_for_what_is_being_enqueued() -> Result<()> {
    for round in 0..20 {
        let (device, stream, _, mut to) = setup()?;
        let ran = Arc::new(AtomicBool::new(false));
        let is_host = device.kind() == DeviceKind::Host;
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (go_on, may_go_on) = std::sync::mpsc::channel::<()>();
        let submitter = std::thread::spawn({
            let (stream, ran) = (stream.clone(), ran.clone());
            move || {
                let uses = Uses::new("late").writes(&mut to);
                let call = |queue: &RawQueue<'_>, (_to,): (RawSlice<u8>,)| {
                    begun.send(()).unwrap();
                    may_go_on.recv().unwrap();
                    if is_host {
                        return queue.host(move || ran.store(true, Ordering::SeqCst));
                    }
                    ran.store(true, Ordering::SeqCst);
                    Ok(())
                };
                // SAFETY: nothing touches the memory.
                unsafe { stream.enqueue(uses, call) }.submitted()
            }
        });
        has_begun.recv().unwrap();
        let mut close = Box::pin(device.close(SOON));
        if round == 0 {
            let early = futures::executor::block_on(device.close(Duration::from_millis(20)));
            assert_eq!(early.unwrap_err().kind(), ErrorKind::TimedOut);
        }
        assert!((&mut close).now_or_never().is_none(), "it has begun");
        go_on.send(()).unwrap();
        futures::executor::block_on(close)?;
        assert!(ran.load(Ordering::SeqCst), "close returned before it ran");
        futures::executor::block_on(submitter.join().unwrap()?)?;
        assert_eq!(stream.zeros::<u8>(1).queued().unwrap_err().kind(), ErrorKind::Closed);
    }
    Ok(())
}

// ---- failures of the run ------------------------------------------------------------------------

/// An operation of the other library whose function fails when the stream of a host device runs it.
fn fail_late(stream: &Stream, to: &mut impl Writable<u8>) -> gpu_await::Op<()> {
    let uses = Uses::new("their run").updates(to);
    // SAFETY: nothing is written.
    unsafe { stream.enqueue(uses, |queue, _| queue.try_host(|| Theirs::Err(TheirError(5)))) }
}

fn their_error(error: &gpu_await::Error) -> Option<&TheirError> {
    let mut source = error.source();
    while let Some(theirs) = source {
        if let Some(theirs) = theirs.downcast_ref() {
            return Some(theirs);
        }
        source = theirs.source();
    }
    None
}

fn assert_upstream(error: &gpu_await::Error) {
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    assert_eq!(their_error(error), Some(&TheirError(5)), "{error}");
}

#[tokio::test]
async fn a_late_failure_is_the_operations() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    for round in 0..200 {
        // Behind the call, or at any time.
        let gate = (round % 2 == 0).then(|| Gate::close(&stream)).transpose()?;
        let op = fail_late(&stream, &mut y);
        drop(gate);
        let error = op.await.unwrap_err();
        assert_eq!((error.kind(), their_error(&error)), (ErrorKind::Foreign, Some(&TheirError(5))));
        assert_eq!(error.detail().to_string(), "their run: their status 5");
        assert_upstream(&stream.download(&y).await.unwrap_err());
        stream.fill(&mut y, 1).queued()?;
        assert_eq!(stream.download(&y).await?, [1; LEN]);
    }
    // One that succeeds changes nothing, and its value comes.
    let uses = Uses::new("their run").writes(&mut y);
    let good = |queue: &RawQueue<'_>, (y,): (RawSlice<u8>,)| {
        queue.try_host(move || {
            // SAFETY: the stream runs this in an operation that declared it as written.
            unsafe { y.as_mut_slice() }.fill(4);
            Theirs::Ok(())
        })?;
        Ok::<_, gpu_await::Error>(7)
    };
    // SAFETY: what is declared is written.
    assert_eq!(unsafe { stream.enqueue(uses, good) }.await?, 7);
    assert_eq!(stream.download(&y).await?, [4; LEN]);
    Ok(())
}

/// Only the future waits: device order goes on, and later readers are refused.
#[tokio::test]
async fn a_late_failure_of_queued_work() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    fail_late(&stream, &mut y).queued()?;
    stream.done().await?;
    assert_upstream(&device.stream()?.download(&y).await.unwrap_err());
    Ok(())
}

#[tokio::test]
async fn a_late_failure_fails_its_batch() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let (x, mut y) = (stream.full(LEN, 3u8).queued()?, stream.zeros::<u8>(LEN).queued()?);
    let mut z = stream.zeros::<u8>(LEN).queued()?;
    let op = stream.batch(|queue| {
        let uses = Uses::new("their run").updates(&mut y);
        // SAFETY: nothing is written.
        unsafe { queue.enqueue(uses, |queue, _| queue.try_host(|| Theirs::Err(TheirError(5)))) }?;
        queue.copy(&x, &mut z)?;
        queue.download(&z)
    });
    assert_eq!(their_error(&op.await.unwrap_err()), Some(&TheirError(5)));
    assert_upstream(&stream.download(&y).await.unwrap_err());
    // What is not its data is good.
    assert_eq!(stream.download(&z).await?, [3; LEN]);
    Ok(())
}

#[tokio::test]
async fn a_late_failure_leaves_what_was_overwritten() -> Result<()> {
    let device = Device::host();
    let (stream, other) = (device.stream()?, device.stream()?);
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    let gate = Gate::close(&stream)?;
    let op = fail_late(&stream, &mut y);
    stream.fill(&mut y.slice_mut(..100)?, 1).queued()?;
    other.fill(&mut y.slice_mut(100..200)?, 2).queued()?;
    gate.open();
    op.await.unwrap_err();
    assert_eq!(&stream.download(&y.slice(..200)?).await?[99..101], [1, 2]);
    assert_upstream(&stream.download(&y.slice(200..)?).await.unwrap_err());
    Ok(())
}

#[tokio::test]
async fn a_late_failure_of_memory_that_is_gone() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    let gate = Gate::close(&stream)?;
    let op = fail_late(&stream, &mut y);
    drop(y);
    // The next buffer, in the same memory.
    let y = stream.full(LEN, 1u8).queued()?;
    gate.open();
    op.await.unwrap_err();
    assert_eq!(stream.download(&y).await?, [1; LEN]);
    Ok(())
}

/// Who waits for the work to run, and for nothing else, is not given what it should have written.
#[tokio::test]
async fn a_late_failure_before_the_host_looks() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    let (mut mapped, mut pinned) =
        (stream.pinned::<u8>(LEN)?.into_mapped(), stream.pinned::<u8>(LEN)?.into_mapped());
    let gate = Gate::close(&stream)?;
    fail_late(&stream, &mut y).queued()?;
    fail_late(&stream, &mut mapped).queued()?;
    fail_late(&stream, &mut pinned).queued()?;
    let (frozen, pinned) = (y.freeze(), pinned.into_pinned());
    let mut host = Box::pin(mapped.host());
    assert!((&mut host).now_or_never().is_none());
    gate.open();
    assert_upstream(&frozen.await.unwrap_err());
    assert_upstream(&pinned.await.unwrap_err());
    assert_upstream(&host.await.unwrap_err());
    Ok(())
}

/// Whoever was submitted behind it reads what is not there: at first hand, at second hand on another stream, in a batch, in a
/// replayed batch and in a graph.
#[tokio::test]
async fn a_late_failure_reaches_every_reader() -> Result<()> {
    let device = Device::host();
    let (stream, other) = (device.stream()?, device.stream()?);
    let axpy = kernels::axpy::load(&device).await?;
    let [mut y, mut z, mut w] = [(); 3].map(|()| stream.zeros::<u8>(LEN).queued());
    let (y, z, w) = (y.as_mut().unwrap(), z.as_mut().unwrap(), w.as_mut().unwrap());
    let mut sums = (0..2).map(|_| stream.zeros::<f32>(LEN / 4).queued());
    let (mut replayed, mut drawn) = (sums.next().unwrap()?, sums.next().unwrap()?);
    let graph = device.graph::<(In<f32>, InOut<f32>), _, _>(axpy.clone(), |q, axpy, (x, mut y)| {
        axpy.launch(q, 1.0, &x, &mut y)
    });
    let mut region = Region::new();
    for _ in 0..4 {
        stream.fill(y, 0).queued()?;
        let gate = Gate::close(&stream)?;
        fail_late(&stream, y).queued()?;
        stream.copy(y, z).queued()?;
        let copied = other.copy(z, w);
        let x = y.view().cast::<f32>()?;
        let made = stream.batch(|q| {
            let mut made = q.empty::<u8>(LEN)?;
            q.copy(y, &mut made)?;
            Ok(made)
        });
        // Device order is enough for it, whatever becomes of the contents.
        let made = made.queued()?;
        let replay = stream.replay(&mut region, |q| axpy.launch(q, 1.0, &x, &mut replayed));
        let launch = graph.launch(&stream, (&x, &mut drawn));
        let (read, again) = (stream.download(y), other.download(w));
        // What is overwritten before anybody reads it is good.
        stream.fill(z, 7).queued()?;
        let good = stream.download(z);
        gate.open();
        for failed in [copied, replay, launch] {
            assert_upstream(&failed.await.unwrap_err());
        }
        assert_upstream(&read.await.unwrap_err());
        assert_upstream(&again.await.unwrap_err());
        assert_eq!(good.await?, [7; LEN]);
        assert_upstream(&stream.download(&made).await.unwrap_err());
        assert_upstream(&stream.download(w).await.unwrap_err());
        for sums in [&mut replayed, &mut drawn] {
            assert_upstream(&stream.download(sums).await.unwrap_err());
            stream.fill(sums, 0.0).queued()?;
        }
    }
    Ok(())
}

/// Whose failure is not known yet is not to be found behind a later operation that was refused when it had begun.
#[tokio::test]
async fn cleared_poison_hides_no_late_failure() -> Result<()> {
    let device = Device::host();
    let (stream, other) = (device.stream()?, device.stream()?);
    let began = |y: &mut gpu_await::DeviceBuffer<u8>| {
        let uses = Uses::new("began").updates(y);
        // SAFETY: nothing is put on the stream.
        unsafe { stream.enqueue(uses, |_, _| Theirs::Err(TheirError(1))) }.queued().unwrap_err()
    };
    // Of memory that nobody wrote, and of memory that was written.
    for written in [false, true] {
        let mut y = stream.empty::<u8>(LEN).queued()?;
        if written {
            stream.fill(&mut y, 0).queued()?;
        }
        let gate = Gate::close(&stream)?;
        let late = match written {
            true => fail_late(&stream, &mut y),
            false => {
                let uses = Uses::new("their run").writes(&mut y);
                // SAFETY: nothing is written.
                unsafe {
                    stream.enqueue(uses, |queue, _| queue.try_host(|| Theirs::Err(TheirError(5))))
                }
            }
        };
        began(&mut y);
        y.clear_poison().unwrap_err();
        let read = other.download(&y);
        gate.open();
        late.await.unwrap_err();
        read.await.unwrap_err();
        y.clear_poison().unwrap_err();
        other.download(&y).await.unwrap_err();
    }
    // What the operation that began had put on the stream goes on, and may fail as well.
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    let gate = Gate::close(&stream)?;
    let uses = Uses::new("began").updates(&mut y);
    let run = |queue: &RawQueue<'_>, _: (RawSlice<u8>,)| {
        queue.try_host(|| Theirs::Err(TheirError(5)))?;
        Err::<(), Box<dyn std::error::Error + Send + Sync>>(Box::new(TheirError(1)))
    };
    // SAFETY: nothing is written.
    unsafe { stream.enqueue(uses, run) }.queued().unwrap_err();
    y.clear_poison().unwrap_err();
    gate.open();
    other.download(&y).await.unwrap_err();

    // One that never began hides nothing: the late failure comes when it comes.
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    let gate = Gate::close(&stream)?;
    let late = fail_late(&stream, &mut y);
    let refused = y.view_mut().cast::<f32>()?;
    let axpy = kernels::axpy::load(&device).await?;
    let short = stream.zeros::<f32>(3).queued()?;
    let mut refused = refused;
    axpy.launch(&stream, 1.0, &short, &mut refused).queued().unwrap_err();
    y.clear_poison()?;
    let read = other.download(&y);
    gate.open();
    late.await.unwrap_err();
    assert_upstream(&read.await.unwrap_err());
    y.clear_poison().unwrap_err();
    Ok(())
}

/// The operations of a list have one ticket.
#[tokio::test]
async fn a_late_failure_leaves_what_its_list_overwrote() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    let source = stream.full(LEN, 3_u8).queued()?;
    let mut z = stream.zeros::<u8>(LEN).queued()?;
    let mut region = Region::new();
    for _ in 0..4 {
        stream.fill(&mut y, 0).queued()?;
        let gate = Gate::close(&stream)?;
        fail_late(&stream, &mut y).queued()?;
        let replay = stream.replay(&mut region, |q| {
            q.copy(&y, &mut z)?;
            q.copy(&source.slice(1..LEN - 1)?, &mut z.slice_mut(1..LEN - 1)?)
        });
        gate.open();
        assert_upstream(&replay.await.unwrap_err());
        assert_eq!(stream.download(&z.slice(1..LEN - 1)?).await?[..], [3; LEN - 2]);
        for rest in [0..1, LEN - 1..LEN] {
            assert_upstream(&stream.download(&z.slice(rest)?).await.unwrap_err());
        }
    }
    Ok(())
}

/// What a batch lent may be handed out by another one.
#[tokio::test]
async fn a_late_failure_goes_with_what_is_lent() -> Result<()> {
    let device = Device::host();
    let (stream, other) = (device.stream()?, device.stream()?);
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    let good = stream.full(LEN, 3_u8).queued()?;
    for known in [false, true] {
        stream.fill(&mut y, 0).queued()?;
        let gate = Gate::close(&stream)?;
        fail_late(&stream, &mut y).queued()?;
        let (mut lent, mut vec) = (None, None);
        let (mut fine, mut of_failed) = (None, None);
        let lends = stream.batch(|q| {
            lent = Some(q.download(&y)?);
            vec = Some(q.download_vec(&y)?);
            fine = Some(q.download(&good)?);
            Ok(())
        });
        let fails = stream.batch(|q| -> Result<()> {
            of_failed = Some(q.download(&y)?);
            let few = q.zeros::<u8>(3)?;
            q.copy(&few, &mut y)
        });
        assert_eq!(fails.await.unwrap_err().kind(), ErrorKind::InvalidCall);
        stream.fill(&mut y, 0).queued()?;
        let hands_out = |mut lent: Option<_>| other.batch(move |_| Ok(lent.take()));
        let early = (!known).then(|| hands_out(lent.take()));
        gate.open();
        assert_upstream(&lends.await.unwrap_err());
        let handed_out = early.unwrap_or_else(|| hands_out(lent.take()));
        assert_upstream(&handed_out.await.unwrap_err());
        assert_upstream(&hands_out(of_failed.take()).await.unwrap_err());
        assert_upstream(&other.batch(|_| Ok(vec.take())).await.unwrap_err());
        assert_eq!(hands_out(fine.take()).await?.unwrap()[..], [3; LEN]);
    }
    Ok(())
}

/// On whatever way the data gets to another device, and from there to its readers.
#[tokio::test]
async fn a_late_failure_reaches_readers_of_other_devices() -> Result<()> {
    for direct in [true, false] {
        let device = Device::host();
        let (faults, handle) = testing::faults();
        let peer = testing::host_with(faults);
        let third = Device::host();
        if !direct {
            handle.refuse_peers();
        }
        let (stream, there) = (device.stream()?, peer.stream()?);
        let beyond = third.stream()?;
        let mut y = stream.zeros::<u8>(LEN).queued()?;
        let (mut z, mut w) = (there.zeros::<u8>(LEN).queued()?, there.zeros(LEN).queued()?);
        let mut v = beyond.zeros::<u8>(LEN).queued()?;
        let gate = Gate::close(&stream)?;
        fail_late(&stream, &mut y).queued()?;
        let copied = there.copy(&y, &mut z);
        let again = there.copy(&z, &mut w);
        let beyond_that = beyond.copy(&w, &mut v);
        let read = there.download(&z);
        gate.open();
        for failed in [copied, again, beyond_that] {
            assert_upstream(&failed.await.unwrap_err());
        }
        assert_upstream(&read.await.unwrap_err());
        assert_upstream(&there.download(&w).await.unwrap_err());
        assert_upstream(&beyond.download(&v).await.unwrap_err());
        there.fill(&mut w, 1).queued()?;
        assert_eq!(there.download(&w).await?, [1; LEN], "overwritten");
    }
    Ok(())
}

/// An export that waits for the producer does not export what that failed to write.
#[test]
fn a_late_failure_is_not_exported() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    let gate = Gate::close(&stream)?;
    fail_late(&stream, &mut y).queued()?;
    let opener = std::thread::spawn(move || gate.open());
    let refused = y.into_dlpack(&[LEN], DlpackConsumer::Synchronized).unwrap_err();
    assert_upstream(&refused.error);
    opener.join().expect("no panic");
    Ok(())
}

#[tokio::test]
async fn a_late_failure_in_verify_mode() -> Result<()> {
    let device = Device::builder().verify(true).named("host")?;
    let stream = device.stream()?;
    let mut y = stream.zeros::<u8>(LEN).queued()?;
    let error = fail_late(&stream, &mut y).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Verify { .. }), "{error}");
    assert_eq!(their_error(&error), Some(&TheirError(5)));
    assert_upstream(&stream.download(&y).await.unwrap_err());
    Ok(())
}
