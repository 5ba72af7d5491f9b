//! [`AllocationHazards`]: the uses of an allocation, by ranges or, of a slab, by blocks.
//!
//! An operation's part of an allocation is a range, or blocks that it names. Only blocks of slabs are named.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::{Allocation, Poison};
use crate::runtime::{Point, Progress};
use gpu_await_protocol::block_hazards::{BlockHazards, Blocks};
use gpu_await_protocol::hazard::{Content, Hazards, Mode};
use gpu_await_protocol::point::Track;

/// The uses of each part.
pub(crate) enum AllocationHazards {
    Ranges(Hazards<Arc<Progress>, Poison>),
    Slab(Box<BlockHazards<Arc<Progress>, Poison>>),
}

/// The blocks of a slab that an operation names, each by its number.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockSet(pub(crate) Vec<u32>);

/// What a launch names of a slab: the blocks that it uses as it uses the argument, and others that it only reads.
#[derive(Clone, Debug, Default)]
pub(crate) struct NamedUses {
    pub(crate) used: BlockSet,
    pub(crate) read: BlockSet,
}

/// What a part is of memory that is no slab.
fn range<'a>(part: &Blocks<'a>) -> &'a Range<u64> {
    match part {
        Blocks::Range(range) => range,
        // A slab without blocks is none.
        Blocks::Named(_) => &(0..0),
    }
}

impl AllocationHazards {
    /// See [`Hazards::dependencies`].
    #[inline]
    pub(crate) fn dependencies(
        &self,
        part: &Blocks<'_>,
        mode: Mode,
        stream: u64,
        visit: impl FnMut(&Point),
    ) {
        match self {
            Self::Ranges(ranges) => ranges.dependencies(range(part), mode, stream, visit),
            Self::Slab(slab) => slab.dependencies(part, mode, stream, visit),
        }
    }

    /// See [`Hazards::unreadable`].
    #[inline]
    pub(crate) fn unreadable(&self, part: &Blocks<'_>) -> Option<(Range<u64>, &Content<Poison>)> {
        match self {
            Self::Ranges(ranges) => ranges.unreadable(range(part)),
            Self::Slab(slab) => slab.unreadable(part),
        }
    }

    /// See [`Hazards::only_user`].
    #[inline]
    pub(super) fn only_user(&self) -> Option<u64> {
        match self {
            Self::Ranges(ranges) => ranges.only_user(),
            Self::Slab(slab) => slab.only_user(),
        }
    }

    pub(super) fn poison(&mut self, part: &Blocks<'_>, leaves_data: bool, poison: &Poison) {
        match self {
            Self::Ranges(ranges) => ranges.poison(range(part), leaves_data, poison),
            Self::Slab(slab) => slab.poison(part, leaves_data, poison),
        }
    }

    pub(super) fn clear_poison(&mut self, part: &Blocks<'_>) {
        match self {
            Self::Ranges(ranges) => ranges.clear_poison(range(part)),
            Self::Slab(slab) => slab.clear_poison(part),
        }
    }

    pub(crate) fn is_written_by(&self, part: &Blocks<'_>, by: (u64, u64)) -> bool {
        match self {
            Self::Ranges(ranges) => ranges.is_written_by(range(part), by),
            Self::Slab(slab) => slab.is_written_by(part, by),
        }
    }

    pub(super) fn poison_written(&mut self, part: &Blocks<'_>, by: (u64, u64), poison: &Poison) {
        match self {
            Self::Ranges(ranges) => ranges.poison_written(range(part), by, poison),
            Self::Slab(slab) => slab.poison_written(part, by, poison),
        }
    }

    /// See [`Hazards::users`].
    pub(crate) fn users(&self) -> SmallVec<[Point; 2]> {
        match self {
            Self::Ranges(ranges) => ranges.users(),
            Self::Slab(slab) => slab.users(),
        }
    }

    /// See [`Hazards::cut_off`]. Slabs do not grow: all of one stays.
    pub(super) fn cut_off(&mut self, from: u64) -> u64 {
        match self {
            Self::Ranges(ranges) => ranges.cut_off(from),
            Self::Slab(_) => u64::MAX,
        }
    }

    /// Poison that was replaced. Its drop may run code of a user's.
    #[inline]
    pub(super) fn replaced(&mut self) -> &mut Vec<Poison> {
        match self {
            Self::Ranges(ranges) => &mut ranges.replaced,
            Self::Slab(slab) => &mut slab.replaced,
        }
    }
}

impl Allocation {
    /// Enters a use of blocks, of a slab.
    pub(crate) fn enter_blocks(&self, blocks: &[u32], mode: Mode, by: (&Arc<Progress>, u64)) {
        let mut hazards = self.hazards.lock();
        if let AllocationHazards::Slab(slab) = &mut *hazards
            && self.record(slab, &Blocks::Named(blocks), mode, by)
        {
            self.let_go(&mut hazards);
        }
        // ORDERING: Relaxed: under the lock.
        if self.only_user.load(Ordering::Relaxed) != by.0.id() {
            self.note_only_user(&hazards);
        }
    }
}
