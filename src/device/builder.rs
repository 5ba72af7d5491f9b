//! How a device is opened, and with what options.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::Device;
use crate::backend::host::HostBackend;
use crate::error::{DriverCode, ErrorDetail, Result};
use crate::memory::reclaim::pressure::Pressure;
use crate::runtime::engine::EngineOptions;
use crate::runtime::progress::Overlap;
use crate::thread::{contain, exit};
use gpu_await_protocol::cadence::Completion;

/// The default capacity of a stream's block cache.
const SPARE_BYTES: u64 = 8 << 20;

/// The environment variable of [`Device::from_env`].
const DEVICE: &str = "GPU_AWAIT_DEVICE";

/// The environment variable of [`DeviceBuilder::overlap`].
const OVERLAP: &str = "GPU_AWAIT_OVERLAP";

/// Options for opening a [`Device`].
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until a device is opened with it"]
pub struct DeviceBuilder {
    pub(super) completion: Completion,
    pub(super) verify: Option<bool>,
    pub(super) memory_limit_bytes: Option<u64>,
    pub(super) on_pressure: Pressure,
    pub(crate) release_threshold_bytes: Option<u64>,
    pub(crate) spare_bytes_per_stream: Option<u64>,
    pub(crate) graph_limit: Option<usize>,
    pub(crate) host_memory_bytes: Option<u64>,
    pub(super) timeline: Option<usize>,
    pub(crate) general_images: bool,
    overlap: Option<Overlap>,
    pub(crate) part_of_selections: Option<u32>,
    pub(super) multiprocessors: Option<u32>,
}

impl Device {
    /// Opens the CUDA device with that ordinal.
    ///
    /// # Blocking
    /// Yes: the first call in a process initializes the driver and creates a context. Open devices when the program starts.
    ///
    /// # Errors
    /// [`ErrorDetail::NoDriver`](crate::ErrorDetail::NoDriver); [`ErrorDetail::BrokenDriver`](crate::ErrorDetail::BrokenDriver), with the driver's
    /// file, its error and what to do; the next call tries again; [`ErrorDetail::NoSuchDevice`](crate::ErrorDetail::NoSuchDevice) with
    /// the count; [`ErrorDetail::Requires`](crate::ErrorDetail::Requires): a GPU without memory pools;
    /// [`ErrorDetail::NotBuilt`](crate::ErrorDetail::NotBuilt) without the `cuda` feature.
    pub fn cuda(ordinal: usize) -> Result<Device> {
        Device::builder().cuda(ordinal)
    }

    /// Opens a host device: real streams over CPU threads. Each call makes a new one. Its kernels
    /// run asynchronously, as a GPU's do: submitting one returns before it has run.
    ///
    /// # Panics
    /// If the system refuses a thread, or the process is exiting; `Device::builder().named("host")` returns an
    /// error instead.
    #[must_use]
    pub fn host() -> Device {
        Device::builder().host()
    }

    /// Opens CUDA device 0, or a host device if there is no driver (or only the CUDA toolkit's stub of one) or no GPU. A
    /// `tracing` event says which, and why: a warning if it is a host device.
    ///
    /// # Blocking
    /// As [`cuda`](Self::cuda).
    ///
    /// # Errors
    /// A GPU exists but cannot be opened; a driver exists but does not work, or not yet
    /// ([`ErrorDetail::BrokenDriver`](crate::ErrorDetail::BrokenDriver)); the system refuses a thread.
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
    /// [`ErrorDetail::BadDeviceName`](crate::ErrorDetail::BadDeviceName) with the variable and its value; the errors of the named device.
    pub fn from_env() -> Result<Device> {
        Device::builder().from_env()
    }

    /// Sets options before opening a device.
    pub fn builder() -> DeviceBuilder {
        DeviceBuilder::default()
    }

    /// Returns the number of CUDA devices: 0 without a driver, and inside a host function unless the number is known from an
    /// earlier call.
    ///
    /// # Blocking
    /// The first call in a process loads and initializes the driver.
    #[must_use]
    pub fn count() -> usize {
        #[cfg(feature = "cuda")]
        return crate::backend::cuda::device_count();
        #[cfg(not(feature = "cuda"))]
        0
    }
}

impl DeviceBuilder {
    /// Sets how completions are detected; the default is right for almost every program.
    pub fn completion(mut self, completion: Completion) -> Self {
        self.completion = completion;
        self
    }

