//! [`CompiledGraph`]: a list's launches as a driver graph, compiled for one stream.
//!
//! | a graph | left by |
//! |---|---|
//! | has the launches of its last list | a setter that changes a node |
//! | uncertain: a setter failed | its drop |
//! | evicted, or without users of its stream: [`GraphCell`] | its drop |
//! | dropped | retirement behind its last launch: the reaper destroys it |
//!
//! On a lost device, or after `main`, the driver's part is leaked.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use gpu_await_protocol::sync::{Mutex, MutexGuard};

use super::edges::EdgeKind;
use super::kernel_launch::KernelCode;
use super::list::List;
use super::raw::{Raw, Refusal};
use crate::backend::{DriverResult, GraphEdge, RawGraph};
use crate::error::DriverCode;
use crate::runtime::graph_budget::{Evictable, Evicted, PlaceClaim};
use crate::runtime::partitions::{EndingShare, Share};
use crate::runtime::progress::{Overlap, OverlapCounters, Overlapping};
use crate::runtime::stream_state::{OfStream, StreamHandle, Turn};
use crate::runtime::traced_op::TracedWork;
use crate::runtime::{Engine, Point, UserList};

/// A user's values, kept until the last launch is complete.
pub(crate) type Kept = Arc<dyn Any + Send + Sync>;

pub(crate) struct CompiledGraph {
    engine: Arc<Engine>,
    /// `None` only inside `drop`.
    raw: Option<RawGraph>,
    /// Its kernels.
    code: Vec<Arc<dyn KernelCode>>,
    keeps: Option<Kept>,
    /// The partition that its nodes run in.
    partition: Option<Arc<Share>>,
    /// Its last launch.
    last: Option<Point>,
    fates: EdgeFates,
}

/// How many of a graph's kernels overlap with the one in front of them, and why the others do not.
#[derive(Default)]
struct EdgeFates {
    /// Programmatic edges are switched off, so no kernel overlaps, whatever is counted here.
    is_off: bool,
    programmatic: u64,
    behind_several: u64,
    behind_other_work: u64,
    /// The last node that is behind several.
    last: Option<u32>,
    /// The driver refused programmatic edges.
    is_refused: bool,
}

impl EdgeFates {
    fn enter(&mut self, second: u32, kind: EdgeKind) {
        match kind {
            EdgeKind::Full => {}
            EdgeKind::Programmatic => self.programmatic += 1,
            EdgeKind::BehindOtherWork => self.behind_other_work += 1,
            // Counted once, however many edges it has.
            EdgeKind::BehindSeveral if self.last == Some(second) => {}
            EdgeKind::BehindSeveral => {
                self.behind_several += 1;
                self.last = Some(second);
            }
        }
    }

    /// Counts a launch of the graph.
    fn count(&self, counters: &OverlapCounters) {
        if self.is_off {
            let held_back = self.programmatic + self.behind_several + self.behind_other_work;
            if held_back > 0 {
                counters.count(Overlapping::SwitchedOff, held_back);
            }
            return;
        }
        let programmatic =
            if self.is_refused { Overlapping::Refused } else { Overlapping::Overlaps };
        let counts = [
            (programmatic, self.programmatic),
            (Overlapping::BehindSeveral, self.behind_several),
            (Overlapping::BehindOtherWork, self.behind_other_work),
        ];
        counts.into_iter().filter(|(_, count)| *count > 0).for_each(|(what, count)| {
            counters.count(what, count);
        });
    }
}

/// A compiled graph's place with its owner: an unused graph is evicted when the device has too many, or when its stream is
/// gone.
pub(crate) struct GraphCell {
    engine: Arc<Engine>,
    graph: Mutex<Option<CompiledGraph>>,
    /// The time of its last launch.
    used_ns: AtomicU64,
    /// Whether it has one of the device's permits.
    has_place: AtomicBool,
}

impl GraphCell {
    /// An empty cell, without a permit.
    pub(crate) fn new(engine: &Arc<Engine>) -> Arc<Self> {
        Arc::new(GraphCell {
            engine: engine.clone(),
            graph: Mutex::default(),
            used_ns: AtomicU64::new(engine.pacing.now()),
            has_place: AtomicBool::new(false),
        })
    }

