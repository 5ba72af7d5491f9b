//! [`Batcher`]: single requests, run together.
//!
//! | a request is | left by |
//! |---|---|
//! | waiting for a batch | a batch that takes it; its drop; the drop of the worker |
//! | in a batch | the batch's end, which answers it; the drop of the worker |
//! | answered | – |
//!
//! When a batch is made is decided in [`gather`](super::batching). Callers only enter requests; the
//! [`BatchWorker`], a future that the user spawns, makes the batches and runs them.
//!
//! # Invariants
//! 1. Every request is answered once: with its own result, the batch's error, or that the batcher is
//!    closed (`every_request_gets_its_own_answer`, `a_worker_that_goes_away_answers_everybody`).
//! 2. A request that is dropped before its batch starts is not in it
//!    (`a_dropped_request_leaves_the_batch`).
//! 3. Wakers, requests and replies are dropped outside of the lock.
//!
//! More than 500 lines: one state under one lock, and those who change it.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures::channel::oneshot;
use futures::ready;
use futures::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::admission::{Admission, Class, Entered, Patience};
use super::batching::{BatchLimits, Gather, Next};
use super::timer::Timer;
use crate::error::{Error, ErrorDetail};
use crate::runtime::coop::Budget;
use crate::thread::contain;

/// The one slot of a batcher's permits.
pub(super) const SLOT: usize = 0;

/// Gathers single requests into batches and gives each its own answer.
///
/// A GPU takes about as long for one small request as for sixty-four. A batcher takes requests one
/// by one ([`call`](Self::call)), gathers them for up to a time or a count, has one function run each
/// batch (one launch for all of it), and hands every caller the reply to its own request.
///
/// [`build`](BatcherBuilder::build) returns it with its [`BatchWorker`], a future to be spawned on
/// any executor. With the default delay, zero, a batch starts as soon as one may: requests are
/// gathered while [`max_in_flight`](BatcherBuilder::max_in_flight) batches are on the device, so
/// that batches grow with the load and a lone request waits for nobody.
///
/// There is no `close`: when the last clone is dropped, the worker answers what is entered and ends. What it
/// runs uses its streams until then: await the worker before the pool and the device are closed.
///
/// Cheap to clone, `Send + Sync`.
///
/// # Examples
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use gpu_await::{Batcher, Device, Error, kernels};
///
/// let device = Device::host();
/// let scale = kernels::scale::load(&device).await?;
/// let pool = device.streams(2)?;
/// let (batcher, worker) = Batcher::builder().max_len(64).build(move |numbers: Vec<f32>| {
///     let (pool, scale) = (pool.clone(), scale.clone());
///     async move {
///         let stream = pool.acquire().await?;
///         let mut x = stream.upload(numbers).queued()?;       // one copy, one launch for all
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
    pub(super) shared: Arc<BatcherCore<Q, R, E>>,
    /// The last one to go says that no further request will come.
    open: Arc<Open<Q, R, E>>,
}

/// Options for making a [`Batcher`].
#[must_use = "a builder does nothing until `build`"]
#[derive(Clone, Debug)]
pub struct BatcherBuilder {
    limits: BatchLimits,
    max_waiting: usize,
}

/// Makes a batcher's batches and runs them: a future to be spawned.
///
/// It ends when the last [`Batcher`] is gone and everything is answered. Dropped before, whoever
/// waits is told that the batcher is closed.
#[must_use = "a batcher does nothing unless its worker is spawned"]
pub struct BatchWorker(Pin<Box<dyn Future<Output = ()> + Send>>);

