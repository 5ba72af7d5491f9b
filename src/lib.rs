//! An async GPU runtime: **every operation put on a CUDA stream returns a future.**
//!
//! Kernel launches, copies, fills, events, waits between streams and host functions are on the
//! device when the call returns; the future, [`Op`], only observes. Async code queues work with
//! `.queued()?` where device order is enough and uses `.await` where the host needs the result.
//! Without a GPU the same program runs on the *host device*: real streams over CPU threads.
//!
//! ```
//! use gpu_await::{Device, kernels};
//!
//! # futures::executor::block_on(async {
//! let device = Device::cuda_or_host()?;                 // GPU 0, or the host device
//! let stream = device.stream()?;
//! let axpy = kernels::axpy::load(&device).await?;       // PTX for CUDA, a Rust function for the host
//!
//! let x = stream.upload(vec![1.0f32; 1000]).queued()?;  // device order is enough: no host wait
//! let mut y = stream.full(1000, 2.0f32).queued()?;
//! axpy.launch(&stream, 3.0, &x, &mut y).queued()?;
//! let y = stream.download(&y).await?;                   // the one host wait
//! assert_eq!(y[999], 5.0);
//! # Ok::<(), gpu_await::Error>(()) }).unwrap();
//! ```
//!
//! Start with the [`guide`]; below is the reference by subject.
//!
//! # Devices and streams
//! | item | for |
//! |---|---|
//! | [`Device`], [`DeviceBuilder`] | a GPU, or the CPU as one; its options |
//! | [`Stream`], [`StreamBuilder`] | work in order, concurrent with other streams |
//! | [`Partition`] | a share of a GPU for latency-critical work |
//! | [`Op`], [`join_all`] | an operation as a future: what `.await` proves, what a drop does |
//! | [`Event`] | a point to wait for; timing on the device |
//! | [`Stream::batch`], [`Queue`] | several operations as one future |
//! | [`Stream::scope`], [`Device::current_stream`] | naming a stream once for many calls |
//! | [`Error`], [`ErrorKind`], [`ErrorDetail`] | what failed, what to do, the figures |
//!
//! # Memory
//! | item | for |
//! |---|---|
//! | [`DeviceBuffer`], [`View`], [`ViewMut`] | memory on the device, and ranges of it |
//! | [`View2`], [`ViewMut2`], [`Copy2d`] | rows and columns |
//! | [`PinnedBuffer`], [`Mapped`], [`PinnedFlag`] | host memory that the device copies at full speed, or uses in place |
//! | [`DeviceSlab`], [`HostSlab`], [`Stream::copy_many`] | memory in blocks of one size, and copies of many pieces |
//! | [`Stream::upload_staged`], [`Stream::download_staged`] | large ordinary memory, off the executor |
//! | [`GrowableBuffer`] | memory that grows and shrinks in place |
//! | [`Frozen`] | memory that many streams read |
//! | [`Device::reserve`], [`Reservation`] | memory guaranteed to a request before it starts |
//! | [`Stream::reclaimed`], [`Pressure`] | waiting for memory |
//!
//! # Kernels
//! | item | for |
//! |---|---|
//! | [`kernel!`](crate::kernel!) | a kernel of your own: types, preconditions, code, a twin for the CPU |
//! | [`DeviceSlab::naming`], [`BlockTable`] | kernels that find blocks of memory by indices or addresses |
//! | [`Kernel`], [`Module`] | kernels looked up at run time |
//! | [`Module::compile`], [`CudaSource`] | CUDA C++ compiled at run time |
//! | [`LaunchConfig`], [`Occupancy`] | a launch's geometry, and one that fills the device |
//! | [`kernels`] | the kernels that come with the crate |
//! | [`Stream::replay`], [`Region`], [`Graph`] | many small launches as one |
//! | [`gpu-await-algorithms`](https://docs.rs/gpu-await-algorithms) | a crate: sums, scans, sorts, selections, formulas |
//! | [`gpu-await-libs`](https://docs.rs/gpu-await-libs) | a crate: matrix products by cuBLASLt, Fourier transforms by cuFFT |
//!
//! # Services
//! | item | for |
//! |---|---|
//! | [`StreamPool`], [`Stream::throttle`] | bounds on what is in flight |
//! | [`Batcher`] | one launch for many small requests |
//! | [`Device::close`], [`StreamPool::drained_within`] | an orderly shutdown |
//! | [`Device::timeline`], [`Trace`], [`Device::stats`] | what ran when, and what waited for it |
//!
//! # Other libraries
//! | item | for |
//! |---|---|
//! | [`Stream::enqueue`], [`Uses`] | their calls as operations |
//! | [`Device::adopt_memory`], [`Stream::lend_memory`] | their memory here, your buffers there |
//! | [`Stream::from_raw`], [`Stream::lend_raw`], [`Device::import_event`] | streams and events of other libraries and processes |
//! | [`DlpackTensor`], [`DlpackConsumer`] | tensors of PyTorch, CuPy, NumPy, JAX |
//!
//! # Tests
//! | item | for |
//! |---|---|
//! | [`Device::host`] | the same program without a GPU |
//! | [`DeviceBuilder::verify`] | finds the operation that faults |
//! | `testing` | gates, faults, a device that the test steps (feature `test-util`) |
//!
//! # Waiting
//! From fine to coarse; each has a blocking form, `synchronize()`, and a form that orders streams on the
//! device without blocking the host, [`Stream::wait`].
//!
//! | you await | it waits for |
//! |---|---|
//! | an operation: [`op.await`](Op) | it, and everything before it on its stream; one that has nothing to do, such as a sort of no elements, may be complete at once |
//! | an event: [`event.done()`](Event::done) | everything that was on the stream when it was recorded |
//! | a stream: [`stream.done()`](Stream::done) | everything that is on the stream now |
//! | a device: [`device.done()`](Device::done) | everything that is on the device now, including other libraries' work |
//! | several: [`join_all`], [`Device::all_done`] | each of them |
//!
//! # Features
//! | feature | default | what it adds |
//! |---|---|---|
//! | `cuda-auto` | yes | NVIDIA GPUs; no toolkit is needed to build |
//! | `cuda` | | the same, with the CUDA version chosen by `cudarc`'s features |
//! | `tokio` | yes | operations take part in the cooperative budget of tokio's tasks; the core runs on any executor |
//! | `tower` | | pools and batchers as services |
//! | `test-util` | | the `testing` module |
//!
//! There is no prelude: [`Stream`] would hide `futures::Stream`, and a program needs only a few names.

