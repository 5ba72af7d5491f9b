//! `ncclCommShrink`: another communicator of some ranks of one, connected over the connections of that one.
//!
//! | flag | the one that shrinks | its work |
//! |---|---|---|
//! | default | works on | is complete |
//! | abort | is lost, and aborted by the caller when this returns | is signalled to stop, and has stopped when the call returns |
//!
//! The abort flag is up for as long as kernels take to stop. A call that connects ranks on another thread checks it only now and then,
//! and may miss it: shrinking waits for such a call, and is refused if that does not return.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{GpuTransport, aborted};
use crate::error::{Error, Result, ShrinkRefusal};
use crate::nccl::Comm;
use crate::transport::{LocalRank, Shrink};

/// How long an abort waits for a call that is running.
const CALL: Duration = Duration::from_secs(1);

impl GpuTransport {
    pub(super) fn shrunk(&self, ranks: &[LocalRank], shrink: Shrink<'_>) -> Result<GpuTransport> {
        let Shrink { excluded, places, aborts, world, contexts, channel, end } = shrink;
        let comms = &*self.comms;
        let end = if aborts { end.min(Instant::now() + CALL) } else { end };
        let Some(_calling) = comms.calling.try_lock_until(end) else {
            return Err(Error::CannotShrink { reason: ShrinkRefusal::Calling });
        };
        if comms.ending.load(Ordering::SeqCst) {
            return Err(aborted(ranks[0].rank));
        }
        comms.nccl.group_start()?;
        // The handles must not move until the group has ended.
        let mut handles = vec![Comm::NONE; places.len()];
        let mut failed = None;
        for ((place, context), handle) in places.iter().zip(&contexts).zip(&mut handles) {
            // SAFETY: the device is open, and `ranks` keeps it.
            let made = unsafe { comms.driver.enter(*context) }.and_then(|_current| {
                let parent = comms.handles[*place];
                // SAFETY: the parent's handle is live: it is freed behind calls under the lock that is held here, by whoever set
                // `ending`, which was not set under it. The new handles are not moved, and are read when the group has ended.
                unsafe { comms.nccl.shrink(parent, excluded, handle, aborts) }
            });
            if let Err(error) = made {
                failed = Some(error);
                break;
            }
        }
        let ended = {
            // SAFETY: as above.
            let _current = unsafe { comms.driver.enter(contexts[0]) }?;
            comms.nccl.group_end()
        };
        if let Some(error) = failed.or(ended.err()) {
            // As after a failed initialization.
            return Err(error);
        }
        GpuTransport::of(handles, world, ranks, contexts, channel)
    }
}
