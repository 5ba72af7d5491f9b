//! No wake-up is lost and none waits for a neighbour, whatever an executor does with its tasks.
//!
//! A future may be polled, left, and never polled again unless the waker that it was given is woken.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{Device, Stream};
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::task::LocalSet;

const ROUNDS: usize = 1_000;
/// What is later than this is lost.
const SOON: Duration = Duration::from_secs(10);

fn device_and_stream() -> (Device, Stream) {
    let device = testing::device();
    let stream = device.stream().unwrap();
    // How long work takes is learned: the rounds are alike.
    stream.host_fn(|| ()).synchronize().unwrap();
    (device, stream)
}

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// A runtime stops in the middle of a wait, and another `block_on` takes the task up.
#[test]
fn a_task_left_by_block_on_is_woken() {
    let (_device, stream) = device_and_stream();
    let runtime = current_thread();
    for round in 0..ROUNDS {
        let local = LocalSet::new();
        let gate = Gate::close(&stream).unwrap();
        let op = stream.done();
        let task = local.spawn_local(op);
        // As long each time: that is learned, and the task looks for itself when the runtime stops.
        let runs = local.run_until(std::future::pending::<()>());
        let limit = Duration::from_millis(2);
        assert!(runtime.block_on(async { tokio::time::timeout(limit, runs).await }).is_err());
        gate.open();
        let awaited = async { tokio::time::timeout(SOON, local.run_until(task)).await };
        let awaited = runtime.block_on(awaited);
        awaited.unwrap_or_else(|_| panic!("lost in round {round}")).unwrap().unwrap();
    }
}

/// A task's operation is polled for it by a thread with an executor of its own, as a combinator may.
#[test]
fn a_waker_of_another_task_is_woken() {
    let (_device, stream) = device_and_stream();
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for round in 0..ROUNDS {
        let gate = Gate::close(&stream).unwrap();
        let mut op = stream.done();
        let (sender, given) = std::sync::mpsc::channel::<Waker>();
        let may_end = Arc::new(AtomicBool::new(false));
        let ends = may_end.clone();
        let task = runtime.spawn(std::future::poll_fn(move |cx| {
            sender.send(cx.waker().clone()).ok();
            if ends.load(Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        }));
        let waker = given.recv().unwrap();
        futures::executor::block_on(async {
            assert!(op.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        });
        may_end.store(true, Ordering::SeqCst);
        gate.open();
        let ended = runtime.block_on(async { tokio::time::timeout(SOON, task).await });
        ended.unwrap_or_else(|_| panic!("lost in round {round}")).unwrap();
        op.synchronize().unwrap();
    }
}

/// A task spawns another, or sends to one, which then keeps the worker busy until the first goes on.
#[test]
fn a_busy_neighbour_delays_nobody() {
    let (_device, stream) = device_and_stream();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for round in 0..ROUNDS / 5 {
        for sends in [false, true] {
            let stream = stream.clone();
            let went_on = runtime.spawn(async move {
                let gone_on = Arc::new(AtomicBool::new(false));
                let until = gone_on.clone();
                let start = Instant::now();
                let work = move || {
                    while !until.load(Ordering::SeqCst) && start.elapsed() < SOON {
                        std::hint::spin_loop();
                    }
                    start.elapsed() < SOON
                };
                let (sender, receiver) = tokio::sync::oneshot::channel();
                let neighbour = tokio::spawn(async move {
                    receiver.await.unwrap();
                    work()
                });
                if sends {
                    // It waits by now.
                    tokio::task::yield_now().await;
                }
                sender.send(()).unwrap();
                stream.host_fn(|| ()).await.unwrap();
                gone_on.store(true, Ordering::SeqCst);
                neighbour.await.unwrap()
            });
            assert!(runtime.block_on(went_on).unwrap(), "held up in round {round}, sends: {sends}");
        }
    }
}

/// The same task on one executor after the other, from one poll to the next.
#[test]
fn a_future_changes_its_executor() {
    let (_device, stream) = device_and_stream();
    let runtime = current_thread();
    for round in 0..ROUNDS {
        let gate = Gate::close(&stream).unwrap();
        let op = Arc::new(Mutex::new(stream.done()));
        let poll_once = || {
            let op = op.clone();
            async move {
                std::future::poll_fn(move |cx| Poll::Ready(op.lock().poll_unpin(cx).is_pending()))
                    .await
            }
        };
        let pending = match round % 4 {
            0 => runtime.block_on(async { tokio::spawn(poll_once()).await.unwrap() }),
            1 => smol::block_on(poll_once()),
            2 => futures::executor::block_on(poll_once()),
            _ => LocalSet::new().block_on(&runtime, poll_once()),
        };
        assert!(pending, "the gate is closed");
        gate.open();
        let (op, soon) = (op.clone(), Instant::now() + SOON);
        let last = std::future::poll_fn(move |cx| op.lock().poll_unpin(cx));
        match round / 4 % 3 {
            0 => smol::block_on(last).unwrap(),
            1 => futures::executor::block_on(last).unwrap(),
            _ => runtime.block_on(async { tokio::spawn(last).await.unwrap() }).unwrap(),
        }
        assert!(Instant::now() < soon, "lost in round {round}");
    }
}

/// One wait after the other on each kind of executor, with nobody else to wake it.
#[test]
fn none_is_lost_on_any_executor() {
    let (_device, stream) = device_and_stream();
    let waits = |stream: Stream| async move {
        for round in 0..ROUNDS {
            let gate = Gate::close(&stream).unwrap();
            let op = stream.done();
            let opener = std::thread::spawn(move || gate.open());
            op.await.unwrap_or_else(|error| panic!("round {round}: {error}"));
            opener.join().unwrap();
        }
    };
    let start = Instant::now();
    current_thread().block_on(waits(stream.clone()));
    let workers = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    workers.block_on(async { tokio::spawn(waits(stream.clone())).await.unwrap() });
    smol::block_on(waits(stream.clone()));
    futures::executor::block_on(waits(stream));
    assert!(start.elapsed() < 6 * SOON, "gates have opened by themselves");
}