    /// [Locks](Self::lock) a new one with a permit, if the device has one for its graph. The lock is held throughout: where many
    /// cells compete for the last permit, the graph could otherwise be evicted before its launch, and work that only a graph can
    /// run would be launched without one (`graphs_that_need_it_share_one_place`).
    pub(crate) fn enter(
        self: &Arc<Self>,
        stream: &StreamHandle,
        claim: PlaceClaim,
    ) -> Option<MutexGuard<'_, Option<CompiledGraph>>> {
        let graph = self.graph.lock();
        let weak: Weak<dyn Evictable> = Arc::<GraphCell>::downgrade(self);
        // ORDERING: Relaxed, here and below: the lock orders it. Set before the request: the budget forgets cells without a permit.
        self.has_place.store(true, Ordering::Relaxed);
        if !self.engine.graphs.enter(weak, self.engine.pacing.now(), claim) {
            self.has_place.store(false, Ordering::Relaxed);
            return None;
        }
        let weak: Weak<dyn OfStream> = Arc::<GraphCell>::downgrade(self);
        stream.has(weak);
        Some(graph)
    }

    /// Locks its graph, which is not evicted meanwhile. `None` if the graph was evicted and the permit with it.
    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, Option<CompiledGraph>>> {
        let graph = self.graph.lock();
        // ORDERING: Relaxed: the lock orders `has_place`; `used_ns` is a hint.
        if !self.has_place.load(Ordering::Relaxed) {
            return None;
        }
        self.used_ns.store(self.engine.pacing.now(), Ordering::Relaxed);
        Some(graph)
    }

    /// Whether edges of its graph are programmatic: there is a graph, and the driver took them.
    pub(crate) fn has_programmatic_edges(&self) -> bool {
        let raw = |graph: &CompiledGraph| graph.raw.as_ref().is_some_and(|raw| raw.overlaps);
        self.graph.lock().as_ref().is_some_and(raw)
    }

    /// Returns its permit, if it has one.
    fn leave(&self) -> bool {
        // ORDERING: Relaxed, as above.
        let left = self.has_place.swap(false, Ordering::Relaxed);
        if left {
            self.engine.graphs.leave();
        }
        left
    }
}

impl Evictable for GraphCell {
    fn used_ns(&self) -> u64 {
        // ORDERING: Relaxed: a hint.
        self.used_ns.load(Ordering::Relaxed)
    }

    fn has_place(&self) -> bool {
        // ORDERING: Relaxed: the budget asks under its lock, and a late eviction does no harm.
        self.has_place.load(Ordering::Relaxed)
    }

    fn give_up(&self) -> Option<Evicted> {
        let mut place = self.graph.try_lock()?;
        let graph = place.take();
        let left = self.leave();
        drop(place);
        left.then(|| Box::new(graph) as Evicted)
    }
}

impl OfStream for GraphCell {
    fn stream_is_gone(&self) {
        // A graph in use is being dropped already: it will not be launched again.
        drop(self.give_up());
    }
}

impl Drop for GraphCell {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Raw<'_> {
    /// Compiles a list's launches for this stream. If the driver has no memory for the graph, evicts idle graphs: the next one can have their memory.
    pub(crate) fn compile(&self, list: &List, keeps: Option<&Kept>) -> DriverResult<CompiledGraph> {
        if self.stream.driver.is_confined_by_others() {
            return Err(DriverCode {
                call: "cuGraphAddKernelNode",
                code: DriverCode::NOT_SUPPORTED,
            });
        }
        let launches: Vec<_> = (0..list.len()).map(|number| list.launch(number)).collect();
        let engine = self.stream.engine.clone();
        let may_overlap = engine.options.overlap == Overlap::LaunchesAndEdges;
        let mut fates = EdgeFates { is_off: !may_overlap, ..EdgeFates::default() };
        let mut edges = Vec::new();
        for ((first, second), kind) in list.edge_kinds() {
            fates.enter(second, kind);
            let overlaps = may_overlap && kind == EdgeKind::Programmatic;
            edges.push(GraphEdge { first, second, overlaps });
        }
        let partition = self.stream.driver.partition().cloned();
        let raw = {
            let _alone = partition.as_ref().map(|share| share.compile());
            let confined = partition.as_ref().map(|share| share.raw());
            // SAFETY: nothing is launched. The code is kept by the graph.
            unsafe { self.backend.graph_compile(&launches, &edges, confined) }
        };
        let raw = raw.inspect_err(|code| {
            engine.graphs.refused(*code);
            if code.code == DriverCode::OUT_OF_MEMORY {
                engine.graphs.evict_idle(engine.pacing.now());
            }
        })?;
        let (code, keeps) = (list.code().cloned().collect(), keeps.cloned());
        fates.is_refused = may_overlap && !raw.overlaps;
        Ok(CompiledGraph { engine, raw: Some(raw), code, keeps, partition, last: None, fates })
    }

