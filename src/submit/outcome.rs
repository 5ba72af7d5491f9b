//! [`RunOutcome`]: the outcome of another library's work that is known only after the work has run: a function on a host device, or work
//! whose library reports failures from its own threads ([`WorkOutcome`]).
//!
//! | the function, or the library | the declared outputs |
//! |---|---|
//! | does not fail | count as written |
//! | fails after the submission | fail from then on, unless a later operation overwrote them |
//! | fails during the submission | fail when the submission returns, before the caller has its buffers back |
//!
//! Operations submitted before the failure have read invalid data. Their futures report the failure, and their outputs fail too: each
//! operation [depends](Dependency) on the outcomes of its inputs.
//!
//! An outcome whose work is complete is [over](RunOutcome::is_over), even if it is still referred to.
//!
//! # Invariants
//! 1. Data that a later operation wrote stays valid (`a_late_failure_leaves_what_was_overwritten`), even if that operation is in the
//!    same list and has the same ticket (`a_late_failure_leaves_what_its_list_overwrote`).
//! 2. It keeps no memory (`a_late_failure_of_memory_that_is_gone`).
//! 3. Every reader of its outputs fails, direct or indirect, whether submitted before the failure or after it
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

/// The outcomes that operations depend on. An operation usually has one: its own, which descends from those of its inputs.
#[derive(Clone, Default)]
pub(crate) struct Dependencies {
    known: SmallVec<[Dependency; 2]>,
    /// While operations are being submitted: the index of the first outcome of the last operation.
    last: usize,
    /// The outcomes that the inputs of the operation being submitted depend on.
    read: Read,
}

type Read = SmallVec<[Arc<RunOutcome>; 1]>;

/// An outcome that an operation depends on.
#[derive(Clone)]
pub(crate) struct Dependency {
    outcome: Arc<RunOutcome>,
    /// The operation, if it read the work's outputs rather than being the work itself.
    reader: Option<OwnedName>,
    /// Where the reader was submitted.
    at: Option<&'static Location<'static>>,
}

/// The outcome of work, or of an operation that reads the outputs of several works.
pub(crate) type RunOutcome = LinkedOutcome<LateOp, Weak<Allocation>, Error>;

pub(crate) struct LateOp {
    op: OwnedName,
    /// The operation's point on its stream, once it has a ticket.
    at: OnceLock<Point>,
    /// Nothing was submitted: the ticket belongs to another operation.
    is_refused: AtomicBool,
    /// Where the operation was submitted, once it was.
    place: OnceLock<&'static Location<'static>>,
}

/// The outcome of submitted work, for a library that learns of a failure only after its call has returned: from
/// [`RawQueue::outcome`](crate::RawQueue::outcome) or [`MemoryLoan::outcome`](crate::MemoryLoan::outcome).
///
/// Keep it wherever a failure may become known until the operation is complete; kept longer, it has no effect and
/// costs only its own memory. Clones are the same outcome; once all are dropped, the work can no longer be failed.
///
/// Until then, each operation that reads the work's outputs, directly or through other operations, checks the outcome. An operation
/// with an outcome of its own stands for the outcomes of its inputs: a reader at the end of a long chain checks only the last one.
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

    /// Marks it as never completing: nothing of it was submitted, or its end will not be known.
    #[cold]
    pub(crate) fn has_no_end(&self) {
        self.0.work.is_refused.store(true, Ordering::SeqCst);
    }

    /// Fails the outcome of a loan that is ending if any of its inputs has failed since it began.
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

    /// Marks the work as failed. The first failure counts.
    ///
    /// The operation's future resolves with [`ErrorDetail::Foreign`], whose source is `cause` (an [`Error`] of this crate stays as
    /// it is), **when the work is complete on the device**: the library must ensure that the work ends, and call this before it
    /// does. The operation's declared outputs count as failed from now on, until they are overwritten, and operations that have
    /// read them, or will, fail with [`ErrorDetail::Upstream`]. Once the host knows that the work is complete, the call changes
    /// nothing: the operation's future, or a reader's, may have been ready.
    ///
    /// Any thread may call this. It does not block, and never calls the driver.
    ///
    /// # Panics
    /// If the conversion of `cause` panics; the work counts as failed all the same.
    pub fn fail(&self, cause: impl Into<Box<dyn StdError + Send + Sync>>) {
        match contain::hold(|| cause.into()) {
            Ok(cause) => self.0.fail_with(cause),
            Err(panic) => {
                self.0.fail_with(contain::message(&*panic).into());
                resume_unwind(panic)
            }
        }
    }

    /// Returns the failure, if the work has failed so far: by [`fail`](Self::fail), or because an input failed. The operation's future
    /// resolves with it. Does not block, and never calls the driver.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.0.failure()
    }

    /// Returns whether the work is known to be complete or never to run, because it was refused or its device is lost.
    /// Returns false before the work is submitted, and always for a loan that ended on a thread that must not submit.
    ///
    /// Queries the device, or has a thread of this crate query it where no driver call may be made. Does not block. For work that
    /// nothing awaits, the first call places a marker for later calls to find.
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

    /// The dependency of an operation with that name that reads the work's outputs.
    fn of_reader(
        outcome: Arc<RunOutcome>,
        op: Name<'_>,
        at: Option<&'static Location<'static>>,
    ) -> Self {
        Dependency { outcome, reader: Some(op.to_owned()), at }
    }

    /// The operation's name.
    fn name(&self) -> &OwnedName {
        self.reader.as_ref().unwrap_or(&self.outcome.work.op)
    }

    pub(crate) fn op(&self) -> Arc<str> {
        self.name().to_arc()
    }

    /// Returns the failure, if there was one; called when the operation is complete. After that the work can no longer fail:
    /// a future may have reported its success.
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
    /// Adds the operation's line to its error.
    fn at_place(&self, error: Error) -> Error {
        self.place.get().into_iter().copied().fold(error, Error::called_at)
    }
}

