//! Stream pools and batchers as `tower::Service`, so that time-outs, load shedding, concurrency
//! limits and tracing layers apply to them.
//!
//! Both are ready when there is a permit for the request, and hold it until the call or their drop:
//! behind a `load_shed` layer a request that would wait is refused at once, behind a `timeout` layer
//! it is given up. A clone holds none of the permit.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::ready;
use tower_service::Service;

use super::admission::{Class, Entered, Key, Patience, Waited};
use super::batcher::{Batcher, BatcherCore, Call, SLOT, closed};
use super::pool::{Acquire, PooledStream, StreamPool};
use crate::error::Error;
use crate::thread::contain;

/// A function of a stream and a request, as a service: ready when the [`StreamPool`] has a stream.
///
/// # Examples
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::time::Duration;
/// use gpu_await::{Device, Error, PooledStream};
/// use tower::{Service, ServiceBuilder, ServiceExt};
///
/// let pool = Device::host().streams(4)?;
/// let sum = pool.service(|stream: PooledStream, x: Vec<f32>| async move {
///     let x = stream.upload(x).queued()?;
///     Ok::<_, Error>(stream.download(&x).await?.iter().sum::<f32>())
/// });
/// let mut service = ServiceBuilder::new().load_shed().timeout(Duration::from_secs(1)).service(sum);
/// assert_eq!(service.ready().await.unwrap().call(vec![1.0, 2.0]).await.unwrap(), 3.0);
/// # Ok::<(), Error>(()) }).unwrap();
/// ```
pub struct PoolService<F> {
    pool: StreamPool,
    run: F,
    acquiring: Option<Acquire>,
    stream: Option<PooledStream>,
}

/// A [`Batcher`] as a service: ready when a request may wait for a batch.
pub struct BatchService<Q, R, E = Error> {
    batcher: Batcher<Q, R, E>,
    waiting: Option<Key>,
    reserved: bool,
}

impl StreamPool {
    /// Makes a service that calls `run` with a stream of the pool and each request. It is ready
    /// when there is a stream, however many wait: bound these with a layer.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire) but for `Overloaded`, turned into the error of `run`'s future.
    ///
    /// # Panics
    /// Called before it was ready, as every such service.
    pub fn service<F>(&self, run: F) -> PoolService<F> {
        PoolService { pool: self.clone(), run, acquiring: None, stream: None }
    }
}

impl<Q, R, E> Batcher<Q, R, E> {
    /// The batcher as a service: ready when a request may wait for a batch.
    ///
    /// # Errors
    /// As [`Call`].
    ///
    /// # Panics
    /// Called before it was ready, as every such service.
    #[must_use]
    pub fn service(&self) -> BatchService<Q, R, E> {
        BatchService { batcher: self.clone(), waiting: None, reserved: false }
    }
}

impl<F, Q, Fut, R, E> Service<Q> for PoolService<F>
where
    F: FnMut(PooledStream, Q) -> Fut,
    Fut: Future<Output = Result<R, E>>,
    E: From<Error>,
{
    type Response = R;
    type Error = E;
    type Future = Fut;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), E>> {
        if self.stream.is_none() {
            let pool = &self.pool;
            let acquiring =
                self.acquiring.get_or_insert_with(|| pool.enter(Class::Normal, Patience::Always));
            let acquired = ready!(Pin::new(acquiring).poll(cx));
            self.acquiring = None;
            self.stream = Some(acquired?);
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Q) -> Fut {
        let stream = self.stream.take().expect("`poll_ready` said ready first");
        (self.run)(stream, request)
    }
}

impl<Q, R, E> BatcherCore<Q, R, E> {
    /// Makes a permit for a request that is to come, when there is one.
    fn reserve(&self, waiting: &mut Option<Key>, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let waker = cx.waker().clone();
        let mut book = self.book.lock();
        let key = match waiting.take() {
            Some(key) => key,
            None => match book.admission.enter(Class::Normal, Patience::Always) {
                Entered::In(_) => return Poll::Ready(Ok(())),
                Entered::Waits(key) => key,
                Entered::Full | Entered::Gone | Entered::Closed => {
                    return Poll::Ready(Err(closed()));
                }
            },
        };
        let (waited, stale) = book.admission.poll(key, waker);
        drop(book);
        drop(stale);
        match waited {
            Waited::Wait => {
                *waiting = Some(key);
                Poll::Pending
            }
            Waited::In(_) => Poll::Ready(Ok(())),
            Waited::Gone | Waited::Closed => Poll::Ready(Err(closed())),
        }
    }

    /// Gives up a permit that was made, or waited for.
    fn unreserve(&self, waiting: Option<Key>, reserved: bool) {
        let mut book = self.book.lock();
        let (next, stale) = match waiting {
            Some(key) => book.admission.leave(key),
            None if reserved => (book.admission.give_back(SLOT), None),
            None => (None, None),
        };
        drop(book);
        drop(stale);
        next.into_iter().for_each(contain::wake);
    }
}

impl<Q, R, E: From<Error>> Service<Q> for BatchService<Q, R, E> {
    type Response = R;
    type Error = E;
    type Future = Call<Q, R, E>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), E>> {
        if !self.reserved {
            ready!(self.batcher.shared.reserve(&mut self.waiting, cx))?;
            self.reserved = true;
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Q) -> Call<Q, R, E> {
        assert!(std::mem::take(&mut self.reserved), "`poll_ready` said ready first");
        Call::new(&self.batcher.shared, request, true)
    }
}

impl<Q, R, E> Drop for BatchService<Q, R, E> {
    fn drop(&mut self) {
        self.batcher.shared.unreserve(self.waiting.take(), self.reserved);
    }
}

impl<F: Clone> Clone for PoolService<F> {
    fn clone(&self) -> Self {
        self.pool.service(self.run.clone())
    }
}

impl<Q, R, E> Clone for BatchService<Q, R, E> {
    fn clone(&self) -> Self {
        self.batcher.service()
    }
}

impl<F> fmt::Debug for PoolService<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolService({:?})", self.pool)
    }
}

impl<Q, R, E> fmt::Debug for BatchService<Q, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BatchService({:?})", self.batcher)
    }
}