// Tests and examples may unwrap; the library may not.
#![cfg_attr(not(test), warn(clippy::unwrap_used))]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(all(feature = "cuda", feature = "test-util")),
    allow(dead_code, reason = "some parts serve one backend, or the tests, alone")
)]

// In the order in which rustdoc shows the methods that they add to `Device` and `Stream`.
pub(crate) mod device;
pub(crate) mod stream;

pub(crate) mod batch;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod graph;
pub(crate) mod growable;
pub(crate) mod kernel;
pub mod kernels;
pub(crate) mod memory;
pub(crate) mod op;
pub(crate) mod serve;
#[cfg(target_os = "linux")]
pub(crate) mod shared;
pub(crate) mod timeline;

pub(crate) mod interop;

pub mod guide;
#[doc(hidden)]
pub mod sibling;
#[cfg(feature = "test-util")]
pub mod testing;

pub(crate) mod backend;
#[cfg(doctest)]
mod must_not_compile;
pub(crate) mod runtime;
pub(crate) mod submit;
pub(crate) mod system;
pub(crate) mod thread;

/// Plain data: what an [`Element`] must be, and the derives for it.
///
/// Lets a program declare its own types without depending on `bytemuck`:
/// ```
/// use gpu_await::bytemuck::{Pod, Zeroable};
///
/// #[derive(Clone, Copy, Debug, Pod, Zeroable)]
/// #[bytemuck(crate = "gpu_await::bytemuck")]
/// #[repr(C)]
/// struct Particle {
///     position: [f32; 3],
///     mass: f32,
/// }
/// ```
pub use bytemuck;

/// The CUDA bindings, in the version whose types [`Device::from_cudarc`], [`Device::adopt`] and the like take.
#[cfg(feature = "cuda")]
pub use cudarc;

/// `f16` and `bf16`, in the version whose types are [`Element`]s here.
pub use half;

/// The trait that [`PoolService`] and [`BatchService`] implement.
#[cfg(feature = "tower")]
pub use tower_service;

