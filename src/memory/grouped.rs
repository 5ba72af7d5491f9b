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

/// Whether it is plain that nothing touches a byte that something else writes: no range or slab overlaps another, and no written block is named
/// again. If not, the parts have to be compared one by one. Quicker than that, as blocks are not sorted.
pub(crate) fn are_apart(groups: &[Group<'_>]) -> bool {
    let (slabs, ranges): (Vec<_>, Vec<_>) =
        groups.iter().partition(|group: &&Group<'_>| group.blocks.is_some());
    let touched = |group: &Group<'_>, writes| {
        let start = group.span.address();
        Touched::new(start..start + group.span.size_bytes(), 0, writes)
    };
    let mut all: Vec<_> = ranges.iter().map(|group| touched(group, group.mode.writes())).collect();
    for (at, slab) in slabs.iter().enumerate() {
        let is_same = |other: &&&Group<'_>| std::ptr::eq(&**other.span.memory, &**slab.span.memory);
        if slabs[..at].iter().any(|other| is_same(&other)) {
            continue;
        }
        let (writers, readers): (Vec<_>, Vec<_>) =
            slabs[at..].iter().filter(is_same).partition(|group| group.mode.writes());
        if !blocks_are_apart(slab, &writers, &readers) {
            return false;
        }
        all.push(touched(slab, true));
    }
    overlap(&mut all).is_none()
}

fn blocks_are_apart(slab: &Group<'_>, writers: &[&&Group<'_>], readers: &[&&Group<'_>]) -> bool {
    if writers.is_empty() {
        return true;
    }
    let memory = slab.span.memory;
    let mut written = vec![0_u64; (memory.bytes() / memory.block_bytes()).div_ceil(64) as usize];
    let at = |block: u32| (block as usize / 64, 1 << (block % 64));
    let is_new = |block: u32| {
        let (word, bit) = at(block);
        let was = written[word] & bit;
        written[word] |= bit;
        was == 0
    };
    blocks(writers).all(is_new)
        && blocks(readers).all(|block| {
            let (word, bit) = at(block);
            written[word] & bit == 0
        })
}

fn blocks<'b>(groups: &'b [&&Group<'_>]) -> impl Iterator<Item = u32> + 'b {
    groups.iter().filter_map(|group| group.blocks.as_ref()).flat_map(|set| set.0.iter().copied())
}
