//! Deadlines of pools and batchers: a device's poller tells them, whoever else is held up, and on a manual device its steps do.
#![forbid(unsafe_code)]

use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::executor::block_on;
use gpu_await::testing::{self, Stepper};
use gpu_await::{
    Batch, Batcher, Device, Error, ErrorDetail, ErrorKind, PooledStream, Result, StreamPool,
};

const SOON: Duration = Duration::from_secs(15);
const MOMENT: Duration = Duration::from_millis(20);
/// So long that a test would not end in time.
const LONG: Duration = Duration::from_secs(3600);

/// On a thread that does nothing else.
fn soon<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let timeout = async { tokio::time::timeout(SOON, future).await };
    runtime.expect("a runtime").block_on(timeout).expect("somebody tells it")
}

fn pool(device: &Device) -> StreamPool {
    let builder = StreamPool::builder().streams(device, 1).max_in_flight(1);
    builder.build().expect("a pool")
}

fn is_expired<T>(result: Result<T>) {
    let error = result.map(drop).expect_err("it is too late");
    assert!(matches!(error.detail(), ErrorDetail::Expired { .. }), "{error}");
}

async fn echo(batch: Vec<u32>) -> Result<Vec<Result<u32>>> {
    Ok(batch.into_iter().map(Ok).collect())
}

async fn echo_of_pool(_: PooledStream, batch: Batch<u32>) -> Result<Vec<Result<u32>>> {
    echo(batch.into_requests()).await
}

/// The function of a batch keeps the worker's thread: the calls behind it are told at their deadlines all the same, and their requests are
/// in no batch.
#[test]
fn a_batch_that_blocks_delays_no_deadline() -> Result<()> {
    let device = testing::device();
    let streams = pool(&device);
    for pool in [None, Some(&streams)] {
        let (began, begins) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let block = move |batch: &[u32]| {
            began.send(batch.to_vec()).expect("the test waits");
            released.recv().expect("the test lets it go on");
        };
        let builder = Batcher::builder().max_in_flight(1);
        let (batcher, worker) = match pool {
            None => builder.build(move |batch| {
                block(&batch);
                echo(batch)
            }),
            Some(pool) => builder.pool(pool).build(move |stream, batch: Batch<u32>| {
                block(&batch);
                echo_of_pool(stream, batch)
            }),
        };
        let first = batcher.call(1);
        let worker = std::thread::spawn(move || block_on(worker));
        assert_eq!(begins.recv().expect("it begins"), [1]);
        let start = Instant::now();
        let calls = [batcher.call_by(2, start + MOMENT), batcher.with_patience(MOMENT).call(3)];
        let behind = batcher.call(4);
        for call in calls {
            is_expired(soon(call));
        }
        assert!(start.elapsed() >= MOMENT);
        assert_eq!((batcher.stats().expired, batcher.stats().waiting), (2, 1));
        release.send(()).expect("it waits");
        assert_eq!(begins.recv().expect("it begins"), [4]);
        release.send(()).expect("it waits");
        assert_eq!((soon(first)?, soon(behind)?), (1, 4));
        drop(batcher);
        worker.join().expect("no panic");
    }
    Ok(())
}

/// A worker that nobody polls, of a batcher with a pool and of one without.
#[test]
fn a_worker_that_is_not_polled_delays_no_deadline() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device);
    let workers = [
        Batcher::builder().build(echo),
        Batcher::builder().patience(LONG).pool(&pool).build(echo_of_pool),
    ];
    for (batcher, worker) in workers {
        // A later one first: the earlier one is not held up by it.
        let mut patient = batcher.call_by(1, Instant::now() + LONG);
        assert!((&mut patient).now_or_never().is_none());
        let start = Instant::now();
        is_expired(soon(batcher.call_by(2, start + MOMENT)));
        is_expired(soon(batcher.with_patience(MOMENT).call(3)));
        assert!(start.elapsed() >= 2 * MOMENT);
        assert_eq!((batcher.stats().expired, batcher.stats().waiting), (2, 1));
        drop(patient);
        let by = batcher.call_by(4, Instant::now() + LONG);
        drop(batcher);
        let (answer, ()) = soon(futures::future::join(by, worker));
        assert_eq!(answer?, 4);
    }
    Ok(())
}

/// The poller of a device that is lost or closed, and whose last handle is gone, tells deadlines as before.
#[test]
fn a_device_that_has_ended_tells_deadlines() -> Result<()> {
    let (faults, handle) = testing::faults();
    let lost = testing::host_with(faults);
    let closed = Device::host();
    let other = testing::device();
    for (device, loses) in [(lost, true), (closed, false)] {
        let builder = StreamPool::builder().streams(&device, 1).streams(&other, 1);
        let pool = builder.max_in_flight(2).build()?;
        let held = [pool.try_acquire()?, pool.try_acquire()?];
        let waits = pool.drained_within(MOMENT);
        if loses {
            handle.lose_device("a test");
            assert!(soon(device.lost()).is_device_lost());
        } else {
            soon(device.close(SOON))?;
        }
        drop(device);
        // One from before, one from after; and of the requests for the other device.
        for waits in [waits, pool.drained_within(MOMENT)] {
            let error = soon(waits).expect_err("two are held");
            assert!(
                matches!(error.detail(), ErrorDetail::TimedOut { left, .. } if left.permits == 2)
            );
        }
        let start = Instant::now();
        is_expired(soon(pool.acquire_by(start + MOMENT)));
        is_expired(soon(pool.with_patience(MOMENT).acquire()));
        let (batcher, worker) = Batcher::builder().patience(MOMENT).pool(&pool).build(echo_of_pool);
        is_expired(soon(batcher.call(1)));
        assert!(start.elapsed() >= 3 * MOMENT);
        drop((held, batcher, worker));
    }
    Ok(())
}

