//! [`Device`]: a GPU, or the CPU as one.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::backend::host::HostBackend;
use crate::backend::{Backend, DeviceKind, StreamOptions};
use crate::completion::engine::{Engine, EngineOptions};
use crate::completion::lane::Lane;
use crate::completion::policy::Completion;
use crate::error::{Error, ErrorDetail, Result};
use crate::home::Home;
use crate::memory::Element;
use crate::memory::pinned::{PinnedBuffer, PinnedFlag};
use crate::offload::offload;
use crate::op::{Op, Point, Value};
use crate::stream::Stream;

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
    inner: Arc<Inner>,
}

struct Inner {
    home: Arc<Home>,
    default: Stream,
}

/// Options for opening a [`Device`].
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until a device is opened with it"]
pub struct DeviceBuilder {
    completion: Completion,
    host_memory_bytes: Option<u64>,
}

/// Options for making a [`Stream`].
#[derive(Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct StreamBuilder<'d> {
    device: &'d Device,
    options: StreamOptions,
}

/// What a device is doing; a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Operations submitted and not known to be complete, on all streams.
    pub in_flight: u64,
    /// Streams alive.
    pub streams: usize,
    /// Host memory lent to operations in flight.
    pub lent_bytes: u64,
    /// Host memory set aside for good because the device was lost with it.
    pub quarantined_bytes: u64,
    /// Device memory waiting for several streams to be through with it.
    pub retired_bytes: u64,
    /// Device memory held by buffers.
    pub allocated_bytes: u64,
    /// Device buffers and retired allocations alive.
    pub allocations: u64,
    /// Pinned host memory mapped and registered, in use or pooled.
    pub pinned_bytes: u64,
}

/// A device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// What can still be allocated.
    pub free_bytes: u64,
    /// What there is in all.
    pub total_bytes: u64,
}

/// Resolves with the error when the device is lost; see [`Device::lost`].
#[derive(Clone)]
#[must_use = "a future does nothing unless it is awaited"]
pub struct Loss {
    engine: Arc<Engine>,
}

