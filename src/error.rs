//! What can go wrong, as plain data.
//!
//! An [`Error`] carries facts, not prose: [`Error::kind`] says what the caller can do next, and
//! [`Error::detail`] carries the numbers (asked, limit, free, the operation's name). Formatting
//! never enters the driver, so an error can be printed on a machine without one, and after the
//! device is lost.
//!
//! More than 500 lines: one enum, each variant with its facts and its message.
#![forbid(unsafe_code)]

pub(crate) mod admitter;
pub(crate) mod advice;
mod codes;
mod driver_code;
pub(crate) mod foreign;
pub(crate) mod image;
mod kind;
pub(crate) mod launch_limit;
pub(crate) mod piece;
pub(crate) mod refused;
pub(crate) mod reservation;
pub(crate) mod shared;
pub(crate) mod tensor;
pub(crate) mod unfinished;

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, OnceLock};

use admitter::Admitter;
use advice::{MemoryAdvice, leaked_suffix, operation, refused_suffix, shared_suffix, within};
pub use driver_code::DriverCode;
use foreign::ForeignError;
use image::{ImageProblem, NotProgrammatic, ParamLayout};
pub use kind::ErrorKind;
use launch_limit::{Axis, LaunchLimit, allowed};
use piece::PieceProblem;
use reservation::ReservationProblem;
use shared::SharedProblem;
use tensor::TensorProblem;
use unfinished::Unfinished;

/// The result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call or an operation failed: cheap to clone, plain data, `Send + Sync`.
///
/// # Examples
/// ```
/// use gpu_await::{Device, ErrorKind};
/// let device = Device::host();
/// let stream = device.stream()?;
/// let x = stream.upload(vec![1u32, 2, 3]).queued()?;
/// let error = x.slice(2..9).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidCall);
/// assert!(error.to_string().contains("2..9"));
/// # Ok::<(), gpu_await::Error>(())
/// ```
///
/// An error of an operation names the line that [called](Error::at) the verb. Two errors are equal if their facts are,
/// even if their lines differ.
#[derive(Clone)]
pub struct Error(Arc<Located>);

/// An error's facts and its line.
struct Located {
    detail: ErrorDetail,
    /// Set when the error leaves the call.
    at: OnceLock<&'static Location<'static>>,
}

impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        self.0.detail == other.0.detail
    }
}

impl Eq for Error {}

