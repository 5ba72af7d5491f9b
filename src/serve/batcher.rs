//! [`Batcher`]: single requests, run together.
//!
//! | a request is | left by |
//! |---|---|
//! | waiting for a batch | a batch that takes it; its deadline; its drop; the worker's drop |
//! | in a batch | the batch's end, which answers it; the worker's drop, unless the batch has a task of its own |
//! | answered | – |
//!
//! [`gather`](gpu_await_protocol::batching) decides when a batch is due and which requests it takes. Callers only enter requests; the
//! [`BatchWorker`](worker::BatchWorker), a future that the user spawns, acquires each batch's permit, forms the batch and runs it. A call with
//! a deadline has its own [`Deadline`], at which the clock wakes it and it takes its request out of the queue: a worker that is held up
//! by a batch, or is not polled, does not delay it.
//!
//! # Invariants
//! 1. Every request is answered once: with its own result, the batch's error, or an error because it was too late or the batcher is closed
//!    (`every_request_gets_its_own_answer`, `a_worker_that_goes_away_answers_everybody`).
//! 2. A request that is dropped before its batch starts is not in the batch (`a_dropped_request_leaves_the_batch`,
//!    `who_went_while_the_pool_was_full_is_not_computed`).
//! 3. A call is answered at its deadline while its request waits, whatever the worker does (`a_batch_that_blocks_delays_no_deadline`,
//!    `a_worker_that_is_not_polled_delays_no_deadline`).
//! 4. Wakers, requests, spans and replies are dropped outside the lock, and a panic in a drop, clone or conversion ends only the
//!    call that it belongs to (`tests/serving/batch_panics.rs`): values held for others are [`Contained`], and an error of the crate becomes the
//!    caller's `E` in the caller's poll.
#![forbid(unsafe_code)]

pub(crate) mod builder;
pub(crate) mod running;
pub(crate) mod worker;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures::channel::oneshot;
use futures::ready;
use gpu_await_protocol::sync::Mutex;
use tracing::Span;

use self::running::{Caller, Deliveries};
use super::refusal;
use crate::error::admitter::Admitter;
use crate::error::{Error, ErrorDetail};
use crate::runtime::clock::{Clock, Deadline};
use crate::runtime::coop::Budget;
use crate::thread::contain::{self, Contained};
use crate::thread::worker::no_thread;
use gpu_await_protocol::batching::{
    BatchLimits, Demand, Gather, Gathered, NotGathered, RequestKey,
};

/// Gathers single requests into batches and gives each its own answer.
///
/// A GPU takes about as long for one small request as for sixty-four. A batcher takes requests one by one
/// ([`call`](Self::call)), gathers them up to a time, a count or a weight, runs one function on each batch
/// (one launch for all of it), and returns to every caller the reply to its own request.
///
/// [`build`](builder::BatcherBuilder::build) returns it with its [`BatchWorker`](crate::BatchWorker), a
/// future to spawn on any executor. With the default delay, zero, a batch starts as soon as it can:
/// requests are gathered while [`max_in_flight`](builder::BatcherBuilder::max_in_flight) batches are on the
/// device, and while the [pool](builder::BatcherBuilder::pool) has no permit, so that batches grow with the
/// load and a single request never waits for others. The function gets the requests as a `Vec<Q>`; with a pool, a stream and a
/// [`Batch<Q>`](crate::Batch).
///
/// There is no `close`: when the last clone is dropped, the worker answers the requests it has and ends. It
/// uses its streams until then: await the worker before closing the pool and the device.
///
/// # Deadlines, priority and weight
/// [`call_by`](Self::call_by), or a [`patience`](builder::BatcherBuilder::patience) for all calls, sets a deadline
/// for the answer. Requests that cannot be answered in time, judging by how long batches of that weight took
/// lately, are refused at once; none is computed after its deadline. [`with_high_priority`](Self::with_high_priority) and
/// [`with_weight`](Self::with_weight) return handles of the same batcher.
///
/// A refusal names the batcher, if it has a [name](builder::BatcherBuilder::name), is counted in
/// [`stats`](Self::stats), and is a `tracing` event in the span of the request, like those of a
/// [pool](crate::StreamPool#refusals).
///
/// Cheap to clone, `Send + Sync`.
///
/// # Examples
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::time::Duration;
/// use gpu_await::{Batch, Batcher, Device, Error, PooledStream, kernels};
///
/// let device = Device::host();
/// let scale = kernels::scale::load(&device).await?;
/// let pool = device.streams(2)?;
/// let builder = Batcher::builder().max_len(64).patience(Duration::from_millis(250)).pool(&pool);
/// let (batcher, worker) = builder.build(move |stream: PooledStream, numbers: Batch<f32>| {
///     let scale = scale.clone();
///     async move {
///         let mut x = stream.upload(numbers.into_requests()).queued()?;   // one copy, one launch for all
///         scale.launch(&stream, 2.0, &mut x).queued()?;
///         let x = stream.download(&x).await?;
///         Ok::<_, Error>(x.iter().map(|x| Ok(*x)).collect())
///     }
/// });
/// tokio::spawn(worker);
/// let (a, b) = tokio::try_join!(batcher.call(1.0), batcher.call(2.0))?;
/// assert_eq!((a, b), (2.0, 4.0));
/// # Ok::<(), Error>(()) }).unwrap();
/// ```
pub struct Batcher<Q, R, E = Error> {
    shared: Arc<BatcherCore<Q, R, E>>,
    /// Dropping the last one signals that no further request will come.
    open: Arc<Open<Q, R, E>>,
    calls: CallOptions,
}

