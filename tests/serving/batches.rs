//! Batchers: single requests, run together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    Batch, BatchWorker, Batcher, BatcherBuilder, Error, ErrorDetail, ErrorKind, PooledStream,
    Result, StreamPool, Unfinished, kernels,
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
    assert_eq!(
        error.to_string(),
        "the closure of a batch of 2 requests panicked: a number of the beast"
    );
    let (a, b) = together(1, 404).await;
    assert_eq!(
        a.expect_err("one short").to_string(),
        "a batch of 2 requests got 1 replies: return one for each request, in order"
    );
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
    assert_eq!(
        error.to_string(),
        "the batcher is full: 1 of 1 in flight, 2 waiting of at most 2; retry later"
    );
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
            let (what, left) = ("the batch".to_owned(), Unfinished::default());
            let timed_out = ErrorDetail::TimedOut { what, limit_ms: 5, left };
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

/// Says its numbers back, of a batch with a stream of the pool.
fn echo(builder: BatcherBuilder<StreamPool>, seen: &Seen) -> (Batcher<u32, u32>, BatchWorker) {
    let seen = seen.clone();
    builder.build(move |stream: PooledStream, batch: Batch<u32>| {
        seen.enter(&batch);
        async move {
            let x = stream.upload(batch.into_requests()).queued()?;
            Ok::<_, Error>(stream.download(&x).await?.iter().map(|x| Ok(*x)).collect())
        }
    })
}

/// A pool of one permit, which is held.
async fn held_pool() -> Result<(StreamPool, PooledStream)> {
    let device = testing::device();
    let builder = StreamPool::builder().streams(&device, 1).max_in_flight(1).max_waiting(0);
    let pool = builder.build()?;
    let held = pool.acquire().await?;
    Ok((pool, held))
}

/// Lets the worker see what was entered.
async fn let_it_run(batcher: &Batcher<u32, u32>, waiting: usize) {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(batcher.stats().waiting, waiting);
}

/// The pool is full, and nobody may wait there: the batch does all the same, and takes its requests when it has its stream.
#[tokio::test]
async fn a_full_pool_makes_one_large_batch() -> Result<()> {
    let seen = Seen::new(ANY);
    let (pool, held) = held_pool().await?;
    let (batcher, worker) = echo(Batcher::builder().max_len(64).pool(&pool), &seen);
    tokio::spawn(worker);
    let mut calls = Vec::new();
    for i in 0..64 {
        calls.push(batcher.call(i));
        if i < 3 {
            let_it_run(&batcher, calls.len()).await;
        }
    }
    let_it_run(&batcher, 64).await;
    assert_eq!((batcher.stats().in_flight, pool.stats().waiting), (0, 1));
    drop(held);
    assert_eq!(soon(futures::future::try_join_all(calls)).await?, (0..64).collect::<Vec<_>>());
    assert_eq!(seen.batches(), [(0..64).collect::<Vec<_>>()]);
    soon(pool.drained()).await;
    Ok(())
}

#[tokio::test]
async fn who_went_while_the_pool_was_full_is_not_computed() -> Result<()> {
    let seen = Seen::new(ANY);
    let (pool, held) = held_pool().await?;
    let (batcher, worker) = echo(Batcher::builder().pool(&pool), &seen);
    tokio::spawn(worker);
    let mut calls: Vec<_> = (0..64).map(|i| batcher.call(i)).collect();
    let_it_run(&batcher, 64).await;
    let last = calls.pop().expect("there are 64");
    drop(calls);
    drop(held);
    assert_eq!(soon(last).await?, 63);
    assert_eq!(seen.batches(), [[63]]);

    // All of them: the permit is not even waited for any more.
    let held = soon(pool.acquire()).await?;
    let call = batcher.call(1);
    let_it_run(&batcher, 1).await;
    assert_eq!(pool.stats().waiting, 1);
    drop(call);
    drop(held);
    soon(pool.drained()).await;
    assert_eq!((seen.batches().len(), batcher.stats().in_flight), (1, 0));
    Ok(())
}

