//! [`Device`]: a GPU, or the CPU as one.
#![forbid(unsafe_code)]

// In the order in which rustdoc shows the methods that they add.
pub(crate) mod builder;
pub(crate) mod streams;

mod close;
pub(crate) mod home;
pub(crate) mod loss;
pub(crate) mod partition;
pub(crate) mod reservation;
pub(crate) mod stats;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use self::home::Home;
use self::loss::Loss;
use crate::backend::{Backend, DeviceKind};
use crate::error::Result;
use crate::error::refused::Here;
use crate::memory::host_slab::HostSlab;
use crate::memory::pinned::{PinnedBuffer, PinnedFlag};
use crate::memory::slab::slab_len;
use crate::memory::{Element, MemoryInfo};
use crate::op::join::join_all;
use crate::op::{HostValue, Op};
use crate::runtime::coop;
use crate::runtime::engine::EngineOptions;
use crate::runtime::poller;
use crate::runtime::{Engine, Point};
use crate::stream::Stream;
use crate::submit::MemoryKernels;
use crate::thread::contain;
use crate::thread::role;
use crate::thread::role::Role;
use crate::thread::worker::{Unwanted, offload};

/// A GPU, or the CPU as a device: the source of streams, memory and kernels. Cheap to clone, `Send + Sync`.
/// A process may open several of both kinds; opening a GPU twice gives two independent devices.
///
/// | opened by | which |
/// |---|---|
/// | [`cuda`](Self::cuda), [`host`](Self::host), [`cuda_or_host`](Self::cuda_or_host) | this one |
/// | [`from_env`](Self::from_env) | the one that `GPU_AWAIT_DEVICE` names |
/// | [`builder().named("cuda:1")`](crate::DeviceBuilder::named) | the one with that name, e.g. a command-line argument: `cuda:N`, `host`, `auto` |
///
/// # Examples
/// ```
/// use gpu_await::Device;
/// let device = Device::cuda_or_host()?;
/// println!("running on {device}");
/// # Ok::<(), gpu_await::Error>(())
/// ```
#[derive(Clone)]
pub struct Device {
    home: Arc<Home>,
    /// The stream for verbs called on the device outside of scopes.
    default: Stream,
}

impl Device {
    pub(crate) fn open(backend: Arc<dyn Backend>, options: EngineOptions) -> Result<Device> {
        // A host device has no driver that could refuse calls: it can be opened anywhere.
        let is_host = backend.kind() == DeviceKind::Host;
        let _role = is_host.then(|| role::enter(Role::Free));
        let engine = Engine::open(backend, options)?;
        if !options.stepped {
            poller::spawn(&engine)?;
        }
        let home = Home::new(&engine)?;
        MemoryKernels::of(&home);
        contain::log(|| {
            tracing::debug!(device = engine.label(), name = engine.backend.name(), "device opened");
        });
        let device = Device::at(home);
        if let Some(capacity) = options.timeline.filter(|capacity| *capacity > 0) {
            device.engine().start_tracing(capacity, 1)?;
        }
        Ok(device)
    }

    fn at(home: Arc<Home>) -> Device {
        let default = Stream::new(home.default.clone(), home.clone());
        Device { home, default }
    }

    pub(crate) fn home(&self) -> &Arc<Home> {
        &self.home
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.home.engine
    }

