//! Public methods, called where a call that waits would wait for itself: in a host function, under a submission lock, in a twin, in a
//! waker. Which ones, a list says, that makes a job of each.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::Gate;
use gpu_await::{
    Device, Error, ErrorDetail, Kernel, LaunchConfig, RawQueue, Result, Stream, Uses, kernels,
};

/// How long a call may take that must not block.
pub(crate) const SOON: Duration = Duration::from_secs(10);

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
    "Device::growable",
    "Device::host_slab",
    "Device::import_event",
    "Device::import_shared",
    "Device::pinned_async",
    "Device::preload",
    "Device::preload_cast",
    "Device::preload_gather",
    "Device::preload_scatter",
    "Device::preload_sequence",
    "Device::preload_transform",
    "Device::release_to_cudarc",
    "Device::reserve_partition",
    "Device::shared",
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
    "GrowableBuffer::shrink",
    "Module::compile",
    "Module::kernel",
    "Module::load",
    "Module::load_blocking",
    "Occupancy::active_blocks",
    "Occupancy::best_block",
    "Occupancy::config_for_elements",
    "Occupancy::resident_blocks",
    "PinnedBuffer::into_dlpack",
    "SharedBuffer::seal",
    "Stream::adopt_dlpack",
    "Stream::adopt_dlpack_frozen",
    "Stream::download_staged",
    "Stream::download_staged_into",
    "Stream::from_raw",
    "Stream::is_non_blocking",
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
pub(crate) fn is_a_poller() -> bool {
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
pub(crate) struct Methods {
    /// Where they are called.
    file: &'static str,
    calls: Vec<(&'static str, Expected, Job)>,
}

impl Methods {
    /// None yet, of those that are called in that file.
    pub(crate) fn called_in(file: &'static str) -> Self {
        Methods { file, calls: Vec::new() }
    }

    /// A call that is refused.
    pub(crate) fn refuses<T>(
        &mut self,
        name: &'static str,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) {
        self.add(name, Expected::Refused, call);
    }

    /// A call that answers, whatever it says.
    pub(crate) fn answers<T>(
        &mut self,
        name: &'static str,
        call: impl FnOnce() -> T + Send + 'static,
    ) {
        self.add(name, Expected::Answered, || Ok(call()));
    }

    fn add<T>(
        &mut self,
        name: &'static str,
        expected: Expected,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) {
        let file = self.file;
        let job = move || match call() {
            Ok(_) => Outcome::Answered,
            Err(error) => match error.detail() {
                ErrorDetail::WrongThread { .. } => match error.at() {
                    Some(at) if at.file() == file => Outcome::Refused,
                    None => Outcome::WithoutLine,
                    // Nobody's line of this crate.
                    Some(_) => Outcome::Failed(error),
                },
                _ => Outcome::Failed(error),
            },
        };
        self.calls.push((name, expected, Box::new(job)));
    }

    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.calls.iter().map(|(name, ..)| *name).collect()
    }
}

/// What must be ready when it is first polled.
pub(crate) fn at_once<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().unwrap_or_else(|| resume_unwind(Box::new(StillPending)))
}

/// Polls once, and is content with any answer.
pub(crate) fn once(future: impl Future + Unpin) {
    let mut future = future;
    drop(Pin::new(&mut future).poll(&mut Context::from_waker(Waker::noop())));
}

/// A device with a stream that is full.
pub(crate) struct World {
    pub(crate) device: Device,
    /// Runs the host function in which everything is called.
    pub(crate) host: Stream,
    /// Waits for the host function, and is given work until its queue is full.
    pub(crate) full: Stream,
    /// Has nothing to do.
    pub(crate) idle: Stream,
    /// Loaded before the host function runs: on a GPU loading waits for that.
    empty: kernels::empty,
}

impl World {
    pub(crate) fn new(device: &Device) -> Result<World> {
        let (host, full, idle) = (device.stream()?, device.stream()?, device.stream()?);
        let (device, empty) = (device.clone(), kernels::empty::load_blocking(device)?);
        Ok(World { device, host, full, idle, empty })
    }

    /// Calls everything inside a host function, a twin or a waker, while a thread sits in the queue of the
    /// full stream, which waits for that. Then everything goes on.
    pub(crate) fn run(
        &self,
        inside: Inside,
        list: impl FnOnce(&World) -> Result<Methods>,
    ) -> Result<()> {
        let (begin, begun) = channel::<Methods>();
        let (tell, told) = channel();
        let (going, gone) = channel();
        let call_all = move || {
            going.send(()).expect("somebody listens");
            let Ok(methods) = begun.recv_timeout(SOON) else { return };
            for (name, expected, job) in methods.calls {
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
        let mut methods = list(self)?;
        if !inside.refuses() {
            methods.calls.retain(|(name, ..)| !ONLY_WHERE_REFUSED.contains(name));
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
