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
use crate::memory::allocation::{Allocation, BlockSet, NamedUses};
use crate::memory::grouped::Group;
use crate::memory::view::{Span, Tracking};
use crate::runtime::Progress;
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
    #[inline(always)]
    pub(crate) fn touches_named(&mut self, span: &Span<'a>, mode: Mode) {
        match span.named {
            None => self.touches(span, mode),
            Some(named) => self.touches_uses(span, named, mode),
        }
    }

    #[inline(never)]
    fn touches_uses(
        &mut self,
        span: &Span<'a>,
        NamedUses { used, read }: &'a NamedUses,
        mode: Mode,
    ) {
        let mode = if mode.writes() { Mode::ReadWrite } else { mode };
        // The written last: entered as a whole, they stand for all.
        if !read.0.is_empty() {
            self.touches_open(span, read, Mode::Read);
        }
        self.touches_open(span, used, mode);
    }

    fn touches_open(&mut self, span: &Span<'a>, blocks: &'a BlockSet, mode: Mode) {
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

    /// For a graph's list, which orders blocks as the whole slab, so that it keeps its shape, and knows what was passed by its range: blocks among
    /// what was passed are touched one by one; others along with all of their slab, of which no part is overwritten as a whole.
    pub(crate) fn part_blocks(
        &mut self,
        is_passed: impl Fn(&Arc<Allocation>, &Range<u64>) -> bool,
    ) {
        if self.accesses.iter().all(|access| access.named.is_none()) {
            return;
        }
        for access in std::mem::take(&mut self.accesses) {
            let Some(BlockSet(blocks)) = access.named.filter(|_| !access.is_open) else {
                self.accesses.push(access);
                continue;
            };
            let Access { memory, mode, tracking, .. } = access;
            let bytes = memory.block_bytes();
            let range = |block: &u32| u64::from(*block) * bytes..(u64::from(*block) + 1) * bytes;
            if blocks.iter().any(|block| is_passed(memory, &range(block))) {
                let part =
                    |range| Access { memory, range, mode, tracking, named: None, is_open: false };
                self.accesses.extend(blocks.iter().map(range).map(part));
            } else {
                let mode = if mode.writes() { Mode::ReadWrite } else { mode };
                self.accesses.push(Access { mode, ..access });
            }
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
    /// Enters the use by `ticket` of `stream`.
    #[inline(always)]
    pub(in crate::submit) fn enter(&self, stream: &Arc<Progress>, ticket: u64) {
        match self.named {
            Some(BlockSet(blocks)) if !self.is_open => {
                self.memory.enter_blocks(blocks, self.mode, (stream, ticket));
            }
            _ => self.memory.enter(&self.range, self.mode, stream, ticket),
        }
    }

    /// What it is ordered by.
    #[inline]
    pub(super) fn order(&self) -> Blocks<'_> {
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
