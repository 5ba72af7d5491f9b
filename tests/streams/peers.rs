//! Copies between devices: directly, and through the host where they cannot reach each other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, DriverCall, FaultHandle, Gate};
use gpu_await::{
    Completion, Device, ErrorDetail, ErrorKind, In, Kernel, LaunchConfig, Pressure, Stream, kernels,
};

use crate::under_test::settled::settled;

const SOON: Duration = Duration::from_secs(15);
/// More than the blocks that go round: seven parts of 4 MiB and a bit, in words.
const LARGE: usize = 7 * (1 << 20) + 5;

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

/// A host device that reaches nobody.
fn island() -> (Device, FaultHandle) {
    let (faults, handle) = testing::faults();
    handle.refuse_peers();
    (testing::host_with(faults), handle)
}

/// Ten rounds from `a` to `b` and back; everything is on the streams before anything runs.
async fn ping_pong(a: &Device, b: &Device, len: usize) {
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let scale_a = kernels::scale::load(a).await.unwrap();
    let scale_b = kernels::scale::load(b).await.unwrap();
    a.enable_peer(b).await.unwrap();
    b.enable_peer(a).await.unwrap();
    let mut x = s.upload((0..len).map(|i| (i % 97) as f32).collect::<Vec<_>>()).await.unwrap();
    let mut y = t.zeros::<f32>(len).await.unwrap();
    let gate = Gate::close(&s).unwrap();
    for _ in 0..10 {
        scale_a.launch(&s, 2.0, &mut x).queued().unwrap();
        t.copy(&x, &mut y).queued().unwrap();
        scale_b.launch(&t, 0.25, &mut y).queued().unwrap();
        s.copy(&y, &mut x).queued().unwrap();
    }
    let mut end = s.download(&x);
    assert!((&mut end).now_or_never().is_none(), "no host wait: nothing ran yet");
    gate.open();
    let end = soon(end).await.unwrap();
    assert!(!gate.timed_out(), "something waited for the gate on the host");
    let factor = 0.5f32.powi(10);
    assert!(end.iter().enumerate().all(|(i, x)| *x == (i % 97) as f32 * factor));
}

#[tokio::test]
async fn a_buffer_goes_ten_times_between_devices_with_no_host_wait() {
    let (a, b) = (testing::device(), testing::peer_device());
    for len in [1000, LARGE] {
        ping_pong(&a, &b, len).await;
    }
    settled(&a).await;
    settled(&b).await;
}

#[tokio::test]
async fn a_buffer_goes_ten_times_through_the_host_with_no_host_wait() {
    let ((a, a_handle), (b, b_handle)) = (island(), island());
    assert!(!a.enable_peer(&b).await.unwrap() && a.enable_peer(&a).await.unwrap());
    a_handle.record();
    b_handle.record();
    for len in [1, 1000, 1 << 20, LARGE] {
        ping_pong(&a, &b, len).await;
    }
    for handle in [a_handle, b_handle] {
        assert!(!handle.calls().contains(&"copy_from_peer"));
    }
    settled(&a).await;
    settled(&b).await;
}

#[tokio::test]
async fn a_copy_through_the_host_keeps_four_blocks_pinned() {
    let ((a, _), (b, _)) = (island(), island());
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let x = s.full(LARGE, 3u32).queued().unwrap();
    let mut y = t.empty::<u32>(LARGE).queued().unwrap();
    soon(t.copy(&x, &mut y)).await.unwrap();
    assert_eq!((a.stats().pinned_bytes, b.stats().pinned_bytes), (0, 16 << 20));
    assert!(soon(t.download(&y)).await.unwrap().iter().all(|y| *y == 3));
}

#[tokio::test]
async fn devices_are_asked_once_a_pair() {
    let (faults, handle) = testing::faults();
    let (a, b, c) = (testing::host_with(faults), Device::host(), Device::host());
    let stream = a.stream().unwrap();
    handle.record();
    for other in [&b, &c, &b, &c] {
        let source = other.stream().unwrap().full(10, 3u8).queued().unwrap();
        let mut x = stream.zeros::<u8>(10).queued().unwrap();
        stream.copy(&source, &mut x).queued().unwrap();
        assert_eq!(stream.download(&x).await.unwrap(), [3; 10]);
        assert!(a.enable_peer(other).await.unwrap());
    }
    let asked = handle.calls().iter().filter(|call| **call == "enable_peer").count();
    assert_eq!(asked, 2);
}