    /// Updates the nodes of a graph of this stream to the changed launches of a list of the same shape.
    pub(crate) fn set(&self, graph: &CompiledGraph, list: &List) -> DriverResult<()> {
        let Some(raw) = &graph.raw else { unreachable!("taken by the drop only") };
        let changed = list.changed().iter().map(|number| *number as usize);
        let mut changes = changed.map(|number| (number, list.launch(number)));
        let _alone = graph.partition.as_ref().map(|share| share.compile());
        let confined = graph.partition.as_ref().map(|share| share.raw());
        // SAFETY: the graph is this stream's, whose lock the caller has, and its code is that of the nodes.
        let set = unsafe { self.backend.graph_set(raw, &mut changes, confined) };
        set.inspect_err(|code| graph.engine.graphs.refused(*code))
    }

    /// Refuses a whole list of this stream.
    pub(crate) fn refuse(&self, list: &mut List, code: DriverCode) {
        list.refuse(self.stream, 0, code.into());
    }

    /// Launches a graph of this stream as its next ticket. It has the launches of a list whose memory is in the footprint, or
    /// was entered with that ticket.
    pub(crate) fn launch_graph(&self, graph: &mut CompiledGraph) -> DriverResult<()> {
        let Some(raw) = &graph.raw else { unreachable!("taken by the drop only") };
        self.moved(TracedWork::List, 0);
        // Even if the launch is refused: it may have begun.
        let ticket = self.stream.progress.timeline.submitted() + 1;
        graph.last = Some(self.stream.point(ticket));
        self.stream.overlap.demand_full(ticket);
        // SAFETY: as in `Raw::launch`, for each of the list's; its edges order accesses to the same memory, and the
        // stream orders all of them behind earlier work.
        unsafe { self.backend.graph_launch(raw, self.raw) }?;
        graph.fates.count(&graph.engine.state.counters.overlaps);
        Ok(())
    }
}

impl CompiledGraph {
    /// Launches the graph, which has the launches of the list, as the turn's next ticket; returns the number of commands.
    pub(crate) fn launch(&mut self, list: &mut List, turn: &mut Turn<'_, '_>) -> u32 {
        let (stream, engine) = (turn.stream, &turn.stream.engine);
        if engine.ending.is_closed() {
            list.refuse(stream, 0, Refusal::Closed);
            return 0;
        }
        match list.traced(turn, 1, |_, raw| raw.launch_graph(self)) {
            (Ok(()), commands) => commands,
            (Err(code), _) => {
                list.refuse(stream, 0, code.into());
                0
            }
        }
    }
}

impl Drop for CompiledGraph {
    fn drop(&mut self) {
        let Some(raw) = self.raw.take() else { return };
        let (engine, code) = (self.engine.clone(), std::mem::take(&mut self.code));
        let users = UserList::from_iter(self.last.take());
        let (_kept, _partition) = (self.keeps.take(), self.partition.take().map(Share::ending));
        let remains = GraphRemains { engine, raw, _code: code, _kept, _partition };
        self.engine.retire_owner(remains, users);
    }
}

struct GraphRemains {
    engine: Arc<Engine>,
    raw: RawGraph,
    _code: Vec<Arc<dyn KernelCode>>,
    _kept: Option<Kept>,
    _partition: Option<EndingShare>,
}

impl Drop for GraphRemains {
    fn drop(&mut self) {
        let Some(_in_driver) = self.engine.in_driver() else { return };
        // SAFETY: its last launch is complete, and nothing else refers to it.
        if unsafe { self.engine.backend.graph_destroy(&self.raw) }.is_err() {
            self.engine.state.count_unreturned();
        }
    }
}
