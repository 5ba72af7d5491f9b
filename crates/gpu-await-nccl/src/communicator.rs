//! [`Communicator`]: a set of ranks and its collectives.

pub(crate) mod builder;
pub(crate) mod group;
pub(crate) mod in_graph;
mod meeting;
mod parts;
pub(crate) mod shared;
pub(crate) mod shrink;
mod verbs;
mod warm_up;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gpu_await::{Device, DeviceKind, Op, RawQueue, Stream, Uses};

use self::builder::CommunicatorBuilder;
use self::group::{GroupCalls, Recorded};
use self::shared::Shared;
use crate::error::{CollectiveLost, Error, LostCause, Result};
use crate::mesh::Mesh;
use crate::unique_id::UniqueId;

/// A set of ranks, one per device, that run collectives together: within a process, across processes, across hosts.
///
/// A collective is an operation like any other. It is on a private stream of the communicator when the call returns, ordered behind
/// every earlier use of its memory on any stream and ahead of every later one. Its [`Op`] resolves when this process's part is
/// *complete on the device*. Cheap to clone, `Send + Sync`.
///
/// # Ordering
/// Every rank calls the same collectives in the same order, with the same sizes. Communicators that share devices must be called in the
/// same order everywhere too: within a process calls are serialized; across processes the program has to ensure it.
/// # Blocking
/// A call takes as long as NCCL needs to launch, about 5 µs. If it uses a connection that does not exist yet (the first
/// [`send`](Self::send) to a rank, the first use of an algorithm), it waits until the other ranks make the same call, up to the
/// [limit](Self::set_limit). Collective calls on other communicators in the process wait behind it.
/// [`connect_pairs`](CommunicatorBuilder::connect_pairs) connects for sends ahead.
///
/// A call of a communicator with several ranks in this process also waits, up to a second, while resources of another one are being freed.
///
/// A call while more than 250 calls of a local rank are pending waits until there are fewer, since the driver's queue is finite; a loss
/// ends the wait, and other communicators are not held up. [`throttle`](Self::throttle) waits without blocking the thread.
///
/// # Failure
/// A communicator is lost as a whole: by [`abort`](Self::abort), when NCCL reports an error, when an operation exceeds the
/// [limit](Self::set_limit), when a process of its [`Group`](crate::Group) ends, or with one of its devices. Every pending operation then
/// fails with [`CollectiveLost`], and every later call is refused with it; [`Error::lost`] finds it in an operation's error. A call that is
/// refused because its input failed, or its device is lost or closed, loses the communicator too, because the other ranks wait for it. A call
/// that is refused for its arguments (memory that nobody wrote, a wrong length, a rank that does not exist) does not: the others wait for a
/// valid one, as long as their limit allows. To find a loss while nothing is pending, each device of a communicator is polled once a second.
/// (On a device that is lost itself, operations fail with the device's error, and [`lost`](Self::lost) says why.) An operation that is still
/// held up by work in front of it, on its memory or on the communicator's private stream (an earlier call behind another communicator's work,
/// for example), resolves when that work is complete. To hear of a loss earlier, await the download of an output. Each loss is a `tracing`
/// event with the target `gpu_await_nccl`: a warning, or of level info for an abort. Outputs count as failed, and memory that NCCL may still
/// access stays allocated until the device has finished with it. Other communicators, other devices and the process are unaffected.
/// [`shrink`](Self::shrink) makes one of the remaining ranks.
///
/// NCCL by itself does not notice every peer that dies. Without a [`Group`](crate::Group), set a limit.
///
/// # Cancel safety Dropping an operation does not cancel it. Dropping the last handle never blocks and never aborts: a thread frees
/// its resources when its work is complete and no communicator of the process has pending work, or they end with the process. (NCCL
/// frees pinned memory, and the driver blocks every other call until the devices have finished.) Resources of a lost communicator are
/// freed likewise. When the process ends, it waits at most two seconds for resources that are being freed.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// use gpu_await::Device;
/// use gpu_await_nccl::{Communicator, Reduction};
/// let devices = [Device::host(), Device::host()]; // or each GPU
/// let comm = Communicator::all(&devices).await?;
/// let mut x = devices[0].full(4, 1.0f32).queued()?;
/// let mut y = devices[1].full(4, 2.0f32).queued()?;
/// comm.group(|g| {
///     g.rank(0)?.all_reduce_in_place(&mut x, Reduction::Sum)?;
///     g.rank(1)?.all_reduce_in_place(&mut y, Reduction::Sum)
/// })
/// .await?;
/// assert_eq!(devices[1].download(&y).await?, [3.0; 4]);
/// # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct Communicator {
    handle: Arc<Handle>,
}