/// The reply to one request of a [`Batcher`].
///
/// # Errors
/// The function's error for this request, or for the whole batch, and these errors of the crate, converted
/// into `E` when the call is polled: [`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded), at once: the maximum of requests wait, or it cannot be
/// answered by its deadline ([`ErrorDetail::TooLate`]);
/// [`ErrorDetail::Expired`], its deadline passed before its batch started (of kind
/// [`TimedOut`](crate::ErrorKind::TimedOut), or `Overloaded` if some time is left, but too little);
/// [`ErrorKind::Closed`](crate::ErrorKind::Closed), the worker is gone;
/// [`ErrorKind::Panicked`](crate::ErrorKind::Panicked), the function panicked, or cloning its error did;
/// [`ErrorDetail::Replies`], it returned more or fewer replies than there were requests; [`ErrorDetail::Forked`], this is the child of a
/// fork, and the batcher belongs to its parent. The pool's error when it is closed, or its last device is lost.
///
/// # Cancel safety
/// If it is dropped before its batch starts, the request leaves the batch; afterwards its reply is dropped.
/// Other requests of the batch are not affected.
#[must_use = "dropping it takes the request back"]
pub struct Call<Q, R, E = Error> {
    shared: Arc<BatcherCore<Q, R, E>>,
    state: CallState<R, E>,
    budget: Budget,
}

/// What a [`Batcher`] is doing; a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatcherStats {
    /// Requests that wait for a batch.
    pub waiting: usize,
    /// The maximum of waiting requests.
    pub max_waiting: usize,
    /// Batches in flight.
    pub in_flight: usize,
    /// The maximum of batches in flight.
    pub max_in_flight: usize,
    /// Batches taken so far, including those that got no stream. If all requests have left by the time of a permit, none is taken.
    pub batches: u64,
    /// Requests in those that got a stream. Each request is one of these, refused, expired, closed or given up, or waits.
    pub requests: u64,
    /// Requests refused so far, because too many waited or because they could not be answered in time.
    pub refused: u64,
    /// Those refused because they could not be answered in time.
    pub refused_early: u64,
    /// Requests that waited until their deadline, or until less time was left than their batch is likely to take. They failed with
    /// [`ErrorDetail::Expired`](crate::ErrorDetail::Expired), of [kind](crate::Error::kind) `TimedOut` in the first case, `Overloaded` in the second.
    pub expired: u64,
    /// Requests refused because the worker was gone; because the pool had no stream for their batch, being closed or without its last device;
    /// because, without a pool, the system refused the thread that signals deadlines; or in the child of a fork.
    pub closed: u64,
    /// Requests whose futures were dropped while they waited for a batch.
    pub given_up: u64,
    /// How long batches took lately, including the wait for their permits; `None` before the first ended.
    pub took: Option<Duration>,
}

