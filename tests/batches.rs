//! Batchers: single requests, run together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    BatchWorker, Batcher, BatcherBuilder, Error, ErrorDetail, ErrorKind, Result, kernels,
};
use parking::Seen;
use tokio::sync::Semaphore;

const SOON: Duration = Duration::from_secs(15);
/// So long that a test would not end in time.
const LONG: Duration = Duration::from_secs(3600);

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

/// What a batcher's function saw, and when it may go on.
mod parking {
    use std::sync::{Arc, Mutex};

    use tokio::sync::Semaphore;

    #[derive(Clone)]
    pub(crate) struct Seen {
        batches: Arc<Mutex<Vec<Vec<u32>>>>,
        pub(crate) may_end: Arc<Semaphore>,
    }

    impl Seen {
        /// Batches end when the semaphore says so.
        pub(crate) fn new(may_end: usize) -> Self {
            Seen { batches: Arc::default(), may_end: Arc::new(Semaphore::new(may_end)) }
        }

        pub(crate) fn enter(&self, batch: &[u32]) {
            self.batches.lock().expect("no panic").push(batch.to_vec());
        }

        pub(crate) fn batches(&self) -> Vec<Vec<u32>> {
            self.batches.lock().expect("no panic").clone()
        }
    }
}

/// Doubles numbers; refuses 13 alone, 99 for all, panics at 666 and forgets one at 404.
fn doubling(builder: BatcherBuilder, seen: &Seen) -> (Batcher<u32, u32>, BatchWorker) {
    let seen = seen.clone();
    let refused = || Error::from(ErrorDetail::TooFew { what: "a test", found: 0, least: 1 });
    builder.build(move |batch: Vec<u32>| {
        seen.enter(&batch);
        let may_end = seen.may_end.clone();
        async move {
            may_end.acquire().await.expect("open").forget();
            if batch.contains(&99) {
                return Err(refused());
            }
            assert!(!batch.contains(&666), "a number of the beast");
            let double = |x: &u32| if *x == 13 { Err(refused()) } else { Ok(2 * x) };
            Ok(batch.iter().filter(|x| **x != 404).map(double).collect())
        }
    })
}

const ANY: usize = Semaphore::MAX_PERMITS;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_request_gets_its_own_answer() -> Result<()> {
    let device = testing::device();
    let scale = kernels::scale::load(&device).await?;
    let pool = device.streams(2)?;
    let (batcher, worker) = Batcher::builder().max_len(32).build(move |numbers: Vec<f32>| {
        let (pool, scale) = (pool.clone(), scale.clone());
        async move {
            let stream = pool.acquire().await?;
            let mut x = stream.upload(numbers).queued()?;
            scale.launch(&stream, 2.0, &mut x).queued()?;
            let x = stream.download(&x).await?;
            Ok::<_, Error>(x.iter().map(|x| Ok(*x)).collect())
        }
    });
    let worker = tokio::spawn(worker);
    let calls: Vec<_> = (0..1000)
        .map(|i| {
            let batcher = batcher.clone();
            tokio::spawn(async move { batcher.call(i as f32).await })
        })
        .collect();
    for (i, call) in calls.into_iter().enumerate() {
        assert_eq!(soon(call).await.expect("no panic")?, 2.0 * i as f32);
    }
    let stats = batcher.stats();
    assert_eq!((stats.requests, stats.waiting, stats.refused), (1000, 0, 0));
    assert!(stats.batches >= 1000 / 32);
    drop(batcher);
    soon(worker).await.expect("no panic");
    Ok(())
}

