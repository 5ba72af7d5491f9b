//! [`Region`]: what a replayed batch remembers of its last runs.
//!
//! A run of the closure produces lists, one for each stretch of launches between two operations that a graph cannot contain. The lists of a
//! run are numbered; each number has a slot for each stream, and another one for what is left of the list behind an interruption: where
//! other tasks use the stream, the shape of the whole list stays known (`an_interruption_leaves_the_graph`).
//!
//! | the slot | a list of another shape | a list of its shape |
//! |---|---|---|
//! | empty | is launched plainly; the slot remembers its shape | |
//! | has a shape | the same | is compiled, and launched |
//! | has a graph | the same; the graph is dropped | nodes that differ are set, and it is launched |
//! | its graph was evicted, or exceeded the limit | the same | as for a slot with a shape |
//! | a setter failed | | is launched plainly; the graph is dropped |
//!
//! A **shape** is the kernels, in order, and the edges between them, which are computed anew in each run. Arguments and launch
//! configurations may differ.
//!
//! # Invariants
//! 1. A graph launch runs exactly what the list contains: each node was compiled or set from it (`arguments_are_never_stale`).
//! 2. A graph is launched on the stream that it was compiled for, under that stream's lock.
#![forbid(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use crate::backend::{ArgBlock, LaunchShape};
use crate::batch::report;
use crate::batch::report::{ListOutcome, ListReport, OpSite, Pictured, Report};
use crate::error::{Error, Result};
use crate::runtime::stream_state::{Listed, StreamHandle, StreamState, Turn};
use crate::submit::{
    Calls, CompiledGraph, Edge, Footprint, GraphCell, KernelLaunch, LaunchEntry, List, Node, Raw,
    SubmitError, submit_in_front, submit_listed,
};
use crate::thread::contain;

/// What a replayed batch remembers; see [`Stream::replay`](crate::Stream::replay).
///
/// It keeps the kernels of the graphs it compiled, and no buffers. It can be used on several streams and
/// remembers each, without keeping any open: graphs that were compiled for a stream go with it.
///
/// A region is for one closure: it compares the lists of a run with those of the previous run, by position.
/// Closures of different shapes that alternate in one region are launched operation by operation each time
/// ([`ListOutcome::Differs`]); give each its own region.
///
/// # Examples
/// See [`Stream::replay`](crate::Stream::replay).
#[derive(Default)]
pub struct Region {
    /// Lists to be reused by the next runs.
    #[expect(clippy::vec_box, reason = "a stream has the box in the meantime")]
    lists: Vec<Box<List>>,
    streams: Vec<OnStream>,
    report: Report,
    /// The lists of the last run.
    last: Vec<ListReport>,
}

struct OnStream {
    stream: Weak<StreamState>,
    /// For each list as a whole, and for what is left of it where it was interrupted.
    lists: Vec<[ListSlot; 2]>,
}

/// A list's number in a run, on one stream.
#[derive(Default)]
struct ListSlot {
    /// The shape of the last list, and the contents of its nodes.
    nodes: Vec<Remembered>,
    edges: Vec<Edge>,
    graph: Option<Arc<GraphCell>>,
}

/// The outcome of a list: launched as its graph, or else one by one.
type Launched = std::result::Result<ListOutcome, ListOutcome>;

struct Remembered {
    /// Its address, for comparison only.
    kernel: usize,
    name: Arc<str>,
    shape: LaunchShape,
    args: ArgBlock,
}

