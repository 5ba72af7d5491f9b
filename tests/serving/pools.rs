//! Stream pools: who is admitted, and when a permit comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::executor::block_on;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    Acquire, Device, ErrorDetail, ErrorKind, PoolShare, PooledStream, PooledStreamState, Result,
    StreamPool, Unfinished, kernels,
};

use crate::SOON;
use crate::under_test::eventually::eventually;
use crate::under_test::held_pool::hold_for;
use crate::under_test::host_threads::threads_of_host;

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

/// A pool with one stream.
fn pool(device: &Device, max_in_flight: usize, max_waiting: usize) -> StreamPool {
    let builder = StreamPool::builder().streams(device, 1);
    builder.max_in_flight(max_in_flight).max_waiting(max_waiting).build().expect("a pool")
}

/// Takes its turn in the queue; it must not get in.
fn queue_up(acquire: &mut Acquire) {
    assert!(acquire.now_or_never().is_none(), "there was a permit");
}

fn is_full(result: Result<PooledStream>) -> bool {
    matches!(result.map(drop).map_err(|error| error.kind()), Err(ErrorKind::Overloaded))
}

fn kind(result: Result<PooledStream>) -> ErrorKind {
    result.map(drop).expect_err("it was let in").kind()
}

/// Who never waits is answered, also in a task that has used up what tokio lets it do in one poll.
#[tokio::test]
async fn an_answer_at_once_needs_no_budget() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 1);
    let task = tokio::spawn(async move {
        for _ in 0..1000 {
            drop(pool.try_acquire()?);
        }
        let held = pool.try_acquire()?;
        tokio::task::consume_budget().await;
        while tokio::task::coop::has_budget_remaining() {
            let spent = std::future::poll_fn(tokio::task::coop::poll_proceed).await;
            spent.made_progress();
        }
        assert!(is_full(pool.try_acquire()));
        drop(held);
        drop(pool.try_acquire()?);
        Ok(())
    });
    task.await.expect("no panic")
}

#[tokio::test]
async fn a_permit_is_released_when_the_device_has_finished() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 1);
    let stream = pool.acquire().await?;
    let gate = Gate::close(&stream)?;
    let held_up = stream.done();
    // The request gives up; the device has not.
    drop(held_up);
    drop(stream);
    let mut next = pool.acquire();
    queue_up(&mut next);
    assert!(is_full(pool.try_acquire()));
    assert_eq!(pool.stats().in_flight, 1);
    gate.open();
    let stream = soon(next).await?;
    assert!(stream.waited() > Duration::ZERO);
    drop(stream);
    soon(pool.drained()).await;
    Ok(())
}

#[tokio::test]
async fn a_permit_does_not_wait_for_others_on_its_stream() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 2, 1);
    let (a, b) = (pool.acquire().await?, pool.acquire().await?);
    assert_eq!(a.id(), b.id());
    let x = a.upload(vec![1u32; 100]).queued()?;
    assert_eq!(a.download(&x).await?, [1; 100]);
    let gate = Gate::close(&b)?;
    drop(a);
    assert_eq!(pool.stats().in_flight, 1, "its own work is done, whatever came behind it");
    drop(pool.try_acquire()?);
    drop(b);
    assert_eq!(pool.stats().in_flight, 1);
    gate.open();
    soon(pool.drained()).await;
    Ok(())
}

#[tokio::test]
async fn a_clone_of_the_stream_holds_the_permit() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 1);
    let pooled = pool.acquire().await?;
    let stream = (*pooled).clone();
    drop(pooled);
    assert!(is_full(pool.try_acquire()));
    stream.zeros::<f32>(8).await?;
    drop(stream);
    soon(pool.acquire()).await?;
    Ok(())
}