#[tokio::test]
async fn a_held_copy_through_the_host_delays_no_other() {
    let ((a, _), (b, _)) = (island(), island());
    let (s, held, free) = (a.stream().unwrap(), b.stream().unwrap(), b.stream().unwrap());
    let x = s.upload((0..LARGE as u32).collect::<Vec<_>>()).await.unwrap();
    let mut stuck = held.zeros::<u32>(LARGE).queued().unwrap();
    let mut y = free.zeros::<u32>(LARGE).queued().unwrap();
    let gate = Gate::close(&held).unwrap();
    let mut late = held.copy(&x, &mut stuck);
    free.copy(&x, &mut y).queued().unwrap();
    assert_eq!(soon(free.download(&y)).await.unwrap()[LARGE - 1], LARGE as u32 - 1);
    // The source's own streams go on as well.
    soon(s.done()).await.unwrap();
    soon(s.full(10, 1u8)).await.unwrap();
    assert!((&mut late).now_or_never().is_none());
    assert!(!gate.timed_out());
    gate.open();
    soon(late).await.unwrap();
    assert_eq!(soon(held.download(&stuck)).await.unwrap()[LARGE - 1], LARGE as u32 - 1);
}

#[tokio::test]
async fn writers_of_the_source_wait_for_the_copy() {
    for direct in [true, false] {
        let (a, b) = match direct {
            true => (testing::device(), testing::peer_device()),
            false => (island().0, island().0),
        };
        b.enable_peer(&a).await.unwrap();
        let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
        let mut x = s.full(LARGE, 1u32).await.unwrap();
        let mut y = t.zeros::<u32>(LARGE).await.unwrap();
        let gate = Gate::close(&t).unwrap();
        t.copy(&x, &mut y).queued().unwrap();
        let overwrite = s.fill(&mut x, 2);
        // Dropped while it is still to be read.
        drop(x);
        gate.open();
        assert!(soon(t.download(&y)).await.unwrap().iter().all(|x| *x == 1), "direct: {direct}");
        soon(overwrite).await.unwrap();
        assert!(!gate.timed_out());
        drop(y);
        settled(&a).await;
        settled(&b).await;
    }
}

#[tokio::test]
async fn everything_may_be_dropped_while_a_copy_goes_through_the_host() {
    let ((a, _), (b, _)) = (island(), island());
    for round in 0..20 {
        let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
        let gate = (round % 2 == 0).then(|| Gate::close(&t).unwrap());
        let x = s.full(LARGE, 1u8).queued().unwrap();
        let mut y = t.empty::<u8>(LARGE).queued().unwrap();
        drop(t.copy(&x, &mut y));
        drop((x, s));
        drop((y, t));
        drop(gate);
    }
    settled(&a).await;
    settled(&b).await;
}

#[tokio::test]
async fn a_copy_through_the_host_that_fails_poisons_what_it_would_have_written() {
    for (call, nth, at_source) in [
        (DriverCall::CopyToHost, 1, true),
        (DriverCall::CopyToHost, 6, true),
        (DriverCall::StreamCreate, 1, true),
        (DriverCall::CopyToDevice, 3, false),
        (DriverCall::Register, 1, false),
        (DriverCall::StreamWaitEvent, 2, false),
    ] {
        let ((a, a_handle), (b, b_handle)) = (island(), island());
        let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
        let x = s.full(LARGE, 7u32).queued().unwrap();
        let mut y = t.zeros::<u32>(LARGE).queued().unwrap();
        let gate = Gate::close(&s).unwrap();
        s.host_fn(|| ()).queued().unwrap();
        let handle = if at_source { a_handle } else { b_handle };
        handle.fail_nth(call, nth, ErrorKind::Unsupported);
        let error = t.copy(&x, &mut y).queued().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{call:?}: {error}");
        let upstream = t.download(&y).await.unwrap_err();
        assert!(matches!(upstream.detail(), ErrorDetail::Upstream { .. }), "{call:?}: {upstream}");
        gate.open();
        t.copy(&x, &mut y).queued().unwrap();
        assert!(soon(t.download(&y)).await.unwrap().iter().all(|x| *x == 7), "{call:?}");
    }
    let ((a, _), (b, _)) = (island(), island());
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let x = s.empty::<u32>(100).queued().unwrap();
    let mut y = t.zeros::<u32>(100).queued().unwrap();
    let error = t.copy(&x, &mut y).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
}