#[tokio::test]
async fn a_full_batch_starts_at_once_and_a_lone_request_after_the_delay() -> Result<()> {
    let seen = Seen::new(ANY);
    let (batcher, worker) = doubling(Batcher::builder().max_len(3).max_delay(LONG), &seen);
    tokio::spawn(worker);
    let calls = [batcher.call(1), batcher.call(2), batcher.call(3), batcher.call(4)];
    let [a, b, c, mut d] = calls;
    assert_eq!(soon(async { tokio::try_join!(a, b, c) }).await?, (2, 4, 6));
    assert!((&mut d).now_or_never().is_none(), "it waits for others");
    assert_eq!(seen.batches(), [[1, 2, 3]]);

    let delay = Duration::from_millis(3);
    let (batcher, worker) = doubling(Batcher::builder().max_delay(delay), &seen);
    tokio::spawn(worker);
    let start = Instant::now();
    assert_eq!(soon(batcher.call(7)).await?, 14);
    assert!(start.elapsed() >= delay);
    Ok(())
}

#[tokio::test]
async fn batches_grow_while_the_device_is_busy() -> Result<()> {
    let seen = Seen::new(0);
    let (batcher, worker) = doubling(Batcher::builder().max_in_flight(1), &seen);
    tokio::spawn(worker);
    let first = tokio::spawn(batcher.call(0));
    while batcher.stats().in_flight == 0 {
        tokio::task::yield_now().await;
    }
    let others: Vec<_> = (1..=10).map(|i| batcher.call(i)).collect();
    assert_eq!(batcher.stats().waiting, 10);
    seen.may_end.add_permits(2);
    assert_eq!(soon(first).await.expect("no panic")?, 0);
    let doubled = soon(futures::future::try_join_all(others)).await?;
    assert_eq!(doubled, (1..=10).map(|i| 2 * i).collect::<Vec<_>>());
    assert_eq!(seen.batches(), [vec![0], (1..=10).collect()]);
    Ok(())
}

#[tokio::test]
async fn a_dropped_request_leaves_the_batch() -> Result<()> {
    let seen = Seen::new(0);
    let (batcher, worker) = doubling(Batcher::builder().max_len(3).max_delay(LONG), &seen);
    tokio::spawn(worker);
    let (a, b) = (batcher.call(1), batcher.call(2));
    drop(a);
    let (c, d) = (batcher.call(3), batcher.call(4));
    while batcher.stats().in_flight == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(seen.batches(), [[2, 3, 4]]);
    // In its batch already: its reply is dropped.
    drop(c);
    seen.may_end.add_permits(1);
    assert_eq!(soon(async { tokio::try_join!(b, d) }).await?, (4, 8));
    Ok(())
}

#[tokio::test]
async fn errors_of_one_and_of_all_reach_whom_they_concern() -> Result<()> {
    let seen = Seen::new(ANY);
    let (batcher, worker) = doubling(Batcher::builder().max_len(2).max_delay(LONG), &seen);
    tokio::spawn(worker);
    let together =
        async |a, b| soon(async { tokio::join!(batcher.call(a), batcher.call(b)) }).await;
    let (well, refused) = together(1, 13).await;
    assert_eq!(well?, 2);
    assert!(matches!(refused.expect_err("its own").detail(), ErrorDetail::TooFew { .. }));
    let (a, b) = together(1, 99).await;
    assert!(a.is_err() && b.is_err());
    let (a, b) = together(1, 666).await;
    let error = a.expect_err("a panic");
    assert_eq!((error.kind(), b.is_err()), (ErrorKind::Panicked, true));
    assert_eq!(error.to_string(), "what ran a batch of 2 requests panicked: a number of the beast");
    let (a, b) = together(1, 404).await;
    assert_eq!(a.expect_err("one short").to_string(), "a batch of 2 requests got 1 replies");
    assert!(b.is_err());
    // It goes on.
    let (a, b) = together(1, 2).await;
    assert_eq!((a?, b?), (2, 4));
    Ok(())
}

#[tokio::test]
async fn a_function_that_panics_at_once_harms_only_its_batch() {
    let (batcher, worker) = Batcher::builder().build(move |batch: Vec<u32>| {
        assert_ne!(batch, [1], "not one");
        async move { Ok::<_, Error>(batch.into_iter().map(Ok).collect()) }
    });
    tokio::spawn(worker);
    let error = soon(batcher.call(1)).await.expect_err("a panic");
    assert_eq!(error.kind(), ErrorKind::Panicked);
    assert_eq!(soon(batcher.call(2)).await.expect("well"), 2);
}