/// Batches, host functions, timings and copies in parts all go through the handle.
#[tokio::test]
async fn every_way_to_submit_is_counted() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 2, 1);
    let fill = kernels::fill::load(&device).await?;
    let other = pool.acquire().await?;
    let mut x = other.zeros::<f32>(64).queued()?;
    other.done().await?;
    type Submit<'a> = Box<dyn FnMut(&PooledStream) + 'a>;
    let mut ways: Vec<(&str, Submit<'_>)> = vec![
        ("launch", Box::new(|s| fill.launch(s, 7.0, &mut x).abandon())),
        ("batch", Box::new(|s| s.batch(|q| q.full(8, 1u8)).abandon())),
        ("host_fn", Box::new(|s| s.host_fn(|| ()).abandon())),
        ("timed", Box::new(|s| s.timed(|q| q.full(8, 1u8)).abandon())),
        ("record_timed", Box::new(|s| drop(s.record_timed()))),
    ];
    for (name, submit) in &mut ways {
        let stream = pool.acquire().await?;
        // In front of it on the same stream, but submitted through the other handle.
        let gate = Gate::close(&other)?;
        submit(&stream);
        drop(stream);
        assert_eq!(pool.stats().in_flight, 2, "{name}");
        gate.open();
        soon(other.done()).await?;
        drop(soon(pool.acquire()).await?);
    }
    Ok(())
}

#[tokio::test]
async fn a_cancelled_waiter_passes_its_permit_on() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 4);
    let stream = pool.acquire().await?;
    let (mut first, mut second) = (pool.acquire(), pool.acquire());
    queue_up(&mut first);
    queue_up(&mut second);
    let third = tokio::spawn(pool.acquire());
    while pool.stats().waiting < 3 {
        tokio::task::yield_now().await;
    }
    drop(second);
    drop(stream);
    // The first one has the permit now, and goes without having come for it: the third is woken.
    drop(first);
    drop(soon(third).await.expect("no panic")?);
    assert_eq!((pool.stats().in_flight, pool.stats().waiting), (0, 0));
    Ok(())
}

/// It has the permit and never comes for it: nobody else releases one after that.
#[tokio::test]
async fn a_granted_waiter_that_goes_lets_the_pool_drain() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 4);
    let stream = pool.acquire().await?;
    let mut granted = pool.acquire();
    queue_up(&mut granted);
    drop(stream);
    let woken = Arc::new(Counts(AtomicUsize::new(0)));
    let waker = Waker::from(woken.clone());
    let mut drained = pool.drained();
    assert!(drained.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
    drop(granted);
    assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    assert!(drained.poll_unpin(&mut Context::from_waker(&waker)).is_ready());
    Ok(())
}

struct Counts(AtomicUsize);

impl Wake for Counts {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn high_priority_goes_first_and_gets_its_streams() -> Result<()> {
    let device = testing::device();
    let builder = StreamPool::builder().streams(&device, 1).high_priority_streams(&device, 1);
    let pool = builder.max_in_flight(1).build()?;
    let is_high = |stream: &PooledStream| {
        let stats = pool.stats();
        stats.streams.iter().any(|known| known.id == stream.id() && known.high_priority)
    };
    let stream = pool.acquire().await?;
    assert!(!is_high(&stream));
    let (mut normal, mut high) = (pool.acquire(), pool.with_high_priority().acquire());
    queue_up(&mut normal);
    queue_up(&mut high);
    drop(stream);
    queue_up(&mut normal);
    let stream = soon(high).await?;
    assert!(is_high(&stream));
    assert_eq!(stream.priority(), device.priority_range().1);
    drop(stream);
    assert!(!is_high(&soon(normal).await?));
    Ok(())
}

#[tokio::test]
async fn requests_are_spread_over_the_streams() -> Result<()> {
    let pool = testing::device().streams(3)?;
    let mut held = Vec::new();
    for _ in 0..6 {
        held.push(pool.acquire().await?);
    }
    let stats = pool.stats();
    assert!(stats.streams.iter().all(|stream| stream.in_flight == 2), "{stats:?}");
    assert_eq!((stats.in_flight, stats.max_in_flight, stats.granted), (6, 12, 6));
    let busy = held[0].id();
    held.retain(|stream| stream.id() == busy);
    for _ in 0..4 {
        let stream = pool.acquire().await?;
        assert_ne!(stream.id(), busy);
        held.push(stream);
    }
    Ok(())
}

#[tokio::test]
async fn a_full_pool_says_so() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 1);
    let stream = pool.acquire().await?;
    let mut waiting = pool.acquire();
    queue_up(&mut waiting);
    let error = pool.acquire().await.map(drop).expect_err("one waits already");
    assert_eq!(error.kind(), ErrorKind::Overloaded);
    assert_eq!(
        error.to_string(),
        "the stream pool is full: 1 of 1 in flight, 1 waiting of at most 1; retry later"
    );
    assert_eq!(pool.stats().refused, 1);
    drop(stream);
    soon(waiting).await?;
    let error = StreamPool::builder().build().map(drop).expect_err("no streams");
    assert!(matches!(error.detail(), ErrorDetail::TooFew { found: 0, least: 1, .. }));
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    assert!(device.streams(0).is_err());
    Ok(())
}