impl Region {
    /// Makes one that remembers nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Region::default()
    }

    /// Returns what became of its lists so far, including those of runs that panicked.
    #[must_use]
    pub fn report(&self) -> Report {
        self.report
    }

    /// Returns what became of each list of the last run, in order, and why: for a list that was not replayed,
    /// what differed; for one that was cut short, what ended it. The same is reported as `tracing` events,
    /// target `gpu_await::replay`, level `TRACE`.
    #[must_use]
    pub fn last_run(&self) -> &[ListReport] {
        &self.last
    }

    /// Draws what it remembers in the DOT language: for each list of each stream the launches, with their
    /// configurations and memory ranges, and which of them wait for which.
    #[must_use]
    pub fn dot(&self) -> String {
        let (mut clusters, mut first) = (String::new(), 0);
        for (stream, on) in self.streams.iter().enumerate() {
            let slots = on.lists.iter().flatten().enumerate();
            for (at, slot) in slots.filter(|(_, slot)| !slot.nodes.is_empty()) {
                let (list, of) = (at / 2, if at % 2 == 0 { "" } else { "rest of " });
                let picture = |node: &Remembered| Pictured::of(&node.name, &node.shape, &node.args);
                let nodes: Vec<Pictured> = slot.nodes.iter().map(picture).collect();
                let title = format!("stream {stream}, {of}list {list}");
                report::cluster(&mut clusters, &title, first, &nodes, &slot.edges);
                first += nodes.len();
            }
        }
        report::dot(&clusters)
    }

    /// An empty list.
    pub(super) fn fresh(&mut self) -> Box<List> {
        self.lists.pop().unwrap_or_default()
    }

    /// Reports a list that another thread put on the stream.
    pub(super) fn enter_interrupted(&mut self, list: &List) {
        self.enter(list, Err(ListOutcome::Interrupted));
        let ended_by = list.interrupted_by().map(|by| match &by.name {
            Ok(kernel) => OpSite::kernel(kernel, by.at),
            Err(verb) => OpSite::verb(verb, by.at),
        });
        if let Some(last) = self.last.last_mut() {
            last.ended_by = ended_by;
        }
    }

    /// Counts and reports a list that was submitted.
    fn enter(&mut self, list: &List, launched: Launched) {
        let outcome = self.count(list, launched);
        self.last.push(ListReport { launches: list.nodes().len(), outcome, ended_by: None });
    }

    /// Counts a list that was submitted.
    fn count(&mut self, list: &List, launched: Launched) -> ListOutcome {
        let report = &mut self.report;
        if list.is_refused() {
            report.failed += 1;
            return ListOutcome::Failed;
        }
        match &launched {
            Ok(ListOutcome::Replayed { nodes_set }) => {
                report.replayed += 1;
                report.nodes_set += *nodes_set as u64;
            }
            // It is already counted.
            Ok(_) => {}
            Err(ListOutcome::Interrupted) => report.interrupted += 1,
            Err(_) => report.plain += 1,
        }
        launched.unwrap_or_else(|outcome| outcome)
    }

    /// Keeps a submitted list for the next runs; returns its refusal, if any.
    pub(super) fn take_back(&mut self, mut list: Box<List>) -> Option<Error> {
        let refused = list.take_refused();
        list.clear();
        self.lists.push(list);
        refused
    }

    /// Launches the list, which is number `number` of its run, or what is left of that behind an interruption, as the turn's next ticket;
    /// returns how many commands that were.
    pub(super) fn launch(
        &mut self,
        (turn, handle): (&mut Turn<'_, '_>, &StreamHandle),
        list: &mut List,
        (number, is_rest): (usize, bool),
    ) -> u32 {
        let is_its = |on: &OnStream| std::ptr::eq(on.stream.as_ptr(), Arc::as_ptr(turn.stream));
        let at = self.streams.iter().position(is_its).unwrap_or_else(|| {
            // Slots of streams that are gone are removed.
            self.streams.retain(|on| on.stream.strong_count() > 0);
            let stream = Arc::downgrade(turn.stream);
            self.streams.push(OnStream { stream, lists: Vec::new() });
            self.streams.len() - 1
        });
        let slots = &mut self.streams[at].lists;
        if slots.len() <= number {
            slots.resize_with(number + 1, Default::default);
        }
        let (slot, report) = (&mut slots[number][usize::from(is_rest)], &mut self.report);
        let new: Arc<GraphCell>;
        let known = slot.graph.clone();
        let mut graph = known.as_ref().and_then(|cell| cell.lock());
        let outcome = match slot.difference(list) {
            Some(difference) => {
                slot.remember(list);
                Err(difference)
            }
            None => match graph.as_mut().and_then(|graph| graph.as_mut()) {
                Some(graph) => slot.set(&Raw::of(turn), graph, list, report),
                None => {
                    slot.remember(list);
                    new = GraphCell::new(handle.engine());
                    graph = new.enter(handle, false);
                    slot.graph = graph.is_some().then(|| new.clone());
                    let place = graph.as_deref_mut();
                    place.map_or(Err(ListOutcome::NoPlace), |place| {
                        slot.compile(&Raw::of(turn), place, list, report)
                    })
                }
            },
        };
        let graph = graph.as_mut().and_then(|graph| graph.as_mut()).filter(|_| outcome.is_ok());
        let commands = match graph {
            Some(graph) => graph.launch(list, turn),
            None => list.put(turn),
        };
        self.enter(list, outcome);
        commands
    }
}

