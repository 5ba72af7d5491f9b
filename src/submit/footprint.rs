//! The memory that an operation touches, and the waits that follow from it.
#![forbid(unsafe_code)]

mod access;

use std::any::Any;
use std::sync::Arc;

use smallvec::SmallVec;

pub(crate) use self::access::Access;
use super::devices::{check_can_wait, check_device, check_is_there, of_dependency};
use super::lent::{LentValue, LentValues};
use super::name::Name;
use crate::error::{Error, Result};
use crate::memory::allocation::{AllocationHazards, Poison};
use crate::memory::pinned_pool::PinnedBlock;
use crate::memory::reclaim::claim::Claim;
use crate::memory::view::{Span, Tracking};
use crate::runtime::event_pool::EventHandle;
use crate::runtime::stream_state::{Callback, StreamState};
use crate::runtime::{Engine, MarkedPoint, Point};
use crate::thread::role;
use gpu_await_protocol::hazard::{Content, Mode};
use gpu_await_protocol::point::Track;

/// The memory and values that an operation touches.
pub struct Footprint<'a> {
    pub(super) name: Name<'a>,
    pub(super) accesses: SmallVec<[Access<'a>; 6]>,
    /// Most launches have nothing of it.
    extras: Option<Extras>,
    makes: Makes,
    loan: LoanPhase,
    /// It may be held up by something other than the stream's own work.
    pub(crate) may_be_held_up: bool,
    /// The driver may take long with the calls, for a reason other than a full queue: a kernel's first launch, memory that its pool has
    /// to get from the system.
    pub(crate) may_block: bool,
    /// It may touch memory of other devices of the same kind.
    pub(crate) peers: bool,
}

/// What an operation makes, which others will depend on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Makes {
    Nothing,
    Buffer,
    WrittenBuffer,
}

/// Which end of a loan an operation is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoanPhase {
    Neither,
    /// Its end enters the uses. Until then nobody else uses the memory, but for reading what the loan reads.
    Begins,
    /// It registers work that is on the stream already, even after the device was closed.
    Ends,
}

/// What an operation has besides the memory that it touches.
#[derive(Default)]
struct Extras {
    lent: LentValues,
    after: Edges,
    record: Option<EventHandle>,
    /// Set when a loan ends: the failure of an input, found before its producers were linked.
    failed_input: Option<Error>,
}

/// Points of other streams.
type Edges = SmallVec<[MarkedPoint; 2]>;

impl<'a> Footprint<'a> {
    /// An operation of that name, which touches nothing yet.
    #[inline]
    pub fn new(verb: &'static str) -> Self {
        Footprint {
            name: Name::Verb(verb),
            accesses: SmallVec::new(),
            extras: None,
            makes: Makes::Nothing,
            loan: LoanPhase::Neither,
            may_be_held_up: false,
            may_block: false,
            peers: false,
        }
    }

