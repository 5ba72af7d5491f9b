//! [`RunOutcome`]: the outcome of another library's work, where it is known only after the work has run: a function on a host device, or
//! work whose library reports failures from threads of its own ([`WorkOutcome`]).
//!
//! | the function, or the library | the declared outputs |
//! |---|---|
//! | has not failed | count as written |
//! | fails after the submission | fail from then on, unless a later operation overwrote them |
//! | fails during the submission | fail when the submission returns, before the caller has its buffers back |
//!
//! Operations submitted before the failure have read the old contents. Their futures report the failure, and their outputs fail too: each
//! of them [depends](Dependency) on the outcomes of what it read.
//!
//! An outcome whose work is complete is [over](RunOutcome::is_over), whatever still refers to it.
//!
//! # Invariants
//! 1. Data that a later operation overwrote stays valid (`a_late_failure_leaves_what_was_overwritten`), even if that operation is in the
//!    same list and has the same ticket (`a_late_failure_leaves_what_its_list_overwrote`).
//! 2. It keeps no memory (`a_late_failure_of_memory_that_is_gone`).
//! 3. Every reader of its outputs fails, submitted before the failure or after it, direct or indirect
//!    (`a_late_failure_reaches_every_reader`), on any device (`a_late_failure_reaches_readers_of_other_devices`) and through any future
//!    (`a_late_failure_goes_with_what_is_lent`).
#![forbid(unsafe_code)]

use std::any::Any;
use std::cell::{OnceCell, RefCell};
use std::error::Error as StdError;
use std::fmt;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::footprint::{Access, Footprint};
use super::name::{Name, OwnedName};
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::allocation::{Allocation, Poison};
use crate::memory::hazard::Mode;
use crate::memory::point::Track;
use crate::runtime::Point;
use crate::runtime::stream_state::StreamState;
use crate::thread::contain;

/// The outcomes that a future reports. Usually there are none.
#[derive(Default)]
pub(crate) struct LateOutcomes(OnceCell<Box<RefCell<LateReads>>>);

#[derive(Default)]
struct LateReads {
    known: Dependencies,
    /// The index from which on they are those of the last submitted operation.
    last: usize,
    /// The inputs of the operation that is being submitted.
    read: Vec<Arc<RunOutcome>>,
}

/// Usually one: of the operation itself, or of what wrote its input.
pub(crate) type Dependencies = SmallVec<[Dependency; 1]>;

/// An outcome that an operation's own depends on.
#[derive(Clone)]
pub(crate) struct Dependency {
    outcome: Arc<RunOutcome>,
    /// The operation, if it read the work's outputs and is not the work itself.
    reader: Option<OwnedName>,
}

pub(crate) struct RunOutcome {
    op: OwnedName,
    /// The operation's point on its stream, once it has a ticket.
    at: OnceLock<Point>,
    state: Mutex<RunState>,
}

/// How work that is already submitted ends, for a library that learns of a failure later than its call returns: from
/// [`RawQueue::outcome`](crate::RawQueue::outcome) or [`MemoryLoan::outcome`](crate::MemoryLoan::outcome).
///
/// Whoever may learn of the failure keeps it until the operation is complete; kept longer, it says nothing and costs
/// nothing but its own memory. Clones are the same outcome; dropping them all says that nothing fails any more.
///
/// Until then each operation that reads what the work wrote, or what a reader of that wrote, looks at the outcome.
#[derive(Clone)]
pub struct WorkOutcome(Arc<RunOutcome>);

impl WorkOutcome {
    pub(super) fn new(outcome: &Arc<RunOutcome>) -> Self {
        WorkOutcome(outcome.clone())
    }

    /// The outcome of a loan's work, which has no ticket before the loan ends.
    pub(crate) fn of_loan(op: &'static str) -> Self {
        let (op, at, state) = (OwnedName::Verb(op), OnceLock::new(), Mutex::default());
        WorkOutcome(Arc::new(RunOutcome { op, at, state }))
    }

    /// The loan has ended with that ticket.
    pub(crate) fn ended_at(&self, footprint: &Footprint<'_>, stream: &StreamState, ticket: u64) {
        self.0.at.get_or_init(|| stream.point(ticket));
        self.0.submitted(footprint, (stream.id(), ticket));
    }

