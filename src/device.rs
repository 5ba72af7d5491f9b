//! [`Device`]: a GPU, or the CPU as one.
#![forbid(unsafe_code)]

// In the order in which rustdoc shows the methods that they add.
pub(crate) mod builder;
pub(crate) mod streams;

mod close;
pub(crate) mod home;
pub(crate) mod loss;
pub(crate) mod stats;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use self::home::Home;
use self::loss::Loss;
use crate::backend::{Backend, DeviceKind};
use crate::error::Result;
use crate::memory::pinned::{PinnedBuffer, PinnedFlag};
use crate::memory::{Element, MemoryInfo};
use crate::op::join::join_all;
use crate::op::{HostValue, Op};
use crate::runtime::coop;
use crate::runtime::engine::EngineOptions;
use crate::runtime::poller;
use crate::runtime::{Engine, Point};
use crate::stream::Stream;
use crate::submit::MemoryKernels;
use crate::thread::role;
use crate::thread::role::Role;
use crate::thread::worker::{Unwanted, offload};
use crate::timeline::DeviceTimeline;

/// A GPU, or the CPU as a device. Cheap to clone, `Send + Sync`; several of both kinds may be open
/// in one process, and opening one twice gives two independent devices over one GPU.
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
    /// Where work goes that is called on the device outside of scopes.
    default: Stream,
}

impl Device {
    pub(crate) fn open(backend: Arc<dyn Backend>, options: EngineOptions) -> Result<Device> {
        // A host device has no driver that could refuse calls: it opens anywhere.
        let is_host = backend.kind() == DeviceKind::Host;
        let _role = is_host.then(|| role::enter(Role::Free));
        let engine = Engine::open(backend, options)?;
        if !options.stepped {
            poller::spawn(&engine)?;
        }
        let home = Home::new(&engine)?;
        MemoryKernels::of(&home);
        tracing::debug!(device = engine.label(), name = engine.backend.name(), "device opened");
        let device = Device::at(home);
        if let Some(capacity) = options.timeline.filter(|capacity| *capacity > 0) {
            device.timeline().start(capacity)?;
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

    /// Its number among the devices of its kind.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.engine().backend.ordinal()
    }

    /// What it calls itself, e.g. `NVIDIA H200`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.engine().backend.name()
    }

