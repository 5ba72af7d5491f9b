//! How a device is opened, and with what options.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::Device;
use crate::backend::host::HostBackend;
use crate::error::{ErrorDetail, Result};
use crate::memory::reclaim::pressure::Pressure;
use crate::runtime::engine::EngineOptions;
use crate::runtime::protocol::cadence::Completion;
use crate::thread::exit;

/// What a stream keeps of freed memory, unless said otherwise.
const SPARE_BYTES: u64 = 8 << 20;

/// The environment variable of [`Device::from_env`].
const DEVICE: &str = "GPU_AWAIT_DEVICE";

/// Options for opening a [`Device`].
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until a device is opened with it"]
pub struct DeviceBuilder {
    pub(super) completion: Completion,
    pub(super) verify: Option<bool>,
    pub(super) memory_limit_bytes: Option<u64>,
    pub(super) on_pressure: Pressure,
    pub(super) release_threshold_bytes: Option<u64>,
    pub(crate) spare_bytes_per_stream: Option<u64>,
    pub(crate) graph_limit: Option<usize>,
    pub(crate) host_memory_bytes: Option<u64>,
    pub(super) timeline: Option<usize>,
}

impl Device {
    /// Opens the CUDA device of that ordinal.
    ///
    /// # Blocking
    /// Yes: the first time in a process, the driver initialises itself and makes a context. Open devices when the program starts.
    ///
    /// # Errors
    /// [`ErrorDetail::NoDriver`](crate::ErrorDetail::NoDriver), [`ErrorDetail::NoSuchDevice`](crate::ErrorDetail::NoSuchDevice) with the count,
    /// [`ErrorDetail::NotBuilt`](crate::ErrorDetail::NotBuilt) without the `cuda` feature.
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Device::builder().cuda(ordinal)
    }

    /// Opens a host device: real streams over CPU threads. Each call makes a new one. Its kernels
    /// run asynchronously, as a GPU's do: submitting one returns before it has run.
    ///
    /// # Panics
    /// If the system gives no thread, or the process is ending; `Device::builder().named("host")` is an error
    /// then.
    #[must_use]
    pub fn host() -> Device {
        Device::builder().host()
    }

    /// Opens CUDA device 0, or a host device where there is no driver or no GPU. Which, and why, is
    /// told through `tracing`.
    ///
    /// # Blocking
    /// As [`cuda`](Self::cuda).
    ///
    /// # Errors
    /// A GPU that is there and cannot be opened; no thread to be had.
    pub fn cuda_or_host() -> Result<Device> {
        Device::builder().cuda_or_host()
    }

    /// Opens the device named by the environment variable `GPU_AWAIT_DEVICE`: `cuda:N`, `cuda`,
    /// `host` or `auto` (also when it is unset).
    ///
    /// # Blocking
    /// As [`cuda`](Self::cuda).
    ///
    /// # Errors
    /// [`ErrorDetail::BadDeviceName`](crate::ErrorDetail::BadDeviceName) with the variable and its value; those of the device named.
    pub fn from_env() -> Result<Device> {
        Device::builder().from_env()
    }

    /// Options first.
    pub fn builder() -> DeviceBuilder {
        DeviceBuilder::default()
    }

    /// The number of CUDA devices; 0 where there is no driver, and inside a host function where nobody
    /// asked before.
    ///
    /// # Blocking
    /// The first call in a process loads the driver and initialises it.
    #[must_use]
    pub fn count() -> usize {
        #[cfg(feature = "cuda")]
        return crate::backend::cuda::device_count();
        #[cfg(not(feature = "cuda"))]
        0
    }
}

impl DeviceBuilder {
    /// Chooses how completions are learned; the default suits everybody.
    pub fn completion(mut self, completion: Completion) -> Self {
        self.completion = completion;
        self
    }