#[tokio::test]
async fn a_source_that_is_lost_fails_the_copy_through_the_host() {
    let ((a, handle), (b, _)) = (island(), island());
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let x = s.full(LARGE, 7u32).await.unwrap();
    let mut y = t.zeros::<u32>(LARGE).await.unwrap();
    let gate = Gate::close(&s).unwrap();
    let mut z = s.zeros::<u32>(LARGE).queued().unwrap();
    s.copy(&x, &mut z).queued().unwrap();
    let late = t.copy(&z, &mut y);
    handle.lose_device("on purpose");
    let error = soon(late).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::DeviceLost);
    assert!(!error.is_device_lost(), "its own device is well");
    let behind = soon(t.host_fn(|| ())).await.unwrap_err();
    let whole = soon(b.done()).await.unwrap_err();
    for error in [behind, whole] {
        assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
        assert!(!error.is_device_lost(), "{error}");
    }
    assert!(soon(s.done()).await.unwrap_err().is_device_lost());
    let fresh = b.stream().unwrap();
    // Refused: it would wait for ever.
    let refused = fresh.wait(&s).queued().unwrap_err();
    let joined = fresh.join([&s, &fresh]).queued().unwrap_err();
    for error in [refused, joined] {
        assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
    }
    assert_eq!(*soon(fresh.download(&fresh.full(3, 7u8).await.unwrap())).await.unwrap(), [7; 3]);
    gate.open();
}

