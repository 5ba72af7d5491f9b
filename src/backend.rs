//! The one seam: what a device must be able to do.
//!
//! [`Backend`] mirrors driver calls, one function per call, grouped by object ([`StreamCalls`], [`EventCalls`], [`MemoryCalls`],
//! [`ModuleCalls`], [`GraphCalls`], [`PartitionCalls`], [`RangeCalls`], [`SharedCalls`]). It validates nothing; the layer above ([`submit`](crate::submit)) validates once. There are three
//! implementations: [`cuda`] drives NVIDIA GPUs, [`host`] is the CPU as a device, [`fault`] wraps either, records its calls and injects
//! faults.

mod arguments;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod event;
#[cfg(feature = "test-util")]
pub(crate) mod fault;
mod graph;
pub(crate) mod host;
mod memory;
mod module;
mod partition;
mod range;
mod shared;
mod stream;
pub(crate) mod twin;

use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, Weak};

pub use arguments::ArgBlock;
#[cfg(feature = "cuda")]
pub(crate) use arguments::{ArgPointers, NO_ARGS};
pub(crate) use arguments::{ArgSlot, Arguments};
pub(crate) use event::EventCalls;
pub(crate) use graph::{GraphCalls, GraphEdge, KernelCall, NodeLaunch, RawGraph};
pub(crate) use memory::{MemoryCalls, PeerMemory};
pub(crate) use module::ModuleCalls;
pub(crate) use partition::{PartitionCalls, RawPartition};
pub(crate) use range::RangeCalls;
pub(crate) use shared::SharedCalls;
#[cfg(target_os = "linux")]
pub(crate) use shared::SharedMapping;
pub(crate) use stream::StreamCalls;
pub use twin::{Grid, HostTwin};

use crate::error::{DriverCode, LossCause};

/// The driver's code for work that is not complete.
pub(crate) const NOT_READY: i32 = 600;

/// The result of a driver call.
pub(crate) type DriverResult<T> = std::result::Result<T, DriverCode>;

/// A stream of a backend. Handles are never compared: the driver reuses them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawStream(pub(crate) u64);

impl RawStream {
    /// The legacy default stream: `CU_STREAM_LEGACY`.
    pub(crate) const LEGACY: RawStream = RawStream(1);
    pub(crate) const LEGACY_OPTIONS: StreamOptions =
        StreamOptions { priority: 0, blocking: true, partition: None };
    /// `CU_STREAM_PER_THREAD`: a different stream on every thread, so never used here.
    pub(crate) const PER_THREAD: RawStream = RawStream(2);
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RawEvent(pub(crate) u64);

#[derive(Clone, Copy, Debug)]
pub(crate) struct RawModule(pub(crate) u64);

#[derive(Clone, Copy, Debug)]
pub(crate) struct RawFunction {
    /// The function, in the device's own context.
    pub(crate) function: u64,
    /// The kernel, bound to no context: for graph nodes that name a context.
    pub(crate) kernel: u64,
    /// The device's own context.
    pub(crate) context: u64,
    /// Its kernel [waits first](Function::waits_first).
    pub(crate) waits_first: bool,
}

/// An address in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DevicePtr(pub(crate) u64);

impl DevicePtr {
    pub(crate) const NULL: DevicePtr = DevicePtr(0);

    pub(crate) fn offset(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0 + bytes)
    }
}

/// The answer of a query; the third answer, failed, is the `Err` of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    Pending,
    Complete,
}

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceKind {
    /// An NVIDIA GPU, through the CUDA driver.
    Cuda,
    /// The CPU, through real streams over threads.
    Host,
}

/// The limits of a device. Source: `cuDeviceGetAttribute`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) threads_per_block: u32,
    pub(crate) registers_per_block: u32,
    pub(crate) block_dim: [u32; 3],
    pub(crate) grid_dim: [u32; 3],
    pub(crate) shared_mem_bytes: u32,
    pub(crate) shared_mem_optin_bytes: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) warp_size: u32,
    pub(crate) compute_capability: (u32, u32),
    /// (lowest, highest) priority; the highest is the smaller number.
    pub(crate) priorities: (i32, i32),
    /// Whether the stream can write 64-bit words.
    pub(crate) words: bool,
    pub(crate) cooperative: bool,
    pub(crate) clusters: bool,
    /// Whether events can be shared between processes.
    pub(crate) interprocess_events: bool,
}

