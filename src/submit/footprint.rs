//! [`Footprint`]: an operation's [`Name`], the parts of memory that it touches ([`Accesses`]), the points that it waits for and the values that it
//! is lent. The stages of the [submission](super) read it.
//!
//! A part is a range, or blocks of a slab:
//!
//! | the operation | touches | is ordered by |
//! |---|---|---|
//! | a copy of many pieces, a launch with a table | the blocks | the blocks |
//! | a launch that names blocks | the blocks, as it declares; others too, if it declares them wrongly | the blocks; on a host device the slab, as its twin gets a slice of all of it |
#![forbid(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tracing::level_filters::LevelFilter;

use super::lent::{LentValue, LentValues};
use crate::DeviceKind;
use crate::error::Error;
use crate::memory::accesses::{Access, Accesses, Edges};
use crate::memory::allocation::{Allocation, BlockSet, NamedUses};
use crate::memory::grouped::Group;
use crate::memory::pinned_pool::PinnedBlock;
use crate::memory::reclaim::claim::Claim;
use crate::memory::view::Span;
use crate::runtime::MarkedPoint;
use crate::runtime::event_pool::EventHandle;
use crate::runtime::stream_state::{Callback, StreamState};
use crate::thread::contain;
use gpu_await_protocol::hazard::Mode;

/// The memory and values that an operation touches.
pub struct Footprint<'a> {
    pub(super) name: Name<'a>,
    pub(super) accesses: Accesses<'a>,
    /// Most launches have none.
    pub(super) extras: Option<Extras>,
    pub(super) makes: Makes,
    pub(super) loan: LoanPhase,
    /// Something other than the stream's own work may hold it up.
    pub(crate) may_be_held_up: bool,
    /// The driver calls may take long for a reason other than a full queue: a kernel's first launch, or memory that the pool must get
    /// from the system.
    pub(crate) may_block: bool,
    /// It may touch memory of other devices of the same kind.
    pub(crate) peers: bool,
}

/// The buffer that an operation creates for others to depend on.
#[derive(Clone, Copy)]
pub(super) enum Makes {
    Nothing,
    Buffer,
    WrittenBuffer,
}

/// Which end of a loan an operation is.
#[derive(Clone, Copy)]
pub(super) enum LoanPhase {
    Neither,
    /// The end of the loan enters its uses. Until then nothing else uses the memory, except to read what the loan reads.
    Begins,
    /// Enters work that is already on the stream, even after the device was closed.
    Ends,
}

/// The part of a footprint that most launches do not have.
#[derive(Default)]
pub(super) struct Extras {
    pub(super) lent: LentValues,
    pub(super) after: Edges,
    pub(super) record: Option<EventHandle>,
    /// Set when a loan ends: the failure of an input, found before the loan was linked to its producers.
    pub(super) failed_input: Option<Error>,
}

