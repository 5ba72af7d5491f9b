//! The one primitive: put an operation on a stream.
//!
//! [`submit`] validates, orders the stream behind other streams' uses of the same memory, enters
//! the operation's own uses, makes the driver calls and publishes the ticket. Launches, copies,
//! fills and host functions are its callers. [`Raw`] is what an operation's closure sees of the driver.
//!
//! | step | can fail with | what is then on the device |
//! |---|---|---|
//! | thread, device, arguments | a typed error | nothing; what the operation would have written is poisoned |
//! | waits for other streams | a driver error | nothing of the operation; likewise |
//! | uses entered | – | – |
//! | driver calls, memory lent | a driver error | perhaps a part: the ticket stands, lent memory stays lent until it is complete, the outputs are poisoned. Of an allocation that cannot be had: nothing, and nothing is lent |
//! | in verify mode: waiting | the loss of the device | the operation ran, or the device is gone |
//!
//! # Invariants
//! 1. Nobody holds two submission locks: markers on other streams are placed before our own lock
//!    is taken. Nothing can change the dependencies meanwhile: the caller borrows the buffers.
//! 2. Memory that the device may touch is in the footprint, so that it outlives the ticket.
//! 3. What another device made is refused before the first driver call, unless it is documented to work
//!    (`handles_of_another_device_are_refused`).

mod devices;
mod loan;
mod name;
mod raw;

use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use self::devices::check_device;
pub(crate) use self::devices::{check_can_wait, check_is_there, of_dependency, wrong_device};
use self::loan::Loan;
pub(crate) use self::loan::SubmitError;
use self::name::Name;
pub(crate) use self::raw::{Raw, Refusal, at};
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::MemoryInfo;
use crate::memory::allocation::{Allocation, AllocationHazards, Poison};
use crate::memory::buffer::Span;
use crate::memory::hazard::{Content, Mode, Track, Use};
use crate::memory::pinned_pool::PinnedBlock;
use crate::memory::reclaim::claim::Claim;
use crate::runtime::event_pool::EventHandle;
use crate::runtime::stream_state::{Callback, Lane, Turn};
use crate::runtime::{Engine, Progress};
use crate::thread::role;

/// What an operation touches.
pub(crate) struct Footprint<'a> {
    name: Name<'a>,
    accesses: SmallVec<[Access<'a>; 6]>,
    untracked: Untracked<'a>,
    lent: SmallVec<[Loan; 2]>,
    after: SmallVec<[Edge; 2]>,
    may_be_held_up: bool,
    may_block: bool,
    makes_buffer: bool,
    peers: bool,
    record: Option<EventHandle>,
}

struct Access<'a> {
    memory: &'a Arc<Allocation>,
    range: Range<u64>,
    mode: Mode,
}

/// Whose memory an operation uses without its being entered.
type Untracked<'a> = SmallVec<[&'a Arc<Allocation>; 1]>;

/// A point on another stream to wait for.
struct Edge {
    lane: Arc<Progress>,
    ticket: u64,
    /// With the ticket that it is behind: at least `ticket`.
    event: Option<(u64, EventHandle)>,
}

impl<'a> Footprint<'a> {
    /// An operation of that name, which touches nothing yet.
    pub(crate) fn new(verb: &'static str) -> Self {
        Footprint {
            name: Name::Verb(verb),
            accesses: SmallVec::new(),
            untracked: SmallVec::new(),
            lent: SmallVec::new(),
            after: SmallVec::new(),
            may_be_held_up: false,
            may_block: false,
            makes_buffer: false,
            peers: false,
            record: None,
        }
    }

