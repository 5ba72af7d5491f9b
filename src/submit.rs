//! The one primitive: putting an operation on a stream.
//!
//! [`submit`] validates, orders the stream behind other streams' uses of the same memory, records the operation's own uses, makes the
//! driver calls and publishes the ticket. Launches, copies, fills and host functions are its callers. An operation's closure sees the
//! driver through [`Raw`].
//!
//! | step | can fail with | what is then on the device |
//! |---|---|---|
//! | thread, device, arguments | a typed error | nothing; the operation's outputs are poisoned |
//! | waits for other streams | a driver error | nothing of the operation; likewise |
//! | uses recorded | – | – |
//! | driver calls, memory lent | a driver error | perhaps a part: see below |
//! | in verify mode: waiting | the loss of the device | the operation ran, or the device is lost |
//!
//! If a driver call fails, the ticket stays valid, lent memory stays lent until the ticket is complete, and the outputs are poisoned. If
//! an allocation fails, nothing is on the device and nothing is lent.
//!
//! # Invariants
//! 1. No thread holds two submission locks: markers on other streams are placed before the operation's own stream is locked. The
//!    dependencies cannot change meanwhile, because the caller borrows the buffers.
//! 2. Memory that the device may touch is in the footprint, so that it outlives the ticket.
//! 3. Handles of another device are refused before the first driver call, except where they are documented to work
//!    (`handles_of_another_device_are_refused`).
//!
//! [`submit_as`] is the frame. The methods of [`Footprint`] follow in the order in which it calls them: before the operation's turn, in the
//! turn, and after a failure.

mod captured;
mod compiled_graph;
mod devices;
mod edges;
mod enqueue;
mod event_node;
mod footprint;
mod kernel_chain;
mod kernel_launch;
mod lent;
mod list;
mod listed;
mod memory_kernels;
mod open_uses;
mod outcome;
mod range_map;
mod raw;
mod raw_queue;
mod summary;
mod traced;

use std::panic::Location;
use std::sync::Arc;

pub(crate) use self::captured::{Recorder, capture};
pub(crate) use self::compiled_graph::{CompiledGraph, GraphCell, Kept};
use self::devices::check_device;
pub(crate) use self::devices::{check_can_wait, check_is_there, of_dependency, wrong_device};
pub(crate) use self::edges::EdgeKind;
pub use self::enqueue::{Append, Uses, refuse};
pub(crate) use self::event_node::EventNode;
pub use self::footprint::Footprint;
pub(crate) use self::footprint::Name;
use self::footprint::{LoanPhase, Makes};
pub use self::kernel_chain::{KernelChain, is_captured, partition_of};
pub(crate) use self::kernel_launch::{KernelCode, KernelLaunch};
pub(crate) use self::lent::SubmitError;
use self::lent::{LentValue, LentValues};
pub(crate) use self::list::{LaunchEntry, List, ListShape};
pub(crate) use self::listed::{append, record, submit_in_front, submit_listed};
pub(crate) use self::memory_kernels::pieces::{FEW, PieceWords};
pub(crate) use self::memory_kernels::{MemoryKernels, MemoryLaunch};
pub(crate) use self::open_uses::OpenUses;
pub use self::outcome::WorkOutcome;
pub(crate) use self::outcome::{Dependencies, LateOutcomes};
pub(crate) use self::raw::{Raw, Refusal};
pub use self::raw_queue::RawQueue;
pub(crate) use self::summary::Summary;
use self::traced::{Traced, TracedAs};
use crate::error::{DriverCode, Error, ErrorDetail, Result};
use crate::memory::MemoryInfo;
use crate::memory::accesses::{Access, Edges};
use crate::memory::view::Tracking;
use crate::runtime::event_pool::EventHandle;
use crate::runtime::stream_state::StreamState;
use crate::runtime::{Engine, MarkedPoint, Point};
use crate::thread::role;
use gpu_await_protocol::hazard::Mode;