#[tokio::test]
async fn a_closed_pool_lets_nobody_in_and_drains() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 4);
    let stream = pool.acquire().await?;
    let gate = Gate::close(&stream)?;
    let waiting = tokio::spawn(pool.acquire());
    while pool.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    pool.close();
    let told = soon(waiting).await.expect("no panic").map(drop);
    assert_eq!(told.expect_err("closed").kind(), ErrorKind::Closed);
    assert_eq!(pool.acquire().await.map(drop).expect_err("closed").kind(), ErrorKind::Closed);
    let mut drained = Box::pin(pool.drained());
    drop(stream);
    assert!(drained.as_mut().now_or_never().is_none(), "the device is not through");
    gate.open();
    soon(drained).await;
    Ok(())
}

#[tokio::test]
async fn a_lost_device_takes_no_more_requests_and_the_others_go_on() -> Result<()> {
    let (faults, handle) = testing::faults();
    let (lost, well) = (testing::host_with(faults), Device::host());
    let pool =
        StreamPool::builder().streams(&lost, 1).streams(&well, 1).max_in_flight(2).build()?;
    let streams = [pool.acquire().await?, pool.acquire().await?];
    let gates = [Gate::close(&streams[0])?, Gate::close(&streams[1])?];
    drop(streams);
    handle.lose_device("a test");
    drop(gates);
    for _ in 0..4 {
        let stream = soon(pool.acquire()).await?;
        assert_eq!(stream.device().to_string(), well.to_string());
        stream.zeros::<u8>(4).await?;
    }
    Ok(())
}

/// A stream that fails at once would look free, and get every request.
#[tokio::test]
async fn a_stream_that_waits_for_a_lost_device_gets_no_more_requests() -> Result<()> {
    let (faults, handle) = testing::faults();
    let (other, device) = (testing::host_with(faults), Device::host());
    let pool = StreamPool::builder().streams(&device, 2).build()?;
    let theirs = other.stream()?;
    let gate = Gate::close(&theirs)?;
    let (stuck, well) = (pool.acquire().await?, pool.acquire().await?);
    stuck.wait(&theirs).queued()?;
    let (stuck_id, well_id) = (stuck.id(), well.id());
    handle.lose_device("on purpose");
    theirs.done().await.unwrap_err();
    drop((stuck, well));
    for _ in 0..20 {
        let stream = pool.acquire().await?;
        assert_eq!(stream.id(), well_id);
        stream.zeros::<u8>(10).await?;
    }
    let state_of = |id| {
        let streams = pool.stats().streams;
        streams.iter().find(|stream| stream.id == id).map(|stream| stream.state)
    };
    assert_eq!(state_of(stuck_id), Some(PooledStreamState::Stuck));
    assert_eq!(state_of(well_id), Some(PooledStreamState::Open));

    // Without any the pool says why, to those who wait as well.
    let pool = StreamPool::builder().streams(&device, 1).max_in_flight(1).build()?;
    let held = pool.acquire().await?;
    let mut waits = pool.acquire();
    assert!((&mut waits).now_or_never().is_none());
    let (faults, handle) = testing::faults();
    let other = testing::host_with(faults);
    let theirs = other.stream()?;
    let second = Gate::close(&theirs)?;
    held.wait(&theirs).queued()?;
    handle.lose_device("on purpose");
    theirs.done().await.unwrap_err();
    drop(held);
    for error in [soon(waits).await.unwrap_err(), pool.acquire().await.unwrap_err()] {
        assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
    }
    gate.open();
    second.open();
    Ok(())
}

