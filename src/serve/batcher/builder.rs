//! The options of a batcher.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use gpu_await_protocol::sync::Mutex;

use super::running::{Batch, BatchTask, Deliveries};
use super::worker::{BatchWork, BatchWorker, Spawner};
use super::{Batcher, BatcherCore, BatcherState, CallOptions, Open, Refusals};
use crate::error::Error;
use crate::error::admitter::{Admitter, AdmitterKind};
use crate::runtime::clock::Clock;
use crate::serve::pool::{PooledStream, StreamPool};
use gpu_await_protocol::batching::{BatchLimits, Gather};

/// Options for making a [`Batcher`]. `P` is the [`StreamPool`] that its batches get their streams from, or `()`.
#[must_use = "a builder does nothing until `build`"]
#[derive(Clone)]
pub struct BatcherBuilder<P = ()> {
    limits: BatchLimits,
    name: Option<Arc<str>>,
    patience: Option<Duration>,
    in_order: bool,
    spawn: Option<Spawner>,
    pool: P,
}

impl Batcher<(), (), Error> {
    /// Sets options before making a batcher.
    pub fn builder() -> BatcherBuilder {
        let limits = BatchLimits {
            max_len: 64,
            max_weight: u64::MAX,
            max_delay_ns: 0,
            max_in_flight: 2,
            max_waiting: 1024,
        };
        let (name, patience, in_order, spawn) = (None, None, false, None);
        BatcherBuilder { limits, name, patience, in_order, spawn, pool: () }
    }
}

impl<P> BatcherBuilder<P> {
    /// Names the batcher in errors and events.
    pub fn name(mut self, name: &str) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Limits the requests in a batch; at least 1, 64 by default.
    pub fn max_len(mut self, requests: usize) -> Self {
        self.limits.max_len = requests.max(1);
        self
    }

    /// Limits the total [weight](Batcher::with_weight) of a batch; at least 1, no limit by default. A request
    /// that weighs more forms a batch of its own.
    pub fn max_weight(mut self, weight: u64) -> Self {
        self.limits.max_weight = weight.max(1);
        self
    }

    /// Sets how long a request may wait for others while a batch could start; zero by default. It is exact to
    /// some tens of microseconds, on any executor, and no permit is taken earlier. A request with a deadline
    /// waits for others for at most half of its time, and leaves enough for a batch as long as recent ones.
    pub fn max_delay(mut self, delay: Duration) -> Self {
        self.limits.max_delay_ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        self
    }

    /// Limits how many batches may be in flight; at least 1. By default it is 2: one runs on the device while
    /// the next is prepared.
    pub fn max_in_flight(mut self, batches: usize) -> Self {
        self.limits.max_in_flight = batches.max(1);
        self
    }

    /// Limits how many requests may wait for a batch; more are refused at once. At least 1, 1024 by
    /// default.
    pub fn max_waiting(mut self, requests: usize) -> Self {
        self.limits.max_waiting = requests.max(1);
        self
    }

    /// Sets how long callers wait for an answer: each [`call`](Batcher::call) is then a
    /// [`call_by`](Batcher::call_by) with a deadline that far away. Without it, requests wait as long
    /// as it takes.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Sets whether replies are delivered in the order of the requests, even if a later batch ends first; false
    /// by default. A batch that has ended then counts as in flight until all earlier ones have ended.
    pub fn in_order(mut self, in_order: bool) -> Self {
        self.in_order = in_order;
        self
    }

