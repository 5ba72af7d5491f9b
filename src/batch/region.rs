//! [`Region`]: the state that a replayed batch keeps between runs.
//!
//! A run of the closure produces lists, one for each sequence of launches between operations that a graph cannot contain. The lists of a
//! run are numbered. Each number has a slot for each stream, and further slots for the rest of the list after each interruption, so the
//! shape of the whole list stays known even if other tasks use the stream (`an_interruption_leaves_the_graph`).
//!
//! A slot keeps its [`List`] between runs, and the next run rewrites it. While the list is open, the stream holds it.
//!
//! | the slot | with a list of another shape | with a list of its shape |
//! |---|---|---|
//! | is empty | launches it one by one, and keeps it | |
//! | has a list | the same | compiles and launches it |
//! | has a graph | the same; the graph is dropped | updates nodes that differ, and launches it |
//! | has lost its graph to eviction or the limit | the same | as for a slot with a list |
//! | was refused a graph by the driver | the same | compiles it in the next run; after each further refusal, in twice as many runs, up to sixteen |
//! | was in neither of the last two runs on its stream | is gone | |
//! | failed to update a node | | launches it one by one; the graph is dropped |
//!
//! A **shape** is the kernels, in order, and the edges between them. Arguments and launch configurations may differ. An interrupted
//! list is compared as far as it was written: the graph is lost only if a different kernel came before that.
//!
//! # Invariants
//! 1. A graph launch runs exactly what the list contains: each node was compiled or updated from it (`arguments_are_never_stale`).
//! 2. A graph is launched on the stream that it was compiled for, under that stream's lock.
//!
//! More than 500 lines: a region and its runs change the same slots.
#![forbid(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use crate::batch::report;
use crate::batch::report::{ListOutcome, ListReport, OpSite, Report};
use crate::error::{DriverCode, Error, Result};
use crate::runtime::graph_budget::Unserved;
use crate::runtime::stream_state::{Listed, StreamHandle, StreamState, Turn};
use crate::submit::{
    Calls, CompiledGraph, Footprint, GraphCell, KernelLaunch, LaunchEntry, List, ListShape, Raw,
    SubmitError, append, submit_in_front, submit_listed,
};
use crate::thread::{contain, locks};

/// The state that a replayed batch keeps between runs; see [`Stream::replay`](crate::Stream::replay).
///
/// It keeps the kernels of its last lists, and no buffers. It can be used on several streams and remembers each, without keeping any
/// open: a stream's graphs are dropped with the stream. A list that is missing from two runs on a stream is forgotten.
///
/// A region is for one closure: it compares the lists of a run with those of the previous run, by position.
/// Closures of different shapes that alternate in one region are launched operation by operation each time
/// ([`ListOutcome::Differs`]); give each its own region.
///
/// # Examples
/// See [`Stream::replay`](crate::Stream::replay).
#[derive(Default)]
pub struct Region {
    streams: Vec<OnStream>,
    report: Report,
    /// The lists of the last run.
    last: Vec<ListReport>,
    /// How many runs there were.
    runs: u64,
}

struct OnStream {
    stream: Weak<StreamState>,
    /// For each list of a run, a slot for the whole list and one for the rest after each interruption.
    lists: Vec<SmallVec<[ListSlot; 1]>>,
    /// The last run on the stream, and the one before.
    run: u64,
    before: u64,
}

/// A list of a run, or the rest of one, on one stream.
#[derive(Default)]
struct ListSlot {
    /// `None` while the stream holds it.
    list: Option<Box<List>>,
    graph: Option<Arc<GraphCell>>,
    /// The list's shape at its last launch, which is the graph's shape.
    shape: u64,
    /// The last run that contained it.
    run: u64,
    unserved: Unserved,
}

/// The outcome of a list: launched as its graph, or else one by one.
type Launched = std::result::Result<ListOutcome, ListOutcome>;

impl Region {
    /// Creates an empty region.
    #[must_use]
    pub fn new() -> Self {
        Region::default()
    }

    /// Returns the outcomes of its lists so far, including those of runs that panicked.
    #[must_use]
    pub fn report(&self) -> Report {
        self.report
    }

    /// Returns the outcome of each list of the last run, in order, and the reason: for a list that was not replayed, what differed; for
    /// one that was cut short, what ended it. The same is reported as `tracing` events of target `gpu_await::replay`, at level `TRACE`,
    /// or `DEBUG` if the graph got no permit. A refusal by the driver is a `WARN`.
    #[must_use]
    pub fn last_run(&self) -> &[ListReport] {
        &self.last
    }