/// On any executor, and no batch has who was told.
#[test]
fn a_request_is_told_at_its_deadline() -> Result<()> {
    let seen = Seen::new(ANY);
    let device = testing::device();
    let pool = StreamPool::builder().streams(&device, 1).max_in_flight(1).build()?;
    let held = pool.try_acquire()?;
    let (batcher, worker) = echo(Batcher::builder().pool(&pool), &seen);
    let limit = Duration::from_millis(5);
    let start = Instant::now();
    let (by, patient) = (batcher.call_by(1, start + limit), batcher.with_patience(limit).call(2));
    let as_long_as_it_takes = batcher.call(3);
    let work = async move {
        for call in [by, patient] {
            let error = call.await.expect_err("it is too late");
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            assert!(matches!(error.detail(), ErrorDetail::Expired { .. }), "{error}");
        }
        assert!(start.elapsed() >= limit);
        let error = batcher.call_by(4, start).await.expect_err("it has passed");
        assert_eq!(error.kind(), ErrorKind::Overloaded);
        assert_eq!((batcher.stats().expired, batcher.stats().refused), (2, 1));
        drop((batcher, held));
        as_long_as_it_takes.await
    };
    let (answer, ()) = futures::executor::block_on(futures::future::join(work, worker));
    assert_eq!((answer?, seen.batches()), (3, vec![vec![3]]));
    Ok(())
}

#[tokio::test]
async fn batches_are_bounded_by_weight() -> Result<()> {
    let lens = Arc::new(std::sync::Mutex::new(Vec::new()));
    let device = testing::device();
    let pool = device.streams(1)?;
    let builder = Batcher::builder().max_len(4).max_weight(10).max_delay(LONG).pool(&pool);
    let kept = lens.clone();
    let run = move |stream: PooledStream, batch: Batch<u32>| {
        let seen = (batch.len(), batch.weight());
        kept.lock().expect("no panic").push(seen);
        async move {
            stream.done().await?;
            Ok::<_, Error>(batch.into_iter().map(Ok).collect())
        }
    };
    let (batcher, worker) = builder.build(run);
    let worker = tokio::spawn(worker);
    let weights = [4, 4, 4, 20, 1, 1, 1, 1];
    let calls: Vec<_> = weights.into_iter().map(|w| batcher.with_weight(w).call(1)).collect();
    drop(batcher);
    soon(futures::future::try_join_all(calls)).await?;
    soon(worker).await.expect("no panic");
    let expected = [(2, 8), (1, 4), (1, 20), (4, 4)];
    assert_eq!(*lens.lock().expect("no panic"), expected);
    Ok(())
}

/// Batches end behind one that does not: no more of them begin than may be in flight.
#[tokio::test]
async fn replies_that_wait_are_in_flight() -> Result<()> {
    for spawns in [false, true] {
        let (gate, begun) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicU32::new(0)));
        let (kept, count) = (gate.clone(), begun.clone());
        let run = move |batch: Vec<u32>| {
            count.fetch_add(1, Ordering::SeqCst);
            let gate = kept.clone();
            async move {
                if batch[0] == 0 {
                    gate.acquire().await.expect("open").forget();
                }
                Ok::<_, Error>(batch.into_iter().map(Ok).collect())
            }
        };
        let builder = Batcher::builder().max_len(1).max_in_flight(3).in_order(true);
        let (batcher, worker) = match spawns {
            true => builder.spawn(|batch| drop(tokio::spawn(batch))).build(run),
            false => builder.build(run),
        };
        let worker = tokio::spawn(worker);
        let calls: Vec<_> = (0..100).map(|i| batcher.call(i)).collect();
        let_it_run(&batcher, 97).await;
        assert_eq!((begun.load(Ordering::SeqCst), batcher.stats().in_flight), (3, 3));
        gate.add_permits(1);
        let replies = soon(futures::future::try_join_all(calls)).await?;
        assert!(replies.into_iter().eq(0..100));
        assert_eq!(batcher.stats().in_flight, 0);
        drop(batcher);
        soon(worker).await.expect("no panic");
    }
    Ok(())
}