/// Nobody asked the source's device since it was lost, until the copy does.
#[tokio::test]
async fn who_is_the_first_to_hear_of_the_loss_of_a_source_is_well() {
    let ((a, handle), (b, _)) = (island(), island());
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let x = s.full(1000, 7u32).await.unwrap();
    let mut y = t.zeros::<u32>(1000).await.unwrap();
    handle.lose_device("on purpose");
    let error = soon(t.copy(&x, &mut y)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
    assert!(!error.is_device_lost(), "its own device is well");
    soon(t.fill(&mut y, 1)).await.unwrap();
}

/// Complete or not, with a direct way or without one: on a GPU it is gone.
#[tokio::test]
async fn memory_of_a_device_that_is_gone_is_not_read() {
    for closes in [false, true] {
        let ((a, handle), b) = (island(), Device::host());
        let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
        let x = s.full(100, 7u32).await.unwrap();
        let frozen = s.full(100, 8u32).await.unwrap().freeze().await.unwrap();
        let mut y = t.zeros::<u32>(100).await.unwrap();
        if closes {
            a.close(Duration::from_secs(5)).await.unwrap();
        } else {
            handle.lose_device("on purpose");
            assert!(s.full(1, 0u8).await.unwrap_err().is_device_lost());
        }
        for direct in [true, false] {
            if !direct {
                handle.refuse_peers();
            }
            let errors =
                [t.copy(&x, &mut y).await.unwrap_err(), t.copy(&frozen, &mut y).await.unwrap_err()];
            for error in errors {
                let is_told = match error.detail() {
                    ErrorDetail::DependencyLost { .. } => !closes,
                    ErrorDetail::Closed { .. } => closes,
                    _ => false,
                };
                assert!(is_told, "{error}");
            }
        }
        t.fill(&mut y, 1).await.unwrap();
    }
}

/// By way of streams of the healthy device, of data, of an event, and of a third device.
#[tokio::test]
async fn a_loss_reaches_who_waits_by_way_of_others() {
    let ((a, handle), b, c) = (island(), Device::host(), Device::host());
    let s = a.stream().unwrap();
    let gate = Gate::close(&s).unwrap();
    let [direct, second, third] = [(); 3].map(|()| b.stream().unwrap());
    let far = c.stream().unwrap();
    let mut x = direct.zeros::<u32>(100).await.unwrap();
    direct.wait(&s).queued().unwrap();
    direct.fill(&mut x, 1).queued().unwrap();
    let by_data = second.download(&x);
    second.wait(&direct).queued().unwrap();
    // To and fro: earlier tickets wait for earlier ones.
    for _ in 0..50 {
        third.wait(&second).queued().unwrap();
        second.wait(&third).queued().unwrap();
    }
    far.wait(&third).queued().unwrap();
    let event = third.record().unwrap();
    let waits = [second.done(), third.done(), far.done(), event.done(), b.done(), c.done()];
    handle.lose_device("on purpose");
    let is_told = |error: gpu_await::Error| {
        assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
    };
    is_told(soon(by_data).await.unwrap_err());
    for wait in waits {
        is_told(soon(wait).await.unwrap_err());
    }
    is_told(soon(far.done()).await.unwrap_err());
    // What does not wait for it goes on.
    let free = b.stream().unwrap();
    let y = free.full(10, 3u8).queued().unwrap();
    assert_eq!(soon(free.download(&y)).await.unwrap(), [3; 10]);
    gate.open();
}

fn is_dependency_lost(error: &gpu_await::Error) -> bool {
    matches!(error.detail(), ErrorDetail::DependencyLost { .. }) && !error.is_device_lost()
}

/// Otherwise it would take work until its queue is full, and then block whoever submits, for ever; and so would each stream that is given
/// work that must wait for it.
#[test]
fn a_stream_that_waits_for_a_lost_device_is_given_nothing_more() {
    let ((a, handle), b) = (island(), Device::host());
    let s = a.stream().unwrap();
    let gate = Gate::close(&s).unwrap();
    let (stuck, other) = (b.stream().unwrap(), b.stream().unwrap());
    let weights = stuck.full(100, 1u32).synchronize().unwrap();
    let mut x = stuck.zeros::<u32>(100).synchronize().unwrap();
    stuck.wait(&s).queued().unwrap();
    stuck.copy(&weights, &mut x).queued().unwrap();
    handle.lose_device("on purpose");
    s.done().synchronize().unwrap_err();
    let (told, is_told) = std::sync::mpsc::channel();
    let submits = std::thread::spawn(move || {
        for _ in 0..2000 {
            let error = stuck.zeros::<u32>(10).queued().expect_err("it would never run");
            assert!(is_dependency_lost(&error), "{error}");
        }
        told.send(stuck).ok();
    });
    let stuck = is_told.recv_timeout(SOON).expect("it blocks nobody");
    submits.join().unwrap();
    // What must wait for it is refused; its stream goes on.
    let errors = [
        other.download(&x).without_value().queued(),
        other.fill(&mut x, 3).queued(),
        other.wait(&stuck).queued(),
    ];
    for error in errors {
        let error = error.expect_err("it would never run");
        assert!(is_dependency_lost(&error), "{error}");
    }
    assert_eq!(*other.download(&weights).synchronize().unwrap(), [1; 100]);
    assert_eq!(
        *other.download(&other.full(3, 7u8).queued().unwrap()).synchronize().unwrap(),
        [7; 3]
    );
    gate.open();
}

/// Nobody asked the other device since it was lost, until work must wait for its reading: the submission asks, or, where the reading was
/// marked already, who waits.
#[test]
fn who_is_the_first_to_hear_of_the_loss_of_a_reader_is_well() {
    let (faults, handle) = testing::faults();
    let (a, b) = (testing::host_with(faults), Device::host());
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let mut x = t.full(100, 1u32).synchronize().unwrap();
    let mut y = s.zeros::<u32>(100).synchronize().unwrap();
    let gate = Gate::close(&s).unwrap();
    s.copy(&x, &mut y).queued().unwrap();
    s.fill(&mut y, 2).queued().unwrap();
    handle.lose_device("on purpose");
    let error = t.fill(&mut x, 2).synchronize().unwrap_err();
    assert!(is_dependency_lost(&error), "{error}");
    gate.open();
}

/// How many streams live that the device made.
fn streams(handle: &FaultHandle) -> usize {
    let calls = handle.calls();
    let count = |name| calls.iter().filter(|call| **call == name).count();
    count("stream_create") - count("stream_destroy")
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < end, "{what}: not within {SOON:?}");
        tokio::task::yield_now().await;
    }
}

/// Nobody awaits what waited.
#[tokio::test]
async fn a_stream_that_another_device_waited_for_is_let_go_when_that_is_through() {
    let ((a, _), (b, handle)) = (island(), island());
    handle.record();
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let live = streams(&handle);
    let gate = Gate::close(&t).unwrap();
    s.wait(&t).queued().unwrap();
    drop(t);
    gate.open();
    drop(gate);
    eventually("the stream is destroyed", || streams(&handle) == live - 1).await;
}

