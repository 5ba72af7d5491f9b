//! Every public method, called where a call that waits would wait for itself.
//!
//! [`every_method`] makes a job of each; `surface` (in `tests/streams/host_functions.rs`) compares the names with
//! the crate's sources, so that a new method is either here or among those that call no driver.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    AlgorithmFamily, Batcher, Blas, Compare, Complex, ComplexFft, Copy2d, CudaSource, Device,
    DeviceKind, DlpackConsumer, DlpackTensor, Error, ErrorDetail, Event, Fft, Gemm, Image, InOut,
    Kernel, LaunchConfig, Mapped, Module, Op, PooledStream, RawQueue, RealFft, ReduceOp, Result,
    Stream, StreamPool, Uses, join_all, kernels, transform,
};
use tower::Service;

/// How long a call may take that must not block.
const SOON: Duration = Duration::from_secs(10);

/// What came of a call.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// [`ErrorDetail::WrongThread`], with the line of the call.
    Refused,
    /// The same without it.
    WithoutLine,
    Answered,
    #[expect(dead_code, reason = "shown where it was not expected")]
    Failed(Error),
    /// A future that is not ready when it is first polled.
    Pending,
    Panicked,
}

/// Calls with handles of nothing, which are sound where they are refused alone.
const ONLY_WHERE_REFUSED: &[&str] = &["Device::import_event", "Stream::from_raw"];

/// Refused calls whose error does not say where they were made: they are `async`, or submit nothing.
const WITHOUT_LINE: &[&str] = &[
    "Blas::load",
    "Blas::load_blocking",
    "Device::close",
    "Device::cuda",
    "Device::cuda_or_host",
    "Device::enable_peer",
    "Device::from_cudarc",
    "Device::import_event",
    "Device::pinned_async",
    "Device::preload",
    "Device::preload_cast",
    "Device::preload_gather",
    "Device::preload_scatter",
    "Device::preload_sequence",
    "Device::preload_transform",
    "Device::reclaimed",
    "Device::release_to_cudarc",
    "Device::streams",
    "Device::trim",
    "Device::trim_pinned",
    "DeviceBuffer::into_dlpack",
    "DeviceBuilder::cuda",
    "DeviceBuilder::cuda_or_host",
    "DeviceBuilder::from_cudarc",
    "DeviceBuilder::named",
    "DeviceTimeline::snapshot",
    "DeviceTimeline::start",
    "DeviceTimeline::start_sampled",
    "DlpackConsumer::from_argument",
    "Event::export",
    "Fft::load",
    "Fft::load_blocking",
    "FftBuilder::plan",
    "FftBuilder::plan_blocking",
    "GemmBuilder::plan",
    "GemmBuilder::plan_blocking",
    "Module::compile",
    "Module::kernel",
    "Module::load",
    "Module::load_blocking",
    "Occupancy::active_blocks",
    "Occupancy::best_block",
    "Occupancy::config_for_elements",
    "Occupancy::resident_blocks",
    "PinnedBuffer::into_dlpack",
    "Stream::adopt_dlpack",
    "Stream::adopt_dlpack_frozen",
    "Stream::download_staged",
    "Stream::download_staged_into",
    "Stream::from_raw",
    "Stream::is_non_blocking",
    "Stream::reclaimed",
    "Stream::record_timed_async",
    "Stream::upload_staged",
    "StreamPoolBuilder::build",
    "kernel!::load",
    "kernel!::load_blocking",
];

/// What a job unwinds with whose future was not ready.
struct StillPending;

/// Whose thread everything is called on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "not every test that has this file runs each of them")]
pub(crate) enum Inside {
    /// No driver call may be made.
    HostFn,
    /// No driver call may be made through the crate, and a submission lock is held.
    Enqueue,
    /// The stream goes on when it returns.
    Twin,
    /// Every other future of the device waits until it returns.
    Waker,
}

impl Inside {
    /// Whether everything that calls the driver is refused.
    fn refuses(self) -> bool {
        matches!(self, Inside::HostFn | Inside::Enqueue)
    }
}

/// Runs what it was given when it is woken, once.
struct RunsOnce(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl RunsOnce {
    fn run(&self) {
        let run = self.0.lock().unwrap().take();
        run.into_iter().for_each(|run| run());
    }
}

impl Wake for RunsOnce {
    /// A task that looks for itself wakes itself: that is not what is meant.
    fn wake(self: Arc<Self>) {
        if is_a_poller() {
            self.run();
        }
    }
}

/// Whether this is a poller's thread.
fn is_a_poller() -> bool {
    thread::current().name().is_some_and(|name| name.starts_with("gpu-await-"))
}

/// What has to come of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    Refused,
    Answered,
}

type Job = Box<dyn FnOnce() -> Outcome + Send>;

/// Calls, each with the name of the method.
#[derive(Default)]
pub(crate) struct Methods(Vec<(&'static str, Expected, Job)>);

impl Methods {
    /// A call that is refused.
    fn refuses<T>(
        &mut self,
        name: &'static str,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) {
        self.add(name, Expected::Refused, call);
    }

    /// A call that answers, whatever it says.
    fn answers<T>(&mut self, name: &'static str, call: impl FnOnce() -> T + Send + 'static) {
        self.add(name, Expected::Answered, || Ok(call()));
    }

    fn add<T>(
        &mut self,
        name: &'static str,
        expected: Expected,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) {
        let job = move || match call() {
            Ok(_) => Outcome::Answered,
            Err(error) => match error.detail() {
                ErrorDetail::WrongThread { .. } => match error.at() {
                    Some(at) if at.file().ends_with("every_method.rs") => Outcome::Refused,
                    None => Outcome::WithoutLine,
                    // Nobody's line of this crate.
                    Some(_) => Outcome::Failed(error),
                },
                _ => Outcome::Failed(error),
            },
        };
        self.0.push((name, expected, Box::new(job)));
    }

    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.0.iter().map(|(name, ..)| *name).collect()
    }
}

/// What another library does that does nothing.
fn nothing(_: &RawQueue<'_>, (): ()) -> Result<()> {
    Ok(())
}

/// What must be ready when it is first polled.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().unwrap_or_else(|| resume_unwind(Box::new(StillPending)))
}

/// Polls once, and is content with any answer.
fn once(future: impl Future + Unpin) {
    let mut future = future;
    drop(Pin::new(&mut future).poll(&mut Context::from_waker(Waker::noop())));
}

/// A device with a stream that is full.
pub(crate) struct World {
    device: Device,
    /// Runs the host function in which everything is called.
    host: Stream,
    /// Waits for the host function, and is given work until its queue is full.
    full: Stream,
    /// Has nothing to do.
    idle: Stream,
    /// Loaded before the host function runs: on a GPU loading waits for that.
    scale: kernels::scale,
    empty: kernels::empty,
    module: Option<Module>,
    /// Plans, on the host device.
    blas: Option<(Blas, Gemm<f32>, Gemm<f32>)>,
    fft: Option<(Fft, ComplexFft<f32>, RealFft<f32>)>,
}

impl World {
    pub(crate) fn new(device: &Device) -> Result<World> {
        let (host, full, idle) = (device.stream()?, device.stream()?, device.stream()?);
        let scale = kernels::scale::load_blocking(device)?;
        let empty = kernels::empty::load_blocking(device)?;
        let spin = || Image::ptx(include_str!("../../kernels/spin.ptx"));
        let module = match device.kind() {
            DeviceKind::Cuda => Some(Module::load_blocking(device, spin())?),
            _ => None,
        };
        // On a GPU, loading them would wait for the gates of whatever tests run beside this one.
        let host_only = Some(device).filter(|device| device.kind() == DeviceKind::Host);
        let blas = host_only.and_then(|device| Blas::load_blocking(device).ok()).map(
            |blas| -> Result<_> {
                let product = || blas.gemm::<f32>(4, 4, 4);
                let plans = (product().plan_blocking()?, product().bias().plan_blocking()?);
                Ok((blas.clone(), plans.0, plans.1))
            },
        );
        let fft =
            host_only.and_then(|device| Fft::load_blocking(device).ok()).map(|fft| -> Result<_> {
                let complex = fft.complex(&[4]).plan_blocking()?;
                let real = fft.real(&[6]).plan_blocking()?;
                Ok((fft, complex, real))
            });
        let (blas, fft) = (blas.transpose()?, fft.transpose()?);
        let device = device.clone();
        Ok(World { device, host, full, idle, scale, empty, module, blas, fft })
    }