/// How a handle's requests are entered.
#[derive(Clone, Copy)]
struct CallOptions {
    high_priority: bool,
    weight: u64,
    patience: Option<Duration>,
}

enum CallState<R, E> {
    Refused(Error),
    Waiting {
        key: RequestKey,
        answer: Contained<oneshot::Receiver<Answer<R, E>>>,
        /// Until the deadline has passed.
        deadline: Option<Deadline>,
    },
    Done,
}

/// The outcome of a call: the reply of its batch, or an error of the crate.
type Answer<R, E> = Result<Result<R, E>, Error>;

/// The span in which a request was entered.
type RequestSpan = Contained<Span>;

struct Request<Q, R, E> {
    request: Contained<Q>,
    caller: Caller<R, E>,
    span: RequestSpan,
}

struct BatcherCore<Q, R, E> {
    admitter: Admitter,
    /// The clock of the pool's first device, or the batcher's own.
    clock: Arc<Clock>,
    limits: BatchLimits,
    book: Mutex<BatcherState<Q, R, E>>,
    /// `Some` if replies keep the order of requests.
    deliveries: Option<Mutex<Deliveries<R, E>>>,
}

struct BatcherState<Q, R, E> {
    gather: Gather<Request<Q, R, E>>,
    worker: Option<Waker>,
    closed: bool,
    batches: u64,
    requests: u64,
    refusals: Refusals,
}

/// How many requests were refused so far; as in [`BatcherStats`].
#[derive(Default)]
struct Refusals {
    refused: u64,
    refused_early: u64,
    expired: u64,
    closed: u64,
    given_up: u64,
}

struct Open<Q, R, E>(Arc<BatcherCore<Q, R, E>>);

impl<Q, R, E> Batcher<Q, R, E> {
    /// Enters a request; the future resolves to its reply. The request is entered when the call returns;
    /// awaiting it only observes.
    pub fn call(&self, request: Q) -> Call<Q, R, E> {
        let patience = self.calls.patience;
        self.enter(request, patience.and_then(|patience| self.shared.clock.after(patience)))
    }

    /// [`call`](Self::call) for a request whose answer is useful until `deadline`, e.g. the time at which
    /// the caller gives up.
    ///
    /// The wait for a batch is bounded exactly, the batch itself by an estimate: a request that cannot be
    /// answered in time, judging by how long batches of that weight took lately, is refused at once
    /// ([`ErrorDetail::TooLate`]), and one that waits fails at its deadline at the latest
    /// ([`ErrorDetail::Expired`]), on any executor, whatever the worker is doing: a batch that blocks the
    /// worker's thread does not delay it. A batch that has begun goes on.
    ///
    /// The poller of the pool's first device keeps the time; on a stepped device (`testing::manual`) a deadline is as
    /// many steps away as when the request was made. Without a [pool](builder::BatcherBuilder::pool) the batcher
    /// uses a thread for it; if the system refuses that thread, the call fails at once with
    /// [`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded).
    pub fn call_by(&self, request: Q, deadline: Instant) -> Call<Q, R, E> {
        self.enter(request, Some(self.shared.clock.time_of(deadline)))
    }

    /// Returns a handle whose requests go into a batch before those of normal priority, except for every
    /// ninth. The priority of the batch's stream depends on the pool's handle:
    /// [`StreamPool::with_high_priority`](crate::StreamPool::with_high_priority) or not.
    ///
    /// With [`in_order`](builder::BatcherBuilder::in_order) it has no effect.
    #[must_use]
    pub fn with_high_priority(&self) -> Self {
        self.with(CallOptions { high_priority: true, ..self.calls })
    }