/// Each kept the other's streams, and those their device.
#[tokio::test]
async fn two_devices_that_waited_for_each_other_go_away() {
    let [(a, of_a), (b, of_b)] = [(); 2].map(|()| {
        let (faults, handle) = testing::faults();
        handle.record();
        (testing::host_with(faults), handle)
    });
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let mut x = s.full(1000, 1u32).queued().unwrap();
    let mut y = t.empty::<u32>(1000).queued().unwrap();
    for _ in 0..3 {
        t.copy(&x, &mut y).queued().unwrap();
        s.copy(&y, &mut x).queued().unwrap();
    }
    drop((x, y, s, t, a, b));
    eventually("both are gone", || streams(&of_a) == 0 && streams(&of_b) == 0).await;
}

/// A stream that waits for a device that was lost never comes to what is behind that: what it was lent
/// and what it would use is never used again, and nothing else of its device stays.
#[tokio::test]
async fn a_device_that_waited_for_a_lost_one_goes_away() {
    for drops_first in [false, true] {
        for completion in
            [Completion::Adaptive, Completion::Event, Completion::Word, Completion::Callback]
        {
            let (a, of_a) = testing::faults();
            let a = testing::host_with(a);
            let (b, of_b) = testing::faults();
            of_b.record();
            let b = testing::host_with_completion(b, completion);
            let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
            let gate = Gate::close(&s).unwrap();
            let theirs = s.full(1000, 1u32).queued().unwrap();
            let mut ours = t.zeros::<u32>(1000).queued().unwrap();
            let small = t.zeros::<u32>(10).await.unwrap();
            t.copy(&theirs, &mut ours).queued().unwrap();
            // Everything that a stream may owe: lent memory, a host function, a kernel, frees.
            let captured = Arc::new(());
            let upload = t.upload_into(b.pinned::<u32>(1000).unwrap(), &mut ours);
            let mut mapped = b.pinned::<u32>(1000).unwrap().into_mapped();
            t.copy(&ours, &mut mapped).queued().unwrap();
            let called = t.host_fn({
                let captured = captured.clone();
                move || drop(captured)
            });
            let twin = {
                let captured = captured.clone();
                let twin = move |_: &_, _: &[u32]| assert_eq!(Arc::strong_count(&captured), 0);
                Kernel::<(In<u32>,)>::host(&b, "never", twin).unwrap()
            };
            t.launch(&twin, LaunchConfig::for_elements(1), (&ours,)).queued().unwrap();
            drop((ours, small, twin, mapped));
            let done = t.done();
            let pinned = b.stats().pinned_used_bytes;
            let drops = || drop((theirs, s, t));
            if drops_first {
                drops();
                of_a.lose_device("on purpose");
            } else {
                of_a.lose_device("on purpose");
                drops();
            }
            for error in [soon(upload).await.unwrap_err(), soon(called).await.unwrap_err()] {
                assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
            }
            soon(done).await.unwrap_err();
            let mode = format!("{completion:?}, dropped first: {drops_first}");
            let given_up = || b.stats().lent_bytes == 0 && b.stats().quarantined_bytes >= 8000;
            eventually(&format!("{mode}: it is given up"), given_up).await;
            let stats = b.stats();
            assert_eq!(stats.pinned_used_bytes, pinned, "{mode}: not to be used again");
            eventually(&format!("{mode}: nothing is pending"), || b.stats().pending_bytes == 0)
                .await;
            // The device works.
            let again = soon(b.upload(vec![1u8; 5000])).await.unwrap();
            assert_eq!(soon(b.download(&again)).await.unwrap(), [1; 5000], "{mode}");
            drop((again, b, a, gate));
            eventually(&format!("{mode}: it is gone"), || streams(&of_b) == 0).await;
            eventually(&format!("{mode}: its threads"), || Arc::strong_count(&captured) == 1).await;
        }
    }
}

/// Memory of one device that another one is lent, and may write for good: a copy through the host, whose
/// first half waits on a device that is lost then.
#[tokio::test]
async fn what_a_lost_device_was_lent_by_another_is_not_used_again() {
    let ((a, of_a), (b, _)) = (island(), island());
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let mut x = s.full(1000, 1u32).await.unwrap();
    let mut y = t.zeros::<u32>(1000).await.unwrap();
    let used = || a.stats().pinned_used_bytes + b.stats().pinned_used_bytes;
    let before = used();
    let gate = Gate::close(&s).unwrap();
    // The copy waits for it.
    s.fill(&mut x, 2).queued().unwrap();
    let late = s.host_fn(|| ());
    let copy = t.copy(&x, &mut y);
    let lent = used() - before;
    assert!(lent >= 4000, "{lent}");
    of_a.lose_device("on purpose");
    assert!(soon(copy).await.is_err() && soon(late).await.is_err());
    drop((x, y, s, t));
    eventually("it is given up", || b.stats().lent_bytes + a.stats().lent_bytes == 0).await;
    assert_eq!(used() - before, lent, "{:?} {:?}", a.stats(), b.stats());
    drop(gate);
}