/// The facts of an [`Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are described by each variant")]
pub enum ErrorDetail {
    /// No driver library could be loaded.
    #[error(
        "no CUDA driver: {reason}; install NVIDIA's driver, or use a host device (`Device::cuda_or_host`)"
    )]
    NoDriver { reason: String },
    /// The driver exists but does not work, or not yet: the error it returned when a GPU was opened. The failure is not cached: the next
    /// call tries again.
    #[error(
        "the driver {library} does not work: {code}{}",
        codes::what_now(.code.code).map(|now| format!(": {now}")).unwrap_or_default()
    )]
    BrokenDriver { library: String, code: DriverCode },
    /// The crate was built without the `cuda` feature.
    #[error("this build has no CUDA support (feature `cuda` is off)")]
    NotBuilt,
    /// There is no device with this ordinal.
    #[error(
        "no CUDA device {ordinal}: {count} can be seen (`CUDA_VISIBLE_DEVICES` hides the others)"
    )]
    NoSuchDevice { ordinal: usize, count: usize },
    /// A device name cannot be parsed: the one that the caller passed, or the value of the environment variable `variable`.
    #[error(
        "{} is `{value}`: expected `auto`, `host`, `cuda` or `cuda:N`",
        .variable.map_or("the device name".to_owned(), |name| format!("the environment variable {name}"))
    )]
    BadDeviceName { variable: Option<&'static str>, value: String },
    /// A driver symbol is missing: the driver is older than this call needs.
    #[error("the driver has no `{symbol}`: it is older than this call needs; update it")]
    MissingSymbol { symbol: &'static str },
    /// The driver refused a call; `op` is the operation that made it, if any.
    #[error("{}{code}", operation(.op.as_deref()))]
    Driver { op: Option<Arc<str>>, code: DriverCode },
    /// A kernel image did not load; `log` is the JIT compiler's log.
    #[error("the kernel image `{image}` did not load ({problem}){}", log_suffix(.log))]
    BadImage { image: String, problem: ImageProblem, log: String },
    /// No run-time compiler for CUDA C++ could be loaded.
    #[error(
        "no NVRTC, which compiles CUDA C++ at run time: {reason}; looked for {}; install `nvidia-cuda-nvrtc-cu12` (pip), \
         `cuda-nvrtc` (conda-forge), `libnvrtc12` (Debian, Ubuntu) or the CUDA toolkit, and name the library or its folder in \
         `GPU_AWAIT_NVRTC` where the loader does not find it; PTX (`nvcc --ptx`, `Image::ptx`) needs none of it",
        .looked_for.join(", ")
    )]
    NoCompiler { looked_for: Vec<String>, reason: String },
    /// A library that a feature of this crate uses could not be loaded.
    #[error(
        "no {library}: {reason}; looked for {}; install {install}, or name the library or its folder in `{variable}`",
        .looked_for.join(", ")
    )]
    NoLibrary {
        library: &'static str,
        install: &'static str,
        variable: &'static str,
        looked_for: Vec<String>,
        reason: String,
    },
    /// CUDA C++ did not compile; `log` is the compiler's log, with line numbers.
    #[error("`{file}` does not compile ({reason}){}", log_suffix(.log))]
    Compile { file: String, reason: String, log: String },
    /// The image has no kernel with that name. `there` lists those of PTX, of cubins and of uncompressed fatbins.
    #[error("`{image}` has no kernel `{kernel}`{}", image::instead(.kernel, .there))]
    NoSuchKernel { image: String, kernel: String, there: Vec<String> },
    /// A kernel is declared with other parameters than it was compiled with: a different number, or different
    /// sizes or alignments. Drivers from CUDA 12.4 on report them.
    #[error(
        "kernel `{kernel}` is declared with {} parameters and was compiled with {} (cuFuncGetParamInfo): {}; \
         declare those of its source, in order, arrays and flags as pointers",
        .declared.len(), .compiled.len(), image::difference(.declared, .compiled)
    )]
    WrongParameters { kernel: String, declared: Vec<ParamLayout>, compiled: Vec<ParamLayout> },
    /// The kernel `kernel` is declared [`programmatic`](crate::kernel!), by the type `declaration`, but its code does not wait first.
    #[error("`{declaration}` declares kernel `{kernel}` programmatic, but {reason}")]
    NotProgrammatic { declaration: String, kernel: String, reason: NotProgrammatic },
    /// The kernel has no implementation for this kind of device.
    #[error("kernel `{kernel}` has no code for a {device} device: {}", missing_clause(.device))]
    NoImplementation { kernel: String, device: &'static str },
    /// A precondition of a kernel does not hold; nothing was launched.
    #[error("kernel `{kernel}` requires `{requirement}`, but {values}")]
    Precondition { kernel: String, requirement: &'static str, values: String },
    /// A derived argument of a kernel's declaration, `what`, has a value that its parameter cannot hold; nothing was launched.
    #[error(
        "kernel `{kernel}` computes {what} = {value}, but its parameter holds {least} to {most}"
    )]
    IntegerRange { kernel: String, what: &'static str, value: i128, least: i128, most: i128 },
    /// An expression of a kernel's declaration panicked, e.g. by a division by zero or an overflow; nothing was launched. `what` is a derived
    /// argument's name, `launch`, or a condition.
    #[error("kernel `{kernel}`: `{what}` of its declaration panicked: {message}")]
    Evaluation { kernel: String, what: &'static str, message: String },
    /// A launch exceeds a limit, or has a zero extent.
    #[error("kernel `{kernel}`: {what} is {asked}, but must be {}", allowed(*what, *limit))]
    LaunchLimit { kernel: String, what: LaunchLimit, asked: u64, limit: u64 },
    /// A grid is not a whole number of clusters along an axis.
    #[error(
        "kernel `{kernel}`: grid_dim.{axis} is {grid_dim}, not a multiple of cluster_dim.{axis}, {cluster_dim}"
    )]
    PartialCluster { kernel: String, axis: Axis, grid_dim: u32, cluster_dim: u32 },
    /// A buffer, stream or event of another device was passed.
    #[error(
        "{what} belongs to {found}, but what it is used with belongs to {}",
        owner(expected, found)
    )]
    WrongDevice { what: &'static str, expected: String, found: String },
    /// A handle of a foreign stream cannot be adopted.
    #[error("stream handle {handle:#x}: {reason}")]
    BadStream { handle: u64, reason: &'static str },
    /// Memory of another library cannot be adopted.
    #[error("{bytes} bytes at {ptr:#x} cannot be adopted: {problem}")]
    BadMemory { ptr: u64, bytes: u64, problem: MemoryProblem },
    /// [Memory of another process](crate::Device::import_shared) cannot be used here, or memory cannot be shared.
    #[error("the shared memory cannot be used: {problem}")]
    BadShared { problem: SharedProblem },
    /// A DLPack tensor cannot be adopted, or memory cannot be exported as one.
    #[error("the tensor cannot be passed on: {problem}")]
    BadTensor { problem: TensorProblem },
    /// Two lengths that must be equal are not (both in elements).
    #[error("{op}: the source has {source_len} elements, the destination {destination_len}")]
    LengthMismatch { op: &'static str, source_len: usize, destination_len: usize },
    /// A piece of a copy of many pieces cannot be copied with the others; `piece` is its index, from 0.
    #[error("{op}: piece {piece}: {problem}")]
    BadPiece { op: &'static str, piece: usize, problem: PieceProblem },
    /// A block of a slab was requested twice for writing: as number `first` and number `second` of a list.
    #[error(
        "block {block} is in the list twice, at {first} and {second}: it can be borrowed for writing once"
    )]
    RepeatedBlock { block: u32, first: usize, second: usize },
    /// An argument's length (in elements) is not the one that the operation or its plan requires.
    #[error("{op}: {what} has {found} elements, expected {expected}")]
    WrongLength { op: &'static str, what: &'static str, expected: usize, found: usize },
    /// A number in a formula of `transform!` does not fit the integer type that it is used with.
    #[error("{op}: {value} in the formula does not fit `{element}`")]
    LiteralOutOfRange { op: &'static str, value: i128, element: &'static str },
    /// An argument's address is not aligned as the operation or its plan requires.
    #[error(
        "{op}: {what} begins at {ptr:#x}, {} bytes behind a multiple of {alignment}: begin the view at such a multiple, or \
         copy it to a buffer of its own",
        .ptr % .alignment
    )]
    Misaligned { op: &'static str, what: &'static str, ptr: u64, alignment: u64 },
    /// The kernels of a selection of at most `most` elements reported a count of `found`: `u64::MAX` if they wrote none. Either a defect of
    /// this crate, or something else wrote to its memory; do not use the selected elements.
    #[error(
        "{op}: {found} of {most} elements were counted: a defect of this crate, or memory was overwritten; please report it"
    )]
    BadCount { op: &'static str, found: u64, most: usize },
    /// A range exceeds its buffer, or the rows or columns of a view; `unit` says what it counts.
    #[error("range {start}..{end} is out of bounds: there are {len} {unit}")]
    OutOfBounds { start: usize, end: usize, len: usize, unit: &'static str },
    /// Bytes cannot be reinterpreted as elements of another type: their number or alignment does not fit.
    #[error(
        "{bytes} bytes from byte {start} on are not a whole number of {element_bytes}-byte elements aligned to {alignment}"
    )]
    Reinterpret { start: u64, bytes: u64, element_bytes: usize, alignment: usize },
    /// Rows of a 2-D copy overlap: the pitch is less than the width (both in elements).
    #[error("{op}: rows of {width} elements overlap at a pitch of {pitch}")]
    Pitch { op: &'static str, width: usize, pitch: usize },
    /// The number of elements is not a whole number of rows.
    #[error("{len} elements are not a whole number of rows of {columns}")]
    Ragged { len: usize, columns: usize },
    /// A length in bytes does not fit the address space; `len` is `usize::MAX` if the number of elements does not either.
    #[error("{} elements of {element_bytes} bytes do not fit in memory", counted(*.len))]
    TooLarge { len: usize, element_bytes: usize },
    /// The host computes the value when the operation completes; it is only available by awaiting.
    #[error("{op}: the value is made by the host; await it")]
    HostValue { op: &'static str },
    /// The operation cannot be part of a [`Graph`](crate::Graph).
    #[error(
        "{op} cannot be a part of a graph: launches, fills and copies within the device can (kernels that wait for a \
         flag, are cooperative or have clusters cannot), events by `Event::record_in`, and work that `Uses::can_be_captured` \
         without lent memory; put it on the stream around the graph, or use `replay`"
    )]
    NotInGraph { op: Arc<str> },
    /// A [`Graph`](crate::Graph) uses the memory in each of its launches.
    #[error("{op}: a graph uses this memory in each of its launches; drop the graph first")]
    KeptByGraph { op: &'static str },
    /// The call would read memory that nothing has written since it was allocated: a copy, a kernel (also
    /// through a `&mut [T]`), or a pitched copy that leaves the gaps between its rows.
    #[error(
        "{op} may read bytes {start}..{end} of a buffer that nothing has written yet: write them first (`zeros`, `fill`; a kernel \
         that overwrites all of it declares `Out<[T]>`, or `Out<[[T]]>` for rows without gaps; an enqueue, `Uses::writes`)"
    )]
    Unwritten { op: Arc<str>, start: u64, end: u64 },
    /// The operation reads data that depends on the output of `producer`, which failed with `cause`. However many operations were refused in
    /// between, `producer` is the first. [`Error::at`] is the line of `op`, and that of `cause` the producer's.
    #[error("{op} depends on the output of {producer}, which failed: {cause}")]
    Upstream { op: Arc<str>, producer: Arc<str>, cause: Error },
    /// In verify mode: the operation that failed. [`Error::at`] is where it was submitted.
    #[error("{op} failed: {cause}")]
    Verify { op: Arc<str>, cause: Error },
    /// Another device, `device`, was lost, and this operation, the memory that it uses, or earlier work on its stream waits
    /// for that device: the work passes data on, or was ordered with [`wait`](crate::Stream::wait).
    ///
    /// The operation's own device works. A wait that is already on a stream never ends: everything after it on that stream fails in the same way, and
    /// nothing more is submitted there. Memory used by such work stays in use for ever: if the work only reads it, it can be read, but not
    /// overwritten. Drop the stream and that memory, and make new ones. An operation on another stream that would wait for any of this is refused,
    /// and its stream stays usable. [`Error::is_device_lost`] is false.
    #[error(
        "this operation waits for {device}, which was lost: {cause}; if only this call would have waited, it was refused, and its stream and buffers go \
         on; a stream that already waits takes no more: make a new one on this device, and new buffers for those that its work uses"
    )]
    DependencyLost { device: String, cause: Error },
    /// A submission, a blocking wait or a driver call on a thread where it would deadlock or the driver
    /// refuses it: inside a host function, a kernel's host twin or a waker. Return what you need from the
    /// host function and continue in the task that awaits it.
    #[error("{what} is not possible on {thread}: do it in the task that awaits the work")]
    WrongThread { what: &'static str, thread: &'static str },
    /// An event was used in a way that it was not made for, or too early.
    #[error("{which} {problem}")]
    Event { which: &'static str, problem: EventProblem },
    /// A call of another library inside [`enqueue`](crate::Stream::enqueue) failed with `cause`, which is the
    /// [`source`](std::error::Error::source). Memory that the operation declared as written counts as failed. Programs
    /// use it [for their own errors](crate::guide::graphs).
    #[error("{op}: {cause}")]
    Foreign { op: Arc<str>, cause: ForeignError },
    /// The closure passed to [`enqueue`](crate::Stream::enqueue) panicked. Memory that the operation declared
    /// as written counts as failed.
    #[error("the closure that enqueued {op} panicked: {message}")]
    EnqueuePanicked { op: Arc<str>, message: String },
    /// Device memory ran out. All figures in bytes, as in [`MemoryInfo`](crate::MemoryInfo).
    ///
    /// The allocation takes a block of `asked_bytes`, rounded up to a multiple of 512. Free, allocated, pending, kept, leaked and shared bytes
    /// add up to the limit, or to less if others use the device as well. `reclaimable_bytes` are pending, or kept by a stream that still uses
    /// them: they are freed without a buffer being dropped.
    /// `budgeted_bytes` are the unused part of other [reservations](crate::Device::reserve), for their allocations only, and not free;
    /// [`MemoryInfo`](crate::MemoryInfo) reports their sum separately.
    /// `driver_refused`: there is room within the limit, but the driver refused, even after its pool returned what
    /// it does not use: others use the device, or free memory is fragmented and the device is full. `advice` says what helps.
    #[error(
        "{op} on {device}: out of device memory: asked {asked_bytes} bytes, {free_bytes} free {}; buffers hold \
         {allocated_bytes}, {pending_bytes} pending, {kept_bytes} kept{}{}{}: {}",
        within(*.limit_bytes, *.total_bytes), leaked_suffix(*.leaked_bytes), shared_suffix(*.shared_bytes, *.budgeted_bytes),
        refused_suffix(*.driver_refused),
        .advice.text(*.limit_bytes, *.allocated_bytes)
    )]
    OutOfMemory {
        op: Arc<str>,
        device: String,
        asked_bytes: u64,
        advice: MemoryAdvice,
        driver_refused: bool,
        reclaimable_bytes: u64,
        allocated_bytes: u64,
        pending_bytes: u64,
        kept_bytes: u64,
        leaked_bytes: u64,
        shared_bytes: u64,
        budgeted_bytes: u64,
        free_bytes: u64,
        total_bytes: u64,
        limit_bytes: Option<u64>,
    },
    /// Memory could not be [reserved](crate::Device::reserve), or an allocation could not draw from a reservation.
    #[error("{asked_bytes} bytes of a reservation on {device}: {problem}")]
    Reservation { device: String, asked_bytes: u64, problem: ReservationProblem },
    /// Pinned host memory could not be allocated.
    #[error("out of pinned host memory: asked {asked_bytes} bytes ({reason})")]
    OutOfPinnedMemory { asked_bytes: u64, reason: String },
    /// Ordinary host memory for a result could not be allocated.
    #[error("out of host memory: asked {asked_bytes} bytes")]
    OutOfHostMemory { asked_bytes: u64 },
    /// Too many requests are in flight, and no more may wait.
    #[error(
        "{by} is full: {in_flight} of {limit} in flight, {waiting} waiting of at most {max_waiting}; retry later"
    )]
    Overloaded { by: Admitter, in_flight: u64, limit: u64, waiting: u64, max_waiting: u64 },
    /// A request cannot be answered by its deadline, judging by what requests took lately: refused at once, or under overload
    /// because newer ones go first. `expected_us` is the wait, `takes_us` how long the request is then likely to take: together they exceed the
    /// time left.
    #[error(
        "{by} cannot answer in time: {}; with {waiting} waiting, a request waits about {expected_us} µs and then takes {takes_us} µs; retry {}",
        match .remaining_us {
            0 => "the deadline has passed".to_owned(),
            left => format!("{left} µs are left"),
        },
        match .remaining_us {
            0 => "with a later deadline",
            _ => "later, or elsewhere",
        }
    )]
    TooLate { by: Admitter, remaining_us: u64, expected_us: u64, takes_us: u64, waiting: u64 },
    /// A request waited until its deadline, with no time left (its kind is `TimedOut`), or until less time was left than it is
    /// likely to take (`takes_us`; `Overloaded`). It never reached the device.
    #[error(
        "{by} did not admit a request in time: it waited {waited_us} µs{}; {waiting} wait; retry later, or elsewhere",
        match .takes_us {
            0 => ", until its deadline".to_owned(),
            _ => format!(" and has {remaining_us} µs left of the {takes_us} µs that it is likely to take"),
        }
    )]
    Expired { by: Admitter, waited_us: u64, remaining_us: u64, takes_us: u64, waiting: u64 },
    /// A pool has no share with that name.
    #[error("{by} has no share `{name}`: declare it with `StreamPoolBuilder::share`")]
    NoSuchShare { by: Admitter, name: String },
    /// There are fewer of something than required.
    #[error("{what}: {found}, at least {least} needed")]
    TooFew { what: &'static str, found: u64, least: u64 },
    /// A batch did not get one reply for each request.
    #[error(
        "a batch of {requests} requests got {replies} replies: return one for each request, in order"
    )]
    Replies { requests: usize, replies: usize },
    /// The closure that ran a batch panicked.
    #[error("the closure of a batch of {requests} requests panicked: {message}")]
    BatchPanicked { requests: usize, message: String },
    /// A time limit passed: that of [`Device::close`](crate::Device::close) or
    /// [`StreamPool::drained_within`](crate::StreamPool::drained_within), with what is left.
    #[error(
        "{what} did not finish within {limit_ms} ms: {left}; that goes on, and a later call can wait for it"
    )]
    TimedOut { what: String, limit_ms: u64, left: Unfinished },
    /// This device cannot do what was asked.
    #[error("{what} is not supported by {device}")]
    Unsupported { what: &'static str, device: String },
    /// This device lacks what a feature requires.
    #[error("{what} requires {requirement}, which {device} does not have")]
    Requires { what: &'static str, requirement: &'static str, device: String },
    /// The context of an [adopted](crate::Stream::from_raw) stream was destroyed by its owner. The stream takes no more work, and pending
    /// work may or may not have run, so waiting for all of the device's streams can fail with this error too. The device and its other
    /// streams go on.
    #[error(
        "the context of the adopted stream was destroyed ({code}): the stream takes no more work, and what was pending on it may have run \
         or not; {device} goes on. Its owner is to keep the context as long as the stream is used"
    )]
    StreamDetached { device: String, code: DriverCode },
    /// A [partition](crate::Device::reserve_partition) of this many multiprocessors was requested, but only `free` of `all` are in none. The
    /// kind is [`Overloaded`](ErrorKind::Overloaded), or [`Unsupported`](ErrorKind::Unsupported) if there will never be as many.
    #[error(
        "a partition of {asked} multiprocessors of {device}, which has {all} to divide, of which {free} are in no partition: {}",
        if .asked > .all { "ask for fewer" } else { "drop another partition and its streams, or ask for fewer" }
    )]
    NoPartition { device: String, asked: u32, free: u32, all: u32 },
    /// The system refuses a thread.
    #[error(
        "the system refuses a thread for {what}: raise its limit (`ulimit -u`, `pids.max` of the control group), or use fewer devices and streams, which have threads as well"
    )]
    NoThread { what: &'static str },
    /// The device faulted or was lost; sticky for the life of the process.
    #[error("{device} is lost: {cause}{}", what_now(.cause))]
    DeviceLost { device: String, cause: LossCause },
    /// The device was closed.
    #[error("{device} was closed")]
    Closed { device: String },
    /// `main` has returned or `exit` was called: calls that need a thread or the driver are refused, and pending
    /// operations fail, because the driver may be gone. This starts with an `atexit` handler that the first devices
    /// register: handlers that were registered later run before it, while everything still works.
    #[error("the process is ending: {what} is refused")]
    ProcessEnding { what: &'static str },
    /// The device, pool or batcher was made by the process that this one was forked from; or the call was pending at the fork, or
    /// needs a thread of that process.
    #[error("{device} belongs to the process that this one was forked from: open a device here")]
    Forked { device: String },
}

/// Why an event cannot be used that way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum EventProblem {
    /// It records no time stamps.
    #[error("was not recorded with timing: use `record_timed`, or `event_builder().timed(true)`")]
    Untimed,
    /// It was never recorded.
    #[error("was never recorded")]
    Unrecorded,
    /// It was recorded after the event that ends the interval.
    #[error("was recorded after the end event: swap the two")]
    BehindEnd,
    /// Its stream has not reached it yet.
    #[error("is not complete yet: await it first")]
    Incomplete,
    /// It cannot both be shared between processes and record time stamps.
    #[error("cannot be both interprocess and timed")]
    InterprocessTimed,
    /// It was not made to be shared between processes.
    #[error("is not interprocess: use `event_builder().interprocess(true)`")]
    NotInterprocess,
}

