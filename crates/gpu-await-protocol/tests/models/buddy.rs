//! The buddy allocator of pinned slabs, against a model that knows every block in use.
//!
//! The module is pure: `main.rs` compiles its very source.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::under_test::cases::{config, size};
use gpu_await_protocol::buddy::{Buddy, LEAST_BYTES, SLAB_BYTES};

const ORDERS: u32 = (SLAB_BYTES / LEAST_BYTES).ilog2();

#[derive(Clone, Debug)]
enum Step {
    /// A block of that order.
    Take(u32),
    Put(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Whole slabs would leave nothing to do to the others.
    let step = prop_oneof![
        5 => (0..=ORDERS).prop_map(Step::Take),
        3 => (5..ORDERS - 2).prop_map(Step::Take),
        5 => any::<usize>().prop_map(Step::Put),
    ];
    prop::collection::vec(step, 1..size(300))
}

fn bytes(order: u32) -> usize {
    LEAST_BYTES << order
}

/// How many aligned blocks of that size have nothing in use in them.
fn free_blocks(used: &BTreeMap<usize, usize>, bytes: usize) -> usize {
    let (mut count, mut gap) = (0, 0_usize);
    for (at, len) in used.iter().map(|(at, len)| (*at, *len)).chain([(SLAB_BYTES, 0)]) {
        count += (at / bytes).saturating_sub(gap.div_ceil(bytes));
        gap = at + len;
    }
    count
}

proptest! {
    #![proptest_config(config(50))]

    #[test]
    fn blocks_never_overlap(steps in steps()) {
        let mut buddy = Buddy::new();
        let mut used: BTreeMap<usize, usize> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Take(order) => {
                    let len = bytes(order);
                    let free = free_blocks(&used, len);
                    prop_assert_eq!(buddy.has(len), free > 0);
                    prop_assert_eq!(buddy.count(len, usize::MAX), free);
                    prop_assert_eq!(buddy.count(len, 3), free.min(3));
                    match buddy.take(len) {
                        None => prop_assert_eq!(free, 0, "refused {} bytes", len),
                        Some(start) => {
                            prop_assert!(start.is_multiple_of(len) && start + len <= SLAB_BYTES);
                            let below = used.range(..start + len).next_back();
                            prop_assert!(below.is_none_or(|(at, len)| at + len <= start));
                            used.insert(start, len);
                        }
                    }
                }
                Step::Put(which) if !used.is_empty() => {
                    let (start, len) = used.iter().nth(which % used.len()).unwrap();
                    let (start, len) = (*start, *len);
                    buddy.put(start, len);
                    used.remove(&start);
                }
                Step::Put(_) => {}
            }
            prop_assert_eq!(buddy.free_bytes(), SLAB_BYTES - used.values().sum::<usize>());
        }
        for (start, len) in used {
            buddy.put(start, len);
        }
        prop_assert!(buddy.has(SLAB_BYTES));
    }
}

#[test]
fn everything_merges_back() {
    for order in ORDERS - size(ORDERS as usize) as u32..=ORDERS {
        let mut buddy = Buddy::new();
        let mut blocks = Vec::new();
        while let Some(start) = buddy.take(bytes(order)) {
            blocks.push(start);
        }
        assert_eq!((blocks.len(), buddy.free_bytes()), (SLAB_BYTES / bytes(order), 0));
        // Every other one, from the wrong end; no two of them make a larger one.
        let (even, odd): (Vec<usize>, Vec<usize>) =
            blocks.into_iter().rev().partition(|start| (start / bytes(order)).is_multiple_of(2));
        even.iter().for_each(|start| buddy.put(*start, bytes(order)));
        assert!(order == ORDERS || !buddy.has(bytes(order + 1)));
        odd.iter().for_each(|start| buddy.put(*start, bytes(order)));
        assert!(buddy.has(SLAB_BYTES));
        assert_eq!(buddy.free_bytes(), SLAB_BYTES);
    }
}

#[test]
fn a_small_block_splits_no_large_one_in_vain() {
    let mut buddy = Buddy::new();
    let half = SLAB_BYTES / 2;
    let small: Vec<_> = (0..half / 512).map(|_| buddy.take(512).unwrap()).collect();
    assert!(small.iter().all(|start| *start < half), "the other half is in one piece");
    // A hole in the first half is used before the second one is cut.
    buddy.put(small[77], 512);
    assert_eq!(buddy.take(128), Some(small[77]));
    assert!(buddy.has(half) && !buddy.has(SLAB_BYTES));
}