    /// Returns a handle whose requests weigh `weight` each, against
    /// [`max_weight`](builder::BatcherBuilder::max_weight): tokens, rows or bytes. At least 1.
    #[must_use]
    pub fn with_weight(&self, weight: u64) -> Self {
        self.with(CallOptions { weight: weight.max(1), ..self.calls })
    }

    /// Returns a handle whose callers wait at most `patience` for an answer: each [`call`](Self::call) is a
    /// [`call_by`](Self::call_by) with a deadline that far away. Zero refuses all requests.
    #[must_use]
    pub fn with_patience(&self, patience: Duration) -> Self {
        self.with(CallOptions { patience: Some(patience), ..self.calls })
    }

    /// Returns what the batcher is doing.
    #[must_use]
    pub fn stats(&self) -> BatcherStats {
        let book = self.shared.book.lock();
        let BatchLimits { max_waiting, max_in_flight, .. } = self.shared.limits;
        BatcherStats {
            waiting: book.gather.waiting(),
            max_waiting,
            in_flight: book.gather.in_flight(),
            max_in_flight,
            batches: book.batches,
            requests: book.requests,
            refused: book.refusals.refused,
            refused_early: book.refusals.refused_early,
            expired: book.refusals.expired,
            closed: book.refusals.closed,
            given_up: book.refusals.given_up,
            took: book.gather.took_ns().map(Duration::from_nanos),
        }
    }

    fn enter(&self, request: Q, deadline: Option<u64>) -> Call<Q, R, E> {
        let demand = Demand {
            high_priority: self.calls.high_priority && self.shared.deliveries.is_none(),
            weight: self.calls.weight,
            deadline,
        };
        let state = self.shared.enter(request, demand);
        Call { shared: self.shared.clone(), state, budget: Budget::default() }
    }

    fn with(&self, calls: CallOptions) -> Self {
        Batcher { shared: self.shared.clone(), open: self.open.clone(), calls }
    }
}

impl<Q, R, E: From<Error>> Future for Call<Q, R, E> {
    type Output = Result<R, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Call { shared, state, budget } = &mut *self;
        let answer = ready!(budget.poll(cx, |cx| {
            match state {
                CallState::Waiting { key, answer, deadline } => {
                    if let Poll::Ready(answered) = Pin::new(&mut **answer).poll(cx) {
                        return Poll::Ready(answered.unwrap_or_else(|_gone| Err(shared.closed())));
                    }
                    if shared.clock.is_inherited() {
                        return Poll::Ready(Err(shared.forked()));
                    }
                    let Some(passes) = deadline else { return Poll::Pending };
                    ready!(Pin::new(passes).poll(cx));
                    *deadline = None;
                    // Otherwise it is in a batch, or the worker is about to answer it.
                    shared.expire(*key).map_or(Poll::Pending, |error| Poll::Ready(Err(error)))
                }
                CallState::Refused(error) => Poll::Ready(Err(error.clone())),
                CallState::Done => panic!("`Call` polled after it was ready"),
            }
        }));
        self.state = CallState::Done;
        Poll::Ready(answer.unwrap_or_else(|error| Err(error.into())))
    }
}

impl<Q, R, E> Drop for Call<Q, R, E> {
    fn drop(&mut self) {
        if let CallState::Waiting { key, .. } = self.state {
            let mut book = self.shared.book.lock();
            let request = book.gather.leave(key);
            book.refusals.given_up += u64::from(request.is_some());
            drop(book);
            drop(request);
        }
    }
}

impl<Q, R, E> BatcherCore<Q, R, E> {
    fn now(&self) -> u64 {
        self.clock.now()
    }