    /// The number of multiprocessors; of cores on a host device.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.engine().backend.limits().multiprocessors
    }

    /// The CUDA compute capability, (major, minor); (0, 0) on a host device.
    #[must_use]
    pub fn compute_capability(&self) -> (u32, u32) {
        self.engine().backend.limits().compute_capability
    }

    /// Threads that run in lock-step.
    #[must_use]
    pub fn warp_size(&self) -> u32 {
        self.engine().backend.limits().warp_size
    }

    /// A pinned host buffer of `len` zeros, from the device's pool.
    ///
    /// # Blocking
    /// As [`Stream::pinned`]. In async code use [`pinned_async`](Self::pinned_async).
    ///
    /// # Errors
    /// Out of pinned memory; a device that is lost or closed; a thread on which it would dead-lock (it may
    /// have to map memory). A loss that no driver call has reported yet is not seen if the pool has the
    /// memory: see [`lost`](Self::lost).
    pub fn pinned<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        self.default.pinned(len)
    }

    /// Like [`pinned`](Self::pinned), zeroing more than a mebibyte and growing the pool off the executor.
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
        // Not by the crew itself: much memory takes long, and copies would wait behind it.
        let line = self.home.crew.next_of_pinned();
        let zeroed = move || PinnedBuffer::zeroed(&pool, len);
        self.home.crew.offload(line, Unwanted::IsLeft, zeroed).await?
    }

    /// A word, zero at first, that the host and running kernels share.
    ///
    /// # Blocking
    /// As [`pinned`](Self::pinned) for a few bytes.
    ///
    /// # Errors
    /// Out of pinned memory; a device that is lost or closed; a thread on which it would dead-lock.
    pub fn pinned_flag(&self) -> Result<PinnedFlag> {
        self.engine().check_open()?;
        PinnedFlag::new(&self.home.pinned)
    }

    /// Free, total, used and reserved device memory, by asking the device.
    ///
    /// # Errors
    /// The loss of the device.
    ///
    /// # Source
    /// `cuMemGetInfo`, `cuMemPoolGetAttribute`.
    pub fn memory(&self) -> Result<MemoryInfo> {
        MemoryInfo::of(self.engine())
    }

    /// The log of what its operations were and when, which is off until it is started.
    #[must_use]
    pub fn timeline(&self) -> DeviceTimeline {
        DeviceTimeline::of(self.engine())
    }

    /// Gives device memory that the pool holds unused back to the system, down to `keep_bytes`, off
    /// the executor. Memory whose free is still on a stream stays.
    ///
    /// # Errors
    /// The loss of the device; inside a host function.
    ///
    /// # Cancel safety
    /// Dropped, it goes on.
    ///
    /// # Source
    /// `cuMemPoolTrimTo`.
    pub async fn trim(&self, keep_bytes: u64) -> Result<()> {
        coop::proceed().await;
        role::check_driver("trimming memory")?;
        let engine = self.engine().clone();
        engine.check_health()?;
        offload(move || {
            engine.graph_memory.give_up();
            engine.flush();
            engine.backend.pool_trim(keep_bytes).map_err(|code| engine.refused(code))
        })
        .await?
    }

    /// Gives pinned memory that nobody holds back to the system, down to `keep_bytes` of what is
    /// mapped, off the executor; returns how many bytes went. A mapping of which any part is in use
    /// stays.
    ///
    /// On a GPU this waits for the running kernels, and launches of other threads wait with it: a
    /// thing to do when nothing else is.
    ///
    /// # Errors
    /// The loss of the device; inside a host function.
    ///
    /// # Cancel safety
    /// Dropped, it goes on.
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

    /// Lets copies of this device reach the memory of another one directly, off the executor; false if
    /// the two cannot, so that copies between them go through the host. The first copy does the same
    /// by itself; done ahead, that copy does not wait for it. Once a pair and direction; a device
    /// reaches itself.
    ///
    /// # Errors
    /// The loss of this device; a driver's refusal; inside a host function.
    ///
    /// # Cancel safety
    /// Dropped, it goes on.
    ///
    /// # Source
    /// `cuDeviceCanAccessPeer`, `cuCtxEnablePeerAccess`, `cuMemPoolSetAccess`.
    pub async fn enable_peer(&self, other: &Device) -> Result<bool> {
        coop::proceed().await;
        role::check_driver("enabling peer access")?;
        let (home, other) = (self.home.clone(), other.engine().clone());
        home.engine.check_open()?;
        if home.engine.id == other.id {
            return Ok(true);
        }
        offload(move || home.reaches(&other)).await?
    }

    /// Resolves when everything submitted so far to this device, by anybody in this process, is
    /// *complete on the device*: every stream of this handle's and of other handles', and those of
    /// other libraries.
    ///
    /// With a driver before CUDA 12.5, which cannot tell of streams that it is not shown, those of
    /// other libraries are waited for only if they are not non-blocking. So it is when the device
    /// was closed.
    ///
    /// # Ordering
    /// It is the coarsest way to wait: see the [table](crate#waiting).
    ///
    /// # Errors
    /// The loss of the device. [`ErrorDetail::DependencyLost`](crate::ErrorDetail::DependencyLost): one of its streams waits for another
    /// device that was lost; this device works, and so do its other streams. So it may be for a moment after
    /// that stream was dropped; from then on streams of other libraries are waited for as with an old driver.
    /// A thread where no driver call
    /// may be made (in a host function, in a waker). While anybody captures a stream of this device into a graph the driver
    /// refuses, and that capture is void: wait for streams and events beside captures.
    ///
    /// # Source
    /// `cuCtxRecordEvent`.
    pub fn done(&self) -> Op<()> {
        if let Some(lost) = self.engine().lost() {
            return Op::failed(lost.clone());
        }
        match self.home.everything() {
            Ok(points) => at(points),
            Err(error) => Op::failed(error),
        }
    }

    /// Resolves when everything submitted so far to all of `devices` is *complete on the device*;
    /// see [`done`](Self::done).
    ///
    /// # Errors
    /// As [`done`](Self::done), the first.
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
    pub fn all_done<'d>(devices: impl IntoIterator<Item = &'d Device>) -> Op<()> {
        join_all(devices.into_iter().map(Device::done)).map_value(drop)
    }

    /// Blocks the calling thread until everything submitted so far is complete.
    ///
    /// # Blocking
    /// Yes: not from async code; `device.done().await` there.
    ///
    /// # Errors
    /// The loss of the device; a thread on which it would dead-lock.
    pub fn synchronize(&self) -> Result<()> {
        role::check("a blocking wait")?;
        self.done().synchronize()
    }

    /// Resolves with the error when the device is lost, and stays pending otherwise.
    ///
    /// A driver tells of a loss when it is called. While somebody awaits this, a device without work
    /// is asked once a second.
    ///
    /// The device may still write to host memory that it knew, so after a loss all pinned memory stays
    /// mapped for the life of the process, also what was not lent to anything: the pool's slabs (2 MiB if
    /// no more was ever needed) and the words that streams write (64 KiB). A process that opens a device
    /// again after each loss grows by that each time.
    ///
    /// # Cancel safety
    /// Yes.
    pub fn lost(&self) -> Loss {
        Loss::of(self.engine())
    }
}

/// An operation that is complete when every point is.
fn at(points: Vec<Point>) -> Op<()> {
    Op::at_points(points, HostValue::Here(()))
}

/// `cuda:0 (NVIDIA H200)`
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.engine().label(), self.name())
    }
}

/// The same opened device: handles of it are equal, and two that were opened by themselves are not, also over one GPU.
impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.engine().id == other.engine().id
    }
}

impl Eq for Device {}

impl Hash for Device {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.engine().id.hash(state);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({self})")
    }
}
