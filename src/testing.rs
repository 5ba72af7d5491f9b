//! Tools for testing GPU code without a GPU and without sleeping.
//!
//! | tool | what for |
//! |---|---|
//! | [`device`] | the device that the tests run on: host, or the one in `GPU_AWAIT_TEST_DEVICE` |
//! | [`builder`] | the options of that device, for tests that add their own, such as [`DeviceBuilder::general_images`] |
//! | [`Gate`] | holds a stream until the test opens it |
//! | [`faults`] | a device whose driver calls are recorded and fail on request |
//! | [`manual`] | a host device without threads, which runs only when it is stepped |
//!
//! # tokio's paused clock
//! Under `tokio::time::pause` (tokio's feature `test-util`, on a current-thread runtime) use [`manual`]. Any other device runs in real
//! time, which the paused clock does not wait for: a `timeout` of an hour elapses at once, because the runtime sees nothing to do.
//!
//! More than 500 lines: tools for tests in one place, half of it docs.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gpu_await_protocol::lock::Mutex;

use crate::backend::Backend;
#[cfg(feature = "cuda")]
use crate::backend::DeviceKind;
#[cfg(feature = "cuda")]
use crate::backend::cuda::standstill::Closed;
use crate::backend::fault::{Control, Wrapper};
use crate::backend::host::HostBackend;
use crate::device::Device;
use crate::device::builder::DeviceBuilder;
use crate::error::refused::Here;
use crate::error::{ErrorDetail, ErrorKind, Result};
use crate::kernels;
use crate::memory::pinned::PinnedFlag;
use crate::runtime::engine::EngineOptions;
use crate::runtime::stream_state::StreamState;
use crate::stream::Stream;
use crate::thread::contain;
use crate::thread::role;
use crate::thread::role::Role;
use gpu_await_protocol::cadence::Completion;

/// The environment variable that names the device for tests.
pub const TEST_DEVICE: &str = "GPU_AWAIT_TEST_DEVICE";

/// The environment variable that chooses the kernel images of the device for tests: `general` for those
/// of [`DeviceBuilder::general_images`].
pub const TEST_IMAGES: &str = "GPU_AWAIT_TEST_IMAGES";

/// A builder with the test options from the environment: [`TEST_IMAGES`].
///
/// # Panics
/// If the variable is set to anything but `general`.
pub fn builder() -> DeviceBuilder {
    match std::env::var(TEST_IMAGES) {
        Ok(images) if images == "general" => Device::builder().general_images(true),
        Ok(images) => panic!("{TEST_IMAGES} is `{images}`: expected `general`"),
        Err(_) => Device::builder(),
    }
}

/// Opens the device that tests run on: the one named by [`TEST_DEVICE`], else a host device.
///
/// Only one test thread at a time uses a GPU: another thread waits here until the first one's devices and
/// streams are dropped.
///
/// # Panics
/// If the requested device does not exist: tests are never skipped.
#[must_use]
pub fn device() -> Device {
    device_with(Completion::default())
}

