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
//!
//! More than 500 lines: an outcome and the dependencies on it fail as one.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::error::Error as StdError;
use std::fmt;
use std::panic::{Location, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use smallvec::SmallVec;

use super::footprint::{Footprint, Name, OwnedName};
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::accesses::Access;
use crate::memory::allocation::{Allocation, AnyWork, LatePart, Poison};
use crate::runtime::Point;
use crate::runtime::stream_state::StreamState;
use crate::thread::contain;
use gpu_await_protocol::block_hazards::Blocks;
use gpu_await_protocol::hazard::Mode;
use gpu_await_protocol::linked_outcome::LinkedOutcome;

/// The outcomes that a future reports. Usually there are none.
#[derive(Default)]
pub(crate) struct LateOutcomes(RefCell<Option<Box<Dependencies>>>);

/// Of one operation usually one: its own, which descends from those of its inputs.
#[derive(Clone, Default)]
pub(crate) struct Dependencies {
    known: SmallVec<[Dependency; 2]>,
    /// While operations are submitted: the index from which on they are those of the last one.
    last: usize,
    /// The outcomes that the inputs of the operation that is being submitted depend on.
    read: Read,
}

type Read = SmallVec<[Arc<RunOutcome>; 1]>;

/// An outcome that an operation's own depends on.
#[derive(Clone)]
pub(crate) struct Dependency {
    outcome: Arc<RunOutcome>,
    /// The operation, if it read the work's outputs and is not the work itself.
    reader: Option<OwnedName>,
    /// Where that was submitted.
    at: Option<&'static Location<'static>>,
}

/// The outcome of work, or of an operation that reads the outputs of several.
pub(crate) type RunOutcome = LinkedOutcome<LateOp, Weak<Allocation>, Error>;

pub(crate) struct LateOp {
    op: OwnedName,
    /// The operation's point on its stream, once it has a ticket.
    at: OnceLock<Point>,
    /// Nothing was submitted: the ticket is another operation's.
    is_refused: AtomicBool,
    /// Where the operation was submitted, once it was.
    place: OnceLock<&'static Location<'static>>,
}

/// How work that is already submitted ends, for a library that learns of a failure later than its call returns: from
/// [`RawQueue::outcome`](crate::RawQueue::outcome) or [`MemoryLoan::outcome`](crate::MemoryLoan::outcome).
///
/// Whoever may learn of the failure keeps it until the operation is complete; kept longer, it says nothing and costs
/// nothing but its own memory. Clones are the same outcome; dropping them all says that nothing fails any more.
///
/// Until then each operation that reads what the work wrote, or what a reader of that wrote, looks at the outcome. An operation that
/// has an outcome of its own stands for those of its inputs: readers of a long chain of them look at the last one.
#[derive(Clone)]
pub struct WorkOutcome(Arc<RunOutcome>);

impl WorkOutcome {
    pub(super) fn new(outcome: &Arc<RunOutcome>) -> Self {
        WorkOutcome(outcome.clone())
    }

    /// The outcome of a loan's work, which has no ticket before the loan ends.
    pub(crate) fn of_loan(op: &'static str) -> Self {
        WorkOutcome(RunOutcome::of(OwnedName::Verb(op), OnceLock::new()))
    }

    /// The outcome of a launch that was refused with an error.
    pub(super) fn refused(op: &Arc<str>, error: &Error) -> Self {
        let outcome = RunOutcome::of(Name::Kernel(op).to_owned(), OnceLock::new());
        outcome.fail_with(error.clone().into());
        let refused = WorkOutcome(outcome);
        refused.has_no_end();
        refused
    }

    /// Nothing of it was submitted, or nobody will say more of it.
    #[cold]
    pub(crate) fn has_no_end(&self) {
        self.0.work.is_refused.store(true, Ordering::SeqCst);
    }

    /// Fails by those inputs of the loan, which is ending, that have failed since it began.
    pub(crate) fn inherits(&self, inputs: &Dependencies) {
        for Dependency { outcome, .. } in inputs.iter() {
            if let Some(error) = outcome.failure() {
                self.0.inherits(outcome, &error);
            }
        }
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
            Ok(cause) => self.0.fail_with(cause),
            Err(panic) => {
                self.0.fail_with(contain::message(&*panic).into());
                resume_unwind(panic)
            }
        }
    }

    /// Returns the failure, if the work has failed so far: by [`fail`](Self::fail), or as what it read from did. The operation's future
    /// resolves with it. Does not block, and never calls the driver.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.0.failure()
    }

    /// Returns whether the work is known to be complete, or never runs: it was refused, or its device is lost. Before the work is
    /// submitted it is neither; of a loan that ended on a thread that must not submit, nobody ever knows.
    ///
    /// Asks the device, or has a thread of this crate ask it where no driver call may be made. Does not block. Of work that nobody
    /// awaits the first question places the marker that a later one finds.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let LateOp { at, is_refused, .. } = &self.0.work;
        let is_settled = at.get().is_some_and(|Point { stream, ticket }| {
            stream.ask(*ticket);
            stream.is_settled(*ticket)
        });
        is_settled || is_refused.load(Ordering::SeqCst)
    }
}