/// What the compiler made of a kernel; see [`Kernel::attributes`](crate::Kernel::attributes).
///
/// # Source
/// `cuFuncGetAttribute`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelAttributes {
    /// The most threads that a block of this kernel may have: its registers decide, or the bounds
    /// it was compiled for. The device's limit on a host device.
    pub max_threads_per_block: u32,
    /// Registers of a thread; 0 on a host device.
    pub registers: u32,
    /// Shared memory of a block besides the dynamic, in bytes; 0 on a host device.
    pub static_shared_mem_bytes: u32,
    /// Constant memory of the kernel, in bytes; 0 on a host device.
    pub const_bytes: u32,
    /// Local memory of a thread (spilled registers, arrays), in bytes; 0 on a host device.
    pub local_bytes: u32,
    /// The virtual architecture of the PTX, major times ten plus minor, e.g. 60; 0 on a host device.
    pub ptx_version: u32,
    /// The architecture that the code runs on, major times ten plus minor, e.g. 90; 0 on a host
    /// device.
    pub binary_version: u32,
    /// Whether global loads are cached in L1 because the image was compiled so (`-Xptxas
    /// --dlcm=ca`); false on a host device.
    pub cache_mode_ca: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StreamOptions {
    pub(crate) priority: i32,
    /// Ordered with the legacy default stream.
    pub(crate) blocking: bool,
    /// Confined to those multiprocessors; such a stream is never blocking.
    pub(crate) partition: Option<RawPartition>,
}

/// The properties of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamInfo {
    pub(crate) priority: i32,
    pub(crate) blocking: bool,
    /// Its context, comparable with [`Backend::context`].
    pub(crate) context: u64,
    /// The green context over `context` that the stream belongs to; 0: none.
    pub(crate) green: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EventOptions {
    pub(crate) timing: bool,
    pub(crate) blocking_sync: bool,
    pub(crate) interprocess: bool,
}

/// The memory that the device's pool has taken from the device, in bytes. Source: `cuMemPoolGetAttribute`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolInfo {
    pub(crate) reserved: u64,
    pub(crate) reserved_peak: u64,
}

/// The kind of memory at an address. Source: `cuPointerGetAttribute`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryAt {
    /// The device whose memory it is; `None` if it is not device memory.
    pub(crate) ordinal: Option<usize>,
    /// The allocation that contains it, if known.
    pub(crate) allocation: Option<Range<u64>>,
}

/// The function that is launched.
#[derive(Clone)]
pub(crate) enum Function {
    Device(RawFunction),
    /// A twin, and the kernel's name.
    Host {
        twin: HostTwin,
        kernel: Arc<str>,
        waits_first: bool,
    },
    /// Captured work, by its graph; in graphs alone.
    Captured(u64),
    /// The record of an event; in graphs alone.
    Record(RawEvent),
}

impl Function {
    /// Whether every thread of every block waits for the preceding launch before it has any side effect, whatever the arguments. A property of
    /// the loaded code.
    #[inline]
    pub(crate) fn waits_first(&self) -> bool {
        match self {
            Function::Device(function) => function.waits_first,
            Function::Host { waits_first, .. } => *waits_first,
            Function::Captured(_) | Function::Record(_) => false,
        }
    }
}

/// How a kernel is launched, already validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaunchShape {
    pub(crate) grid: Grid,
    pub(crate) cooperative: bool,
    /// The device may start it while the preceding launch in its stream is still ending; decided by [`submit`](crate::submit). In a graph, the
    /// edges decide.
    pub(crate) overlaps: bool,
}

impl LaunchShape {
    /// The shape of an operation that is not a kernel.
    pub(crate) const NONE: LaunchShape = LaunchShape::plain(Grid {
        grid_dim: [1; 3],
        block_dim: [1; 3],
        cluster_dim: [1; 3],
        shared_mem_bytes: 0,
    });

    pub(crate) const fn plain(grid: Grid) -> Self {
        LaunchShape { grid, cooperative: false, overlaps: false }
    }
}

/// A pattern that a fill repeats: 1 to 16 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    pub(crate) bytes: [u8; 16],
    pub(crate) len: usize,
}

