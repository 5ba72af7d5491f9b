//! [`Region`]: what a replayed batch remembers of its last runs.
//!
//! A run of the closure writes lists, one for each stretch of launches between two operations that a graph does not take.
//! The lists are numbered in a run; each number has a slot for each stream.
//!
//! | the slot | a list of another shape | a list of its shape |
//! |---|---|---|
//! | empty | is launched plainly; the slot remembers its shape | |
//! | has a shape | the same | is compiled, and launched |
//! | has a graph | the same; the graph goes | nodes that differ are set, and it is launched |
//! | a setter failed | | is launched plainly; the graph goes |
//!
//! A **shape** is the kernels, in order, and the edges between them, which are computed anew in each run. Arguments and launch
//! configurations may differ.
//!
//! # Invariants
//! 1. What is launched is what the list says: each node of a graph was compiled or set with it
//!    (`arguments_are_never_stale`).
//! 2. A graph is launched on the stream that it was compiled for, under that stream's lock.
#![forbid(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use crate::backend::{ArgBlock, LaunchShape};
use crate::error::{Error, Result};
use crate::runtime::stream_state::{Listed, StreamHandle, StreamState, Turn};
use crate::submit::{
    CompiledGraph, Edge, Footprint, KernelLaunch, List, Node, Raw, Refusal, SubmitError,
    submit_in_front, submit_listed,
};

/// What a replayed batch remembers; see [`Stream::replay`](crate::Stream::replay).
///
/// It keeps the kernels of what it compiled, and no buffers. Used on several streams, it remembers each of them.
///
/// # Examples
/// See [`Stream::replay`](crate::Stream::replay).
#[derive(Default)]
pub struct Region {
    /// For the next runs.
    #[expect(clippy::vec_box, reason = "a stream has the box in the meantime")]
    lists: Vec<Box<List>>,
    streams: Vec<OnStream>,
    report: Report,
}

/// What became of a [`Region`]'s lists: stretches of launches between operations that a graph does not take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Launched as the graph that was compiled for their shape.
    pub replayed: u64,
    /// Nodes of those whose arguments were set.
    pub nodes_set: u64,
    /// CompiledGraph, because their shape came twice.
    pub compiled: u64,
    /// Launched one by one: of a shape that did not come before.
    pub plain: u64,
    /// Launched one by one, in the middle: another thread used the stream or waited for their work.
    pub interrupted: u64,
    /// Compilations and changes that the driver refused.
    pub refused: u64,
}

struct OnStream {
    stream: Weak<StreamState>,
    lists: Vec<ListSlot>,
}

/// A list's number in a run, on one stream.
#[derive(Default)]
struct ListSlot {
    /// The shape of the last list, and what its nodes were.
    nodes: Vec<Remembered>,
    edges: Vec<Edge>,
    graph: Option<CompiledGraph>,
}

struct Remembered {
    /// Its address, which is only compared.
    kernel: usize,
    shape: LaunchShape,
    args: ArgBlock,
}

impl Report {
    pub(crate) fn add(&mut self, other: &Report) {
        self.replayed += other.replayed;
        self.nodes_set += other.nodes_set;
        self.compiled += other.compiled;
        self.plain += other.plain;
        self.interrupted += other.interrupted;
        self.refused += other.refused;
    }
}

impl Region {
    /// One that remembers nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Region::default()
    }

    /// What became of its lists so far.
    #[must_use]
    pub fn report(&self) -> Report {
        self.report
    }

    /// An empty list.
    pub(super) fn fresh(&mut self) -> Box<List> {
        self.lists.pop().unwrap_or_default()
    }

    /// Takes a list that was submitted for the next runs; returns what was refused of it.
    pub(super) fn take_back(&mut self, mut list: Box<List>, interrupted: bool) -> Option<Error> {
        self.report.interrupted += u64::from(interrupted);
        let refused = list.take_refused();
        list.clear();
        self.lists.push(list);
        refused
    }

    /// Launches the list, which is number `number` of its run, as the turn's next ticket; returns how many commands that were.
    pub(super) fn launch(
        &mut self,
        turn: &mut Turn<'_, '_>,
        list: &mut List,
        number: usize,
    ) -> u32 {
        let is_its = |on: &OnStream| std::ptr::eq(on.stream.as_ptr(), Arc::as_ptr(turn.stream));
        let at = self.streams.iter().position(is_its).unwrap_or_else(|| {
            // What streams had that are gone goes.
            self.streams.retain(|on| on.stream.strong_count() > 0);
            let stream = Arc::downgrade(turn.stream);
            self.streams.push(OnStream { stream, lists: Vec::new() });
            self.streams.len() - 1
        });
        let slots = &mut self.streams[at].lists;
        if slots.len() <= number {
            slots.resize_with(number + 1, ListSlot::default);
        }
        let (slot, report) = (&mut slots[number], &mut self.report);
        match slot.prepared(turn, list, report) {
            Some(graph) => graph.launch(list, turn),
            None => {
                report.plain += 1;
                list.put(turn)
            }
        }
    }
}