/// The operations on the outcome of work.
pub(super) trait WorkOfOutcome: Sized {
    fn of(op: OwnedName, at: OnceLock<Point>) -> Arc<Self>;

    /// The outcome of the operation with that name that is being submitted to `stream`, whose lock the caller
    /// holds.
    fn of_next(op: Name<'_>, stream: &StreamState) -> Arc<Self>;

    /// Whether its work is known to be complete: it can no longer fail, and failed outputs are poisoned.
    fn is_over(&self) -> bool;

    /// Fails the work.
    fn fail_with(self: &Arc<Self>, error: Box<dyn StdError + Send + Sync>);

    fn poison_of(&self, error: &Error) -> Poison;

    /// Poisons the parts of `memory` that it wrote, unless another operation overwrote them.
    fn poison(self: &Arc<Self>, memory: &Allocation, poison: &Poison);

    /// Enters memory written by the outcome's operation, or by one that reads its outputs alone: the contents depend on it.
    fn enter_written(self: &Arc<Self>, memory: &Arc<Allocation>);

    /// Links it to the producers of its inputs.
    fn reads<'p>(self: &Arc<Self>, producers: impl IntoIterator<Item = &'p Arc<RunOutcome>>);

    /// Fails it with a producer's error, before anything was entered for it.
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

    /// Returns the first failure, if there was one; see [`Dependency::check`].
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

    /// The dependencies of the last submitted operation, for a future other than its own that returns its lent values.
    #[inline]
    pub(crate) fn of_last(&self) -> Option<Box<Dependencies>> {
        let all = self.0.borrow();
        let all = all.as_ref()?;
        let known: SmallVec<_> = all.known[all.last..].into();
        Dependencies::of(known)
    }

    /// Finds the outcomes that an operation depends on through its inputs. Called before the operation checks the contents:
    /// that check sees earlier failures, and the outcomes report later ones. Returns whether there is [nothing to look
    /// for](Footprint::is_plain).
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
                // If the operation is refused, it poisons the range itself. In a list its ticket does not tell it from an earlier writer.
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

    /// The outcomes that the inputs depend on, for a loan or an access of the host: it is not submitted, and reads when they are complete.
    pub(crate) fn of_inputs(footprint: &Footprint<'_>) -> Option<Box<Dependencies>> {
        let mut found = Read::new();
        let late = footprint.accesses.tracked().filter(|access| access.may_be_late());
        late.for_each(|access| find_late(access, &mut found));
        let reader = |outcome| Dependency::of_reader(outcome, footprint.name(), None);
        Dependencies::of(found.into_iter().map(reader).collect())
    }

    /// Makes the operation being submitted depend on another's inputs, whose data it gets without declaring it.
    pub(crate) fn push_reader_of(&self, op: &'static str, inputs: &Dependencies) {
        let reader = RunOutcome::of(OwnedName::Verb(op), OnceLock::new());
        reader.reads(inputs.iter().map(|input| &input.outcome));
        self.push(Dependency::own(reader));
    }

    /// Forgets the outcomes found: nothing of the operation was submitted.
    pub(crate) fn forget_read(&self) {
        if let Some(all) = &mut *self.0.borrow_mut() {
            all.read.clear();
        }
    }

    /// If the operation was submitted, enters its outcome, for its future to report and for the readers of its outputs.
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

    /// Outcomes of its own descend from those that it reads. Without any, the operation shares the one that it reads, or gets an outcome for several.
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
            // It may have failed while it was being submitted.
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

/// Wraps another library's error; an error of this crate stays as it is.
pub(super) fn foreign(op: Arc<str>, error: Box<dyn StdError + Send + Sync>) -> Error {
    match error.downcast::<Error>() {
        Ok(ours) => *ours,
        Err(theirs) => ErrorDetail::Foreign { op, cause: theirs.into() }.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Neither walking the chain nor dropping it recurses.
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
        // Nothing else refers to those in between.
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