impl ListSlot {
    /// Compiles the list, whose shape came before.
    fn compile(
        &mut self,
        raw: &Raw<'_>,
        place: &mut Option<CompiledGraph>,
        list: &List,
        report: &mut Report,
    ) -> Launched {
        match raw.compile(list, None) {
            Ok(graph) => {
                report.compiled += 1;
                *place = Some(graph);
                Ok(ListOutcome::Compiled)
            }
            Err(_) => {
                report.refused += 1;
                self.graph = None;
                Err(ListOutcome::Refused)
            }
        }
    }

    /// Gives the graph the launches of the list, which has its shape.
    fn set(
        &mut self,
        raw: &Raw<'_>,
        graph: &CompiledGraph,
        list: &List,
        report: &mut Report,
    ) -> Launched {
        let mut nodes_set = 0;
        let nodes = list.nodes().iter().zip(&mut self.nodes).enumerate();
        let mut changes = nodes.filter_map(|(at, (node, known))| {
            if known.launches(node) {
                return None;
            }
            // If it was refused, everything is remembered anew.
            (known.shape, known.args) = (node.shape, node.args.clone());
            nodes_set += 1;
            Some((at, node))
        });
        let set = match changes.next() {
            Some(first) => raw.set(graph, std::iter::once(first).chain(changes)),
            None => Ok(()),
        };
        if set.is_err() {
            report.refused += 1;
            self.remember(list);
            return Err(ListOutcome::Refused);
        }
        Ok(ListOutcome::Replayed { nodes_set })
    }

    /// Why the list has another shape, if it has.
    fn difference(&self, list: &List) -> Option<ListOutcome> {
        let nodes = list.nodes();
        let is_same = self.nodes.len() == nodes.len() && self.edges == list.edges();
        let kernels = self.nodes.iter().zip(nodes);
        let other = kernels.clone().position(|(known, node)| known.kernel != list.kernel(node));
        if is_same && other.is_none() && !nodes.is_empty() {
            return None;
        }
        if self.nodes.is_empty() {
            return Some(ListOutcome::First);
        }
        let edges = self.edges.iter().zip(list.edges()).find(|(known, edge)| known != edge);
        // In the order of the waiting nodes: the first whose edges differ.
        let edge = edges.map(|(known, edge)| known.1.min(edge.1) as usize);
        let edge = edge.or_else(|| {
            let more = self.edges.get(list.edges().len()).or(list.edges().get(self.edges.len()));
            more.map(|edge| edge.1 as usize)
        });
        let first = other.into_iter().chain(edge).min().unwrap_or(self.nodes.len());
        Some(match nodes.get(first) {
            Some(node) => {
                let site = OpSite::kernel(list.kernel_name(node), node.at);
                match other {
                    _ if first >= self.nodes.len() => ListOutcome::Longer(site),
                    Some(other) if other == first => ListOutcome::Differs(site),
                    _ => ListOutcome::Reordered(site),
                }
            }
            None => ListOutcome::Shorter,
        })
    }

    /// Remembers the list's shape, and drops the graph.
    fn remember(&mut self, list: &List) {
        self.graph = None;
        self.edges.clear();
        self.edges.extend_from_slice(list.edges());
        self.nodes.clear();
        self.nodes.extend(list.nodes().iter().map(|node| Remembered {
            kernel: list.kernel(node),
            name: list.kernel_name(node).clone(),
            shape: node.shape,
            args: node.args.clone(),
        }));
    }
}

impl Remembered {
    fn launches(&self, node: &Node) -> bool {
        self.shape == node.shape && self.args == node.args
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Region { report, last, .. } = self;
        f.debug_struct("Region")
            .field("report", report)
            .field("last_run", last)
            .finish_non_exhaustive()
    }
}

/// A run of a replayed batch: the lists of its queue.
pub(crate) struct Run<'s> {
    stream: &'s Arc<StreamHandle>,
    region: RefCell<Region>,
    /// The number of its next list.
    number: Cell<usize>,
    /// Something was written to a list since the last was submitted.
    is_open: Cell<bool>,
    /// The next launch is one.
    pub(super) barrier: Cell<bool>,
    /// The first refusal of a recorded operation.
    refused: RefCell<Option<Error>>,
}

/// A run. Dropping it returns what it learned to the region, after a panic too; the recorded list is submitted before that.
pub(crate) struct RunOf<'r, 's> {
    run: Run<'s>,
    region: &'r mut Region,
}