#[tokio::test]
async fn who_waits_for_a_device_that_is_lost_is_told() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let pool = pool(&device, 1, 4);
    let stream = pool.acquire().await?;
    let gate = Gate::close(&stream)?;
    let waiting = tokio::spawn(pool.acquire());
    while pool.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    drop(stream);
    handle.lose_device("a test");
    drop(gate);
    let told = soon(waiting).await.expect("no panic").map(drop);
    assert_eq!(told.expect_err("lost").kind(), ErrorKind::DeviceLost);
    assert_eq!(pool.acquire().await.map(drop).expect_err("lost").kind(), ErrorKind::DeviceLost);
    soon(pool.drained()).await;
    Ok(())
}

/// A holder that never lets go: only the device can end the wait.
#[tokio::test]
async fn a_loss_ends_waits_for_held_permits() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let pool = pool(&device, 1, 1);
    let held = pool.acquire().await?;
    let mut normal = pool.acquire();
    queue_up(&mut normal);
    handle.lose_device("a test");
    assert_eq!(kind(soon(normal).await), ErrorKind::DeviceLost);
    assert_eq!(kind(soon(pool.acquire()).await), ErrorKind::DeviceLost);
    assert_eq!(kind(soon(pool.with_high_priority().acquire()).await), ErrorKind::DeviceLost);
    assert_eq!(kind(pool.try_acquire()), ErrorKind::DeviceLost);
    // Its holder is still to be waited for.
    let mut drained = pool.drained();
    assert!((&mut drained).now_or_never().is_none());
    drop(held);
    soon(drained).await;
    Ok(())
}

#[tokio::test]
async fn streams_of_a_lost_device_are_no_idle_ones() -> Result<()> {
    let (faults, handle) = testing::faults();
    let (lost, closed, open) = (testing::host_with(faults), testing::device(), testing::device());
    let devices = [&lost, &closed, &open];
    let builder = devices.iter().fold(StreamPool::builder(), |all, one| all.streams(one, 2));
    let pool = builder.build()?;
    let states = || pool.stats().streams.iter().map(|stream| stream.state).collect::<Vec<_>>();
    assert_eq!(states(), [PooledStreamState::Open; 6]);
    handle.lose_device("a test");
    closed.close(SOON).await?;
    let each = [PooledStreamState::Lost, PooledStreamState::Closed, PooledStreamState::Open];
    assert_eq!(states(), each.map(|state| [state; 2]).concat());
    Ok(())
}

#[tokio::test]
async fn a_close_ends_waits_for_held_permits() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 1);
    let held = pool.acquire().await?;
    let gate = Gate::close(&held)?;
    let waiting = tokio::spawn(pool.acquire());
    while pool.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    let mut lost = tokio::spawn(device.lost());
    tokio::task::yield_now().await;
    let mut close = Box::pin(device.close(SOON));
    assert!(close.as_mut().now_or_never().is_none(), "there is work");
    assert_eq!(kind(soon(waiting).await.expect("no panic")), ErrorKind::Closed);
    assert_eq!(kind(soon(pool.acquire()).await), ErrorKind::Closed);
    assert_eq!(kind(pool.try_acquire()), ErrorKind::Closed);
    gate.open();
    soon(close).await?;
    drop(held);
    soon(pool.drained()).await;
    // A close is no loss: whoever waits for one still does.
    assert!((&mut lost).now_or_never().is_none());
    lost.abort();
    Ok(())
}

/// A request that was granted a stream whose device is closed before it learns of that is counted as what becomes of it.
#[tokio::test]
async fn a_permit_on_a_closed_device_does_not_count() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 1);
    let held = pool.acquire().await?;
    let mut granted = pool.acquire();
    queue_up(&mut granted);
    drop(held);
    eventually("the waiter is granted", || pool.stats().granted == 2);
    soon(device.close(SOON)).await?;
    assert_eq!(kind(soon(granted).await), ErrorKind::Closed);
    let stats = pool.stats();
    assert_eq!((stats.granted, stats.closed, stats.given_up, stats.waiting), (1, 1, 0, 0));
    Ok(())
}

