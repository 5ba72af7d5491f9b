//! Batchers and pools whose users' values panic: in a drop, a clone, a conversion, a waker. A panic ends the call that it belongs to and no
//! other; the batcher goes on, and its worker ends with the last handle.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing;
use gpu_await::{Batch, Batcher, Error, ErrorDetail, ErrorKind, PooledStream, StreamPool};

use crate::under_test::child;

const SOON: Duration = Duration::from_secs(15);

/// The payload of every panic here.
struct OnPurpose;

fn on_purpose() -> ! {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !panic.payload().is::<OnPurpose>() {
                print(panic);
            }
        }));
    });
    panic_any(OnPurpose)
}

/// What of a value panics.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trap {
    Never,
    Drop,
    Clone,
}

#[derive(Debug)]
struct Trapped(Trap);

impl Drop for Trapped {
    fn drop(&mut self) {
        if self.0 == Trap::Drop {
            on_purpose();
        }
    }
}

impl Clone for Trapped {
    fn clone(&self) -> Self {
        if self.0 == Trap::Clone {
            on_purpose();
        }
        Trapped(self.0)
    }
}

/// A service's error. Its conversion from an error about the number of replies panics.
#[derive(Clone, Debug)]
struct Failure {
    _trapped: Trapped,
    kind: Option<ErrorKind>,
}

impl Failure {
    fn new(trap: Trap) -> Self {
        Failure { _trapped: Trapped(trap), kind: None }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        if matches!(error.detail(), ErrorDetail::Replies { .. }) {
            on_purpose();
        }
        Failure { _trapped: Trapped(Trap::Never), kind: Some(error.kind()) }
    }
}

/// What the function of a batch does.
#[derive(Clone, Copy, Debug)]
enum Act {
    Answer,
    /// One error for all, with that trap.
    Fail(Trap),
    /// A reply too many, each of which panics in its drop.
    Surplus,
    /// No reply at all.
    Silence,
    Panic,
}

/// How a call ended; what it returned is forgotten.
#[derive(Debug, PartialEq)]
enum Ended {
    Answered,
    Failed(Option<ErrorKind>),
    Panicked,
}

async fn ended<R>(call: impl Future<Output = Result<R, Failure>>) -> Ended {
    let call = AssertUnwindSafe(call).catch_unwind();
    match tokio::time::timeout(SOON, call).await.expect("an answer") {
        Ok(Ok(reply)) => {
            std::mem::forget(reply);
            Ended::Answered
        }
        Ok(Err(failure)) => {
            let kind = failure.kind;
            std::mem::forget(failure);
            Ended::Failed(kind)
        }
        Err(_) => Ended::Panicked,
    }
}

async fn run(batch: Vec<Act>) -> Result<Vec<Result<Trapped, Failure>>, Failure> {
    let reply = |trap| Ok(Trapped(trap));
    match batch[0] {
        Act::Answer => Ok(batch.iter().map(|_| reply(Trap::Never)).collect()),
        Act::Fail(trap) => Err(Failure::new(trap)),
        Act::Surplus => Ok((0..=batch.len()).map(|_| reply(Trap::Drop)).collect()),
        Act::Silence => Ok(Vec::new()),
        Act::Panic => on_purpose(),
    }
}

/// Two calls of one batch end as they should, and so do those behind them; the worker ends with the batcher.
async fn goes_on(act: Act, expected: &Ended) {
    for (in_order, spawns) in [(false, false), (false, true), (true, false), (true, true)] {
        let what = format!("{act:?}, in_order: {in_order}, spawns: {spawns}");
        let builder = Batcher::builder().max_len(2).max_in_flight(1).in_order(in_order);
        let builder = match spawns {
            true => builder.spawn(|batch| drop(tokio::spawn(batch))),
            false => builder,
        };
        let (batcher, worker) = builder.build(run);
        let calls = [act, act, Act::Answer, Act::Answer].map(|act| batcher.call(act));
        let worker = tokio::spawn(worker);
        let mut all = Vec::new();
        for call in calls {
            all.push(ended(call).await);
        }
        assert!(all[..2].iter().all(|ended| ended == expected), "{what}: {all:?}");
        assert_eq!(all[2..], [Ended::Answered, Ended::Answered], "{what}");
        assert_eq!(ended(batcher.call(Act::Answer)).await, Ended::Answered, "{what}");
        assert_eq!(batcher.stats().in_flight, 0, "{what}");
        drop(batcher);
        let worker = tokio::time::timeout(SOON, worker).await.expect("it ends with its batcher");
        worker.expect("no panic");
    }
}

