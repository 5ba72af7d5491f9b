//! Memory that a library's plan needs during a launch.
//!
//! | the plan's own area is | a launch uses |
//! |---|---|
//! | free: its last uses are complete, or on the launch's stream | the plan's own area |
//! | in use by another stream or locked by another thread | memory of its own, from its stream |
//! | in any state, and the launch is in a graph | memory of its own, which the graph keeps for that stream |
//!
//! The first launch allocates the area on its stream; the plan keeps it.
#![forbid(unsafe_code)]

use gpu_await::sibling::{Mutex, MutexGuard, VerbParts};
use gpu_await::{DeviceBuffer, Queue, RawSlice, Result, Uses};

/// A plan's area.
#[derive(Default)]
pub(crate) struct WorkArea {
    kept: Mutex<Option<DeviceBuffer<u8>>>,
}

/// Memory of one launch.
pub(crate) enum WorkMemory<'w> {
    None,
    Kept(MutexGuard<'w, Option<DeviceBuffer<u8>>>),
    Own(DeviceBuffer<u8>),
}

impl WorkArea {
    /// Memory of this size for a launch on the queue's stream.
    ///
    /// # Errors
    /// Out of device memory; the device is lost or closed.
    pub(crate) fn take(&self, queue: &Queue<'_>, bytes: usize) -> Result<WorkMemory<'_>> {
        if bytes == 0 {
            return Ok(WorkMemory::None);
        }
        if queue.is_recording_graph() {
            return Ok(WorkMemory::Own(queue.empty(bytes)?));
        }
        if let Some(mut kept) = self.kept.try_lock() {
            if kept.is_none() {
                *kept = Some(queue.empty(bytes)?);
            }
            if kept.as_ref().is_some_and(|area| queue.is_free(area)) {
                return Ok(WorkMemory::Kept(kept));
            }
        }
        Ok(WorkMemory::Own(queue.empty(bytes)?))
    }
}

impl WorkMemory<'_> {
    /// Declares it as overwritten.
    pub(crate) fn declare<'a>(&'a mut self, uses: Uses<'a>) -> (Uses<'a>, Option<RawSlice<u8>>) {
        let memory = match self {
            WorkMemory::None => None,
            WorkMemory::Kept(kept) => kept.as_mut(),
            WorkMemory::Own(own) => Some(own),
        };
        let Some(memory) = memory else { return (uses, None) };
        let (uses, (slice,)) = uses.writes(memory).into_parts();
        (uses, Some(slice))
    }
}