/// A waker that counts.
#[derive(Default)]
struct Bell(AtomicU32);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A request that takes as much as there is holds up no other once its time is over, though nobody polls it.
#[test]
fn a_request_that_is_not_polled_holds_up_no_other() -> Result<()> {
    let (device, step) = testing::manual();
    let pool = StreamPool::builder().streams(&device, 1).max_in_flight(2).build()?;
    let held = pool.try_acquire()?;
    let mut heavy = pool.with_weight(2).with_patience(MOMENT).acquire();
    assert!((&mut heavy).now_or_never().is_none());
    let mut light = pool.acquire();
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(bell.clone());
    assert!(light.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
    pass(&step, MOMENT);
    assert_eq!(bell.0.load(Ordering::SeqCst), 1, "it has the permit");
    drop((light.now_or_never().expect("at once")?, held));
    is_expired(heavy.now_or_never().expect("at once"));
    Ok(())
}

/// Lets the time of a manual device pass.
fn pass(step: &Stepper, time: Duration) {
    step.advance(time);
    while step.step(0) {}
}

/// On a manual device each deadline counts its steps, and no time.
#[test]
fn steps_tell_deadlines() -> Result<()> {
    let (device, step) = testing::manual();
    let pool = pool(&device);
    let held = pool.try_acquire()?;
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(bell.clone());
    let cx = &mut Context::from_waker(&waker);
    let told = || bell.0.swap(0, Ordering::SeqCst);
    let mut patient = pool.with_patience(LONG).acquire();
    let mut by = pool.acquire_by(Instant::now() + 2 * LONG);
    let mut drained = pool.drained_within(2 * LONG);
    assert!(patient.poll_unpin(cx).is_pending() && by.poll_unpin(cx).is_pending());
    assert!(drained.poll_unpin(cx).is_pending());
    pass(&step, LONG - MOMENT);
    assert_eq!(told(), 0);
    pass(&step, MOMENT);
    assert_eq!(told(), 1);
    is_expired(patient.now_or_never().expect("at once"));
    pass(&step, LONG);
    assert_eq!(told(), 2);
    is_expired(by.now_or_never().expect("at once"));
    let error = drained.now_or_never().expect("at once").expect_err("one is held");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    drop(held);
    // The pool is drained.
    told();
    // A batch is due when its delay is over, and a call is told when it waits for a permit for too long.
    let (batcher, worker) = Batcher::builder().max_delay(LONG).pool(&pool).build(echo_of_pool);
    let mut worker = pin!(worker);
    let mut call = batcher.call(1);
    assert!(worker.as_mut().poll(cx).is_pending() && call.poll_unpin(cx).is_pending());
    pass(&step, LONG - MOMENT);
    assert_eq!(told(), 0);
    pass(&step, MOMENT);
    assert_eq!(told(), 1);
    assert!(worker.as_mut().poll(cx).is_pending());
    assert_eq!(call.now_or_never().expect("it ran")?, 1);
    let held = pool.try_acquire()?;
    let mut call = batcher.with_patience(LONG).call(2);
    assert!(worker.as_mut().poll(cx).is_pending() && call.poll_unpin(cx).is_pending());
    told();
    pass(&step, LONG);
    assert!(told() > 0);
    is_expired(call.now_or_never().expect("at once"));
    // Nobody steps it any more: what is left is told.
    let mut drained = pool.drained_within(LONG);
    assert!(drained.poll_unpin(cx).is_pending());
    told();
    drop(step);
    assert!(told() > 0);
    assert!(drained.now_or_never().expect("at once").is_err());
    drop((batcher, held));
    assert_eq!(worker.as_mut().poll(cx), Poll::Ready(()));
    Ok(())
}

/// A deadline that is over, and one that never comes.
#[test]
fn the_ends_of_time() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device);
    let held = pool.try_acquire()?;
    let (batcher, worker) = Batcher::builder().pool(&pool).build(echo_of_pool);
    let now = Instant::now();
    is_expired(soon(pool.acquire_by(now)));
    let refused = soon(batcher.call_by(1, now)).expect_err("it is over");
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
    let patient = pool.with_patience(Duration::MAX).acquire();
    let call = batcher.with_patience(Duration::MAX).call(2);
    let mut both = pin!(futures::future::join3(patient.map(|held| held.map(drop)), call, worker));
    assert!(both.as_mut().now_or_never().is_none());
    assert!(soon(pool.drained_within(Duration::ZERO)).is_err());
    drop((held, batcher));
    let (permit, answer, ()) = soon(both);
    permit?;
    assert_eq!(answer?, 2);
    soon(pool.drained_within(Duration::MAX))?;
    Ok::<(), Error>(())
}
