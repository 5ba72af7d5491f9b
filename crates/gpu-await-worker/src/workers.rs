//! [`Group`]: workers that are called as one. Each runs on its own; [`route`](crate::route) says which has a call.
#![forbid(unsafe_code)]

use std::borrow::Borrow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{join_all, select_ok};

use crate::error::{Error, Result};
use crate::health::GroupHealth;
use crate::members::Members;
use crate::pending::{Call, To};
use crate::service::Service;
use crate::stats::Stats;
use crate::ticket::Until;
use crate::worker::{Worker, WorkerBuilder};

/// Workers of one [`Service`] that are called as one: one on each GPU. Cheap to clone, `Send + Sync`; used on any executor.
///
/// A call goes to the [serving](crate::WorkerHealth::is_serving) worker with the fewest calls in flight, and to equals in turn. Where none serves it waits for one that is
/// starting.
///
/// # When a GPU is lost
/// The group, and not the worker, sends a call again: as often as the call [may run](Call::idempotent), and until its
/// [deadline](Call::deadline), both counted once over all workers. New calls go to the others from the moment that a death is seen. Of those
/// that the process had, those that are innocent go to others as well. Suspects wait for the next process of their own worker, and run there
/// alone, while the others serve everybody else: so a request that kills takes down one GPU at a time. If that worker is given up, they run
/// in another one, alone. A call is sent again when its future is polled, and keeps its memory and its permit until then: an admitted call
/// is not refused for lack of room ([`Overloaded`](Error::Overloaded)).
///
/// After three failed starts in a row (or the first, for a worker that has never served) a worker is given up, and its GPU is out: calls that
/// wait for it go to others, even those that may not run again, unless a process had them. The thread that looks after all workers probes it,
/// by a start, after a delay that grows as those of [`Restart`](crate::Restart) do, up to `most_delay`; when its service starts, it takes
/// calls again. Of [`Restart::early_deaths`](crate::Restart::early_deaths), 2 at most count in a group. With all of them out, calls end with
/// [`Error::GivenUp`].
///
/// Requests and clients that one worker [refuses](WorkerBuilder::blame) are refused by all that blame as well.
///
/// # Several workers on one GPU
/// are possible: a fault of one leaves the others alone. They take turns on the GPU, of some 2.4 ms each, and none gets faster: use them
/// for isolation, not for speed. Each needs its own names for [memory that its processes write](crate::Host::keep_mut).
///
/// # Ownership
/// As of a [`Worker`]: the processes end with the last handle.
///
/// # Examples
/// ```no_run
/// # async fn serve<S: gpu_await_worker::Service<Config = (), Request = u32, Response = u32>>() -> Result<(), gpu_await_worker::Error> {
/// use gpu_await_worker::{Group, Worker, gpus};
///
/// let gpus = gpus()?;
/// let group = Group::spawn(gpus.iter().map(|gpu| Worker::<S>::builder(()).gpu(&gpu.uuid))).await?;
/// let answer = group.call(1).idempotent().await?;
/// # Ok(()) }
/// ```
pub struct Group<S: Service> {
    pub(crate) members: Arc<Members>,
    service: PhantomData<fn() -> S>,
}

impl<S: Service> Clone for Group<S> {
    fn clone(&self) -> Self {
        Group { members: self.members.clone(), service: PhantomData }
    }
}

impl<S: Service> fmt::Debug for Group<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("stats", &self.stats()).finish()
    }
}

impl<S: Service> Group<S> {
    /// Starts these workers; ready proves that each service has started or failed to, and at least one has started.
    ///
    /// # Cancel safety
    /// If the future is dropped, the processes end.
    ///
    /// # Errors
    /// As [`begin`](Self::begin). If no worker serves, that of the first one: [`Error::GivenUp`].
    pub async fn spawn(workers: impl IntoIterator<Item = WorkerBuilder<S>>) -> Result<Self> {
        let group = Group::begin(workers)?;
        let handles = group.members.handles().iter();
        let served = join_all(handles.map(|handle| handle.inside.wait(Until::Serving))).await;
        let first =
            served.into_iter().reduce(|one, other| if one.is_ok() { one } else { other.or(one) });
        first.unwrap_or(Ok(())).map(|()| group)
    }

    /// Starts these workers, and waits for nothing: calls wait until one serves.
    ///
    /// # Errors
    /// [`Error::Unfit`] without a worker; as [`WorkerBuilder::begin`], of any of them.
    pub fn begin(workers: impl IntoIterator<Item = WorkerBuilder<S>>) -> Result<Self> {
        let blamed = Arc::default();
        let workers: Vec<_> = workers.into_iter().collect();
        let places = workers.iter().map(WorkerBuilder::places).fold(0, usize::saturating_add);
        let workers = workers.into_iter().map(|worker| worker.in_group(&blamed, places).begin());
        let handles = workers.map(|worker| Ok(worker?.handle)).collect::<Result<Vec<_>>>()?;
        if handles.is_empty() {
            return Err(Error::Unfit { what: "workers of a group", found: 0, limit: 1 });
        }
        Ok(Group { members: Arc::new(Members::new(handles)), service: PhantomData })
    }

    /// Makes a call, as [`Worker::call`] does. A [`Lease`](crate::Lease) of one worker is copied if another one has the call.
    pub fn call(&self, request: impl Borrow<S::Request>) -> Call<S> {
        Call::new(To::Group(self.members.clone()), request.borrow())
    }

    /// Waits until a worker serves.
    ///
    /// # Errors
    /// All of them have ended: [`Error::GivenUp`], [`Error::Closed`].
    pub async fn serving(&self) -> Result<()> {
        let handles = self.members.handles().iter();
        let one = select_ok(handles.map(|handle| handle.inside.wait(Until::Serving).boxed())).await;
        one.map(|((), _others)| ())
    }

    /// The workers, in the order in which they were given: for their [logs](Worker::log), or to [close](Worker::close) one, which takes its GPU
    /// out for good.
    pub fn workers(&self) -> impl ExactSizeIterator<Item = Worker<S>> {
        self.members.handles().iter().map(|handle| Worker::of(handle.clone()))
    }

    /// Which of its workers serve, and why not: for `/healthz`. [`GroupHealth::is_serving`] says when to answer 200.
    #[must_use]
    pub fn health(&self) -> GroupHealth {
        GroupHealth { workers: self.workers().map(|worker| worker.health()).collect() }
    }

    /// The figures of the group.
    #[must_use]
    pub fn stats(&self) -> GroupStats {
        let workers = self.workers().map(|worker| worker.stats()).collect();
        GroupStats { workers, moved: self.members.moved() }
    }

    /// Ends all workers at the same time, as [`Worker::close`] does. Returns when they are gone.
    pub async fn close(self, limit: Duration) {
        let workers: Vec<_> = self.workers().collect();
        join_all(workers.into_iter().map(|worker| worker.close(limit))).await;
    }
}

/// The figures of a [`Group`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupStats {
    /// Those of its workers, in the order in which they were given.
    pub workers: Vec<Stats>,
    /// How often a call went on to another worker.
    pub moved: u64,
}
