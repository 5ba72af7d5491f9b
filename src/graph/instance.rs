//! [`Instance`]: a graph on one stream.
//!
//! | the instance | a launch with the same arguments | with other arguments |
//! |---|---|---|
//! | is fresh, or its closure failed | | the closure runs; the graph is compiled and launched |
//! | is not compiled: the driver refused | compiled in the next launch; after each further refusal, in twice as many launches, up to sixteen; captured work: compiled in each | the closure runs; the same, or compiled if the shape changed |
//! | has lost its graph to eviction or the limit | compiled, or launched one by one | the closure runs; the same |
//! | has lost its stream | | |
//! | is compiled | launched | the closure runs; nodes that differ are updated, or the graph is compiled again if the shape changed |
//!
//! # Invariants
//! 1. A launch runs exactly what the closure recorded for its arguments, whatever was updated or refused before
//!    (`arguments_are_never_stale`, `a_refused_launch_leaves_what_was_set`).
//! 2. It keeps the memory that the graph owns, and none of the arguments' memory (`what_was_passed_is_not_kept`).
//! 3. An allocation that finds no other memory takes the memory that the instance keeps (`memory_of_graphs_is_given_up_for_others`).
//! 4. It keeps no stream open, and is empty when its stream is gone (`streams_go_without_another_launch`).
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use gpu_await_protocol::sync::Mutex;

use super::slots::Passed;
use crate::backend::{ArgBlock, DriverResult};
use crate::batch::queue::Queue;
use crate::batch::report;
use crate::batch::report::Report;
use crate::error::Result;
use crate::event::{Event, Recorded};
use crate::memory::allocation::KeptByGraph;
use crate::memory::view::{Span, Tracking};
use crate::runtime::UserList;
use crate::runtime::graph_budget::{PlaceClaim, Unserved};
use crate::runtime::graph_memory::KeepsMemory;
use crate::runtime::stream_state::OfStream;
use crate::submit::{
    CompiledGraph, Footprint, GraphCell, Kept, List, ListShape, Raw, Refusal, Summary,
};
use gpu_await_protocol::hazard::Mode;

#[derive(Default)]
pub(super) struct Instance {
    /// The arguments that the list was recorded for.
    recorded_for: Option<ArgBlock>,
    recorded: RecordedList,
    /// The memory that the list touches, as one operation.
    uses: Vec<Use>,
    /// The part of that memory that was not passed as an argument.
    kept: Vec<KeptByGraph>,
    /// The events that a launch records.
    events: Vec<Event>,
    /// Whether a library is notified of each launch.
    is_told: bool,
}

/// The list, which the closure rewrites, and the graph compiled from it.
#[derive(Default)]
pub(super) struct RecordedList {
    pub(super) list: List,
    compiled: Option<Arc<GraphCell>>,
    unserved: Unserved,
}

struct Use {
    whose: Whose,
    /// Relative to the start of the argument, or of the allocation.
    range: Range<u64>,
    mode: Mode,
    tracking: Tracking,
}

#[derive(Clone, Copy, PartialEq)]
enum Whose {
    /// A passed array, by its number.
    Passed(usize),
    /// The graph's own memory, by its number.
    Kept(usize),
}

impl OfStream for Mutex<Instance> {
    fn stream_is_gone(&self) {
        // Dropped after the unlock.
        let gone = std::mem::take(&mut *self.lock());
        drop(gone);
    }
}

impl KeepsMemory for Mutex<Instance> {
    fn give_up_memory(&self) -> bool {
        let released = {
            let Some(mut instance) = self.try_lock() else { return false };
            let is_its_own = |kept: &KeptByGraph| Arc::strong_count(kept.memory()) == 1;
            if !instance.kept.iter().any(is_its_own) {
                return false;
            }
            instance.release_memory()
        };
        drop(released);
        true
    }
}

impl Instance {
    pub(super) fn is_recorded_for(&self, passed: &Passed<'_>) -> bool {
        self.recorded_for.as_ref() == Some(&passed.block)
    }

    /// Releases the memory that it keeps to the caller, which drops it under no lock, before the closure runs. If sizes are
    /// unchanged, the closure gets the same blocks in the same order, so few nodes differ. After this only the list remains usable.
    #[must_use]
    pub(super) fn release_memory(&mut self) -> Vec<KeptByGraph> {
        self.recorded_for = None;
        self.uses.clear();
        let mut kept = std::mem::take(&mut self.kept);
        kept.reverse();
        kept
    }