    pub(crate) fn name(&self) -> Name<'a> {
        self.name
    }

    /// Names a kernel in messages.
    pub(crate) fn launches(&mut self, kernel: &'a Arc<str>) {
        self.name = Name::Kernel(kernel);
    }

    pub(crate) fn reads(&mut self, span: &Span<'a>) {
        self.access(span, Mode::Read);
    }

    pub(crate) fn overwrites(&mut self, span: &Span<'a>) {
        self.access(span, Mode::Overwrite);
    }

    pub(crate) fn updates(&mut self, span: &Span<'a>) {
        self.access(span, Mode::ReadWrite);
    }

    fn access(&mut self, span: &Span<'a>, mode: Mode) {
        if span.tracked {
            self.accesses.push(Access { memory: span.memory, range: span.range.clone(), mode });
        } else {
            self.untracked.push(span.memory);
        }
    }

    /// Waits, on the device, for a point of another stream.
    pub(crate) fn comes_after(&mut self, on: Use<Arc<Progress>>, event: Option<EventHandle>) {
        let Use { lane, ticket } = on;
        self.after.push(Edge { lane, ticket, event: event.map(|event| (ticket, event)) });
    }

    /// Waits, on the device, for what a claim of memory waits for.
    pub(crate) fn claims(&mut self, claim: &mut Claim<'_>) {
        for (on, event) in claim.take_waits() {
            self.comes_after(on, Some(event));
        }
    }

    /// Says that something else than the stream's own work may hold the operation up.
    pub(crate) fn may_be_held_up(&mut self) {
        self.may_be_held_up = true;
    }

    /// Says that the driver may take its time with the calls, for a reason other than a full queue: a
    /// kernel's first launch, memory that its pool has to get from the system.
    pub(crate) fn may_block(&mut self) {
        self.may_block = true;
    }

    /// Says that the operation makes a buffer, which others will depend on.
    pub(crate) fn makes_buffer(&mut self) {
        self.makes_buffer = true;
    }

    /// Allows memory of other devices of the same kind.
    pub(crate) fn allows_peers(&mut self) {
        self.peers = true;
    }

    /// Records `event` behind the operation, which makes it the operation's marker.
    pub(crate) fn records(&mut self, event: EventHandle) {
        self.record = Some(event);
    }

    /// Poisons what the operation would have written, and hands the error back.
    pub(crate) fn poison(&self, error: Error) -> Error {
        let mut poison = None;
        for access in self.accesses.iter().filter(|access| access.mode.writes()) {
            let poison = poison.get_or_insert_with(|| match error.detail() {
                // Handed on as it is, however many operations it goes through.
                ErrorDetail::Upstream { producer, cause, .. } => {
                    Poison { producer: producer.clone(), cause: cause.clone() }
                }
                _ => Poison { producer: self.name.to_arc(), cause: error.clone() },
            });
            access.memory.poison(&access.range, poison);
        }
        error
    }

    /// Whether all that would be read is worth reading.
    pub(crate) fn check_contents(&self) -> Result<()> {
        let mut accesses = self.accesses.iter();
        accesses.try_for_each(|access| {
            access.memory.with_hazards(|hazards| self.check_content(access, hazards))
        })
    }

    /// Enters reads of other devices' frozen memory: its drop asks its own device's streams alone.
    fn enter_frozen_peers(&mut self, engine: &Engine) {
        let untracked = std::mem::take(&mut self.untracked);
        for memory in untracked {
            if memory.is_frozen() && memory.engine().id != engine.id {
                let range = 0..memory.bytes();
                self.accesses.push(Access { memory, range, mode: Mode::Read });
            } else {
                self.untracked.push(memory);
            }
        }
    }

    fn validate(&self, engine: &Engine) -> Result<()> {
        role::check("submitting work")?;
        engine.check_open()?;
        let accessed = self.accesses.iter().map(|access| access.memory);
        for memory in accessed.chain(self.untracked.iter().copied()) {
            check_device("a buffer", engine, memory.engine(), self.peers)?;
            check_is_there(engine, memory.engine())?;
        }
        for loan in &self.lent {
            loan.check(engine)?;
        }
        for edge in &self.after {
            check_can_wait(engine, edge.lane.device())?;
        }
        Ok(())
    }

    /// Whether an access finds contents that it can use.
    fn check_content(&self, access: &Access<'_>, hazards: &AllocationHazards) -> Result<()> {
        if access.mode == Mode::Overwrite {
            return Ok(());
        }
        match hazards.unreadable(&access.range) {
            None => Ok(()),
            Some((_, Content::Poisoned(poison))) => Err(self.upstream(poison)),
            Some((part, _)) => {
                let (start, end) = (part.start, part.end);
                Err(ErrorDetail::Unwritten { op: self.name.to_arc(), start, end }.into())
            }
        }
    }

    fn upstream(&self, poison: &Poison) -> Error {
        ErrorDetail::Upstream {
            op: self.name.to_arc(),
            producer: poison.producer.clone(),
            cause: poison.cause.clone(),
        }
        .into()
    }

    /// Finds the points of other streams that this operation must wait for, each with its event, and leaves
    /// them in `after`; an error if it would read what is not there.
    #[inline]
    fn find_edges(&mut self, lane: &Arc<Lane>) -> Result<()> {
        if self.accesses.is_empty() && self.after.is_empty() { Ok(()) } else { self.edges(lane) }
    }

    fn edges(&mut self, lane: &Arc<Lane>) -> Result<()> {
        let mut edges = std::mem::take(&mut self.after);
        edges.retain(|edge| edge.lane.id() != lane.id());
        for access in &self.accesses {
            let add = |used: &Use<Arc<Progress>>| match edges
                .iter_mut()
                .find(|edge| edge.lane.id() == used.lane.id())
            {
                Some(edge) if edge.ticket >= used.ticket => {}
                Some(edge) => {
                    edge.ticket = used.ticket;
                    edge.event = None;
                }
                // The lane's count of shares is everybody's: left alone where nothing is waited for.
                None if used.is_complete() => {}
                None => {
                    let (lane, ticket) = (used.lane.clone(), used.ticket);
                    edges.push(Edge { lane, ticket, event: None });
                }
            };
            access.memory.with_hazards(|hazards| {
                self.check_content(access, hazards)?;
                hazards.dependencies(&access.range, access.mode, lane.id(), add);
                Ok::<_, Error>(())
            })?;
        }
        edges.retain(|edge| !edge.lane.is_complete(edge.ticket));
        if edges.is_empty() {
            return Ok(());
        }
        if !self.accesses.is_empty() {
            lane.engine().set_exact();
        }
        // Ours, for a look only, and never together with the other stream's lock below.
        lane.with(|turn| edges.retain(|edge| turn.waited_for(edge.lane.id()) < edge.ticket));
        for edge in &mut edges {
            let pending = edge.lane.pending_for(&lane.engine().state, edge.ticket)?;
            let Some(other) = pending else { continue };
            if other.engine().id != lane.engine().id {
                other.engine().set_exact();
            }
            if edge.event.is_none() {
                edge.event = other.event_behind(edge.ticket)?;
            }
        }
        edges.retain(|edge| !edge.lane.is_complete(edge.ticket));
        self.after = edges;
        Ok(())
    }

    /// Lends pinned memory to the device until the operation is complete. Another device's is refused:
    /// it is not registered with this one.
    pub(crate) fn lends(&mut self, block: &Arc<PinnedBlock>) {
        self.lend(block, "the pinned buffer", false);
    }

    /// Lends the word of a flag, as [`lends`](Self::lends).
    pub(crate) fn lends_flag(&mut self, block: &Arc<PinnedBlock>) {
        self.lend(block, "the flag", false);
    }

    /// Lends pinned memory that may be another device's of the same kind, to be reached by its *host*
    /// address alone: it is registered as portable.
    pub(crate) fn lends_portable(&mut self, block: &Arc<PinnedBlock>) {
        self.lend(block, "the pinned buffer", true);
    }

    fn lend(&mut self, block: &Arc<PinnedBlock>, what: &'static str, portable: bool) {
        self.lent.push(Loan::Pinned { block: block.clone(), what, portable });
    }

    /// Keeps a share of what the driver is to call until the operation is complete.
    pub(crate) fn calls(&mut self, callback: Box<dyn Callback>) {
        self.lent.push(Loan::Callback(callback));
    }
}

