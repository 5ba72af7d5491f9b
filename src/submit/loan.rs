//! What an operation is lent, and keeps until it is complete.
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use super::Footprint;
use super::devices::check_device;
use crate::completion::engine::Engine;
use crate::completion::lane::Payload;
use crate::error::refused::Refused;
use crate::error::{Error, Result};
use crate::memory::pinned_pool::PinnedBlock;

pub(super) enum Loan {
    /// Host memory, what it is called in messages, and whether it may be another device's.
    Pinned { block: Arc<PinnedBlock>, what: &'static str, portable: bool },
    /// Something of the user's.
    Value(Box<dyn Any + Send>),
}

/// Why an operation was not submitted, and whether its stream keeps what it was lent all the same.
pub(crate) struct SubmitError {
    pub(crate) error: Error,
    /// Driver calls were made: the device may have begun.
    pub(super) lent: bool,
}

/// Refused in front of the first driver call.
impl From<Error> for SubmitError {
    fn from(error: Error) -> Self {
        SubmitError { error, lent: false }
    }
}

impl From<SubmitError> for Error {
    fn from(failed: SubmitError) -> Self {
        failed.error
    }
}

impl SubmitError {
    /// With the memory that the call was given, unless this call lent it.
    // What others have of it does not matter. A block has one `PinnedBuffer`, which an operation that it
    // is lent to keeps until it is complete: the caller had it in hand, so every earlier operation was.
    // A stream that has not yet dropped its share of one of those uses it for nothing, and the pool has
    // the block again when the last share goes.
    pub(crate) fn hand_back<T>(self, value: T) -> Refused<T> {
        Refused { error: self.error, value: (!self.lent).then_some(value) }
    }
}

impl Loan {
    /// Refuses what another device made.
    pub(super) fn check(&self, engine: &Engine) -> Result<()> {
        match self {
            Loan::Pinned { block, what, portable } => {
                check_device(what, engine, block.engine(), *portable)
            }
            Loan::Value(_) => Ok(()),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Loan::Pinned { block, .. } => block.bytes(),
            Loan::Value(_) => 0,
        }
    }

    pub(super) fn into_payload(self) -> Payload {
        match self {
            Loan::Pinned { block, .. } => Payload::Memory(block),
            Loan::Value(value) => Payload::Foreign(value),
        }
    }
}

impl Footprint<'_> {
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

    /// Keeps something of the user's until the operation is complete.
    pub(crate) fn keeps(&mut self, value: Box<dyn Any + Send>) {
        self.lent.push(Loan::Value(value));
    }
}
