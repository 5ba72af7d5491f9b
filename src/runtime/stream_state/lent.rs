//! What is lent to a stream: host memory, users' values, and callbacks for the driver.
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use crate::memory::reclaim::retired::LentBlock;

/// Host memory that the device may touch until `ticket` is complete.
pub(super) struct LentMemory {
    pub(super) ticket: u64,
    pub(super) bytes: u64,
    pub(super) payload: Payload,
}

/// A lent value.
pub(crate) enum Payload {
    /// Our own memory: dropping it is cheap and calls nobody.
    Memory(Arc<dyn LentBlock>),
    /// A user's callback for the driver: dropped by the reaper.
    Callback(Box<dyn Callback>),
    /// A user's value that the work needs: dropped by the reaper, also after the loss of the device; never
    /// if the stream waits for ever.
    Kept(Box<dyn Any + Send>),
}

/// A share of a callback for the driver; dropped like any other once it was called.
pub(crate) trait Callback: Any + Send {
    /// On a device that makes no progress any more: takes the user's closure, unless it was called. If the
    /// driver calls all the same, nothing happens.
    fn give_up(&self) -> Option<Box<dyn Any + Send>>;
}