    /// Limits how much device memory this device may hold at once, so that several users can share a GPU;
    /// there is no limit by default. The limit covers buffers, freed memory that still waits for device work, and
    /// the blocks that streams cache. [`on_pressure`](Self::on_pressure) sets what an allocation beyond
    /// the limit does.
    ///
    /// It bounds the bytes held, and an allocation within it succeeds as long as the GPU has memory. The driver's pool reserves
    /// memory on top of that, reported as [`MemoryInfo::reserved_bytes`](crate::MemoryInfo::reserved_bytes): whole chunks
    /// of 32 MiB, and more of them if free memory is fragmented. A shared GPU needs room for that.
    ///
    /// Whole blocks count: sizes are rounded up to a multiple of 512 bytes, and sizes up to 1 MiB further, so
    /// that streams can cache the blocks (see [`spare_bytes_per_stream`](Self::spare_bytes_per_stream)). A
    /// block that exceeds the limit only because of the second rounding is allocated without it.
    ///
    /// On a host device the scratch memory of algorithms, matrix products and transforms is the process's own
    /// and does not count: work that fits there may not fit on a GPU. A process that runs out of memory for it
    /// aborts.
    pub fn memory_limit_bytes(mut self, bytes: u64) -> Self {
        self.memory_limit_bytes = Some(bytes);
        self
    }

    /// Sets what an allocation does that fits the limit or the device only after other streams have made
    /// progress; [`Pressure::Wait`] by default. Either way it first takes cached blocks, freed memory that
    /// is no longer in use, and memory that its own stream freed.
    ///
    /// An allocation that still does not fit fails with [`ErrorDetail::OutOfMemory`].
    pub fn on_pressure(mut self, pressure: Pressure) -> Self {
        self.on_pressure = pressure;
        self
    }

    /// Sets how much freed memory the device's pool keeps for fast allocations; all of it by default. The
    /// driver returns the rest when a stream or an event is synchronized anywhere in the process, which this
    /// crate never does; [`Device::trim`] returns it at once. The pool is this device's own; a host device
    /// keeps nothing.
    ///
    /// # Source
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
    pub fn release_threshold_bytes(mut self, bytes: u64) -> Self {
        self.release_threshold_bytes = Some(bytes);
        self
    }

    /// Sets how much memory each stream caches from freed buffers of at most 1 MiB, for its next buffers of
    /// about that size; 8 MiB by default, 0 for none. The cache is released by [`Device::trim`], when the
    /// stream is dropped, and before an allocation fails.
    ///
    /// Sizes up to 1 MiB are rounded up so that blocks fit the next buffers: to a multiple of 512 bytes up to
    /// 4 KiB, and beyond that to an eighth of the next power of two, at most a quarter more. With 0 they are
    /// only rounded to 512 bytes.
    ///
    /// The driver's allocator is fast from one thread and slow from several: an allocation and its free take
    /// 0.6 µs on an H200, and 27 µs from each of eight threads. A cached block costs neither.
    pub fn spare_bytes_per_stream(mut self, bytes: u64) -> Self {
        self.spare_bytes_per_stream = Some(bytes);
        self
    }

    /// Sets how many compiled graphs of [`Region`](crate::Region)s and [`Graph`](crate::Graph)s may exist at
    /// once: at least one, 1,024 by default. Each takes device memory outside
    /// [`memory_limit_bytes`](Self::memory_limit_bytes): on an H200, 0.1 MiB for a graph of one launch, 0.3
    /// MiB for one of a hundred.
    ///
    /// Beyond the limit, the least recently launched graph is evicted, if its last launch was at least a second ago
    /// ([`Stats::graphs_evicted`](crate::Stats::graphs_evicted)); the evicted graph is compiled again when
    /// needed. If all are in use, the new list is launched operation by operation
    /// ([`Report::no_place`](crate::Report::no_place), [`ListOutcome::NoPlace`](crate::ListOutcome::NoPlace)), until that has happened
    /// sixteen times while some compiled list was not launched once: then it takes that one's place. Lists that are launched equally
    /// often do not evict each other. Graphs of a dropped stream do not count.
    ///
    /// A graph [of several devices](Device::graph_across), which counts on its own device, and a graph with [events](crate::Event::record_in) or, on
    /// a GPU, [captured work](crate::Uses::can_be_captured) cannot be launched operation by operation: it evicts the least recently launched graph
    /// even if that is in use, and exceeds the limit if none can be evicted at that moment. If more such graphs rotate than the limit allows, each
    /// launch compiles. On a host device captured work is called like a launch and does not count.
    pub fn graph_limit(mut self, graphs: usize) -> Self {
        self.graph_limit = Some(graphs);
        self
    }

    /// Waits for each operation and checks it before its call returns, to find the one that faults: a replayed
    /// [`Region`](crate::Region) is put on its stream like a batch, and reports nothing. The error
    /// is [`ErrorDetail::Verify`], with the operation's name and the line that submitted it (for a batch, the
    /// line of the batch). The environment variable `GPU_AWAIT_VERIFY=1` sets the default.
    ///
    /// # Blocking
    /// Every call blocks until the device has finished. Work that waits for the host, such as a kernel that
    /// watches a [`PinnedFlag`](crate::PinnedFlag), never ends.
    pub fn verify(mut self, verify: bool) -> Self {
        self.verify = Some(verify);
        self
    }

