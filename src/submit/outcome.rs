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

use std::error::Error as StdError;
use std::ops::Range;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::footprint::Access;
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::allocation::{Allocation, Poison};

pub(crate) struct RunOutcome {
    op: Arc<str>,
    state: Mutex<RunState>,
}

#[derive(Default)]
struct RunState {
    /// The first failure.
    error: Option<Error>,
    /// Known when the operation was submitted.
    written: Vec<WrittenRange>,
}

/// A range that ticket `ticket` of stream `stream` was declared to write.
struct WrittenRange {
    memory: Weak<Allocation>,
    range: Range<u64>,
    stream: u64,
    ticket: u64,
}

impl RunOutcome {
    /// That of the operation of that name.
    pub(super) fn new(op: Arc<str>) -> Self {
        RunOutcome { op, state: Mutex::default() }
    }

    /// The function failed.
    pub(super) fn fail(&self, error: Box<dyn StdError + Send + Sync>) {
        let mut state = self.state.lock();
        if state.error.is_none() {
            state.error = Some(foreign(self.op.clone(), error));
            self.poison(state);
        }
    }

    /// The operation was submitted as ticket `ticket` of stream `stream`.
    pub(super) fn submitted(&self, stream: u64, ticket: u64, accesses: &[Access<'_>]) {
        let written = accesses.iter().filter(|access| access.mode.writes()).map(|access| {
            let (memory, range) = (Arc::downgrade(access.memory), access.range.clone());
            WrittenRange { memory, range, stream, ticket }
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
        for WrittenRange { memory, range, stream, ticket } in written {
            if let Some(memory) = memory.upgrade() {
                memory.with_hazards(|hazards| {
                    hazards.poison_written(&range, (stream, ticket), &poison);
                });
            }
        }
    }
}

/// What the error of another library's becomes; one of this crate's stays as it is.
pub(super) fn foreign(op: Arc<str>, error: Box<dyn StdError + Send + Sync>) -> Error {
    match error.downcast::<Error>() {
        Ok(ours) => *ours,
        Err(theirs) => ErrorDetail::Foreign { op, cause: theirs.into() }.into(),
    }
}
