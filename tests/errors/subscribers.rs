//! A `tracing` subscriber is foreign code: it may use the very stream whose call it is told of.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, Once};
use std::task::{Context, Waker};
use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, DriverCall, FaultHandle, Gate};
use gpu_await::{Completion, Device, ErrorKind, Result, Stream, kernels};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::under_test::child;

const SOON: Duration = Duration::from_secs(10);

/// What the subscriber uses.
static USED: Mutex<Option<(Device, Stream)>> = Mutex::new(None);

thread_local! {
    static IS_USING: Cell<bool> = const { Cell::new(false) };
}

/// Whether it is used in the events of submissions as well, and not only in those of what goes wrong.
static ON_SUBMISSIONS: AtomicBool = AtomicBool::new(false);

/// How many gates it was told of that their limit opened.
static LATE_GATES: AtomicU32 = AtomicU32::new(0);

/// Uses a stream and its device in every event, but for those of that use.
struct Uses;

impl Subscriber for Uses {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let (target, level) = (event.metadata().target(), *event.metadata().level());
        if (target, level) == ("gpu_await::testing", tracing::Level::WARN) {
            LATE_GATES.fetch_add(1, Ordering::SeqCst);
        }
        let is_submission = *event.metadata().level() == tracing::Level::TRACE;
        if is_submission && !ON_SUBMISSIONS.load(Ordering::SeqCst) {
            return;
        }
        if IS_USING.try_with(|using| using.replace(true)) != Ok(false) {
            return;
        }
        let used = USED.lock().expect("unpoisoned").clone();
        if let Some((device, stream)) = used {
            // Whatever comes of it: calls are refused, and on the poller's thread more are.
            let mut op = stream.zeros::<u8>(100);
            drop(op.poll_unpin(&mut Context::from_waker(Waker::noop())));
            stream.record().ok();
            stream.host_fn(|| ()).abandon();
            std::hint::black_box((stream.backlog(), device.stats()));
            device.stream().ok();
        }
        IS_USING.set(false);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

fn subscribe() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Uses).expect("the first"));
}

/// Uses most of a device; an error is a refused call's.
fn work(device: &Device, a: &Stream, b: &Stream) -> Result<()> {
    let scale = kernels::scale::load_blocking(device)?;
    let x = a.upload(vec![1.0f32; 100]).queued()?;
    let mut y = a.full(100, 2.0f32).queued()?;
    a.copy(&x, &mut y).queued()?;
    let first = scale.launch(a, 2.0, &mut y);
    let held = a.host_fn(|| 7);
    b.wait(a).queued()?;
    b.fill(&mut y, 3.0).queued()?;
    drop(x);
    first.synchronize()?;
    held.synchronize()?;
    b.record_timed()?.synchronize()?;
    b.download(&y).synchronize()?;
    drop(y);
    drop((0..4).map(|_| device.stream()).collect::<Result<Vec<_>>>()?);
    device.done().synchronize()
}

/// Does it on a thread of its own.
fn in_time(what: &str, work: impl FnOnce() + Send + 'static) {
    let (tell, told) = channel();
    let worker = std::thread::spawn(move || {
        work();
        tell.send(()).expect("somebody listens");
    });
    let ended = told.recv_timeout(SOON);
    assert!(ended != Err(RecvTimeoutError::Timeout), "{what}: it hangs");
    worker.join().unwrap_or_else(|_| panic!("{what}"));
}

fn with_device(completion: Completion, work: impl FnOnce(&Device, &Stream, &Stream, &FaultHandle)) {
    let (faults, handle) = testing::faults();
    let device = testing::host_with_completion(faults, completion);
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    *USED.lock().unwrap() = Some((device.clone(), a.clone()));
    work(&device, &a, &b, &handle);
    *USED.lock().unwrap() = None;
}

/// One after the other: the subscriber is the process's.
static TURN: Mutex<()> = Mutex::new(());

