//! Values lent to an operation, which keeps them until it is complete.
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use smallvec::SmallVec;

use super::devices::check_device;
use crate::error::refused::Refused;
use crate::error::{Error, Result};
use crate::memory::pinned_pool::PinnedBlock;
use crate::runtime::Engine;
use crate::runtime::stream_state::{Callback, Payload, Turn};

/// The values lent to an operation.
pub(super) type LentValues = SmallVec<[LentValue; 2]>;

pub(super) enum LentValue {
    /// Host memory, its name in messages, and whether it may belong to another device.
    Pinned { block: Arc<PinnedBlock>, what: &'static str, portable: bool },
    /// A callback for the driver.
    Callback(Box<dyn Callback>),
    /// A user's value that the work needs.
    Kept(Box<dyn Any + Send>),
}

/// Why an operation was not submitted, and whether its stream keeps the lent values anyway.
pub(crate) struct SubmitError {
    pub(crate) error: Error,
    /// Driver calls were made: the device may have begun.
    pub(super) lent: bool,
}

/// Refused before the first driver call.
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
    /// Returns the error with the memory passed to the call, unless the call lent it.
    // Other shares of the block do not matter. Its bytes belong to one `PinnedBuffer`, which an operation that
    // borrows it keeps until it is complete. The caller held the buffer, so every earlier operation is complete. A
    // stream that has not yet dropped a share from an earlier operation does not use it, and the block returns to the
    // pool with the last share.
    pub(crate) fn hand_back<T>(self, value: T) -> Refused<T> {
        Refused { error: self.error, value: (!self.lent).then_some(value) }
    }
}

impl LentValue {
    /// Rejects values of another device.
    pub(super) fn check(&self, engine: &Engine) -> Result<()> {
        match self {
            LentValue::Pinned { block, what, portable } => {
                check_device(what, engine, block.engine(), *portable)
            }
            LentValue::Callback(_) | LentValue::Kept(_) => Ok(()),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            LentValue::Pinned { block, .. } => block.bytes(),
            LentValue::Callback(_) | LentValue::Kept(_) => 0,
        }
    }

    pub(super) fn into_payload(self) -> Payload {
        match self {
            LentValue::Pinned { block, .. } => Payload::Memory(block),
            LentValue::Callback(callback) => Payload::Callback(callback),
            LentValue::Kept(value) => Payload::Kept(value),
        }
    }
}

/// The users' values, if there are no others.
pub(super) fn only_kept(values: LentValues) -> Option<Vec<Box<dyn Any + Send>>> {
    let kept = values.into_iter().map(|value| match value {
        LentValue::Kept(value) => Some(value),
        LentValue::Pinned { .. } | LentValue::Callback(_) => None,
    });
    kept.collect()
}

/// Lends the values to the device until `ticket` is complete.
pub(super) fn lend(values: LentValues, turn: &mut Turn<'_, '_>, ticket: u64) {
    for value in values {
        turn.lend(ticket, value.bytes(), value.into_payload());
    }
}