    /// Takes its list for the closure to rewrite. A concurrent launch of the graph begins with an empty list, as does the next launch if the
    /// closure fails.
    #[must_use]
    pub(super) fn take_recorded(&mut self) -> RecordedList {
        std::mem::take(&mut self.recorded)
    }

    /// Replaces another instance, and takes over its graph if it has none of its own because of a concurrent launch. Returns the
    /// outdated instance, for the caller to drop under no lock.
    #[must_use]
    pub(super) fn replaces(mut self, place: &mut Instance) -> Instance {
        let RecordedList { list, compiled, unserved } = &mut self.recorded;
        let other = &mut place.recorded;
        if compiled.is_none() && other.compiled.is_some() && list.takes_place_of(&other.list) {
            *compiled = other.compiled.take();
            *unserved = std::mem::take(&mut other.unserved);
        }
        std::mem::replace(place, self)
    }

    /// An instance from the closure's recording for these arguments. Unless `is_whole`, the next launch runs the closure again.
    pub(super) fn new(
        mut recorded: RecordedList,
        events: Vec<Event>,
        passed: &Passed<'_>,
        is_whole: bool,
    ) -> Self {
        if recorded.list.finish() != ListShape::Same {
            (recorded.compiled, recorded.unserved) = (None, Unserved::default());
        }
        let (uses, kept) = summarized(&recorded.list, passed);
        let is_told = recorded.list.is_told();
        recorded.list.release();
        let recorded_for = is_whole.then(|| passed.block.clone());
        Instance { recorded_for, recorded, uses, kept, events, is_told }
    }

    /// See [`report::cluster`].
    pub(super) fn write_dot(&self, into: &mut String, title: &str, first: usize) -> usize {
        let RecordedList { list, compiled, .. } = &self.recorded;
        let is_programmatic = compiled.as_ref().is_some_and(|cell| cell.has_programmatic_edges());
        report::cluster(into, title, first, (list, is_programmatic))
    }

    /// Submits the graph with the arguments that it was recorded for. The caller notifies subscribers, under no lock.
    pub(super) fn submit(
        &mut self,
        queue: &Queue<'_>,
        passed: &Passed<'_>,
        state: &Kept,
        report: &mut Report,
    ) -> Result<Untold> {
        let Instance { recorded, uses, kept, events, is_told, .. } = self;
        let RecordedList { list, compiled, unserved } = recorded;
        if list.len() == 0 {
            queue.stream.engine.check_open()?;
            return Ok(Untold::Events(events.clone()));
        }
        let mut footprint = Footprint::new("a graph");
        if list.is_across() {
            footprint.peers = true;
        }
        for Use { whose, range, mode, tracking } in &*uses {
            let (memory, start) = match whose {
                Whose::Passed(number) => {
                    let (array, _) = &passed.arrays[*number];
                    (array.memory, array.range.start)
                }
                Whose::Kept(number) => (kept[*number].memory(), 0),
            };
            let range = start + range.start..start + range.end;
            footprint.touches(&Span { memory, range, tracking: *tracking, named: None }, *mode);
        }
        let new: Arc<GraphCell>;
        let known = compiled.clone();
        let mut graph = known.as_ref().and_then(|cell| cell.lock());
        let mut is_crowded_out = false;
        if graph.is_none() {
            let engine = &queue.handle.state.engine;
            let claim = match list.needs_graph() {
                true => Some(PlaceClaim::Any),
                false => unserved.claim(engine.pacing.now()),
            };
            if let Some(claim) = claim {
                footprint.may_block = true;
                new = GraphCell::new(engine);
                graph = new.enter(queue.handle, claim);
                is_crowded_out = graph.is_none();
                if is_crowded_out {
                    unserved.was_crowded_out();
                }
                *compiled = graph.is_some().then(|| new.clone());
            }
        }
        let mut graph = graph.as_deref_mut();
        let commands = if graph.is_some() { 1 } else { list.len() as u32 };
        // If a node was refused before any driver call, the nodes are unchanged.
        let (mut was_told, mut was_prepared, mut was_plain) = (false, false, false);
        let outcomes = &queue.outcomes;
        let submitted = queue.submit_untold(&mut footprint, commands, &mut |raw| {
            if *is_told {
                was_told = true;
                list.tell(raw, outcomes)?;
            }
            let prepared = prepare(raw, list, graph.as_deref_mut(), unserved, state, report);
            was_prepared = true;
            match prepared? {
                Some(graph) => raw.launch_graph(graph)?,
                None => {
                    was_plain = true;
                    list.launch_each(raw).map_err(|(_, code)| code)?;
                }
            }
            Ok::<_, Refusal>(())
        });
        if was_plain {
            // A compiled graph would keep the values. A part of the list may run even if it was refused in the middle.
            let stream = queue.stream;
            let users = UserList::from_iter([stream.point(stream.progress.timeline.submitted())]);
            stream
                .engine
                .retire_owner((state.clone(), list.code().cloned().collect::<Vec<_>>()), users);
        }
        if was_prepared {
            // The nodes are up to date, or nothing is compiled.
            list.note_changes();
        }
        if was_plain {
            *compiled = None;
            report.no_place += u64::from(is_crowded_out);
        }
        if let Err(refused) = &submitted {
            if *is_told && !was_told {
                list.tell_refused(&refused.error);
            }
            let Report { compiled, refused, .. } = *report;
            *report = Report { compiled, refused, failed: 1, ..Report::default() };
        }
        let ticket = submitted?;
        for event in events {
            event.set_last(Recorded::in_front_of(queue.stream.point(ticket), event.node()?));
        }
        Ok(Untold::Launch(ticket))
    }
}