#[tokio::test]
async fn a_worker_that_goes_away_answers_everybody() {
    let seen = Seen::new(0);
    let (batcher, worker) = doubling(Batcher::builder().max_len(1).max_in_flight(1), &seen);
    let worker = tokio::spawn(worker);
    let running = tokio::spawn(batcher.call(1));
    while batcher.stats().in_flight == 0 {
        tokio::task::yield_now().await;
    }
    let waiting = batcher.call(2);
    worker.abort();
    for call in [running.await.expect("no panic"), soon(waiting).await, soon(batcher.call(3)).await]
    {
        assert_eq!(call.expect_err("nobody is there").kind(), ErrorKind::Closed);
    }
}

#[tokio::test]
async fn the_worker_answers_who_waits_and_ends_with_the_last_batcher() {
    let seen = Seen::new(ANY);
    let (batcher, worker) = doubling(Batcher::builder().max_delay(LONG), &seen);
    let worker = tokio::spawn(worker);
    let (a, b) = (batcher.call(1), batcher.clone().call(2));
    drop(batcher);
    let both = soon(async { tokio::try_join!(a, b) }).await.expect("answered");
    assert_eq!((both, seen.batches()), ((2, 4), vec![vec![1, 2]]));
    soon(worker).await.expect("no panic");
}

#[tokio::test]
async fn too_many_requests_are_refused_at_once() -> Result<()> {
    let seen = Seen::new(0);
    let builder = Batcher::builder().max_len(1).max_in_flight(1).max_waiting(2);
    let (batcher, worker) = doubling(builder, &seen);
    tokio::spawn(worker);
    let first = tokio::spawn(batcher.call(1));
    while batcher.stats().in_flight == 0 {
        tokio::task::yield_now().await;
    }
    let (a, b) = (batcher.call(2), batcher.call(3));
    let error = soon(batcher.call(4)).await.expect_err("two wait");
    assert_eq!(error.kind(), ErrorKind::Overloaded);
    assert_eq!(error.to_string(), "the batcher is full: 1 of 1 in flight, 2 waiting of at most 2");
    // A place is free again with the drop.
    drop(b);
    let b = batcher.call(5);
    seen.may_end.add_permits(3);
    soon(first).await.expect("no panic")?;
    assert_eq!(soon(async { tokio::try_join!(a, b) }).await?, (4, 10));
    assert_eq!(batcher.stats().refused, 1);
    Ok(())
}

/// The worker needs no runtime: its time-outs are its own.
#[test]
fn it_runs_on_any_executor() {
    let seen = Seen::new(ANY);
    let (batcher, worker) = doubling(Batcher::builder().max_delay(Duration::from_millis(1)), &seen);
    let calls = async move {
        let doubled = futures::try_join!(batcher.call(1), batcher.call(2));
        drop(batcher);
        doubled
    };
    let (doubled, ()) = futures::executor::block_on(futures::future::join(calls, worker));
    assert_eq!(doubled.expect("answered"), (2, 4));
}

/// A batch that is given up by its function keeps its place in the pool until the device is through.
#[tokio::test]
async fn a_batch_that_is_timed_out_keeps_its_stream() -> Result<()> {
    let device = testing::device();
    let pool = device.streams(1)?;
    let inside = pool.clone();
    let gates: Arc<std::sync::Mutex<Vec<Gate>>> = Arc::default();
    let kept = gates.clone();
    let (batcher, worker) = Batcher::builder().build(move |batch: Vec<u32>| {
        let (pool, gates) = (inside.clone(), kept.clone());
        async move {
            let stream = pool.acquire().await?;
            gates.lock().expect("no panic").push(Gate::close(&stream)?);
            let x = stream.upload(batch).queued()?;
            let answer = tokio::time::timeout(Duration::from_millis(5), stream.download(&x)).await;
            let timed_out = ErrorDetail::TimedOut { what: "the batch", limit_ms: 5 };
            let x = answer.unwrap_or_else(|_| Err(timed_out.into()))?;
            Ok::<_, Error>(x.iter().map(|x| Ok(*x)).collect())
        }
    });
    tokio::spawn(worker);
    assert_eq!(soon(batcher.call(1)).await.expect_err("held up").kind(), ErrorKind::TimedOut);
    assert_eq!(pool.stats().in_flight, 1);
    gates.lock().expect("no panic").clear();
    soon(pool.drained()).await;
    Ok(())
}