/// Why memory of another library cannot be adopted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryProblem {
    /// The address is null, and the range is not empty.
    #[error("its address is null, which only a range of no elements may have")]
    Null,
    /// The device has no memory there: the driver does not know it, or the range exceeds the address space.
    #[error("the device has no memory there; host memory has to be uploaded or pinned")]
    NotDeviceMemory,
    /// The address is not a multiple of the element's alignment.
    #[error("the address is not aligned to {alignment} bytes")]
    Misaligned {
        /// The alignment of the element type, in bytes.
        alignment: usize,
    },
    /// The range exceeds the allocation that contains its address.
    #[error("its allocation is {bytes} bytes at {start:#x}")]
    OutOfBounds {
        /// The start of the allocation.
        start: u64,
        /// The length of the allocation.
        bytes: u64,
    },
}

/// Why a device was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossCause {
    /// A driver call returned a sticky code (e.g. 700, an illegal address).
    Driver(DriverCode),
    /// A kernel's host twin panicked or touched memory that was not its own.
    Host(String),
    /// A test lost the device on purpose.
    Injected(String),
}

impl Error {
    /// Returns what the caller can do next.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.detail.kind()
    }

    /// Returns the line of the program that called the failed verb: of a [`Stream`](crate::Stream), a [`Device`](crate::Device), a
    /// [`Queue`](crate::Queue), a kernel, a graph or a plan. `None` for an error that a future finds on its own, such as the loss of the
    /// device while the work was pending, and for `async` calls.
    ///
    /// A wrapper function with `#[track_caller]` passes on its caller's line. For an [`ErrorDetail::Upstream`] this is where the reader was
    /// submitted, and its `cause` has the line of the operation that failed first, unless the cause is the loss of a device, which many
    /// operations share.
    ///
    /// # Examples
    /// ```
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.empty::<f32>(4).queued()?;
    /// let error = stream.download(&x).synchronize().unwrap_err(); // nothing was written there
    /// assert_eq!(error.at().map(|at| at.line()), Some(line!() - 1));
    /// # Ok::<(), gpu_await::Error>(())
    /// ```
    #[must_use]
    pub fn at(&self) -> Option<&'static Location<'static>> {
        self.0.at.get().copied()
    }

    /// The same facts without a line: for another call, or for a call that the program did not make itself.
    #[cold]
    pub(crate) fn without_line(&self) -> Self {
        self.0.detail.clone().into()
    }

    /// The error of a call at this line, unless it already has one.
    #[cold]
    pub(crate) fn called_at(self, at: &'static Location<'static>) -> Self {
        use ErrorDetail as D;
        let detail = match &self.0.detail {
            _ if self.at().is_some() => return self,
            // The device keeps this error for many calls, so the line goes into a copy.
            D::DeviceLost { .. }
            | D::DependencyLost { .. }
            | D::Forked { .. }
            | D::ProcessEnding { .. } => self.0.detail.clone(),
            _ => {
                self.0.at.get_or_init(|| at);
                return self;
            }
        };
        Error(Arc::new(Located { detail, at: at.into() }))
    }

    /// Returns the facts.
    #[must_use]
    pub fn detail(&self) -> &ErrorDetail {
        &self.0.detail
    }

    /// Whether both are the same failure, not just equal.
    pub(crate) fn is(&self, other: &Error) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns whether the operation's own device is lost: the process cannot use that device any more.
    ///
    /// False for [`ErrorDetail::DependencyLost`], whose kind is [`ErrorKind::DeviceLost`] too: there another
    /// device was lost, and this one works; make a new stream on it and go on. For an
    /// [`ErrorDetail::Upstream`] it refers to the device of the operation that failed first, which may be a different one: check
    /// [`Device::lost`](crate::Device::lost) of the device that you would replace.
    #[must_use]
    pub fn is_device_lost(&self) -> bool {
        match self.detail() {
            ErrorDetail::DeviceLost { .. } => true,
            ErrorDetail::Upstream { cause, .. } | ErrorDetail::Verify { cause, .. } => {
                cause.is_device_lost()
            }
            _ => false,
        }
    }
}

