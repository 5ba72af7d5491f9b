//! [`List`]: operations that were recorded and not submitted yet.
//!
//! Adding an operation records its uses in the hazards, with the ticket that the list will have. The list keeps the operation's memory and
//! code, since the caller may drop both in the meantime.
//!
//! | a list | its operations |
//! |---|---|
//! | open | have a ticket, and are not submitted |
//! | put on the stream as it is | were launched one by one; none behind one that the driver refused |
//! | launched as a graph | see [`batch::region`](crate::batch) |
//!
//! An operation that touches fresh memory only is put on the stream in front of the open list, with the list's ticket. That is safe because
//! the list keeps memory freed since it was recorded, so none of it can be that fresh memory.
//!
//! # Invariants
//! 1. The outputs of an operation that was not launched are poisoned.
#![forbid(unsafe_code)]

use std::any::Any;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use super::code::{KernelCode, KernelLaunch};
use super::edges::{Edge, Edges};
use super::footprint::{Access, Footprint};
use super::lent::lend;
use super::name::Name;
use super::outcome::LateOutcomes;
use super::raw::{Raw, Refusal};
use super::traced::{Traced, TracedAs};
use super::{Calls, SubmitError, explain};
use crate::backend::{ArgBlock, DriverResult, Function, LaunchShape};
use crate::error::Error;
use crate::memory::allocation::{Allocation, Poison};
use crate::memory::view::Tracking;
use crate::runtime::Engine;
use crate::runtime::stream_state::{Listed, StreamState, Turn};
use gpu_await_protocol::hazard::Mode;

/// One launch.
pub(crate) struct Node {
    /// Which of the list's.
    pub(crate) code: usize,
    pub(crate) function: Function,
    pub(crate) shape: LaunchShape,
    pub(crate) args: ArgBlock,
    /// The line that called it.
    pub(crate) at: &'static Location<'static>,
    /// Which of `List::touched` are its.
    touched: Range<usize>,
}

impl Node {
    /// Whether it is the same launch as another one of the same kernel.
    pub(crate) fn launches_as(&self, other: &Node) -> bool {
        self.shape == other.shape && self.args == other.args
    }
}

/// How a launch was recorded.
#[derive(Clone, Copy)]
pub(crate) struct LaunchEntry {
    pub(crate) at: &'static Location<'static>,
    /// It runs behind everything before it, and everything after it runs behind it, whatever they touch.
    pub(crate) is_barrier: bool,
}

/// An operation that used the stream while a list was open.
pub(crate) struct Interruption {
    /// The kernel's name, or the operation's.
    pub(crate) name: Result<Arc<str>, &'static str>,
    pub(crate) at: &'static Location<'static>,
}

#[derive(Default)]
pub(crate) struct List {
    nodes: Vec<Node>,
    edges: Edges,
    touched: Vec<Touched>,
    /// The code of the kernels, kept loaded.
    code: SmallVec<[Arc<dyn KernelCode>; 4]>,
    refused: Option<Error>,
    interrupted_by: Option<Interruption>,
}

/// One access of a node.
pub(crate) struct Touched {
    pub(crate) memory: Arc<Allocation>,
    pub(crate) range: Range<u64>,
    pub(crate) mode: Mode,
    pub(crate) tracking: Tracking,
}

impl List {
    pub(crate) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub(crate) fn edges(&self) -> &[Edge] {
        self.edges.edges()
    }

    pub(crate) fn code(&self) -> &[Arc<dyn KernelCode>] {
        &self.code
    }

    /// The name of a node's kernel.
    pub(crate) fn kernel_name(&self, node: &Node) -> &Arc<str> {
        self.code[node.code].name()
    }

    /// The address of a node's kernel.
    pub(crate) fn kernel(&self, node: &Node) -> usize {
        self.code.get(node.code).map_or(0, |code| Arc::as_ptr(code).addr())
    }

    /// The accesses of its nodes, in order; they are removed from the list.
    pub(crate) fn take_touched(&mut self) -> Vec<Touched> {
        std::mem::take(&mut self.touched)
    }

    /// Whether its nodes are the same kernels, in the same order, with the same edges.
    pub(crate) fn has_shape_of(&self, other: &List) -> bool {
        let kernels = self.nodes.iter().map(|node| self.kernel(node));
        self.edges() == other.edges()
            && kernels.eq(other.nodes.iter().map(|node| other.kernel(node)))
    }

    /// Whether there is something in it that only a graph runs.
    pub(crate) fn needs_graph(&self) -> bool {
        let needs =
            |node: &Node| matches!(node.function, Function::Captured(_) | Function::Record(_));
        self.nodes.iter().any(needs)
    }

    /// Whether a library is notified of each launch of its work in the list.
    pub(crate) fn is_told(&self) -> bool {
        self.code.iter().any(|code| code.is_told())
    }

    /// Notifies the libraries of the launch that is being submitted.
    pub(crate) fn tell(
        &self,
        raw: &Raw<'_>,
        outcomes: &LateOutcomes,
    ) -> std::result::Result<(), Refusal> {
        self.code.iter().try_for_each(|code| code.tell(raw, outcomes))
    }

