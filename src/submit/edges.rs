//! The dependencies between the operations of a list (pure).
//!
//! Operations are numbered in program order. A range of addresses knows its last writer and the readers since:
//!
//! | an operation | runs behind |
//! |---|---|
//! | reads a range | its last writer |
//! | writes a range | the readers since the last write, or else the last writer |
//! | does not declare its memory | everything before it; everything after it runs behind it |
//!
//! Dependencies are transitive, so the last writer is omitted where readers since are named.
//!
//! Behind a full edge, the second operation starts when the first is complete. Behind a programmatic edge, it starts when every block of the
//! first has triggered or ended, and its threads wait until the first is complete.
//!
//! | the second operation | its edge |
//! |---|---|
//! | is a kernel that waits first, behind one operation, which is a kernel of the same device | is programmatic |
//! | is any other, or behind several operations | is full |
//!
//! Behind several operations, the wait is not documented to cover more than one. A kernel waits first if every thread waits before
//! anything that can have an effect, so the completion of an operation still proves that everything in front of it is complete.
//!
//! # Invariants
//! 1. Two operations that touch one byte, at least one of them writing, are ordered as in the program; no others are
//!    (`ordered_as_the_bytes_say`).
//! 2. The same operations with the same overlaps have the same edges, in the same order, at any addresses (`addresses_do_not_matter`).
//! 3. The kind of an edge depends on the edges and the kernels alone: equal shapes have equal kinds.
//! 4. When an operation has an effect, everything that it must be behind is complete, in every order that the edges and their kinds allow
//!    (`every_order_keeps_the_programs`).
#![forbid(unsafe_code)]

use std::ops::Range;

use smallvec::SmallVec;

use super::range_map::RangeMap;

/// Pairs of operations: the second runs behind the first.
pub(crate) type Edge = (u32, u32);

/// The properties of an operation that the kinds of its edges depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    /// The kernel's device; `None` if it is not a kernel.
    pub(crate) kernel_of: Option<u64>,
    pub(crate) waits_first: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EdgeKind {
    Programmatic,
    Full,
    /// Full although the second operation waits first, because it is behind several.
    BehindSeveral,
    /// Likewise, because the first is not a kernel of the same device.
    BehindOtherWork,
}

/// The kinds of the edges, which are sorted by their second operations.
pub(crate) fn kinds<'e>(
    edges: &'e [Edge],
    node: impl Fn(u32) -> Node + 'e,
) -> impl Iterator<Item = (Edge, EdgeKind)> + 'e {
    let of_edge = move |(number, &(first, second)): (usize, &Edge)| {
        let is_beside = |other: Option<&Edge>| other.is_some_and(|(_, behind)| *behind == second);
        let before = number.checked_sub(1).and_then(|before| edges.get(before));
        let (first_node, second_node) = (node(first), node(second));
        let kind = match second_node.kernel_of {
            Some(_) if !second_node.waits_first => EdgeKind::Full,
            None => EdgeKind::Full,
            Some(_) if is_beside(before) || is_beside(edges.get(number + 1)) => {
                EdgeKind::BehindSeveral
            }
            device if device != first_node.kernel_of => EdgeKind::BehindOtherWork,
            Some(_) => EdgeKind::Programmatic,
        };
        ((first, second), kind)
    };
    edges.iter().enumerate().map(of_edge)
}

#[derive(Debug, Default)]
pub(crate) struct Edges {
    stretches: RangeMap<Users>,
    edges: Vec<Edge>,
    nodes: u32,
    /// The last operation that did not declare its memory.
    barrier: Option<u32>,
    /// For each operation, whether another runs behind it.
    has_followers: Vec<bool>,
    /// The operations that the one being added runs behind.
    before: SmallVec<[u32; 8]>,
}

#[derive(Clone, Debug, Default)]
struct Users {
    writer: Option<u32>,
    readers: SmallVec<[u32; 2]>,
}

impl Edges {
    pub(crate) fn clear(&mut self) {
        self.stretches.clear();
        self.edges.clear();
        self.has_followers.clear();
        (self.nodes, self.barrier) = (0, None);
    }

    /// Sorted by the second operation, then by the first.
    pub(crate) fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// Swaps the edges for `edges`.
    pub(crate) fn swap_edges(&mut self, edges: &mut Vec<Edge>) {
        std::mem::swap(&mut self.edges, edges);
    }

    /// Adds the next operation with its accesses: ranges of addresses, and whether it writes them.
    pub(crate) fn add(&mut self, accesses: impl IntoIterator<Item = (Range<u64>, bool)>) {
        self.before.clear();
        for (range, writes) in accesses {
            if !range.is_empty() {
                self.access(range, writes);
            }
        }
        if let Some(barrier) = self.barrier {
            self.before.push(barrier);
        }
        self.enter();
    }