/// The second device is lost after the first one: only then nobody can come in any more.
#[tokio::test]
async fn waits_go_on_while_one_device_is_left() -> Result<()> {
    let ((one, lose_one), (two, lose_two)) = (testing::faults(), testing::faults());
    let (one, two) = (testing::host_with(one), testing::host_with(two));
    let builder = StreamPool::builder().streams(&one, 2).streams(&two, 1);
    let pool = builder.max_in_flight(3).build()?;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(pool.acquire().await?);
    }
    let (mut first, mut second) = (pool.acquire(), pool.acquire());
    queue_up(&mut first);
    queue_up(&mut second);
    lose_one.lose_device("a test");
    soon(one.lost()).await;
    queue_up(&mut first);
    assert!(is_full(pool.try_acquire()));
    held.retain(|stream| stream.device().to_string() == two.to_string());
    let granted = soon(first).await?;
    assert_eq!(granted.device().to_string(), two.to_string());
    let granted = [granted, soon(second).await?];
    assert!(granted.iter().all(|stream| stream.device().to_string() == two.to_string()));
    let mut third = pool.acquire();
    queue_up(&mut third);
    lose_two.lose_device("a test");
    assert_eq!(kind(soon(third).await), ErrorKind::DeviceLost);
    Ok(())
}

/// The device knows the pool only weakly, and forgets it with the pool.
#[tokio::test]
async fn a_pool_that_waited_keeps_no_device() -> Result<()> {
    #[derive(Debug)]
    enum End {
        Drop,
        Close,
        Loss,
    }
    for end in [End::Drop, End::Close, End::Loss] {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let ordinal = device.ordinal();
        let pool = pool(&device, 1, 1);
        let held = pool.acquire().await?;
        let mut waiting = pool.acquire();
        queue_up(&mut waiting);
        match end {
            End::Drop => drop((held, waiting, pool)),
            // Woken by it, and never polled again.
            End::Close => {
                soon(device.close(SOON)).await?;
                drop((pool, held, waiting));
            }
            End::Loss => {
                drop((held, waiting, pool));
                handle.lose_device("a test");
                soon(device.lost()).await;
            }
        }
        drop(device);
        eventually(&format!("its threads have ended: {end:?}"), || threads_of_host(ordinal) == 0);
    }
    Ok(())
}

/// Only the steps of the test run: nothing else can have brought the permit back.
#[test]
fn a_stepped_device_releases_with_the_step_that_completes() -> Result<()> {
    let (device, stepper) = testing::manual();
    let pool = pool(&device, 1, 4);
    let stream = pool.try_acquire()?;
    let x = stream.full(4, 1u32).queued()?;
    stream.download(&x).abandon();
    drop((stream, x));
    assert!(is_full(pool.try_acquire()));
    stepper.run_until_idle();
    drop(pool.try_acquire()?);
    Ok(())
}