    /// Calls everything inside a host function, a twin or a waker, while a thread sits in the queue of the
    /// full stream, which waits for that. Then everything goes on.
    pub(crate) fn run(&self, inside: Inside) -> Result<()> {
        let (begin, begun) = channel::<Methods>();
        let (tell, told) = channel();
        let (going, gone) = channel();
        let call_all = move || {
            going.send(()).expect("somebody listens");
            let Ok(methods) = begun.recv_timeout(SOON) else { return };
            for (name, expected, job) in methods.0 {
                tell.send((name, expected, None)).expect("somebody listens");
                let panicked = |payload: Box<dyn Any + Send>| match payload.is::<StillPending>() {
                    true => Outcome::Pending,
                    false => Outcome::Panicked,
                };
                let outcome = catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(panicked);
                tell.send((name, expected, Some(outcome))).expect("somebody listens");
            }
        };
        let (mut woken, mut gates, mut held) = (None, Vec::new(), None);
        match inside {
            Inside::HostFn => self.host.host_fn(call_all).abandon(),
            Inside::Enqueue => {
                held = Some(Gate::close(&self.host)?);
                let host = self.host.clone();
                thread::spawn(move || {
                    let call = |_: &RawQueue<'_>, ()| {
                        call_all();
                        Ok::<_, Error>(())
                    };
                    // SAFETY: nothing is put on the stream.
                    unsafe { host.enqueue(Uses::new("all"), call) }.abandon();
                });
            }
            Inside::Twin => {
                let once = RunsOnce(Mutex::new(Some(Box::new(call_all))));
                let twin = Kernel::<()>::host(&self.device, "all", move |_: &_| once.run())?;
                self.host.launch(&twin, LaunchConfig::for_elements(1), ()).queued()?;
            }
            Inside::Waker => {
                gates.push(Gate::close(&self.host)?);
                let once = RunsOnce(Mutex::new(Some(Box::new(call_all))));
                let op = woken.insert(self.host.done());
                let waker = Waker::from(Arc::new(once));
                assert!(op.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
                gates.push(Gate::close(&self.host)?);
            }
        }
        // A poller that is in a waker helps nobody: before that runs. The others run.
        if inside != Inside::Waker {
            gone.recv_timeout(SOON).expect("it runs");
        }
        // Before the queue is full: it makes what it calls.
        let mut methods = every_method(self)?;
        assert!(methods.names().len() > 150, "the list is short");
        if !inside.refuses() {
            methods.0.retain(|(name, ..)| !ONLY_WHERE_REFUSED.contains(name));
        }
        let filler = self.fill()?;
        begin.send(methods).expect("it listens");
        gates.drain(..gates.len().min(1)).for_each(drop);
        let mut wrong = Vec::new();
        check(inside, &told, &mut wrong);
        assert!(wrong.is_empty(), "in {inside:?}: {wrong:#?}");
        drop((gates, woken, held));
        let filled = filler.join().expect("the thread in the full queue ends");
        if !inside.refuses() {
            // The last call closed the device: what was submitted goes on.
            let begin = Instant::now();
            while !self.full.is_idle() {
                assert!(begin.elapsed() < SOON, "the full stream goes on: {:?}", self.full);
                thread::yield_now();
            }
            assert_eq!(self.device.stats().unreturned, 0);
            return Ok(());
        }
        filled?;

        self.full.done().synchronize()?;
        let sent: Vec<u32> = (0..1000).collect();
        let back = self.full.upload(sent.clone()).queued()?;
        assert_eq!(self.idle.download(&back).synchronize()?, sent, "the device works");
        assert_eq!(self.device.stats().unreturned, 0);
        self.device.synchronize()
    }

    /// Gives a stream work until that blocks.
    fn fill(&self) -> Result<thread::JoinHandle<Result<()>>> {
        let (full, empty) = (self.full.clone(), self.empty.clone());
        let before = full.submitted();
        let filler =
            thread::spawn(move || (0..1500).try_for_each(|_| empty.launch(&full).queued()));
        // Full when the number of submissions stands still.
        let (mut last, mut since) = (before, Instant::now());
        while since.elapsed() < Duration::from_millis(100) && !filler.is_finished() {
            thread::yield_now();
            if self.full.submitted() != last {
                (last, since) = (self.full.submitted(), Instant::now());
            }
        }
        Ok(filler)
    }
}