/// Two devices, and a stream of the first whose work waits for what is never recorded: its device is lost.
async fn stuck() -> (Device, FaultHandle, Stream) {
    let (lost, of_lost) = testing::faults();
    let lost = testing::host_with(lost);
    let (faults, handle) = testing::faults();
    handle.record();
    let device = testing::host_with(faults);
    let (theirs, stream) = (lost.stream().unwrap(), device.stream().unwrap());
    let gate = Gate::close(&theirs).unwrap();
    stream.wait(&theirs).queued().unwrap();
    of_lost.lose_device("on purpose");
    // From here on it is known.
    soon(theirs.done()).await.unwrap_err();
    drop(gate);
    (device, handle, stream)
}

/// A stream that waits for such a stream, on whichever device, is no better off; also if that goes first.
#[tokio::test]
async fn what_waits_for_a_stuck_stream_goes_away() {
    for same_device in [false, true] {
        for first_goes_first in [false, true] {
            let (device, handle, first) = stuck().await;
            let (other, of_other) = testing::faults();
            of_other.record();
            let other = testing::host_with(other);
            let of = if same_device { &device } else { &other };
            let second = of.stream().unwrap();
            // Refused where the loss is known, and then nothing is entered.
            let waits = second.wait(&first).queued();
            let mut x = second.empty::<u32>(1000).queued().unwrap();
            let upload = second.upload_into(of.pinned::<u32>(1000).unwrap(), &mut x);
            drop(x);
            if first_goes_first {
                let before = streams(&handle);
                drop(first);
                eventually("the first is gone", || streams(&handle) < before).await;
                drop(second);
            } else {
                drop(second);
                drop(first);
            }
            assert_eq!(soon(upload).await.is_ok(), waits.is_err(), "{waits:?}");
            drop((device, other));
            let gone = || streams(&handle) == 0 && streams(&of_other) == 0;
            eventually(&format!("{same_device} {first_goes_first}: gone"), gone).await;
        }
    }
}

/// Within a limit: it is leaked, and said to be, while somebody still has the stream.
#[tokio::test]
async fn memory_behind_a_stuck_stream_is_not_waited_for() {
    for pressure in [Pressure::Wait, Pressure::Fail] {
        let (lost, of_lost) = testing::faults();
        let lost = testing::host_with(lost);
        let builder = Device::builder().memory_limit_bytes(10 << 20).on_pressure(pressure);
        let device = builder.spare_bytes_per_stream(0).host();
        let (theirs, stream) = (lost.stream().unwrap(), device.stream().unwrap());
        let beside = device.stream().unwrap();
        let gate = Gate::close(&theirs).unwrap();
        let mut large = stream.zeros::<u8>(8 << 20).await.unwrap();
        stream.wait(&theirs).queued().unwrap();
        stream.fill(&mut large, 1).queued().unwrap();
        drop(large);
        of_lost.lose_device("on purpose");
        soon(theirs.done()).await.unwrap_err();
        let refused = beside.zeros::<u8>(4 << 20).queued().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfMemory, "{pressure:?}: {refused}");
        let refused = soon(beside.reclaimed(4 << 20)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfMemory, "{pressure:?}: {refused}");
        eventually("it is said to be leaked", || device.stats().leaked_bytes == 8 << 20).await;
        let fits = soon(beside.zeros::<u8>(1 << 20)).await.unwrap();
        assert_eq!(soon(beside.download(&fits)).await.unwrap()[..3], [0; 3]);
        drop((stream, gate));
    }
}