    /// Draws the last run on each stream in the DOT language: for each list the launches, with their configurations and memory ranges,
    /// and which of them wait for which. A dashed edge leads to a kernel that may start while the other one is still finishing, and waits
    /// for it itself: the list is compiled, and the driver accepted the edge, which
    /// [`Overlap::LaunchesAndEdges`](crate::Overlap::LaunchesAndEdges) requests. An interrupted list has no edges.
    #[must_use]
    pub fn dot(&self) -> String {
        let (mut clusters, mut first) = (String::new(), 0);
        for (stream, on) in self.streams.iter().enumerate() {
            for (number, slots) in on.lists.iter().enumerate() {
                for (part, slot) in slots.iter().enumerate() {
                    let is_drawn = |list: &&List| slot.run == on.run && list.known_len() > 0;
                    let Some(list) = slot.list.as_deref().filter(is_drawn) else { continue };
                    let cell = slot.graph.as_ref();
                    let is_early = cell.is_some_and(|cell| cell.has_programmatic_edges());
                    let of = if part == 0 { "" } else { "rest of " };
                    let title = format!("stream {stream}, {of}list {number}");
                    first += report::cluster(&mut clusters, &title, first, (list, is_early));
                }
            }
        }
        report::dot(&clusters)
    }

    /// Part `part` of list `number` of a run on the stream.
    fn slot(
        &mut self,
        stream: &Arc<StreamState>,
        (number, part): (usize, usize),
    ) -> (&mut ListSlot, &mut Report) {
        let at = self.streams.iter().position(|on| on.is_of(stream)).unwrap_or_else(|| {
            // Removes slots of streams that no longer exist.
            self.streams.retain(|on| on.stream.strong_count() > 0);
            self.streams.push(OnStream {
                stream: Arc::downgrade(stream),
                lists: Vec::new(),
                run: self.runs,
                before: 0,
            });
            self.streams.len() - 1
        });
        let OnStream { lists, .. } = &mut self.streams[at];
        if lists.len() <= number {
            lists.resize_with(number + 1, Default::default);
        }
        let parts = &mut lists[number];
        if parts.len() <= part {
            parts.resize_with(part + 1, Default::default);
        }
        parts[part].run = self.runs;
        (&mut parts[part], &mut self.report)
    }

    /// Forgets lists that were in neither of the last two runs on the stream. A single run may lack them because it failed halfway.
    fn forget(&mut self, stream: &Arc<StreamState>) {
        let on_it = self.streams.iter_mut().find(|on| on.is_of(stream));
        let Some(OnStream { lists, before, .. }) = on_it else {
            return;
        };
        let is_known =
            |parts: &SmallVec<_>| parts.iter().any(|slot: &ListSlot| slot.run >= *before);
        while lists.last().is_some_and(|parts| !is_known(parts)) {
            lists.pop();
        }
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
        self.last.push(ListReport { launches: list.len(), outcome, ended_by: None });
    }

    /// Counts a list that was submitted.
    fn count(&mut self, list: &List, launched: Launched) -> ListOutcome {
        let report = &mut self.report;
        if list.refused().is_some() {
            report.failed += 1;
            return ListOutcome::Failed;
        }
        match &launched {
            Ok(ListOutcome::Replayed { nodes_set }) => {
                report.replayed += 1;
                report.nodes_set += *nodes_set as u64;
            }
            // Already counted.
            Ok(_) => {}
            Err(ListOutcome::Interrupted) => report.interrupted += 1,
            Err(outcome) => {
                report.plain += 1;
                report.no_place += u64::from(*outcome == ListOutcome::NoPlace);
            }
        }
        launched.unwrap_or_else(|outcome| outcome)
    }

    /// Launches a list as the turn's next ticket; returns the number of commands.
    fn launch(
        &mut self,
        (turn, handle): (&mut Turn<'_, '_>, &StreamHandle),
        list: &mut List,
        place: (usize, usize),
    ) -> u32 {
        let difference = difference(list);
        let (slot, report) = self.slot(turn.stream, place);
        if slot.shape != list.shape() {
            (slot.graph, slot.shape, slot.unserved) = (None, list.shape(), Unserved::default());
        }
        let new: Arc<GraphCell>;
        let known = slot.graph.clone();
        let mut graph = known.as_ref().and_then(|cell| cell.lock());
        let outcome = match difference {
            Some(difference) => Err(difference),
            None => match graph.as_mut().and_then(|graph| graph.as_mut()) {
                Some(graph) => slot.set(&Raw::of(turn), graph, list, report),
                None => match slot.unserved.claim(handle.state.engine.pacing.now()) {
                    Some(claim) => {
                        new = GraphCell::new(&handle.state.engine);
                        graph = new.enter(handle, claim);
                        slot.graph = graph.is_some().then(|| new.clone());
                        match graph.as_deref_mut() {
                            Some(place) => slot.compile(&Raw::of(turn), place, list, report),
                            None => {
                                slot.unserved.was_crowded_out();
                                Err(ListOutcome::NoPlace)
                            }
                        }
                    }
                    None => Err(ListOutcome::Refused),
                },
            },
        };
        let graph = graph.as_mut().and_then(|graph| graph.as_mut()).filter(|_| outcome.is_ok());
        let commands = match graph {
            Some(graph) => graph.launch(list, turn),
            None if list.refused().is_some() => 0,
            None => list.put(turn),
        };
        self.enter(list, outcome);
        commands
    }
}

