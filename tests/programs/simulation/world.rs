//! A device, what a program made of it, and the checks.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::executor::block_on;
use gpu_await::testing::{self, DriverCall, FaultHandle, Stepper};
use gpu_await::{
    Completion, Device, DeviceBuffer, Error, ErrorKind, Event, Graph, Grid, In, InOut, Kernel, Op,
    Region, Stream, kernels,
};

use super::joined::mixed;
use super::model::{Contents, Frontier, Ledger};
use super::program::{BUFFERS, EVENTS, STREAMS};
use super::watched::{Erased, Expect, Flag, Got, Kept, ON_PURPOSE, Outcome, differs};

/// What is wrong, in words.
pub(crate) type Check<T = ()> = Result<T, String>;

/// See [`mixed`].
pub(crate) type Mixed = Graph<(In<f32>, InOut<f32>, f32)>;

pub(crate) struct World {
    pub(crate) device: Device,
    pub(crate) step: Stepper,
    pub(crate) handle: FaultHandle,
    /// Failures that were asked for and are still to come.
    pub(crate) faults: Vec<Fault>,
    pub(crate) streams: [Option<Stream>; STREAMS],
    /// What must have run before the next work of each stream.
    pub(crate) frontiers: [Frontier; STREAMS],
    pub(crate) buffers: [Option<(DeviceBuffer<f32>, Contents)>; BUFFERS],
    pub(crate) events: [Option<(Event, Frontier)>; EVENTS],
    pub(crate) ops: Vec<Kept>,
    /// Never polled again; dropped when all else was checked.
    pub(crate) leaked: Vec<Kept>,
    pub(crate) axpy: kernels::axpy,
    pub(crate) scale: kernels::scale,
    pub(crate) trap: Kernel<()>,
    /// There until the end.
    pub(crate) graph: Option<Mixed>,
    pub(crate) region: Region,
    pub(crate) ledger: Arc<Ledger>,
    loss: Pin<Box<dyn Future<Output = Error>>>,
    loss_flag: Arc<Flag>,
    /// Something was done that may lose the device.
    pub(crate) may_be_lost: bool,
    /// The device was seen to be lost.
    pub(crate) lost: bool,
    pub(crate) closed: bool,
    /// A refused call may have kept device memory for good.
    memory_kept: bool,
    /// The calls of the driver, if they are wanted, with a mark between steps.
    pub(crate) trace: Option<Vec<&'static str>>,
}

/// A call that is to fail.
pub(crate) struct Fault {
    pub(crate) call: DriverCall,
    pub(crate) countdown: u64,
    pub(crate) kind: ErrorKind,
    pub(crate) after_effect: bool,
}

impl Fault {
    /// The kind of the error that its victim reports.
    fn shows_as(&self) -> ErrorKind {
        match (self.call, self.kind) {
            // A stream that cannot be asked is as good as lost.
            (DriverCall::EventQuery, _) | (_, ErrorKind::DeviceLost) => ErrorKind::DeviceLost,
            (DriverCall::Register, _) => ErrorKind::OutOfMemory,
            (_, kind) => kind,
        }
    }
}

/// The name in the record of calls.
fn name(call: DriverCall) -> String {
    let mut name = String::new();
    for letter in format!("{call:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_lowercase());
    }
    name
}