/// The second batch ends first; its replies wait for those of the first, whose future is dropped.
#[tokio::test]
async fn replies_in_order() -> Result<()> {
    let gates: Arc<[Semaphore; 3]> = Arc::new([0, 0, 0].map(Semaphore::new));
    let kept = gates.clone();
    let run = move |batch: Vec<u32>| {
        let gates = kept.clone();
        async move {
            gates[batch[0] as usize].acquire().await.expect("open").forget();
            Ok::<_, Error>(batch.into_iter().map(Ok).collect())
        }
    };
    let tasks: Arc<std::sync::Mutex<Vec<tokio::task::JoinHandle<()>>>> = Arc::default();
    let spawned = tasks.clone();
    let builder = Batcher::builder().max_len(1).max_in_flight(3).in_order(true);
    let spawn = move |batch| spawned.lock().expect("no panic").push(tokio::spawn(batch));
    let (batcher, worker) = builder.spawn(spawn).build(run);
    tokio::spawn(worker);
    let mut calls: Vec<_> = (0..3).map(|i| batcher.call(i)).collect();
    while batcher.stats().in_flight < 3 {
        tokio::task::yield_now().await;
    }
    gates[2].add_permits(1);
    gates[1].add_permits(1);
    let_it_run(&batcher, 0).await;
    assert!(calls.iter_mut().all(|call| call.now_or_never().is_none()));
    tasks.lock().expect("no panic")[0].abort();
    let (last, second) = (calls.pop().expect("three"), calls.pop().expect("three"));
    assert_eq!(soon(async { tokio::try_join!(second, last) }).await?, (1, 2));
    let first = soon(calls.pop().expect("three")).await;
    assert_eq!(first.expect_err("it was not run").kind(), ErrorKind::Closed);
    Ok(())
}

#[tokio::test]
async fn a_batch_that_is_not_run_ends() {
    for panics in [false, true] {
        let spawn = move |batch: gpu_await::BatchTask| {
            assert!(!panics, "it spawns nothing");
            drop(batch);
        };
        let builder = Batcher::builder().max_in_flight(1).spawn(spawn);
        let run = |batch: Vec<u32>| async { Ok::<_, Error>(batch.into_iter().map(Ok).collect()) };
        let (batcher, worker) = builder.build(run);
        let worker = tokio::spawn(worker);
        for i in 0..3 {
            let error = soon(batcher.call(i)).await.expect_err("nobody runs it");
            assert_eq!(error.kind(), ErrorKind::Closed);
        }
        drop(batcher);
        soon(worker).await.expect("no panic");
    }
}

/// Each batch keeps its thread until the other one runs: in one task neither would.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn batches_run_beside_the_worker() -> Result<()> {
    let barrier = Arc::new(std::sync::Barrier::new(2));
    let builder = Batcher::builder().max_len(1).spawn(|batch| drop(tokio::spawn(batch)));
    let (batcher, worker) = builder.build(move |batch: Vec<u32>| {
        let barrier = barrier.clone();
        async move {
            barrier.wait();
            Ok::<_, Error>(batch.into_iter().map(Ok).collect())
        }
    });
    tokio::spawn(worker);
    let both = async { tokio::try_join!(batcher.call(1), batcher.call(2)) };
    assert_eq!(soon(both).await?, (1, 2));
    Ok(())
}

#[tokio::test]
async fn high_priority_is_in_the_next_batch() -> Result<()> {
    let seen = Seen::new(ANY);
    let device = testing::device();
    let builder = StreamPool::builder().streams(&device, 1).high_priority_streams(&device, 1);
    let pool = builder.max_in_flight(1).build()?;
    let held = pool.acquire().await?;
    // Its batches go ahead in the pool as well. Polled by a task, as a permit that is granted is held from then on.
    let mut behind = pool.acquire();
    assert!((&mut behind).now_or_never().is_none());
    let seen_behind = seen.clone();
    let behind = tokio::spawn(async move {
        drop(behind.await?);
        Ok::<_, Error>(seen_behind.batches().len())
    });
    let builder = Batcher::builder().max_len(2).pool(&pool.with_high_priority());
    let (batcher, worker) = echo(builder, &seen);
    tokio::spawn(worker);
    let urgent = batcher.with_high_priority();
    let calls = [batcher.call(1), batcher.call(2), urgent.call(3), batcher.call(4)];
    let_it_run(&batcher, 4).await;
    drop(held);
    assert_eq!(soon(futures::future::try_join_all(calls)).await?, [1, 2, 3, 4]);
    assert_eq!(seen.batches(), [[3, 1], [2, 4]]);
    assert!(soon(behind).await.expect("no panic")? > 0, "it was ahead of the batches");
    Ok(())
}