pub use backend::{DeviceKind, Grid, KernelAttributes};
pub use batch::pieces::CopyBy;
pub use batch::queue::Queue;
pub use batch::region::Region;
pub use batch::report::{ListOutcome, ListReport, OpSite, Report};
pub use batch::settle::{Lent, Settle};
pub use batch::source::Source;
pub use device::Device;
pub use device::builder::DeviceBuilder;
pub use device::loss::Loss;
pub use device::partition::Partition;
pub use device::reservation::{Reservation, Reserve};
pub use device::stats::{Overlaps, Stats};
pub use device::streams::StreamBuilder;
pub use error::admitter::{Admitter, AdmitterKind};
pub use error::advice::MemoryAdvice;
pub use error::foreign::{ForeignError, LibraryStatus};
pub use error::image::{ImageProblem, NotProgrammatic, ParamLayout};
pub use error::launch_limit::{Axis, LaunchLimit};
pub use error::piece::PieceProblem;
pub use error::refused::Refused;
pub use error::reservation::ReservationProblem;
pub use error::shared::SharedProblem;
pub use error::tensor::TensorProblem;
pub use error::unfinished::Unfinished;
pub use error::{
    DriverCode, Error, ErrorDetail, ErrorKind, EventProblem, LossCause, MemoryProblem, Result,
};
pub use event::Event;
pub use event::builder::EventBuilder;
pub use gpu_await_protocol::cadence::Completion;
pub use graph::Graph;
pub use graph::slots::{GraphArg, GraphArgs, GraphSlot, GraphSlots};
pub use growable::GrowableBuffer;
pub use interop::StreamLoan;
#[cfg(feature = "cuda")]
pub use interop::cudarc::CudarcSlice;
pub use interop::dlpack::abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    DlpackElement,
};
pub use interop::dlpack::export::DlpackConsumer;
pub use interop::dlpack::tensor::DlpackTensor;
pub use interop::memory::MemoryLoan;
pub use kernel::image::Image;
pub use kernel::integers::{Integer, Len, TableShape};
pub use kernel::launch_config::{Dim3, LaunchConfig};
pub use kernel::module::Module;
pub use kernel::occupancy::Occupancy;
pub use kernel::rows::{In2, InOut2, Out2, Slice2, SliceMut2};
pub use kernel::signature::{Arg, Args, Flag, In, InOut, Out, Param, Signature, TwinFn, Value};
pub use kernel::source::CudaSource;
pub use kernel::table::{
    BlockSlices, BlockSlicesMut, BlockTable, BlockTableMut, InOutTable, InTable,
};
pub use kernel::{Kernel, LaunchOn};
pub use memory::buffer::DeviceBuffer;
pub use memory::chunks::{Chunks, ChunksMut};
pub use memory::copy_2d::Copy2d;
pub use memory::frozen::Frozen;
pub use memory::host_slab::HostSlab;
pub use memory::mapped::Mapped;
pub use memory::pinned::{PinnedBuffer, PinnedFlag};
pub use memory::raw_slice::RawSlice;
pub use memory::reclaim::pressure::Pressure;
pub use memory::slab::{DeviceSlab, NamedBlocks, NamedBlocksMut};
pub use memory::view::{Extent, Readable, View, ViewMut, Writable};
pub use memory::view_2d::{Shape2, View2, ViewMut2};
pub use memory::{Element, MemoryInfo, Number};
pub use op::join::join_all;
pub use op::value::DeviceSide;
pub use op::{Op, Ticket};
pub use runtime::progress::Overlap;
pub use runtime::traced_op::TracedWork;
pub use serve::batcher::builder::BatcherBuilder;
pub use serve::batcher::running::{Batch, BatchTask};
pub use serve::batcher::worker::BatchWorker;
pub use serve::batcher::{Batcher, BatcherStats, Call};
pub use serve::pool::acquire::Acquire;
pub use serve::pool::builder::{PoolShare, StreamPoolBuilder};
pub use serve::pool::{
    Drained, DrainedWithin, PoolShareStats, PoolStats, PooledStream, PooledStreamState,
    PooledStreamStats, StreamPool,
};
#[cfg(feature = "tower")]
pub use serve::tower::{BatchService, PoolCall, PoolService};
#[cfg(target_os = "linux")]
pub use shared::{SharedBuffer, SharedDescriptors, SharedInfo};
pub use stream::scope::Scope;
pub use stream::{Marks, Stream};
pub use submit::{Append, RawQueue, Uses, WorkOutcome};
pub use timeline::DeviceTimeline;
pub use timeline::advice::Advice;
pub use timeline::gaps::{Gap, GapCause};
pub use timeline::report::{OpSummary, TraceReport};
pub use timeline::trace::{Trace, TracedOp, TracedStream};

/// The items that the expansion of `kernel!` uses; not part of the API.
#[doc(hidden)]
pub mod __private {
    pub use crate::kernel::declared::{Code, CudaCode, Declaration, Declared, erase};
    pub use crate::kernel::integers::{
        ArrayLen, AsUnsigned, FitInteger, FitValue, Named, NamedAny, NamedInteger, NamedValue,
        RowsLen, TableLen, evaluate, evaluate_all, fit, none,
    };
    pub use crate::kernel::plain::{Plain, Proof, element, proof};
}

/// The README's programs run as well.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