#[tokio::test]
async fn an_error_that_panics_in_its_drop() {
    goes_on(Act::Fail(Trap::Drop), &Ended::Failed(None)).await;
}

#[tokio::test]
async fn an_error_that_panics_in_its_clone() {
    goes_on(Act::Fail(Trap::Clone), &Ended::Failed(Some(ErrorKind::Panicked))).await;
}

#[tokio::test]
async fn surplus_replies_that_panic_in_their_drop() {
    goes_on(Act::Surplus, &Ended::Panicked).await;
}

#[tokio::test]
async fn a_conversion_that_panics() {
    goes_on(Act::Silence, &Ended::Panicked).await;
}

#[tokio::test]
async fn a_function_that_panics() {
    goes_on(Act::Panic, &Ended::Failed(Some(ErrorKind::Panicked))).await;
}

/// A spawner that drops a batch drops what its function holds, and the callers are told all the same.
#[tokio::test]
async fn a_batch_that_panics_in_its_drop() {
    for in_order in [false, true] {
        let builder = Batcher::builder().max_len(1).max_in_flight(1).in_order(in_order);
        let (batcher, worker) = builder.spawn(drop).build(|batch: Vec<u32>| {
            let held = [Trapped(Trap::Drop), Trapped(Trap::Never)];
            async move {
                std::future::pending::<()>().await;
                drop((batch, held));
                Ok::<Vec<Result<u32, Failure>>, _>(Vec::new())
            }
        });
        let worker = tokio::spawn(worker);
        for i in 0..3 {
            let closed = Ended::Failed(Some(ErrorKind::Closed));
            assert_eq!(ended(batcher.call(i)).await, closed);
        }
        drop(batcher);
        let worker = tokio::time::timeout(SOON, worker).await.expect("it ends with its batcher");
        worker.expect("no panic");
    }
}

/// Several values whose drops panic, one after the other: in a batch without a stream, at their deadline, in the queue, refused.
#[tokio::test]
async fn requests_that_panic_in_their_drop() {
    let device = testing::device();
    let pool = StreamPool::builder().streams(&device, 1).max_in_flight(1).build().expect("a pool");
    let run = |_: PooledStream, batch: Batch<Trapped>| async move {
        batch.into_iter().for_each(std::mem::forget);
        Ok::<_, Failure>(vec![Ok(())])
    };
    let held = pool.try_acquire().expect("a permit");
    let builder = Batcher::builder().max_waiting(4).pool(&pool);
    let (batcher, worker) = builder.build(run);
    let worker = tokio::spawn(worker);
    let trapped = || Trapped(Trap::Drop);
    // Dropped while another panic unwinds.
    let waits = batcher.call(trapped());
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _waits = waits;
        on_purpose();
    }));
    assert!(unwound.is_err());
    drop(batcher.call(trapped()));
    let by = Instant::now() + Duration::from_millis(5);
    let late = [(); 2].map(|()| batcher.call_by(trapped(), by));
    for call in late {
        assert_eq!(ended(call).await, Ended::Failed(Some(ErrorKind::TimedOut)));
    }
    let waiting = [(); 4].map(|()| batcher.call(trapped()));
    let refused = ended(batcher.call(trapped())).await;
    assert_eq!(refused, Ended::Failed(Some(ErrorKind::Overloaded)));
    pool.close();
    for call in waiting {
        assert_eq!(ended(call).await, Ended::Failed(Some(ErrorKind::Closed)));
    }
    let stats = batcher.stats();
    assert_eq!((stats.given_up, stats.expired, stats.refused, stats.closed), (2, 2, 1, 4));
    drop((batcher, held));
    let worker = tokio::time::timeout(SOON, worker).await.expect("it ends with its batcher");
    worker.expect("no panic");
}

/// A reply that nobody fetched, and the closure of a batcher that ends.
#[tokio::test]
async fn what_is_left_panics_in_its_drop() {
    let trapped = Trapped(Trap::Drop);
    let (batcher, worker) = Batcher::builder().build(move |batch: Vec<u32>| {
        assert!(std::ptr::from_ref(&trapped).is_aligned());
        async move { Ok::<_, Failure>(batch.iter().map(|_| Ok(Trapped(Trap::Drop))).collect()) }
    });
    let worker = tokio::spawn(worker);
    let unfetched = batcher.call(1);
    assert_eq!(ended(batcher.call(2)).await, Ended::Answered);
    drop(unfetched);
    drop(batcher);
    let worker = tokio::time::timeout(SOON, worker).await.expect("it ends with its batcher");
    worker.expect("no panic");
}