/// A pool that is closed fails the batches that wait for a stream, and nobody hangs.
#[tokio::test]
async fn a_closed_pool_answers_the_batch() -> Result<()> {
    let seen = Seen::new(ANY);
    let (pool, held) = held_pool().await?;
    let (batcher, worker) = echo(Batcher::builder().pool(&pool), &seen);
    let worker = tokio::spawn(worker);
    let calls = [batcher.call(1), batcher.call(2)];
    let_it_run(&batcher, 2).await;
    pool.close();
    for call in calls {
        assert_eq!(soon(call).await.expect_err("closed").kind(), ErrorKind::Closed);
    }
    let stats = batcher.stats();
    assert_eq!((stats.batches, stats.requests, stats.closed), (1, 0, 2));
    drop((batcher, held));
    soon(worker).await.expect("no panic");
    assert!(seen.batches().is_empty());
    Ok(())
}

mod layers {
    use gpu_await::PooledStream;
    use tower::{Service, ServiceBuilder, ServiceExt};

    use super::*;

    /// From the call on: the wait for the permit, and the work. `tower` waits until a service is ready in
    /// front of that, without a limit.
    #[tokio::test]
    async fn a_timeout_layer_bounds_the_wait_for_a_permit() -> Result<()> {
        let device = testing::device();
        // Without a patience of its own.
        let pool = StreamPool::builder().streams(&device, 1).max_in_flight(1).build()?;
        let held = pool.acquire().await?;
        let run = |stream: PooledStream, ()| async move { stream.done().await };
        let limit = Duration::from_millis(5);
        let service = ServiceBuilder::new().timeout(limit).service(pool.service(run));
        let error = soon(service.clone().oneshot(())).await.expect_err("there is no permit");
        assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
        assert_eq!(pool.stats().waiting, 0);
        drop(held);
        soon(service.oneshot(())).await.expect("a permit");
        Ok(())
    }

    #[tokio::test]
    async fn a_service_without_patience_sheds_what_would_wait() -> Result<()> {
        let device = testing::device();
        // Others may wait here.
        let pool = StreamPool::builder().streams(&device, 1).max_in_flight(1).build()?;
        let held = pool.acquire().await?;
        let sum = |stream: PooledStream, x: Vec<u32>| async move {
            let x = stream.upload(x).queued()?;
            Ok::<_, Error>(stream.download(&x).await?.iter().sum::<u32>())
        };
        let service = pool.with_patience(Duration::ZERO).service(sum);
        let shed = soon(service.clone().oneshot(vec![1])).await.expect_err("it would wait");
        assert_eq!(shed.kind(), ErrorKind::Overloaded);
        drop(held);
        assert_eq!(soon(service.oneshot(vec![1, 2])).await?, 3);
        soon(pool.drained()).await;
        Ok(())
    }

    #[tokio::test]
    async fn a_ready_service_holds_no_permit() -> Result<()> {
        let device = testing::device();
        let pool = StreamPool::builder().streams(&device, 1).max_in_flight(1).build()?;
        let run = |stream: PooledStream, (): ()| async move { stream.done().await };
        let (mut a, mut b) = (pool.service(run), pool.service(run));
        soon(ServiceExt::<()>::ready(&mut a)).await?;
        soon(soon(b.ready()).await?.call(())).await?;
        soon(a.call(())).await
    }

    #[tokio::test]
    async fn a_batcher_refuses_what_is_too_much() -> Result<()> {
        let seen = Seen::new(0);
        let builder = Batcher::builder().max_len(1).max_in_flight(1).max_waiting(1);
        let (batcher, worker) = doubling(builder, &seen);
        tokio::spawn(worker);
        let limit = Duration::from_secs(3600);
        let mut service = ServiceBuilder::new().timeout(limit).service(batcher.service());
        let mut answers = Vec::new();
        for x in [1, 2] {
            answers.push(tokio::spawn(soon(service.ready()).await.expect("always").call(x)));
            while batcher.stats().in_flight == 0 {
                tokio::task::yield_now().await;
            }
        }
        // One runs, one waits: that was all.
        let error = soon(service.oneshot(3)).await.expect_err("too much");
        let error: &Error = error.downcast_ref().expect("the batcher's");
        assert_eq!(error.kind(), ErrorKind::Overloaded);
        seen.may_end.add_permits(9);
        for (answer, expected) in answers.into_iter().zip([2, 4]) {
            assert_eq!(soon(answer).await.expect("no panic").expect("well"), expected);
        }
        // The handle's options are the service's.
        let urgent = batcher.with_high_priority().with_patience(limit).service();
        assert_eq!(soon(urgent.oneshot(5)).await?, 10);
        Ok(())
    }
}