/// Puts an operation on `lane`; `calls` makes its driver calls, `commands` in number. Returns the
/// operation's ticket and what `calls` returned. `at` is where the user submitted it.
///
/// # Errors
/// See the table of the module.
#[inline]
pub(crate) fn submit<R>(
    lane: &Arc<Lane>,
    at: &'static Location<'static>,
    footprint: &mut Footprint<'_>,
    commands: u32,
    calls: impl FnOnce(&Raw<'_>) -> std::result::Result<R, Refusal>,
) -> Result<(u64, R), SubmitError> {
    let engine = lane.engine();
    if footprint.peers {
        footprint.enter_frozen_peers(engine);
    }
    let ready = footprint.validate(engine).and_then(|()| footprint.find_edges(lane));
    if let Err(error) = ready {
        return Err(footprint.poison(error).into());
    }
    let loans = footprint.lent.len();
    let submitted = lane.with(|turn| {
        let ticket = turn.next_ticket();
        if footprint.may_be_held_up || !footprint.after.is_empty() {
            turn.fence_off();
        }
        if footprint.may_block || turn.is_crowded(commands) {
            turn.expect_to_block();
        }
        for (place, edge) in footprint.after.iter().enumerate() {
            let Some((behind, event)) = &edge.event else { continue };
            turn.wait_for(&edge.lane, *behind, event).inspect_err(|_| {
                if place > 0 {
                    // The waits in front of it are on the stream all the same, and end.
                    turn.publish(ticket, 0, false);
                }
            })?;
        }
        for access in &footprint.accesses {
            let enter = |hazards: &mut AllocationHazards| {
                hazards.record(&access.range, access.mode, turn.lane.progress(), ticket);
            };
            access.memory.with_hazards(enter);
        }
        let raw = Raw { lane: turn.lane, backend: &*engine.backend, stream: lane.raw() };
        let result = calls(&raw);
        // Nobody takes it back before the ticket is published. Without memory nothing has used it.
        if !footprint.lent.is_empty() && !matches!(result, Err(Refusal::OutOfMemory { .. })) {
            for loan in footprint.lent.drain(..) {
                turn.lend(ticket, loan.bytes(), loan.into_payload());
            }
        }
        let result = match (result, footprint.record.take()) {
            (Ok(value), Some(event)) => {
                let recorded = raw.record(&event).inspect_err(|_| event.spoil());
                recorded.map(|()| (value, Some(event))).map_err(Refusal::from)
            }
            (Ok(value), None) => Ok((value, None)),
            (Err(refusal), _) => Err(refusal),
        };
        let touched = footprint.makes_buffer || !footprint.accesses.is_empty();
        turn.publish(ticket, commands, touched);
        let (value, event) = result?;
        enter_event(turn, ticket, event);
        Ok((ticket, value))
    });
    let outcome = match submitted {
        Ok((ticket, value)) if engine.options.verify => {
            verify(lane, at, ticket, footprint).map(|()| (ticket, value))
        }
        Ok(submitted) => Ok(submitted),
        Err(refusal) => Err(footprint.poison(explain(lane, footprint.name, refusal))),
    };
    outcome.map_err(|error| SubmitError { error, lent: footprint.lent.len() < loans })
}

/// Waits until the operation is complete, and names it if it failed.
#[cold]
fn verify(
    lane: &Arc<Lane>,
    at: &'static Location<'static>,
    ticket: u64,
    footprint: &Footprint<'_>,
) -> Result<()> {
    let outcome = lane.block_until(ticket).and_then(|()| lane.engine().check_health());
    outcome.map_err(|cause| {
        let op = footprint.name.to_arc();
        footprint.poison(ErrorDetail::Verify { op, at, cause }.into())
    })
}

fn enter_event(turn: &mut Turn<'_, '_>, ticket: u64, event: Option<EventHandle>) {
    if let Some(event) = event {
        turn.enter_event(ticket, event);
    }
}

/// The error of an operation that the driver refused.
fn explain(lane: &Arc<Lane>, name: Name<'_>, refusal: Refusal) -> Error {
    match refusal {
        Refusal::Driver(code) => {
            let error = lane.engine().refused(code);
            match error.detail() {
                ErrorDetail::Driver { code, .. } => {
                    ErrorDetail::Driver { op: Some(name.to_arc()), code: *code }.into()
                }
                _ => error,
            }
        }
        Refusal::OutOfMemory { asked_bytes } => MemoryInfo::out_of_memory(lane, asked_bytes),
    }
}