/// The reply to one request of a [`Batcher`].
///
/// # Errors
/// What the function said of this request, or of the whole batch, and these of the crate's, turned
/// into `E`: [`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded), as many requests wait as may;
/// [`ErrorKind::Closed`](crate::ErrorKind::Closed), the worker is gone;
/// [`ErrorKind::Panicked`](crate::ErrorKind::Panicked), the function panicked;
/// [`ErrorDetail::Replies`], it returned more or fewer replies than there were requests.
///
/// # Cancel safety
/// Dropped before its batch started, the request leaves the batch; afterwards its reply is dropped.
/// The others of the batch do not notice.
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
    /// How many may.
    pub max_waiting: usize,
    /// Batches in flight.
    pub in_flight: usize,
    /// How many may be.
    pub max_in_flight: usize,
    /// Batches started so far.
    pub batches: u64,
    /// Requests in them.
    pub requests: u64,
    /// Requests refused so far because too many waited.
    pub refused: u64,
}

enum CallState<R, E> {
    Refused(Error),
    Waiting { key: u64, reply: oneshot::Receiver<Result<R, E>> },
    Done,
}

struct Request<Q, R, E> {
    request: Q,
    reply: oneshot::Sender<Result<R, E>>,
}

pub(super) struct BatcherCore<Q, R, E> {
    epoch: Instant,
    limits: BatchLimits,
    pub(super) book: Mutex<BatcherState<Q, R, E>>,
}

pub(super) struct BatcherState<Q, R, E> {
    gather: Gather<Request<Q, R, E>>,
    /// A permit for each request that waits, or may be made by a service that is ready.
    pub(super) admission: Admission,
    worker: Option<Waker>,
    closed: bool,
    batches: u64,
    requests: u64,
}

struct Open<Q, R, E>(Arc<BatcherCore<Q, R, E>>);

impl Batcher<(), (), Error> {
    /// Makes a batcher, options first.
    pub fn builder() -> BatcherBuilder {
        let limits = BatchLimits { max_len: 64, max_delay_ns: 0, max_in_flight: 2 };
        BatcherBuilder { limits, max_waiting: 1024 }
    }
}

impl BatcherBuilder {
    /// The most requests in a batch; at least 1, and 64 unless said otherwise.
    pub fn max_len(mut self, requests: usize) -> Self {
        self.limits.max_len = requests.max(1);
        self
    }

    /// How long a request may wait for others while a batch could start; zero unless said otherwise.
    /// Exact to some tens of microseconds, on any executor.
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
        self.max_waiting = requests.max(1);
        self
    }

    /// Makes the batcher and its worker, which calls `run` with each batch.
    ///
    /// `run` returns a reply for each request, in their order, each with its own result; or one error
    /// for all. It is called from the worker's poll; what it awaits there holds nobody up.
    pub fn build<Q, R, E, F, Fut>(self, mut run: F) -> (Batcher<Q, R, E>, BatchWorker)
    where
        Q: Send + 'static,
        R: Send + 'static,
        E: From<Error> + Clone + Send + 'static,
        F: FnMut(Vec<Q>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<Vec<Result<R, E>>, E>> + Send + 'static,
    {
        let book = BatcherState {
            gather: Gather::new(self.limits),
            admission: Admission::new(self.max_waiting, 0, [Class::Normal]),
            worker: None,
            closed: false,
            batches: 0,
            requests: 0,
        };
        let limits = self.limits;
        let shared =
            Arc::new(BatcherCore { epoch: Instant::now(), limits, book: Mutex::new(book) });
        let open = Arc::new(Open(shared.clone()));
        let end = End(shared.clone());
        let work = async move {
            let mut running = FuturesUnordered::new();
            let mut timer = WorkerTimer::default();
            std::future::poll_fn(|cx| {
                loop {
                    while let Poll::Ready(Some(())) = running.poll_next_unpin(cx) {
                        end.0.book.lock().gather.finished();
                    }
                    match end.0.next(end.0.now(), cx.waker()) {
                        Next::Run(batch) => running.push(answer(batch, &mut run)),
                        Next::At(at) if timer.set(end.0.epoch, at, cx.waker()) => {
                            return Poll::Pending;
                        }
                        // No thread to be had for a time-out: whoever waits goes now.
                        Next::At(at) => {
                            if let Next::Run(batch) = end.0.next(at, cx.waker()) {
                                running.push(answer(batch, &mut run));
                            }
                        }
                        Next::Idle => return Poll::Pending,
                        Next::End => return Poll::Ready(()),
                    }
                }
            })
            .await;
        };
        (Batcher { shared, open }, BatchWorker(Box::pin(work)))
    }
}