/// Ends the communicator when the last clone is dropped.
struct Handle(Arc<Shared>);

impl Communicator {
    pub(crate) fn of(shared: Arc<Shared>) -> Self {
        Communicator { handle: Arc::new(Handle(shared)) }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.handle.0
    }

    /// Makes a communicator whose ranks are all in this process: rank *i* is on the *i*-th device.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::connect`].
    pub async fn all(devices: &[Device]) -> Result<Communicator> {
        let Some(first) = devices.first() else {
            return Err(Error::NoRanks { world: 0, local: 0 });
        };
        let world = devices.len();
        let ranks: Vec<usize> = (0..world).collect();
        let (id, channel) = match first.kind() {
            DeviceKind::Cuda => (UniqueId::new(DeviceKind::Cuda)?, None),
            _ => {
                let alone = Mesh::new(ranks.clone(), Vec::new())?;
                (UniqueId::of_group(), Some(alone.open_next(0, &ranks.clone().into())))
            }
        };
        Communicator::builder(id, world).of(ranks, devices, channel).connect().await
    }

    /// Starts building a communicator of `world` ranks, some of which are in this process. All ranks use the same [id](UniqueId).
    ///
    /// # Examples
    /// Two ranks that could be in two processes:
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::{Device, DeviceKind};
    /// use gpu_await_nccl::{Communicator, UniqueId};
    /// let id = UniqueId::new(DeviceKind::Host)?;
    /// let devices = [Device::host(), Device::host()];
    /// let rank = |rank: usize| Communicator::builder(id, 2).rank(rank, &devices[rank]).connect();
    /// let (zero, one) = futures::try_join!(rank(0), rank(1))?;
    /// let x = devices[0].ones::<f32>(4).queued()?;
    /// let mut y = devices[1].zeros::<f32>(4).queued()?;
    /// zero.send(&x, 1).queued()?;
    /// one.recv(&mut y, 0).await?;
    /// assert_eq!(devices[1].download(&y).await?, [1.0; 4]);
    /// # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
    /// ```
    pub fn builder(id: UniqueId, world: usize) -> CommunicatorBuilder {
        CommunicatorBuilder::new(id, world)
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.shared().world
    }

    /// Returns the ranks in this process, in the order they were added.
    #[must_use]
    pub fn ranks(&self) -> Vec<usize> {
        self.shared().ranks.iter().map(|local| local.rank).collect()
    }

    /// Returns the devices of [`ranks`](Self::ranks).
    #[must_use]
    pub fn devices(&self) -> Vec<Device> {
        self.shared().ranks.iter().map(|local| local.device.clone()).collect()
    }

    /// Returns why the communicator was lost, if it was, or why the next call would lose it: a loss of one of its own devices that an
    /// operation has found, an input that failed late, a loss that another rank reported, or the end of that rank's process. So after a
    /// failed operation it tells whether this communicator or [another one](Error::lost) was lost.
    /// On GPUs also when a rank has left, as no call can succeed without it; on host devices only a call that needs the rank finds that.
    #[must_use]
    pub fn lost(&self) -> Option<CollectiveLost> {
        let shared = self.shared();
        if let Some(Error::Lost(lost)) = shared.lost() {
            return Some(lost);
        }
        let own = shared.own_failure().map(|cause| shared.fail(cause));
        let cause = own.or_else(|| shared.transport().refusal())?;
        Some(CollectiveLost { rank: shared.ranks[0].rank, cause })
    }

    /// Sets how long an operation may be pending, counted from its call. An operation that takes longer loses the communicator with
    /// [`LostCause::TimedOut`]. There is no limit by default: if a rank never calls, the others stay pending, as with NCCL itself. A
    /// `timeout(..)` around an operation abandons that operation only, and leaves the communicator intact. A limit of more than 584 years
    /// counts as none.
    pub fn set_limit(&self, limit: Option<Duration>) {
        self.shared().set_limit(limit);
    }

    /// Returns the limit.
    #[must_use]
    pub fn limit(&self) -> Option<Duration> {
        self.shared().limit()
    }

    /// Waits until at most `most` calls of each local rank are pending, so that the next call does not [block](Self#blocking).
    /// Call it before each piece of work of a loop that does not await its collectives. Launches of graphs are counted by the stream
    /// that they are launched on: [`Stream::throttle`](gpu_await::Stream::throttle).
    ///
    /// # Cancel safety
    /// Yes.
    ///
    /// # Errors
    /// [`Error::Lost`]; the loss of a device.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await_nccl::{Communicator, Reduction};
    /// let device = gpu_await::Device::host();
    /// let comm = Communicator::all(&[device.clone()]).await?;
    /// let mut x = device.ones::<f32>(4).queued()?;
    /// for _ in 0..1000 {
    ///     comm.throttle(100).await?;
    ///     comm.all_reduce_in_place(&mut x, Reduction::Average).queued()?;
    /// }
    /// # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
    /// ```
    pub async fn throttle(&self, most: u64) -> Result<()> {
        self.shared().throttle(most).await
    }