impl World {
    pub(crate) fn new(mode: Completion) -> Self {
        let (faults, handle) = testing::faults();
        // Room for some of the buffers of a program, not for all.
        let faults = faults.spare_bytes_per_stream(1 << 10);
        let (device, step) = testing::manual_with_faults_completion(faults, mode);
        let on_purpose = |_: &Grid| std::panic::resume_unwind(Box::new(ON_PURPOSE));
        let axpy = block_on(kernels::axpy::load(&device)).expect("axpy loads");
        let scale = block_on(kernels::scale::load(&device)).expect("scale loads");
        let state = (axpy, scale);
        let graph = device
            .graph(state, |q, (axpy, scale), (x, mut y, a)| mixed(q, (axpy, scale), &x, &mut y, a));
        let mut world = World {
            graph: Some(graph),
            region: Region::new(),
            axpy: block_on(kernels::axpy::load(&device)).expect("axpy loads"),
            scale: block_on(kernels::scale::load(&device)).expect("scale loads"),
            trap: Kernel::host(&device, "trap", on_purpose).expect("a twin"),
            loss: Box::pin(device.lost()),
            device,
            step,
            handle,
            faults: Vec::new(),
            streams: Default::default(),
            frontiers: Default::default(),
            buffers: Default::default(),
            events: Default::default(),
            ops: Vec::new(),
            leaked: Vec::new(),
            ledger: Arc::default(),
            loss_flag: Flag::new(false),
            may_be_lost: false,
            lost: false,
            closed: false,
            memory_kept: false,
            trace: None,
        };
        let waker = Waker::from(world.loss_flag.clone());
        assert!(world.loss.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        world.handle.record();
        world
    }

    /// The failures that struck since the last time, as the errors that they may show as.
    pub(crate) fn struck(&mut self) -> Vec<ErrorKind> {
        let mut kinds = Vec::new();
        if self.faults.is_empty() && self.trace.is_none() {
            return kinds;
        }
        let calls = self.handle.calls();
        if let Some(trace) = &mut self.trace {
            // Those of the thread that drops what nobody uses any more come when it has the time.
            trace.extend(calls.iter().filter(|call| **call != "graph_destroy"));
            trace.push("|");
        }
        for call in calls {
            self.faults.retain_mut(|fault| {
                if name(fault.call) != call {
                    return true;
                }
                fault.countdown -= 1;
                if fault.countdown > 0 {
                    return true;
                }
                kinds.push(fault.shows_as());
                self.may_be_lost |= fault.shows_as() == ErrorKind::DeviceLost;
                self.memory_kept |= match fault.call {
                    DriverCall::Alloc => fault.after_effect,
                    DriverCall::Free => !fault.after_effect,
                    _ => false,
                };
                false
            });
        }
        self.handle.record();
        kinds
    }

    /// Compares how a call ended with how it must have: `Ok`, or the error's kind where that was
    /// right.
    pub(crate) fn judge<T>(
        &mut self,
        what: &str,
        result: gpu_await::Result<T>,
        must: Result<(), ErrorKind>,
    ) -> Check<Result<T, ErrorKind>> {
        self.judge_any(what, result, must, self.lost || self.closed)
    }

    /// [`judge`](Self::judge), for what puts no work on the device: it may succeed on one that is gone.
    pub(crate) fn judge_look<T>(
        &mut self,
        what: &str,
        result: gpu_await::Result<T>,
    ) -> Check<Result<T, ErrorKind>> {
        self.judge_any(what, result, Ok(()), false)
    }

    fn judge_any<T>(
        &mut self,
        what: &str,
        result: gpu_await::Result<T>,
        must: Result<(), ErrorKind>,
        is_gone: bool,
    ) -> Check<Result<T, ErrorKind>> {
        let struck = self.struck();
        match (result, must) {
            (Ok(_), _) if is_gone => Err(format!("{what} was taken by a device that is gone")),
            (Ok(_), Err(kind)) => Err(format!("{what} was taken, it must fail: {kind:?}")),
            (Ok(value), Ok(())) => Ok(Ok(value)),
            (Err(error), _) => {
                let kind = error.kind();
                let right = must.err() == Some(kind)
                    || struck.contains(&kind)
                    || (kind == ErrorKind::DeviceLost && self.may_be_lost)
                    || (kind == ErrorKind::Closed && self.closed);
                if right {
                    return Ok(Err(kind));
                }
                Err(format!("{what} failed: {error}; it must be {must:?}, struck by {struck:?}"))
            }
        }
    }

    pub(crate) fn keep<T: 'static>(
        &mut self,
        name: &str,
        op: Op<T>,
        got: fn(T) -> Got,
        expect: Expect,
        frontier: Frontier,
    ) {
        let name = format!("{name} ({op:?})");
        let op = Box::new(Erased(op, got));
        self.ops.push(Kept { op, expect, flag: None, frontier, name });
    }

