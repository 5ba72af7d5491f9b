//! Copies between devices.
//!
//! The copy is direct where the two devices have peer access. Otherwise it goes through pinned host memory in parts: a stream of the
//! source's device, created for this copy, fills a block and this stream empties it. A few blocks circulate; each stream waits for the
//! other's events to know which blocks are empty or full. Nothing waits on the host.
//!
//! The source's stream belongs to this copy alone, so no other work queues behind it while it waits for this stream
//! (`a_held_copy_through_the_host_delays_no_other`).
//!
//! In the list of a graph the copy is a launch that reads the other device's memory, and is refused without peer access.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::graph_list;
use super::queue::Queue;
use crate::backend::{RowCopy, StreamOptions};
use crate::error::Result;
use crate::memory::pinned_pool::PinnedBlock;
use crate::memory::view::Span;
use crate::runtime::stream_state::StreamState;
use crate::submit::{Footprint, check_is_there, of_dependency, submit};
use crate::thread::role;

/// The part size of a copy through the host.
const PART_BYTES: usize = 4 << 20;
/// How many parts may be in flight between the devices.
const BLOCKS: usize = 4;

impl Queue<'_> {
    /// Copies all of `from`, which belongs to another device, to `to`; `footprint` names both.
    pub(crate) fn copy_from_peer(
        &self,
        footprint: &mut Footprint<'_>,
        from: &Span<'_>,
        to: &Span<'_>,
    ) -> Result<()> {
        let source = &from.memory.engine;
        let same_kind = source.backend.kind() == self.stream.engine.backend.kind();
        let bytes = to.range.end - to.range.start;
        let is_there = || check_is_there(&self.stream.engine, source);
        let reaches = || self.home.reaches(source);
        match role::check("submitting work").and_then(|()| is_there()).and_then(|()| reaches()) {
            Ok(true) if self.is_recording_graph() => {
                Ok(self.submit_copy(footprint, &RowCopy::whole(to.ptr(), from.ptr(), bytes))?)
            }
            Ok(false) if self.is_recording_graph() && same_kind => {
                Err(graph_list::refused(footprint).into())
            }
            // A device of another kind is refused in `submit`, with the right error.
            Ok(direct) if direct || !same_kind => {
                self.submit(footprint, 1, &mut |raw| Ok(raw.copy(to, from)?))?;
                Ok(())
            }
            Ok(_) => self
                .copy_through_host(from, to)
                // This may be the first call to see the source's loss.
                .map_err(|error| footprint.poison(of_dependency(&self.stream.engine, error))),
            Err(error) => Err(footprint.poison(error)),
        }
    }

    fn copy_through_host(&self, from: &Span<'_>, to: &Span<'_>) -> Result<()> {
        let source = &from.memory.engine;
        let bytes = to.range.end - to.range.start;
        let relay = StreamState::open(source, StreamOptions::default(), Some("relay".into()))?;
        let block = || self.home.pinned.get(PART_BYTES.min(bytes as usize));
        let parts = bytes.div_ceil(PART_BYTES as u64) as usize;
        let blocks: Vec<Arc<PinnedBlock>> =
            (0..parts.min(BLOCKS)).map(|_| block()).collect::<Result<_>>()?;
        // The two streams wait for single parts of each other's work, not for later work.
        source.registry.set_exact();
        self.stream.engine.registry.set_exact();
        let mut emptied = [0; BLOCKS];
        for part in 0..parts {
            let start = (part * PART_BYTES) as u64;
            let part_bytes = (bytes - start).min(PART_BYTES as u64);
            let (block, emptied) = (&blocks[part % BLOCKS], &mut emptied[part % BLOCKS]);

            let mut down = Footprint::new("copy");
            down.reads(from);
            // The block belongs to the destination's device; only its host address is used here.
            down.lends_portable(block);
            if part >= BLOCKS {
                down.comes_after(self.stream.point(*emptied));
            }
            // The second half of the copy writes the data that the first half reads.
            self.outcomes.look(&down, &relay.state);
            let down = (&mut down, false);
            let filled = submit::<false>(&relay.state, self.at.get(), down, 1, &mut |raw| {
                Ok(raw.copy_to_host(block.host(), from.ptr().offset(start), part_bytes)?)
            });
            let filled = filled.inspect_err(|_| self.outcomes.forget_read())?;

            let mut up = Footprint::new("copy");
            up.overwrites(to);
            up.lends(block);
            up.comes_after(relay.state.point(filled));
            *emptied = self.submit(&mut up, 1, &mut |raw| {
                Ok(raw.copy_to_device(to.ptr().offset(start), block.host(), part_bytes)?)
            })?;
        }
        Ok(())
    }
}
