//! [`Captured`]: work of another library as a graph node.
//!
//! It is captured alone, on a stream that nothing else uses, because a capture takes everything put on its stream. On a host device the
//! library's functions are kept instead, and each launch calls them.
//!
//! A library that asked for it is called before each launch, under the stream's lock, with the launch's outcome. A failure fails that
//! launch and everything that the graph writes (`each_launch_has_an_outcome`). The library is also notified of a refused launch, outside
//! the lock (`a_refused_launch_is_told`).
//!
//! | captured work | left by |
//! |---|---|
//! | in a list, and in the graphs compiled from it | the drop of the last of them |
//! | dropped | retirement: the reaper destroys it and drops the values it keeps; after `main` it is leaked |

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use gpu_await_protocol::sync::Mutex;

use super::footprint::{Footprint, Name};
use super::kernel_launch::{KernelCode, KernelLaunch};
use super::lent::only_kept;
use super::outcome::{Dependency, LateOutcomes, RunOutcome, WorkOfOutcome, WorkOutcome};
use super::raw::{Raw, Refusal};
use super::{SubmitError, explain};
use crate::backend::{
    ArgBlock, DeviceKind, DriverResult, Function, Grid, KernelCall, LaunchShape, RawGraph,
    StreamOptions,
};
use crate::error::{DriverCode, Error, ErrorDetail, Result};
use crate::runtime::partitions::{EndingShare, Share};
use crate::runtime::stream_state::StreamState;
use crate::runtime::{Engine, UserList};
use crate::thread::contain;
use crate::thread::role;
use crate::thread::role::Role;

/// A library's callback before each launch of its work, which may refuse the launch.
pub(super) type Told = Box<dyn FnMut(WorkOutcome) -> Result<()> + Send>;

/// What a library reports about its work during the capture.
#[derive(Default)]
pub(crate) struct Recorder {
    /// The ranges that it declared.
    pub(super) args: RefCell<ArgBlock>,
    /// Its work on a host device.
    pub(super) twins: RefCell<Vec<Box<dyn FnMut() + Send>>>,
    /// The callbacks before each launch.
    pub(super) told: RefCell<Vec<Told>>,
}

pub(crate) struct Captured {
    name: Arc<str>,
    function: Function,
    args: ArgBlock,
    is_told: bool,
    told: Arc<Mutex<Vec<Told>>>,
    _graph: CapturedGraph,
}

/// A captured graph, and the values that its work needs.
pub(super) struct CapturedGraph {
    /// `None` only inside `drop`.
    remains: Option<CaptureRemains>,
    /// The partition that its nodes run in.
    partition: Option<Arc<Share>>,
}

struct CaptureRemains {
    engine: Arc<Engine>,
    raw: RawGraph,
    _kept: Mutex<Vec<Box<dyn Any + Send>>>,
    /// Set once the graph has no owner.
    _partition: Option<EndingShare>,
}

/// Captures the work of `calls` instead of putting it on `stream`.
pub(crate) fn capture(
    stream: &Arc<StreamState>,
    footprint: &mut Footprint<'_>,
    recorder: &Recorder,
    calls: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
) -> Result<Arc<Captured>, SubmitError> {
    let engine = &stream.engine;
    footprint.validate(engine).map_err(|error| footprint.poison(error))?;
    let Some(mut kept) = only_kept(footprint.take_lent()) else {
        // Lent memory goes back to the caller after the first launch.
        let op = footprint.name().to_arc();
        return Err(footprint.poison(ErrorDetail::NotInGraph { op }.into()).into());
    };
    match captured(stream, calls) {
        Ok(raw) => {
            let (name, args) = (footprint.name().to_arc(), recorder.args.take());
            let function = match engine.backend.kind() {
                DeviceKind::Cuda => Function::Captured(raw.graph),
                DeviceKind::Host => {
                    // Only these functions take this lock: one thread at a time runs them, and nothing they drop waits for a lock of this crate.
                    let twins = gpu_await_protocol::lock::Mutex::new(recorder.twins.take());
                    let each = move |_: &Grid, _: &ArgBlock| {
                        twins.lock().iter_mut().for_each(|twin| twin());
                    };
                    let (twin, kernel) = (Arc::new(each), name.clone());
                    Function::Host { twin, kernel, waits_first: false }
                }
            };
            let told = recorder.told.take();
            let (is_told, told) = (!told.is_empty(), Arc::new(Mutex::new(told)));
            // Dropped by the same thread as the library's other values.
            kept.push(Box::new(told.clone()));
            let _graph = CapturedGraph::new(stream, raw, kept);
            Ok(Arc::new(Captured { name, function, args, is_told, told, _graph }))
        }
        Err(refusal) => {
            // The background thread has the device's context.
            engine.background.drop_later(Box::new((
                kept,
                recorder.twins.take(),
                recorder.told.take(),
            )));
            let error = explain(stream, footprint.name(), refusal);
            Err(footprint.poison(error).into())
        }
    }
}