/// [`device`] with the given way of detecting completions.
///
/// # Panics
/// As [`device`].
#[must_use]
pub fn device_with(completion: Completion) -> Device {
    let name = std::env::var(TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    open(&name, completion)
}

fn open(name: &str, completion: Completion) -> Device {
    let turn = name.starts_with("cuda").then(turn::GpuTurn::take);
    let opened = builder().completion(completion).named(name).and_then(|device| {
        let home = device.default_stream().home();
        if let Some(turn) = turn {
            home.get_or_load(|| Ok::<_, crate::Error>(turn))?;
        }
        // Before any work runs on it, see `Gate::close_for`.
        home.get_or_load(|| kernels::load_gate(home))?;
        Ok(device)
    });
    match opened {
        Ok(device) => device,
        Err(error) => panic!("{TEST_DEVICE} asks for `{name}`: {error}"),
    }
}

/// Opens another device of the same kind as [`device`]: the second GPU if there is one, else the same GPU
/// again; or another host device.
///
/// # Panics
/// As [`device`].
#[must_use]
pub fn peer_device() -> Device {
    if std::env::var(TEST_DEVICE).is_ok_and(|name| name.starts_with("cuda")) && Device::count() > 1
    {
        open("cuda:1", Completion::default())
    } else {
        device()
    }
}

/// One test at a time on a GPU: on an H200, a stream held by a gate was sometimes seen to keep other streams of the
/// process from starting (they share the GPU's few queues and the driver's locks), so concurrent
/// tests with gates fail at random.
mod turn {
    use std::thread::ThreadId;
    use std::time::{Duration, Instant};

    use gpu_await_protocol::lock::{Condvar, Mutex};

    struct Turns {
        owner: Option<ThreadId>,
        devices: u32,
    }

    static STATE: Mutex<Turns> = Mutex::new(Turns { owner: None, devices: 0 });
    static CHANGED: Condvar = Condvar::new();
    /// Limits the wait for a test that leaked its device.
    const LIMIT: Duration = Duration::from_secs(100);

    /// Held by a device for tests; a thread may have several.
    pub(super) struct GpuTurn(());

    impl GpuTurn {
        pub(super) fn take() -> GpuTurn {
            let this = std::thread::current().id();
            let end = Instant::now() + LIMIT;
            let mut state = STATE.lock();
            while state.devices > 0 && state.owner != Some(this) {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                state = CHANGED.wait_for(state, left);
            }
            state.owner = Some(this);
            state.devices += 1;
            GpuTurn(())
        }
    }

    impl Drop for GpuTurn {
        fn drop(&mut self) {
            STATE.lock().devices -= 1;
            CHANGED.notify_all();
        }
    }
}

/// The value that the kernel leaves in a gate's word when the time limit opened it.
const TIMED_OUT: u32 = 2;
/// As `TIMED_OUT`, and the warning was emitted.
const TOLD: u32 = 3;

/// Holds a stream until it is opened: everything submitted after it waits.
///
/// It cannot be used in [verify mode](crate::DeviceBuilder::verify), where closing it would wait for it.
///
/// Load kernels before closing a gate: on a GPU, loading waits for everything that is running. For that reason, and
/// because a GPU has few queues, closing a gate waits while another device of the same process has a closed
/// gate or loads a kernel.
///
/// It is a kernel that watches a word (never a driver wait on a value: eight of those freeze a
/// process). On a host device a closed gate takes about a quarter of a core for that.
///
/// It opens when dropped, and when its time limit passes, which its kernel measures from its own start; in the latter case
/// [`open`](Self::open) or the drop logs `tracing::warn!`, once. A gate opened by its limit holds up nothing.
#[derive(Debug)]
pub struct Gate {
    word: Arc<PinnedFlag>,
    limit: Duration,
    /// Keeps kernel loads of other tests from waiting for this gate inside the driver.
    #[cfg(feature = "cuda")]
    closed: gpu_await_protocol::lock::Mutex<Option<Closed>>,
}

impl Gate {
    /// The longest time that a gate can stay closed.
    pub const LIMIT: Duration = Duration::from_secs(20);

    /// Closes a gate on `stream`, for at most [`LIMIT`](Self::LIMIT).
    ///
    /// # Errors
    /// A device that is lost or closed.
    #[track_caller]
    pub fn close(stream: &Stream) -> Result<Gate> {
        Gate::close_for(stream, Gate::LIMIT)
    }

    /// Closes a gate on `stream` for at most `limit`.
    ///
    /// # Errors
    /// A device that is lost or closed.
    #[track_caller]
    pub fn close_for(stream: &Stream, limit: Duration) -> Result<Gate> {
        role::check("closing a gate").here()?;
        let home = stream.home();
        // Once per device: loading code may wait for running work, such as another gate.
        let kernel = home.get_or_load(|| kernels::load_gate(home))?;
        let word = Arc::new(PinnedFlag::new(&home.pinned)?);
        #[cfg(feature = "cuda")]
        let closed = (home.engine.backend.kind() == DeviceKind::Cuda).then(|| {
            let (word, device) = (Arc::downgrade(&word), home.engine.state.clone());
            let is_open = move || {
                device.lost().is_some() || word.upgrade().is_none_or(|word| word.get() != 0)
            };
            Closed::begin(home.engine.state.id, is_open)
        });
        let timeout_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        kernel.launch(stream, &word, timeout_ns).queued()?;
        Ok(Gate {
            word,
            limit,
            #[cfg(feature = "cuda")]
            closed: gpu_await_protocol::lock::Mutex::new(closed),
        })
    }

    /// Opens the gate: the work behind it proceeds.
    pub fn open(&self) {
        let is_late = self.word.compare_exchange(0, 1) == Err(TIMED_OUT);
        if is_late && self.word.compare_exchange(TIMED_OUT, TOLD).is_ok() {
            contain::log(
                || tracing::warn!(limit = ?self.limit, "a gate was opened by its time limit"),
            );
        }
        #[cfg(feature = "cuda")]
        drop(self.closed.lock().take());
    }

    /// Returns whether its time limit opened it; meaningful once the stream has passed it.
    #[must_use]
    pub fn timed_out(&self) -> bool {
        matches!(self.word.get(), TIMED_OUT | TOLD)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

/// A driver call of the backend that can be made to fail. Calls are counted, not operations: a verb that
/// needs an allocation, a copy and a marker makes one of each kind, one that finds memory or an event in a
/// cache or pool makes no call for it, and a copy in parts makes one per part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each is a function of the driver")]
pub enum DriverCall {
    StreamCreate,
    StreamWaitEvent,
    StreamDestroy,
    EventCreate,
    EventDestroy,
    EventRecord,
    EventQuery,
    EventRecordAll,
    WriteWord,
    HostFn,
    /// The bracket around the closure of [`enqueue`](crate::Stream::enqueue).
    Foreign,
    Alloc,
    Free,
    Register,
    Unregister,
    CopyToDevice,
    CopyToHost,
    CopyOnDevice,
    CopyRows,
    Fill,
    Launch,
    GraphCapture,
    GraphCompile,
    GraphSet,
    GraphLaunch,
}

impl DriverCall {
    fn name(self) -> &'static str {
        match self {
            DriverCall::StreamCreate => "stream_create",
            DriverCall::StreamWaitEvent => "stream_wait_event",
            DriverCall::StreamDestroy => "stream_destroy",
            DriverCall::EventCreate => "event_create",
            DriverCall::EventDestroy => "event_destroy",
            DriverCall::EventRecord => "event_record",
            DriverCall::EventQuery => "event_query",
            DriverCall::EventRecordAll => "event_record_all",
            DriverCall::WriteWord => "write_word",
            DriverCall::HostFn => "host_fn",
            DriverCall::Foreign => "foreign",
            DriverCall::Alloc => "alloc",
            DriverCall::Free => "free",
            DriverCall::Register => "register",
            DriverCall::Unregister => "unregister",
            DriverCall::CopyToDevice => "copy_to_device",
            DriverCall::CopyToHost => "copy_to_host",
            DriverCall::CopyOnDevice => "copy_on_device",
            DriverCall::CopyRows => "copy_rows",
            DriverCall::Fill => "fill",
            DriverCall::Launch => "launch",
            DriverCall::GraphCapture => "graph_capture",
            DriverCall::GraphCompile => "graph_compile",
            DriverCall::GraphSet => "graph_set",
            DriverCall::GraphLaunch => "graph_launch",
        }
    }
}

/// Records a device's calls and makes them fail; passed to [`host_with`].
#[derive(Default)]
pub struct Faults {
    control: Arc<Control>,
    block_cache_bytes: u64,
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults")
            .field("spare_bytes_per_stream", &self.block_cache_bytes)
            .finish_non_exhaustive()
    }
}

/// Decides which calls fail, while the device runs.
#[derive(Clone)]
pub struct FaultHandle(Arc<Control>);

impl fmt::Debug for FaultHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultHandle").finish_non_exhaustive()
    }
}