/// Nobody awaited the work in front of the wait: it has no marker, and nobody will know that it is complete.
#[tokio::test]
async fn memory_behind_a_stuck_stream_is_not_waited_for_without_a_marker_in_front() {
    for pressure in [Pressure::Wait, Pressure::Fail] {
        let (lost, of_lost) = testing::faults();
        let lost = testing::host_with(lost);
        let builder = Device::builder().memory_limit_bytes(10 << 20).on_pressure(pressure);
        let device = builder.host();
        let (theirs, stream) = (lost.stream().unwrap(), device.stream().unwrap());
        let beside = device.stream().unwrap();
        let gate = Gate::close(&theirs).unwrap();
        let mut large = stream.zeros::<u8>(8 << 20).queued().unwrap();
        stream.fill(&mut large, 2).queued().unwrap();
        stream.wait(&theirs).queued().unwrap();
        stream.fill(&mut large, 1).queued().unwrap();
        drop(large);
        of_lost.lose_device("on purpose");
        soon(theirs.done()).await.unwrap_err();
        let refused = soon(beside.reclaimed(4 << 20)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfMemory, "{pressure:?}: {refused}");
        let refused = beside.zeros::<u8>(4 << 20).queued().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfMemory, "{pressure:?}: {refused}");
        eventually("it is said to be leaked", || device.stats().leaked_bytes == 8 << 20).await;
        drop((stream, gate));
    }
}

/// What waits for a lost device is dropped, as its error says: the device it was on is well again.
#[tokio::test]
async fn a_device_is_done_when_what_waited_for_a_lost_one_is_dropped() {
    let (device, _, stream) = stuck().await;
    for _ in 0..2 {
        let told = soon(device.done()).await.unwrap_err();
        assert!(matches!(told.detail(), ErrorDetail::DependencyLost { .. }), "{told}");
    }
    drop(stream);
    soon(device.done()).await.unwrap();
    device.synchronize().unwrap();
    eventually("nothing is in flight", || device.stats().in_flight == 0).await;
    soon(device.close(Duration::from_secs(5))).await.unwrap();
}

/// Work in front of a wait for a lost device completes, though somebody was told that the wait never will.
#[tokio::test]
async fn what_is_in_front_of_a_stuck_wait_completes() {
    for _ in 0..5 {
        let (faults, of_lost) = testing::faults();
        let (device, lost) = (Device::host(), testing::host_with(faults));
        let (stream, theirs) = (device.stream().unwrap(), lost.stream().unwrap());
        let (gate, held_up) = (Gate::close(&stream).unwrap(), Gate::close(&theirs).unwrap());
        let first = stream.upload(vec![7u8; 100]);
        let second = stream.host_fn(|| 5);
        let wait = stream.wait(&theirs);
        of_lost.lose_device("on purpose");
        let told = soon(wait).await.unwrap_err();
        assert!(matches!(told.detail(), ErrorDetail::DependencyLost { .. }), "{told}");
        gate.open();
        assert_eq!(soon(second).await.unwrap(), 5);
        let x = soon(first).await.unwrap();
        let read = device.stream().unwrap().download(&x);
        assert_eq!(soon(read).await.unwrap()[..], [7; 100]);
        drop(held_up);
    }
}

/// The same, where another stream of the device waited for that one.
#[tokio::test]
async fn a_device_is_done_when_what_waited_by_way_of_another_stream_is_dropped() {
    for lost_first in [false, true] {
        for way in 0..3 {
            let (lost, of_lost) = testing::faults();
            let lost = testing::host_with(lost);
            let (faults, handle) = testing::faults();
            handle.record();
            let device = testing::host_with(faults);
            let theirs = lost.stream().unwrap();
            let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
            let mut x = first.zeros::<u32>(1000).queued().unwrap();
            let gate = Gate::close(&theirs).unwrap();
            first.wait(&theirs).queued().unwrap();
            match way {
                0 => second.wait(&first).queued().unwrap(),
                1 => second.wait(&first.record().unwrap()).queued().unwrap(),
                _ => {
                    first.fill(&mut x, 2).queued().unwrap();
                    second.download(&x).abandon();
                }
            }
            drop(x);
            if lost_first {
                of_lost.lose_device("on purpose");
            }
            drop((first, second));
            of_lost.lose_device("on purpose");
            // It may be told while it is not known what was in front of the waits, and is not kept waiting.
            let end = Instant::now() + SOON;
            while let Err(told) = soon(device.done()).await {
                assert!(matches!(told.detail(), ErrorDetail::DependencyLost { .. }), "{told}");
                assert!(Instant::now() < end, "{lost_first} {way}: {told}");
            }
            device.synchronize().unwrap();
            soon(device.close(Duration::from_secs(5))).await.unwrap();
            drop((device, gate));
            eventually("its streams are gone", || streams(&handle) == 0).await;
        }
    }
}
