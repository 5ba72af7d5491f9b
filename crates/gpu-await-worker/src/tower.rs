//! Workers and groups as `tower::Service`, so that time-outs, limits, load shedding and tracing layers apply to them.
//!
//! | state of a service | meaning | left by |
//! |---|---|---|
//! | `Idle` | it holds nothing | `poll_ready` → `Waits` |
//! | `Waits` | it waits for room for a call, at one worker or at several | room → `Reserved`; an error of all of them → `Idle` |
//! | `Reserved` | it holds room for one call | `call` → `Idle` |
//!
//! # Invariants
//! 1. Between `poll_ready` and `call` nobody else takes the room; it is given back if the service is dropped instead
//!    (`readiness_reserves_room`).
//! 2. Room is given in the order in which it was asked for, and skips those that gave up (`readiness_reserves_room`).
#![forbid(unsafe_code)]

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service as Tower;

use crate::error::{Error, Result};
use crate::inside::Handle;
use crate::pending::{Answer, Call};
use crate::room::{Awaited, Room};
use crate::route::Readiness;
use crate::service::Service;
use crate::worker::Worker;
use crate::workers::Group;

/// Calls of a [`Worker`] or a [`Group`] as a `tower::Service`, made by [`Worker::service`] and [`Group::service`].
///
/// It is ready when there is room for one more call ([`most_calls`](crate::WorkerBuilder::most_calls)), which it holds until it is called or
/// dropped, so that the call that follows is not [`Overloaded`](Error::Overloaded) by the number of calls. Ready says nothing about a process:
/// calls wait for one that is starting. With `load_shed` around it, a request without room is refused at once; a `timeout` bounds the call but not
/// the wait for room, as everywhere in tower. A clone holds nothing.
///
/// A `timeout` drops the call but does not stop it: the process goes on with it, and its permit is released when that is done. So kernels that never
/// end take one permit after another until `load_shed` refuses everything, while the worker's health says that it serves: give each call a
/// limit ([`Call::within`]), which kills the process. [`Stats::running`](crate::Stats::running) at `most_calls` for long, while
/// [`Stats::answered`](crate::Stats::answered) stands still, points to calls without one.
///
/// Room is held whatever dies: a call of a [`Group`] whose worker died before the call was made goes to another one, with its permit from the
/// first; so does a call that the group sends again. The other worker may then exceed its `most_calls`, but the group never has more calls than
/// all of its workers may have.
///
/// # Errors
/// From `poll_ready`: the worker, or each of the group, is given up or closed. It may be polled again: see [`Worker::revive`].
pub struct CallService<T, F> {
    target: T,
    call: F,
    ready: Ready,
}

enum Ready {
    Idle,
    Waits(Vec<Awaited>),
    Reserved(Room),
}

impl<S: Service> Worker<S> {
    /// Makes a `tower::Service` (feature `tower`) of this worker and a function that makes the call of a request, with its options.
    ///
    /// # Examples
    /// ```no_run
    /// # use std::time::Duration;
    /// # async fn ask<S: gpu_await_worker::Service<Request = u32, Response = u32>>(worker: gpu_await_worker::Worker<S>)
    /// # -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use gpu_await_worker::Worker;
    /// use tower::{Service, ServiceBuilder, ServiceExt};
    ///
    /// // Longer than any call takes: what does not end is killed, and its place is free.
    /// let within = Duration::from_secs(5);
    /// let call = move |worker: &Worker<S>, x: u32| worker.call(x).within(within).idempotent();
    /// let service = worker.service(call);
    /// let mut service = ServiceBuilder::new().load_shed().timeout(Duration::from_secs(1)).service(service);
    /// let y = service.ready().await?.call(1).await?;
    /// # Ok(()) }
    /// ```
    pub fn service<F>(&self, call: F) -> CallService<Worker<S>, F> {
        CallService { target: self.clone(), call, ready: Ready::Idle }
    }
}