    /// Whether it is a GPU or the CPU.
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        self.engine().backend.kind()
    }

    /// Returns whether it is in [verify mode](crate::DeviceBuilder::verify): each operation is complete when its call returns.
    #[must_use]
    pub fn verifies(&self) -> bool {
        self.engine().options.verify
    }

    /// Returns its number among the devices of its kind.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.engine().backend.ordinal()
    }

    /// Returns the device's name, e.g. `NVIDIA H200`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.engine().backend.name()
    }

    /// Returns the number of multiprocessors; on a host device, the number of cores.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.engine().limits.multiprocessors
    }

    /// Returns the CUDA compute capability, (major, minor); (0, 0) on a host device.
    #[must_use]
    pub fn compute_capability(&self) -> (u32, u32) {
        self.engine().limits.compute_capability
    }

    /// Takes a pinned host buffer of `len` zeros from the device's pool.
    ///
    /// # Blocking
    /// As [`Stream::pinned`]. In async code use [`pinned_async`](Self::pinned_async).
    ///
    /// # Errors
    /// Out of pinned memory; the device is lost or closed; the calling thread would deadlock (the call may
    /// map memory). If the pool has the memory, a loss that no driver call has reported yet goes unnoticed:
    /// see [`lost`](Self::lost).
    #[track_caller]
    pub fn pinned<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        self.default.pinned(len)
    }

    /// [`pinned`](Self::pinned) for async code: zeroing more than 1 MiB and growing the pool happen off the
    /// executor.
    ///
    /// # Errors
    /// As [`pinned`](Self::pinned).
    pub async fn pinned_async<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        coop::proceed().await;
        role::check_driver("taking pinned memory")?;
        self.engine().check_open()?;
        let pool = &self.home.pinned;
        if let Some(pooled) = PinnedBuffer::pooled_zeroed(pool, len)? {
            return Ok(pooled);
        }
        let pool = pool.clone();
        // Not on the crew: large allocations take long and would delay copies.
        let line = self.home.crew.next_of_pinned();
        let zeroed = move || PinnedBuffer::zeroed(&pool, len);
        self.home.crew.offload(line, Unwanted::IsLeft, zeroed).await?
    }

    /// Takes pinned host memory from the device's pool, in `blocks` blocks of `block_len` zeros each; see [`HostSlab`]. Zeroing more than 1 MiB and
    /// growing the pool happen off the executor.
    ///
    /// # Errors
    /// As [`pinned`](Self::pinned); [`ErrorDetail::TooLarge`](crate::ErrorDetail::TooLarge), also for 2^32 blocks or more. With a `block_len` of 0,
    /// the slab has 0 blocks.
    pub async fn host_slab<T: Element>(
        &self,
        blocks: usize,
        block_len: usize,
    ) -> Result<HostSlab<T>> {
        let len = slab_len::<T>(blocks, block_len)?;
        Ok(HostSlab::new(self.pinned_async(len).await?, block_len))
    }

    /// Makes a word that the host and running kernels share, initially zero.
    ///
    /// # Blocking
    /// As [`pinned`](Self::pinned) for a few bytes.
    ///
    /// # Errors
    /// Out of pinned memory; a device that is lost or closed; a thread on which it would deadlock.
    #[track_caller]
    pub fn pinned_flag(&self) -> Result<PinnedFlag> {
        self.engine().check_open().and_then(|()| PinnedFlag::new(&self.home.pinned)).here()
    }

    /// Returns the device's free, total, used and reserved memory.
    ///
    /// # Errors
    /// The loss of the device.
    ///
    /// # Source
    /// `cuMemGetInfo`, `cuMemPoolGetAttribute`.
    #[track_caller]
    pub fn memory(&self) -> Result<MemoryInfo> {
        MemoryInfo::of(self.engine()).here()
    }

    /// Returns unused memory of the device's pool to the system, down to `keep_bytes`, off the executor.
    /// Memory whose free is still queued on a stream stays.
    ///
    /// # Errors
    /// The loss of the device; inside a host function.
    ///
    /// # Cancel safety
    /// If the future is dropped, the call goes on.
    ///
    /// # Source
    /// `cuMemPoolTrimTo`.
    pub async fn trim(&self, keep_bytes: u64) -> Result<()> {
        coop::proceed().await;
        role::check_driver("trimming memory")?;
        let engine = self.engine().clone();
        engine.check_health()?;
        offload(move || {
            engine.memory.graphs.give_up();
            engine.flush();
            engine.backend.pool_trim(keep_bytes).map_err(|code| engine.refused(code))
        })
        .await?
    }

    /// Returns unused pinned memory to the system, until `keep_bytes` are mapped, off the executor; resolves
    /// to the number of bytes returned. A mapping stays while any part of it is in use.
    ///
    /// On a GPU this waits for all running kernels and delays launches of other threads: call it when the
    /// device is idle.
    ///
    /// # Errors
    /// The loss of the device; inside a host function.
    ///
    /// # Cancel safety
    /// If the future is dropped, the call goes on.
    ///
    /// # Source
    /// `cuMemHostUnregister`.
    pub async fn trim_pinned(&self, keep_bytes: u64) -> Result<u64> {
        coop::proceed().await;
        role::check_driver("trimming memory")?;
        self.engine().check_health()?;
        let pool = self.home.pinned.clone();
        offload(move || pool.trim(keep_bytes)).await?
    }

    /// Lets this device copy directly from and to the memory of `other`; false if the two cannot, and copies
    /// between them go through the host. The first copy does the same by itself; calling this beforehand spares
    /// that copy the wait. Needed once for each pair and direction; a device can always access itself.
    /// Works off the executor.
    ///
    /// # Errors
    /// The loss of this device; a driver's refusal; inside a host function.
    ///
    /// # Cancel safety
    /// If the future is dropped, the call goes on.
    ///
    /// # Source
    /// `cuDeviceCanAccessPeer`, `cuCtxEnablePeerAccess`, `cuMemPoolSetAccess`.
    pub async fn enable_peer(&self, other: &Device) -> Result<bool> {
        coop::proceed().await;
        role::check_driver("enabling peer access")?;
        let (home, other) = (self.home.clone(), other.engine().clone());
        home.engine.check_open()?;
        if home.engine.state.id == other.state.id {
            return Ok(true);
        }
        offload(move || home.reaches(&other)).await?
    }

    /// Resolves when everything submitted so far to this device by the process is *complete on the device*:
    /// on streams of every handle, and of other libraries.
    ///
    /// With a driver before CUDA 12.5, streams of other libraries are waited for only if they are not
    /// non-blocking. The same holds once the device is closed.
    ///
    /// # Ordering
    /// The coarsest way to wait: see the [table](crate#waiting).
    ///
    /// # Errors
    /// The loss of the device. [`ErrorDetail::DependencyLost`](crate::ErrorDetail::DependencyLost): one of
    /// its streams waits for another device that was lost; this device and its other streams work. The error may
    /// persist for a moment after that stream is dropped, and from then on streams of other libraries are waited
    /// for as with an old driver. The calling thread must not make driver calls (inside a host function or a
    /// waker). While a stream of this device is being captured into a graph, the driver refuses the call and
    /// invalidates that capture: wait for streams and events instead.
    ///
    /// # Source
    /// `cuCtxRecordEvent`.
    #[track_caller]
    pub fn done(&self) -> Op<()> {
        let points = match self.engine().state.lost() {
            Some(lost) => Err(lost.clone()),
            None => self.home.everything(),
        };
        points.here().map_or_else(Op::failed, at)
    }

    /// Resolves when everything submitted so far to all of `devices` is *complete on the device*:
    /// [`done`](Self::done) for several.
    ///
    /// # Errors
    /// The first error of [`done`](Self::done).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::Device;
    /// let devices = [Device::host(), Device::host()];
    /// let made = devices.each_ref().map(|device| device.zeros::<f32>(1000));
    /// Device::all_done(&devices).await?;
    /// assert!(made.iter().all(|op| op.is_complete()));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    pub fn all_done<'d>(devices: impl IntoIterator<Item = &'d Device>) -> Op<()> {
        let mut done = Vec::new();
        for device in devices {
            done.push(device.done());
        }
        join_all(done).map_value(drop)
    }

    /// Blocks the calling thread until everything submitted so far is complete.
    ///
    /// # Blocking
    /// Yes: in async code, use `device.done().await`.
    ///
    /// # Errors
    /// The loss of the device; a thread on which it would deadlock.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        role::check("a blocking wait").here()?;
        self.done().synchronize()
    }

    /// Resolves with the error when the device is lost, and stays pending otherwise. The end of the process counts
    /// as a loss, with the error [`ErrorDetail::ProcessEnding`](crate::ErrorDetail::ProcessEnding).
    ///
    /// Futures of the device's operations are woken before this one.
    ///
    /// A driver reports a loss only when it is called. While this future is being awaited, an idle device is queried
    /// once a second.
    ///
    /// The device may still write to host memory that it knows, so after a loss all pinned memory stays
    /// mapped for the life of the process, lent or not: the pool's slabs (2 MiB if no more was ever needed)
    /// and the words that streams write (64 KiB). A process that reopens a device after each loss grows by
    /// that much each time.
    ///
    /// # Cancel safety
    /// Yes.
    pub fn lost(&self) -> Loss {
        Loss::of(self.engine())
    }
}

/// An operation that is complete when all points are.
fn at(points: Vec<Point>) -> Op<()> {
    Op::at_points(points, HostValue::here(()))
}

/// `cuda:0 (NVIDIA H200)`
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.engine().label(), self.name())
    }
}

/// Handles of one opened device are equal; devices opened separately are not, even over one GPU.
impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.engine().state.id == other.engine().state.id
    }
}

impl Eq for Device {}

impl Hash for Device {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.engine().state.id.hash(state);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({self})")
    }
}