impl<Q, R, E> Batcher<Q, R, E> {
    /// Enters a request; the future resolves with the reply to it. It is entered when the call
    /// returns, and awaiting it only observes.
    pub fn call(&self, request: Q) -> Call<Q, R, E> {
        Call::new(&self.shared, request, false)
    }

    /// What the batcher is doing.
    #[must_use]
    pub fn stats(&self) -> BatcherStats {
        let book = self.shared.book.lock();
        BatcherStats {
            waiting: book.gather.waiting(),
            max_waiting: book.admission.limit(),
            in_flight: book.gather.in_flight(),
            max_in_flight: self.shared.limits.max_in_flight,
            batches: book.batches,
            requests: book.requests,
            refused: book.admission.refused(),
        }
    }
}

impl<Q, R, E> Call<Q, R, E> {
    /// `reserved` says that there is a permit for it.
    pub(super) fn new(shared: &Arc<BatcherCore<Q, R, E>>, request: Q, reserved: bool) -> Self {
        let state = shared.enter(request, reserved);
        Call { shared: shared.clone(), state, budget: Budget::default() }
    }
}

impl<Q, R, E: From<Error>> Future for Call<Q, R, E> {
    type Output = Result<R, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Call { state, budget, .. } = &mut *self;
        let answer = ready!(budget.poll(cx, |cx| {
            match state {
                CallState::Waiting { reply, .. } => Pin::new(reply)
                    .poll(cx)
                    .map(|replied| replied.unwrap_or_else(|_gone| Err(closed().into()))),
                CallState::Refused(error) => Poll::Ready(Err(error.clone().into())),
                CallState::Done => panic!("`Call` polled after it was ready"),
            }
        }));
        self.state = CallState::Done;
        Poll::Ready(answer)
    }
}

impl<Q, R, E> Drop for Call<Q, R, E> {
    fn drop(&mut self) {
        if let CallState::Waiting { key, .. } = self.state {
            self.shared.leave(key);
        }
    }
}

impl Future for BatchWorker {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

impl<Q, R, E> BatcherCore<Q, R, E> {
    /// Nanoseconds since the batcher was made.
    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Says what to do at `now`, and whom to wake when that changes.
    fn next(&self, now: u64, worker: &Waker) -> Next<Request<Q, R, E>> {
        let fresh = worker.clone();
        let mut callers: SmallVec<[Waker; 8]> = SmallVec::new();
        let (next, stale) = {
            let mut book = self.book.lock();
            let stale = book.worker.replace(fresh);
            let next = book.gather.next(now);
            if let Next::Run(batch) = &next {
                book.batches += 1;
                book.requests += batch.len() as u64;
                callers.extend(batch.iter().filter_map(|_| book.admission.give_back(SLOT)));
            }
            (next, stale)
        };
        drop(stale);
        callers.into_iter().for_each(contain::wake);
        next
    }

    /// Enters a request; `reserved` says that there is a permit for it.
    fn enter(&self, request: Q, reserved: bool) -> CallState<R, E> {
        let (sender, reply) = oneshot::channel();
        let request = Request { request, reply: sender };
        let now = self.now();
        // Declared behind the request, which is dropped without the lock if it is refused.
        let mut book = self.book.lock();
        if book.closed {
            return CallState::Refused(closed());
        }
        if !reserved
            && !matches!(book.admission.enter(Class::Normal, Patience::Never), Entered::In(_))
        {
            return CallState::Refused(self.full(&book));
        }
        let (key, tells) = book.gather.add(now, request);
        let worker = if tells { book.worker.take() } else { None };
        drop(book);
        worker.into_iter().for_each(contain::wake);
        CallState::Waiting { key, reply }
    }