/// Makes a wrapper for a device's calls, and the handle that controls it.
///
/// # Examples
/// ```
/// use gpu_await::{ErrorKind, testing};
/// let (faults, handle) = testing::faults();
/// let device = testing::host_with(faults);
/// let stream = device.stream()?;
/// handle.fail_nth(testing::DriverCall::Alloc, 2, ErrorKind::OutOfMemory);
/// let first = stream.zeros::<u8>(10).queued()?;
/// // The second allocation fails; the runtime frees what it can and tries once more.
/// let second = stream.zeros::<u8>(10).queued()?;
/// # Ok::<(), gpu_await::Error>(())
/// ```
#[must_use]
pub fn faults() -> (Faults, FaultHandle) {
    let control = Arc::new(Control::default());
    (Faults { control: control.clone(), block_cache_bytes: 0 }, FaultHandle(control))
}

impl Faults {
    /// Sets how much freed memory each stream of the device caches; none by default, so that each buffer is
    /// an allocation. See
    /// [`DeviceBuilder::spare_bytes_per_stream`](crate::DeviceBuilder::spare_bytes_per_stream).
    #[must_use]
    pub fn spare_bytes_per_stream(mut self, bytes: u64) -> Self {
        self.block_cache_bytes = bytes;
        self
    }
}

