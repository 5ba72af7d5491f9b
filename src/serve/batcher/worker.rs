//! [`BatchWorker`]: acquires each batch's permit and stream, forms the batch and runs it.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use futures::stream::{FuturesUnordered, StreamExt};

use super::running::{self, Batch, BatchTask, Failed, InFlight};
use super::{BatcherCore, Request};
use crate::error::{Error, Result as PoolResult};
use crate::runtime::clock::Deadline;
use crate::serve::pool::acquire::Acquire;
use crate::serve::pool::{PooledStream, StreamPool};
use crate::serve::refusal;
use crate::thread::contain::{self, Contained};
use gpu_await_protocol::batching::{Gathered, Next, TakenBatch};

/// Runs a batch as a task of its own.
pub(super) type Spawner = Arc<dyn Fn(BatchTask) + Send + Sync>;

/// Forms a batcher's batches and runs them: a future to spawn.
///
/// It ends when the last [`Batcher`](super::Batcher) is gone and everything is answered; in the child of a fork, at once. If it is dropped
/// earlier, waiting requests fail because the batcher is closed, and so do those of a batch that runs inside it; a batch with a
/// [task of its own](super::builder::BatcherBuilder::spawn) goes on, and answers when it ends.
#[must_use = "a batcher does nothing unless its worker is spawned"]
pub struct BatchWorker(Pin<Box<dyn Future<Output = ()> + Send>>);

/// The worker's work.
pub(super) struct BatchWork<Q, R, E, F> {
    end: End<Q, R, E>,
    pool: Option<StreamPool>,
    spawn: Option<Contained<Spawner>>,
    run: Contained<F>,
    /// `Some` while a batch is due and has no permit.
    acquiring: Option<Acquire>,
    /// Contained: it holds the waker of the worker's task.
    running: Contained<FuturesUnordered<BatchTask>>,
    /// When a batch is due, or a deadline passes.
    wakes_at: Option<Deadline>,
}

/// The end of a worker: waiting requests get an error.
struct End<Q, R, E>(Arc<BatcherCore<Q, R, E>>);