mod layers {
    use std::task::Poll;

    use gpu_await::PooledStream;
    use tower::{Service, ServiceBuilder, ServiceExt};

    use super::*;

    #[tokio::test]
    async fn a_pool_behind_layers_sheds_what_would_wait() -> Result<()> {
        let device = testing::device();
        let pool = gpu_await::StreamPool::builder().streams(&device, 1).max_in_flight(1).build()?;
        let sum = pool.service(|stream: PooledStream, x: Vec<u32>| async move {
            let x = stream.upload(x).queued()?;
            Ok::<_, Error>(stream.download(&x).await?.iter().sum::<u32>())
        });
        let service = ServiceBuilder::new().load_shed().timeout(SOON).service(sum);
        let held = pool.acquire().await?;
        let shed = service.clone().oneshot(vec![1]).await.expect_err("it would wait");
        assert!(shed.is::<tower::load_shed::error::Overloaded>());
        drop(held);
        assert_eq!(soon(service.oneshot(vec![1, 2])).await.expect("well"), 3);
        soon(pool.drained()).await;
        Ok(())
    }

    #[tokio::test]
    async fn a_ready_service_holds_its_permit_until_its_drop() -> Result<()> {
        let device = testing::device();
        let pool = gpu_await::StreamPool::builder().streams(&device, 1).max_in_flight(1).build()?;
        let run = |stream: PooledStream, (): ()| async move { stream.done().await };
        let (mut a, mut b) = (pool.service(run), pool.service(run));
        soon(ServiceExt::<()>::ready(&mut a)).await?;
        let mut waits = Box::pin(ServiceExt::<()>::ready(&mut b));
        assert!(waits.as_mut().now_or_never().is_none());
        drop(a);
        soon(waits).await?.call(()).await
    }

    #[tokio::test]
    async fn a_batcher_behind_layers_waits_for_room() -> Result<()> {
        let seen = Seen::new(0);
        let builder = Batcher::builder().max_len(1).max_in_flight(1).max_waiting(1);
        let (batcher, worker) = doubling(builder, &seen);
        tokio::spawn(worker);
        let mut service = batcher.service();
        let mut answers = Vec::new();
        for x in [1, 2] {
            answers.push(tokio::spawn(soon(service.ready()).await?.call(x)));
            while batcher.stats().in_flight == 0 {
                tokio::task::yield_now().await;
            }
        }
        // One runs, one waits: that was all the room.
        let mut ready = service.clone();
        let is_ready = |s: &mut gpu_await::BatchService<u32, u32>| {
            futures::future::poll_fn(|cx| Poll::Ready(s.poll_ready(cx).is_ready())).now_or_never()
        };
        assert_eq!(is_ready(&mut ready), Some(false));
        let shed = ServiceBuilder::new().load_shed().service(batcher.service());
        let error = shed.oneshot(3).await.expect_err("no room");
        assert!(error.is::<tower::load_shed::error::Overloaded>());
        seen.may_end.add_permits(9);
        assert_eq!(soon(ready.ready().await?.call(4)).await?, 8);
        for (answer, expected) in answers.into_iter().zip([2, 4]) {
            assert_eq!(soon(answer).await.expect("no panic")?, expected);
        }
        // Room that was made for nothing is given back.
        soon(service.ready()).await?;
        assert!(batcher.call(5).now_or_never().expect("refused at once").is_err());
        drop(service);
        assert_eq!(soon(batcher.call(5)).await?, 10);
        Ok(())
    }
}