    /// Adds the next operation, which does not declare its memory.
    pub(crate) fn add_barrier(&mut self) {
        self.before.clear();
        let last = self.has_followers.iter().enumerate().filter(|(_, has)| !**has);
        self.before.extend(last.map(|(node, _)| node as u32));
        self.barrier = Some(self.nodes);
        self.stretches.clear();
        self.enter();
    }

    fn enter(&mut self) {
        if self.before.len() > 1 {
            self.before.sort_unstable();
            self.before.dedup();
        }
        // An operation that both writes and reads a range is not behind itself.
        self.before.retain(|node| *node != self.nodes);
        if self.before.len() > 1 {
            // All the others run behind the barrier.
            self.before.retain(|node| Some(*node) != self.barrier);
        }
        for node in &self.before {
            self.has_followers[*node as usize] = true;
            self.edges.push((*node, self.nodes));
        }
        self.has_followers.push(false);
        self.nodes += 1;
    }

    fn access(&mut self, range: Range<u64>, writes: bool) {
        let (node, before) = (self.nodes, &mut self.before);
        self.stretches.change(range.clone(), |users| {
            let writer = users.writer;
            if !writes {
                if let Some(writer) = writer {
                    before.push(writer);
                }
                if users.readers.last() != Some(&node) && writer != Some(node) {
                    users.readers.push(node);
                }
                return;
            }
            let known = before.len();
            for reader in users.readers.iter().filter(|reader| **reader != node) {
                before.push(*reader);
            }
            if before.len() == known
                && let Some(writer) = writer
            {
                before.push(writer);
            }
        });
        if writes {
            // Merges the parts that the range was split into.
            let writer = Some(node);
            self.stretches.cover(&range, Users { writer, readers: SmallVec::new() });
        }
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Program = Vec<Option<Vec<(Range<u64>, bool)>>>;

    fn program() -> impl Strategy<Value = Program> {
        let access = (0_u64..12, 0_u64..5, any::<bool>());
        let access = access.prop_map(|(start, len, writes)| (start..start + len, writes));
        let accesses = prop::collection::vec(access, 0..4);
        let operation = prop::option::weighted(0.9, accesses);
        prop::collection::vec(operation, 0..12)
    }

    fn built(program: &Program, offset: u64) -> Edges {
        let mut edges = Edges::default();
        for operation in program {
            match operation {
                Some(accesses) => edges.add(accesses.iter().map(|(range, writes)| {
                    (range.start * 1000 + offset..range.end * 1000 + offset, *writes)
                })),
                None => edges.add_barrier(),
            }
        }
        edges
    }

    /// For each pair, whether the second runs behind the first.
    fn reach(edges: &[Edge], nodes: usize) -> Vec<Vec<bool>> {
        let mut reach = vec![vec![false; nodes]; nodes];
        for (first, second) in edges {
            let (first, second) = (*first as usize, *second as usize);
            assert!(first < second);
            for (node, reached) in reach.iter_mut().enumerate().take(first + 1) {
                reached[second] |= node == first || reached[first];
            }
        }
        reach
    }

    proptest! {
        #[test]
        fn ordered_as_the_bytes_say(program in program()) {
            let edges = built(&program, 0);
            let ordered = reach(edges.edges(), program.len());
            let mut needed = Vec::new();
            for second in 0..program.len() {
                for first in 0..second {
                    let conflict = match (&program[first], &program[second]) {
                        (Some(a), Some(b)) => a.iter().any(|(a, writes)| {
                            b.iter().any(|(b, also)| {
                                (*writes || *also) && a.start.max(b.start) < a.end.min(b.end)
                            })
                        }),
                        _ => true,
                    };
                    if conflict {
                        needed.push((first as u32, second as u32));
                    }
                }
            }
            prop_assert_eq!(ordered, reach(&needed, program.len()));
            let mut unique = edges.edges().to_vec();
            unique.sort_unstable_by_key(|(first, second)| (*second, *first));
            unique.dedup();
            prop_assert_eq!(unique, edges.edges());
        }

        #[test]
        fn addresses_do_not_matter(program in program()) {
            let (mut again, elsewhere) = (built(&program, 0), built(&program, 1 << 40));
            prop_assert_eq!(again.edges(), elsewhere.edges());
            again.clear();
            prop_assert!(again.edges().is_empty());
        }
    }

    #[test]
    fn as_wide_as_the_data_allows() {
        let mut edges = Edges::default();
        let (a, b, c, d) = (0..10, 10..20, 20..30, 30..40);
        edges.add([(a.clone(), false), (b.clone(), true)]);
        edges.add([(c.clone(), false), (d.clone(), true)]);
        edges.add([(b.clone(), false), (d.clone(), false), (a, true)]);
        edges.add([(c, true)]);
        edges.add([(d, true)]);
        assert_eq!(edges.edges(), [(0, 2), (1, 2), (1, 3), (2, 4)]);
    }
}