/// Captures the work of `calls` into a graph.
pub(super) fn captured(
    stream: &Arc<StreamState>,
    calls: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
) -> std::result::Result<RawGraph, Refusal> {
    if stream.driver.is_confined_by_others() {
        let (call, code) = ("cuStreamBeginCapture", DriverCode::NOT_SUPPORTED);
        return Err(Refusal::Driver(DriverCode { call, code }));
    }
    let engine = &stream.engine;
    let backend = &*engine.backend;
    let mut spare = stream.captures().lock();
    let raw = match *spare {
        _ if backend.kind() == DeviceKind::Host => stream.driver.raw,
        Some(raw) => raw,
        None => {
            let partition = stream.driver.partition().map(|share| share.raw());
            let options = StreamOptions { partition, ..StreamOptions::default() };
            *spare.insert(backend.stream_create(options)?)
        }
    };
    let (mut calls, mut called) = (Some(calls), None);
    let mut code =
        || called = calls.take().map(|calls| calls(&Raw { stream, backend, raw, note: None }));
    // SAFETY: nothing else uses the stream, which the engine owns; the caller of the code vouches for the work
    // that it puts there.
    let graph = unsafe { backend.graph_capture(raw, &mut code) };
    match (called, graph) {
        (Some(Ok(())), Ok(graph)) => Ok(graph),
        (called, graph) => {
            // The state of a stream after a failed capture is unknown.
            if let Some(raw) = spare.take() {
                engine.errand(move |engine| {
                    // SAFETY: nothing else uses it.
                    unsafe { engine.backend.stream_destroy(raw) }.ok();
                });
            }
            drop(spare);
            let refused = graph.map(|graph| {
                // SAFETY: nothing was compiled from it.
                unsafe { backend.graph_destroy(&graph) }.ok();
            });
            // The library's error is more specific.
            Err(called
                .and_then(Result::err)
                .or(refused.err().map(Refusal::Driver))
                .unwrap_or(Refusal::Closed))
        }
    }
}

impl Captured {
    /// The launch of the whole graph.
    pub(crate) fn launch<'a>(self: &'a Arc<Self>) -> KernelLaunch<'a> {
        let (shape, args) = (LaunchShape::NONE, &self.args);
        KernelLaunch::new(self, &self.function, shape, args)
    }
}

impl KernelCode for Captured {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn is_told(&self) -> bool {
        self.is_told
    }

    fn tell(&self, raw: &Raw<'_>, outcomes: &LateOutcomes) -> std::result::Result<(), Refusal> {
        let _role = role::enter(Role::Enqueuing);
        for told in self.told.lock().iter_mut() {
            let outcome = RunOutcome::of_next(Name::Kernel(&self.name), raw.stream);
            outcomes.push(Dependency::own(outcome.clone()));
            let told = contain::catch(|| told(WorkOutcome::new(&outcome)));
            told.unwrap_or_else(|message| {
                let op = self.name.clone();
                Err(ErrorDetail::EnqueuePanicked { op, message }.into())
            })
            .map_err(Refusal::Foreign)?;
        }
        Ok(())
    }

    fn tell_refused(&self, error: &Error) {
        let _role = role::enter(Role::Enqueuing);
        for told in self.told.lock().iter_mut() {
            let outcome = WorkOutcome::refused(&self.name, error);
            // The launch stays refused, whatever the library returns.
            drop(contain::catch(|| told(outcome)));
        }
    }
}

impl CapturedGraph {
    /// Its kernels, if it is a chain of kernels; they live as long as the graph.
    pub(super) fn kernels(&self) -> DriverResult<Option<Vec<KernelCall>>> {
        let Some(CaptureRemains { engine, raw, .. }) = &self.remains else { return Ok(None) };
        // SAFETY: the graph exists, and nothing else refers to it.
        unsafe { engine.backend.graph_kernels(raw) }
    }

    pub(super) fn new(stream: &StreamState, raw: RawGraph, kept: Vec<Box<dyn Any + Send>>) -> Self {
        let (engine, partition) = (stream.engine.clone(), stream.driver.partition().cloned());
        let remains = CaptureRemains { engine, raw, _kept: Mutex::new(kept), _partition: None };
        CapturedGraph { remains: Some(remains), partition }
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        let Some(mut remains) = self.remains.take() else { return };
        remains._partition = self.partition.take().map(Share::ending);
        let engine = remains.engine.clone();
        // Every graph compiled from it keeps it until its own last launch is complete.
        engine.retire_owner(remains, UserList::new());
    }
}

impl Drop for CaptureRemains {
    fn drop(&mut self) {
        let Some(_in_driver) = self.engine.in_driver() else { return };
        // SAFETY: nothing made from it exists any more.
        if unsafe { self.engine.backend.graph_destroy(&self.raw) }.is_err() {
            self.engine.state.count_unreturned();
        }
    }
}