/// A waker whose drop panics.
struct TrappedWaker {
    woken: AtomicU32,
    _trapped: Trapped,
}

impl TrappedWaker {
    fn new(trap: Trap) -> Arc<Self> {
        Arc::new(TrappedWaker { woken: AtomicU32::new(0), _trapped: Trapped(trap) })
    }
}

impl Wake for TrappedWaker {
    fn wake(self: Arc<Self>) {
        self.woken.fetch_add(1, Ordering::SeqCst);
    }
}

/// Polls once, with a waker that nobody else has.
fn poll_trapped<F: Future + Unpin>(future: &mut F) {
    let waker = Waker::from(TrappedWaker::new(Trap::Drop));
    assert!(future.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
    // A clone of it is with the future.
    drop(waker);
}

/// The waker of a request that goes is dropped when those that it kept waiting have been woken.
#[test]
fn wakers_that_panic_in_their_drop() {
    let device = testing::device();
    let pool = StreamPool::builder().streams(&device, 1).max_in_flight(2).build().expect("a pool");
    let held = pool.try_acquire().expect("a permit");
    let (mut heavy, mut light) = (pool.with_weight(2).acquire(), pool.acquire());
    poll_trapped(&mut heavy);
    let told = TrappedWaker::new(Trap::Never);
    let waker = Waker::from(told.clone());
    assert!(light.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
    drop(heavy);
    assert_eq!(told.woken.load(Ordering::SeqCst), 1, "it has the permit");
    drop(light.now_or_never().expect("at once").expect("a stream"));
    // Of one that waits for the pool to be drained.
    poll_trapped(&mut pool.drained());
    poll_trapped(&mut pool.drained_within(SOON));
    // Of a call that is dropped, and replaced in a call, whose poll it ends.
    let (batcher, worker) = Batcher::builder().build(run);
    for by in [None, Some(Instant::now() + SOON)] {
        let call = || match by {
            None => batcher.call(Act::Answer),
            Some(by) => batcher.call_by(Act::Answer, by),
        };
        let (mut goes, mut stays) = (call(), call());
        poll_trapped(&mut goes);
        poll_trapped(&mut stays);
        drop(goes);
        let cx = &mut Context::from_waker(Waker::noop());
        let polled = catch_unwind(AssertUnwindSafe(|| stays.poll_unpin(cx).is_pending()));
        assert!(polled.is_err() || matches!(polled, Ok(true)));
    }
    assert_eq!(batcher.stats().given_up, 4);
    drop((worker, batcher, held, pool));
}

/// A subscriber that panics wherever it is called costs the trace alone. One for the whole process, in a process of its own.
#[test]
fn a_subscriber_that_panics_in_a_batch() {
    struct Hostile;
    impl tracing::Subscriber for Hostile {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {
            on_purpose();
        }
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {
            on_purpose();
        }
        fn event(&self, _: &tracing::Event<'_>) {
            on_purpose();
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {
            on_purpose();
        }
        fn try_close(&self, _: tracing::span::Id) -> bool {
            on_purpose();
        }
    }
    if child::parameter().is_none() {
        child::run(concat!(module_path!(), "::a_subscriber_that_panics_in_a_batch"), "");
        return;
    }
    let (device, step) = testing::manual();
    let pool = StreamPool::builder().streams(&device, 1).max_in_flight(1).build().expect("a pool");
    let held = pool.try_acquire().expect("a permit");
    tracing::subscriber::set_global_default(Hostile).expect("the first");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        goes_on(Act::Panic, &Ended::Failed(Some(ErrorKind::Panicked))).await;
        goes_on(Act::Answer, &Ended::Answered).await;
    });
    // A request that was refused, and is dropped before it learns of it, while another panic unwinds.
    let mut waits = pool.with_patience(SOON).acquire();
    assert!((&mut waits).now_or_never().is_none());
    step.advance(SOON);
    assert!(!step.step(0), "there is no work");
    assert_eq!(pool.stats().expired, 1);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _waits = waits;
        on_purpose();
    }));
    assert!(unwound.is_err());
    drop(held);
}