/// Opens a host device whose calls are recorded and can fail.
///
/// It registers pinned memory only in the calls that need it, not in the background as other devices
/// do: which call is the `nth` depends on the test alone.
///
/// # Panics
/// If the system refuses a thread.
#[must_use]
pub fn host_with(faults: Faults) -> Device {
    watched(Arc::new(HostBackend::new(None, true)), faults, EngineOptions::default())
}

/// [`host_with`] with the given way of detecting completions.
///
/// # Panics
/// If the system refuses a thread.
#[must_use]
pub fn host_with_completion(faults: Faults, completion: Completion) -> Device {
    Device::builder().completion(completion).host_with(faults)
}

impl DeviceBuilder {
    /// Makes the device use this crate's general kernels, as PTX that the driver compiles, even if there
    /// is machine code for the GPU: for algorithms, formulas, fills and copies. On a host device it changes nothing.
    ///
    /// A GPU of compute capability 9.0, on which most tests run, never uses them otherwise.
    pub fn general_images(mut self, general: bool) -> Self {
        self.general_images = general;
        self
    }

    /// Sets how many elements a launch of a selection or of
    /// `run_length_encode` (of `gpu-await-algorithms`) takes at most, in whole tiles and at least one;
    /// by default about 2^30. An array of a few million elements is then cut like one of many gigabytes. On
    /// a host device it changes nothing.
    pub fn part_of_selections(mut self, elements: u32) -> Self {
        self.part_of_selections = Some(elements);
        self
    }

    /// [`host_with`] with these options, such as a memory limit or verify mode.
    ///
    /// # Panics
    /// If the system refuses a thread.
    #[must_use]
    pub fn host_with(self, faults: Faults) -> Device {
        let faults = match self.spare_bytes_per_stream {
            Some(bytes) => faults.spare_bytes_per_stream(bytes),
            None => faults,
        };
        let backend = HostBackend::new(self.host_memory_bytes, true);
        watched(Arc::new(backend), faults, self.options())
    }
}

fn watched(inner: Arc<dyn Backend>, faults: Faults, options: EngineOptions) -> Device {
    // Tests expect exactly the driver calls that they cause.
    let options = EngineOptions {
        block_cache_bytes: faults.block_cache_bytes,
        pins_on_demand: true,
        ..options
    };
    match Device::open(Arc::new(Wrapper::new(inner, faults.control)), options) {
        Ok(device) => device,
        Err(error) => panic!("a device for tests: {error}"),
    }
}

