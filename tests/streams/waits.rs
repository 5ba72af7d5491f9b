//! Waiting beside others: a thread that blocks, and a task whose operations are complete at once.
#![forbid(unsafe_code)]

#[path = "../../src/op/asleep.rs"]
mod asleep;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

use asleep::Asleep;
use futures::FutureExt;
use futures::executor::block_on;
use gpu_await::testing;
use gpu_await::{Batcher, Device, Error, Result, kernels};

const SOON: Duration = Duration::from_secs(10);

/// Does something when it is woken.
struct OnWake<F>(F);

impl<F: Fn() + Send + Sync + 'static> Wake for OnWake<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

fn on_wake(act: impl Fn() + Send + Sync + 'static) -> Waker {
    Waker::from(Arc::new(OnWake(act)))
}

/// A thread that blocks on an operation is woken while it calls foreign wakers, one of which waits itself.
#[test]
fn a_nested_wait_takes_no_wake_up() {
    let (done, is_done) = channel();
    thread::spawn(move || {
        let asleep = Arc::new(Asleep::default());
        Waker::from(asleep.clone()).wake();
        // As any wait for something else does.
        thread::current().unpark();
        thread::park_timeout(SOON);
        asleep.until_woken();
        done.send(()).unwrap();
    });
    is_done.recv_timeout(SOON).expect("it was woken before the nested wait");
}

