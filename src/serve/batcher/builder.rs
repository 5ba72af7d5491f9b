//! A batcher's options.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::running::{Batch, BatchTask, Deliveries};
use super::worker::{BatchWork, BatchWorker, Spawner};
use super::{Batcher, BatcherCore, BatcherState, CallOptions, Open, Refusals};
use crate::error::Error;
use crate::error::admitter::{Admitter, AdmitterKind};
use crate::serve::batching::{BatchLimits, Gather};
use crate::serve::pool::{PooledStream, StreamPool};

/// Options for making a [`Batcher`]. `P` is the [`StreamPool`] that its batches get their streams from, or nothing.
#[must_use = "a builder does nothing until `build`"]
#[derive(Clone)]
pub struct BatcherBuilder<P = ()> {
    limits: BatchLimits,
    name: Option<Arc<str>>,
    patience: Option<Duration>,
    in_order: bool,
    spawn: Option<Spawner>,
    pool: P,
    padded: Arc<[usize]>,
}

impl Batcher<(), (), Error> {
    /// Makes a batcher, options first.
    pub fn builder() -> BatcherBuilder {
        let limits = BatchLimits {
            max_len: 64,
            max_weight: u64::MAX,
            max_delay_ns: 0,
            max_in_flight: 2,
            max_waiting: 1024,
        };
        let (name, patience, in_order, spawn) = (None, None, false, None);
        BatcherBuilder { limits, name, patience, in_order, spawn, pool: (), padded: Arc::new([]) }
    }
}

impl<P> BatcherBuilder<P> {
    /// The batcher's name, for errors and events.
    pub fn name(mut self, name: &str) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The most requests in a batch; at least 1, and 64 unless said otherwise.
    pub fn max_len(mut self, requests: usize) -> Self {
        self.limits.max_len = requests.max(1);
        self
    }

    /// The most that the requests of a batch may [weigh](Batcher::with_weight) together; at least 1, and no limit unless said otherwise. A request that
    /// weighs more is a batch by itself.
    pub fn max_weight(mut self, weight: u64) -> Self {
        self.limits.max_weight = weight.max(1);
        self
    }

    /// How long a request may wait for others while a batch could start; zero unless said otherwise.
    /// Exact to some tens of microseconds, on any executor. No permit is taken before that. One with a deadline waits for others for half
    /// of its time at most, and no longer than leaves what batches took lately.
    pub fn max_delay(mut self, delay: Duration) -> Self {
        self.limits.max_delay_ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        self
    }

    /// How many batches may be in flight; at least 1, and 2 unless said otherwise: one is on the
    /// device while the next is made.
    pub fn max_in_flight(mut self, batches: usize) -> Self {
        self.limits.max_in_flight = batches.max(1);
        self
    }

    /// How many requests may wait for a batch: further ones are refused at once. At least 1, and
    /// 1024 unless said otherwise.
    pub fn max_waiting(mut self, requests: usize) -> Self {
        self.limits.max_waiting = requests.max(1);
        self
    }

    /// How long callers wait for an answer: each [`call`](Batcher::call) is then [`call_by`](Batcher::call_by) that long from the
    /// call. Without it requests wait as long as it takes.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Whether replies are given in the order in which requests came, also where a later batch ends first; false unless said otherwise. A
    /// batch that has ended counts as in flight until those before it have.
    pub fn in_order(mut self, in_order: bool) -> Self {
        self.in_order = in_order;
        self
    }

    /// Runs each batch on a task of its own: `spawn` is given a future that it spawns, such as `|batch| drop(tokio::spawn(batch))`.
    ///
    /// Without it all batches run in the worker's task, so that what one computes between two awaits holds up the others, and
    /// the gathering. With it what the function does inside of its `async` block runs where `spawn` puts it. A batch whose future is dropped
    /// answers its requests with [`ErrorKind::Closed`](crate::ErrorKind::Closed).
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
            epoch: Instant::now(),
            limits: self.limits,
            book: Mutex::new(book),
            deliveries: self.in_order.then(|| Mutex::new(Deliveries::new())),
        });
        let open = Arc::new(Open(shared.clone()));
        let work = BatchWork::new(shared.clone(), pool, self.spawn, self.padded, run);
        let calls = CallOptions { high_priority: false, weight: 1, patience: self.patience };
        (Batcher { shared, open, calls }, BatchWorker::new(work))
    }
}

impl BatcherBuilder {
    /// Gives each batch a stream of the pool, which it waits for *before* it takes its requests: those that come meanwhile are in it, those that
    /// were given up or whose deadline passed are not.
    ///
    /// The batch waits in the pool as the handle says (its [share](StreamPool::with_share), its
    /// [priority](StreamPool::with_high_priority), its [weight](StreamPool::with_weight)), as long as it takes and beyond the pool's `max_waiting`:
    /// what may wait is bounded by the batcher.
    pub fn pool(self, pool: &StreamPool) -> BatcherBuilder<StreamPool> {
        let BatcherBuilder { limits, name, patience, in_order, spawn, padded, .. } = self;
        BatcherBuilder { limits, name, patience, in_order, spawn, pool: pool.clone(), padded }
    }

    /// Makes the batcher and its worker, which calls `run` with each batch.
    ///
    /// `run` returns a reply for each request, in their order, each with its own result; or one error
    /// for all. It is called from the worker's poll; what it awaits there holds nobody up. If it waits for a stream,
    /// its batch is fixed by then: use [`pool`](Self::pool).
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
    /// Tells the function of each batch the least of these lengths that it fits in ([`Batch::padded_len`]), for kernels and graphs of fixed sizes.
    pub fn pad_to(mut self, lens: impl IntoIterator<Item = usize>) -> Self {
        let mut lens: Vec<_> = lens.into_iter().collect();
        lens.sort_unstable();
        self.padded = lens.into();
        self
    }

    /// Makes the batcher and its worker, which calls `run` with a stream and each batch.
    ///
    /// `run` returns a reply for each request, in their order, each with its own result; or one error
    /// for all. It is called from the worker's poll; what it awaits there holds nobody up. The permit is released when `run` has dropped
    /// the stream and the device has finished.
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
        let BatcherBuilder { limits, name, patience, in_order, pool, padded, .. } = self;
        write!(
            f,
            "BatcherBuilder({name:?}, {limits:?}, {patience:?}, {in_order}, {pool:?}, {padded:?})"
        )
    }
}