impl<S: Service> Group<S> {
    /// Makes a `tower::Service` (feature `tower`) of this group and a function that makes the call of a request, as [`Worker::service`] does. It
    /// is ready when a worker has room, preferably the least loaded of those that serve; the call goes to that one if it still serves.
    pub fn service<F>(&self, call: F) -> CallService<Group<S>, F> {
        CallService { target: self.clone(), call, ready: Ready::Idle }
    }
}

impl<T: Clone, F: Clone> Clone for CallService<T, F> {
    fn clone(&self) -> Self {
        let (target, call) = (self.target.clone(), self.call.clone());
        CallService { target, call, ready: Ready::Idle }
    }
}

impl<T: fmt::Debug, F> fmt::Debug for CallService<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_ready = matches!(self.ready, Ready::Reserved(_));
        f.debug_struct("CallService")
            .field("target", &self.target)
            .field("ready", &is_ready)
            .finish()
    }
}

impl Ready {
    /// Waits for room at one of these workers, `first` before all others.
    fn poll(
        &mut self,
        handles: &[Arc<Handle>],
        first: impl FnOnce() -> usize,
        cx: &mut Context<'_>,
    ) -> Poll<Result<()>> {
        let ask = |at: usize| handles[at].inside.reserve();
        if let Ready::Idle = self {
            let first = first();
            *self = Ready::Waits(vec![ask(first)]);
            let polled = self.poll_waits(cx);
            if handles.len() > 1 && !matches!(polled, Poll::Ready(Ok(()))) {
                // It has none now, or has ended: whichever has some first.
                let others = (0..handles.len()).filter(|at| *at != first);
                let others =
                    others.filter(|at| handles[*at].inside.seen().ready != Readiness::Never);
                if let Ready::Waits(waits) = self {
                    waits.extend(others.map(ask));
                }
            }
            if let (Poll::Ready(Err(_)), Ready::Waits(waits)) = (&polled, &*self)
                && waits.is_empty()
            {
                *self = Ready::Idle;
                return polled;
            }
        }
        let polled = self.poll_waits(cx);
        if let Poll::Ready(Err(_)) = polled {
            *self = Ready::Idle;
        }
        polled
    }

    fn poll_waits(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let Ready::Waits(waits) = self else { return Poll::Ready(Ok(())) };
        let mut error = Error::Closed;
        let mut at = 0;
        while let Some(room) = waits.get_mut(at) {
            match Pin::new(room).poll(cx) {
                Poll::Pending => at += 1,
                Poll::Ready(Some(Ok(room))) => {
                    *self = Ready::Reserved(room);
                    return Poll::Ready(Ok(()));
                }
                Poll::Ready(ended) => {
                    // A panic forgot it: the worker has ended as well.
                    error = ended.and_then(Result::err).unwrap_or(error);
                    drop(waits.swap_remove(at));
                }
            }
        }
        if waits.is_empty() { Poll::Ready(Err(error)) } else { Poll::Pending }
    }

    fn take(&mut self) -> Option<Room> {
        match std::mem::replace(self, Ready::Idle) {
            Ready::Reserved(room) => Some(room),
            Ready::Idle | Ready::Waits(_) => None,
        }
    }
}

impl<S, F, Q> Tower<Q> for CallService<Worker<S>, F>
where
    S: Service,
    F: FnMut(&Worker<S>, Q) -> Call<S>,
{
    type Response = S::Response;
    type Error = Error;
    type Future = Answer<S>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.ready.poll(std::slice::from_ref(&self.target.handle), || 0, cx)
    }

    fn call(&mut self, request: Q) -> Answer<S> {
        let room = self.ready.take();
        (self.call)(&self.target, request).in_room(room).send()
    }
}

impl<S, F, Q> Tower<Q> for CallService<Group<S>, F>
where
    S: Service,
    F: FnMut(&Group<S>, Q) -> Call<S>,
{
    type Response = S::Response;
    type Error = Error;
    type Future = Answer<S>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let members = &self.target.members;
        self.ready.poll(members.handles(), || members.pick(None), cx)
    }

    fn call(&mut self, request: Q) -> Answer<S> {
        let room = self.ready.take();
        (self.call)(&self.target, request).in_room(room).send()
    }
}