    /// Takes the end of a poll; true if the future is through.
    pub(crate) fn settle(&mut self, at: usize, outcome: Outcome) -> Check<bool> {
        let result = match outcome {
            Outcome::Pending => return Ok(false),
            Outcome::Ready(result) => result,
            Outcome::Panicked(said) => {
                let kept = self.ops.swap_remove(at);
                let right = matches!(kept.expect, Expect::Panic) && said == ON_PURPOSE;
                return if right {
                    Ok(true)
                } else {
                    Err(format!("{} panicked: {said}", kept.name))
                };
            }
        };
        self.struck();
        let kept = self.ops.swap_remove(at);
        let Kept { name, expect, .. } = &kept;
        let got = match result {
            Ok(got) => got,
            Err(error) if error.kind() == ErrorKind::DeviceLost && self.may_be_lost => {
                return Ok(true);
            }
            Err(error) => return Err(format!("{name} resolved with an error: {error}")),
        };
        if let Some(wrong) = differs(&got, expect) {
            return Err(format!("{name} resolved with {wrong}"));
        }
        let early = kept.frontier.values().find(|function| !self.ledger.has_run(**function));
        if let Some(function) = early {
            return Err(format!("{name} is ready, host function {function} has not run"));
        }
        if let (Got::Buffer(buffer), Expect::Buffer(contents, place)) = (got, kept.expect) {
            self.buffers[place] = Some((buffer, contents));
        }
        Ok(true)
    }

    /// What holds after every step.
    pub(crate) fn check(&mut self) -> Check {
        self.struck();
        if let Some(violation) = self.ledger.violation() {
            return Err(violation);
        }
        if let Some(error) = self.device.lost().now_or_never() {
            self.lost = true;
            if !self.may_be_lost {
                return Err(format!("lost without a reason: {error}"));
            }
        }
        Ok(())
    }

    /// What holds when everything ran: nobody sleeps.
    pub(crate) fn check_awake(&mut self) -> Check {
        // A call that fails now delays what a later look makes good.
        let delayed = !self.struck().is_empty() || !self.faults.is_empty();
        let sleeper = self.ops.iter().find(|kept| kept.sleeps());
        match sleeper.filter(|_| !delayed) {
            Some(kept) => Err(format!("all ran, and nobody woke {}", kept.name)),
            None => Ok(()),
        }
    }

    /// The end: every future resolves, by wake-ups alone, and everything is given back.
    pub(crate) fn finish(&mut self) -> Check {
        for at in (0..self.ops.len()).rev() {
            if self.ops[at].flag.is_none() {
                let outcome = self.ops[at].poll(false);
                self.settle(at, outcome)?;
            }
        }
        self.drain()?;
        self.step.run_until_idle();
        self.check()?;
        if self.lost && !self.loss_flag.is_woken() {
            return Err("lost, and who waits for that was not woken".to_owned());
        }
        self.ops.clear();
        self.leaked.clear();
        (self.graph, self.region) = (None, Region::new());
        self.buffers = Default::default();
        self.events = Default::default();
        self.streams = Default::default();
        self.check_given_back()
    }

    fn drain(&mut self) -> Check {
        let mut idle = 0;
        while !self.ops.is_empty() {
            self.step.run_until_idle();
            self.check()?;
            let before = self.ops.len();
            let mut polled = false;
            for at in (0..before).rev() {
                if !self.ops[at].sleeps() {
                    polled = true;
                    let outcome = self.ops[at].poll(false);
                    self.settle(at, outcome)?;
                }
            }
            self.check()?;
            idle = if polled { 0 } else { idle + 1 };
            if idle > 3 + self.faults.len() {
                let names: Vec<_> = self.ops.iter().map(|kept| &kept.name).collect();
                return Err(format!("never woken: {names:?}"));
            }
        }
        Ok(())
    }

    fn check_given_back(&mut self) -> Check {
        for _ in 0..3 + self.faults.len() {
            self.step.run_until_idle();
        }
        self.check()?;
        let stats = self.device.stats();
        let held =
            (stats.allocations, stats.allocated_bytes, stats.lent_bytes, stats.pending_bytes);
        if held != (0, 0, 0, 0) {
            return Err(format!("never given back: {stats:?}"));
        }
        if stats.graphs != 0 {
            return Err(format!("graphs are left: {stats:?}"));
        }
        if self.lost {
            return Ok(());
        }
        if (stats.in_flight, stats.pinned_used_bytes, stats.quarantined_bytes) != (0, 0, 0) {
            return Err(format!("never given back: {stats:?}"));
        }
        let used = self.device.memory().map_err(|error| error.to_string())?.used_bytes;
        if used > 0 && !self.memory_kept {
            return Err(format!("{used} bytes of device memory were never freed"));
        }
        // A thread of its own drops what was the user's.
        let end = Instant::now() + Duration::from_secs(10);
        while self.ledger.alive() > 0 {
            if Instant::now() > end {
                return Err(format!("{} values were never dropped", self.ledger.alive()));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}