impl Device {
    /// Opens the CUDA device of that ordinal.
    ///
    /// # Errors
    /// [`ErrorDetail::NoDriver`], [`ErrorDetail::NoSuchDevice`] with the count,
    /// [`ErrorDetail::NotBuilt`] without the `cuda` feature.
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Device::builder().cuda(ordinal)
    }

    /// Opens a host device: real streams over CPU threads. Each call makes a new one.
    ///
    /// # Panics
    /// If the system gives no thread.
    #[must_use]
    pub fn host() -> Device {
        Device::builder().host()
    }

    /// Opens CUDA device 0, or a host device where there is no driver or no GPU. Which, and why, is
    /// told through `tracing`.
    ///
    /// # Errors
    /// A GPU that is there and cannot be opened.
    pub fn cuda_or_host() -> Result<Device> {
        Device::builder().cuda_or_host()
    }

    /// Opens the device named by the environment variable `GPU_AWAIT_DEVICE`: `cuda:N`, `cuda`,
    /// `host` or `auto` (also when it is unset).
    ///
    /// # Errors
    /// [`ErrorDetail::BadDeviceName`] with the value; those of the device named.
    pub fn from_env() -> Result<Device> {
        Device::builder().from_env()
    }

    /// Options first.
    pub fn builder() -> DeviceBuilder {
        DeviceBuilder::default()
    }

    /// The number of CUDA devices; 0 where there is no driver.
    #[must_use]
    pub fn count() -> usize {
        #[cfg(feature = "cuda")]
        return crate::backend::cuda::device_count();
        #[cfg(not(feature = "cuda"))]
        0
    }

    pub(crate) fn open(backend: Arc<dyn Backend>, options: EngineOptions) -> Result<Device> {
        let engine = Engine::start(backend, options)?;
        let home = Home::new(&engine);
        let default = Stream::new(Lane::open(&engine, StreamOptions::default())?, home.clone());
        tracing::debug!(device = engine.label(), name = engine.backend.name(), "device opened");
        Ok(Device { inner: Arc::new(Inner { home, default }) })
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.inner.home.engine
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

    /// Makes a stream.
    ///
    /// # Errors
    /// A device that is lost or closed.
    pub fn stream(&self) -> Result<Stream> {
        self.stream_builder().build()
    }

    /// Makes a stream, options first.
    pub fn stream_builder(&self) -> StreamBuilder<'_> {
        StreamBuilder { device: self, options: StreamOptions::default() }
    }

    /// The stream that every device has from the start.
    #[must_use]
    pub fn default_stream(&self) -> &Stream {
        &self.inner.default
    }

    /// The lowest and the highest stream priority; the highest is the smaller number.
    #[must_use]
    pub fn priority_range(&self) -> (i32, i32) {
        self.engine().backend.limits().priorities
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

    /// A pinned host buffer of `len` elements from the device's pool; its contents are unspecified.
    ///
    /// # Blocking
    /// The first of its size maps and registers memory: 0.2 to 6 ms a mebibyte. In async code use
    /// [`pinned_async`](Self::pinned_async).
    ///
    /// # Errors
    /// Out of pinned memory; a device that is lost or closed.
    pub fn pinned<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        self.inner.default.pinned(len)
    }

    /// Like [`pinned`](Self::pinned), growing the pool off the executor.
    ///
    /// # Errors
    /// As [`pinned`](Self::pinned).
    pub async fn pinned_async<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        self.engine().check_open()?;
        let pool = self.inner.home.pinned.clone();
        if pool.has(crate::memory::pinned::bytes_of::<T>(len)?) {
            return PinnedBuffer::new(&pool, len);
        }
        offload(move || PinnedBuffer::new(&pool, len)).await?
    }

    /// A word, zero at first, that the host and running kernels share.
    ///
    /// # Errors
    /// Out of pinned memory; a device that is lost or closed.
    pub fn pinned_flag(&self) -> Result<PinnedFlag> {
        self.engine().check_open()?;
        PinnedFlag::new(&self.inner.home.pinned)
    }

    /// Free and total device memory.
    ///
    /// # Errors
    /// The loss of the device.
    pub fn memory(&self) -> Result<MemoryInfo> {
        let engine = self.engine();
        let info = engine.backend.memory_info().map_err(|code| engine.refused(code));
        let (free_bytes, total_bytes) = info?;
        Ok(MemoryInfo { free_bytes, total_bytes })
    }

    /// What the device is doing, by asking it.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let engine = self.engine();
        let lanes = engine.lanes();
        let mut in_flight = 0;
        for lane in &lanes {
            lane.sweep();
            in_flight += lane.submitted() - lane.completed().min(lane.submitted());
        }
        let counters = &engine.counters;
        // ORDERING: Relaxed: statistics.
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            in_flight,
            streams: lanes.len(),
            lent_bytes: read(&counters.lent_bytes),
            quarantined_bytes: read(&counters.quarantined_bytes),
            retired_bytes: read(&counters.retired_bytes),
            allocated_bytes: read(&counters.allocated_bytes),
            allocations: read(&counters.allocations),
            pinned_bytes: self.inner.home.pinned.reserved_bytes(),
        }
    }

    /// Resolves when everything submitted so far, on every stream of this device, is *complete on
    /// the device*.
    ///
    /// # Errors
    /// The loss of the device.
    pub fn done(&self) -> Op<()> {
        if let Some(lost) = self.engine().lost() {
            return Op::failed(lost.clone());
        }
        let lanes = self.engine().lanes().into_iter();
        let points = lanes.map(|lane| Point { ticket: lane.tail(), lane }).collect();
        Op::at_points(points, Value::Here(()))
    }

    /// Blocks the calling thread until everything submitted so far is complete.
    ///
    /// # Blocking
    /// Yes: not from async code; `device.done().await` there.
    ///
    /// # Errors
    /// The loss of the device; a thread on which it would dead-lock.
    pub fn synchronize(&self) -> Result<()> {
        crate::thread_role::check("a blocking wait")?;
        self.done().synchronize()
    }

    /// Resolves with the error when the device is lost, and stays pending otherwise.
    pub fn lost(&self) -> Loss {
        Loss { engine: self.engine().clone() }
    }

    /// Refuses new work, on every handle, and waits until what was submitted is complete, for at
    /// most `limit`.
    ///
    /// # Errors
    /// [`ErrorDetail::TimedOut`]: work is still on the device and goes on (its memory is kept);
    /// the loss of the device.
    pub async fn close(&self, limit: Duration) -> Result<()> {
        let engine = self.engine().clone();
        engine.close();
        let done = self.done();
        offload(move || {
            done.synchronize_for(limit).unwrap_or_else(|| {
                let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
                Err(ErrorDetail::TimedOut { what: "closing the device", limit_ms }.into())
            })
        })
        .await?
    }
}

