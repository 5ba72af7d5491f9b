//! [`CompiledGraph`]: a list's launches as a graph of the driver's, compiled for one stream.
//!
//! | a graph | left by |
//! |---|---|
//! | has the launches of its last list | a setter that changes a node |
//! | uncertain: a setter failed | being dropped |
//! | dropped | retired behind its last launch, destroyed by the reaper; on a lost device, or after `main`, the driver's part is left where it is |

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::code::KernelCode;
use super::list::{List, Node};
use super::raw::{Raw, Refusal};
use crate::backend::{DevicePtr, DriverResult, NodeLaunch, RawGraph};
use crate::memory::reclaim::retired::{Remnant, UserList};
use crate::runtime::stream_state::Turn;
use crate::runtime::{Engine, Point};
use crate::thread::exit;
use crate::thread::exit::ExitGuard;

/// A user's values, which stay until the last launch is complete.
pub(crate) type Kept = Arc<dyn Any + Send + Sync>;

pub(crate) struct CompiledGraph {
    engine: Arc<Engine>,
    /// `None` only inside `drop`.
    raw: Option<RawGraph>,
    /// Its kernels.
    code: Vec<Arc<dyn KernelCode>>,
    keeps: Option<Kept>,
    /// Its last launch.
    last: Option<Point>,
}

impl Node {
    fn launch(&self) -> NodeLaunch<'_> {
        NodeLaunch { function: &self.function, shape: &self.shape, args: &self.args }
    }
}

impl Raw<'_> {
    /// Compiles a list's launches for this stream.
    pub(crate) fn compile(
        &self,
        nodes: &[Node],
        edges: &[(u32, u32)],
        code: &[Arc<dyn KernelCode>],
        keeps: Option<&Kept>,
    ) -> DriverResult<CompiledGraph> {
        let mut launches = nodes.iter().map(Node::launch);
        // SAFETY: nothing is launched. The code is kept by the graph.
        let raw = unsafe { self.backend.graph_compile(&mut launches, edges) }?;
        let engine = self.stream.engine().clone();
        // ORDERING: Relaxed, here and below: a statistic.
        engine.counters.graphs.fetch_add(1, Ordering::Relaxed);
        let (code, keeps) = (code.to_vec(), keeps.cloned());
        Ok(CompiledGraph { engine, raw: Some(raw), code, keeps, last: None })
    }

    /// Gives nodes of a graph of this stream, by their numbers, the launches of a list's.
    pub(crate) fn set<'n>(
        &self,
        graph: &CompiledGraph,
        changes: impl Iterator<Item = (usize, &'n Node)>,
    ) -> DriverResult<()> {
        let Some(raw) = &graph.raw else { unreachable!("taken by the drop only") };
        let mut changes = changes.map(|(at, node)| (at, node.launch()));
        // SAFETY: the graph is this stream's, whose lock the caller has, and its code is that of the nodes.
        unsafe { self.backend.graph_set(raw, &mut changes) }
    }

    /// Launches a graph of this stream as its next ticket. It has the launches of a list whose memory is in the footprint, or
    /// was entered with that ticket.
    pub(crate) fn launch_graph(&self, graph: &mut CompiledGraph) -> DriverResult<()> {
        let Some(raw) = &graph.raw else { unreachable!("taken by the drop only") };
        // Also if it is refused: it may have begun.
        graph.last = Some(self.stream.point(self.stream.submitted() + 1));
        // SAFETY: as in `Raw::launch`, for each of the list's; its edges order what touches the same memory, and the
        // stream all of them behind what is in front of it.
        unsafe { self.backend.graph_launch(raw, self.raw) }
    }
}

impl CompiledGraph {
    /// Launches it, which has the launches of the list, as the turn's next ticket; returns how many commands that were.
    pub(crate) fn launch(&mut self, list: &mut List, turn: &mut Turn<'_, '_>) -> u32 {
        let (stream, engine) = (turn.stream, turn.stream.engine());
        if engine.is_closed() {
            list.refuse(stream, 0, Refusal::Closed);
            return 0;
        }
        if turn.is_crowded(1) {
            turn.expect_to_block();
        }
        match Raw::of(turn).launch_graph(self) {
            Ok(()) => 1,
            Err(code) => {
                list.refuse(stream, 0, code.into());
                0
            }
        }
    }
}

impl Drop for CompiledGraph {
    fn drop(&mut self) {
        let Some(raw) = self.raw.take() else { return };
        self.engine.counters.graphs.fetch_sub(1, Ordering::Relaxed);
        let (engine, code) = (self.engine.clone(), std::mem::take(&mut self.code));
        let users = UserList::from_iter(self.last.take());
        let owner = Box::new(GraphRemains { engine, raw, _code: code, _kept: self.keeps.take() });
        let what = Remnant::Foreign { ptr: DevicePtr::NULL, bytes: 0, owner };
        if exit::begun() {
            return std::mem::forget(what);
        }
        self.engine.retire(what, users);
    }
}

struct GraphRemains {
    engine: Arc<Engine>,
    raw: RawGraph,
    _code: Vec<Arc<dyn KernelCode>>,
    _kept: Option<Kept>,
}

impl Drop for GraphRemains {
    fn drop(&mut self) {
        let Some(_in_driver) = ExitGuard::in_driver() else { return };
        if self.engine.lost().is_none() {
            // SAFETY: its last launch is complete, and nobody else has it.
            if unsafe { self.engine.backend.graph_destroy(&self.raw) }.is_err() {
                self.engine.count_unreturned();
            }
        }
    }
}
