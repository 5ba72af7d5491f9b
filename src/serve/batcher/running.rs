//! A running batch: the input of its function, the delivery of its replies, and its span.
//!
//! A batch counts as in flight until it has answered: dropping its [`InFlight`] ends that, whatever happened to the future that
//! holds it. With `in_order` it counts until its replies are sent, and the thread that sends them ends it.
//!
//! # Invariants
//! 1. A batch ends exactly once, even if its future is dropped before it began or its function panics (`a_batch_that_is_not_run_ends`).
//! 2. With `in_order`, no reply is sent before those of earlier batches (`replies_in_order`), the batches begun but not sent never exceed
//!    the limit of batches in flight (`replies_that_wait_are_in_flight`), and whatever a reply or an error does when it is
//!    cloned or dropped, those of later batches are sent (`an_error_that_panics_in_its_drop` and its siblings).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::channel::oneshot;
use gpu_await_protocol::sync::Mutex;
use tracing::Span;
use tracing::field::Empty;

use super::{Answer, BatcherCore, Request, RequestSpan};
use crate::error::{Error, ErrorDetail};
use crate::serve::refusal::field;
use crate::thread::contain::{self, Contained};
use gpu_await_protocol::batching::{Begun, Gathered};

/// The requests of a batch; replies must be in the same order. Dereferences to a slice.
#[derive(Clone, Debug)]
pub struct Batch<Q> {
    requests: Vec<Q>,
    weight: u64,
}

impl<Q> Batch<Q> {
    /// Returns the requests.
    #[must_use]
    pub fn into_requests(self) -> Vec<Q> {
        self.requests
    }

    /// Returns their total [weight](super::Batcher::with_weight).
    #[must_use]
    pub fn weight(&self) -> u64 {
        self.weight
    }
}

impl<Q> Deref for Batch<Q> {
    type Target = [Q];

    fn deref(&self) -> &[Q] {
        &self.requests
    }
}

impl<Q> IntoIterator for Batch<Q> {
    type Item = Q;
    type IntoIter = std::vec::IntoIter<Q>;

    fn into_iter(self) -> Self::IntoIter {
        self.requests.into_iter()
    }
}

/// A batch to be run: a future for the task that [`spawn`](super::builder::BatcherBuilder::spawn) makes.
#[must_use = "a batch is not run unless its future is spawned"]
pub struct BatchTask(Contained<Pin<Box<dyn Future<Output = ()> + Send>>>);

impl Future for BatchTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // Foreign code in it is contained already; the worker survives panics in the rest.
        contain::contain("a batch", || self.0.as_mut().poll(cx)).unwrap_or(Poll::Ready(()))
    }
}

impl fmt::Debug for BatchTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BatchTask")
    }
}

/// The recipient of a request's answer. Its drop wakes the caller.
pub(super) type Caller<R, E> = Contained<oneshot::Sender<Answer<R, E>>>;

/// The replies of batches that ended before earlier ones.
pub(super) struct Deliveries<R, E> {
    next: u64,
    ended: BTreeMap<u64, Replies<R, E>>,
    /// A thread is delivering replies: it also delivers those entered meanwhile.
    is_delivering: bool,
    send: fn(Replies<R, E>),
}

/// The recipients of replies.
struct Replies<R, E> {
    callers: Vec<Caller<R, E>>,
    replies: BatchEnd<R, E>,
    ended: BatchEnded,
}

/// How a batch is reported as ended once its replies are sent.
#[derive(Clone, Copy)]
struct BatchEnded {
    begun: Begun,
    at_ns: u64,
    /// Whether to notify the worker: not if the batch runs inside the worker.
    tells: bool,
}

/// A batch's results for its callers.
enum BatchEnd<R, E> {
    /// One for each caller.
    Each(Vec<Result<R, E>>),
    /// Its function's error, for all of them.
    All(E),
    Refused(Error),
}

/// A batch that counts as in flight.
pub(super) struct InFlight<Q, R, E> {
    shared: Arc<BatcherCore<Q, R, E>>,
    number: u64,
    begun: Begun,
    /// When its first request was entered.
    since_ns: u64,
    span: Span,
    answered: bool,
    /// Whether to notify the worker of its end: not if it runs inside the worker.
    tells: bool,
}

impl<R, E: Clone> Deliveries<R, E> {
    pub(super) fn new() -> Self {
        Deliveries { next: 0, ended: BTreeMap::new(), is_delivering: false, send: Replies::send }
    }
}