#[test]
fn a_waker_may_use_the_pool() -> Result<()> {
    struct Asks(StreamPool, AtomicUsize);
    impl Wake for Asks {
        fn wake(self: Arc<Self>) {
            assert!(self.0.stats().in_flight <= 1);
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }
    let device = testing::device();
    let pool = pool(&device, 1, 4);
    let stream = pool.try_acquire()?;
    let asks = Arc::new(Asks(pool.clone(), AtomicUsize::new(0)));
    let waker = Waker::from(asks.clone());
    let mut waiting = pool.acquire();
    assert!(waiting.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
    drop(stream);
    assert_eq!(asks.1.load(Ordering::SeqCst), 1);
    drop(waiting);
    drop(pool.try_acquire()?);
    Ok(())
}

/// Requests of many tasks, some of them given up: never more on the device than the limit says.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn never_more_is_on_the_device_than_the_limit_says() -> Result<()> {
    const LIMIT: usize = 3;
    let device = testing::device();
    let builder = StreamPool::builder().streams(&device, 2).high_priority_streams(&device, 1);
    let pool = builder.max_in_flight(LIMIT).build()?;
    let (on_device, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let tasks: Vec<_> = (0..16)
        .map(|task| {
            let (pool, on_device, most) = (pool.clone(), on_device.clone(), most.clone());
            tokio::spawn(async move {
                for round in 0..50 {
                    let high = (task + round) % 5 == 0;
                    let stream = if high {
                        pool.with_high_priority().acquire().await?
                    } else {
                        pool.acquire().await?
                    };
                    // Counted from the submission on, which is before the device begins.
                    most.fetch_max(on_device.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    let mut x = stream.full(1000, task).queued()?;
                    stream.fill(&mut x, round).queued()?;
                    let leaves = on_device.clone();
                    let through = stream.host_fn(move || {
                        leaves.fetch_sub(1, Ordering::SeqCst);
                    });
                    if (task + round) % 3 == 0 {
                        through.abandon();
                    } else {
                        through.await?;
                    }
                }
                gpu_await::Result::<()>::Ok(())
            })
        })
        .collect();
    for task in tasks {
        soon(task).await.expect("no panic")?;
    }
    pool.close();
    soon(pool.drained()).await;
    assert_eq!(on_device.load(Ordering::SeqCst), 0);
    assert!((1..=LIMIT).contains(&most.load(Ordering::SeqCst)), "{most:?}");
    assert_eq!(pool.stats().granted, 16 * 50);
    Ok(())
}

const MOMENT: Duration = Duration::from_millis(20);

/// Nobody polls it, no permit comes back: the pool keeps the time.
#[test]
fn a_waiter_is_told_at_its_deadline() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 4);
    let held = pool.try_acquire()?;
    // A later one first: the earlier one is not held up by it.
    let mut patient = pool.acquire_by(Instant::now() + 1000 * MOMENT);
    queue_up(&mut patient);
    let start = Instant::now();
    let told = kind(futures::executor::block_on(pool.acquire_by(start + MOMENT)));
    assert_eq!(told, ErrorKind::TimedOut);
    assert!(start.elapsed() >= MOMENT && start.elapsed() < SOON);
    let told = futures::executor::block_on(pool.with_patience(MOMENT).acquire()).map(drop);
    let error = told.expect_err("the permit is held");
    assert!(matches!(error.detail(), ErrorDetail::Expired { waiting: 1, .. }), "{error}");
    assert_eq!((pool.stats().expired, pool.stats().waiting), (2, 1));
    drop(held);
    drop(futures::executor::block_on(patient)?);
    // One that has passed is not asked for long.
    assert_eq!(kind(futures::executor::block_on(pool.acquire_by(start))), ErrorKind::TimedOut);
    Ok(())
}

/// The pool has no patience left for a request whose predecessors took longer than it has time.
#[tokio::test]
async fn who_cannot_be_answered_is_refused_at_once() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 1, 100);
    // One that is held for longer than what follows has time.
    hold_for(&pool, 2 * MOMENT).await?;
    let held = soon(pool.acquire()).await?;
    let mut late = pool.acquire_by(Instant::now() + MOMENT);
    let error = (&mut late).now_or_never().expect("at once").map(drop).expect_err("too late");
    assert_eq!(error.kind(), ErrorKind::Overloaded);
    let ErrorDetail::TooLate { remaining_us, takes_us, .. } = error.detail() else {
        panic!("{error}");
    };
    assert!(remaining_us < takes_us, "{error}");
    // Whoever has time waits, and so does who has no deadline.
    let mut in_time = pool.acquire_by(Instant::now() + 100 * SOON);
    queue_up(&mut in_time);
    let mut patient = pool.acquire();
    queue_up(&mut patient);
    assert_eq!((pool.stats().refused, pool.stats().waiting), (1, 2));
    drop(held);
    drop(soon(in_time).await?);
    drop(soon(patient).await?);
    // A free permit, and nobody else has one: the estimate is put to the test.
    drop(soon(pool.acquire_by(Instant::now() + MOMENT)).await?);
    // Without patience: refused while it would wait, admitted else.
    let eager = pool.with_patience(Duration::ZERO);
    let held = soon(eager.acquire()).await?;
    assert!(is_full(soon(eager.acquire()).await));
    drop(held);
    drop(soon(eager.acquire()).await?);
    Ok(())
}