impl FaultHandle {
    /// Makes the `nth` call of a kind from now (1 is the next) fail, without effect, with a driver code that is
    /// reported as `kind`: [`OutOfMemory`](ErrorKind::OutOfMemory), [`InvalidCall`](ErrorKind::InvalidCall) (800,
    /// the driver's answer inside a host function), [`Unsupported`](ErrorKind::Unsupported) or
    /// [`DeviceLost`](ErrorKind::DeviceLost), or for any other kind, as
    /// [`Driver`](ErrorKind::Driver). Every call of that kind to the device's backend counts: those of the
    /// test, and those that the runtime makes for itself, such as a marker's `EventRecord` or the poller's
    /// `EventQuery`. Earlier calls do not count.
    pub fn fail_nth(&self, call: DriverCall, nth: u64, kind: ErrorKind) {
        self.0.fail(call.name(), nth, code_for(kind), false);
    }

    /// Like [`fail_nth`](Self::fail_nth), but the call has taken effect when it reports failure.
    pub fn fail_nth_after_effect(&self, call: DriverCall, nth: u64, kind: ErrorKind) {
        self.0.fail(call.name(), nth, code_for(kind), true);
    }

    /// Loses the device: from now on every driver call on it fails, as after a kernel's fault. As with a fault, the loss is unknown until such a
    /// call is made: until then, results that need no driver call, such as the end of a stream without work, are good, and so are those of
    /// other devices' work with its memory. [`Device::lost`](crate::Device::lost) queries the device once a second. A service that recovers
    /// opens another device; in a test that is a fresh host device.
    pub fn lose_device(&self, what: &str) {
        self.0.lose(what);
    }

    /// Makes the device unable to reach the memory of other devices: copies from there go through the host.
    pub fn refuse_peers(&self) {
        self.0.refuse_peers();
    }

    /// Starts a fresh record of calls.
    pub fn record(&self) {
        self.0.record();
    }

    /// The names of the calls since [`record`](Self::record), in order.
    #[must_use]
    pub fn calls(&self) -> Vec<&'static str> {
        self.0.calls()
    }
}

/// The driver code that the runtime reports as `kind`.
fn code_for(kind: ErrorKind) -> i32 {
    match kind {
        ErrorKind::OutOfMemory => 2,
        ErrorKind::InvalidCall => 800,
        ErrorKind::Unsupported => 801,
        ErrorKind::DeviceLost => 719,
        // Not 1: from an allocation, that means that no device has that much memory.
        _ => 304,
    }
}

/// Runs a [`manual`] device, which runs only through it: keep it for as long as futures of the device are awaited.
/// `let (device, _) = manual()` drops it at once.
///
/// Dropping it closes the device. Work that has not run never will: pending futures, and everything
/// submitted later, resolve with [`ErrorKind::Closed`].
#[derive(Debug)]
pub struct Stepper {
    device: Device,
    /// As in a poller: a stream without a handle stays until everything lent to it is back.
    active: Mutex<Vec<Arc<StreamState>>>,
}

/// Makes a host device without threads: nothing runs until the test steps it, so interleavings are chosen,
/// not raced. Its clock advances only with its steps: the same calls and steps always give the same
/// result. The device closes when its [`Stepper`] is dropped.
///
/// # Examples
/// ```
/// use futures::FutureExt;
/// use gpu_await::testing;
/// let (device, step) = testing::manual();
/// let stream = device.stream()?;
/// let y = stream.full(4, 1u32).queued()?;
/// let mut op = stream.download(&y);
/// assert!((&mut op).now_or_never().is_none());
/// step.run_until_idle();
/// assert_eq!((&mut op).now_or_never().unwrap()?, [1; 4]);
/// # Ok::<(), gpu_await::Error>(())
/// ```
#[must_use]
pub fn manual() -> (Device, Stepper) {
    manual_with(Completion::default())
}

/// [`manual`] with the given way of detecting completions.
#[must_use]
pub fn manual_with(completion: Completion) -> (Device, Stepper) {
    let options = EngineOptions { completion, stepped: true, ..EngineOptions::default() };
    match Device::open(Arc::new(HostBackend::new(None, false)), options) {
        Ok(device) => (device.clone(), Stepper::new(device)),
        Err(error) => panic!("a device for tests: {error}"),
    }
}