impl ListSlot {
    /// The graph, with the launches of the list, if its shape came before.
    fn prepared(
        &mut self,
        turn: &Turn<'_, '_>,
        list: &List,
        report: &mut Report,
    ) -> Option<&mut CompiledGraph> {
        if list.nodes().is_empty() || !self.has_shape(list) {
            self.remember(list);
            return None;
        }
        let raw = Raw::of(turn);
        let Some(graph) = &mut self.graph else {
            let compiled = raw.compile(list.nodes(), list.edges(), list.code());
            self.remember(list);
            match compiled {
                Ok(graph) => {
                    report.compiled += 1;
                    return Some(self.graph.insert(graph));
                }
                Err(_) => {
                    report.refused += 1;
                    return None;
                }
            }
        };
        let nodes = list.nodes().iter().zip(&mut self.nodes).enumerate();
        let mut changes = nodes.filter_map(|(at, (node, known))| {
            if known.launches(node) {
                return None;
            }
            // Refused, all of it is remembered anew.
            (known.shape, known.args) = (node.shape, node.args.clone());
            report.nodes_set += 1;
            Some((at, node))
        });
        let set = match changes.next() {
            Some(first) => raw.set(graph, std::iter::once(first).chain(changes)),
            None => Ok(()),
        };
        if set.is_err() {
            report.refused += 1;
            self.remember(list);
            return None;
        }
        report.replayed += 1;
        self.graph.as_mut()
    }

    fn has_shape(&self, list: &List) -> bool {
        self.nodes.len() == list.nodes().len()
            && self.edges == list.edges()
            && self
                .nodes
                .iter()
                .zip(list.nodes())
                .all(|(known, node)| known.kernel == list.kernel(node))
    }

    /// Remembers the list's shape, and gives up the graph.
    fn remember(&mut self, list: &List) {
        self.graph = None;
        self.edges.clear();
        self.edges.extend_from_slice(list.edges());
        self.nodes.clear();
        self.nodes.extend(list.nodes().iter().map(|node| Remembered {
            kernel: list.kernel(node),
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
        f.debug_struct("Region").field("report", &self.report).finish_non_exhaustive()
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
    /// The first refusal of what was written down.
    refused: RefCell<Option<Error>>,
}

impl<'s> Run<'s> {
    pub(crate) fn new(stream: &'s Arc<StreamHandle>, region: Region) -> Self {
        let (region, refused) = (RefCell::new(region), RefCell::new(None));
        Run { stream, region, number: Cell::new(0), is_open: Cell::new(false), refused }
    }

    /// What the stream knows its lists by.
    fn owner(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Writes a launch down; returns its ticket.
    pub(super) fn write(
        &self,
        footprint: &mut Footprint<'_>,
        launch: &KernelLaunch<'_>,
    ) -> Result<u64, SubmitError> {
        self.is_open.set(true);
        let fresh = || self.region.borrow_mut().fresh();
        submit_listed(self.stream, footprint, self.owner(), fresh, launch)
    }

    /// Submits an operation that touches fresh memory alone, with the ticket of what is written down.
    pub(super) fn write_in_front<R>(
        &self,
        footprint: &mut Footprint<'_>,
        commands: u32,
        calls: impl FnOnce(&Raw<'_>) -> std::result::Result<R, Refusal>,
    ) -> Result<(u64, R), SubmitError> {
        let fresh = || self.region.borrow_mut().fresh();
        submit_in_front(self.stream, footprint, self.owner(), fresh, (commands, calls))
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.get()
    }

    /// Submits what was written down.
    pub(crate) fn submit(&self) {
        if !self.is_open.replace(false) {
            return;
        }
        let mut region = self.region.borrow_mut();
        let number = self.number.replace(self.number.get() + 1);
        let mut done: SmallVec<[(Box<dyn Listed>, bool); 2]> = SmallVec::new();
        self.stream.with(|turn| {
            while let Some(list) = turn.fetch_list(self.owner()) {
                done.push((list, true));
            }
            let Some(mut list) = turn.take_list(self.owner()) else { return };
            let ticket = turn.stream.submitted() + 1;
            let commands = match (&mut *list as &mut dyn Any).downcast_mut::<List>() {
                Some(list) => region.launch(turn, list, number),
                None => 0,
            };
            turn.publish(ticket, commands, true);
            done.push((list, false));
        });
        for (list, interrupted) in done {
            let list: Box<dyn Any> = list;
            let Ok(list) = list.downcast::<List>() else { continue };
            if let Some(error) = region.take_back(list, interrupted) {
                self.refused.borrow_mut().get_or_insert(error);
            }
        }
    }

    /// The region, with what this run taught it.
    pub(crate) fn take_region(&self) -> Region {
        self.region.take()
    }

    /// Why some of what was written down was not launched.
    pub(crate) fn take_refused(&self) -> Option<Error> {
        self.refused.borrow_mut().take()
    }
}

/// Submits what precedes a panic.
impl Drop for Run<'_> {
    fn drop(&mut self) {
        self.submit();
    }
}