/// The part of a launch to do once its instance is unlocked.
#[must_use]
pub(super) enum Untold {
    /// Subscribers must be notified of this ticket.
    Launch(u64),
    /// The graph contains only these events, which must be recorded.
    Events(Vec<Event>),
}

/// The graph in `place`, compiled or updated to the list's launches; `None` if they are to be launched one by one.
fn prepare<'p>(
    raw: &Raw<'_>,
    list: &List,
    place: Option<&'p mut Option<CompiledGraph>>,
    unserved: &mut Unserved,
    state: &Kept,
    report: &mut Report,
) -> DriverResult<Option<&'p mut CompiledGraph>> {
    let Some(place) = place else {
        report.plain += 1;
        return Ok(None);
    };
    if let Some(graph) = place {
        let nodes_set = list.changed().len();
        let set = if nodes_set == 0 { Ok(()) } else { raw.set(graph, list) };
        let Err(code) = set else {
            report.replayed += 1;
            report.nodes_set += nodes_set as u64;
            return Ok(place.as_mut());
        };
        // It is unknown which nodes have changed.
        report.refused += 1;
        *place = None;
        if code.is_sticky() {
            return Err(code);
        }
        if !list.needs_graph() {
            report.plain += 1;
            return Ok(None);
        }
    }
    match raw.compile(list, Some(state)) {
        Ok(graph) => {
            report.compiled += 1;
            *unserved = Unserved::default();
            Ok(Some(place.insert(graph)))
        }
        Err(code) => {
            report.refused += 1;
            if list.needs_graph() || code.is_sticky() {
                return Err(code);
            }
            unserved.was_refused();
            report.plain += 1;
            Ok(None)
        }
    }
}

/// The touched memory, as one operation: parts of the arguments, and of the graph's own memory, which is
/// returned as well.
fn summarized(list: &List, passed: &Passed<'_>) -> (Vec<Use>, Vec<KeptByGraph>) {
    let mut kept: Vec<KeptByGraph> = Vec::new();
    // In order of first use.
    let mut pieces: Vec<(Whose, Tracking, Summary)> = Vec::new();
    for (memory, range, mode, tracking) in list.accesses(0) {
        if range.is_empty() {
            continue;
        }
        let is_in = |(array, _): &(Span<'_>, bool)| {
            Arc::ptr_eq(array.memory, memory)
                && array.range.start <= range.start
                && range.end <= array.range.end
        };
        let (whose, start) = match passed.arrays.iter().position(is_in) {
            Some(number) => (Whose::Passed(number), passed.arrays[number].0.range.start),
            None => {
                let is_it = |known: &KeptByGraph| Arc::ptr_eq(known.memory(), memory);
                let number = kept.iter().position(is_it).unwrap_or_else(|| {
                    kept.push(KeptByGraph::new(memory));
                    kept.len() - 1
                });
                kept[number].keep(range);
                (Whose::Kept(number), 0)
            }
        };
        let is_known = |piece: &(Whose, Tracking, Summary)| piece.0 == whose && piece.1 == tracking;
        let at = pieces.iter().position(is_known).unwrap_or_else(|| {
            pieces.push((whose, tracking, Summary::default()));
            pieces.len() - 1
        });
        pieces[at].2.add(range.start - start..range.end - start, mode);
    }
    let uses = pieces.into_iter().flat_map(|(whose, tracking, summary)| {
        let each = summary.uses().into_iter();
        each.map(move |(range, mode)| Use { whose, range, mode, tracking })
    });
    (uses.collect(), kept)
}
