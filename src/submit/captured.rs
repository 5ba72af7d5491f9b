//! [`Captured`]: work of another library as a node of graphs.
//!
//! It is captured by itself, on a stream that nothing else uses: a capture takes all that anybody puts on its stream. On a host
//! device the library's functions for that are kept, and called by each launch.
//!
//! A library that asked for it is told of each launch, in front of it and under the lock of the stream, and gets its outcome: what fails is
//! that launch, with all that the graph writes (`each_launch_has_an_outcome`).
//!
//! | captured work | left by |
//! |---|---|
//! | in a list, and in what was compiled of it | the drop of the last of them |
//! | dropped | retired, destroyed by the reaper, and what it keeps dropped; after `main`, left where it is |

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use parking_lot::Mutex;

use super::code::{KernelCode, KernelLaunch};
use super::footprint::Footprint;
use super::outcome::{Dependency, LateOutcomes, RunOutcome, WorkOutcome};
use super::raw::{Raw, Refusal};
use super::{SubmitError, explain};
use crate::backend::{ArgBlock, DeviceKind, Function, Grid, LaunchShape, RawGraph, StreamOptions};
#[cfg(all(feature = "blas", feature = "cuda"))]
use crate::backend::{DriverResult, KernelCall};
use crate::error::{ErrorDetail, Result};
use crate::runtime::stream_state::StreamState;
use crate::runtime::{Engine, UserList};
use crate::thread::contain;
use crate::thread::exit::ExitGuard;
use crate::thread::role;
use crate::thread::role::Role;

/// Code of a library that is told of each launch of its work, and may refuse it.
pub(super) type Told = Box<dyn FnMut(WorkOutcome) -> Result<()> + Send>;