/// The driver calls of an operation; they are made once. One type for all but launches, so that submission is compiled once
/// per program and not once per operation.
pub(crate) type Calls<'c> = dyn FnMut(&Raw<'_>) -> std::result::Result<(), Refusal> + 'c;

/// Puts an operation on `stream`; `calls` makes its driver calls, which are `commands` in number. Returns the operation's ticket.
/// `at` is where the user submitted it; the flag beside the footprint is [`Footprint::is_plain`]. `IS_LAUNCH`: it is one launch and
/// nothing else, so the next launch may overlap with it.
///
/// # Errors
/// See the table of the module.
#[inline(always)]
pub(crate) fn submit<const IS_LAUNCH: bool>(
    stream: &Arc<StreamState>,
    at: &'static Location<'static>,
    footprint: (&mut Footprint<'_>, bool),
    commands: u32,
    calls: &mut (impl FnMut(&Raw<'_>) -> std::result::Result<(), Refusal> + ?Sized),
) -> Result<u64, SubmitError> {
    if stream.engine.tracer.is_on() {
        return submit_traced::<IS_LAUNCH>(stream, at, footprint, commands, calls);
    }
    submit_as::<IS_LAUNCH, _>(stream, at, footprint, commands, calls, ())
}

#[cold]
#[inline(never)]
fn submit_traced<const IS_LAUNCH: bool>(
    stream: &Arc<StreamState>,
    at: &'static Location<'static>,
    footprint: (&mut Footprint<'_>, bool),
    commands: u32,
    calls: &mut (impl FnMut(&Raw<'_>) -> std::result::Result<(), Refusal> + ?Sized),
) -> Result<u64, SubmitError> {
    match Traced::of(stream, footprint.0, at) {
        Some(traced) => submit_as::<IS_LAUNCH, _>(stream, at, footprint, commands, calls, traced),
        None => submit_as::<IS_LAUNCH, _>(stream, at, footprint, commands, calls, ()),
    }
}

#[inline(always)]
fn submit_as<const IS_LAUNCH: bool, T: TracedAs>(
    stream: &Arc<StreamState>,
    at: &'static Location<'static>,
    (footprint, is_plain): (&mut Footprint<'_>, bool),
    commands: u32,
    calls: &mut (impl FnMut(&Raw<'_>) -> std::result::Result<(), Refusal> + ?Sized),
    traced: T,
) -> Result<u64, SubmitError> {
    let engine = &stream.engine;
    let commands = commands + T::COMMANDS;
    footprint.prepare(stream, is_plain)?;
    let before = footprint.lent().len();
    let submitted = stream.with(|turn| {
        // A closing thread takes each stream's lock after setting the flag, and waits for the work submitted
        // before.
        if engine.ending.is_closed() && !footprint.ends_loan() {
            return Err(Refusal::Closed);
        }
        let ticket = turn.next_ticket();
        if footprint.may_be_held_up || !footprint.after().is_empty() {
            turn.fence_off();
        }
        if footprint.may_block || turn.is_crowded(commands) {
            turn.expect_to_block();
        }
        for (place, edge) in footprint.after().iter().enumerate() {
            let Some(marker) = &edge.marker else { continue };
            turn.wait_for(&edge.point.stream, marker).inspect_err(|_| {
                if place > 0 {
                    // The earlier waits are on the stream already, and will end.
                    turn.publish_nothing(ticket);
                }
            })?;
        }
        if footprint.is_entered() {
            footprint.accesses.enter(&turn.stream.progress, ticket);
        }
        let raw = Raw::noting(turn, traced.note());
        traced.starts(&raw);
        let result = calls(&raw);
        traced.ends(&raw);
        // No thread takes the values back before the ticket is published. If there was no memory, nothing has used them.
        if footprint.is_lent() && !matches!(result, Err(Refusal::OutOfMemory { .. })) {
            lent::lend(footprint.take_lent(), turn, ticket);
        }
        let event = footprint.take_record();
        let result = match &event {
            Some(event) => {
                result.and_then(|()| Ok(raw.record(event).inspect_err(|_| event.spoil())?))
            }
            None => result,
        };
        let touched = footprint.makes_buffer()
            || (footprint.is_entered() && footprint.accesses.are_tracked());
        if !IS_LAUNCH {
            // Memory from the stream's cache puts nothing on the stream. What fills memory made here is not followed early, memset or launch.
            match footprint.only_makes_a_buffer() {
                true => turn.stream.overlap.pass_on(ticket),
                false => turn.stream.overlap.demand_full(ticket),
            }
        }
        turn.publish(ticket, commands, touched);
        traced.enter(turn.stream, ticket, footprint.after());
        result?;
        if let Some(event) = event {
            turn.enter_event(ticket, event);
        }
        Ok(ticket)
    });
    let outcome = match submitted {
        Ok(ticket) if engine.options.verify => {
            verify(stream, at, ticket, footprint).map(|()| ticket)
        }
        Ok(ticket) => Ok(ticket),
        Err(refusal) => Err(footprint.poison_entered(explain(stream, footprint.name, refusal))),
    };
    outcome.map_err(|error| SubmitError { error, lent: footprint.lent().len() < before })
}

// ---- before its turn ------------------------------------------------------------------------

/// The checks that [`submit`] makes before its first driver call, for an operation that makes none.
#[cold]
pub(crate) fn submit_nothing(
    stream: &Arc<StreamState>,
    at: &'static Location<'static>,
    footprint: &Footprint<'_>,
) -> Result<()> {
    put_list_in_front(stream, footprint, at);
    footprint.validate(&stream.engine)?;
    footprint.check_contents()
}

/// Puts the stream's open list on it, if there is one, before the operation checks its inputs: the driver may refuse the list, which
/// poisons the list's outputs.
#[inline]
pub(crate) fn put_list_in_front(
    stream: &Arc<StreamState>,
    footprint: &Footprint<'_>,
    at: &'static Location<'static>,
) {
    if stream.announced.has_list() {
        put_list(stream, footprint, at);
    }
}

#[cold]
#[inline(never)]
fn put_list(stream: &Arc<StreamState>, footprint: &Footprint<'_>, at: &'static Location<'static>) {
    if !role::may_call_driver() {
        return;
    }
    stream.with(|turn| {
        if turn.has_open_list() {
            listed::interrupt(turn, footprint, at);
            turn.put_list();
        }
    });
}

impl<'a> Footprint<'a> {
    /// Whether an operation needs nothing but its own calls: it touches only memory of the stream's device that needs no wait and that
    /// only this stream uses. Then [`prepare`](Self::prepare) has nothing to look for.
    #[inline(always)]
    pub(crate) fn is_plain(&self, stream: &StreamState) -> bool {
        matches!(self.loan, LoanPhase::Neither)
            && !self.is_lent()
            && self.after().is_empty()
            && self.accesses.are_plain(&stream.engine, stream.progress.id)
    }

    /// Does everything before an operation takes its ticket: makes the checks, and finds the points of other streams to wait for.
    /// An error poisons its outputs.
    #[inline]
    fn prepare(&mut self, stream: &Arc<StreamState>, is_plain: bool) -> Result<()> {
        let prepared = if is_plain {
            self.check_place(stream)
        } else {
            if self.peers {
                self.enter_frozen_peers(&stream.engine);
            }
            self.validate(&stream.engine).and_then(|()| self.find_edges(stream))
        };
        prepared.map_err(|error| self.poison(error))
    }

    /// Makes the checks of [`prepare`](Self::prepare) that a plain operation can fail: of the thread, the device and the stream.
    #[inline]
    fn check_place(&self, stream: &StreamState) -> Result<()> {
        self.validate_place(&stream.engine).and_then(|()| stream.check_moves())
    }

    /// Rejects a thread that must not submit, and a device that is lost or closed.
    #[inline]
    fn validate_place(&self, engine: &Engine) -> Result<()> {
        role::check("submitting work")?;
        if !self.ends_loan() {
            return engine.check_open();
        }
        engine.state.lost().map_or(Ok(()), |lost| Err(lost.clone()))
    }

    /// Rejects arguments that are invalid whatever the memory contains.
    #[inline]
    pub(crate) fn validate(&self, engine: &Engine) -> Result<()> {
        self.validate_place(engine)?;
        for Access { memory, .. } in &self.accesses.all {
            let theirs = &memory.engine;
            if theirs.state.id != engine.state.id {
                check_device("a buffer", engine, theirs, self.peers)?;
                check_is_there(engine, theirs)?;
            }
        }
        self.check_lent(engine)?;
        for edge in self.after() {
            check_can_wait(engine, edge.point.stream.device())?;
        }
        Ok(())
    }

    /// Rejects lent values of another device.
    fn check_lent(&self, engine: &Engine) -> Result<()> {
        self.lent().iter().try_for_each(|value| value.check(engine))
    }

    /// Tracks reads of other devices' frozen memory: when dropped, it asks only its own device's streams.
    fn enter_frozen_peers(&mut self, engine: &Engine) {
        let frozen = |access: &&mut Access<'_>| matches!(access.tracking, Tracking::Frozen);
        for access in self.accesses.all.iter_mut().filter(frozen) {
            if access.memory.engine.state.id != engine.state.id {
                access.tracking = Tracking::Tracked;
            }
        }
    }

    /// Finds the points of other streams that this operation must wait for, each with its event, and leaves
    /// them in `after`; an error if it would read invalid data.
    #[inline]
    fn find_edges(&mut self, stream: &Arc<StreamState>) -> Result<()> {
        if self.ends_loan() {
            // The loan's beginning waited. A later failure reaches the loan through the outcomes of its inputs.
            if let Some(error) = self.accesses.failed(|| self.name.to_arc()) {
                self.extras().failed_input = Some(error);
            }
            return Ok(());
        }
        stream.check_moves()?;
        let mut edges = match &mut self.extras {
            Some(extras) => std::mem::take(&mut extras.after),
            None => Edges::new(),
        };
        let (engine, id) = (&stream.engine, stream.progress.id);
        edges.retain(|edge| edge.point.stream.id != id);
        self.accesses.find_edges(id, &mut edges, || self.name.to_arc())?;
        edges.retain(|edge| !edge.point.is_complete());
        if edges.is_empty() {
            return Ok(());
        }
        if self.accesses.are_tracked() {
            engine.registry.set_exact();
        }
        // This stream's lock, only for this check, and never together with the other stream's lock below.
        stream.with(|turn| {
            edges.retain(|edge| turn.waited_for(edge.point.stream.id) < edge.point.ticket);
        });
        for edge in &mut edges {
            let Point { stream: on, ticket } = &edge.point;
            let pending = on.pending_for(&engine.state, *ticket)?;
            let Some(other) = pending else { continue };
            if other.engine.state.id != engine.state.id {
                other.engine.registry.set_exact();
            }
            if edge.marker.is_none() {
                let marker = other.event_behind(*ticket);
                // This may be the first call to see the other device's loss.
                edge.marker = marker.map_err(|error| of_dependency(engine, error))?;
            }
        }
        edges.retain(|edge| !edge.point.is_complete());
        if !edges.is_empty() {
            self.extras().after = edges;
        }
        // Placing an event behind a list puts the list on its stream, where the driver may refuse it: its outputs are then
        // poisoned.
        self.check_contents()
    }

    /// Checks that all memory to be read holds valid data.
    pub(crate) fn check_contents(&self) -> Result<()> {
        // The contents that a loan reads were checked when it began; its end must succeed whatever happened to them since.
        if self.ends_loan() { Ok(()) } else { self.accesses.check(|| self.name.to_arc()) }
    }

    /// Takes the failure of an input that was found at the submitted end of a loan.
    fn take_failed_input(&mut self) -> Option<Error> {
        self.extras.as_mut()?.failed_input.take()
    }
}

// ---- in its turn -----------------------------------------------------------------------------

impl<'a> Footprint<'a> {
    /// Whether it is entered in the hazards, so that later uses of the memory are ordered with it.
    #[inline]
    fn is_entered(&self) -> bool {
        !matches!(self.loan, LoanPhase::Begins)
    }

    /// Whether any values are lent to it.
    #[inline]
    pub(crate) fn is_lent(&self) -> bool {
        !self.lent().is_empty()
    }

    /// The values lent to it.
    #[inline]
    fn lent(&self) -> &[LentValue] {
        self.extras.as_ref().map_or(&[], |extras| &extras.lent)
    }

    /// Takes the values lent to it.
    fn take_lent(&mut self) -> LentValues {
        self.extras.as_mut().map(|extras| std::mem::take(&mut extras.lent)).unwrap_or_default()
    }

    /// The points of other streams that it waits for.
    #[inline]
    fn after(&self) -> &[MarkedPoint] {
        self.extras.as_ref().map_or(&[], |extras| &extras.after)
    }

    /// Takes the event that is recorded behind it.
    #[inline]
    fn take_record(&mut self) -> Option<EventHandle> {
        self.extras.as_mut()?.record.take()
    }

    fn ends_loan(&self) -> bool {
        matches!(self.loan, LoanPhase::Ends)
    }

    #[inline]
    fn makes_buffer(&self) -> bool {
        !matches!(self.makes, Makes::Nothing)
    }
}

// ---- after a failure ----------------------------------------------------------------------------

impl Footprint<'_> {
    /// Poisons the outputs of an operation that was not entered, and returns the error.
    pub fn poison(&self, error: Error) -> Error {
        self.poison_all(error, |mode| mode == Mode::ReadWrite)
    }

    /// [`poison`](Self::poison) for an operation that was entered: a part of it may have run, on inputs that fail later.
    pub(crate) fn poison_entered(&self, error: Error) -> Error {
        self.poison_all(error, |_| false)
    }

    fn poison_all(&self, error: Error, leaves_data: impl Fn(Mode) -> bool) -> Error {
        self.accesses.poison(&error, leaves_data, || self.name.to_arc());
        error
    }

    /// Leaks the memory and the lent values: it is unknown when the device stops using them.
    fn leak(&mut self) {
        self.accesses.all.iter().for_each(|access| access.memory.never_free());
        std::mem::forget(self.take_lent());
    }
}

/// Waits until the operation is complete; its failure becomes an error that names it.
#[cold]
fn verify(
    stream: &Arc<StreamState>,
    at: &'static Location<'static>,
    ticket: u64,
    footprint: &Footprint<'_>,
) -> Result<()> {
    let outcome = stream.block_until(ticket).and_then(|()| stream.engine.check_health());
    outcome.map_err(|cause| {
        let op = footprint.name.to_arc();
        let failed = Error::from(ErrorDetail::Verify { op, cause });
        footprint.poison_entered(failed.called_at(at))
    })
}

/// The error of an operation that the driver refused.
fn explain(stream: &Arc<StreamState>, name: Name<'_>, refusal: Refusal) -> Error {
    let error = match refusal {
        Refusal::Driver(code) => {
            let error = stream.refused(code);
            match error.detail() {
                ErrorDetail::Driver { code, .. } => {
                    ErrorDetail::Driver { op: Some(name.to_arc()), code: *code }.into()
                }
                _ => error,
            }
        }
        Refusal::OutOfMemory { asked_bytes } => {
            MemoryInfo::out_of_memory(stream, name.to_arc(), asked_bytes, None)
        }
        Refusal::Closed => stream.engine.closed(),
        // The other library may have been the first to notice the loss of the device.
        Refusal::Foreign(error) => stream.engine.check_health().err().unwrap_or(error),
    };
    match error.detail() {
        ErrorDetail::Driver { code, .. } if code.code == DriverCode::ILLEGAL_STATE => {
            stream.find_lost_dependency().unwrap_or(error)
        }
        _ => error,
    }
}