impl fmt::Debug for WorkOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkOutcome")
            .field("op", &self.0.work.op.to_arc())
            .field("error", &self.0.failure())
            .finish()
    }
}

impl Dependency {
    pub(super) fn own(outcome: Arc<RunOutcome>) -> Self {
        Dependency { outcome, reader: None, at: None }
    }

    /// Of an operation of that name, which reads the work's outputs.
    fn of_reader(
        outcome: Arc<RunOutcome>,
        op: Name<'_>,
        at: Option<&'static Location<'static>>,
    ) -> Self {
        Dependency { outcome, reader: Some(op.to_owned()), at }
    }

    /// The operation.
    fn name(&self) -> &OwnedName {
        self.reader.as_ref().unwrap_or(&self.outcome.work.op)
    }

    pub(crate) fn op(&self) -> Arc<str> {
        self.name().to_arc()
    }

    /// The failure, if there was one; asked when the operation is complete. If there was none, there never will be: a future
    /// says so.
    pub(crate) fn check(&self) -> Result<()> {
        let Err((failed, error)) = self.outcome.tell() else { return Ok(()) };
        match self.reader {
            None if Arc::ptr_eq(&failed, &self.outcome) => Err(error),
            _ => {
                let error = failed.poison_of(&error).upstream(self.op());
                let at = self.at.or_else(|| self.outcome.work.place.get().copied());
                Err(at.into_iter().fold(error, Error::called_at))
            }
        }
    }
}

impl LateOp {
    /// The operation's error, with its line.
    fn at_place(&self, error: Error) -> Error {
        self.place.get().into_iter().copied().fold(error, Error::called_at)
    }
}

/// What is done with the outcome of work.
pub(super) trait WorkOfOutcome: Sized {
    fn of(op: OwnedName, at: OnceLock<Point>) -> Arc<Self>;

    /// The outcome of the operation of that name that is being submitted to `stream`, whose lock the caller
    /// holds.
    fn of_next(op: Name<'_>, stream: &StreamState) -> Arc<Self>;

    /// Whether its work is known to be complete: it can fail no more, and failed outputs are poisoned.
    fn is_over(&self) -> bool;

    /// The work failed.
    fn fail_with(self: &Arc<Self>, error: Box<dyn StdError + Send + Sync>);

    fn poison_of(&self, error: &Error) -> Poison;

    /// Poisons what it wrote there, unless another operation overwrote it.
    fn poison(self: &Arc<Self>, memory: &Allocation, poison: &Poison);

    /// The operation that it is of was submitted, or one that reads its outputs alone: what they wrote depends on it.
    fn enter_written(self: &Arc<Self>, memory: &Arc<Allocation>);

    /// It reads the outputs of other work.
    fn reads<'p>(self: &Arc<Self>, producers: impl IntoIterator<Item = &'p Arc<RunOutcome>>);

    /// Fails by a producer, before anything was entered for it.
    fn inherits(&self, producer: &RunOutcome, error: &Error);
}

impl WorkOfOutcome for RunOutcome {
    fn of(op: OwnedName, at: OnceLock<Point>) -> Arc<Self> {
        let place = OnceLock::new();
        LinkedOutcome::new(LateOp { op, at, is_refused: AtomicBool::new(false), place })
    }

    fn of_next(op: Name<'_>, stream: &StreamState) -> Arc<Self> {
        RunOutcome::of(
            op.to_owned(),
            OnceLock::from(stream.point(stream.progress.timeline.submitted() + 1)),
        )
    }

    fn is_over(&self) -> bool {
        self.work.at.get().is_some_and(Point::is_complete)
    }

    fn fail_with(self: &Arc<Self>, error: Box<dyn StdError + Send + Sync>) {
        let error = self.work.at_place(foreign(self.work.op.to_arc(), error));
        let poison = self.poison_of(&error);
        let inherited = |reader: &LateOp| reader.at_place(poison.upstream(reader.op.to_arc()));
        self.fail(
            error,
            || self.is_over(),
            inherited,
            |failed, _, written| {
                for memory in written.iter().filter_map(Weak::upgrade) {
                    failed.poison(&memory, &poison);
                }
            },
        );
    }