    /// Notifies the libraries of a launch that was refused.
    pub(crate) fn tell_refused(&self, error: &Error) {
        self.code.iter().for_each(|code| code.tell_refused(error));
    }

    /// Launches its nodes one by one.
    pub(crate) fn launch_each(&self, raw: &Raw<'_>) -> DriverResult<()> {
        let mut nodes = self.nodes.iter();
        nodes.try_for_each(|Node { function, shape, args, .. }| raw.launch(function, shape, args))
    }

    /// The operation that had the list put on the stream early, if it was one.
    pub(crate) fn interrupted_by(&self) -> Option<&Interruption> {
        self.interrupted_by.as_ref()
    }

    /// Whether some of it was not launched.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// Why some of it was not launched.
    pub(crate) fn take_refused(&mut self) -> Option<Error> {
        self.refused.take()
    }

    /// Drops the values that it keeps: not under a lock.
    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.edges.clear();
        // The last first, so that the next run gets blocks from the stream's cache in the same order, and few nodes
        // differ.
        while self.touched.pop().is_some() {}
        self.code.clear();
        (self.refused, self.interrupted_by) = (None, None);
    }

    /// Records a launch, with its footprint.
    pub(super) fn enter(
        &mut self,
        launch: &KernelLaunch<'_>,
        footprint: &Footprint<'_>,
        LaunchEntry { at, is_barrier }: LaunchEntry,
    ) {
        let first = self.touched.len();
        self.touched.extend(footprint.accesses.iter().map(|access| {
            let (memory, range) = (access.memory.clone(), access.range.clone());
            Touched { memory, range, mode: access.mode, tracking: access.tracking }
        }));
        let address = launch.code.address();
        let is_it = |known: &Arc<dyn KernelCode>| std::ptr::addr_eq(Arc::as_ptr(known), address);
        let code = self.code.iter().position(is_it).unwrap_or_else(|| {
            self.code.push(launch.code.share());
            self.code.len() - 1
        });
        // The order that the caller relies on is that of the stream.
        let is_by_caller = |access: &Access<'_>| access.tracking == Tracking::ByCaller;
        if is_barrier || footprint.accesses.iter().any(is_by_caller) {
            self.edges.add_barrier();
        } else {
            self.edges.add(footprint.tracked().map(|access| {
                let (base, range) = (access.memory.ptr(), &access.range);
                let addresses = base.offset(range.start).0..base.offset(range.end).0;
                (addresses, access.mode.writes())
            }));
        }
        let (function, args) = (launch.function.clone(), launch.args.clone());
        let (shape, touched) = (launch.shape, first..self.touched.len());
        self.nodes.push(Node { code, function, shape, args, at, touched });
    }

    /// Has `put` make the list's driver calls for the turn's next ticket; returns their number, including those for time
    /// stamps.
    pub(super) fn traced<R>(
        &self,
        turn: &mut Turn<'_, '_>,
        commands: u32,
        put: impl FnOnce(&List, &Raw<'_>) -> R,
    ) -> (R, u32) {
        let stream = turn.stream;
        let first = self.nodes.first().filter(|_| stream.engine().tracer.is_on());
        let traced = first.and_then(|first| {
            let name = self.code[first.code].name();
            Traced::of_list(stream, name, self.nodes.len(), first.at)
        });
        let commands = commands + if traced.is_some() { Traced::COMMANDS } else { 0 };
        if turn.is_crowded(commands) {
            turn.expect_to_block();
        }
        let Some(traced) = traced else { return (put(self, &Raw::of(turn)), commands) };
        let raw = Raw::noting(turn, traced.note());
        traced.starts(&raw);
        let result = put(self, &raw);
        traced.launched(self.nodes.len());
        traced.ends(&raw);
        traced.enter(stream, stream.submitted() + 1, &[]);
        (result, commands)
    }

    /// Poisons the outputs of the nodes from `first` on.
    pub(crate) fn refuse(&mut self, stream: &Arc<StreamState>, first: usize, refusal: Refusal) {
        let Some(node) = self.nodes.get(first) else { return };
        let name = self.code[node.code].name();
        let error = explain(stream, Name::Kernel(name), refusal).called_at(node.at);
        let poison = Poison { producer: name.clone(), cause: error.clone() };
        let from = node.touched.start;
        for touched in self.touched[from..].iter().filter(|touched| touched.mode.writes()) {
            touched.memory.poison(&touched.range, false, &poison);
        }
        self.refused.get_or_insert(error);
    }
}

impl Listed for List {
    fn put(&mut self, turn: &mut Turn<'_, '_>) -> u32 {
        let (stream, engine) = (turn.stream, turn.stream.engine());
        if engine.is_closed() {
            self.refuse(stream, 0, Refusal::Closed);
            return 0;
        }
        let (put, commands) = self.traced(turn, self.nodes.len() as u32, |list, raw| {
            for (at, Node { function, shape, args, .. }) in list.nodes.iter().enumerate() {
                raw.launch(function, shape, args).map_err(|code| (at, code))?;
            }
            Ok(())
        });
        match put {
            Ok(()) => commands,
            Err((at, code)) => {
                self.refuse(stream, at, code.into());
                at as u32
            }
        }
    }
}