impl Error {
    /// Whether it contains an error of another library, whose drop is foreign code.
    pub(crate) fn is_foreign(&self) -> bool {
        match &self.0.detail {
            ErrorDetail::Upstream { cause, .. }
            | ErrorDetail::DependencyLost { cause, .. }
            | ErrorDetail::Verify { cause, .. } => cause.is_foreign(),
            ErrorDetail::Foreign { .. } => true,
            _ => false,
        }
    }
}

impl From<ErrorDetail> for Error {
    fn from(detail: ErrorDetail) -> Self {
        Error(Arc::new(Located { detail, at: OnceLock::new() }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detail = &self.0.detail;
        match (self.at(), detail) {
            (Some(at), ErrorDetail::Upstream { op, producer, cause }) => {
                write!(f, "{op} at {at} depends on the output of {producer}, which failed: {cause}")
            }
            (Some(at), _) => write!(f, "{detail} (at {at})"),
            (None, _) => fmt::Display::fmt(detail, f),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The text that `fn main() -> Result<()>` and `unwrap` show.
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.detail {
            ErrorDetail::Upstream { cause, .. }
            | ErrorDetail::DependencyLost { cause, .. }
            | ErrorDetail::Verify { cause, .. } => Some(cause),
            ErrorDetail::Foreign { cause, .. } => Some(&**cause),
            _ => None,
        }
    }
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LossCause::Driver(code) => code.fmt(f),
            LossCause::Host(what) | LossCause::Injected(what) => f.write_str(what),
        }
    }
}

fn owner(expected: &str, found: &str) -> String {
    if expected != found {
        return expected.to_owned();
    }
    // A GPU that was opened more than once.
    format!("another device that was opened as {expected}: open it once, and clone that")
}

/// A number of elements that may have exceeded what can be counted.
fn counted(len: usize) -> String {
    if len == usize::MAX { format!("{len} or more") } else { len.to_string() }
}

/// The missing clause of `kernel!`, or its substitute.
fn missing_clause(device: &str) -> &'static str {
    match device {
        "host" => "give its declaration `host = twin`, a Rust function",
        _ => "give its declaration `ptx = ..` or `cuda = ..`",
    }
}

fn what_now(cause: &LossCause) -> &'static str {
    match cause {
        LossCause::Driver(_) => {
            "; no call brings it back in this process; GPU_AWAIT_VERIFY=1 finds the operation that faults"
        }
        LossCause::Host(_) | LossCause::Injected(_) => "",
    }
}

fn log_suffix(log: &str) -> String {
    let log = log.trim();
    if log.is_empty() { String::new() } else { format!("\n{log}") }
}
