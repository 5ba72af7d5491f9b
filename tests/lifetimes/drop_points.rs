//! Every kind of operation, given up after each number of polls until it is ready, on a device that is
//! stepped in between: everything that it held comes back once, and not before the device is through.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, Gate, Stepper};
use gpu_await::{Copy2d, Device, DeviceBuffer, Op, Stream, join_all, kernels};
use parking_lot::Mutex;

use crate::under_test::modes;

type Pending = Pin<Box<dyn Future<Output = ()>>>;

/// What the operations work on.
struct Rig {
    device: Device,
    step: Stepper,
    stream: Stream,
    other: Stream,
    x: DeviceBuffer<f32>,
    y: DeviceBuffer<f32>,
    scale: kernels::scale,
    /// A share of it is in each host function and in its result.
    payload: Arc<()>,
}

fn future<T: 'static>(op: Op<T>) -> Pending {
    Box::pin(op.map(|result| drop(result.expect("nothing fails here"))))
}

/// A name, and how the operation is put on its stream.
type Kind = (&'static str, fn(&mut Rig) -> Pending);

fn rows() -> Copy2d {
    Copy2d::new(4, 3).source_pitch(5).destination_pitch(6)
}

const KINDS: [Kind; 25] = [
    ("upload", |rig| future(rig.stream.upload(vec![1.0f32; 50]))),
    ("upload_from", |rig| future(rig.stream.upload_from(&[1.0f32; 50]))),
    ("upload_into", |rig| {
        let pinned = rig.stream.pinned::<f32>(100).expect("pinned memory");
        future(rig.stream.upload_into(pinned, &mut rig.x))
    }),
    ("download", |rig| future(rig.stream.download(&rig.x))),
    ("download_into", |rig| {
        let pinned = rig.stream.pinned::<f32>(100).expect("pinned memory");
        future(rig.stream.download_into(&rig.x, pinned))
    }),
    ("download_vec", |rig| future(rig.stream.download_vec(&rig.x))),
    ("copy", |rig| future(rig.stream.copy(&rig.x, &mut rig.y))),
    ("copy_2d", |rig| future(rig.stream.copy_2d(&rig.x, &mut rig.y, rows()))),
    ("upload_2d", |rig| {
        let pinned = rig.stream.pinned::<f32>(100).expect("pinned memory");
        future(rig.stream.upload_2d(pinned, &mut rig.y, rows()))
    }),
    ("download_2d", |rig| {
        let pinned = rig.stream.pinned::<f32>(100).expect("pinned memory");
        future(rig.stream.download_2d(&rig.x, pinned, rows()))
    }),
    ("empty", |rig| future(rig.stream.empty::<u8>(10))),
    ("zeros", |rig| future(rig.stream.zeros::<u8>(10))),
    ("fill", |rig| future(rig.stream.fill(&mut rig.x, 3.0))),
    ("launch", |rig| future(rig.scale.launch(&rig.stream, 2.0, &mut rig.x))),
    ("host_fn", |rig| {
        let payload = rig.payload.clone();
        future(rig.stream.host_fn(move || payload))
    }),
    ("timed", |rig| {
        let (stream, x) = (&rig.stream, &mut rig.x);
        future(stream.timed(|queue| queue.fill(x, 1.0)))
    }),
    ("batch", |rig| {
        let (x, payload) = (&rig.x, rig.payload.clone());
        let work = |q: &gpu_await::Queue<'_>| Ok((q.download(x)?, q.host_fn(move || payload)?));
        future(rig.stream.batch(work))
    }),
    ("done of a stream", |rig| future(rig.stream.done())),
    ("done of an event", |rig| future(rig.stream.record().expect("an event").done())),
    ("done of the device", |rig| future(rig.device.done())),
    ("wait for a stream", |rig| future(rig.stream.wait(&rig.other))),
    ("wait for an operation", |rig| {
        let op = rig.other.fill(&mut rig.y, 2.0);
        future(rig.stream.wait(&op))
    }),
    ("join of streams", |rig| future(rig.stream.join([&rig.other]))),
    ("and", |rig| {
        let (a, b) = (rig.payload.clone(), rig.payload.clone());
        future(rig.stream.host_fn(move || a).and(rig.other.host_fn(move || b)))
    }),
    ("join_all", |rig| {
        let (a, b) = (rig.payload.clone(), rig.payload.clone());
        future(join_all([rig.other.host_fn(move || a), rig.stream.host_fn(move || b)]))
    }),
];

/// How a future is given up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Drop,
    /// As `mem::forget`; the test drops it when everything else was looked at.
    Leak,
    /// With the buffers and streams that it uses.
    DropAll,
}