impl<'a> Footprint<'a> {
    /// An operation with that name that touches nothing yet.
    #[inline(always)]
    pub fn new(verb: &'static str) -> Self {
        Footprint {
            name: Name::Verb(verb),
            accesses: Accesses::default(),
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
    #[inline(always)]
    pub(crate) fn touches(&mut self, span: &Span<'a>, mode: Mode) {
        let (memory, range, tracking) = (span.memory, span.range.clone(), span.tracking);
        self.accesses.all.push(Access {
            memory,
            range,
            mode,
            tracking,
            named: None,
            is_open: false,
        });
    }

    /// Touches an argument of a launch: memory, or a slab with the blocks that the launch names. The kernel may overwrite only these;
    /// other blocks of the slab keep their contents.
    // A host device's twin gets a slice of the whole slab, so nothing else may use any of it meanwhile.
    #[inline(always)]
    pub(crate) fn touches_named(&mut self, span: &Span<'a>, mode: Mode) {
        match span.named {
            None => self.touches(span, mode),
            Some(named) => self.touches_uses(span, named, mode),
        }
    }

    #[inline(never)]
    fn touches_uses(
        &mut self,
        span: &Span<'a>,
        NamedUses { used, read }: &'a NamedUses,
        mode: Mode,
    ) {
        let mode = if mode.writes() { Mode::ReadWrite } else { mode };
        // The written blocks come last: where the whole slab is entered, they stand for all.
        if !read.0.is_empty() {
            self.touches_open(span, read, Mode::Read);
        }
        self.touches_open(span, used, mode);
    }

    fn touches_open(&mut self, span: &Span<'a>, blocks: &'a BlockSet, mode: Mode) {
        self.touches_blocks(span, blocks, mode);
        if let Some(access) = self.accesses.all.last_mut() {
            access.is_open = span.memory.engine.backend.kind() == DeviceKind::Host;
        }
    }

    /// Touches a part, or blocks of a slab.
    pub(crate) fn touches_group(&mut self, group: &'a Group<'a>) {
        match &group.blocks {
            None => self.touches(&group.span, group.mode),
            Some(blocks) => self.touches_blocks(&group.span, blocks, group.mode),
        }
    }

    /// For a graph's list, which knows arguments by their ranges, and orders blocks as the whole slab to keep its shape: blocks that were passed
    /// as arguments are touched one by one; for others the whole slab is touched, and a write of it is a read and write.
    pub(crate) fn part_blocks(
        &mut self,
        is_passed: impl Fn(&Arc<Allocation>, &Range<u64>) -> bool,
    ) {
        if self.accesses.all.iter().all(|access| access.named.is_none()) {
            return;
        }
        for access in std::mem::take(&mut self.accesses.all) {
            let Some(BlockSet(blocks)) = access.named.filter(|_| !access.is_open) else {
                self.accesses.all.push(access);
                continue;
            };
            let Access { memory, mode, tracking, .. } = access;
            let bytes = memory.block_bytes();
            let range = |block: &u32| u64::from(*block) * bytes..(u64::from(*block) + 1) * bytes;
            if blocks.iter().any(|block| is_passed(memory, &range(block))) {
                let part =
                    |range| Access { memory, range, mode, tracking, named: None, is_open: false };
                self.accesses.all.extend(blocks.iter().map(range).map(part));
            } else {
                let mode = if mode.writes() { Mode::ReadWrite } else { mode };
                self.accesses.all.push(Access { mode, ..access });
            }
        }
    }

    /// Touches blocks of a slab; the span is the whole slab.
    fn touches_blocks(&mut self, slab: &Span<'a>, blocks: &'a BlockSet, mode: Mode) {
        self.touches(slab, mode);
        if let Some(access) = self.accesses.all.last_mut() {
            access.named = Some(blocks);
        }
    }

    /// Adds the accesses and the lent values of a part of the operation.
    pub(super) fn includes<'b: 'a>(&mut self, mut part: Footprint<'b>) {
        let lent = part.take_lent();
        // One by one, because the part's lifetime may be longer.
        part.accesses.all.into_iter().for_each(|access| self.accesses.all.push(access));
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

    /// Whether it has only the memory that it touches: no lent values, no points to wait for, no event, no part in a loan, and nothing
    /// that holds it up.
    #[inline]
    pub(crate) fn is_simple(&self) -> bool {
        self.extras.is_none()
            & matches!(self.loan, LoanPhase::Neither)
            & !(self.may_block | self.may_be_held_up)
    }

    /// Whether a launch may be written to a list: only work of its own stream holds it up, and the driver calls do not
    /// block.
    pub(crate) fn can_be_listed(&self) -> bool {
        !self.may_block && self.is_of_the_stream_alone()
    }

    /// Whether the operation may go in front of the recorded list: it touches only memory that it allocates.
    pub(crate) fn can_be_in_front(&self) -> bool {
        self.makes_buffer() && self.accesses.all.is_empty() && self.is_of_the_stream_alone()
    }

    /// Whether no other stream's work holds it up, and no event is recorded behind it.
    fn is_of_the_stream_alone(&self) -> bool {
        let record = self.extras.as_ref().and_then(|extras| extras.record.as_ref());
        !self.may_be_held_up && record.is_none()
    }

    /// Declares that the operation makes a buffer that others will depend on; `and_writes`: it also writes it.
    pub(crate) fn makes(&mut self, and_writes: bool) {
        self.makes = if and_writes { Makes::WrittenBuffer } else { Makes::Buffer };
    }

    /// Whether it only allocates a buffer, and writes nothing.
    #[inline]
    pub(crate) fn only_makes_a_buffer(&self) -> bool {
        matches!(self.makes, Makes::Buffer) && self.can_be_in_front()
    }

    pub(super) fn extras(&mut self) -> &mut Extras {
        self.extras.get_or_insert_default()
    }

    /// Makes it the beginning of a loan. Returns the values lent to it, which stay lent until the loan ends.
    pub(super) fn begin_loan(&mut self) -> LentValues {
        self.loan = LoanPhase::Begins;
        self.take_lent()
    }

    /// Ends the beginning of a loan: there is nothing more to wait for.
    pub(super) fn loan_has_begun(&mut self, lent: LentValues) {
        self.loan = LoanPhase::Neither;
        if let Some(extras) = &mut self.extras {
            extras.after.clear();
        }
        if !lent.is_empty() {
            self.extras().lent = lent;
        }
    }

    /// Makes it the end of a loan.
    pub(super) fn end_loan(&mut self) {
        self.loan = LoanPhase::Ends;
    }

    /// Records `event` behind the operation, which makes it the operation's marker.
    pub(crate) fn records(&mut self, event: EventHandle) {
        self.extras().record = Some(event);
    }

    /// Lends pinned memory to the device until the operation is complete. Another device's memory is refused:
    /// it is not registered with this device.
    pub(crate) fn lends(&mut self, block: &Arc<PinnedBlock>) {
        self.lend(block, "the pinned buffer", false);
    }

    /// Lends the word of a flag, as [`lends`](Self::lends).
    pub(crate) fn lends_flag(&mut self, block: &Arc<PinnedBlock>) {
        self.lend(block, "the flag", false);
    }

    /// Lends pinned memory that may belong to another device of the same kind, to be used by its *host*
    /// address only: it is registered as portable.
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

/// An operation's name in messages.
#[derive(Clone, Copy)]
pub(crate) enum Name<'a> {
    Verb(&'static str),
    Kernel(&'a Arc<str>),
}

impl Name<'_> {
    /// Emits the submission's event once all bookkeeping is done: a subscriber is foreign code that may use
    /// the stream, or panic.
    #[inline]
    pub(crate) fn told(self, stream: &Arc<StreamState>, ticket: u64) {
        // The event's own first check, and the only cost where no subscriber listens.
        if LevelFilter::current() >= LevelFilter::TRACE {
            self.tell(stream, ticket);
        }
    }

    #[cold]
    fn tell(self, stream: &Arc<StreamState>, ticket: u64) {
        let op = self;
        let early = stream.overlap.was_allowed(ticket);
        contain::log(|| {
            tracing::trace!(target: "gpu_await::submit", stream = stream.progress.id, name = stream.driver.name(), ticket, %op, early);
        });
    }

    /// The kernel's name, or, as an error, the operation's.
    pub(crate) fn of_kernel(&self) -> Result<&Arc<str>, &'static str> {
        match self {
            Name::Verb(name) => Err(name),
            Name::Kernel(name) => Ok(name),
        }
    }

    pub(crate) fn to_owned(self) -> OwnedName {
        match self {
            Name::Verb(name) => OwnedName::Verb(name),
            Name::Kernel(name) => OwnedName::Kernel(Arc::clone(name)),
        }
    }

    pub(crate) fn to_arc(self) -> Arc<str> {
        match self {
            Name::Verb(name) => Arc::from(name),
            Name::Kernel(name) => Arc::clone(name),
        }
    }
}

/// A [`Name`] that borrows nothing.
#[derive(Clone)]
pub(crate) enum OwnedName {
    Verb(&'static str),
    Kernel(Arc<str>),
}

impl OwnedName {
    pub(crate) fn to_arc(&self) -> Arc<str> {
        match self {
            OwnedName::Verb(name) => Arc::from(*name),
            OwnedName::Kernel(name) => Arc::clone(name),
        }
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Name::Verb(name) => name,
            Name::Kernel(name) => name,
        })
    }
}