    /// Sets where kernels may start while the preceding launch is still ending. The environment variable `GPU_AWAIT_OVERLAP` sets the default:
    /// `off`, `launches` or `launches-and-edges`; any other value means `off`. If it is unset, the default is [`Overlap::Launches`].
    ///
    /// # Source
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`, `CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC`.
    pub fn overlap(mut self, overlap: Overlap) -> Self {
        self.overlap = Some(overlap);
        self
    }

    /// Starts the [timeline](Device::timeline) when the device is opened, as a log of the last `capacity`
    /// operations; 0 for none. The environment variable `GPU_AWAIT_TIMELINE` sets the default; a value that
    /// is not a number means none.
    pub fn timeline(mut self, capacity: usize) -> Self {
        self.timeline = Some(capacity);
        self
    }

    /// Confines every stream of the device that names no other [partition](crate::Partition) to one of at least this many multiprocessors, including
    /// the crate's own streams, except the [legacy default stream](Device::legacy_stream). Opening the device fails as [`Device::reserve_partition`]
    /// does ([`host`](Self::host) then panics). Partitions of one GPU are disjoint only within one [`Device`].
    pub fn partition(mut self, multiprocessors: u32) -> Self {
        self.multiprocessors = Some(multiprocessors);
        self
    }

    /// Sets how much memory a host device has; by default, as much as the machine.
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
        let backend =
            crate::backend::cuda::CudaBackend::open(ordinal, self.release_threshold_bytes)?;
        Device::open(Arc::new(backend), self.options())
    }

    /// See [`Device::cuda`].
    ///
    /// # Errors
    /// [`ErrorDetail::NotBuilt`]: this build has no CUDA support.
    #[cfg(not(feature = "cuda"))]
    pub fn cuda(self, _ordinal: usize) -> Result<Device> {
        Err(ErrorDetail::NotBuilt.into())
    }

    /// See [`Device::host`].
    ///
    /// # Panics
    /// As [`Device::host`]; a [partition](Self::partition) of more multiprocessors than the host has cores.
    #[must_use]
    pub fn host(self) -> Device {
        match open_host(self) {
            Ok(device) => device,
            Err(error) => panic!("no host device: {error}"),
        }
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
                contain::log(|| tracing::info!("using {device}: the first CUDA device"));
                return Ok(device);
            }
            Err(error) => match error.detail() {
                ErrorDetail::NoDriver { .. }
                | ErrorDetail::NotBuilt
                | ErrorDetail::NoSuchDevice { count: 0, .. } => error,
                // A machine for building programs, without a driver.
                ErrorDetail::BrokenDriver { code, .. } if code.code == DriverCode::STUB => error,
                // A driver or GPU that exists but does not work (yet) is an error: falling back would silently run GPU work on
                // the CPU.
                _ => return Err(error),
            },
        };
        let device = open_host(self)?;
        contain::log(|| tracing::warn!(reason = %why, "using {device}: no CUDA device"));
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

    /// Opens the device with that name: `cuda:N`, `cuda`, `host` or `auto`.
    ///
    /// # Blocking
    /// As [`Device::cuda`].
    ///
    /// # Errors
    /// [`ErrorDetail::BadDeviceName`]; the errors of the named device.
    pub fn named(self, name: &str) -> Result<Device> {
        self.open_named(None, name)
    }

    /// `variable` is the environment variable that the name came from.
    fn open_named(self, variable: Option<&'static str>, name: &str) -> Result<Device> {
        let bad = || ErrorDetail::BadDeviceName { variable, value: name.to_owned() };
        match name.trim().split_once(':') {
            None if name.trim() == "auto" || name.trim().is_empty() => self.cuda_or_host(),
            None if name.trim() == "host" => open_host(self),
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
            general_images: self.general_images,
            overlap: self.overlap.unwrap_or_else(overlap_from_env),
            part_of_selections: self.part_of_selections,
            multiprocessors: self.multiprocessors,
        }
    }
}

fn overlap_from_env() -> Overlap {
    match std::env::var_os(OVERLAP) {
        None => Overlap::default(),
        Some(value) if value == "launches" => Overlap::Launches,
        Some(value) if value == "launches-and-edges" => Overlap::LaunchesAndEdges,
        Some(_) => Overlap::Off,
    }
}

/// [`DeviceBuilder::host`], for callers that must not panic.
///
/// # Errors
/// Where that panics.
pub fn open_host(builder: DeviceBuilder) -> Result<Device> {
    exit::check_running("opening a device")?;
    let backend = HostBackend::new(builder.host_memory_bytes, true);
    Device::open(Arc::new(backend), builder.options())
}