    /// Submits several calls, for any ranks in this process, as one operation. They progress concurrently, so sends and receives in
    /// a group do not deadlock. Ready proves that all of them are *complete on the device*.
    ///
    /// If the closure makes no call for a rank of this process, the rank's next call, even from another task, is matched by the other ranks to the
    /// call that it left out.
    ///
    /// A call in a group costs the host a fraction of a call on its own, here and in NCCL, which makes a few kernels of all of them: put a burst of
    /// small collectives, such as those of a model's gradients, into one group.
    ///
    /// # Errors
    /// The error of the first refused call, even if the closure ignores it; or of the closure. A fault of the memory (nobody wrote it, its
    /// writer failed, it is on another device) fails the group as a whole. Nothing is submitted then, and the outputs of all recorded calls
    /// count as failed.
    ///
    /// # Examples
    /// A ring, in which every rank sends to the next one:
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::Device;
    /// use gpu_await_nccl::Communicator;
    /// let devices = [Device::host(), Device::host(), Device::host()];
    /// let comm = Communicator::all(&devices).await?;
    /// let (mut have, mut got) = (Vec::new(), Vec::new());
    /// for (rank, device) in devices.iter().enumerate() {
    ///     have.push(device.full(2, rank as u32).queued()?);
    ///     got.push(device.empty::<u32>(2).queued()?);
    /// }
    /// comm.group(|g| {
    ///     for (rank, (x, y)) in have.iter().zip(&mut got).enumerate() {
    ///         g.rank(rank)?.send(x, (rank + 1) % 3)?;
    ///         g.rank(rank)?.recv(y, (rank + 2) % 3)?;
    ///     }
    ///     Ok(())
    /// })
    /// .await?;
    /// assert_eq!(devices[0].download(&got[0]).await?, [2, 2]);
    /// # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `ncclGroupStart`, `ncclGroupEnd`.
    #[track_caller]
    pub fn group<'a>(
        &self,
        calls: impl FnOnce(&GroupCalls<'a>) -> gpu_await::Result<()>,
    ) -> Op<()> {
        let group = GroupCalls::new(self.shared());
        let _recorded = Recorded(&group);
        let written = group.written(calls(&group));
        self.shared().wait_for_room();
        self.shared().run("group", group.take_all(), written)
    }

    /// Aborts the communicator for all ranks in this process. Pending operations fail with [`LostCause::Aborted`] once NCCL has stopped
    /// their kernels. Resolves when the work of all local ranks is complete. Ranks in other processes are notified if they joined by
    /// [`Group::join`](crate::Group::join); otherwise their [limit](Self::set_limit) has to end the wait.
    ///
    /// # Cancel safety
    /// The abort has begun when the call returns, even if the future is never polled. It runs on a thread of its own, which
    /// [`Stats::threads_in_nccl`](crate::Stats::threads_in_nccl) counts and which is lost if NCCL never returns.
    ///
    /// # Errors
    /// The loss of a device.
    ///
    /// # Source
    /// `ncclCommAbort`.
    pub fn abort(&self) -> impl Future<Output = Result<()>> + Send + use<> {
        let shared = self.shared();
        shared.fail(LostCause::Aborted);
        let done: Vec<_> = shared.ranks.iter().map(|local| local.stream.done()).collect();
        async move {
            for done in done {
                done.await?;
            }
            Ok(())
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.clone().end();
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, world) = (self.ranks(), self.world());
        f.debug_struct("Communicator").field("world", &world).field("ranks", &ranks).finish()
    }
}

/// Returns the version of the NCCL library as one number: 22803 is 2.28.3.
///
/// # Errors
/// [`Error::NoLibrary`], [`Error::OldLibrary`], [`Error::MissingSymbol`].
pub fn nccl_version() -> Result<i32> {
    Ok(crate::nccl::Nccl::get()?.version())
}

/// The context of a GPU, as a number.
fn context_of(stream: &Stream) -> gpu_await::Result<u64> {
    let mut context = 0;
    let ask = |queue: &RawQueue<'_>, ()| {
        context = queue.context();
        Ok::<(), Error>(())
    };
    // SAFETY: nothing is put on the stream.
    unsafe { stream.enqueue(Uses::new("connect"), ask) }.queued()?;
    Ok(context)
}