    fn enter(&self, request: Q, demand: Demand) -> CallState<R, E> {
        let (sender, answer) = oneshot::channel();
        // A subscriber is foreign code.
        let span = contain::catch(Span::current).unwrap_or_else(|_| Span::none());
        let (request, span) = (Contained::new(request), Contained::new(span));
        let request = Request { request, caller: Contained::new(sender), span };
        let deadline = demand.deadline.map(|due| Deadline::at(&self.clock, due));
        let is_inherited = self.clock.is_inherited();
        let is_kept = !is_inherited && (deadline.is_none() || self.clock.is_kept());
        let now = self.now();
        let mut book = self.book.lock();
        if book.closed || !is_kept {
            book.refusals.closed += 1;
            let error = match book.closed {
                _ if is_inherited => self.forked(),
                true => self.closed(),
                false => no_thread(),
            };
            drop(book);
            return self.refuse(error);
        }
        match book.gather.add(now, demand, request) {
            Ok((key, tells)) => {
                let worker = if tells { book.worker.take() } else { None };
                drop(book);
                worker.into_iter().for_each(contain::wake);
                CallState::Waiting { key, answer: Contained::new(answer), deadline }
            }
            Err((unwanted, request)) => {
                book.refusals.refused += 1;
                book.refusals.refused_early += u64::from(unwanted != NotGathered::Full);
                let error = self.refused(&book, unwanted);
                drop(book);
                drop(request);
                self.refuse(error)
            }
        }
    }

    /// Removes a request whose deadline has passed, unless it is in a batch.
    fn expire(&self, key: RequestKey) -> Option<Error> {
        let mut book = self.book.lock();
        let expired = book.gather.leave(key)?;
        let error = self.expired(&mut book, &expired);
        drop(book);
        let span = &expired.request.span;
        contain::log(|| span.in_scope(|| refusal::tell(&self.admitter, 1, &error)));
        Some(error)
    }

    /// Counts a request that was removed because it is too late.
    fn expired(
        &self,
        book: &mut BatcherState<Q, R, E>,
        expired: &Gathered<Request<Q, R, E>>,
    ) -> Error {
        book.refusals.expired += 1;
        let now = self.now();
        ErrorDetail::Expired {
            by: self.admitter.clone(),
            waited_us: now.saturating_sub(expired.since) / 1000,
            remaining_us: expired.deadline.saturating_sub(now) / 1000,
            takes_us: expired.takes_ns / 1000,
            waiting: book.gather.waiting() as u64,
        }
        .into()
    }

    fn refuse(&self, error: Error) -> CallState<R, E> {
        refusal::tell(&self.admitter, 1, &error);
        CallState::Refused(error)
    }

    fn closed(&self) -> Error {
        ErrorDetail::Closed { device: self.admitter.to_string() }.into()
    }

    /// The error in the child of a fork, where nothing serves the batcher: its worker and its batches are the parent's.
    fn forked(&self) -> Error {
        ErrorDetail::Forked { device: self.admitter.to_string() }.into()
    }

    fn refused(&self, book: &BatcherState<Q, R, E>, unwanted: NotGathered) -> Error {
        let (by, waiting) = (self.admitter.clone(), book.gather.waiting() as u64);
        match unwanted {
            NotGathered::Full => ErrorDetail::Overloaded {
                by,
                in_flight: book.gather.in_flight() as u64,
                limit: self.limits.max_in_flight as u64,
                waiting,
                max_waiting: self.limits.max_waiting as u64,
            },
            NotGathered::Late { remaining_ns, expected_ns, takes_ns } => ErrorDetail::TooLate {
                by,
                remaining_us: remaining_ns / 1000,
                expected_us: expected_ns / 1000,
                takes_us: takes_ns / 1000,
                waiting,
            },
        }
        .into()
    }
}

impl<Q, R, E> Drop for Open<Q, R, E> {
    fn drop(&mut self) {
        let worker = {
            let mut book = self.0.book.lock();
            book.gather.end();
            book.worker.take()
        };
        worker.into_iter().for_each(contain::wake);
    }
}

impl<Q, R, E> Clone for Batcher<Q, R, E> {
    fn clone(&self) -> Self {
        self.with(self.calls)
    }
}

impl<Q, R, E> fmt::Debug for Batcher<Q, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        write!(f, "Batcher({} waiting, {} batches in flight)", stats.waiting, stats.in_flight)
    }
}

impl<Q, R, E> fmt::Debug for Call<Q, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            CallState::Refused(_) => "Call(refused)",
            CallState::Waiting { .. } => "Call(waiting)",
            CallState::Done => "Call(done)",
        })
    }
}