/// Writes a launch to the owner's list on `stream`, as [`submit`](super::submit) would put it there; returns the list's
/// ticket.
pub(crate) fn submit_listed(
    stream: &Arc<StreamState>,
    footprint: &mut Footprint<'_>,
    owner: usize,
    fresh: impl FnOnce() -> Box<List>,
    (launch, entry): (&KernelLaunch<'_>, LaunchEntry),
) -> Result<u64, SubmitError> {
    let listed = |turn: &mut Turn<'_, '_>, footprint: &mut Footprint<'_>| {
        let ticket = open_list(turn, footprint, (owner, entry.at), fresh)?;
        wait_in_front(turn, footprint)?;
        for access in footprint.tracked() {
            access.memory.enter(&access.range, access.mode, turn.stream.progress(), ticket);
        }
        lend(footprint.take_lent(), turn, ticket);
        let list = turn.list().and_then(|list| (list as &mut dyn Any).downcast_mut::<List>());
        let Some(list) = list else { unreachable!("the owner opened it") };
        list.enter(launch, footprint, entry);
        Ok(ticket)
    };
    in_turn(stream, footprint, listed)
}

/// Puts an operation that touches fresh memory alone in front of the owner's list; returns the list's ticket.
pub(crate) fn submit_in_front(
    stream: &Arc<StreamState>,
    footprint: &mut Footprint<'_>,
    owner: (usize, &'static Location<'static>),
    fresh: impl FnOnce() -> Box<List>,
    (commands, calls): (u32, &mut Calls<'_>),
) -> Result<u64, SubmitError> {
    in_turn(stream, footprint, |turn, footprint| {
        let ticket = open_list(turn, footprint, owner, fresh)?;
        if footprint.may_block || turn.is_crowded(commands) {
            turn.expect_to_block();
        }
        wait_in_front(turn, footprint)?;
        let result = calls(&Raw::of(turn));
        if !matches!(result, Err(Refusal::OutOfMemory { .. })) {
            lend(footprint.take_lent(), turn, ticket);
        }
        result.map(|()| ticket)
    })
}

/// Records in the open list, if there is one, which operation has it put on the stream.
#[cold]
pub(super) fn interrupt(
    turn: &mut Turn<'_, '_>,
    footprint: &Footprint<'_>,
    at: &'static Location<'static>,
) {
    let list = turn.list().and_then(|list| (list as &mut dyn Any).downcast_mut::<List>());
    if let Some(list) = list {
        let name = footprint.name.of_kernel().cloned();
        list.interrupted_by = Some(Interruption { name, at });
    }
}

/// Ensures that the owner's list is the open one. Another owner's list is put on the stream for that, and may be refused: its
/// outputs are then poisoned.
fn open_list(
    turn: &mut Turn<'_, '_>,
    footprint: &Footprint<'_>,
    (owner, at): (usize, &'static Location<'static>),
    fresh: impl FnOnce() -> Box<List>,
) -> Result<u64, Refusal> {
    if !turn.has_list_of(owner) {
        interrupt(turn, footprint, at);
    }
    let next = turn.stream.submitted() + 1;
    let ticket = turn.open_list(owner, || fresh());
    if ticket != next {
        footprint.check_contents().map_err(Refusal::Foreign)?;
    }
    Ok(ticket)
}

/// Adds the waits of the footprint in front of the whole list.
fn wait_in_front(turn: &mut Turn<'_, '_>, footprint: &Footprint<'_>) -> Result<(), Refusal> {
    for edge in footprint.after() {
        let Some(marker) = &edge.marker else { continue };
        turn.wait_for(&edge.point.stream, marker)?;
    }
    Ok(())
}

fn in_turn(
    stream: &Arc<StreamState>,
    footprint: &mut Footprint<'_>,
    put: impl FnOnce(&mut Turn<'_, '_>, &mut Footprint<'_>) -> Result<u64, Refusal>,
) -> Result<u64, SubmitError> {
    let engine = stream.engine();
    if footprint.peers {
        footprint.enter_frozen_peers(engine);
    }
    let ready = footprint.validate(engine).and_then(|()| footprint.find_edges(stream));
    if let Err(error) = ready {
        return Err(footprint.poison(error).into());
    }
    let before = footprint.lent().len();
    let submitted = stream
        .with(|turn| if engine.is_closed() { Err(Refusal::Closed) } else { put(turn, footprint) });
    submitted.map_err(|refusal| {
        let error = footprint.poison_entered(explain(stream, footprint.name, refusal));
        SubmitError { error, lent: footprint.lent().len() < before }
    })
}

/// Records a launch in a list that belongs to no stream: its uses are tracked nowhere.
pub(crate) fn draw(
    list: &mut List,
    engine: &Engine,
    footprint: &mut Footprint<'_>,
    launch: &KernelLaunch<'_>,
    entry: LaunchEntry,
) -> Result<(), SubmitError> {
    if let Err(error) = footprint.validate(engine) {
        return Err(footprint.poison(error).into());
    }
    list.enter(launch, footprint, entry);
    Ok(())
}