    /// The loan was not entered, as its device is lost: nobody will say more of its work.
    #[cold]
    pub(crate) fn has_no_end(&self) {
        self.0.refuse();
    }

    /// The dependency for the future of the loan.
    pub(crate) fn dependency(&self) -> Dependency {
        Dependency::own(self.0.clone())
    }

    /// Says that the work failed. The first failure counts.
    ///
    /// The operation's future resolves with [`ErrorDetail::Foreign`], whose source is `cause` (an [`Error`] of this crate stays
    /// as it is), **when the work is complete on the device**: the library sees to it that it ends, and calls this before. What the
    /// operation was declared to write counts as failed from now on, until it is overwritten, and operations that have read it,
    /// or will, fail with [`ErrorDetail::Upstream`]. Once the host knows that the work is complete it is too late, and the call
    /// changes nothing: the operation's future, or a reader's, may have been ready.
    ///
    /// Any thread may call it. It does not block, and never calls the driver.
    ///
    /// # Panics
    /// If making an error of `cause` does; the work counts as failed all the same.
    pub fn fail(&self, cause: impl Into<Box<dyn StdError + Send + Sync>>) {
        match contain::hold(|| cause.into()) {
            Ok(cause) => self.0.fail(cause),
            Err(panic) => {
                self.0.fail(contain::message(&*panic).into());
                resume_unwind(panic)
            }
        }
    }

    /// Returns whether the work is known to be complete, or never runs: it was refused, or its device is lost. Before the work is
    /// submitted it is neither; of a loan that ended on a thread that must not submit, nobody ever knows.
    ///
    /// Asks the device, or has a thread of this crate ask it where no driver call may be made. Does not block. Of work that nobody
    /// awaits the first question places the marker that a later one finds.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let is_settled = self.0.at.get().is_some_and(|Point { stream, ticket }| {
            stream.ask(*ticket);
            stream.is_settled(*ticket)
        });
        is_settled || self.0.state.lock().is_refused
    }
}

impl fmt::Debug for WorkOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = self.0.state.lock().error.clone();
        f.debug_struct("WorkOutcome")
            .field("op", &self.0.op.to_arc())
            .field("error", &error)
            .finish()
    }
}

#[derive(Default)]
struct RunState {
    /// The first failure.
    error: Option<Error>,
    /// Nothing was submitted: the ticket is another operation's.
    is_refused: bool,
    /// A future told that the work, or a reader of it, succeeded.
    is_told: bool,
    /// The operation's declared outputs, known when it was submitted, and those of its readers.
    written: SmallVec<[WrittenRange; 1]>,
}

struct WrittenRange {
    memory: Weak<Allocation>,
    range: Range<u64>,
    /// The stream and the ticket of the writer.
    by: (u64, u64),
}

impl Dependency {
    pub(super) fn own(outcome: Arc<RunOutcome>) -> Self {
        Dependency { outcome, reader: None }
    }

    pub(crate) fn op(&self) -> Arc<str> {
        self.reader.as_ref().unwrap_or(&self.outcome.op).to_arc()
    }

    /// The failure, if there was one; asked when the operation is complete. If there was none, there never will be: a future
    /// says so.
    pub(crate) fn check(&self) -> Result<()> {
        let mut state = self.outcome.state.lock();
        let Some(cause) = state.error.clone() else {
            state.is_told = true;
            return Ok(());
        };
        drop(state);
        let Some(reader) = &self.reader else { return Err(cause) };
        let (op, producer) = (reader.to_arc(), self.outcome.op.to_arc());
        Err(ErrorDetail::Upstream { op, producer, cause }.into())
    }
}

impl RunOutcome {
    /// The outcome of the operation of that name that is being submitted to `stream`, whose lock the caller
    /// holds.
    pub(super) fn of(op: Name<'_>, stream: &StreamState) -> Self {
        let at = OnceLock::from(stream.point(stream.submitted() + 1));
        RunOutcome { op: op.to_owned(), at, state: Mutex::default() }
    }

    /// Nothing of it was submitted, or nobody will say more of it.
    fn refuse(&self) {
        self.state.lock().is_refused = true;
    }

    /// Whether its work is known to be complete: it can fail no more, and failed outputs are poisoned.
    fn is_over(&self) -> bool {
        self.at.get().is_some_and(Point::is_complete)
    }