/// Splits the requests of a batch into the function's input and the recipients.
pub(super) fn unpack<Q, R, E>(
    requests: Vec<Gathered<Request<Q, R, E>>>,
) -> (Batch<Q>, Vec<Caller<R, E>>, Vec<RequestSpan>) {
    let weight = requests.iter().map(|gathered| gathered.weight).sum();
    let (mut batch, mut callers, mut spans) = (Vec::new(), Vec::new(), Vec::new());
    for Gathered { request: Request { request, caller, span }, .. } in requests {
        batch.push(request.into_inner());
        callers.push(caller);
        spans.push(span);
    }
    (Batch { requests: batch, weight }, callers, spans)
}

impl<Q, R, E> InFlight<Q, R, E> {
    /// A batch with its span, which follows from those of its requests.
    pub(super) fn new(
        shared: Arc<BatcherCore<Q, R, E>>,
        number: u64,
        begun: Begun,
        batch: &Batch<Q>,
        (since_ns, spans): (u64, Vec<RequestSpan>),
        tells: bool,
    ) -> Self {
        let us = |from, to: u64| field(to.saturating_sub(from) / 1000);
        // A subscriber is foreign code: its panic costs only the trace.
        let span = contain::catch(|| {
            let span = Contained::new(tracing::debug_span!(
                target: "gpu_await::batch", parent: None, "batch",
                requests = field(batch.len() as u64), weight = field(batch.weight),
                queue_us = us(since_ns, begun.at_ns), permit_us = us(begun.asked_ns, begun.at_ns),
                run_us = Empty, answer_us = Empty,
            ));
            for request in spans {
                span.follows_from(&*request);
            }
            span.into_inner()
        });
        let span = span.unwrap_or_else(|_| Span::none());
        InFlight { shared, number, begun, since_ns, span, answered: false, tells }
    }

    /// Calls `tracing` in the span of the batch.
    pub(super) fn in_span(&self, event: impl FnOnce()) {
        contain::log(|| self.span.in_scope(event));
    }

    fn ended(&self) -> BatchEnded {
        BatchEnded { begun: self.begun, at_ns: self.shared.now(), tells: self.tells }
    }

    /// Gives the callers their replies.
    fn answer(&mut self, callers: Vec<Caller<R, E>>, replies: BatchEnd<R, E>)
    where
        E: Clone,
    {
        self.answered = true;
        let ended = self.ended();
        self.shared.deliver(self.number, Replies { callers, replies, ended });
        let now = self.shared.now();
        contain::log(|| {
            self.span.record("answer_us", field(now.saturating_sub(self.since_ns) / 1000));
        });
    }
}

impl<Q, R, E> Drop for InFlight<Q, R, E> {
    fn drop(&mut self) {
        if !self.answered {
            // Its callers see that no answer will come; with `in_order`, later batches proceed.
            self.shared.skip(self.number, self.ended());
        }
        if self.shared.deliveries.is_none() {
            self.shared.finish(self.ended());
        }
        let span = std::mem::replace(&mut self.span, Span::none());
        contain::contain("a subscriber", || drop(span));
    }
}

/// Runs a batch and gives each of its requests the reply. `begun` is the result of calling the function.
pub(super) fn task<Q, R, E, Fut>(
    mut in_flight: InFlight<Q, R, E>,
    callers: Vec<Caller<R, E>>,
    begun: Result<Fut, Failed>,
) -> BatchTask
where
    Q: Send + 'static,
    R: Send + 'static,
    E: From<Error> + Clone + Send + 'static,
    Fut: Future<Output = Result<Vec<Result<R, E>>, E>> + Send + 'static,
{
    BatchTask(Contained::new(Box::pin(async move {
        let requests = callers.len();
        let ended = match begun {
            Ok(running) => {
                let span = contain::catch(|| in_flight.span.clone());
                let span = Contained::new(span.unwrap_or_else(|_| Span::none()));
                in_span(&span, contain::catch_future(running)).await.map_err(Failed::Panicked)
            }
            Err(failed) => Err(failed),
        };
        let run_us = in_flight.shared.now().saturating_sub(in_flight.begun.at_ns) / 1000;
        contain::log(|| {
            in_flight.span.record("run_us", field(run_us));
        });
        let replies = match ended {
            Ok(Ok(replies)) if replies.len() == requests => BatchEnd::Each(replies),
            Ok(Ok(replies)) => {
                let found = replies.len();
                contain::drop_each(replies);
                BatchEnd::Refused(ErrorDetail::Replies { requests, replies: found }.into())
            }
            Ok(Err(error)) => BatchEnd::All(error),
            Err(Failed::NoStream(error)) => BatchEnd::Refused(error),
            Err(Failed::Panicked(message)) => {
                contain::log(|| {
                    tracing::error!(requests, message, "the closure of a batch panicked");
                });
                BatchEnd::Refused(ErrorDetail::BatchPanicked { requests, message }.into())
            }
        };
        in_flight.answer(callers, replies);
    })))
}