/// Reads what came of the calls, until there are no more. Where the driver may be called all that matters
/// is that they return.
fn check(
    inside: Inside,
    told: &Receiver<(&'static str, Expected, Option<Outcome>)>,
    wrong: &mut Vec<String>,
) {
    let mut calling = "the first call";
    loop {
        match told.recv_timeout(SOON) {
            Ok((name, _, None)) => calling = name,
            Ok((_, Expected::Refused, Some(Outcome::Refused)))
            | Ok((_, Expected::Answered, Some(Outcome::Answered))) => {}
            Ok((name, Expected::Refused, Some(Outcome::WithoutLine)))
                if WITHOUT_LINE.contains(&name) => {}
            Ok((_, _, Some(outcome)))
                if !inside.refuses() && !matches!(outcome, Outcome::Panicked) => {}
            Ok((name, expected, Some(outcome))) => {
                wrong.push(format!("{name}: {outcome:?}, expected {expected:?}"));
            }
            Err(RecvTimeoutError::Timeout) => panic!("{calling} did not return; {wrong:#?}"),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Everything that can be called. What it takes is made here, outside of the host function; the full
/// stream waits for that from here on.
pub(crate) fn every_method(world: &World) -> Result<Methods> {
    let World { device, host, full, idle, scale, module, .. } = world;
    let (scale, module) = (scale.clone(), module.clone());
    let mut list = Methods::default();
    let is_cuda = device.kind() == DeviceKind::Cuda;

    // What needs a device that is idle.
    let double = match is_cuda {
        true => None,
        false => Some(Kernel::<(InOut<f32>,)>::host(device, "double", |_: &_, x: &mut [f32]| {
            x.iter_mut().for_each(|x| *x *= 2.0);
        })?),
    };
    let pool = StreamPool::builder().streams(device, 1).max_in_flight(2).build()?;
    let pooled = pool.try_acquire()?;
    let frozen = idle.full(8, 1u32).queued()?.freeze().synchronize()?;
    let start = idle.record_timed()?;
    let end = idle.record_timed()?;
    idle.synchronize()?;
    let buffer = || full.full(8, 1.0f32).queued();
    let pinned = || full.pinned::<f32>(8);
    let other = idle.full(8, 2.0f32).queued()?;
    idle.synchronize()?;

    // From now on what is submitted to it waits for the host function.
    full.wait(host).queued()?;
    let pending = || full.zeros::<u8>(100);
    let event = full.record()?;
    let shared = unshared(device, full)?;
    let other = Arc::new(other);

    macro_rules! both {
        ($how:ident $stream:literal $device:literal, $on:ident => $call:expr) => {
            both!($how $stream $device, $on, () = () => $call);
        };
        // with something that the call takes
        ($how:ident $stream:literal $device:literal, $on:ident, $with:pat = $make:expr => $call:expr) => {{
            let ($on, $with) = (full.clone(), $make);
            list.$how($stream, move || $call);
            let ($on, $with) = (device.clone(), $make);
            list.$how($device, move || $call);
        }};
    }
    macro_rules! queue {
        ($name:literal, $q:ident => $call:expr) => {
            queue!($name, $q, () = () => $call);
        };
        ($name:literal, $q:ident, $with:pat = $make:expr => $call:expr) => {{
            let (stream, $with) = (full.clone(), $make);
            list.refuses($name, move || stream.batch(|$q| $call.map(drop).map_err(gpu_await::Error::from)).queued());
        }};
    }
    macro_rules! each {
        ($how:ident: $($name:literal, $object:ident => |$on:ident| $call:expr;)+) => {$({
            let $on = $object.clone();
            list.$how($name, move || $call);
        })+};
    }

    // ---- opening --------------------------------------------------------------------------
    list.refuses("Device::cuda", || Device::cuda(0));
    list.refuses("Device::cuda_or_host", Device::cuda_or_host);
    list.refuses("DeviceBuilder::cuda", || Device::builder().cuda(0));
    list.refuses("DeviceBuilder::cuda_or_host", || Device::builder().cuda_or_host());
    list.refuses("DeviceBuilder::named", || Device::builder().named("cuda:0"));
    list.answers("DeviceBuilder::from_env", || Device::builder().from_env().is_ok());
    list.answers("Device::from_env", || Device::from_env().is_ok());
    list.answers("Device::host", || {
        let device = Device::host();
        assert_eq!(device.kind(), DeviceKind::Host);
    });
    list.answers("DeviceBuilder::host", || drop(Device::builder().host()));
    list.answers("DeviceBuilder::host_with", || {
        drop(Device::builder().host_with(testing::faults().0));
    });
    list.answers("Device::count", move || assert!(!is_cuda || Device::count() > 0));

    // ---- devices --------------------------------------------------------------------------
    each! { refuses:
        "Device::pinned", device => |d| d.pinned::<u8>(100);
        "Device::pinned_async", device => |d| at_once(d.pinned_async::<u8>(100));
        "Device::pinned_flag", device => |d| d.pinned_flag();
        "Device::memory", device => |d| d.memory();
        "DeviceTimeline::start", device => |d| d.timeline().start(10);
        "DeviceTimeline::start_sampled", device => |d| d.timeline().start_sampled(10, 2);
        "DeviceTimeline::snapshot", device => |d| d.timeline().snapshot();
        "Device::trim", device => |d| at_once(d.trim(0));
        "Device::reclaimed", device => |d| at_once(d.reclaimed(1));
        "Stream::reclaimed", full => |s| at_once(s.reclaimed(1));
        "Device::trim_pinned", device => |d| at_once(d.trim_pinned(0));
        "Device::enable_peer", device => |d| at_once(d.enable_peer(&d));
        "Device::done", device => |d| d.done().submitted();
        "Device::all_done", device => |d| Device::all_done([&d]).submitted();
        "Device::synchronize", device => |d| d.synchronize();
        "Device::stream", device => |d| d.stream();
        "StreamBuilder::build", device => |d| d.stream_builder().name("never").build();
        "Device::thread_stream", device => |d| d.thread_stream();
        "Device::streams", device => |d| d.streams(2);
        "StreamPoolBuilder::build", device => |d| StreamPool::builder().streams(&d, 1).build();
        "EventBuilder::build", device => |d| d.event_builder().interprocess(true).build();
        // SAFETY: refused before anybody looks at the handle, and in `ONLY_WHERE_REFUSED`.
        "Device::import_event", device => |d| unsafe { d.import_event(&[0; 64]) };
    }
    each! { answers:
        "Device::stats", device => |d| d.stats();
        "Device::lost", device => |d| once(d.lost());
        "Loss::poll", device => |d| once(d.lost());
        "Device::legacy_stream", device => |d| drop(d.legacy_stream());
        "Device::event", device => |d| d.event();
        "Device::current_stream", device => |d| d.current_stream();
        "Device::with_default_stream", device => |d| drop(d.with_default_stream(&d.current_stream()));
    }

    // ---- streams --------------------------------------------------------------------------
    each! { refuses:
        // SAFETY: nothing is put on the stream.
        "Stream::lend_memory", full => |s| unsafe { s.lend_memory(Uses::new("none")) }.map(drop);
    }
    each! { answers:
        // SAFETY: it is not used.
        "Stream::lend_raw", full => |s| drop(unsafe { s.lend_raw() });
        // SAFETY: likewise.
        "Stream::lend_cudarc", full => |s| drop(unsafe { s.lend_cudarc() });
    }
    // ---- libraries --------------------------------------------------------------------------
    each! { refuses:
        "Blas::load", device => |d| at_once(Blas::load(&d)).map(drop);
        "Blas::load_blocking", device => |d| Blas::load_blocking(&d).map(drop);
    }
    each! { refuses:
        "Fft::load", device => |d| at_once(Fft::load(&d)).map(drop);
        "Fft::load_blocking", device => |d| Fft::load_blocking(&d).map(drop);
    }
    if let Some((fft, complex, real)) = world.fft.clone() {
        each! { refuses:
            "FftBuilder::plan", fft => |f| at_once(f.complex::<f32>(&[4]).plan());
            "FftBuilder::plan_blocking", fft => |f| f.complex::<f32>(&[4]).plan_blocking();
        }
        let one = Complex::new(1.0f32, 0.0);
        let args = || -> Result<_> {
            let (x, y) = (full.full(4, one).queued()?, full.full(4, one).queued()?);
            Ok((full.clone(), x, y, full.full(6, 1.0f32).queued()?))
        };
        let (plan, (on, x, mut y, _)) = (complex.clone(), args()?);
        list.refuses("ComplexFft::forward", move || plan.forward(&on, &x, &mut y).queued());
        let (plan, (on, x, mut y, _)) = (complex.clone(), args()?);
        list.refuses("ComplexFft::inverse", move || plan.inverse(&on, &x, &mut y).queued());
        let (plan, (on, _, mut y, _)) = (complex.clone(), args()?);
        list.refuses("ComplexFft::forward_in_place", move || {
            plan.forward_in_place(&on, &mut y).queued()
        });
        let (plan, (on, _, mut y, _)) = (complex, args()?);
        list.refuses("ComplexFft::inverse_in_place", move || {
            plan.inverse_in_place(&on, &mut y).queued()
        });
        let (plan, (on, mut x, _, s)) = (real.clone(), args()?);
        list.refuses("RealFft::forward", move || plan.forward(&on, &s, &mut x).queued());
        let (plan, (on, mut x, _, mut s)) = (real, args()?);
        list.refuses("RealFft::inverse", move || plan.inverse(&on, &mut x, &mut s).queued());
    }
    if let Some((blas, gemm, biased)) = world.blas.clone() {
        each! { refuses:
            "GemmBuilder::plan", blas => |b| at_once(b.gemm::<f32>(1, 1, 1).plan());
            "GemmBuilder::plan_blocking", blas => |b| b.gemm::<f32>(1, 1, 1).plan_blocking();
        }
        let (a, mut c, on) =
            (full.full(16, 1.0f32).queued()?, full.zeros(16).queued()?, full.clone());
        list.refuses("Gemm::launch", move || gemm.launch(&on, 1.0, &a, &a, 0.0, &mut c).queued());
        let (a, mut c, on) =
            (full.full(16, 1.0f32).queued()?, full.zeros(16).queued()?, full.clone());
        list.refuses("Gemm::launch_with_bias", move || {
            let bias = a.slice(..4)?;
            biased.launch_with_bias(&on, 1.0, &a, &a, &bias, 0.0, &mut c).queued()
        });
    }
    if let Ok(context) = device.cudarc_context() {
        each! { refuses:
            "Device::from_cudarc", context => |c| Device::from_cudarc(&c);
            "DeviceBuilder::from_cudarc", context => |c| Device::builder().from_cudarc(&c);
        }
        let theirs = context.default_stream();
        let buffer = buffer()?;
        let d = device.clone();
        list.refuses("Device::release_to_cudarc", move || {
            // SAFETY: refused.
            unsafe { d.release_to_cudarc(buffer, &theirs) }.map_err(gpu_await::Error::from)
        });
    }
    each! { refuses:
        "Stream::synchronize", full => |s| s.synchronize();
        "Stream::fork", full => |s| s.fork(2);
        "Stream::join", full => |s| s.join([&s.clone()]).queued();
        "Stream::join", idle => |s| s.join::<Stream>([]).queued();
        "Stream::is_non_blocking", full => |s| s.is_non_blocking();
        "Stream::pinned", full => |s| s.pinned::<u8>(100);
        "Stream::record_timed_async", full => |s| at_once(s.record_timed_async());
        "Stream::upload_staged", full => |s| at_once(s.upload_staged(vec![1u8; 100]));
        // SAFETY: refused before anybody looks at the handle, and in `ONLY_WHERE_REFUSED`.
        "Stream::from_raw", device => |d| unsafe { Stream::from_raw(&d, 77, ()) };
        "Scope::poll", device => |d| {
            let scoped = d.clone();
            at_once(d.default_stream().scope(async move { scoped.zeros::<u8>(1).queued() }))
        };
    }
    let (s, d) = (full.clone(), device.clone());
    list.refuses("Stream::scope_sync", move || s.scope_sync(|| d.zeros::<u8>(1).queued()));
    let (s, d) = (full.clone(), device.clone());
    list.refuses("Stream::scope", move || {
        at_once(s.scope(async move { d.zeros::<u8>(1).queued() }))
    });
    let (from, into, d) = (full.clone(), idle.clone(), device.clone());
    list.refuses("Stream::scope", move || {
        let inner = into.scope(async move { d.zeros::<u8>(1).queued() });
        at_once(from.scope_unordered(inner))
    });
    let (s, source) = (full.clone(), other.clone());
    list.refuses("Stream::download_staged", move || at_once(s.download_staged(&*source)));
    let (s, source) = (full.clone(), other.clone());
    list.refuses("Stream::download_staged_into", move || {
        at_once(s.download_staged_into(&*source, Vec::new()))
    });
    each! { answers:
        "Stream::done", full => |s| once(s.done());
        "Stream::done", idle => |s| assert!(s.done().is_complete());
        "Stream::is_idle", full => |s| assert!(!s.is_idle());
        "Stream::is_idle", shared => |s| assert!(!s.is_idle());
        "Stream::backlog", full => |s| assert!(s.backlog() > 0);
        "Stream::throttle", full => |s| once(Box::pin(s.throttle(0)));
        "Stream::device", full => |s| s.device();
        "Stream::scope_sync_unordered", full => |s| s.scope_sync_unordered(Stream::current);
    }

    // ---- verbs ----------------------------------------------------------------------------
    both!(refuses "Stream::batch" "Device::batch", s => s.batch(|q| q.zeros::<u8>(1)).queued());
    both!(refuses "Stream::replay" "Device::replay", s => s.replay(&mut gpu_await::Region::new(), |q| q.zeros::<u8>(1)).queued());
    let empty_graph = device.graph::<(gpu_await::InOut<f32>,), _, _>((), |_, (), _| Ok(()));
    both!(refuses "Graph::launch" "Device::graph", s, (graph, mut x) = (empty_graph.clone(), buffer()?) => graph.launch(&s, (&mut x,)).queued());
    both!(refuses "Stream::timed" "Device::timed", s => s.timed(|q| q.zeros::<u8>(1)).submitted());
    both!(refuses "Stream::upload" "Device::upload", s => s.upload(vec![1u8; 10]).queued());
    both!(refuses "Stream::upload" "Device::upload", s, p = pinned()? => s.upload(p).queued());
    both!(refuses "Stream::upload_from" "Device::upload_from", s => s.upload_from(&[1u8; 10]).queued());
    both!(refuses "Stream::upload_into" "Device::upload_into", s, (p, mut b) = (pinned()?, buffer()?) => s.upload_into(p, &mut b).submitted());
    both!(refuses "Stream::download" "Device::download", s, b = other.clone() => s.download(&*b).submitted());
    both!(refuses "Stream::download_into" "Device::download_into", s, (p, b) = (pinned()?, other.clone()) => s.download_into(&*b, p).submitted());
    both!(refuses "Stream::download_vec" "Device::download_vec", s, b = other.clone() => s.download_vec(&*b).submitted());
    both!(refuses "Stream::copy" "Device::copy", s, (b, mut to) = (other.clone(), buffer()?) => s.copy(&*b, &mut to).queued());
    both!(refuses "Stream::copy_2d" "Device::copy_2d", s, (b, mut to) = (other.clone(), buffer()?) => s.copy_2d(&*b, &mut to, Copy2d::new(2, 2)).queued());
    both!(refuses "Stream::upload_2d" "Device::upload_2d", s, (p, mut to) = (pinned()?, buffer()?) => s.upload_2d(p, &mut to, Copy2d::new(2, 2)).submitted());
    both!(refuses "Stream::download_2d" "Device::download_2d", s, (b, p) = (other.clone(), pinned()?) => s.download_2d(&*b, p, Copy2d::new(2, 2)).submitted());
    both!(refuses "Stream::empty" "Device::empty", s => s.empty::<u8>(10).queued());
    both!(refuses "Stream::zeros" "Device::zeros", s => s.zeros::<u8>(10).queued());
    both!(refuses "Stream::zeros" "Device::zeros", s => s.zeros::<u8>(0).queued());
    both!(refuses "Stream::ones" "Device::ones", s => s.ones::<u8>(10).queued());
    both!(refuses "Stream::full" "Device::full", s => s.full(10, 7u8).queued());
    both!(refuses "Stream::full" "Device::full", s => s.full(usize::MAX / 2, 7u8).queued());
    both!(refuses "Stream::fill" "Device::fill", s, mut b = buffer()? => s.fill(&mut b, 1.0).queued());
    let twice = transform!(|x| x * 2.0);
    both!(refuses "Stream::transform" "Device::transform", s, (b, mut to) = (other.clone(), buffer()?) => s.transform(twice, (&*b,), &mut to).queued());
    both!(refuses "Stream::transform_in_place" "Device::transform_in_place", s, mut b = buffer()? => s.transform_in_place(twice, (), &mut b).queued());
    let flags = || full.zeros::<u8>(8).queued();
    both!(refuses "Stream::transform_flags" "Device::transform_flags", s, (b, mut to) = (buffer()?, flags()?) => s.transform_flags(transform!(|x| x.gt(0.0)), (&b,), &mut to).queued());
    both!(refuses "Stream::sequence" "Device::sequence", s, mut b = buffer()? => s.sequence(0.0, 1.0, &mut b).queued());
    both!(refuses "Stream::cast" "Device::cast", s, (b, mut to) = (buffer()?, flags()?) => s.cast(&b, &mut to).queued());
    let index = || full.zeros::<u32>(8).queued();
    both!(refuses "Stream::gather" "Device::gather", s, (b, i, mut to) = (other.clone(), index()?, buffer()?) => s.gather(&*b, &i, &mut to).queued());
    both!(refuses "Stream::scatter" "Device::scatter", s, (b, i, mut to) = (other.clone(), index()?, buffer()?) => s.scatter(&*b, &i, &mut to).queued());
    let count = || full.zeros::<u64>(1).queued();
    let places = || full.zeros::<u64>(8).queued();
    let one = || full.zeros::<f32>(1).queued();
    let offsets = || full.zeros::<u64>(9).queued();
    let nine = || full.zeros::<f32>(9).queued();
    both!(refuses "Stream::sum" "Device::sum", s, b = buffer()? => s.sum(&b).submitted());
    both!(refuses "Stream::reduce" "Device::reduce", s, b = buffer()? => s.reduce(&b, ReduceOp::Sum, 0.0).submitted());
    both!(refuses "Stream::reduce_into" "Device::reduce_into", s, (b, mut to) = (buffer()?, one()?) => s.reduce_into(&b, ReduceOp::Sum, 0.0, &mut to).queued());
    both!(refuses "Stream::min" "Device::min", s, b = buffer()? => s.min(&b).submitted());
    both!(refuses "Stream::max" "Device::max", s, b = buffer()? => s.max(&b).submitted());
    both!(refuses "Stream::arg_min" "Device::arg_min", s, b = buffer()? => s.arg_min(&b).submitted());
    both!(refuses "Stream::arg_max" "Device::arg_max", s, b = buffer()? => s.arg_max(&b).submitted());
    both!(refuses "Stream::sum_into" "Device::sum_into", s, (b, mut to) = (buffer()?, one()?) => s.sum_into(&b, &mut to).queued());
    both!(refuses "Stream::min_into" "Device::min_into", s, (b, mut to) = (buffer()?, one()?) => s.min_into(&b, &mut to).queued());
    both!(refuses "Stream::max_into" "Device::max_into", s, (b, mut to) = (buffer()?, one()?) => s.max_into(&b, &mut to).queued());
    both!(refuses "Stream::arg_min_into" "Device::arg_min_into", s, (b, mut to) = (buffer()?, count()?) => s.arg_min_into(&b, &mut to).queued());
    both!(refuses "Stream::arg_max_into" "Device::arg_max_into", s, (b, mut to) = (buffer()?, count()?) => s.arg_max_into(&b, &mut to).queued());
    both!(refuses "Stream::dot" "Device::dot", s, b = buffer()? => s.dot(&b, &b).submitted());
    both!(refuses "Stream::dot_into" "Device::dot_into", s, (b, mut to) = (buffer()?, one()?) => s.dot_into(&b, &b, &mut to).queued());
    both!(refuses "Stream::count_if" "Device::count_if", s, b = buffer()? => s.count_if(&b, Compare::Less(1.0)).submitted());
    both!(refuses "Stream::count_if_into" "Device::count_if_into", s, (b, mut to) = (buffer()?, count()?) => s.count_if_into(&b, Compare::Less(1.0), &mut to).queued());
    both!(refuses "Stream::inclusive_scan" "Device::inclusive_scan", s, (b, mut to) = (buffer()?, buffer()?) => s.inclusive_scan(&b, ReduceOp::Sum, &mut to).queued());
    both!(refuses "Stream::exclusive_scan" "Device::exclusive_scan", s, (b, mut to) = (buffer()?, buffer()?) => s.exclusive_scan(&b, ReduceOp::Sum, 0.0, &mut to).queued());
    both!(refuses "Stream::sort" "Device::sort", s, mut b = buffer()? => s.sort(&mut b).queued());
    both!(refuses "Stream::sort_descending" "Device::sort_descending", s, mut b = buffer()? => s.sort_descending(&mut b).queued());
    both!(refuses "Stream::sort_by_key" "Device::sort_by_key", s, (mut b, mut v) = (buffer()?, buffer()?) => s.sort_by_key(&mut b, &mut v).queued());
    both!(refuses "Stream::sort_by_key_descending" "Device::sort_by_key_descending", s, (mut b, mut v) = (buffer()?, buffer()?) => s.sort_by_key_descending(&mut b, &mut v).queued());
    both!(refuses "Stream::copy_if" "Device::copy_if", s, (b, mut to) = (buffer()?, buffer()?) => s.copy_if(&b, Compare::Less(1.0), &mut to).submitted());
    both!(refuses "Stream::copy_if_into" "Device::copy_if_into", s, (b, mut to, mut n) = (buffer()?, buffer()?, count()?) => s.copy_if_into(&b, Compare::Less(1.0), &mut to, &mut n).queued());
    both!(refuses "Stream::partition" "Device::partition", s, (b, mut to, mut others) = (buffer()?, buffer()?, buffer()?) => s.partition(&b, Compare::Less(1.0), &mut to, &mut others).submitted());
    both!(refuses "Stream::partition_into" "Device::partition_into", s, (b, mut to, mut others, mut n) = (buffer()?, buffer()?, buffer()?, count()?) => s.partition_into(&b, Compare::Less(1.0), &mut to, &mut others, &mut n).queued());
    both!(refuses "Stream::unique" "Device::unique", s, (b, mut to) = (buffer()?, buffer()?) => s.unique(&b, &mut to).submitted());
    both!(refuses "Stream::unique_into" "Device::unique_into", s, (b, mut to, mut n) = (buffer()?, buffer()?, count()?) => s.unique_into(&b, &mut to, &mut n).queued());
    both!(refuses "Stream::run_length_encode" "Device::run_length_encode", s, (b, mut to, mut n) = (buffer()?, buffer()?, places()?) => s.run_length_encode(&b, &mut to, &mut n).submitted());
    both!(refuses "Stream::run_length_encode_into" "Device::run_length_encode_into", s, (b, mut to, mut n, mut c) = (buffer()?, buffer()?, places()?, count()?) => s.run_length_encode_into(&b, &mut to, &mut n, &mut c).queued());
    both!(refuses "Stream::select" "Device::select", s, (b, f, mut to) = (buffer()?, flags()?, buffer()?) => s.select(&b, &f, &mut to).submitted());
    both!(refuses "Stream::select_into" "Device::select_into", s, (b, f, mut to, mut n) = (buffer()?, flags()?, buffer()?, count()?) => s.select_into(&b, &f, &mut to, &mut n).queued());
    both!(refuses "Stream::partition_flagged" "Device::partition_flagged", s, (b, f, mut to, mut others) = (buffer()?, flags()?, buffer()?, buffer()?) => s.partition_flagged(&b, &f, &mut to, &mut others).submitted());
    both!(refuses "Stream::partition_flagged_into" "Device::partition_flagged_into", s, (b, f, mut to, mut others, mut n) = (buffer()?, flags()?, buffer()?, buffer()?, count()?) => s.partition_flagged_into(&b, &f, &mut to, &mut others, &mut n).queued());
    both!(refuses "Stream::positions" "Device::positions", s, (f, mut to) = (flags()?, places()?) => s.positions(&f, &mut to).submitted());
    both!(refuses "Stream::positions_into" "Device::positions_into", s, (f, mut to, mut n) = (flags()?, places()?, count()?) => s.positions_into(&f, &mut to, &mut n).queued());
    both!(refuses "Stream::histogram" "Device::histogram", s, (b, mut n) = (buffer()?, places()?) => s.histogram(&b, 0.0..=1.0, &mut n).queued());
    both!(refuses "Stream::histogram_between" "Device::histogram_between", s, (b, l, mut n) = (buffer()?, nine()?, places()?) => s.histogram_between(&b, &l, &mut n).queued());
    both!(refuses "Stream::segmented_reduce" "Device::segmented_reduce", s, (b, o, mut to) = (buffer()?, offsets()?, buffer()?) => s.segmented_reduce(&b, &o, ReduceOp::Sum, 0.0, &mut to).queued());
    both!(refuses "Stream::top_k" "Device::top_k", s, (b, mut to) = (buffer()?, buffer()?) => s.top_k(&b, &mut to).queued());
    both!(refuses "Stream::top_k_places" "Device::top_k_places", s, (b, mut to, mut at) = (buffer()?, buffer()?, places()?) => s.top_k_places(&b, &mut to, &mut at).queued());
    both!(refuses "Stream::bottom_k" "Device::bottom_k", s, (b, mut to) = (buffer()?, buffer()?) => s.bottom_k(&b, &mut to).queued());
    both!(refuses "Stream::bottom_k_places" "Device::bottom_k_places", s, (b, mut to, mut at) = (buffer()?, buffer()?, places()?) => s.bottom_k_places(&b, &mut to, &mut at).queued());
    both!(refuses "Stream::segmented_sort" "Device::segmented_sort", s, (mut b, o) = (buffer()?, offsets()?) => s.segmented_sort(&mut b, &o).queued());
    both!(refuses "Stream::segmented_sort_by_key" "Device::segmented_sort_by_key", s, (mut b, mut v, o) = (buffer()?, buffer()?, offsets()?) => s.segmented_sort_by_key(&mut b, &mut v, &o).queued());
    both!(refuses "Stream::segmented_sort_descending" "Device::segmented_sort_descending", s, (mut b, o) = (buffer()?, offsets()?) => s.segmented_sort_descending(&mut b, &o).queued());
    both!(refuses "Stream::segmented_sort_by_key_descending" "Device::segmented_sort_by_key_descending", s, (mut b, mut v, o) = (buffer()?, buffer()?, offsets()?) => s.segmented_sort_by_key_descending(&mut b, &mut v, &o).queued());
    each! { refuses:
        "Device::preload", device => |d| at_once(d.preload::<f32>(&[AlgorithmFamily::Scan]));
        "Device::preload_sequence", device => |d| at_once(d.preload_sequence::<f32>());
        "Device::preload_cast", device => |d| at_once(d.preload_cast::<f32, u8>());
        "Device::preload_gather", device => |d| at_once(d.preload_gather::<f32, u32>());
        "Device::preload_scatter", device => |d| at_once(d.preload_scatter::<f32, u32>());
        "Device::preload_transform", device => |d| at_once(d.preload_transform::<(gpu_await::In<f32>,)>(twice));
    }
    both!(refuses "Stream::host_fn" "Device::host_fn", s => s.host_fn(|| ()).queued());
    // SAFETY: it is not used, and refused first.
    both!(refuses "Stream::adopt_memory" "Device::adopt_memory", s => unsafe { s.adopt_memory::<u8>(0, 0, ()) });
    // Of work behind the host function.
    let mut outcome = None;
    let keep = |queue: &RawQueue<'_>, ()| {
        outcome = Some(queue.outcome()?);
        Ok::<_, Error>(())
    };
    // SAFETY: nothing is put on the stream.
    unsafe { full.enqueue(Uses::new("outcome"), keep) }.queued()?;
    let outcome = outcome.expect("it was called");
    list.answers("WorkOutcome::is_complete", move || outcome.is_complete());
    // SAFETY: nothing is put on the stream.
    both!(refuses "Stream::enqueue" "Device::enqueue", s => unsafe { s.enqueue(Uses::new("none"), nothing) }.queued());
    both!(refuses "Stream::record" "Device::record", s => s.record());
    both!(refuses "Stream::record_timed" "Device::record_timed", s => s.record_timed());
    both!(refuses "Stream::wait" "Device::wait", s, on = full.clone() => s.wait(&on).queued());
    both!(refuses "Stream::wait" "Device::wait", s, on = event.clone() => s.wait(&on).queued());
    both!(refuses "Stream::wait" "Device::wait", s, on = pending() => s.wait(&on).queued());
    both!(refuses "Stream::wait" "Device::wait", s, on = device.event() => s.wait(&on).queued());

    // ---- batches --------------------------------------------------------------------------
    queue!("Queue::upload", q => q.upload(vec![1u8; 10]));
    queue!("Queue::upload_from", q => q.upload_from(&[1u8; 10]));
    queue!("Queue::upload_into", q, (p, mut b) = (pinned()?, buffer()?) => q
        .upload_into(p, &mut b));
    queue!("Queue::download", q, b = other.clone() => q.download(&*b));
    queue!("Queue::download_into", q, (b, p) = (other.clone(), pinned()?) => q
        .download_into(&*b, p));
    queue!("Queue::download_vec", q, b = other.clone() => q.download_vec(&*b));
    queue!("Queue::copy", q, (b, mut to) = (other.clone(), buffer()?) => q.copy(&*b, &mut to));
    queue!("Queue::copy_2d", q, (b, mut to) = (other.clone(), buffer()?) => q.copy_2d(
        &*b,
        &mut to,
        Copy2d::new(2, 2)
    ));
    queue!("Queue::upload_2d", q, (p, mut to) = (pinned()?, buffer()?) => q.upload_2d(
        p,
        &mut to,
        Copy2d::new(2, 2)
    ));
    queue!("Queue::download_2d", q, (b, p) = (other.clone(), pinned()?) => q.download_2d(
        &*b,
        p,
        Copy2d::new(2, 2)
    ));
    queue!("Queue::empty", q => q.empty::<u8>(10));
    queue!("Queue::zeros", q => q.zeros::<u8>(10));
    queue!("Queue::ones", q => q.ones::<u8>(10));
    queue!("Queue::full", q => q.full(10, 7u8));
    queue!("Queue::fill", q, mut b = buffer()? => q.fill(&mut b, 1.0));
    queue!("Queue::transform", q, (b, mut to) = (other.clone(), buffer()?) => q
        .transform(twice, (&*b,), &mut to));
    queue!("Queue::transform_in_place", q, mut b = buffer()? => q
        .transform_in_place(twice, (), &mut b));
    queue!("Queue::transform_flags", q, (b, mut to) = (buffer()?, flags()?) => q
        .transform_flags(transform!(|x| x.gt(0.0)), (&b,), &mut to));
    queue!("Queue::sequence", q, mut b = buffer()? => q.sequence(0.0, 1.0, &mut b));
    queue!("Queue::cast", q, (b, mut to) = (buffer()?, flags()?) => q.cast(&b, &mut to));
    queue!("Queue::gather", q, (b, i, mut to) = (other.clone(), index()?, buffer()?) => q
        .gather(&*b, &i, &mut to));
    queue!("Queue::scatter", q, (b, i, mut to) = (other.clone(), index()?, buffer()?) => q
        .scatter(&*b, &i, &mut to));
    queue!("Queue::sum", q, b = buffer()? => q.sum(&b));
    queue!("Queue::reduce", q, b = buffer()? => q.reduce(&b, ReduceOp::Sum, 0.0));
    queue!("Queue::reduce_into", q, (b, mut to) = (buffer()?, one()?) => q.reduce_into(&b, ReduceOp::Sum, 0.0, &mut to));
    queue!("Queue::min", q, b = buffer()? => q.min(&b));
    queue!("Queue::max", q, b = buffer()? => q.max(&b));
    queue!("Queue::arg_min", q, b = buffer()? => q.arg_min(&b));
    queue!("Queue::arg_max", q, b = buffer()? => q.arg_max(&b));
    queue!("Queue::sum_into", q, (b, mut to) = (buffer()?, one()?) => q.sum_into(&b, &mut to));
    queue!("Queue::min_into", q, (b, mut to) = (buffer()?, one()?) => q.min_into(&b, &mut to));
    queue!("Queue::max_into", q, (b, mut to) = (buffer()?, one()?) => q.max_into(&b, &mut to));
    queue!("Queue::arg_min_into", q, (b, mut to) = (buffer()?, count()?) => q.arg_min_into(&b, &mut to));
    queue!("Queue::arg_max_into", q, (b, mut to) = (buffer()?, count()?) => q.arg_max_into(&b, &mut to));
    queue!("Queue::dot", q, b = buffer()? => q.dot(&b, &b));
    queue!("Queue::dot_into", q, (b, mut to) = (buffer()?, one()?) => q.dot_into(&b, &b, &mut to));
    queue!("Queue::count_if", q, b = buffer()? => q.count_if(&b, Compare::Less(1.0)));
    queue!("Queue::count_if_into", q, (b, mut to) = (buffer()?, count()?) => q.count_if_into(&b, Compare::Less(1.0), &mut to));
    queue!("Queue::inclusive_scan", q, (b, mut to) = (buffer()?, buffer()?) => q.inclusive_scan(&b, ReduceOp::Sum, &mut to));
    queue!("Queue::exclusive_scan", q, (b, mut to) = (buffer()?, buffer()?) => q.exclusive_scan(&b, ReduceOp::Sum, 0.0, &mut to));
    queue!("Queue::sort", q, mut b = buffer()? => q.sort(&mut b));
    queue!("Queue::sort_descending", q, mut b = buffer()? => q.sort_descending(&mut b));
    queue!("Queue::sort_by_key", q, (mut b, mut v) = (buffer()?, buffer()?) => q.sort_by_key(&mut b, &mut v));
    queue!("Queue::sort_by_key_descending", q, (mut b, mut v) = (buffer()?, buffer()?) => q.sort_by_key_descending(&mut b, &mut v));
    queue!("Queue::copy_if", q, (b, mut to) = (buffer()?, buffer()?) => q.copy_if(&b, Compare::Less(1.0), &mut to));
    queue!("Queue::copy_if_into", q, (b, mut to, mut n) = (buffer()?, buffer()?, count()?) => q.copy_if_into(&b, Compare::Less(1.0), &mut to, &mut n));
    queue!("Queue::partition", q, (b, mut to, mut others) = (buffer()?, buffer()?, buffer()?) => q.partition(&b, Compare::Less(1.0), &mut to, &mut others));
    queue!("Queue::partition_into", q, (b, mut to, mut others, mut n) = (buffer()?, buffer()?, buffer()?, count()?) => q.partition_into(&b, Compare::Less(1.0), &mut to, &mut others, &mut n));
    queue!("Queue::unique", q, (b, mut to) = (buffer()?, buffer()?) => q.unique(&b, &mut to));
    queue!("Queue::unique_into", q, (b, mut to, mut n) = (buffer()?, buffer()?, count()?) => q.unique_into(&b, &mut to, &mut n));
    queue!("Queue::run_length_encode", q, (b, mut to, mut n) = (buffer()?, buffer()?, places()?) => q.run_length_encode(&b, &mut to, &mut n));
    queue!("Queue::run_length_encode_into", q, (b, mut to, mut n, mut c) = (buffer()?, buffer()?, places()?, count()?) => q.run_length_encode_into(&b, &mut to, &mut n, &mut c));
    queue!("Queue::select", q, (b, f, mut to) = (buffer()?, flags()?, buffer()?) => q.select(&b, &f, &mut to));
    queue!("Queue::select_into", q, (b, f, mut to, mut n) = (buffer()?, flags()?, buffer()?, count()?) => q.select_into(&b, &f, &mut to, &mut n));
    queue!("Queue::partition_flagged", q, (b, f, mut to, mut others) = (buffer()?, flags()?, buffer()?, buffer()?) => q.partition_flagged(&b, &f, &mut to, &mut others));
    queue!("Queue::partition_flagged_into", q, (b, f, mut to, mut others, mut n) = (buffer()?, flags()?, buffer()?, buffer()?, count()?) => q.partition_flagged_into(&b, &f, &mut to, &mut others, &mut n));
    queue!("Queue::positions", q, (f, mut to) = (flags()?, places()?) => q.positions(&f, &mut to));
    queue!("Queue::positions_into", q, (f, mut to, mut n) = (flags()?, places()?, count()?) => q.positions_into(&f, &mut to, &mut n));
    queue!("Queue::histogram", q, (b, mut n) = (buffer()?, places()?) => q.histogram(&b, 0.0..=1.0, &mut n));
    queue!("Queue::histogram_between", q, (b, l, mut n) = (buffer()?, nine()?, places()?) => q.histogram_between(&b, &l, &mut n));
    queue!("Queue::segmented_reduce", q, (b, o, mut to) = (buffer()?, offsets()?, buffer()?) => q.segmented_reduce(&b, &o, ReduceOp::Sum, 0.0, &mut to));
    queue!("Queue::top_k", q, (b, mut to) = (buffer()?, buffer()?) => q.top_k(&b, &mut to));
    queue!("Queue::top_k_places", q, (b, mut to, mut at) = (buffer()?, buffer()?, places()?) => q.top_k_places(&b, &mut to, &mut at));
    queue!("Queue::bottom_k", q, (b, mut to) = (buffer()?, buffer()?) => q.bottom_k(&b, &mut to));
    queue!("Queue::bottom_k_places", q, (b, mut to, mut at) = (buffer()?, buffer()?, places()?) => q.bottom_k_places(&b, &mut to, &mut at));
    queue!("Queue::segmented_sort", q, (mut b, o) = (buffer()?, offsets()?) => q.segmented_sort(&mut b, &o));
    queue!("Queue::segmented_sort_by_key", q, (mut b, mut v, o) = (buffer()?, buffer()?, offsets()?) => q.segmented_sort_by_key(&mut b, &mut v, &o));
    queue!("Queue::segmented_sort_descending", q, (mut b, o) = (buffer()?, offsets()?) => q.segmented_sort_descending(&mut b, &o));
    queue!("Queue::segmented_sort_by_key_descending", q, (mut b, mut v, o) = (buffer()?, buffer()?, offsets()?) => q.segmented_sort_by_key_descending(&mut b, &mut v, &o));
    queue!("Queue::host_fn", q => q.host_fn(|| ()));
    // SAFETY: nothing is put on the stream.
    queue!("Queue::enqueue", q => unsafe { q.enqueue(Uses::new("none"), nothing) });
    queue!("Queue::record_timed", q => q.record_timed());

    // ---- operations -----------------------------------------------------------------------
    let op = pending();
    list.answers("Op::poll", move || once(op));
    let op = idle.done();
    list.answers("Op::poll", move || drop(at_once(op)));
    let op = pending();
    list.answers("Op::is_complete", move || assert!(!op.is_complete()));
    let mut op = pending();
    list.answers("Op::try_take", move || assert!(op.try_take().is_none()));
    let op = pending();
    list.refuses("Op::synchronize", move || op.synchronize());
    let op = pending();
    list.answers("Op::queued", move || drop(op.queued()));
    let op = pending();
    list.answers("Op::submitted", move || drop(op.submitted()));
    let op = idle.upload_into(idle.pinned::<f32>(8)?, &mut idle.zeros::<f32>(8).queued()?);
    list.answers("Op::accepted", move || drop(op.accepted().map_err(gpu_await::Error::from)));
    let op = idle.upload_into(idle.pinned::<f32>(8)?, &mut idle.zeros::<f32>(8).queued()?);
    list.answers("Op::without_value", move || drop(op.without_value()));
    let op = pending();
    list.answers("Op::abandon", move || op.abandon());
    let op = pending();
    list.answers("Op::map_value", move || once(op.map_value(drop)));
    let (a, b) = (pending(), pending());
    list.answers("Op::and", move || once(a.and(b)));
    let ops = [pending(), pending()];
    list.answers("join::join_all", move || once(join_all(ops)));

    // ---- events ---------------------------------------------------------------------------
    each! { refuses:
        "Event::synchronize", event => |e| e.synchronize();
        "Event::export", event => |e| e.export();
    }
    let (e, s) = (device.event(), full.clone());
    list.refuses("Event::record", move || e.record(&s));
    let (e, s) = (device.event_builder().timed(true).build()?, full.clone());
    list.refuses("Event::record", move || e.record(&s));
    for event in [device.event(), device.event_builder().timed(true).build()?] {
        queue!("Event::record_in", q, event = event => event.record_in(q));
    }
    list.refuses("Event::elapsed_since", move || end.elapsed_since(&start));
    each! { answers:
        "Event::done", event => |e| once(e.done());
        "Event::is_complete", event => |e| assert!(!e.is_complete());
    }
    if is_cuda && let Ok(event) = device.event_builder().interprocess(true).build() {
        event.record(full)?;
        each! { answers:
            "Event::is_complete", event => |e| assert!(!e.is_complete());
        }
        each! { refuses:
            "Event::done", event => |e| e.done().submitted();
            "Event::export", event => |e| e.export();
        }
    }

    // ---- memory ---------------------------------------------------------------------------
    let b = buffer()?;
    list.refuses("DeviceBuffer::into_dlpack", move || {
        b.into_dlpack(&[8], DlpackConsumer::Synchronized).map(drop).map_err(Error::from)
    });
    let p = device.pinned::<f32>(8)?;
    list.refuses("PinnedBuffer::into_dlpack", move || {
        p.into_dlpack(&[8], DlpackConsumer::Synchronized).map(drop).map_err(Error::from)
    });
    let tensor = || -> Result<DlpackTensor> {
        Ok(idle.zeros::<u8>(4).queued()?.into_dlpack(&[4], DlpackConsumer::Synchronized)?)
    };
    let (s, t) = (full.clone(), tensor()?);
    list.refuses("Stream::adopt_dlpack", move || {
        // SAFETY: refused, or dropped.
        unsafe { s.adopt_dlpack::<u8>(t) }.map(drop).map_err(Error::from)
    });
    let (s, t) = (full.clone(), tensor()?);
    list.refuses("Stream::adopt_dlpack_frozen", move || {
        // SAFETY: likewise.
        at_once(unsafe { s.adopt_dlpack_frozen::<u8>(t) })
    });
    let d = device.clone();
    list.refuses("DlpackConsumer::from_argument", move || {
        // SAFETY: no stream is adopted but the legacy default stream.
        unsafe { DlpackConsumer::from_argument(&d, None) }
    });
    let b = buffer()?;
    list.answers("DeviceBuffer::freeze", move || once(b.freeze()));
    let p = device.pinned::<f32>(8)?;
    list.answers("PinnedBuffer::into_mapped", move || p.into_mapped());
    let mapped = || -> Result<Mapped<f32>> { Ok(device.pinned(8)?.into_mapped()) };
    let (mut m, pending) = (mapped()?, mapped()?);
    list.answers("Mapped::host", move || once(Box::pin(m.host())));
    let mut m = mapped()?;
    // Nothing is pending, so that there is nothing to wait for.
    list.answers("Mapped::host_blocking", move || m.host_blocking().map(drop));
    list.answers("Mapped::into_pinned", move || once(pending.into_pinned()));
    let f = frozen.clone();
    list.answers("Frozen::view", move || f.view().len());

    // ---- kernels --------------------------------------------------------------------------
    let d = device.clone();
    list.refuses("kernel!::load", move || at_once(kernels::empty::load(&d)));
    let d = device.clone();
    list.refuses("kernel!::load_blocking", move || kernels::empty::load_blocking(&d));
    let (k, s, mut b) = (scale.clone(), full.clone(), buffer()?);
    list.refuses("kernel!::launch", move || k.launch(&s, 2.0, &mut b).queued());
    if let Some(double) = &double {
        macro_rules! launch {
            ($name:literal, $on:ident) => {
                let (k, s, mut b) = (double.clone(), $on.clone(), buffer()?);
                list.refuses($name, move || {
                    s.launch(&k, LaunchConfig::new(1, 1), (&mut b,)).queued()
                });
            };
        }
        launch!("Stream::launch", full);
        launch!("Device::launch", device);
        let (k, s, mut b) = (double.clone(), full.clone(), buffer()?);
        list.refuses("Queue::launch", move || {
            s.batch(|q| q.launch(&k, LaunchConfig::new(1, 1), (&mut b,))).queued()
        });
        let d = device.clone();
        list.answers("Kernel::host", move || {
            drop(Kernel::<()>::host(&d, "nothing", |_: &gpu_await::Grid| {}));
        });
    }
    let (k, d) = (scale.clone(), device.clone());
    list.refuses("Occupancy::active_blocks", move || k.occupancy().active_blocks(32, 0));
    let k = scale.clone();
    list.refuses("Occupancy::resident_blocks", move || {
        k.occupancy().resident_blocks(&LaunchConfig::new(1, 32))
    });
    let k = scale.clone();
    list.refuses("Occupancy::best_block", move || k.occupancy().best_block(|_| 0, None));
    let k = scale.clone();
    list.refuses("Occupancy::config_for_elements", move || k.occupancy().config_for_elements(100));
    list.refuses("Module::load", {
        let d = d.clone();
        move || at_once(Module::load(&d, Image::ptx("")))
    });
    list.refuses("Module::load_blocking", {
        let d = d.clone();
        move || Module::load_blocking(&d, Image::ptx(""))
    });
    list.refuses("Module::compile", move || at_once(Module::compile(&d, CudaSource::new(""))));
    if let Some(module) = module {
        // SAFETY: refused before the kernel is looked up.
        list.refuses("Module::kernel", move || unsafe { module.kernel::<(u64,)>("spin") });
    }

    // ---- pools and batchers ---------------------------------------------------------------
    let held = pool.try_acquire()?;
    each! { answers:
        "StreamPool::acquire", pool => |p| once(p.acquire());
        "StreamPool::acquire_by", pool => |p| once(p.acquire_by(Instant::now()));
        "StreamPool::acquire_high_priority", pool => |p| once(p.acquire_high_priority());
        "Acquire::poll", pool => |p| once(p.acquire());
        "StreamPool::try_acquire", pool => |p| drop(p.try_acquire());
        "StreamPool::drained", pool => |p| once(p.drained());
        "Drained::poll", pool => |p| once(p.drained());
        "StreamPool::drained_within", pool => |p| once(p.drained_within(Duration::from_secs(1)));
        "DrainedWithin::poll", pool => |p| once(p.drained_within(Duration::from_secs(1)));
        "StreamPool::stats", pool => |p| p.stats();
        "StreamPool::close", pool => |p| p.close();
    }
    list.answers("PooledStream::drop", move || drop((held, pooled)));
    let free = StreamPool::builder().streams(device, 1).build()?;
    let service = move || {
        free.service(|stream: PooledStream, ()| async move { stream.zeros::<u8>(1).queued() })
    };
    let (mut waiting, mut called, mut polled) = (service(), service(), service());
    list.answers("StreamPool::service", service);
    list.answers("PoolService::poll_ready", move || {
        drop(waiting.poll_ready(&mut Context::from_waker(Waker::noop())));
    });
    list.answers("PoolService::call", move || drop(called.call(())));
    list.refuses("PoolCall::poll", move || at_once(polled.call(())));
    let (batcher, worker) = Batcher::builder().build(|numbers: Vec<u32>| async move {
        Ok::<_, Error>(numbers.into_iter().map(Ok).collect())
    });
    each! { answers:
        "Batcher::call", batcher => |b| b.call(1);
        "Batcher::call_by", batcher => |b| b.call_by(1, Instant::now());
        "Call::poll", batcher => |b| once(b.call(1));
        "Batcher::stats", batcher => |b| b.stats();
        "Batcher::service", batcher => |b| b.service();
        "BatchService::poll_ready", batcher => |b| {
            drop(b.service().poll_ready(&mut Context::from_waker(Waker::noop())));
        };
        "BatchService::call", batcher => |b| {
            let mut service = b.service();
            drop(service.poll_ready(&mut Context::from_waker(Waker::noop())));
            once(service.call(1));
        };
    }
    list.answers("BatchWorker::poll", move || once(worker));

    // ---- testing --------------------------------------------------------------------------
    let gate = Gate::close(&device.stream()?)?;
    each! { refuses:
        "Gate::close", full => |s| Gate::close(&s);
        "Gate::close_for", full => |s| Gate::close_for(&s, SOON);
    }
    list.answers("Gate::open", move || gate.open());
    let (manual, stepper) = testing::manual();
    let op = manual.default_stream().zeros::<u8>(10);
    let stepper = Arc::new(stepper);
    each! { answers:
        "Stepper::step", stepper => |s| assert!(!s.step(0) || is_a_poller());
        "Stepper::run_until_idle", stepper => |s| s.run_until_idle();
    }
    list.answers("Op::drop", move || drop((op, manual)));
    drops(&mut list, world)?;
    // Last: a device that is closed refuses everything.
    each! { refuses:
        "Device::close", device => |d| at_once(d.close(Duration::from_secs(1)));
    }
    Ok(list)
}

/// A stream that others use as well, with work that waits for `full`.
fn unshared(device: &Device, full: &Stream) -> Result<Stream> {
    let stream = device.stream()?;
    // SAFETY: nobody uses the handle.
    let _handle = unsafe { stream.as_raw() };
    stream.wait(full).queued()?;
    Ok(stream)
}

/// The drop of each kind of handle: of the last one, with work pending.
fn drops(list: &mut Methods, World { device, full, .. }: &World) -> Result<()> {
    let stream = || -> Result<Stream> {
        let stream = device.stream()?;
        stream.wait(full).queued()?;
        Ok(stream)
    };
    let op = |op: Op<_>| op;
    let last = stream()?;
    drop(last.zeros::<u8>(100).queued()?);
    list.answers("Stream::drop", move || drop(last));
    let buffer = stream()?.zeros::<u8>(100).queued()?;
    list.answers("DeviceBuffer::drop", move || drop(buffer));
    let mut crossed = stream()?.zeros::<u8>(5000).queued()?;
    stream()?.fill(&mut crossed, 1).queued()?;
    list.answers("DeviceBuffer::drop", move || drop(crossed));
    let download = stream()?.batch(|q| q.download(&q.zeros::<u8>(100)?));
    list.answers("Op::drop", move || drop(op(download)));
    let event: Event = stream()?.record()?;
    list.answers("Event::drop", move || drop(event));
    let timed = stream()?.record_timed()?;
    list.answers("Event::drop", move || drop(timed));
    let pinned = device.pinned::<u8>(100)?;
    list.answers("PinnedBuffer::drop", move || drop(pinned));
    let flag = device.pinned_flag()?;
    list.answers("PinnedFlag::drop", move || drop(flag));
    Ok(())
}