/// What a library says of its work while that is captured.
#[derive(Default)]
pub(crate) struct Recorder {
    /// The ranges that it declared.
    pub(super) args: RefCell<ArgBlock>,
    /// What it does on a host device.
    pub(super) twins: RefCell<Vec<Box<dyn FnMut() + Send>>>,
    /// Who is told of each launch.
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

/// A graph that was captured, and what its work needs.
pub(super) struct CapturedGraph {
    /// `None` only inside `drop`.
    remains: Option<CaptureRemains>,
}

struct CaptureRemains {
    engine: Arc<Engine>,
    raw: RawGraph,
    _kept: Mutex<Vec<Box<dyn Any + Send>>>,
}

/// Captures what `calls` puts on the stream that it gets, instead of putting it on `stream`.
pub(crate) fn capture(
    stream: &Arc<StreamState>,
    footprint: &mut Footprint<'_>,
    recorder: &Recorder,
    calls: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
) -> Result<Arc<Captured>, SubmitError> {
    let engine = stream.engine();
    footprint.validate(engine).map_err(|error| footprint.poison(error))?;
    let Some(mut kept) = footprint.take_kept() else {
        // Lent memory is the caller's again when the first launch is complete.
        let op = footprint.name().to_arc();
        return Err(footprint.poison(ErrorDetail::NotInGraph { op }.into()).into());
    };
    match captured(stream, calls) {
        Ok(raw) => {
            let (name, args) = (footprint.name().to_arc(), recorder.args.take());
            let function = match engine.backend.kind() {
                DeviceKind::Cuda => Function::Captured(raw.graph),
                DeviceKind::Host => {
                    let twins = Mutex::new(recorder.twins.take());
                    let each = move |_: &Grid, _: &ArgBlock| {
                        twins.lock().iter_mut().for_each(|twin| twin());
                    };
                    Function::Host(Arc::new(each), name.clone())
                }
            };
            let told = recorder.told.take();
            let (is_told, told) = (!told.is_empty(), Arc::new(Mutex::new(told)));
            // Dropped where the rest of the library's is.
            kept.push(Box::new(told.clone()));
            let _graph = CapturedGraph::new(engine.clone(), raw, kept);
            Ok(Arc::new(Captured { name, function, args, is_told, told, _graph }))
        }
        Err(refusal) => {
            // Its context is current there.
            engine.drop_later(Box::new((kept, recorder.twins.take(), recorder.told.take())));
            let error = explain(stream, footprint.name(), refusal);
            Err(footprint.poison(error).into())
        }
    }
}

/// The graph of what `calls` puts on the stream that it gets.
pub(super) fn captured(
    stream: &Arc<StreamState>,
    calls: impl FnOnce(&Raw<'_>) -> std::result::Result<(), Refusal>,
) -> std::result::Result<RawGraph, Refusal> {
    let engine = stream.engine();
    let backend = &*engine.backend;
    let mut spare = engine.captures.lock();
    let raw = match *spare {
        _ if backend.kind() == DeviceKind::Host => stream.raw(),
        Some(raw) => raw,
        None => *spare.insert(backend.stream_create(StreamOptions::default())?),
    };
    let (mut calls, mut called) = (Some(calls), None);
    let mut code =
        || called = calls.take().map(|calls| calls(&Raw { stream, backend, raw, note: None }));
    // SAFETY: nobody else uses the stream, which the engine has; what the code puts there its caller vouches for.
    let graph = unsafe { backend.graph_capture(raw, &mut code) };
    match (called, graph) {
        (Some(Ok(())), Ok(graph)) => Ok(graph),
        (called, graph) => {
            // What becomes of a stream whose capture failed is the library's and the driver's secret.
            if let Some(raw) = spare.take() {
                engine.errand(move |engine| {
                    // SAFETY: nobody has it any more.
                    unsafe { engine.backend.stream_destroy(raw) }.ok();
                });
            }
            drop(spare);
            let refused = graph.map(|graph| {
                // SAFETY: nothing was made of it.
                unsafe { backend.graph_destroy(&graph) }.ok();
            });
            // The library knows more of what went wrong.
            Err(called
                .and_then(Result::err)
                .or(refused.err().map(Refusal::Driver))
                .unwrap_or(Refusal::Closed))
        }
    }
}

impl Captured {
    /// The launch that is all of it.
    pub(crate) fn launch<'a>(self: &'a Arc<Self>) -> KernelLaunch<'a> {
        let (shape, args) = (LaunchShape::NONE, &self.args);
        KernelLaunch { code: self, function: &self.function, shape, args }
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
            let outcome = Arc::new(RunOutcome::of(self.name.clone(), raw.stream));
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
}

impl CapturedGraph {
    /// What it consists of, if that is kernels one behind the other; they live as long as this.
    #[cfg(all(feature = "blas", feature = "cuda"))]
    pub(super) fn kernels(&self) -> DriverResult<Option<Vec<KernelCall>>> {
        let Some(CaptureRemains { engine, raw, .. }) = &self.remains else { return Ok(None) };
        // SAFETY: the graph is there, and nobody else has it.
        unsafe { engine.backend.graph_kernels(raw) }
    }

    pub(super) fn new(engine: Arc<Engine>, raw: RawGraph, kept: Vec<Box<dyn Any + Send>>) -> Self {
        CapturedGraph { remains: Some(CaptureRemains { engine, raw, _kept: Mutex::new(kept) }) }
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        let Some(remains) = self.remains.take() else { return };
        let engine = remains.engine.clone();
        // Whatever was compiled of it keeps it until its last launch is complete.
        engine.retire_owner(remains, UserList::new());
    }
}

impl Drop for CaptureRemains {
    fn drop(&mut self) {
        let Some(_in_driver) = ExitGuard::in_driver() else { return };
        if self.engine.lost().is_some() {
            return;
        }
        // SAFETY: nothing that was made of it is there any more.
        if unsafe { self.engine.backend.graph_destroy(&self.raw) }.is_err() {
            self.engine.count_unreturned();
        }
    }
}