    /// The function failed.
    pub(super) fn fail(&self, error: Box<dyn StdError + Send + Sync>) {
        let mut state = self.state.lock();
        if state.error.is_none() && !state.is_told && !self.is_over() {
            let error = foreign(self.op.to_arc(), error);
            // Under the lock: a later writer removes its range first, or finds the poison and replaces it.
            let kept = self.poison(&error, &state.written);
            state.error = Some(error);
            drop(state);
            drop(kept);
        }
    }

    /// The operation was submitted, or one that reads its outputs.
    fn submitted(self: &Arc<Self>, footprint: &Footprint<'_>, by: (u64, u64)) {
        let mut written: SmallVec<[WrittenRange; 1]> = SmallVec::new();
        for access in footprint.tracked().filter(|access| access.mode.writes()) {
            self.enter_on(access.memory);
            let (memory, range) = (Arc::downgrade(access.memory), access.range.clone());
            written.push(WrittenRange { memory, range, by });
        }
        let mut state = self.state.lock();
        let kept = state.error.as_ref().map(|error| self.poison(error, &written));
        // An overwritten range has another last writer, and freed memory none: a chain of operations is one range.
        state.written.retain(|known| {
            let is_again = |new: &WrittenRange| {
                new.memory.ptr_eq(&known.memory)
                    && new.range.start <= known.range.start
                    && known.range.end <= new.range.end
            };
            known.memory.strong_count() > 0 && !written.iter().any(is_again)
        });
        state.written.append(&mut written);
        drop(state);
        drop(kept);
    }

    /// Makes it visible to readers of that memory.
    fn enter_on(self: &Arc<Self>, memory: &Arc<Allocation>) {
        let is_known =
            |written: &WrittenRange| std::ptr::eq(written.memory.as_ptr(), Arc::as_ptr(memory));
        if !self.state.lock().written.iter().any(is_known) {
            let work: Arc<dyn Any + Send + Sync> = self.clone();
            memory.late().enter(Arc::downgrade(&work));
        }
    }

    /// Whether the range read was written by it or by one of its readers.
    fn wrote(&self, access: &Access<'_>) -> bool {
        let state = self.state.lock();
        state.written.iter().any(|known| {
            let (start, end) =
                (known.range.start.max(access.range.start), known.range.end.min(access.range.end));
            known.memory.as_ptr() == Arc::as_ptr(access.memory)
                && start < end
                && access.memory.with_hazards(|all| all.is_written_by(&(start..end), known.by))
        })
    }

    /// Another operation is about to overwrite the range: if it is refused, it poisons the range itself.
    fn leave(&self, access: &Access<'_>) {
        let mut state = self.state.lock();
        let written = std::mem::take(&mut state.written);
        for known in written {
            if known.memory.as_ptr() != Arc::as_ptr(access.memory) {
                state.written.push(known);
                continue;
            }
            let Range { start, end } = known.range;
            let before = start..end.min(access.range.start);
            let behind = start.max(access.range.end)..end;
            for range in [before, behind].into_iter().filter(|range| !range.is_empty()) {
                let (memory, by) = (known.memory.clone(), known.by);
                state.written.push(WrittenRange { memory, range, by });
            }
        }
    }

    /// Returns the memory, for the caller to drop outside of the lock: it may have the last share.
    fn poison(&self, error: &Error, written: &[WrittenRange]) -> Vec<Arc<Allocation>> {
        let poison = Poison::of(error, || self.op.to_arc());
        let alive = written.iter().filter_map(|known| Some((known, known.memory.upgrade()?)));
        let poisoned = alive.map(|(WrittenRange { range, by, .. }, memory)| {
            memory.poison_written(range, *by, &poison);
            memory
        });
        poisoned.collect()
    }
}

impl LateOutcomes {
    #[cold]
    fn all(&self) -> &RefCell<LateReads> {
        self.0.get_or_init(Box::default)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.get().is_none_or(|all| all.borrow().known.is_empty())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.get().map_or(0, |all| all.borrow().known.len())
    }

    pub(crate) fn push(&self, own: Dependency) {
        self.all().borrow_mut().known.push(own);
    }

    pub(crate) fn take(&self) -> Dependencies {
        let Some(all) = self.0.get() else { return Dependencies::new() };
        let LateReads { known, last, .. } = &mut *all.borrow_mut();
        *last = 0;
        std::mem::take(known)
    }