/// A contained future, polled in a span. A subscriber is foreign code: its panic costs only the trace.
async fn in_span<F: Future>(span: &Span, contained: F) -> F::Output {
    let mut contained = pin!(contained);
    std::future::poll_fn(|cx| {
        let mut polled = None;
        contain::log(|| span.in_scope(|| polled = Some(contained.as_mut().poll(cx))));
        polled.unwrap_or_else(|| contained.as_mut().poll(cx))
    })
    .await
}

/// Why a batch did not run to completion.
pub(super) enum Failed {
    NoStream(Error),
    Panicked(String),
}

impl<Q, R, E> BatcherCore<Q, R, E> {
    fn deliver(&self, number: u64, replies: Replies<R, E>)
    where
        E: Clone,
    {
        match &self.deliveries {
            None => replies.send(),
            Some(deliveries) => self.deliver_in_order(deliveries, number, replies),
        }
    }

    /// Lets replies of later batches proceed past a batch that has none.
    fn skip(&self, number: u64, ended: BatchEnded) {
        if let Some(deliveries) = &self.deliveries {
            let (callers, replies) = (Vec::new(), BatchEnd::Each(Vec::new()));
            self.deliver_in_order(deliveries, number, Replies { callers, replies, ended });
        }
    }

    fn deliver_in_order(
        &self,
        deliveries: &Mutex<Deliveries<R, E>>,
        number: u64,
        replies: Replies<R, E>,
    ) {
        let mut book = deliveries.lock();
        let send = book.send;
        book.ended.insert(number, replies);
        if book.is_delivering {
            return;
        }
        book.is_delivering = true;
        loop {
            let next = book.next;
            let Some(replies) = book.ended.remove(&next) else { break };
            book.next += 1;
            // Wakers and replies are foreign code.
            drop(book);
            let ended = replies.ended;
            contain::contain("the replies of a batch", || send(replies));
            self.finish(ended);
            book = deliveries.lock();
        }
        book.is_delivering = false;
    }

    /// A batch is no longer in flight.
    fn finish(&self, BatchEnded { begun, at_ns, tells }: BatchEnded) {
        let worker = {
            let mut book = self.book.lock();
            book.gather.finished(at_ns, begun);
            if tells { book.worker.take() } else { None }
        };
        worker.into_iter().for_each(contain::wake);
    }
}

impl<R, E: Clone> Replies<R, E> {
    fn send(self) {
        let Replies { callers, replies, .. } = self;
        let requests = callers.len();
        match replies {
            BatchEnd::Each(replies) => {
                for (caller, reply) in callers.into_iter().zip(replies) {
                    send(caller, Ok(reply));
                }
            }
            BatchEnd::All(error) => {
                let error = Contained::new(error);
                for caller in callers {
                    let answer = match contain::catch(|| E::clone(&error)) {
                        Ok(error) => Ok(Err(error)),
                        Err(message) => {
                            Err(ErrorDetail::BatchPanicked { requests, message }.into())
                        }
                    };
                    send(caller, answer);
                }
            }
            BatchEnd::Refused(error) => {
                for caller in callers {
                    send(caller, Err(error.clone()));
                }
            }
        }
    }
}

impl<R, E> Drop for Deliveries<R, E> {
    /// Drops replies waiting for a batch whose task was leaked: their callers are gone.
    fn drop(&mut self) {
        for (_, replies) in std::mem::take(&mut self.ended) {
            contain::contain("the replies of a batch", || (self.send)(replies));
        }
    }
}

/// Answers a request. The answer is dropped if the caller is gone; whatever that drop or the caller's waker does, the batch's other
/// requests are answered.
pub(super) fn send<R, E>(caller: Caller<R, E>, answer: Answer<R, E>) {
    contain::contain("the reply to a request of a batch", || {
        drop(caller.into_inner().send(answer));
    });
}