    /// Runs each batch as a task of its own: `spawn` gets a future to spawn, e.g. `|batch|
    /// drop(tokio::spawn(batch))`.
    ///
    /// Without it all batches run in the worker's task, so a computation between two awaits delays the
    /// other batches and the gathering, and one thread of the executor wakes all callers: under load its queue
    /// overflows, and some callers wait several times as long as others. With it, the body of the function's `async`
    /// block runs where `spawn` puts it. If the future of a batch is dropped, its requests get
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed).
    pub fn spawn(mut self, spawn: impl Fn(BatchTask) + Send + Sync + 'static) -> Self {
        self.spawn = Some(Arc::new(spawn));
        self
    }

    fn make<Q, R, E, F, Fut>(
        self,
        pool: Option<StreamPool>,
        run: F,
    ) -> (Batcher<Q, R, E>, BatchWorker)
    where
        Q: Send + 'static,
        R: Send + 'static,
        E: From<Error> + Clone + Send + 'static,
        F: FnMut(Option<PooledStream>, Batch<Q>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<Vec<Result<R, E>>, E>> + Send + 'static,
    {
        let book = BatcherState {
            gather: Gather::new(self.limits),
            worker: None,
            closed: false,
            batches: 0,
            requests: 0,
            refusals: Refusals::default(),
        };
        let shared = Arc::new(BatcherCore {
            admitter: Admitter { kind: AdmitterKind::Batcher, name: self.name, share: None },
            clock: pool.as_ref().map_or_else(Clock::of_thread, |pool| pool.clock().clone()),
            limits: self.limits,
            book: Mutex::new(book),
            deliveries: self.in_order.then(|| Mutex::new(Deliveries::new())),
        });
        let open = Arc::new(Open(shared.clone()));
        let work = BatchWork::new(shared.clone(), pool, self.spawn, run);
        let calls = CallOptions { high_priority: false, weight: 1, patience: self.patience };
        (Batcher { shared, open, calls }, BatchWorker::new(work))
    }
}

impl BatcherBuilder {
    /// Gives each batch a stream of the pool. It waits for the stream *before* it takes its requests, so that
    /// the batch includes those that arrive meanwhile, and excludes those dropped or expired by then.
    ///
    /// The batch waits in the pool with the handle's [share](StreamPool::with_share),
    /// [priority](StreamPool::with_high_priority) and [weight](StreamPool::with_weight), as long as it takes
    /// and regardless of the pool's `max_waiting`: the batcher bounds the waiting requests.
    pub fn pool(self, pool: &StreamPool) -> BatcherBuilder<StreamPool> {
        let BatcherBuilder { limits, name, patience, in_order, spawn, .. } = self;
        BatcherBuilder { limits, name, patience, in_order, spawn, pool: pool.clone() }
    }

    /// Makes the batcher and its worker, which calls `run` with the requests of each batch, a `Vec<Q>`. (With a [pool](Self::pool) it is a
    /// [`Batch<Q>`](Batch) behind the stream.)
    ///
    /// `run` returns a reply for each request, in order, each with its own result, or one error for all. It
    /// is called from the worker's poll; awaits inside it do not delay other batches. If `run` waits for a stream,
    /// its batch is already fixed: use [`pool`](Self::pool) instead.
    pub fn build<Q, R, E, F, Fut>(self, mut run: F) -> (Batcher<Q, R, E>, BatchWorker)
    where
        Q: Send + 'static,
        R: Send + 'static,
        E: From<Error> + Clone + Send + 'static,
        F: FnMut(Vec<Q>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<Vec<Result<R, E>>, E>> + Send + 'static,
    {
        self.make(None, move |_, batch: Batch<Q>| run(batch.into_requests()))
    }
}

impl BatcherBuilder<StreamPool> {
    /// Makes the batcher and its worker, which calls `run` with a stream and each batch, a [`Batch<Q>`](Batch). (Without a pool it is a `Vec<Q>`.)
    ///
    /// `run` returns a reply for each request, in order, each with its own result, or one error for all. It
    /// is called from the worker's poll; awaits inside it do not delay other batches. The permit is released when
    /// `run` has dropped the stream and the device has finished.
    pub fn build<Q, R, E, F, Fut>(self, mut run: F) -> (Batcher<Q, R, E>, BatchWorker)
    where
        Q: Send + 'static,
        R: Send + 'static,
        E: From<Error> + Clone + Send + 'static,
        F: FnMut(PooledStream, Batch<Q>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<Vec<Result<R, E>>, E>> + Send + 'static,
    {
        let pool = self.pool.clone();
        self.make(Some(pool), move |stream, batch| {
            let stream =
                stream.unwrap_or_else(|| unreachable!("each batch of a pool has a stream"));
            run(stream, batch)
        })
    }
}

impl<P: fmt::Debug> fmt::Debug for BatcherBuilder<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BatcherBuilder { limits, name, patience, in_order, pool, .. } = self;
        write!(f, "BatcherBuilder({name:?}, {limits:?}, {patience:?}, {in_order}, {pool:?})")
    }
}