impl Pattern {
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// The shortest pattern (1, 2 or 4 bytes, else the whole) that repeats to the same bytes.
    pub(crate) fn shortest(&self) -> Pattern {
        for len in [1, 2, 4] {
            if len <= self.len && self.len.is_multiple_of(len) {
                let head = &self.bytes[..len];
                if self.as_slice().chunks(len).all(|chunk| chunk == head) {
                    return Pattern { bytes: self.bytes, len };
                }
            }
        }
        *self
    }

    /// Whether a memset of the driver writes it there at the memory's speed.
    pub(crate) fn is_word(&self, at: DevicePtr) -> bool {
        let len = self.shortest().len as u64;
        matches!(len, 1 | 2 | 4) && at.0.is_multiple_of(len)
    }
}

/// A callback of a stream, with the driver's signature `CUhostFn`.
pub(crate) type HostCallback = unsafe extern "C" fn(*mut c_void);

/// An address that crosses threads inside a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostPtr(pub(crate) usize);

/// The layout of the rows of a copy. Source: `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowCopy {
    pub(crate) to: Place,
    pub(crate) to_pitch: u64,
    pub(crate) from: Place,
    pub(crate) from_pitch: u64,
    pub(crate) row_bytes: u64,
    /// At least 1, of at least one byte each; no pitch is shorter than a row.
    pub(crate) rows: u64,
}

impl RowCopy {
    /// A single row of `bytes` bytes of device memory.
    pub(crate) fn whole(to: DevicePtr, from: DevicePtr, bytes: u64) -> Self {
        let (to, from) = (Place::Device(to), Place::Device(from));
        RowCopy { to, to_pitch: bytes, from, from_pitch: bytes, row_bytes: bytes, rows: 1 }
    }

    /// Whether there is nothing between its rows.
    pub(crate) fn is_contiguous(&self) -> bool {
        let RowCopy { to_pitch, from_pitch, row_bytes, rows, .. } = *self;
        rows == 1 || (to_pitch == row_bytes && from_pitch == row_bytes)
    }

    /// The bytes from the start of the first row to the end of the last.
    pub(crate) fn extent(&self, pitch: u64) -> u64 {
        (self.rows - 1) * pitch + self.row_bytes
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Device(DevicePtr),
    Host(HostPtr),
}

/// A device's driver calls.
///
/// # Safety
/// The unsafe functions share one contract, which [`submit`](crate::submit) and the completion
/// engine keep: every handle was made by this backend and not destroyed; every address range is
/// part of memory of this backend (or registered with it) that stays allocated until the stream
/// has reached the command; a callback's `data` is valid whenever it may run. Calls may be made
/// from any thread, also while others are under way.
pub(crate) trait Backend:
    StreamCalls
    + EventCalls
    + MemoryCalls
    + ModuleCalls
    + GraphCalls
    + PartitionCalls
    + RangeCalls
    + SharedCalls
    + Send
    + Sync
    + 'static
{
    fn kind(&self) -> DeviceKind;
    fn ordinal(&self) -> usize;
    fn name(&self) -> &str;
    fn limits(&self) -> &Limits;
    /// Turns the code of a sticky error into the known cause of the loss.
    fn loss_cause(&self, code: DriverCode) -> LossCause {
        LossCause::Driver(code)
    }
    /// Called when the device is lost: the backend's resources are leaked.
    fn abandon(&self) {}

    /// Prepares a thread of this crate to run foreign code: makes the device's context current, and keeps the thread's calls from
    /// breaking other threads' captures.
    fn ready_thread(&self) {}
    /// Runs one command of a backend without threads; false if none is ready.
    fn step(&self, _choose: usize) -> bool {
        false
    }
    /// The driver's handle of the context, for interop and peer copies.
    fn context(&self) -> u64 {
        0
    }
    /// The driver's handle of the pool that memory comes from, for peer copies.
    fn pool(&self) -> u64 {
        0
    }
    /// Lets this device's copies reach the other's memory directly; false if it cannot. Repeated calls are
    /// harmless.
    fn enable_peer(&self, other: &dyn Backend) -> DriverResult<bool>;
    /// Called when another device is about to access this one's memory; `None` except for host devices.
    fn begin_peer_access(&self) -> Option<Weak<dyn PeerMemory>> {
        None
    }
    /// The context as cudarc's `Arc<CudaContext>`, where there is one.
    fn cudarc_context(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }
}