    fn poison_of(&self, error: &Error) -> Poison {
        Poison::of(error, || self.work.op.to_arc())
    }

    fn poison(self: &Arc<Self>, memory: &Allocation, poison: &Poison) {
        memory.late.take(self, |range, by| memory.poison_written(range, by, poison));
    }

    fn enter_written(self: &Arc<Self>, memory: &Arc<Allocation>) {
        let is_another = |known: &Weak<Allocation>| {
            known.strong_count() > 0 && known.as_ptr() != Arc::as_ptr(memory)
        };
        if let Some(error) = self.wrote(Arc::downgrade(memory), is_another) {
            self.poison(memory, &self.poison_of(&error));
        }
    }

    fn reads<'p>(self: &Arc<Self>, producers: impl IntoIterator<Item = &'p Arc<RunOutcome>>) {
        for producer in producers {
            if let Some(error) = self.descends_from(producer) {
                self.inherits(producer, &error);
            }
        }
    }

    fn inherits(&self, producer: &RunOutcome, error: &Error) {
        let error = producer.poison_of(error).upstream(self.work.op.to_arc());
        let error = self.work.at_place(error);
        drop(self.inherit(&error));
    }
}

impl Dependencies {
    fn of(known: SmallVec<[Dependency; 2]>) -> Option<Box<Self>> {
        (!known.is_empty()).then(|| Box::new(Dependencies { known, ..Dependencies::default() }))
    }

    /// The first failure, if there was one; see [`Dependency::check`].
    pub(crate) fn check(&self) -> Result<()> {
        self.iter().try_for_each(Dependency::check)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Dependency> {
        self.known.iter()
    }

    pub(crate) fn extend(&mut self, others: Dependencies) {
        self.known.extend(others.known);
    }
}

impl LateOutcomes {
    #[inline]
    pub(crate) fn is_used(&self) -> bool {
        self.0.borrow().is_some()
    }

    pub(crate) fn push(&self, own: Dependency) {
        self.0.borrow_mut().get_or_insert_default().known.push(own);
    }

    #[inline]
    pub(crate) fn take(&self) -> Option<Box<Dependencies>> {
        self.0.take()
    }

    /// The dependencies of the last submitted operation: a future other than its own may return its lent values.
    #[inline]
    pub(crate) fn of_last(&self) -> Option<Box<Dependencies>> {
        let all = self.0.borrow();
        let all = all.as_ref()?;
        let known: SmallVec<_> = all.known[all.last..].into();
        Dependencies::of(known)
    }

    /// Finds the outcomes that an operation depends on through its inputs. Called before the operation checks the contents: a
    /// failure in between is found here, and an earlier one is seen there. Returns whether there is
    /// [nothing to look for](Footprint::is_plain).
    #[inline(always)]
    pub(crate) fn look(&self, footprint: &Footprint<'_>, stream: &StreamState) -> bool {
        let is_used = self.is_used();
        if !is_used && footprint.is_plain(stream) {
            return true;
        }
        if is_used || (footprint.is_entered() && footprint.accesses.may_be_late()) {
            self.find_read(footprint);
        }
        false
    }

    #[cold]
    #[inline(never)]
    fn find_read(&self, footprint: &Footprint<'_>) {
        let mut found = Read::new();
        for access in footprint.accesses.tracked().filter(|access| access.memory.late.is_used()) {
            if access.mode == Mode::Overwrite {
                // If it is refused, it poisons the range itself. A list's ticket does not tell it from an earlier writer.
                access.memory.late.leave(&access.range);
            } else {
                find_late(access, &mut found);
            }
        }
        let mut all = self.0.borrow_mut();
        if all.is_some() || !found.is_empty() {
            let all = all.get_or_insert_default();
            all.last = all.known.len();
            if !found.is_empty() {
                all.read = found;
            }
        }
    }

    /// The outcomes that the inputs of an operation depend on, for one that is not submitted and reads when they are complete.
    pub(crate) fn of_inputs(footprint: &Footprint<'_>) -> Option<Box<Dependencies>> {
        let mut found = Read::new();
        let late = footprint.accesses.tracked().filter(|access| access.may_be_late());
        late.for_each(|access| find_late(access, &mut found));
        let reader = |outcome| Dependency::of_reader(outcome, footprint.name(), None);
        Dependencies::of(found.into_iter().map(reader).collect())
    }

