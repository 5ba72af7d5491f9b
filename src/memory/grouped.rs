//! [`Group`]: the memory that an operation of many pieces touches, with all whole blocks of a slab as one part.
#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::allocation::{Allocation, BlockSet};
use super::view::{Span, Tracking};
use gpu_await_protocol::copies::{Touched, overlap};
use gpu_await_protocol::hazard::Mode;

/// A range, or blocks of a slab: then the span is the whole slab.
pub(crate) struct Group<'a> {
    pub(crate) span: Span<'a>,
    pub(crate) mode: Mode,
    pub(crate) blocks: Option<BlockSet>,
}

/// Groups parts that are added one by one, in order of their first parts.
#[derive(Default)]
pub(crate) struct Groups<'a> {
    groups: Vec<Group<'a>>,
    /// How many parts are expected.
    parts: usize,
    /// The groups of slabs, the most recent last.
    slabs: SmallVec<[usize; 4]>,
}

/// The last group of parts of one mode: usually the next part is of the same slab.
pub(crate) struct Last {
    mode: Mode,
    memory: *const Allocation,
    group: usize,
    block_bytes: u64,
    /// Set if the block size is a power of two.
    shift: Option<u32>,
}

impl Last {
    pub(crate) fn new(mode: Mode) -> Self {
        Last { mode, memory: std::ptr::null(), group: 0, block_bytes: 0, shift: None }
    }
}

impl<'a> Groups<'a> {
    pub(crate) fn of(parts: usize) -> Self {
        Groups { parts, ..Groups::default() }
    }

    /// Adds a part with the mode of `last`.
    #[inline]
    pub(crate) fn add(&mut self, last: &mut Last, span: &Span<'a>) {
        let is_block = std::ptr::eq(&**span.memory, last.memory)
            && span.size_bytes() == last.block_bytes
            && span.tracking == Tracking::Tracked;
        if let (true, Some(shift)) = (is_block, last.shift)
            && let number = span.range.start >> shift
            && number << shift == span.range.start
            && let Some(BlockSet(blocks)) = &mut self.groups[last.group].blocks
        {
            blocks.push(number as u32);
        } else {
            self.find(last, span);
        }
    }

    /// Adds a part to the group that it belongs to, which may be new.
    fn find(&mut self, last: &mut Last, span: &Span<'a>) {
        let Some(number) = block_of(span) else {
            self.groups.push(Group { span: span.clone(), mode: last.mode, blocks: None });
            return;
        };
        let is_it = |group: &Group<'_>| {
            std::ptr::eq(&**group.span.memory, &**span.memory) && group.mode == last.mode
        };
        let known = self.slabs.iter().rev().copied().find(|at| is_it(&self.groups[*at]));
        let at = known.unwrap_or_else(|| {
            let all = Span { range: 0..span.memory.bytes(), ..span.clone() };
            let blocks = Some(BlockSet(Vec::with_capacity(self.parts)));
            self.groups.push(Group { span: all, mode: last.mode, blocks });
            self.slabs.push(self.groups.len() - 1);
            self.groups.len() - 1
        });
        let block_bytes = span.memory.block_bytes();
        let shift = block_bytes.is_power_of_two().then(|| block_bytes.trailing_zeros());
        *last = Last { mode: last.mode, memory: &**span.memory, group: at, block_bytes, shift };
        if let Some(BlockSet(blocks)) = &mut self.groups[at].blocks {
            blocks.push(number);
        }
    }

    pub(crate) fn finish(self) -> Vec<Group<'a>> {
        self.groups
    }
}

/// The groups of these parts.
pub(crate) fn grouped<'a>(parts: impl IntoIterator<Item = Span<'a>>, mode: Mode) -> Vec<Group<'a>> {
    let parts = parts.into_iter();
    let (mut groups, mut last) = (Groups::of(parts.size_hint().0), Last::new(mode));
    parts.for_each(|span| groups.add(&mut last, &span));
    groups.finish()
}

/// The number of the block that the span is, if it is a block of a slab.
#[inline]
fn block_of(span: &Span<'_>) -> Option<u32> {
    let (bytes, start) = (span.memory.block_bytes(), span.range.start);
    if bytes == 0 || span.size_bytes() != bytes || span.tracking != Tracking::Tracked {
        return None;
    }
    let number = start / bytes;
    (number * bytes == start).then_some(number as u32)
}

/// Whether it is obvious that no part touches a byte that another writes: no range or slab overlaps another. Otherwise the parts must be compared
/// one by one. This is quicker, as blocks are not sorted: those of one slab are apart by their borrows, which are the only source of tracked spans
/// of a block.
pub(crate) fn are_apart(groups: &[Group<'_>]) -> bool {
    let mut all: Vec<Touched> = Vec::with_capacity(groups.len());
    let mut slabs: SmallVec<[u64; 4]> = SmallVec::new();
    for Group { span, mode, blocks } in groups {
        let range = span.address()..span.address() + span.size_bytes();
        let is_known = blocks.is_some() && slabs.contains(&range.start);
        if !is_known {
            slabs.extend(blocks.as_ref().map(|_| range.start));
            all.push(Touched::new(range, 0, blocks.is_some() || mode.writes()));
        }
    }
    overlap(&mut all).is_none()
}