impl OnStream {
    fn is_of(&self, stream: &Arc<StreamState>) -> bool {
        std::ptr::eq(self.stream.as_ptr(), Arc::as_ptr(stream))
    }
}

impl ListSlot {
    /// Compiles the list, whose shape is that of the last run.
    fn compile(
        &mut self,
        raw: &Raw<'_>,
        place: &mut Option<CompiledGraph>,
        list: &mut List,
        report: &mut Report,
    ) -> Launched {
        match raw.compile(list, None) {
            Ok(graph) => {
                report.compiled += 1;
                self.unserved = Unserved::default();
                *place = Some(graph);
                list.note_changes();
                Ok(ListOutcome::Compiled)
            }
            Err(code) => {
                self.unserved.was_refused();
                Err(self.refused(raw, code, list, report))
            }
        }
    }

    /// Drops the graph after the driver's refusal. The list is launched one by one, or refused as well if the device is lost.
    fn refused(
        &mut self,
        raw: &Raw<'_>,
        code: DriverCode,
        list: &mut List,
        report: &mut Report,
    ) -> ListOutcome {
        report.refused += 1;
        self.graph = None;
        if code.is_sticky() {
            raw.refuse(list, code);
        }
        ListOutcome::Refused
    }

    /// Updates the graph to the launches of the list, which has its shape.
    fn set(
        &mut self,
        raw: &Raw<'_>,
        graph: &CompiledGraph,
        list: &mut List,
        report: &mut Report,
    ) -> Launched {
        let nodes_set = list.changed().len();
        if nodes_set > 0
            && let Err(code) = raw.set(graph, list)
        {
            // It is unknown which nodes have changed.
            return Err(self.refused(raw, code, list, report));
        }
        list.note_changes();
        Ok(ListOutcome::Replayed { nodes_set })
    }
}

/// Finishes the list; returns how its shape differs from the last one's, if it does.
fn difference(list: &mut List) -> Option<ListOutcome> {
    let shape = list.finish();
    let site = |number| OpSite::kernel(list.name(number), list.at(number));
    match shape {
        ListShape::Same => None,
        ListShape::First => Some(ListOutcome::First),
        ListShape::Differs(number) => Some(ListOutcome::Differs(site(number))),
        ListShape::Reordered(number) => Some(ListOutcome::Reordered(site(number))),
        ListShape::Longer(number) => Some(ListOutcome::Longer(site(number))),
        ListShape::Shorter => Some(ListOutcome::Shorter),
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
    handle: &'s Arc<StreamHandle>,
    region: RefCell<Region>,
    /// The number of its next list, and how many times that was opened.
    number: Cell<usize>,
    parts: Cell<usize>,
    /// Whether anything was written to a list since the last one was submitted.
    is_open: Cell<bool>,
    /// Whether the next launch is a barrier.
    pub(super) barrier: Cell<bool>,
    /// The first refusal of a recorded operation.
    refused: RefCell<Option<Error>>,
    /// The outcomes of the lists of the region's earlier runs.
    earlier: Report,
}

/// A [`Run`] that, when dropped, submits the recorded list and returns its results to the region, even after a panic.
pub(crate) struct RunOf<'r, 's> {
    run: Run<'s>,
    region: &'r mut Region,
}

impl<'r, 's> RunOf<'r, 's> {
    pub(crate) fn new(handle: &'s Arc<StreamHandle>, region: &'r mut Region) -> Self {
        RunOf { run: Run::new(handle, std::mem::take(region)), region }
    }

    pub(crate) fn run(&self) -> &Run<'s> {
        &self.run
    }
}

impl Drop for RunOf<'_, '_> {
    fn drop(&mut self) {
        self.run.end();
        let Run { handle, earlier, .. } = self.run;
        let mut region = self.run.region.take();
        report::count(&handle.state.engine, &region.report);
        region.report += earlier;
        region.forget(&handle.state);
        *self.region = region;
    }
}

impl<'s> Run<'s> {
    fn new(handle: &'s Arc<StreamHandle>, mut region: Region) -> Self {
        region.last.clear();
        region.runs += 1;
        let earlier = std::mem::take(&mut region.report);
        if let Some(on) = region.streams.iter_mut().find(|on| on.is_of(&handle.state)) {
            (on.before, on.run) = (on.run, region.runs);
        }
        let (region, refused) = (RefCell::new(region), RefCell::new(None));
        let (number, parts) = (Cell::new(0), Cell::new(0));
        let (is_open, barrier) = (Cell::new(false), Cell::new(false));
        Run { handle, region, number, parts, is_open, barrier, refused, earlier }
    }

