//! Streams: options, the legacy default stream, streams of others and of threads, forks.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use gpu_await::testing::{self, Gate};
use gpu_await::{Device, DeviceKind, ErrorDetail, ErrorKind, Op, Result, Stream, join_all};

const SOON: Duration = Duration::from_secs(5);

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("nothing held it up")
}

/// Whether `op` is held up: nothing else would keep it for so long.
async fn is_held_up<T>(op: &mut Op<T>) -> bool {
    tokio::time::timeout(Duration::from_millis(20), op).await.is_err()
}

/// Waits for something that no future tells.
async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + SOON;
    while !holds() {
        assert!(std::time::Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn a_priority_is_clamped_and_read_back() -> Result<()> {
    let device = testing::device();
    let (lowest, highest) = device.priority_range();
    assert!(highest <= lowest);
    if device.kind() == DeviceKind::Host {
        assert_eq!((lowest, highest), (0, 0), "a device without priorities");
    } else {
        assert!(highest < lowest, "a GPU has priorities");
    }
    let build = |asked| device.stream_builder().priority(asked).build();
    let priority = |asked| build(asked).map(|stream| stream.priority());
    assert_eq!(device.stream()?.priority(), 0);
    assert_eq!(priority(highest - 100)?, highest);
    assert_eq!(priority(lowest + 100)?, lowest);
    for asked in highest..=lowest {
        assert_eq!(priority(asked)?, asked);
    }
    let urgent = device.stream_builder().priority(highest).build()?;
    assert_eq!(urgent.fork(1)?[0].priority(), highest);
    Ok(())
}

#[test]
fn flags_and_names_are_read_back() -> Result<()> {
    let device = testing::device();
    assert!(device.stream()?.is_non_blocking()?);
    assert!(device.default_stream().is_non_blocking()?);
    assert!(!device.stream_builder().non_blocking(false).build()?.is_non_blocking()?);
    assert!(!device.legacy_stream()?.is_non_blocking()?);
    let named = device.stream_builder().name("upload").build()?;
    assert_eq!((named.name(), device.stream()?.name()), (Some("upload"), None));
    assert!(format!("{named:?}").contains("\"upload\""), "{named:?}");
    assert!(format!("{:?}", named.done()).contains("\"upload\""));
    Ok(())
}

#[test]
fn a_stream_is_its_id_and_no_id_comes_back() -> Result<()> {
    let device = testing::device();
    let mut ids = HashSet::new();
    for _ in 0..20 {
        let (stream, other) = (device.stream()?, device.stream()?);
        assert!(stream == stream.clone() && stream != other);
        assert_eq!(HashSet::from([stream.clone(), stream.clone(), other.clone()]).len(), 2);
        assert!(ids.insert(stream.id()) && ids.insert(other.id()));
    }
    Ok(())
}

#[tokio::test]
async fn the_legacy_default_stream_is_ordered_with_blocking_streams_and_no_others() -> Result<()> {
    let device = testing::device();
    let legacy = device.legacy_stream()?;
    assert_eq!(legacy, device.legacy_stream()?);
    let blocking = device.stream_builder().non_blocking(false).build()?;
    let other = device.stream()?;

    let gate = Gate::close(&blocking)?;
    let mut behind = legacy.host_fn(|| 1);
    soon(other.host_fn(|| ())).await?;
    assert!(is_held_up(&mut behind).await, "the legacy default stream waits for the blocking one");
    gate.open();
    assert_eq!(soon(behind).await?, 1);
    assert!(!gate.timed_out());

    let gate = Gate::close(&legacy)?;
    let mut behind = blocking.host_fn(|| 2);
    soon(other.host_fn(|| ())).await?;
    assert!(is_held_up(&mut behind).await, "the blocking one waits for the legacy default stream");
    gate.open();
    assert_eq!(soon(behind).await?, 2);
    assert!(!gate.timed_out());

    let gate = Gate::close(&other)?;
    soon(legacy.host_fn(|| ())).await?;
    soon(blocking.host_fn(|| ())).await?;
    gate.open();
    soon(other.done()).await?;
    assert!(!gate.timed_out());
    Ok(())
}

#[tokio::test]
async fn every_verb_works_on_the_legacy_default_stream() -> Result<()> {
    let device = testing::device();
    let axpy = gpu_await::kernels::axpy::load(&device).await?;
    let legacy = device.legacy_stream()?;
    let other = device.stream()?;
    let x = legacy.upload(vec![1.0f32; 100]).queued()?;
    let mut y = legacy.full(100, 2.0f32).queued()?;
    axpy.launch(&legacy, 3.0, &x, &mut y).queued()?;
    legacy.fill(&mut y.slice_mut(..10)?, 0.0).queued()?;
    let mut z = other.zeros(100).queued()?;
    legacy.wait(&other).queued()?;
    legacy.copy(&y, &mut z).queued()?;
    let (z, time) = legacy.timed(|queue| queue.download(&z)).await?;
    assert!(z[..10] == [0.0; 10] && z[10..] == [5.0; 90] && time > Duration::ZERO);
    other.wait(&legacy.record()?).queued()?;
    assert_eq!(soon(other.download(&y)).await?[99], 5.0);
    drop((x, y));
    soon(legacy.done()).await?;
    legacy.synchronize()?;
    // Its queue is empty a moment after the marker.
    eventually("the stream is idle", || legacy.is_idle()).await;
    Ok(())
}

#[tokio::test]
async fn debug_print_of_arrays_made_on_two_streams_needs_no_explicit_wait() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let gate = Gate::close(&a)?;
    let x = a.full(3, 1u8).queued()?;
    let y = b.full(3, 2u8).queued()?;
    let (x, y) = (device.download_vec(&x), device.download_vec(&y));
    gate.open();
    assert_eq!(format!("{:?} {:?}", soon(x).await?, soon(y).await?), "[1, 1, 1] [2, 2, 2]");
    Ok(())
}

/// A stream of "another library", and the same stream adopted.
fn theirs_and_adopted(device: &Device) -> Result<(Stream, Stream)> {
    let theirs = device.stream()?;
    // SAFETY: the owner keeps the stream, and nobody captures it.
    let handle = unsafe { theirs.as_raw() };
    // SAFETY: as above.
    let adopted = unsafe { Stream::from_raw(device, handle, theirs.clone()) }?;
    assert_ne!(theirs, adopted);
    Ok((theirs, adopted))
}

#[tokio::test]
async fn work_of_others_on_an_adopted_stream_is_covered_by_done_record_and_wait() -> Result<()> {
    let device = testing::device();
    let (theirs, adopted) = theirs_and_adopted(&device)?;
    let other = device.stream()?;
    assert!(adopted.is_idle());
    let gate = Gate::close(&theirs)?;
    let (mut done, event) = (adopted.done(), adopted.record()?);
    other.wait(&adopted).queued()?;
    let mut behind = other.host_fn(|| ());
    assert!(is_held_up(&mut done).await && is_held_up(&mut behind).await);
    assert!(!event.is_complete() && !adopted.is_idle());
    gate.open();
    soon(done).await?;
    soon(behind).await?;
    assert!(event.is_complete());
    adopted.synchronize()
}

#[tokio::test]
async fn an_operation_on_a_shared_stream_waits_for_nothing_that_others_put_behind_it() -> Result<()>
{
    let device = testing::device();
    let (theirs, adopted) = theirs_and_adopted(&device)?;
    for (mine, others) in [(&adopted, &theirs), (&theirs, &adopted)] {
        // Not polled before the gate is behind it.
        let op = mine.host_fn(|| 7);
        let gate = Gate::close(others)?;
        assert_eq!(soon(op).await?, 7);
        assert!(!others.is_idle());
        gate.open();
        soon(others.done()).await?;
        assert!(!gate.timed_out());
    }
    Ok(())
}

#[tokio::test]
async fn an_adopted_stream_is_not_destroyed_and_its_owner_goes_last() -> Result<()> {
    struct Owner {
        dropped: mpsc::Sender<String>,
        _stream: Stream,
    }
    impl Drop for Owner {
        fn drop(&mut self) {
            let thread = std::thread::current().name().unwrap_or_default().to_owned();
            self.dropped.send(thread).ok();
        }
    }
    let device = testing::device();
    let (sender, dropped) = mpsc::channel();
    let theirs = device.stream()?;
    let owner = Owner { dropped: sender, _stream: theirs.clone() };
    // SAFETY: the owner keeps the stream, and nobody captures it.
    let handle = unsafe { theirs.as_raw() };
    // SAFETY: as above.
    let adopted = unsafe { Stream::from_raw(&device, handle, owner) }?;
    let x = adopted.full(100, 5u32).queued()?;
    let gate = Gate::close(&adopted)?;
    adopted.host_fn(|| ()).queued()?;
    drop(adopted);
    assert!(dropped.try_recv().is_err(), "its work is under way");
    gate.open();
    soon(theirs.host_fn(|| ())).await?;
    // A buffer that was made on it keeps neither.
    let thread = dropped.recv_timeout(SOON).expect("the owner is dropped in the end");
    assert_eq!(theirs.download(&x).await?, [5; 100]);
    drop(x);
    assert!(thread.contains("reaper"), "on the thread {thread}");
    assert_eq!(soon(theirs.host_fn(|| 9)).await?, 9);
    Ok(())
}

#[test]
fn handles_that_cannot_be_adopted_are_refused() -> Result<()> {
    let device = testing::device();
    // SAFETY: the per-thread handle names a stream; it is refused.
    let error = unsafe { Stream::from_raw(&device, 2, ()) }.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::BadStream { handle: 2, .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    for handle in [0, 1] {
        // SAFETY: the legacy default stream outlives everything.
        let legacy = unsafe { Stream::from_raw(&device, handle, ()) }?;
        assert!(!legacy.is_non_blocking()?);
        legacy.host_fn(|| ()).synchronize()?;
    }
    let (host, other) = (Device::host(), Device::host());
    let stream = other.stream()?;
    // SAFETY: the stream lives.
    let handle = unsafe { stream.as_raw() };
    // SAFETY: as above; it is refused.
    let error = unsafe { Stream::from_raw(&host, handle, ()) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidCall, "{error}");
    Ok(())
}

#[tokio::test]
async fn a_thread_has_a_stream_of_its_own_until_it_ends() -> Result<()> {
    let device = testing::device();
    let mine = device.thread_stream()?;
    assert_eq!(mine, device.thread_stream()?);
    assert_ne!(mine, Device::host().thread_stream()?);
    let streams = device.stats().streams;
    let spawned = std::thread::Builder::new().name("worker".to_owned()).spawn({
        let device = device.clone();
        move || {
            let stream = device.thread_stream()?;
            assert_eq!(stream, device.thread_stream()?);
            assert_eq!(stream.name(), Some("worker"));
            Ok::<_, gpu_await::Error>(stream)
        }
    });
    let theirs = spawned.expect("a thread").join().expect("it does not panic")?;
    assert_ne!(theirs, mine);
    assert_eq!(soon(theirs.host_fn(|| 3)).await?, 3, "a handle outlives the thread");
    drop(theirs);
    eventually("the stream goes with its thread", || device.stats().streams == streams).await;
    Ok(())
}

#[tokio::test]
async fn forks_start_behind_their_origin_and_a_join_waits_for_all() -> Result<()> {
    let device = testing::device();
    let origin = device.stream()?;
    let ran = Arc::new(AtomicU32::new(0));
    let gate = Gate::close(&origin)?;
    let branches = origin.fork(3)?;
    let ops = branches.iter().map(|branch| {
        let ran = ran.clone();
        branch.host_fn(move || ran.fetch_add(1, Ordering::SeqCst))
    });
    let mut ops = join_all(ops);
    // Work behind the fork is not what the branches wait for.
    let second = Gate::close(&origin)?;
    assert!(is_held_up(&mut ops).await);
    assert_eq!(ran.load(Ordering::SeqCst), 0);
    gate.open();
    let mut order = soon(ops).await?;
    order.sort_unstable();
    assert_eq!(order, [0, 1, 2]);
    second.open();
    soon(origin.done()).await?;

    let gates = branches.iter().map(Gate::close).collect::<Result<Vec<_>>>()?;
    let mut joined = origin.join(&branches);
    let mut behind = origin.host_fn(|| ());
    for gate in &gates {
        assert!(is_held_up(&mut joined).await && is_held_up(&mut behind).await);
        gate.open();
    }
    soon(joined).await?;
    soon(behind).await?;
    let none: [&Stream; 0] = [];
    soon(origin.join(none)).await
}

/// The threads of this process that run streams of a host device.
#[cfg(target_os = "linux")]
fn workers(device: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with(device)).count()
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_host_device_leaves_no_thread_behind() -> Result<()> {
    let device = Device::host();
    let name = format!("host:{}-", device.ordinal());
    let stream = device.stream()?;
    device.legacy_stream()?.host_fn(|| ()).await?;
    device.thread_stream()?.host_fn(|| ()).await?;
    device.done().await?;
    assert!(workers(&name) > 3, "{}", workers(&name));
    drop((stream, device));
    eventually("its threads end", || workers(&name) == 0).await;
    Ok(())
}

/// Once another stream had to wait for more than it needed, each operation is followed by an event; nobody ever looks which
/// of them are complete.
#[test]
fn a_stream_that_is_only_ever_given_work_keeps_few_events() -> Result<()> {
    const LAUNCHES: usize = 20_000;
    // Twice what a stream takes before it blocks, and a few.
    const EVENTS: usize = 2_200;
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let (s, t) = (device.stream()?, device.stream()?);
    let gate = Gate::close(&t)?;
    let mut x = s.zeros::<u32>(16).queued()?;
    let mut z = t.zeros::<u32>(16).queued()?;
    // Several, as the poller may mark one before more is submitted: who depends on that waits for no more than it needs.
    let mut written = Vec::new();
    for _ in 0..20 {
        written.push(t.zeros::<u32>(16).queued()?);
        t.fill(&mut z, 1).queued()?;
    }
    for y in &written {
        s.copy(y, &mut x).queued()?;
    }
    gate.open();
    handle.record();
    for _ in 0..LAUNCHES {
        t.fill(&mut z, 1).queued()?;
    }
    let made = |name| handle.calls().into_iter().filter(|call| *call == name).count();
    assert_eq!(made("event_record"), LAUNCHES, "each has its event");
    let events = made("event_create");
    assert!(events <= EVENTS, "{events} events for {LAUNCHES} operations");
    Ok(())
}

/// A branch has the priority of its origin and its place in the order of the legacy default stream.
#[test]
fn a_branch_has_the_flags_of_its_origin() -> Result<()> {
    let device = testing::device();
    for non_blocking in [false, true] {
        let origin = device.stream_builder().non_blocking(non_blocking).build()?;
        let branch = origin.fork(1)?.remove(0);
        assert_eq!(branch.is_non_blocking()?, non_blocking);
        assert_eq!(branch.fork(1)?[0].is_non_blocking()?, non_blocking, "of a branch");
        // SAFETY: the handle is used while `origin` lives, here alone, and captures nothing.
        let handle = unsafe { origin.as_raw() };
        // SAFETY: it is of this device and outlives the adopted stream, which owns a share.
        let adopted = unsafe { Stream::from_raw(&device, handle, origin.clone()) }?;
        assert_eq!(adopted.fork(1)?[0].is_non_blocking()?, non_blocking, "of an adopted stream");
    }
    assert!(!device.legacy_stream()?.fork(1)?[0].is_non_blocking()?);
    assert!(device.default_stream().fork(1)?[0].is_non_blocking()?);
    Ok(())
}

/// Work that nobody awaits has no marker until somebody asks.
#[tokio::test]
async fn the_backlog_of_queued_work_ends() {
    let device = testing::device();
    let [a, b] = [(); 2].map(|()| device.stream().unwrap());
    let mut x = a.zeros::<u32>(16).queued().unwrap();
    let mut y = b.zeros::<u32>(16).queued().unwrap();
    for _ in 0..5 {
        a.fill(&mut x, 1).queued().unwrap();
        b.fill(&mut y, 1).queued().unwrap();
    }
    eventually("the backlog ends", || a.backlog() == 0).await;
    eventually("nothing is in flight", || device.stats().in_flight == 0).await;
}

/// A producer that asks before each piece of work waits for what is too much, and not for all of it.
#[test]
fn a_throttled_producer_never_runs_dry() {
    for (max, pieces) in [(1, 20), (2, 21), (5, 22), (5, 23), (30, 70), (30, 71), (30, 100)] {
        let (device, stepper) = testing::manual();
        let stream = device.stream().unwrap();
        let mut x = stream.zeros::<u8>(10).queued().unwrap();
        for piece in 0..=pieces {
            let mut room = std::pin::pin!(stream.throttle(max));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            while room.as_mut().poll(&mut context).is_pending() {
                assert!(stepper.step(0), "it waits for nothing");
            }
            // Only now: the question is a marker as well.
            if piece == pieces {
                let (in_flight, least) = (stream.backlog(), max - max / 4);
                assert!((least..=max).contains(&in_flight), "{in_flight} of {max} in flight");
            }
            stream.fill(&mut x, 1).queued().unwrap();
        }
        stepper.run_until_idle();
    }
}

/// What nobody awaited has no marker, and is seen all the same.
#[test]
fn the_first_to_ask_whether_a_stream_is_idle_is_told() {
    type Look = fn(&Stream) -> bool;
    let looks: [(&str, Look); 3] = [
        ("is_idle", Stream::is_idle),
        ("backlog", |stream| stream.backlog() == 0),
        ("stats", |stream| stream.device().stats().in_flight == 0),
    ];
    for (what, look) in looks {
        let (device, stepper) = testing::manual();
        let stream = device.stream().unwrap();
        stream.zeros::<u8>(10).queued().unwrap();
        assert!(!look(&stream), "{what}: nothing has run");
        stream.zeros::<u8>(10).queued().unwrap();
        stepper.run_until_idle();
        stream.zeros::<u8>(10).queued().unwrap();
        while stepper.step(0) {}
        assert!(look(&stream), "{what}: everything has run");
    }
}

/// There is no driver behind a host device whose code could say it.
#[test]
fn a_handle_that_a_host_device_does_not_know() {
    let device = Device::host();
    // SAFETY: a host device only looks the handle up.
    let error = unsafe { Stream::from_raw(&device, 0xDEAD_BEEF, ()) }.unwrap_err();
    let ErrorDetail::BadStream { handle: 0xDEAD_BEEF, reason } = error.detail() else {
        panic!("{error}")
    };
    assert!(reason.contains("no stream of that handle"), "{error}");
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
}
