//! [`RunOutcome`]: how another library's work ended, where the stream of a host device runs it later.
//!
//! | its function | what was declared as written |
//! |---|---|
//! | has not failed | counts as written |
//! | fails behind the submission | counts as failed from then on, unless a later operation wrote it |
//! | fails beside the submission | counts as failed when that returns, before the buffers are the caller's again |
//!
//! Operations that were submitted before the failure have read what was there: the operation's own future is what tells
//! of it in time.
//!
//! # Invariants
//! 1. What a later operation overwrote stays good (`a_late_failure_leaves_what_was_overwritten`).
//! 2. It keeps no memory (`a_late_failure_of_memory_that_is_gone`).
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::error::Error as StdError;
use std::ops::Range;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::footprint::{Access, Footprint};
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::allocation::{Allocation, Poison};
use crate::runtime::stream_state::StreamState;

/// Those of a batch.
pub(crate) type Outcomes = RefCell<Vec<Arc<RunOutcome>>>;

pub(crate) struct RunOutcome {
    op: Arc<str>,
    stream: u64,
    ticket: u64,
    state: Mutex<RunState>,
}

#[derive(Default)]
struct RunState {
    /// The first failure.
    error: Option<Error>,
    /// Known when the operation was submitted.
    written: Vec<WrittenRange>,
}

/// A range that the operation was declared to write.
struct WrittenRange {
    memory: Weak<Allocation>,
    range: Range<u64>,
}

impl RunOutcome {
    /// That of the operation of that name that is being submitted to `stream`, whose lock the caller has.
    pub(super) fn of(op: Arc<str>, stream: &StreamState) -> Self {
        let (stream, ticket) = (stream.id(), stream.submitted() + 1);
        RunOutcome { op, stream, ticket, state: Mutex::default() }
    }

    /// The function failed.
    pub(super) fn fail(&self, error: Box<dyn StdError + Send + Sync>) {
        let mut state = self.state.lock();
        if state.error.is_none() {
            state.error = Some(foreign(self.op.clone(), error));
            self.poison(state);
        }
    }

    /// The operation was submitted.
    fn submitted(&self, accesses: &[Access<'_>]) {
        let written = accesses.iter().filter(|access| access.mode.writes()).map(|access| {
            let (memory, range) = (Arc::downgrade(access.memory), access.range.clone());
            WrittenRange { memory, range }
        });
        let mut state = self.state.lock();
        state.written.extend(written);
        self.poison(state);
    }

    pub(crate) fn op(&self) -> &Arc<str> {
        &self.op
    }

    /// The failure, if there was one; asked when the operation is complete.
    pub(crate) fn check(&self) -> Result<()> {
        self.state.lock().error.clone().map_or(Ok(()), Err)
    }

    /// Poisons what was written, if both are known.
    fn poison(&self, mut state: parking_lot::MutexGuard<'_, RunState>) {
        let Some(error) = state.error.clone() else { return };
        let written = std::mem::take(&mut state.written);
        drop(state);
        let poison = Poison::of(&error, || self.op.clone());
        for WrittenRange { memory, range } in written {
            if let Some(memory) = memory.upgrade() {
                memory.poison_written(&range, (self.stream, self.ticket), &poison);
            }
        }
    }
}

/// Tells the outcomes behind the first `known` what their operation writes, if it was submitted; otherwise it has none.
#[cold]
#[inline(never)]
pub(super) fn submitted_with(
    outcomes: &Outcomes,
    known: usize,
    is_submitted: bool,
    footprint: &Footprint<'_>,
) {
    let mut outcomes = outcomes.borrow_mut();
    if is_submitted {
        outcomes[known..].iter().for_each(|outcome| outcome.submitted(&footprint.accesses));
    } else {
        outcomes.truncate(known);
    }
}

/// What the error of another library's becomes; one of this crate's stays as it is.
pub(super) fn foreign(op: Arc<str>, error: Box<dyn StdError + Send + Sync>) -> Error {
    match error.downcast::<Error>() {
        Ok(ours) => *ours,
        Err(theirs) => ErrorDetail::Foreign { op, cause: theirs.into() }.into(),
    }
}