impl BatchWorker {
    pub(super) fn new<Q, R, E, F, Fut>(mut work: BatchWork<Q, R, E, F>) -> Self
    where
        Q: Send + 'static,
        R: Send + 'static,
        E: From<Error> + Clone + Send + 'static,
        F: FnMut(Option<PooledStream>, Batch<Q>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<Vec<Result<R, E>>, E>> + Send + 'static,
    {
        BatchWorker(Box::pin(async move {
            std::future::poll_fn(|cx| work.poll(cx)).await;
        }))
    }
}

impl Future for BatchWorker {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

impl<Q, R, E, F, Fut> BatchWork<Q, R, E, F>
where
    Q: Send + 'static,
    R: Send + 'static,
    E: From<Error> + Clone + Send + 'static,
    F: FnMut(Option<PooledStream>, Batch<Q>) -> Fut + Send + 'static,
    Fut: Future<Output = Result<Vec<Result<R, E>>, E>> + Send + 'static,
{
    pub(super) fn new(
        shared: Arc<BatcherCore<Q, R, E>>,
        pool: Option<StreamPool>,
        spawn: Option<Spawner>,
        run: F,
    ) -> Self {
        BatchWork {
            end: End(shared),
            pool,
            spawn: spawn.map(Contained::new),
            run: Contained::new(run),
            acquiring: None,
            running: Contained::new(FuturesUnordered::new()),
            wakes_at: None,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let shared = self.end.0.clone();
        // Its calls fail in the child.
        if shared.clock.is_inherited() {
            return Poll::Ready(());
        }
        // If nobody signals the time, requests that wait for it go early.
        let mut early = 0;
        loop {
            while let Poll::Ready(Some(())) = self.running.poll_next_unpin(cx) {}
            let now = shared.now().max(early);
            let (next, wakes_at) = shared.next(now, cx.waker());
            match next {
                Next::End => return Poll::Ready(()),
                Next::Due => {
                    if let Poll::Ready(permit) = self.poll_permit(now, cx) {
                        self.start(permit);
                        continue;
                    }
                }
                // The requests that it was for are gone.
                Next::Idle => self.acquiring = None,
            }
            if self.wakes_at.as_ref().map(Deadline::due) != wakes_at {
                self.wakes_at = wakes_at.map(|at| Deadline::at(&shared.clock, at));
            }
            let Some(wakes_at) = &mut self.wakes_at else { return Poll::Pending };
            ready!(Pin::new(&mut *wakes_at).poll(cx));
            early = wakes_at.due();
        }
    }

    /// Acquires a batch's permit, if there is a pool.
    fn poll_permit(
        &mut self,
        now: u64,
        cx: &mut Context<'_>,
    ) -> Poll<PoolResult<Option<PooledStream>>> {
        let Some(pool) = &self.pool else { return Poll::Ready(Ok(None)) };
        let shared = &self.end.0;
        let acquiring = self.acquiring.get_or_insert_with(|| {
            shared.book.lock().gather.asks(now);
            pool.acquire_for_batch()
        });
        let acquired = ready!(Pin::new(acquiring).poll(cx));
        self.acquiring = None;
        Poll::Ready(acquired.map(Some))
    }

    /// Takes a batch, after its permit was granted, and runs it.
    fn start(&mut self, permit: PoolResult<Option<PooledStream>>) {
        let shared = &self.end.0;
        let (number, TakenBatch { requests, late, begun }) = {
            let mut book = shared.book.lock();
            let (number, taken) = (book.batches, book.gather.take(shared.now()));
            let count = taken.requests.len() as u64;
            book.batches += u64::from(count > 0);
            match permit {
                Ok(_) => book.requests += count,
                Err(_) => book.refusals.closed += count,
            }
            (number, taken)
        };
        shared.tell_expired(late);
        // All of them were too late: the permit is returned.
        if requests.is_empty() {
            return;
        }
        let since_ns = requests.iter().map(|gathered| gathered.since).min().unwrap_or(0);
        let (batch, callers, spans) = running::unpack(requests);
        let tells = self.spawn.is_some();
        let trace = (since_ns, spans);
        let in_flight = InFlight::new(shared.clone(), number, begun, &batch, trace, tells);
        let run = &mut *self.run;
        let begun = match permit {
            Ok(stream) => contain::catch(|| run(stream, batch)).map_err(Failed::Panicked),
            Err(error) => {
                in_flight.in_span(|| refusal::tell(&shared.admitter, batch.len(), &error));
                contain::drop_each(batch);
                Err(Failed::NoStream(error))
            }
        };
        let task = running::task(in_flight, callers, begun);
        match &self.spawn {
            Some(spawn) => {
                contain::contain("what spawns a batch", || spawn(task));
            }
            None => self.running.push(task),
        }
    }
}

impl<Q, R, E> BatcherCore<Q, R, E> {
    /// The next step at `now`, and when to check again; `worker` is woken when that changes.
    fn next(&self, now: u64, worker: &Waker) -> (Next, Option<u64>) {
        let fresh = worker.clone();
        let (next, wakes_at, expired, stale) = {
            let mut book = self.book.lock();
            let stale = book.worker.replace(fresh);
            let expired = book.gather.expire(now);
            let next = book.gather.next(now);
            (next, book.gather.wakes_at(now), expired, stale)
        };
        contain::let_go(stale);
        self.tell_expired(expired);
        (next, wakes_at)
    }

    /// Answers the requests that were too late for any batch.
    fn tell_expired(&self, expired: Vec<Gathered<Request<Q, R, E>>>) {
        if expired.is_empty() {
            return;
        }
        let errors: Vec<_> = {
            let mut book = self.book.lock();
            expired.iter().map(|gathered| self.expired(&mut book, gathered)).collect()
        };
        let told = expired.into_iter().zip(errors).map(|(gathered, error)| {
            let Request { request, caller, span } = gathered.request;
            contain::log(|| span.in_scope(|| refusal::tell(&self.admitter, 1, &error)));
            running::send(caller, Err(error));
            (request, span)
        });
        // A slow drop delays nobody.
        drop(told.collect::<Vec<_>>());
    }
}

impl<Q, R, E> Drop for End<Q, R, E> {
    fn drop(&mut self) {
        let mut book = self.0.book.lock();
        book.closed = true;
        let waiting = book.gather.clear();
        book.refusals.closed += waiting.len() as u64;
        let worker = book.worker.take();
        drop(book);
        contain::let_go(worker);
        let closed = self.0.closed();
        for request in waiting {
            contain::log(|| request.span.in_scope(|| refusal::tell(&self.0.admitter, 1, &closed)));
        }
    }
}

impl fmt::Debug for BatchWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BatchWorker")
    }
}