#[tokio::test]
async fn a_patience_for_all_is_a_deadline_for_each() -> Result<()> {
    let device = testing::device();
    let builder = StreamPool::builder().streams(&device, 1).max_in_flight(1).patience(MOMENT);
    let pool = builder.build()?;
    let held = pool.acquire().await?;
    for waiting in
        [pool.acquire(), pool.with_high_priority().acquire(), pool.with_weight(3).acquire()]
    {
        assert_eq!(kind(soon(waiting).await), ErrorKind::TimedOut);
    }
    drop(held);
    drop(soon(pool.acquire()).await?);
    Ok(())
}

/// On any executor, and what is left is told; what is drained in time is no error.
#[test]
fn a_pool_that_is_not_drained_in_time_says_what_is_left() -> Result<()> {
    let device = testing::device();
    let pool = StreamPool::builder().name("lane").streams(&device, 2).build()?;
    let (held, idle) = (block_on(pool.with_weight(3).acquire())?, block_on(pool.acquire())?);
    let gate = Gate::close(&held)?;
    let behind = held.host_fn(|| ());
    pool.close();
    let start = Instant::now();
    let error = block_on(pool.drained_within(MOMENT)).expect_err("two are held");
    assert!(start.elapsed() >= MOMENT && start.elapsed() < SOON);
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let ErrorDetail::TimedOut { what, limit_ms: 20, left } = error.detail() else {
        panic!("{error}")
    };
    assert_eq!(what, "draining the stream pool `lane`");
    let Unfinished { streams, operations, permits, loans, pending_bytes, .. } = *left;
    assert_eq!((streams, permits, loans, pending_bytes), (2, 4, 0, 0), "{error}");
    assert!(operations >= 2, "{error}");
    // Again, with one less.
    drop(idle);
    let error = block_on(pool.drained_within(MOMENT)).expect_err("one is held");
    assert!(matches!(error.detail(), ErrorDetail::TimedOut { left, .. } if left.permits == 3));
    let waits = std::thread::spawn({
        let pool = pool.clone();
        move || block_on(pool.drained_within(Duration::MAX))
    });
    drop(held);
    gate.open();
    behind.synchronize()?;
    waits.join().expect("no panic")?;
    block_on(pool.drained_within(Duration::ZERO))
}

#[tokio::test]
async fn a_heavy_request_takes_several_permits() -> Result<()> {
    let device = testing::device();
    let pool = pool(&device, 4, 9);
    let heavy = pool.with_weight(3).acquire().await?;
    let light = pool.acquire().await?;
    assert_eq!(pool.stats().in_flight, 4);
    let (mut second, mut behind) = (pool.with_weight(2).acquire(), pool.acquire());
    queue_up(&mut second);
    queue_up(&mut behind);
    drop(light);
    // One is free, the next wants two, and nobody overtakes it.
    queue_up(&mut behind);
    drop(heavy);
    let (second, behind) = (soon(second).await?, soon(behind).await?);
    assert_eq!(pool.stats().in_flight, 3);
    drop((second, behind));
    // More than there are is all there are.
    drop(soon(pool.with_weight(99).acquire()).await?);
    assert_eq!(pool.stats().in_flight, 0);
    Ok(())
}

#[tokio::test]
async fn a_share_has_its_own_limit_and_queue() -> Result<()> {
    let device = testing::device();
    let builder = StreamPool::builder().streams(&device, 1).max_in_flight(3).max_waiting(1);
    let pool = builder.share(PoolShare::new("big").max_in_flight(2)).build()?;
    let big = pool.with_share("big")?;
    let held = [big.acquire().await?, big.acquire().await?];
    let mut waiting = big.acquire();
    queue_up(&mut waiting);
    assert!(is_full(big.acquire().await), "its queue is full");
    // The third permit is not for it, but for everybody else.
    let other = soon(pool.acquire()).await?;
    let mut behind = pool.acquire();
    queue_up(&mut behind);
    let stats = pool.stats();
    let of = |name: &str| stats.shares.iter().find(|share| share.name == name).expect("there");
    assert_eq!((of("big").in_flight, of("big").waiting), (2, 1));
    assert_eq!((of("").in_flight, of("").waiting), (1, 1));
    drop(other);
    drop(soon(behind).await?);
    drop(held);
    drop(soon(waiting).await?);
    let error = pool.with_share("small").map(drop).expect_err("no such share");
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    assert!(error.to_string().contains("`small`"), "{error}");
    Ok(())
}