    /// The dependencies of the last submitted operation: a future other than its own may return its lent values.
    #[inline]
    pub(crate) fn of_last(&self) -> Option<Dependencies> {
        let all = self.0.get()?.borrow();
        let last = all.known.get(all.last..)?;
        (!last.is_empty()).then(|| last.into())
    }

    /// Finds the outcomes that an operation depends on through its inputs. Called before the operation checks the contents: a
    /// failure in between is found here, and an earlier one is seen there.
    #[inline]
    pub(crate) fn look(&self, footprint: &Footprint<'_>) {
        let may_be_late =
            |access: &Access<'_>| access.mode != Mode::Overwrite && access.memory.late().is_used();
        if self.0.get().is_some() || footprint.entered().any(may_be_late) {
            self.find_read(footprint);
        }
    }

    #[cold]
    #[inline(never)]
    fn find_read(&self, footprint: &Footprint<'_>) {
        if let Some(all) = self.0.get() {
            let overwrites = || footprint.tracked().filter(|access| access.mode == Mode::Overwrite);
            for Dependency { outcome, .. } in &all.borrow().known {
                overwrites().for_each(|access| outcome.leave(access));
            }
        }
        let mut found: Vec<Arc<RunOutcome>> = Vec::new();
        for access in footprint.tracked().filter(|access| access.mode != Mode::Overwrite) {
            let late = access.memory.late();
            if late.is_used() {
                let alive = late.alive(|outcome: &RunOutcome| !outcome.is_over());
                found.extend(alive.into_iter().filter(|outcome| outcome.wrote(access)));
            }
        }
        found.sort_by_key(Arc::as_ptr);
        found.dedup_by(|a, b| Arc::ptr_eq(a, b));
        if !found.is_empty() {
            self.all().borrow_mut().read = found;
        }
    }

    /// Forgets the found outcomes: nothing of the operation was submitted.
    pub(crate) fn forget_read(&self) {
        if let Some(all) = self.0.get() {
            all.borrow_mut().read.clear();
        }
    }

    /// Enters the operation as a reader of the found outcomes, for its future to report, if it was submitted.
    #[inline]
    pub(crate) fn enter<R, E>(
        &self,
        footprint: &Footprint<'_>,
        stream: &StreamState,
        submitted: &std::result::Result<(u64, R), E>,
    ) {
        if self.0.get().is_some() {
            let ticket = submitted.as_ref().ok().map(|(ticket, _)| *ticket);
            self.enter_reader(footprint, stream.id(), ticket);
        }
    }

    #[cold]
    #[inline(never)]
    fn enter_reader(&self, footprint: &Footprint<'_>, stream: u64, ticket: Option<u64>) {
        let mut all = self.all().borrow_mut();
        let read = std::mem::take(&mut all.read);
        all.last = all.known.len();
        let Some(ticket) = ticket else { return };
        for outcome in read {
            outcome.submitted(footprint, (stream, ticket));
            let reader = Some(footprint.name().to_owned());
            all.known.push(Dependency { outcome, reader });
        }
    }

    /// Records in the outcomes after the first `known` what their operation writes, if it was submitted; otherwise it
    /// writes nothing.
    #[cold]
    #[inline(never)]
    pub(crate) fn submitted_with(
        &self,
        known: usize,
        is_submitted: bool,
        footprint: &Footprint<'_>,
    ) {
        let all = &mut self.all().borrow_mut().known;
        if !is_submitted {
            let own = all.drain(known..).filter(|own| own.reader.is_none());
            return own.for_each(|own| own.outcome.refuse());
        }
        for Dependency { outcome, .. } in all[known..].iter().filter(|own| own.reader.is_none()) {
            if let Some(Point { stream, ticket }) = outcome.at.get() {
                outcome.submitted(footprint, (stream.id(), *ticket));
            }
        }
    }
}

/// Another library's error as ours; an error of this crate stays as it is.
pub(super) fn foreign(op: Arc<str>, error: Box<dyn StdError + Send + Sync>) -> Error {
    match error.downcast::<Error>() {
        Ok(ours) => *ours,
        Err(theirs) => ErrorDetail::Foreign { op, cause: theirs.into() }.into(),
    }
}
