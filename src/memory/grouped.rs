//! [`Group`]: what an operation of many pieces touches, where whole blocks of a slab are one part however many they are.
#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::allocation::BlockSet;
use super::view::{Span, Tracking};
use gpu_await_protocol::copies::{Touched, overlap};
use gpu_await_protocol::hazard::Mode;

/// A range, or blocks of a slab: then the span is all of that.
pub(crate) struct Group<'a> {
    pub(crate) span: Span<'a>,
    pub(crate) mode: Mode,
    pub(crate) blocks: Option<BlockSet>,
}

/// The groups of these parts, in the order of their first ones.
pub(crate) fn grouped<'a>(parts: impl IntoIterator<Item = (Span<'a>, Mode)>) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    // Those of slabs, the last one last.
    let mut slabs: SmallVec<[usize; 4]> = SmallVec::new();
    for (span, mode) in parts {
        let Some(number) = block_of(&span) else {
            groups.push(Group { span, mode, blocks: None });
            continue;
        };
        let is_it = |group: &Group<'_>| {
            std::ptr::eq(&**group.span.memory, &**span.memory) && group.mode == mode
        };
        let known = slabs.iter().rev().copied().find(|at| is_it(&groups[*at]));
        let at = known.unwrap_or_else(|| {
            let all = Span { range: 0..span.memory.bytes(), ..span.clone() };
            groups.push(Group { span: all, mode, blocks: Some(BlockSet::default()) });
            slabs.push(groups.len() - 1);
            groups.len() - 1
        });
        if let Some(BlockSet(blocks)) = &mut groups[at].blocks {
            blocks.push(number);
        }
    }
    groups
}

/// The block that the span is, if it is one of a slab.
#[inline]
fn block_of(span: &Span<'_>) -> Option<u32> {
    let (bytes, start) = (span.memory.block_bytes(), span.range.start);
    if bytes == 0 || span.size_bytes() != bytes || span.tracking != Tracking::Tracked {
        return None;
    }
    let number = start / bytes;
    (number * bytes == start).then_some(number as u32)
}

/// Whether it is plain that nothing touches a byte that something else writes: no range or slab overlaps another one. If not, the parts have to be
/// compared one by one. Quicker than that, as blocks are not sorted: those of one slab are apart by their borrows, as nothing else makes a
/// tracked span of a block.
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