    /// Limits how much device memory this device may hold at once, so that several users can share a
    /// GPU; the default is none. What buffers hold counts, what was given up and waits for device work,
    /// and what streams keep. What an allocation beyond it does is in
    /// [`on_pressure`](Self::on_pressure).
    ///
    /// Whole blocks count: bytes are rounded up to a multiple of 512 bytes, and up to 1 MiB so that
    /// streams can keep them (see [`spare_bytes_per_stream`](Self::spare_bytes_per_stream)). Where a
    /// block does not fit because of the latter, it is made without that.
    ///
    /// On a host device the memory that algorithms, products and transforms need beside their arguments is the process's own, and does not
    /// count: what fits there may not fit on a GPU. A process that has no memory left for it ends.
    ///
    /// # Source
    /// `CUmemPoolProps::maxSize` holds the driver to it as well, from CUDA 12.2 on.
    pub fn memory_limit_bytes(mut self, bytes: u64) -> Self {
        self.memory_limit_bytes = Some(bytes);
        self
    }

    /// Chooses what an allocation does that fits neither the limit nor the device until other streams
    /// got further: [`Pressure::Wait`] unless said otherwise. What streams keep and what is complete is
    /// used in any case, and so is what the allocation's own stream gave up.
    ///
    /// What does not fit even so is [`ErrorDetail::OutOfMemory`].
    pub fn on_pressure(mut self, pressure: Pressure) -> Self {
        self.on_pressure = pressure;
        self
    }

    /// How much of what is freed the device's pool keeps for quick allocations; the default is all
    /// of it. The driver gives the rest back when somebody in the process synchronizes a stream or
    /// an event, which this crate never does: [`Device::trim`] gives it back at once. The pool is this
    /// device's own; a host device keeps nothing.
    ///
    /// # Source
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
    pub fn release_threshold_bytes(mut self, bytes: u64) -> Self {
        self.release_threshold_bytes = Some(bytes);
        self
    }

    /// How much memory of buffers of at most 1 MiB each stream keeps when they are freed, for the
    /// next ones of about that size on the same stream; 0 for none, 8 MiB unless said otherwise. What
    /// a stream keeps is given back by [`Device::trim`], by the drop of the stream, and before an
    /// allocation fails.
    ///
    /// So that blocks fit the next buffers, sizes up to 1 MiB are rounded up: to a multiple of 512 bytes
    /// up to 4 KiB, beyond that to an eighth of the next power of two, which is at most a quarter more.
    /// With 0 they are rounded to 512 bytes alone.
    ///
    /// The driver's allocator is quick for one thread and slow for several: 0.6 µs for an allocation
    /// and its free on an H200, and 27 µs from each of eight threads. What is kept costs neither.
    pub fn spare_bytes_per_stream(mut self, bytes: u64) -> Self {
        self.spare_bytes_per_stream = Some(bytes);
        self
    }

    /// How many compiled graphs there may be at once, of [`Region`](crate::Region)s and [`Graph`](crate::Graph)s: at least one, 1,024
    /// unless said otherwise. Each takes memory of the device, beside [`memory_limit_bytes`](Self::memory_limit_bytes): 0.1 MiB for a
    /// graph of one launch on an H200, 0.3 for one of a hundred.
    ///
    /// One more takes the place of the one whose last launch is the longest ago, if that is a second or more
    /// ([`Stats::graphs_evicted`](crate::Stats::graphs_evicted)); that one is compiled again when it comes again. Where all are in
    /// use, it is launched one operation after the other ([`Report::plain`](crate::Report::plain),
    /// [`ListOutcome::NoPlace`](crate::ListOutcome::NoPlace)). A graph of a stream that is gone gives its place back.
    ///
    /// A graph with [events](crate::Event::record_in), or on a GPU [captured work](crate::Uses::can_be_captured), cannot be launched like
    /// that: it takes the place of the one whose last launch is the longest ago, also if that is in use, and has one beyond the limit if
    /// none can go at that moment. More of them in turns than there are places are compiled at each launch. On a host device captured
    /// work is called like a launch, and needs no place.
    pub fn graph_limit(mut self, graphs: usize) -> Self {
        self.graph_limit = Some(graphs);
        self
    }

    /// Whether each operation is waited for and checked before its call returns, to find the one that
    /// faults: its error is then [`ErrorDetail::Verify`], with the operation's name and the place in
    /// the program where it was submitted (of a batch, where that was). Unless said here the
    /// environment variable `GPU_AWAIT_VERIFY=1` says so.
    ///
    /// # Blocking
    /// Every call then blocks until the device is through. What waits for the host to go on, such as a
    /// kernel that watches a [`PinnedFlag`](crate::PinnedFlag), never ends.
    pub fn verify(mut self, verify: bool) -> Self {
        self.verify = Some(verify);
        self
    }

