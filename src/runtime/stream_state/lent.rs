//! What is lent to a stream: host memory, users' values, and callbacks for the driver.
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

/// Host memory that the device may touch until `ticket` is complete.
pub(super) struct LentMemory {
    pub(super) ticket: u64,
    pub(super) bytes: u64,
    pub(super) payload: Payload,
}

/// What is lent.
pub(crate) enum Payload {
    /// Our own memory: dropping it is cheap and calls nobody.
    Memory(Arc<dyn LentBlock>),
    /// What the driver is to call, the user's: dropped by the reaper.
    Callback(Box<dyn Callback>),
    /// A user's value that the work needs: dropped by the reaper, also after the loss of the device; never
    /// if the stream waits for ever.
    Kept(Box<dyn Any + Send>),
}

/// A block of our own memory that the device may touch.
pub(crate) trait LentBlock: Send + Sync {
    /// The runtime cannot learn when the device finishes with the block: the pool never reuses it, and keeps
    /// it mapped.
    fn quarantine(&self);
}

/// A share of what the driver is to call; dropped like any other once it was called.
pub(crate) trait Callback: Any + Send {
    /// On a device that gets nowhere any more: what it was to call, of the user's, unless it was called.
    /// Should the driver call it all the same, nothing happens.
    fn give_up(&self) -> Option<Box<dyn Any + Send>>;
}
