//! [`Group`]: what an operation of many pieces touches, where whole blocks of a slab are one part however many they are.
#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::allocation::BlockSet;
use super::view::{Span, Tracking};
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
        let block_bytes = span.memory.block_bytes();
        let is_whole = |at: u64| at.is_multiple_of(block_bytes);
        let is_blocks = block_bytes > 0
            && span.tracking == Tracking::Tracked
            && is_whole(span.range.start)
            && is_whole(span.range.end);
        if !is_blocks {
            groups.push(Group { span, mode, blocks: None });
            continue;
        }
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
        let numbers = span.range.start / block_bytes..span.range.end / block_bytes;
        if let Some(BlockSet(blocks)) = &mut groups[at].blocks {
            blocks.extend(numbers.map(|number| number as u32));
        }
    }
    groups
}