impl DeviceBuilder {
    /// Chooses how completions are learned; the default suits everybody.
    pub fn completion(mut self, completion: Completion) -> Self {
        self.completion = completion;
        self
    }

    /// Limits the memory of a host device; the default is the machine's.
    pub fn host_memory_bytes(mut self, bytes: u64) -> Self {
        self.host_memory_bytes = Some(bytes);
        self
    }

    /// See [`Device::cuda`].
    ///
    /// # Errors
    /// As [`Device::cuda`].
    #[cfg(feature = "cuda")]
    pub fn cuda(self, ordinal: usize) -> Result<Device> {
        let backend = crate::backend::cuda::CudaBackend::open(ordinal)?;
        Device::open(Arc::new(backend), self.options())
    }

    /// See [`Device::cuda`].
    ///
    /// # Errors
    /// [`ErrorDetail::NotBuilt`]: this build has no CUDA.
    #[cfg(not(feature = "cuda"))]
    pub fn cuda(self, _ordinal: usize) -> Result<Device> {
        Err(ErrorDetail::NotBuilt.into())
    }

    /// See [`Device::host`].
    ///
    /// # Panics
    /// If the system gives no thread.
    #[must_use]
    pub fn host(self) -> Device {
        let backend = HostBackend::new(self.host_memory_bytes, true);
        match Device::open(Arc::new(backend), self.options()) {
            Ok(device) => device,
            Err(error) => panic!("a host device needs threads: {error}"),
        }
    }

    /// See [`Device::cuda_or_host`].
    ///
    /// # Errors
    /// As [`Device::cuda_or_host`].
    pub fn cuda_or_host(self) -> Result<Device> {
        let why = match self.clone().cuda(0) {
            Ok(device) => {
                tracing::info!("using {device}: the first CUDA device");
                return Ok(device);
            }
            Err(error) => match error.detail() {
                ErrorDetail::NoDriver { .. }
                | ErrorDetail::NotBuilt
                | ErrorDetail::NoSuchDevice { .. } => error,
                // A GPU that is there and does not work is not passed over.
                _ => return Err(error),
            },
        };
        let device = self.host();
        tracing::info!(reason = %why, "using {device}: no CUDA device");
        Ok(device)
    }

    /// See [`Device::from_env`].
    ///
    /// # Errors
    /// As [`Device::from_env`].
    pub fn from_env(self) -> Result<Device> {
        match std::env::var("GPU_AWAIT_DEVICE") {
            Ok(name) => self.named(&name),
            Err(std::env::VarError::NotPresent) => self.cuda_or_host(),
            Err(std::env::VarError::NotUnicode(name)) => self.named(&name.to_string_lossy()),
        }
    }

    /// Opens the device of that name: `cuda:N`, `cuda`, `host` or `auto`.
    ///
    /// # Errors
    /// [`ErrorDetail::BadDeviceName`]; those of the device named.
    pub fn named(self, name: &str) -> Result<Device> {
        let bad = || ErrorDetail::BadDeviceName { value: name.to_owned() };
        match name.trim().split_once(':') {
            None if name.trim() == "auto" || name.trim().is_empty() => self.cuda_or_host(),
            None if name.trim() == "host" => Ok(self.host()),
            None if name.trim() == "cuda" => self.cuda(0),
            Some(("cuda", ordinal)) => self.cuda(ordinal.parse().map_err(|_| bad())?),
            _ => Err(bad().into()),
        }
    }

    fn options(&self) -> EngineOptions {
        EngineOptions { completion: self.completion, stepped: false }
    }
}

impl StreamBuilder<'_> {
    /// Sets the priority: lower numbers go first; out of range is clamped, as the driver does.
    pub fn priority(mut self, priority: i32) -> Self {
        let (lowest, highest) = self.device.priority_range();
        self.options.priority = priority.clamp(highest.min(lowest), lowest.max(highest));
        self
    }

    /// Makes the stream.
    ///
    /// # Errors
    /// A device that is lost or closed.
    pub fn build(self) -> Result<Stream> {
        let lane = Lane::open(self.device.engine(), self.options)?;
        Ok(Stream::new(lane, self.device.inner.home.clone()))
    }
}

impl Future for Loss {
    type Output = Error;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Error> {
        match self.engine.poll_lost(cx.waker()) {
            Some(error) => Poll::Ready(error),
            None => Poll::Pending,
        }
    }
}

/// `cuda:0 (NVIDIA H200)`
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.engine().label(), self.name())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({self})")
    }
}