    /// Starts the [timeline](Device::timeline) as the device is opened, with a log of the last `capacity` operations; 0 for none.
    /// Unless said here the environment variable `GPU_AWAIT_TIMELINE` says how many, and none if it is not a number.
    pub fn timeline(mut self, capacity: usize) -> Self {
        self.timeline = Some(capacity);
        self
    }

    /// Sets how much memory a host device has; the default is the machine's.
    pub fn host_memory_bytes(mut self, bytes: u64) -> Self {
        self.host_memory_bytes = Some(bytes);
        self
    }

    /// See [`Device::cuda`].
    ///
    /// # Blocking
    /// As [`Device::cuda`].
    ///
    /// # Errors
    /// As [`Device::cuda`].
    #[cfg(feature = "cuda")]
    pub fn cuda(self, ordinal: usize) -> Result<Device> {
        crate::thread::role::check("opening a CUDA device")?;
        exit::check_running("opening a device")?;
        let backend = crate::backend::cuda::CudaBackend::open(ordinal, self.pool_options())?;
        Device::open(Arc::new(backend), self.options())
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn pool_options(&self) -> crate::backend::cuda::PoolOptions {
        crate::backend::cuda::PoolOptions {
            limit_bytes: self.memory_limit_bytes,
            release_threshold_bytes: self.release_threshold_bytes,
        }
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
    /// As [`Device::host`].
    #[must_use]
    pub fn host(self) -> Device {
        match self.try_host() {
            Ok(device) => device,
            Err(error) => panic!("no host device: {error}"),
        }
    }

    fn try_host(self) -> Result<Device> {
        exit::check_running("opening a device")?;
        let backend = HostBackend::new(self.host_memory_bytes, true);
        Device::open(Arc::new(backend), self.options())
    }

    /// See [`Device::cuda_or_host`].
    ///
    /// # Blocking
    /// As [`Device::cuda`].
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
        let device = self.try_host()?;
        tracing::info!(reason = %why, "using {device}: no CUDA device");
        Ok(device)
    }

    /// See [`Device::from_env`].
    ///
    /// # Blocking
    /// As [`Device::cuda`].
    ///
    /// # Errors
    /// As [`Device::from_env`].
    pub fn from_env(self) -> Result<Device> {
        match std::env::var_os(DEVICE) {
            Some(name) => self.open_named(Some(DEVICE), &name.to_string_lossy()),
            None => self.cuda_or_host(),
        }
    }

    /// Opens the device of that name: `cuda:N`, `cuda`, `host` or `auto`.
    ///
    /// # Blocking
    /// As [`Device::cuda`].
    ///
    /// # Errors
    /// [`ErrorDetail::BadDeviceName`]; those of the device named.
    pub fn named(self, name: &str) -> Result<Device> {
        self.open_named(None, name)
    }

    /// `variable` is the environment variable that names it.
    fn open_named(self, variable: Option<&'static str>, name: &str) -> Result<Device> {
        let bad = || ErrorDetail::BadDeviceName { variable, value: name.to_owned() };
        match name.trim().split_once(':') {
            None if name.trim() == "auto" || name.trim().is_empty() => self.cuda_or_host(),
            None if name.trim() == "host" => self.try_host(),
            None if name.trim() == "cuda" => self.cuda(0),
            Some(("cuda", ordinal)) => self.cuda(ordinal.parse().map_err(|_| bad())?),
            _ => Err(bad().into()),
        }
    }

    pub(crate) fn options(&self) -> EngineOptions {
        let verify = self.verify.unwrap_or_else(|| {
            std::env::var_os("GPU_AWAIT_VERIFY").is_some_and(|value| value != "0")
        });
        EngineOptions {
            completion: self.completion,
            stepped: false,
            pins_on_demand: false,
            memory_limit: self.memory_limit_bytes,
            on_pressure: self.on_pressure,
            verify,
            block_cache_bytes: self.spare_bytes_per_stream.unwrap_or(SPARE_BYTES),
            graph_limit: self.graph_limit,
            timeline: self
                .timeline
                .or_else(|| std::env::var("GPU_AWAIT_TIMELINE").ok()?.trim().parse().ok()),
        }
    }
}