/// While a task that was woken waits for a worker, whoever comes new to a wait yields once before it looks:
/// what it awaits may always be complete by then, and it would keep the worker.
#[test]
fn who_was_woken_goes_first() {
    let (device, stepper) = testing::manual();
    let [a, b, c] = [(); 3].map(|()| device.stream().unwrap());
    let counting = || {
        let count = Arc::new(AtomicU32::new(0));
        let waker = on_wake({
            let count = count.clone();
            move || {
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        (move || count.load(Ordering::SeqCst), waker)
    };
    // How often a wait that begins wakes its own task, which is not polled until it is woken.
    let yields = || {
        let (woken, waker) = counting();
        let mut op = b.host_fn(|| ());
        let mut polled = 0;
        while polled <= woken() {
            assert!(op.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
            polled += 1;
        }
        polled - 1
    };
    let woken = || {
        let mut op = a.host_fn(|| ());
        assert!(op.poll_unpin(&mut Context::from_waker(Waker::noop())).is_pending());
        stepper.run_until_idle();
        assert!(op.is_complete(), "and its task woken");
        op
    };
    assert_eq!(yields(), 0, "nobody waits for a worker");
    let others = [woken(), woken()];
    assert_eq!(yields(), 1, "the others first");
    assert_eq!(yields(), 1);
    stepper.run_until_idle();
    // An operation on two streams waits for one after the other: for `first` first, or for the other.
    let waits_for_two = [0, 1].map(|first| {
        let (woken, waker) = counting();
        let mut cx = Context::from_waker(&waker);
        let mut both = b.host_fn(|| ()).and(c.host_fn(|| ()));
        assert!(both.poll_unpin(&mut cx).is_pending());
        assert!(both.poll_unpin(&mut cx).is_pending());
        assert_eq!(woken(), 1);
        while woken() == 1 {
            assert!(stepper.step(first));
        }
        let waits_for_two = both.poll_unpin(&mut cx).is_pending();
        assert_eq!(woken(), 2, "once for an operation");
        stepper.run_until_idle();
        waits_for_two
    });
    assert_ne!(waits_for_two, [false; 2]);
    let [polled, dropped] = others;
    polled.now_or_never().unwrap().unwrap();
    assert_eq!(yields(), 1, "the other one first");
    drop(dropped);
    assert_eq!(yields(), 0, "they had their turn");
}

fn one_thread() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// How often a task awaits what `make` makes, which is always ready at once, until another task of the
/// runtime ran; at most `most` times.
async fn awaits_beside_another<F: Future>(most: u32, mut make: impl FnMut() -> F) -> u32 {
    let ran = Arc::new(AtomicBool::new(false));
    let other = tokio::spawn({
        let ran = ran.clone();
        async move { ran.store(true, Ordering::SeqCst) }
    });
    let mut awaits = 0;
    while awaits < most && !ran.load(Ordering::SeqCst) {
        make().await;
        awaits += 1;
    }
    other.await.expect("no panic");
    awaits
}

/// What tokio gives a task for a poll, and a few.
const BUDGET: u32 = 140;
const MANY: u32 = 20_000;

#[test]
fn a_task_that_never_waits_lets_others_run() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    stream.zeros::<u8>(4).synchronize().unwrap();
    let pool = device.streams(1).unwrap();
    let lost = {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let told = device.lost();
        handle.lose_device("a test");
        block_on(told.clone());
        told
    };
    let closed = Device::host();
    block_on(closed.close(SOON)).unwrap();
    let refused = closed.default_stream().clone();
    let gone = {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        handle.lose_device("a test");
        block_on(device.lost());
        device
    };
    let nothing = stream.zeros::<u8>(0).queued().unwrap();
    let ours = || device.pinned::<u8>(1).unwrap();
    let (batcher, worker) = Batcher::builder()
        .max_waiting(1)
        .build(|batch: Vec<u32>| async { Ok::<_, Error>(batch.into_iter().map(Ok).collect()) });
    let _waits = batcher.call(1);
    let pinned = device.pinned::<u8>(100).unwrap();
    drop(pinned);

    one_thread().block_on(async {
        let counts = [
            ("an operation", awaits_beside_another(MANY, || stream.done()).await),
            ("a refused one", awaits_beside_another(MANY, || refused.done()).await),
            ("throttle", awaits_beside_another(MANY, || stream.throttle(100)).await),
            ("a place in a pool", awaits_beside_another(MANY, || pool.acquire()).await),
            ("an empty pool", awaits_beside_another(MANY, || pool.drained()).await),
            ("a refused request", awaits_beside_another(MANY, || batcher.call(2)).await),
            ("a loss", awaits_beside_another(MANY, || lost.clone()).await),
            ("pinned memory", awaits_beside_another(MANY, || device.pinned_async::<u8>(100)).await),
            ("memory that is there", awaits_beside_another(MANY, || stream.reclaimed(1)).await),
            ("nothing, up", awaits_beside_another(MANY, || stream.upload_staged(vec![0; 0])).await),
            ("pinned, up", awaits_beside_another(1000, || stream.upload_staged(ours())).await),
            (
                "nothing, down",
                awaits_beside_another(MANY, || stream.download_staged(&nothing)).await,
            ),
            ("itself as a peer", awaits_beside_another(MANY, || device.enable_peer(&device)).await),
            ("a kernel", awaits_beside_another(1000, || kernels::scale::load(&device)).await),
            // Each is refused at once.
            ("a copy up", awaits_beside_another(MANY, || refused.upload_staged(vec![0; 0])).await),
            (
                "a copy down",
                awaits_beside_another(MANY, || refused.download_staged(&nothing)).await,
            ),
            ("memory", awaits_beside_another(MANY, || refused.reclaimed(1)).await),
            ("a buffer", awaits_beside_another(MANY, || closed.pinned_async::<u8>(1)).await),
            ("a peer", awaits_beside_another(MANY, || closed.enable_peer(&device)).await),
            ("a trim", awaits_beside_another(MANY, || gone.trim(0)).await),
            ("a trim of pinned memory", awaits_beside_another(MANY, || gone.trim_pinned(0)).await),
            ("the end of a lost device", awaits_beside_another(MANY, || gone.close(SOON)).await),
        ];
        let starved: Vec<_> = counts.into_iter().filter(|(_, awaits)| *awaits >= BUDGET).collect();
        assert!(starved.is_empty(), "another task did not run: {starved:?}");
        // The same inside of a task.
        let stream = stream.clone();
        let task = tokio::spawn(async move { awaits_beside_another(MANY, || stream.done()).await });
        let awaits = task.await.expect("no panic");
        assert!(awaits < BUDGET, "in a task: {awaits}");
    });
    drop(worker);
}

#[test]
fn an_unconstrained_task_is_not_put_off() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    stream.zeros::<u8>(4).synchronize().unwrap();
    one_thread().block_on(async {
        let stubborn = awaits_beside_another(1000, || stream.done());
        assert_eq!(tokio::task::unconstrained(stubborn).await, 1000);
    });
}

/// Without budget left: what asks, blocks or brings an executor of its own gets on.
#[test]
fn an_executor_inside_of_a_task_gets_on() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let (done, is_done) = channel();
    let thread = thread::spawn(move || {
        let result: Result<()> = one_thread().block_on(async {
            // One poll, in which all of it goes.
            while tokio::task::coop::has_budget_remaining() {
                tokio::task::consume_budget().await;
            }
            for n in 0..1000 {
                assert_eq!(block_on(stream.host_fn(move || n))?, n);
                assert_eq!(stream.host_fn(move || n).synchronize()?, n);
                block_on(stream.throttle(0))?;
            }
            let mut op = stream.done();
            assert!(op.is_complete());
            stream.synchronize()?;
            op.try_take().expect("it is complete")?;
            assert!(!tokio::task::coop::has_budget_remaining(), "it is still the same poll");
            Ok(())
        });
        done.send(result).unwrap();
    });
    is_done.recv_timeout(2 * SOON).expect("it hangs").unwrap();
    thread.join().unwrap();
}

/// A future that is put off is woken through its own waker: that is how a future in a set, or in
/// another executor's hands, is polled again.
#[test]
fn a_future_that_is_put_off_wakes_its_own_waker() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    stream.synchronize().unwrap();
    one_thread().block_on(async {
        while tokio::task::coop::has_budget_remaining() {
            tokio::task::consume_budget().await;
        }
        let woken = Arc::new(AtomicU32::new(0));
        let count = woken.clone();
        let waker = on_wake(move || _ = count.fetch_add(1, Ordering::SeqCst));
        let mut op = stream.done();
        assert!(op.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        assert!(op.poll_unpin(&mut Context::from_waker(&waker)).is_ready());
    });
}
