//! Freed memory and dropped owners, waiting for the streams that may still use them.

use std::any::Any;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::backend::{Backend, DevicePtr, DriverResult, RawModule, RawStream};
use crate::runtime::progress::Progress;
use gpu_await_protocol::timeline::Point;

/// A value that is freed when every stream that used it has finished.
pub(crate) struct Retired<S> {
    pub(crate) what: Remnant,
    pub(crate) users: UserList<S>,
    /// The users may be streams of another device, which do not keep this engine.
    #[expect(dead_code, reason = "kept for as long as this is")]
    pub(crate) engine: Arc<dyn Any + Send + Sync>,
}

/// Streams that use something, each with its last ticket.
pub(crate) type UserList<S> = SmallVec<[Point<Arc<Progress<S>>>; 2]>;

/// Memory that one stream uses exclusively, behind its work up to a ticket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: u64,
    pub(crate) ticket: u64,
}

/// A block of this crate's host memory that the device may touch.
pub(crate) trait LentBlock: Send + Sync {
    /// Keeps the block mapped and out of the pool for ever, as it is unknown when the device finishes with
    /// it. Returns its size the first time, then 0.
    fn quarantine(&self) -> u64;
}

/// The retired value.
pub(crate) enum Remnant {
    /// Memory of the device's pool: pending in its account.
    Memory {
        ptr: DevicePtr,
        bytes: u64,
    },
    Module(RawModule),
    /// Adopted memory, which is in no account, and its owner. The owner of host memory that this crate maps is an
    /// [`Arc<dyn LentBlock>`](LentBlock).
    Foreign {
        ptr: DevicePtr,
        bytes: u64,
        owner: Box<dyn Any + Send>,
    },
}

impl From<Block> for Remnant {
    fn from(block: Block) -> Self {
        Remnant::Memory { ptr: block.ptr, bytes: block.bytes }
    }
}

impl Remnant {
    /// How many bytes it counts for in the account.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Remnant::Memory { bytes, .. } => *bytes,
            Remnant::Module(_) | Remnant::Foreign { .. } => 0,
        }
    }

    /// Returns the block, if this is host memory that the crate maps.
    pub(crate) fn mapped(&self) -> Option<&Arc<dyn LentBlock>> {
        match self {
            Remnant::Foreign { owner, .. } => owner.downcast_ref(),
            Remnant::Memory { .. } | Remnant::Module(_) => None,
        }
    }

    /// Returns a value that no stream uses any more to the driver.
    pub(crate) fn discard(&self, backend: &dyn Backend, private: RawStream) -> DriverResult<()> {
        match *self {
            // SAFETY: every use of the memory is complete, it was allocated from this backend's pool,
            // and its owner gave it up when it retired it.
            Remnant::Memory { ptr, .. } => unsafe { backend.free(private, ptr) },
            // SAFETY: every launch of the module's kernels is complete, and its owner gave it up.
            Remnant::Module(module) => unsafe { backend.unload(module) },
            Remnant::Foreign { ptr, bytes, .. } => {
                if bytes > 0 {
                    // SAFETY: it was adopted with this range, and every use of it is complete.
                    unsafe { backend.disown(ptr, bytes) };
                }
                Ok(())
            }
        }
    }
}