    /// Takes back a request that is not in a batch yet.
    fn leave(&self, key: u64) {
        let mut book = self.book.lock();
        let request = book.gather.leave(key);
        let next = request.as_ref().and_then(|_| book.admission.give_back(SLOT));
        drop(book);
        drop(request);
        next.into_iter().for_each(contain::wake);
    }

    fn full(&self, book: &BatcherState<Q, R, E>) -> Error {
        ErrorDetail::Overloaded {
            what: "the batcher",
            in_flight: book.gather.in_flight() as u64,
            limit: self.limits.max_in_flight as u64,
            waiting: book.gather.waiting() as u64,
            max_waiting: book.admission.limit() as u64,
        }
        .into()
    }
}

/// Runs a batch and gives each of its requests the reply.
fn answer<Q, R, E, F, Fut>(
    batch: Vec<Request<Q, R, E>>,
    run: &mut F,
) -> impl Future<Output = ()> + Send + use<Q, R, E, F, Fut>
where
    Q: Send,
    R: Send,
    E: From<Error> + Clone + Send,
    F: FnMut(Vec<Q>) -> Fut,
    Fut: Future<Output = Result<Vec<Result<R, E>>, E>> + Send,
{
    let requests = batch.len();
    let (batch, callers): (Vec<Q>, Vec<_>) =
        batch.into_iter().map(|one| (one.request, one.reply)).unzip();
    tracing::trace!(target: "gpu_await::batch", requests);
    let begun = contain::catch(|| run(batch));
    async move {
        let ended = match begun {
            Ok(running) => contain::catch_future(running).await,
            Err(message) => Err(message),
        };
        let error: E = match ended {
            Ok(Ok(replies)) if replies.len() == requests => {
                for (caller, reply) in callers.into_iter().zip(replies) {
                    send(caller, || reply);
                }
                return;
            }
            Ok(Ok(replies)) => {
                Error::from(ErrorDetail::Replies { requests, replies: replies.len() }).into()
            }
            Ok(Err(error)) => error,
            Err(message) => {
                contain::log(|| {
                    tracing::error!(requests, message, "what ran a batch panicked");
                });
                Error::from(ErrorDetail::BatchPanicked { requests, message }).into()
            }
        };
        for caller in callers {
            send(caller, || Err(error.clone()));
        }
    }
}

/// Answers a request. The reply is dropped if the caller is gone; whatever that, its waker or
/// `reply` does, the others of the batch are answered as well.
fn send<T>(caller: oneshot::Sender<T>, reply: impl FnOnce() -> T) {
    contain::contain("the reply to a request of a batch", || drop(caller.send(reply())));
}

pub(super) fn closed() -> Error {
    ErrorDetail::Closed { device: "the batcher".to_owned() }.into()
}

/// A worker's time-out.
#[derive(Default)]
struct WorkerTimer {
    timer: Timer,
    set: Option<(u64, Waker)>,
}

impl WorkerTimer {
    /// Wakes `worker` at `at`; false if there is no thread to be had for it.
    fn set(&mut self, epoch: Instant, at: u64, worker: &Waker) -> bool {
        let known = self.set.as_ref();
        if known.is_some_and(|(known, waker)| *known == at && waker.will_wake(worker)) {
            return true;
        }
        self.set = Some((at, worker.clone()));
        self.timer.set(epoch + Duration::from_nanos(at), worker.clone())
    }
}

/// The end of a worker: who still waits is told.
struct End<Q, R, E>(Arc<BatcherCore<Q, R, E>>);

impl<Q, R, E> Drop for End<Q, R, E> {
    fn drop(&mut self) {
        let mut book = self.0.book.lock();
        book.closed = true;
        let waiting = book.gather.clear();
        let wakers = book.admission.close();
        let worker = book.worker.take();
        drop(book);
        drop(worker);
        for request in waiting {
            contain::contain("the drop of a request", || drop(request));
        }
        wakers.into_iter().for_each(contain::wake);
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
        Batcher { shared: self.shared.clone(), open: self.open.clone() }
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

impl fmt::Debug for BatchWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BatchWorker")
    }
}
