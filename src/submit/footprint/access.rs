//! [`Access`]: a part of an allocation that an operation touches, a range or blocks of a slab.
//!
//! | the operation | touches | is ordered by |
//! |---|---|---|
//! | a copy of many pieces, a launch with a table | the blocks | the blocks |
//! | a launch that names blocks | the blocks, by what it says; others too, if that is wrong | the blocks; on a host device the slab, as its twin gets a slice of all of it |
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::Footprint;
use crate::DeviceKind;
use crate::memory::allocation::{Allocation, BlockSet};
use crate::memory::grouped::Group;
use crate::memory::view::{Span, Tracking};
use gpu_await_protocol::block_hazards::Blocks;
use gpu_await_protocol::hazard::Mode;

pub(crate) struct Access<'a> {
    pub(crate) memory: &'a Arc<Allocation>,
    pub(crate) range: Range<u64>,
    pub(in crate::submit) mode: Mode,
    pub(in crate::submit) tracking: Tracking,
    /// The blocks of a slab that it touches; the range is all of the slab then, which is what lists order by.
    pub(in crate::submit) named: Option<&'a BlockSet>,
    /// It may touch others as well, and is ordered as if it did.
    pub(super) is_open: bool,
}

impl<'a> Footprint<'a> {
    /// What a launch is passed: memory, or a slab with the blocks that the launch names. The kernel may overwrite no more than these, and
    /// other blocks of the slab keep what they have.
    // A host device's twin gets a slice of the whole slab, so nothing else may use any of it meanwhile.
    #[inline]
    pub(crate) fn touches_named(&mut self, span: &Span<'a>, mode: Mode) {
        let Some(blocks) = span.named else { return self.touches(span, mode) };
        let mode = if mode.writes() { Mode::ReadWrite } else { mode };
        self.touches_blocks(span, blocks, mode);
        if let Some(access) = self.accesses.last_mut() {
            access.is_open = span.memory.engine().backend.kind() == DeviceKind::Host;
        }
    }

    /// Touches a part, or blocks of a slab.
    pub(crate) fn touches_group(&mut self, group: &'a Group<'a>) {
        match &group.blocks {
            None => self.touches(&group.span, group.mode),
            Some(blocks) => self.touches_blocks(&group.span, blocks, group.mode),
        }
    }

    /// Touches blocks of a slab, all of which the span is.
    fn touches_blocks(&mut self, slab: &Span<'a>, blocks: &'a BlockSet, mode: Mode) {
        self.touches(slab, mode);
        if let Some(access) = self.accesses.last_mut() {
            access.named = Some(blocks);
        }
    }
}

impl Access<'_> {
    /// What it is ordered by.
    #[inline]
    pub(in crate::submit) fn order(&self) -> Blocks<'_> {
        if self.is_open { Blocks::Range(&self.range) } else { self.part() }
    }

    /// What it touches of the memory.
    #[inline]
    pub(crate) fn part(&self) -> Blocks<'_> {
        match self.named {
            None => Blocks::Range(&self.range),
            Some(BlockSet(blocks)) => Blocks::Named(blocks),
        }
    }
}