impl Rig {
    fn new(mode: gpu_await::Completion) -> Self {
        let (device, step) = testing::manual_with(mode);
        let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
        let x = other.full(100, 1.0f32).queued().unwrap();
        let y = stream.full(100, 2.0f32).queued().unwrap();
        let scale = kernels::scale::load_blocking(&device).unwrap();
        Rig { device, step, stream, other, x, y, scale, payload: Arc::new(()) }
    }

    /// Polls so many times, with a step of the device in between; true if the future got ready.
    fn poll(&self, future: &mut Pending, polls: usize) -> bool {
        for poll in 0..polls {
            if future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                return true;
            }
            let _ = self.step.step(poll);
        }
        false
    }
}

/// True if the future got ready before it was given up.
fn give_up(mode: gpu_await::Completion, (name, make): Kind, polls: usize, end: End) -> bool {
    let what = format!("{name}, {mode:?}, {polls} polls, {end:?}");
    let mut rig = Rig::new(mode);
    let mut future = make(&mut rig);
    let lent = rig.device.stats().lent_bytes;
    let ready = rig.poll(&mut future, polls);
    let mut leaked = None;
    if end == End::Leak {
        leaked = Some(future);
    } else {
        drop(future);
    }
    if polls == 0 {
        assert_eq!(rig.device.stats().lent_bytes, lent, "{what}: nothing ran, nothing comes back");
    }
    let Rig { device, step, stream, other, x, y, scale, payload } = rig;
    if end == End::DropAll {
        drop((stream, other, x, y));
        // The streams in another order: what is freed on one is still used by the other.
        while step.step(1) {}
    } else {
        step.run_until_idle();
        drop((x, y, stream, other));
    }
    drop(scale);
    (0..3).for_each(|_| step.run_until_idle());
    drop(leaked);
    (0..3).for_each(|_| step.run_until_idle());
    let stats = device.stats();
    let held = (stats.allocations, stats.lent_bytes, stats.pending_bytes, stats.pinned_used_bytes);
    assert_eq!(held, (0, 0, 0, 0), "{what}: {stats:?}");
    assert_eq!(device.memory().unwrap().used_bytes, 0, "{what}");
    assert!(device.lost().now_or_never().is_none(), "{what}: memory was freed in use");
    let limit = Instant::now() + Duration::from_secs(10);
    while Arc::strong_count(&payload) > 1 {
        assert!(Instant::now() < limit, "{what}: a value was never dropped");
        std::thread::yield_now();
    }
    ready
}

#[test]
fn every_operation_can_be_given_up_after_any_number_of_polls() {
    for mode in modes::ALL {
        for kind in KINDS {
            for end in [End::Drop, End::Leak, End::DropAll] {
                let polls = (0..100).find(|polls| give_up(mode, kind, *polls, end));
                assert!(polls.is_some_and(|polls| polls > 1), "{}: {polls:?}", kind.0);
            }
        }
    }
}

/// Counts its wake-ups.
#[derive(Default)]
struct Counting(AtomicU32);

impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Counting {
    fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_task_is_woken_once_and_not_before_its_operation_is_complete() {
    for mode in modes::ALL {
        let (device, step) = testing::manual_with(mode);
        let stream = device.stream().unwrap();
        let mut first = stream.host_fn(|| 1);
        let mut second = stream.host_fn(|| 2);
        let counters: [Arc<Counting>; 2] = Default::default();
        let wakers = counters.clone().map(Waker::from);
        // More polls than wake-ups: the last waker stands.
        for _ in 0..5 {
            assert!(first.poll_unpin(&mut Context::from_waker(&wakers[0])).is_pending());
            assert!(second.poll_unpin(&mut Context::from_waker(&wakers[1])).is_pending());
        }
        let counts = || [counters[0].count(), counters[1].count()];
        let mut seen = vec![counts()];
        while step.step(0) {
            seen.push(counts());
        }
        step.run_until_idle();
        seen.push(counts());
        seen.dedup();
        let one_by_one = [[0, 0], [1, 0], [1, 1]];
        let at_once = [[0, 0], [1, 1]];
        assert!(seen == one_by_one || seen == at_once, "{mode:?}: {seen:?}");
        assert_eq!(first.now_or_never().unwrap().unwrap(), 1);
        assert_eq!(second.now_or_never().unwrap().unwrap(), 2);
    }
}

#[test]
fn a_future_that_moved_wakes_the_task_that_polled_it_last() {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        let stream = device.stream().unwrap();
        let gate = Gate::close(&stream).unwrap();
        let mut op = stream.host_fn(|| 5);
        let here = Arc::new(Counting::default());
        let waker = Waker::from(here.clone());
        // It may look for itself for a while, and wake its own task for that.
        let registered = || {
            let before = here.count();
            op.poll_unpin(&mut Context::from_waker(&waker)).is_pending() && here.count() == before
        };
        let limit = Instant::now() + Duration::from_secs(10);
        let mut registered = registered;
        while !registered() {
            assert!(Instant::now() < limit, "{mode:?}: it never sleeps");
        }
        let count = here.count();
        let polled = Arc::new(Counting::default());
        let there = Waker::from(polled.clone());
        let moved = std::thread::spawn(move || {
            assert!(op.poll_unpin(&mut Context::from_waker(&there.clone())).is_pending());
            op
        });
        let op = moved.join().unwrap();
        gate.open();
        while polled.count() == 0 {
            assert!(Instant::now() < limit, "{mode:?}: the last task was not woken");
            std::thread::yield_now();
        }
        assert_eq!(here.count(), count, "{mode:?}: the first task has no future any more");
        assert_eq!(futures::executor::block_on(op).unwrap(), 5);
    }
}

/// Takes its time: wakes up when it was allowed to.
struct Slow {
    allowed: Mutex<Receiver<()>>,
    entered: Sender<()>,
}

impl Wake for Slow {
    fn wake(self: Arc<Self>) {
        self.entered.send(()).ok();
        self.allowed.lock().recv_timeout(Duration::from_millis(50)).ok();
    }
}

#[test]
fn a_waker_that_blocks_for_a_while_delays_others_and_loses_nobody() {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
        let gates = [Gate::close(&stream).unwrap(), Gate::close(&other).unwrap()];
        let (_never, allowed) = channel();
        let (entered, woken) = channel();
        let waker = Waker::from(Arc::new(Slow { allowed: Mutex::new(allowed), entered }));
        let mut slow = stream.host_fn(|| 1);
        let others: Vec<_> = (0..8).map(|n| other.host_fn(move || n)).collect();
        assert!(slow.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        let waiting = std::thread::spawn(|| futures::executor::block_on(join_all(others)));
        drop(gates);
        assert_eq!(waiting.join().unwrap().unwrap(), (0..8).collect::<Vec<_>>(), "{mode:?}");
        woken.recv_timeout(Duration::from_secs(10)).expect("the slow one is woken");
        assert_eq!(slow.synchronize().unwrap(), 1, "{mode:?}");
    }
}

#[tokio::test]
async fn the_loser_of_a_select_goes_on_and_can_be_awaited() {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
        let gate = Gate::close(&a).unwrap();
        let (mut late, mut early) = (a.host_fn(|| "late"), b.host_fn(|| "early"));
        let mut rounds = Vec::new();
        for _ in 0..2 {
            futures::select! {
                won = late => rounds.push(won.unwrap()),
                won = early => {
                    rounds.push(won.unwrap());
                    gate.open();
                }
            }
        }
        assert_eq!(rounds, ["early", "late"], "{mode:?}");
        // `select!` makes all its futures, and drops this one without a poll.
        let ran = Arc::new(AtomicU32::new(0));
        let counted = ran.clone();
        tokio::select! {
            biased;
            () = std::future::ready(()) => {}
            _ = a.host_fn(move || counted.fetch_add(1, Ordering::SeqCst)) => {}
        }
        a.done().await.unwrap();
        assert_eq!(ran.load(Ordering::SeqCst), 1, "{mode:?}: it was on its stream");
    }
}

#[test]
fn a_poll_after_the_wake_up_is_ready() {
    for mode in modes::ALL {
        let (device, step) = testing::manual_with(mode);
        let stream = device.stream().unwrap();
        for _ in 0..20 {
            let mut op = stream.host_fn(|| ());
            let counting = Arc::new(Counting::default());
            let waker = Waker::from(counting.clone());
            assert!(op.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
            while counting.count() == 0 {
                assert!(step.step(0), "{mode:?}: nothing left to run, and nobody was woken");
            }
            let polled = op.poll_unpin(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(polled, Poll::Ready(Ok(()))), "{mode:?}");
        }
    }
}