impl<'r, 's> RunOf<'r, 's> {
    pub(crate) fn new(stream: &'s Arc<StreamHandle>, region: &'r mut Region) -> Self {
        RunOf { run: Run::new(stream, std::mem::take(region)), region }
    }

    pub(crate) fn run(&self) -> &Run<'s> {
        &self.run
    }
}

impl Drop for RunOf<'_, '_> {
    fn drop(&mut self) {
        self.run.end();
        *self.region = self.run.region.take();
    }
}

impl<'s> Run<'s> {
    fn new(stream: &'s Arc<StreamHandle>, mut region: Region) -> Self {
        region.last.clear();
        let (region, refused) = (RefCell::new(region), RefCell::new(None));
        let (number, is_open) = (Cell::new(0), Cell::new(false));
        let barrier = Cell::new(false);
        Run { stream, region, number, is_open, barrier, refused }
    }

    /// The identity of its lists to the stream.
    fn owner(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Writes a launch down; returns its ticket.
    pub(super) fn write(
        &self,
        footprint: &mut Footprint<'_>,
        launch: &KernelLaunch<'_>,
        at: &'static Location<'static>,
    ) -> Result<u64, SubmitError> {
        self.is_open.set(true);
        let fresh = || self.region.borrow_mut().fresh();
        let entry = LaunchEntry { at, is_barrier: self.barrier.replace(false) };
        submit_listed(self.stream, footprint, self.owner(), fresh, (launch, entry))
    }

    /// Submits an operation that touches fresh memory only, with the recorded list's ticket.
    pub(super) fn write_in_front(
        &self,
        footprint: &mut Footprint<'_>,
        at: &'static Location<'static>,
        (commands, calls): (u32, &mut Calls<'_>),
    ) -> Result<u64, SubmitError> {
        let fresh = || self.region.borrow_mut().fresh();
        let owner = (self.owner(), at);
        submit_in_front(self.stream, footprint, owner, fresh, (commands, calls))
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.get()
    }

    /// Reports a launch that could not be recorded.
    pub(super) fn enter_unlisted(&self, outcome: ListOutcome) {
        let mut region = self.region.borrow_mut();
        region.last.push(ListReport { launches: 1, outcome, ended_by: None });
        self.tell(&region, region.last.len() - 1);
    }

    /// Emits the reports from number `first` on.
    fn tell(&self, region: &Region, first: usize) {
        for (list, report) in region.last.iter().enumerate().skip(first) {
            contain::log(|| {
                tracing::trace!(target: "gpu_await::replay", stream = self.stream.id(), list, %report);
            });
        }
    }

    /// Submits the recorded list, as the closure ends.
    pub(crate) fn end(&self) {
        self.submit(|| None);
    }

    /// Submits the recorded list; `ended_by` is called if there is one.
    pub(super) fn submit(&self, ended_by: impl FnOnce() -> Option<OpSite>) {
        if !self.is_open.replace(false) {
            return;
        }
        let mut region = self.region.borrow_mut();
        let reported = region.last.len();
        let mut done: SmallVec<[Box<dyn Listed>; 2]> = SmallVec::new();
        let number = self.number.replace(self.number.get() + 1);
        let is_launched = self.stream.with(|turn| {
            while let Some(list) = turn.fetch_list(self.owner()) {
                if let Some(list) = (&*list as &dyn Any).downcast_ref::<List>() {
                    region.enter_interrupted(list);
                }
                done.push(list);
            }
            let Some(mut list) = turn.take_list(self.owner()) else { return false };
            let is_rest = !done.is_empty();
            let ticket = turn.stream.submitted() + 1;
            let commands = match (&mut *list as &mut dyn Any).downcast_mut::<List>() {
                Some(list) => region.launch((turn, self.stream), list, (number, is_rest)),
                None => 0,
            };
            turn.publish(ticket, commands, true);
            done.push(list);
            true
        });
        for list in done {
            let list: Box<dyn Any> = list;
            let Ok(list) = list.downcast::<List>() else { continue };
            if let Some(error) = region.take_back(list) {
                self.refused.borrow_mut().get_or_insert(error);
            }
        }
        if is_launched && let Some(last) = region.last.last_mut() {
            last.ended_by = ended_by();
        }
        self.tell(&region, reported);
    }

    /// Why a part of the recorded list was not launched.
    pub(crate) fn take_refused(&self) -> Option<Error> {
        self.refused.borrow_mut().take()
    }
}
