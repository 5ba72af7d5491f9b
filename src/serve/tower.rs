//! Stream pools and batchers as `tower::Service`, so that time-outs, retries, rate limits and tracing layers apply to them.
//!
//! Both are always ready, and wait in the future of the call. So a `timeout` layer, whose time starts with the call, bounds the wait for a
//! permit as well as the work; and a service that is kept ready but not called holds no permit. The pool or the batcher bounds the number
//! of waiters.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project::pin_project;
use tower_service::Service;

use super::batcher::{Batcher, Call};
use super::pool::acquire::Acquire;
use super::pool::{PooledStream, StreamPool};
use crate::error::Error;

/// A function of a stream and a request, as a service: each call waits for a permit of the [`StreamPool`], then runs it.
///
/// # Examples
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::time::Duration;
/// use gpu_await::{Device, Error, PooledStream};
/// use tower::{Service, ServiceBuilder, ServiceExt};
///
/// let limit = Duration::from_secs(1);
/// let pool = Device::host().streams(4)?.with_patience(limit);
/// let sum = pool.service(|stream: PooledStream, x: Vec<f32>| async move {
///     let x = stream.upload(x).queued()?;
///     Ok::<_, Error>(stream.download(&x).await?.iter().sum::<f32>())
/// });
/// let mut service = ServiceBuilder::new().timeout(limit).service(sum);
/// assert_eq!(service.ready().await.unwrap().call(vec![1.0, 2.0]).await.unwrap(), 3.0);
/// # Ok::<(), Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct PoolService<F> {
    pool: StreamPool,
    run: F,
}

/// A call of a [`PoolService`].
///
/// # Cancel safety
/// If it is dropped, it leaves the pool's queue, or drops the function's future with its stream: submitted
/// work goes on and holds its permit until the device has finished.
#[pin_project]
#[must_use = "a future does nothing unless it is awaited"]
pub struct PoolCall<F, Q, Fut> {
    waiting: Option<(Acquire, F, Q)>,
    #[pin]
    running: Option<Fut>,
}

/// A [`Batcher`] as a service: each call enters a request.
pub struct BatchService<Q, R, E = Error> {
    batcher: Batcher<Q, R, E>,
}

impl StreamPool {
    /// Makes a service that waits for a permit for each request, as this handle's [`acquire`](Self::acquire) does, and calls `run` with the stream.
    ///
    /// The service is always ready, and an idle service holds no permit. So a `timeout` layer bounds the wait for the permit and the work
    /// together, and `load_shed` alone sheds nothing. A `concurrency_limit` makes callers wait where a `timeout` layer does not reach, unless
    /// `load_shed` is around it. Instead, let the pool refuse requests: [`with_patience`](Self::with_patience) of zero refuses those that
    /// would wait, a patience as long as the time limit those that would wait too long, and
    /// [`max_waiting`](crate::StreamPoolBuilder::max_waiting) those beyond its number.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), turned into the error of `run`'s future.
    pub fn service<F>(&self, run: F) -> PoolService<F> {
        PoolService { pool: self.clone(), run }
    }
}

impl<Q, R, E> Batcher<Q, R, E> {
    /// Makes a service whose calls are this handle's [`call`](Self::call)s. It is always ready and refuses
    /// excess requests: a `timeout` layer bounds the wait for a batch and the batch together.
    ///
    /// # Errors
    /// As [`Call`].
    #[must_use]
    pub fn service(&self) -> BatchService<Q, R, E> {
        BatchService { batcher: self.clone() }
    }
}

impl<F, Q, Fut, R, E> Service<Q> for PoolService<F>
where
    F: FnMut(PooledStream, Q) -> Fut + Clone,
    Fut: Future<Output = Result<R, E>>,
    E: From<Error>,
{
    type Response = R;
    type Error = E;
    type Future = PoolCall<F, Q, Fut>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), E>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Q) -> PoolCall<F, Q, Fut> {
        let waiting = (self.pool.acquire(), self.run.clone(), request);
        PoolCall { waiting: Some(waiting), running: None }
    }
}

impl<F, Q, Fut, R, E> Future for PoolCall<F, Q, Fut>
where
    F: FnMut(PooledStream, Q) -> Fut,
    Fut: Future<Output = Result<R, E>>,
    E: From<Error>,
{
    type Output = Result<R, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<R, E>> {
        let mut call = self.project();
        if let Some((acquire, ..)) = call.waiting {
            let stream = ready!(Pin::new(acquire).poll(cx));
            if let Some((_, mut run, request)) = call.waiting.take() {
                call.running.set(Some(run(stream?, request)));
            }
        }
        match call.running.as_pin_mut() {
            Some(running) => running.poll(cx),
            None => panic!("`PoolCall` polled after it was ready"),
        }
    }
}

impl<Q, R, E: From<Error>> Service<Q> for BatchService<Q, R, E> {
    type Response = R;
    type Error = E;
    type Future = Call<Q, R, E>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), E>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Q) -> Call<Q, R, E> {
        self.batcher.call(request)
    }
}

impl<Q, R, E> Clone for BatchService<Q, R, E> {
    fn clone(&self) -> Self {
        self.batcher.service()
    }
}

impl<F, Q, Fut> fmt::Debug for PoolCall<F, Q, Fut> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waits = self.waiting.is_some();
        f.write_str(if waits { "PoolCall(waiting)" } else { "PoolCall(running)" })
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