#[test]
fn a_subscriber_may_use_the_stream_it_is_told_of() {
    if !child::is_alone(concat!(module_path!(), "::a_subscriber_may_use_the_stream_it_is_told_of"))
    {
        return;
    }
    const CALLS: [DriverCall; 13] = [
        DriverCall::StreamDestroy,
        DriverCall::StreamWaitEvent,
        DriverCall::EventCreate,
        DriverCall::EventDestroy,
        DriverCall::EventRecord,
        DriverCall::EventQuery,
        DriverCall::WriteWord,
        DriverCall::HostFn,
        DriverCall::Alloc,
        DriverCall::Free,
        DriverCall::CopyToDevice,
        DriverCall::Fill,
        DriverCall::Launch,
    ];
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    subscribe();
    let modes = [(Completion::Event, false), (Completion::Word, false), (Completion::Event, true)];
    for (completion, on_submissions) in modes {
        ON_SUBMISSIONS.store(on_submissions, Ordering::SeqCst);
        for call in CALLS {
            in_time(&format!("{completion:?}: {call:?} is refused"), move || {
                // Each on a device of its own: a question that fails twice in a row is a loss.
                for nth in [1, 2, 3, 5, 8] {
                    with_device(completion, |device, a, b, handle| {
                        handle.fail_nth(call, nth, ErrorKind::Driver);
                        handle.fail_nth(DriverCall::EventRecord, 4, ErrorKind::Driver);
                        for _ in 0..2 {
                            if let Err(error) = work(device, a, b) {
                                assert!(!error.is_device_lost(), "{error}");
                            }
                        }
                    });
                }
            });
        }
    }
}

#[test]
fn a_loss_may_be_told_to_one_that_uses_the_device() {
    if !child::is_alone(concat!(module_path!(), "::a_loss_may_be_told_to_one_that_uses_the_device"))
    {
        return;
    }
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    subscribe();
    in_time("a loss", || {
        with_device(Completion::Adaptive, |device, a, b, handle| {
            let pending = a.zeros::<u8>(10);
            handle.lose_device("on purpose");
            assert!(work(device, a, b).is_err());
            drop(pending.synchronize());
            assert!(futures::executor::block_on(device.lost()).is_device_lost());
        });
    });
}

/// What was said by a log alone, and under a lock.
#[test]
fn what_the_driver_does_not_take_back_is_counted() {
    if !child::is_alone(concat!(module_path!(), "::what_the_driver_does_not_take_back_is_counted"))
    {
        return;
    }
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream().unwrap();
    assert_eq!(device.stats().unreturned, 0);
    handle.fail_nth(DriverCall::Free, 1, ErrorKind::Driver);
    drop(stream.zeros::<u8>(100).queued().unwrap());
    stream.synchronize().unwrap();
    let end = std::time::Instant::now() + SOON;
    while device.stats().unreturned < 1 {
        assert!(std::time::Instant::now() < end, "the refused free is not counted");
        std::thread::yield_now();
    }
    handle.fail_nth(DriverCall::StreamDestroy, 1, ErrorKind::Driver);
    drop(stream);
    while device.stats().unreturned < 2 {
        assert!(std::time::Instant::now() < end, "the refused destruction is not counted");
        std::thread::yield_now();
    }
}

#[test]
fn a_gate_that_its_limit_opened_says_so_once() -> Result<()> {
    if !child::is_alone(concat!(module_path!(), "::a_gate_that_its_limit_opened_says_so_once")) {
        return Ok(());
    }
    subscribe();
    let stream = testing::device().stream()?;
    let late = Gate::close_for(&stream, Duration::from_millis(1))?;
    stream.synchronize()?;
    assert!(late.timed_out());
    late.open();
    assert!(late.timed_out());
    drop(late);
    let gate = Gate::close(&stream)?;
    gate.open();
    drop(gate);
    assert_eq!(LATE_GATES.load(Ordering::SeqCst), 1);
    Ok(())
}