/// [`manual`] with recorded calls, as in [`host_with`].
#[must_use]
pub fn manual_with_faults(faults: Faults) -> (Device, Stepper) {
    manual_with_faults_completion(faults, Completion::default())
}

/// [`manual_with_faults`] with the given way of detecting completions.
#[must_use]
pub fn manual_with_faults_completion(faults: Faults, completion: Completion) -> (Device, Stepper) {
    let options = EngineOptions { completion, stepped: true, ..EngineOptions::default() };
    let device = watched(Arc::new(HostBackend::new(None, false)), faults, options);
    (device.clone(), Stepper::new(device))
}

impl Stepper {
    /// The time by which a step advances the device's clock.
    pub const STEP: Duration = Duration::from_micros(1);

    fn new(device: Device) -> Self {
        Stepper { device, active: Mutex::default() }
    }

    /// Advances the device's clock beyond its steps: the runtime measures how long work takes by this clock.
    /// It stops at 292 years.
    pub fn advance(&self, by: Duration) {
        self.device.engine().pacing.clock.advance(by);
    }

    /// Runs one command, on the `choose`-th of the streams whose next command is ready, modulo their number,
    /// then wakes the futures that waited for it. False if nothing was ready, as always inside a host function, a host
    /// twin or the closure of `enqueue`.
    #[must_use]
    pub fn step(&self, choose: usize) -> bool {
        if is_inside_a_command() {
            return false;
        }
        let engine = self.device.engine();
        engine.pacing.clock.advance(Stepper::STEP);
        let ran = engine.backend.step(choose);
        self.sweep();
        ran
    }

    /// Runs everything that can run, in stream order.
    pub fn run_until_idle(&self) {
        while self.step(0) || self.settle() {}
    }

    /// The poller's work.
    fn sweep(&self) {
        let engine = self.device.engine();
        engine.check_health().ok();
        engine.mourn();
        engine.pacing.clock.tell();
        let mut active = std::mem::take(&mut *self.active.lock());
        engine.registry.take_handed_over(&mut active);
        engine.registry.streams().iter().for_each(|stream| {
            stream.sweep();
            if engine.memory.reclaimers.are_there() {
                stream.collect_freed();
            }
        });
        active.retain(|stream| !stream.deactivate());
        self.active.lock().append(&mut active);
        engine.sweep_retired(false);
        engine.memory.wake_reclaimers();
    }

    /// Places the markers that are due; true if that made something runnable.
    fn settle(&self) -> bool {
        if is_inside_a_command() {
            return false;
        }
        let engine = self.device.engine();
        engine.registry.streams().iter().for_each(|stream| stream.press());
        engine.sweep_retired(true);
        self.step(0)
    }
}

/// Whether the caller is inside a step, or holds a stream's lock: nothing else runs inside those.
fn is_inside_a_command() -> bool {
    matches!(role::current(), Role::HostFn | Role::Twin | Role::Enqueuing)
}

/// Commands that will never run: dropped with it.
struct Discarded(Arc<dyn Backend>);

impl Drop for Discarded {
    fn drop(&mut self) {
        while self.0.step(0) {}
    }
}

impl Drop for Stepper {
    fn drop(&mut self) {
        let engine = self.device.engine();
        engine.close();
        // As after a loss: nothing waits for work that will never run, not even work being submitted by another thread.
        let closed = ErrorDetail::Closed { device: engine.label().to_owned() };
        engine.state.lose(|| closed.into());
        engine.mourn();
        engine.sweep_retired(false);
        // Commands that have not run are dropped where no lock is held and no command is running.
        engine.backend.abandon();
        let backend = engine.backend.clone();
        engine.background.let_go(Discarded(backend));
        // Streams keep their engine, which keeps these.
        engine.registry.let_go_of_all();
        // Its clock has stopped.
        engine.pacing.clock.end();
    }
}
