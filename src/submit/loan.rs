//! Values lent to an operation, which it keeps until it is complete.
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use super::devices::check_device;
use crate::error::refused::Refused;
use crate::error::{Error, Result};
use crate::memory::pinned_pool::PinnedBlock;
use crate::runtime::Engine;
use crate::runtime::stream_state::{Callback, Payload};

pub(super) enum Loan {
    /// Host memory, what it is called in messages, and whether it may be another device's.
    Pinned { block: Arc<PinnedBlock>, what: &'static str, portable: bool },
    /// What the driver is to call.
    Callback(Box<dyn Callback>),
    /// A user's value that the work needs.
    Kept(Box<dyn Any + Send>),
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
    // What others have of it does not matter. The bytes of a block are one `PinnedBuffer`'s, which an operation that it
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
            Loan::Callback(_) | Loan::Kept(_) => Ok(()),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Loan::Pinned { block, .. } => block.bytes(),
            Loan::Callback(_) | Loan::Kept(_) => 0,
        }
    }

    pub(super) fn into_payload(self) -> Payload {
        match self {
            Loan::Pinned { block, .. } => Payload::Memory(block),
            Loan::Callback(callback) => Payload::Callback(callback),
            Loan::Kept(value) => Payload::Kept(value),
        }
    }
}
