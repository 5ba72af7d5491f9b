//! What a stream keeps of freed memory.

use gpu_await_protocol::block_cache::{BlockCache, LARGEST, rounded};
use proptest::prelude::*;

use crate::under_test::cases::{config, size};

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn a_kept_block_is_large_enough_and_not_too_large(bytes in 1..=2 * LARGEST) {
        match rounded(bytes) {
            None => prop_assert!(bytes > LARGEST),
            Some(size) => {
                prop_assert!(size >= bytes && size <= LARGEST);
                prop_assert!(size < bytes + 512 || size <= bytes + bytes / 4);
                prop_assert_eq!(rounded(size), Some(size));
            }
        }
    }

    /// And no more is kept than the limit.
    #[test]
    fn what_is_kept_comes_out_once(steps in prop::collection::vec((1..=6u64, any::<bool>()), 1..size(60))) {
        const LIMIT: u64 = 4096;
        let mut block_cache = BlockCache::new(LIMIT);
        let mut kept: Vec<(u64, u32)> = Vec::new();
        let mut next = 0;
        for (size, puts) in steps {
            let size = 512 * size;
            let bytes: u64 = kept.iter().map(|(size, _)| size).sum();
            if puts {
                next += 1;
                match block_cache.put(size, next) {
                    Ok(()) => kept.push((size, next)),
                    Err(back) => prop_assert!(back == next && bytes + size > LIMIT),
                }
                prop_assert!(kept.iter().map(|(size, _)| size).sum::<u64>() <= LIMIT);
            } else {
                match block_cache.take(size) {
                    Some(piece) => {
                        let at = kept.iter().position(|one| *one == (size, piece));
                        prop_assert!(at.is_some());
                        kept.remove(at.expect("checked"));
                    }
                    None => prop_assert!(!kept.iter().any(|(known, _)| *known == size)),
                }
            }
        }
        let mut left = block_cache.take_out(u64::MAX, |_| true);
        left.sort_unstable();
        kept.sort_unstable();
        prop_assert_eq!(left, kept);
        prop_assert_eq!((block_cache.iter().count(), block_cache.take(512)), (0, None));
    }

    /// And no more: without the last piece it would not be enough.
    #[test]
    fn as_much_is_taken_out_as_is_asked_for(
        sizes in prop::collection::vec((1..=6u64, any::<bool>()), 0..size(30)),
        least in 0..20_000u64,
    ) {
        let mut block_cache = BlockCache::new(u64::MAX);
        for (index, (size, may_go)) in sizes.iter().enumerate() {
            prop_assert!(block_cache.put(512 * size, (index, *may_go)).is_ok());
        }
        let taken = block_cache.take_out(least, |(_, may_go)| *may_go);
        let may_go: u64 = sizes.iter().filter(|(_, may_go)| *may_go).map(|(size, _)| 512 * size).sum();
        let bytes: u64 = taken.iter().map(|(size, _)| size).sum();
        prop_assert!(taken.iter().all(|(size, (index, may_go))| *may_go && *size == 512 * sizes[*index].0));
        prop_assert!(taken.windows(2).all(|pair| pair[0].0 >= pair[1].0));
        prop_assert!(bytes >= least.min(may_go));
        prop_assert!(bytes - taken.last().map_or(0, |(size, _)| *size) < least.max(1));
        prop_assert_eq!(block_cache.iter().count(), sizes.len() - taken.len());
    }
}
