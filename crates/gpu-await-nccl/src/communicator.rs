//! [`Communicator`]: ranks that make collectives together.

pub(crate) mod builder;
pub(crate) mod group;
mod meeting;
mod parts;
pub(crate) mod shared;
mod verbs;
mod warm_up;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gpu_await::{Device, Op, RawQueue, Stream, Uses};

use self::builder::CommunicatorBuilder;
use self::group::GroupCalls;
use self::shared::Shared;
use crate::error::{CollectiveLost, Error, LostCause, Result};
use crate::unique_id::UniqueId;

/// Ranks that make collectives together, one a device: those of this process, of many processes, of many hosts.
///
/// A collective is an operation like any other: it is on a stream of the communicator's when the call returns, ordered behind
/// every use of its memory on any stream and in front of every later one, and [`Op`] resolves when this process's part is
/// *complete on the device*. Cheap to clone, `Send + Sync`.
///
/// # Ordering
/// Every rank calls the same collectives in the same order, with the same sizes. Communicators that share devices are called in one
/// order everywhere as well: calls of one process are, as calls are made one at a time; across processes it is the program's to
/// see to.
///
/// # Blocking
/// A call takes what NCCL takes to put work on a stream, some 5 µs. Where it needs ranks that were not connected yet
/// (the first [`send`](Self::send) to a rank, the first use of an algorithm that was not used before) it waits for them to make
/// the same call, up to the [limit](Self::set_limit); calls of other communicators of the process wait as well.
///
/// # Failure
/// A communicator is lost as a whole: to [`abort`](Self::abort), to an error that NCCL reports, to its [limit](Self::set_limit), to
/// the end of a process that came by [`Group::join`](crate::Group::join), to the loss of a device. Then every pending operation
/// resolves, and every later one is refused, with [`CollectiveLost`], which [`Error::lost`] finds; what was to be written
/// counts as failed; memory that NCCL may still touch stays allocated until the device is through with it. Other communicators, devices and
/// the process go on.
///
/// NCCL alone does not see the end of every peer on its own host: who joins without [`Group`](crate::Group) sets a limit.
///
/// # Cancel safety
/// Dropping an operation leaves it running, for the other ranks. Dropping the last handle of a communicator never blocks and never
/// aborts: what it has is freed when its work is complete.
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

/// What ends the communicator when its last handle is dropped.
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
        let mut builder = Communicator::builder(UniqueId::new(first.kind())?, devices.len());
        for (rank, device) in devices.iter().enumerate() {
            builder = builder.rank(rank, device);
        }
        builder.connect().await
    }

    /// Begins a communicator of `world` ranks, of which this process has some: each gives the [id](UniqueId) that one of them made.
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

    /// The number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.shared().world
    }

    /// The ranks of this process, in the order in which they were given.
    #[must_use]
    pub fn ranks(&self) -> Vec<usize> {
        self.shared().ranks.iter().map(|local| local.rank).collect()
    }

    /// The devices of [`ranks`](Self::ranks).
    #[must_use]
    pub fn devices(&self) -> Vec<Device> {
        self.shared().ranks.iter().map(|local| local.device.clone()).collect()
    }

    /// Why it was lost, if it was.
    #[must_use]
    pub fn lost(&self) -> Option<CollectiveLost> {
        match self.shared().lost() {
            Some(Error::Lost(lost)) => Some(lost),
            _ => None,
        }
    }

    /// Sets how long an operation may be pending: one that takes longer, counted from its call, loses the communicator with
    /// [`LostCause::TimedOut`]. None by default: then a rank that never calls leaves the others pending, as with NCCL. A
    /// `timeout(..)` around an operation gives up on it alone, and leaves the communicator as it is.
    pub fn set_limit(&self, limit: Option<Duration>) {
        self.shared().set_limit(limit);
    }

    /// Returns the limit.
    #[must_use]
    pub fn limit(&self) -> Option<Duration> {
        self.shared().limit()
    }

    /// Makes several calls as one operation, for any ranks of this process: they run at once, so that sends and receives cannot
    /// wait for one another. Ready proves that each is *complete on the device*.
    ///
    /// # Errors
    /// The first call that is refused, or the error of the closure; the others are not made, and what they would have written
    /// counts as failed.
    ///
    /// # Examples
    /// Every rank hands its elements to the next one:
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
    pub fn group<'a>(
        &self,
        calls: impl FnOnce(&GroupCalls<'a>) -> gpu_await::Result<()>,
    ) -> Op<()> {
        let group = GroupCalls::new(self.shared());
        match calls(&group) {
            Ok(()) => self.shared().run("group", group.into_parts()),
            // The loans of the calls that were recorded end with it.
            Err(error) => {
                group.fail(&error);
                self.shared().failed("group", error)
            }
        }
    }

    /// Loses the communicator on purpose, for every rank of this process: pending operations fail with [`LostCause::Aborted`] when NCCL
    /// has ended their kernels. Resolves when every rank's work here is complete; the other ranks learn of it if they came by
    /// [`Group::join`](crate::Group::join), are ranks of a host twin, or have a [limit](Self::set_limit).
    ///
    /// # Cancel safety
    /// Dropped, the communicator is lost all the same. NCCL aborts on a thread of its own, which is
    /// [counted](crate::Stats::threads_in_nccl), and lost if NCCL does not come back.
    ///
    /// # Errors
    /// The loss of a device.
    ///
    /// # Source
    /// `ncclCommAbort`.
    pub async fn abort(&self) -> Result<()> {
        self.shared().fail(LostCause::Aborted);
        for local in &self.shared().ranks {
            local.stream.done().await?;
        }
        Ok(())
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

/// The version of NCCL, as it writes it in one number: 22803 is 2.28.3.
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