    /// Identifies its lists to the stream.
    fn owner(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// The list of the next slot.
    fn fresh(&self) -> Box<List> {
        let part = self.parts.replace(self.parts.get() + 1);
        let mut region = self.region.borrow_mut();
        let (slot, _) = region.slot(&self.handle.state, (self.number.get(), part));
        let mut list = slot.list.take().unwrap_or_else(|| {
            // Only a list that is not yet written has this shape, so no graph is mistaken for its own.
            slot.shape = 0;
            Box::default()
        });
        list.begin();
        list
    }

    /// Records a plain launch if the list is [open](append); returns its ticket.
    #[inline(always)]
    pub(super) fn append(
        &self,
        footprint: &Footprint<'_>,
        launch: &KernelLaunch<'_>,
        at: &'static Location<'static>,
    ) -> Option<u64> {
        let entry = LaunchEntry { at, is_barrier: self.barrier.get() };
        let ticket = append(&self.handle.state, footprint, self.owner(), (launch, entry))?;
        self.barrier.set(false);
        Some(ticket)
    }

    /// Records a launch; the flag says whether it [is plain](Footprint::is_plain). Returns its ticket.
    pub(super) fn write(
        &self,
        footprint: (&mut Footprint<'_>, bool),
        launch: &KernelLaunch<'_>,
        at: &'static Location<'static>,
    ) -> Result<u64, SubmitError> {
        self.is_open.set(true);
        let fresh = || self.fresh();
        let entry = LaunchEntry { at, is_barrier: self.barrier.replace(false) };
        submit_listed(&self.handle.state, footprint, self.owner(), fresh, (launch, entry))
    }

    /// Submits an operation that touches only fresh memory, with the recorded list's ticket.
    pub(super) fn write_in_front(
        &self,
        footprint: &mut Footprint<'_>,
        at: &'static Location<'static>,
        (commands, calls): (u32, &mut Calls<'_>),
    ) -> Result<u64, SubmitError> {
        let fresh = || self.fresh();
        let owner = (self.owner(), at);
        submit_in_front(&self.handle.state, footprint, owner, fresh, (commands, calls))
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
                let stream = self.handle.state.progress.id;
                match report.outcome {
                    ListOutcome::NoPlace => {
                        tracing::debug!(target: "gpu_await::replay", stream, list, %report);
                    }
                    _ => tracing::trace!(target: "gpu_await::replay", stream, list, %report),
                }
            });
        }
    }

    /// Submits the recorded list at the end of the closure.
    pub(crate) fn end(&self) {
        self.submit(|| None);
    }

    /// Submits the recorded list; `ended_by` is called if there is one.
    pub(super) fn submit(&self, ended_by: impl FnOnce() -> Option<OpSite>) {
        if !self.is_open.replace(false) {
            return;
        }
        locks::assert_none("a recorded list");
        let mut region = self.region.borrow_mut();
        let reported = region.last.len();
        let mut done: SmallVec<[Box<dyn Listed>; 2]> = SmallVec::new();
        let number = self.number.replace(self.number.get() + 1);
        self.parts.set(0);
        let is_launched = self.handle.state.with(|turn| {
            while let Some(list) = turn.fetch_list(self.owner()) {
                if let Some(list) = (&*list as &dyn Any).downcast_ref::<List>() {
                    region.enter_interrupted(list);
                }
                done.push(list);
            }
            let Some(mut list) = turn.take_list(self.owner()) else { return false };
            let place = (number, done.len());
            let ticket = turn.stream.progress.timeline.submitted() + 1;
            let commands = match (&mut *list as &mut dyn Any).downcast_mut::<List>() {
                Some(list) => region.launch((turn, self.handle), list, place),
                None => 0,
            };
            turn.publish_list(ticket, commands);
            done.push(list);
            true
        });
        for (part, list) in done.into_iter().enumerate() {
            let list: Box<dyn Any> = list;
            let Ok(mut list) = list.downcast::<List>() else { continue };
            if let Some(error) = list.refused() {
                self.refused.borrow_mut().get_or_insert_with(|| error.clone());
            }
            list.release();
            region.slot(&self.handle.state, (number, part)).0.list = Some(list);
        }
        if is_launched && let Some(last) = region.last.last_mut() {
            last.ended_by = ended_by();
        }
        self.tell(&region, reported);
    }

    /// Takes the reason why a part of a recorded list was not launched.
    pub(crate) fn take_refused(&self) -> Option<Error> {
        self.refused.borrow_mut().take()
    }
}