    pub(crate) fn name(&self) -> Name<'a> {
        self.name
    }

    /// Names a kernel in messages.
    pub(crate) fn launches(&mut self, kernel: &'a Arc<str>) {
        self.name = Name::Kernel(kernel);
    }

    /// Reads the memory.
    pub fn reads(&mut self, span: &Span<'a>) {
        self.touches(span, Mode::Read);
    }

    /// Overwrites all of the memory, before reading any.
    pub fn overwrites(&mut self, span: &Span<'a>) {
        self.touches(span, Mode::Overwrite);
    }

    /// Reads and writes the memory.
    pub fn updates(&mut self, span: &Span<'a>) {
        self.touches(span, Mode::ReadWrite);
    }

    /// Touches a part of an allocation.
    pub(crate) fn touches(&mut self, span: &Span<'a>, mode: Mode) {
        let (memory, range, tracking) = (span.memory, span.range.clone(), span.tracking);
        self.accesses.push(Access { memory, range, mode, tracking, named: None, is_open: false });
    }

    /// Touches what a part of the operation touches, and is lent what that is lent.
    pub(super) fn includes<'b: 'a>(&mut self, mut part: Footprint<'b>) {
        let lent = part.take_lent();
        // One by one: the part's may last longer.
        part.accesses.into_iter().for_each(|access| self.accesses.push(access));
        if !lent.is_empty() {
            self.extras().lent.extend(lent);
        }
    }

    /// Waits, on the device, for a point of another stream.
    pub(crate) fn comes_after(&mut self, point: impl Into<MarkedPoint>) {
        self.extras().after.push(point.into());
    }

    /// Adds the device-side waits of a memory claim.
    pub(crate) fn claims(&mut self, claim: &mut Claim<'_>) {
        self.extras().after.extend(claim.take_waits());
    }

    /// Whether a launch may be written to a list: nothing but work of its own stream holds it up, and the driver takes
    /// no longer than it should.
    pub(crate) fn can_be_listed(&self) -> bool {
        !self.may_block && self.is_of_the_stream_alone()
    }

    /// Whether the operation may go in front of the recorded list: all memory that it touches is its own allocation.
    pub(crate) fn can_be_in_front(&self) -> bool {
        self.makes_buffer() && self.accesses.is_empty() && self.is_of_the_stream_alone()
    }

    /// Whether nothing else delays it, and nothing waits for it alone.
    fn is_of_the_stream_alone(&self) -> bool {
        let record = self.extras.as_ref().and_then(|extras| extras.record.as_ref());
        !self.may_be_held_up && record.is_none()
    }

    /// The operation makes a buffer, which others will depend on; `and_writes`: it also writes it.
    pub(crate) fn makes(&mut self, and_writes: bool) {
        self.makes = if and_writes { Makes::WrittenBuffer } else { Makes::Buffer };
    }

    #[inline]
    pub(super) fn makes_buffer(&self) -> bool {
        self.makes != Makes::Nothing
    }

    /// Whether it only makes a buffer, whatever it is to hold.
    #[inline]
    pub(crate) fn only_makes_a_buffer(&self) -> bool {
        self.makes == Makes::Buffer && self.can_be_in_front()
    }

    /// The uses that are entered.
    #[inline]
    pub(super) fn tracked(&self) -> impl Iterator<Item = &Access<'a>> {
        self.accesses.iter().filter(|access| access.tracking == Tracking::Tracked)
    }

    fn extras(&mut self) -> &mut Extras {
        self.extras.get_or_insert_default()
    }

    /// The accesses that later uses of the memory are ordered with.
    #[inline]
    pub(super) fn entered(&self) -> impl Iterator<Item = &Access<'a>> {
        self.tracked().filter(|_| self.loan != LoanPhase::Begins)
    }

    /// Whether it is lent anything.
    #[inline]
    pub(crate) fn is_lent(&self) -> bool {
        !self.lent().is_empty()
    }

    /// The values lent to it.
    #[inline]
    pub(super) fn lent(&self) -> &[LentValue] {
        self.extras.as_ref().map_or(&[], |extras| &extras.lent)
    }

    /// It begins a loan. Returns the values lent to it, which are so until the end.
    pub(super) fn begin_loan(&mut self) -> LentValues {
        self.loan = LoanPhase::Begins;
        self.take_lent()
    }

    /// The loan has begun; it waits for nothing more.
    pub(super) fn loan_has_begun(&mut self, lent: LentValues) {
        self.loan = LoanPhase::Neither;
        if let Some(extras) = &mut self.extras {
            extras.after.clear();
        }
        if !lent.is_empty() {
            self.extras().lent = lent;
        }
    }

    /// It ends the loan.
    pub(super) fn end_loan(&mut self) {
        self.loan = LoanPhase::Ends;
    }

    pub(super) fn ends_loan(&self) -> bool {
        self.loan == LoanPhase::Ends
    }

    /// Takes the values lent to it.
    pub(super) fn take_lent(&mut self) -> LentValues {
        self.extras.as_mut().map(|extras| std::mem::take(&mut extras.lent)).unwrap_or_default()
    }

    /// The points of other streams that it waits for.
    #[inline]
    pub(super) fn after(&self) -> &[MarkedPoint] {
        self.extras.as_ref().map_or(&[], |extras| &extras.after)
    }

    /// Takes the event that is recorded behind it.
    #[inline]
    pub(super) fn take_record(&mut self) -> Option<EventHandle> {
        self.extras.as_mut()?.record.take()
    }

    /// Records `event` behind the operation, which makes it the operation's marker.
    pub(crate) fn records(&mut self, event: EventHandle) {
        self.extras().record = Some(event);
    }

    /// Poisons the outputs of an operation that was not entered, and returns the error.
    pub fn poison(&self, error: Error) -> Error {
        self.poison_all(error, |mode| mode == Mode::ReadWrite)
    }

    /// [`poison`](Self::poison) of an operation that was entered: a part of it may have run, on inputs that fail later.
    pub(crate) fn poison_entered(&self, error: Error) -> Error {
        self.poison_all(error, |_| false)
    }

    fn poison_all(&self, error: Error, leaves_data: impl Fn(Mode) -> bool) -> Error {
        let mut poison = None;
        for access in self.tracked().filter(|access| access.mode.writes()) {
            let poison = poison.get_or_insert_with(|| Poison::of(&error, || self.name.to_arc()));
            access.memory.poison(&access.part(), leaves_data(access.mode), poison);
        }
        error
    }

    /// Whether all that would be read is worth reading.
    pub(crate) fn check_contents(&self) -> Result<()> {
        self.tracked().try_for_each(|access| {
            access.memory.with_hazards(|hazards| self.check_content(access, hazards))
        })
    }

    /// Enters reads of other devices' frozen memory: its drop asks its own device's streams alone.
    pub(super) fn enter_frozen_peers(&mut self, engine: &Engine) {
        let frozen = |access: &&mut Access<'_>| access.tracking == Tracking::Frozen;
        for access in self.accesses.iter_mut().filter(frozen) {
            if access.memory.engine().state.id != engine.state.id {
                access.tracking = Tracking::Tracked;
            }
        }
    }

    /// Rejects lent values of another device.
    pub(super) fn check_lent(&self, engine: &Engine) -> Result<()> {
        self.lent().iter().try_for_each(|value| value.check(engine))
    }

    /// Leaks the memory and the lent values: it is unknown when the device stops using them.
    pub(super) fn leak(&mut self) {
        self.accesses.iter().for_each(|access| access.memory.never_free());
        std::mem::forget(self.take_lent());
    }

    /// Rejects a thread that must not submit, and a device that is lost or closed.
    #[inline]
    pub(super) fn validate_place(&self, engine: &Engine) -> Result<()> {
        role::check("submitting work")?;
        match engine.state.lost() {
            Some(lost) => Err(lost.clone()),
            None if self.ends_loan() || !engine.ending.is_closed() => Ok(()),
            None => Err(engine.closed()),
        }
    }

    /// Whether an operation takes nothing but its own calls: all that it touches is memory of the stream's device that waits for nothing
    /// and is the stream's alone. Then [`prepare`](Self::prepare) has nothing to look for.
    #[inline]
    pub(crate) fn is_plain(&self, stream: &StreamState) -> bool {
        let (engine, id) = (stream.engine(), stream.id());
        let is_plain = |Access { memory, tracking, .. }: &Access<'_>| {
            Arc::ptr_eq(memory.engine(), engine)
                && (*tracking != Tracking::Tracked || memory.is_only_used_by(id))
        };
        self.loan == LoanPhase::Neither
            && !self.is_lent()
            && self.after().is_empty()
            && self.accesses.iter().all(is_plain)
    }

    /// Everything before an operation takes its ticket: the checks, and the points of other streams that it must wait for.
    #[inline]
    pub(super) fn prepare(&mut self, stream: &Arc<StreamState>, is_plain: bool) -> Result<()> {
        let engine = stream.engine();
        if is_plain {
            self.validate_place(engine)?;
            return stream.check_moves();
        }
        self.validate(engine)?;
        self.find_edges(stream)
    }

    /// Rejects arguments that are invalid on every device, whatever the contents.
    #[inline]
    pub(crate) fn validate(&self, engine: &Engine) -> Result<()> {
        self.validate_place(engine)?;
        for Access { memory, .. } in &self.accesses {
            let theirs = memory.engine();
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

    /// The failure of its inputs, if there was one.
    fn failed_content(&self) -> Option<Error> {
        let mut reads = self.tracked().filter(|access| access.mode != Mode::Overwrite);
        reads.find_map(|access| {
            access.memory.with_hazards(|hazards| match hazards.unreadable(&access.part()) {
                Some((_, Content::Poisoned { by, .. })) => Some(by.upstream(self.name.to_arc())),
                _ => None,
            })
        })
    }

    /// The failure of an input that a submitted end of a loan found.
    pub(super) fn take_failed_input(&mut self) -> Option<Error> {
        self.extras.as_mut()?.failed_input.take()
    }

    /// Whether an access finds contents that it can use.
    fn check_content(&self, access: &Access<'_>, hazards: &AllocationHazards) -> Result<()> {
        // The contents that a loan reads were checked when it began; its end must succeed whatever happened to them since.
        if access.mode == Mode::Overwrite || self.ends_loan() {
            return Ok(());
        }
        hazards.check(&access.part(), || self.name.to_arc())
    }

    /// Finds the points of other streams that this operation must wait for, each with its event, and leaves
    /// them in `after`; an error if it would read invalid data.
    #[inline]
    pub(super) fn find_edges(&mut self, stream: &Arc<StreamState>) -> Result<()> {
        if self.ends_loan() {
            // Its beginning waited. A failure from here on reaches it through what it reads.
            if let Some(error) = self.failed_content() {
                self.extras().failed_input = Some(error);
            }
            return Ok(());
        }
        stream.check_moves()?;
        let id = stream.id();
        let waits_for_nothing = self.after().is_empty()
            && self.tracked().all(|access| access.memory.is_only_used_by(id));
        if waits_for_nothing { Ok(()) } else { self.edges(stream) }
    }

    fn edges(&mut self, stream: &Arc<StreamState>) -> Result<()> {
        let mut edges = match &mut self.extras {
            Some(extras) => std::mem::take(&mut extras.after),
            None => Edges::new(),
        };
        edges.retain(|edge| edge.point.stream.id() != stream.id());
        for access in self.tracked() {
            let add = |used: &Point| match edges
                .iter_mut()
                .find(|edge| edge.point.stream.id() == used.stream.id())
            {
                Some(edge) if edge.point.ticket >= used.ticket => {}
                Some(edge) => {
                    edge.point.ticket = used.ticket;
                    edge.marker = None;
                }
                // The stream's reference count is shared: it is left alone where nothing is waited for.
                None if used.is_complete() => {}
                None => edges.push(used.clone().into()),
            };
            access.memory.with_hazards(|hazards| {
                self.check_content(access, hazards)?;
                hazards.dependencies(&access.order(), access.mode, stream.id(), add);
                Ok::<_, Error>(())
            })?;
        }
        edges.retain(|edge| !edge.point.is_complete());
        if edges.is_empty() {
            return Ok(());
        }
        if self.tracked().next().is_some() {
            stream.engine().registry.set_exact();
        }
        // Ours, for a look only, and never together with the other stream's lock below.
        stream.with(|turn| {
            edges.retain(|edge| turn.waited_for(edge.point.stream.id()) < edge.point.ticket);
        });
        for edge in &mut edges {
            let Point { stream: on, ticket } = &edge.point;
            let pending = on.pending_for(&stream.engine().state, *ticket)?;
            let Some(other) = pending else { continue };
            if other.engine().state.id != stream.engine().state.id {
                other.engine().registry.set_exact();
            }
            if edge.marker.is_none() {
                let marker = other.event_behind(*ticket);
                // This may be the first call to see the other device's loss.
                edge.marker = marker.map_err(|error| of_dependency(stream.engine(), error))?;
            }
        }
        edges.retain(|edge| !edge.point.is_complete());
        if !edges.is_empty() {
            self.extras().after = edges;
        }
        // Getting an event behind a list puts the list on its stream, where the driver may refuse it: its outputs are then
        // poisoned.
        self.check_contents()
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
        self.extras().lent.push(LentValue::Pinned { block: block.clone(), what, portable });
    }

    /// Keeps a share of a driver callback until the operation is complete.
    pub(crate) fn calls(&mut self, callback: Box<dyn Callback>) {
        self.extras().lent.push(LentValue::Callback(callback));
    }

    /// Keeps a user's value until the operation is complete.
    pub(crate) fn keeps(&mut self, value: Box<dyn Any + Send>) {
        self.extras().lent.push(LentValue::Kept(value));
    }
}