// ---- partitions ---------------------------------------------------------------------------------

/// The next permits are in the other partition; who waits loses nothing, and the one before is free when its last request is complete.
#[tokio::test]
async fn a_pool_moves_to_another_partition() -> Result<()> {
    const WAITING: usize = 50;
    let device = testing::device();
    let first = device.reserve_partition(1).await?;
    let pool = StreamPool::builder().streams_in(&first, 2).max_in_flight(2).build()?;
    let held = [pool.acquire().await?, pool.acquire().await?];
    assert!(held.iter().all(|stream| stream.in_partition().as_ref() == Some(&first)));
    // Where there is no other one, to the same. Before the gate: a GPU makes one when the kernels that run are over.
    let (there, is_other) = match device.reserve_partition(1).await {
        Ok(other) => (other, true),
        Err(_) => (first.clone(), false),
    };
    let gate = Gate::close(&held[0])?;
    let pending = held[0].full(10, 7u8).submitted()?;
    let waiting: Vec<_> = (0..WAITING)
        .map(|number| {
            let pool = pool.clone();
            tokio::spawn(async move {
                let stream = pool.acquire().await?;
                let x = stream.upload(vec![number; 10]).queued()?;
                Ok::<_, gpu_await::Error>((stream.download(&x).await?[9], stream.in_partition()))
            })
        })
        .collect();
    while pool.stats().waiting < WAITING {
        tokio::task::yield_now().await;
    }
    pool.move_to(&there)?;
    drop(first);
    drop(held);
    assert_eq!(device.stats().partitions, 1 + u64::from(is_other), "one request is pending there");
    gate.open();
    for (number, task) in waiting.into_iter().enumerate() {
        assert_eq!(soon(task).await.expect("no panic")?, (number, Some(there.clone())));
    }
    drop(soon(pending).await?);
    eventually("the first is free", || device.stats().partitions == 1);
    assert_eq!((pool.stats().granted as usize, pool.stats().refused), (WAITING + 2, 0));
    assert!(pool.stats().streams.iter().all(|stream| stream.in_flight == 0));
    Ok(())
}

/// A pool's streams of other devices stay where they are.
#[tokio::test]
async fn a_pool_of_two_devices_moves_on_one() -> Result<()> {
    let (here, there) = (Device::host(), Device::host());
    let pool = StreamPool::builder().streams(&here, 1).high_priority_streams(&there, 1).build()?;
    let partition = there.reserve_partition(1).await?;
    pool.move_to(&partition)?;
    assert_eq!(pool.acquire().await?.in_partition(), None);
    assert_eq!(pool.with_high_priority().acquire().await?.in_partition(), Some(partition));
    let elsewhere = Device::host().reserve_partition(1).await?;
    let refused = pool.move_to(&elsewhere).unwrap_err();
    assert!(matches!(refused.detail(), ErrorDetail::WrongDevice { .. }), "{refused}");
    assert!(refused.at().is_some());
    Ok(())
}

/// Of two who move a pool at once, one is behind the other: no streams of it are left elsewhere.
#[test]
fn two_moves_at_once_move_all_of_a_pool() {
    const STREAMS: usize = 32;
    let device = testing::device();
    let reserved = || futures::executor::block_on(device.reserve_partition(1));
    let (first, second) = (reserved().expect("multiprocessors"), reserved());
    // A host device may have one multiprocessor.
    let Ok(second) = second else { return };
    let pool = StreamPool::builder().streams(&device, STREAMS).build().expect("a pool");
    let meet = std::sync::Barrier::new(2);
    for _ in 0..200 {
        std::thread::scope(|scope| {
            for partition in [&first, &second] {
                scope.spawn(|| {
                    meet.wait();
                    pool.move_to(partition).expect("it moves");
                });
            }
        });
        let held: Vec<_> = (0..STREAMS).map(|_| pool.try_acquire().expect("a permit")).collect();
        assert!(held.iter().all(|stream| stream.in_partition() == held[0].in_partition()));
    }
}