    /// The operation that is being submitted gets data of others' inputs, by a way that it does not declare.
    pub(crate) fn push_reader_of(&self, op: &'static str, inputs: &Dependencies) {
        let reader = RunOutcome::of(OwnedName::Verb(op), OnceLock::new());
        reader.reads(inputs.iter().map(|input| &input.outcome));
        self.push(Dependency::own(reader));
    }

    /// Forgets the found outcomes: nothing of the operation was submitted.
    pub(crate) fn forget_read(&self) {
        if let Some(all) = &mut *self.0.borrow_mut() {
            all.read.clear();
        }
    }

    /// Enters the outcome of the operation, for its future to report and for the readers of its outputs, if it was submitted.
    #[inline]
    pub(crate) fn enter<E>(
        &self,
        footprint: &Footprint<'_>,
        stream: &StreamState,
        submitted: &std::result::Result<u64, E>,
        at: &'static Location<'static>,
    ) {
        if self.is_used() {
            let ticket = submitted.as_ref().ok().copied();
            self.enter_late(footprint, stream, ticket, at);
        }
    }

    /// Its own outcomes descend from those that it reads; without any it stands beside the one that it reads, or has one for several.
    #[cold]
    #[inline(never)]
    fn enter_late(
        &self,
        footprint: &Footprint<'_>,
        stream: &StreamState,
        ticket: Option<u64>,
        at: &'static Location<'static>,
    ) {
        let mut all = self.0.borrow_mut();
        let Some(Dependencies { known, last, read }) = all.as_deref_mut() else { return };
        let (read, last) = (std::mem::take(read), *last);
        let Some(ticket) = ticket else {
            return known.drain(last..).for_each(|own| WorkOutcome(own.outcome).has_no_end());
        };
        if known.len() == last {
            known.extend(match &read[..] {
                [] => None,
                [only] => Some(Dependency::of_reader(only.clone(), footprint.name(), Some(at))),
                _ => Some(Dependency::own(RunOutcome::of(
                    footprint.name().to_owned(),
                    OnceLock::new(),
                ))),
            });
        }
        let late = &known[last..];
        for Dependency { outcome, .. } in late.iter().filter(|late| late.reader.is_none()) {
            outcome.work.at.get_or_init(|| stream.point(ticket));
            outcome.work.place.get_or_init(|| at);
            // It may have failed while it was submitted.
            outcome.failure().into_iter().for_each(|error| drop(error.called_at(at)));
            outcome.reads(&read);
        }
        if late.is_empty() {
            return;
        }
        for access in footprint.accesses.tracked().filter(|access| access.mode.writes()) {
            let work = late.iter().map(|late| Arc::downgrade(&late.outcome) as Weak<AnyWork>);
            access.memory.enter_late(&access.range, (stream.progress.id, ticket), work);
            late.iter().for_each(|late| late.outcome.enter_written(access.memory));
        }
    }
}

/// Adds the outcomes that the access's range depends on.
fn find_late(access: &Access<'_>, found: &mut Read) {
    let late = &access.memory.late;
    for LatePart { part, by, work } in late.of::<RunOutcome>(&access.range) {
        let part = if access.named.is_some() { access.part() } else { Blocks::Range(&part) };
        if !work.is_open(|| work.is_over()) {
            late.take(&work, |_, _| ());
        } else if access.memory.with_hazards(|all| all.is_written_by(&part, by))
            && !found.iter().any(|known| Arc::ptr_eq(known, &work))
        {
            found.push(work);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Each walk of it, and its drop.
    #[test]
    fn a_long_chain_of_outcomes() {
        type Outcome = LinkedOutcome<usize, (), usize>;
        const LEN: usize = 100_000;
        let chain = || {
            let chain: Vec<_> = (0..LEN).map(Outcome::new).collect();
            for link in chain.windows(2) {
                assert_eq!(link[1].descends_from(&link[0]), None);
                link[1].wrote((), |()| true);
            }
            chain
        };
        let mut told = chain();
        // Nobody else has those in between.
        told.drain(1..LEN - 1);
        assert!(told[1].tell().is_ok());
        told[0].fail(0, || false, |at| *at, |_, _, _| unreachable!("a reader was told"));
        let mut failed = chain();
        failed.drain(1..LEN - 1);
        let mut written = 0;
        failed[0].fail(0, || false, |at| *at, |_, _, memory| written += memory.len());
        assert_eq!((written, failed[1].failure()), (LEN - 1, Some(LEN - 1)));
        let mut dropped = chain();
        dropped.drain(1..);
    }
}
