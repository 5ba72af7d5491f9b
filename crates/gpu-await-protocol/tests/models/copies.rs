//! Copies of many pieces against a model that remembers who touches every byte.

use std::ops::Range;

use proptest::prelude::*;

use crate::under_test::cases::{config, size};
use gpu_await_protocol::copies::{FEW, LARGE_BYTES, Mover, Touched, mover, overlap};

fn range() -> impl Strategy<Value = Range<u64>> {
    (0..size(24) as u64, 0_u64..5).prop_map(|(start, len)| start..start + len)
}

proptest! {
    #![proptest_config(config(512))]

    #[test]
    fn refused_as_the_bytes_say(pieces in prop::collection::vec((range(), range()), 0..8)) {
        let ranges: Vec<(Range<u64>, u32, bool)> = (0..).zip(&pieces).flat_map(|(piece, (from, to))| {
            [(from.clone(), piece, false), (to.clone(), piece, true)]
        }).collect();
        let mut touched: Vec<_> =
            ranges.iter().map(|(range, piece, writes)| Touched::new(range.clone(), *piece, *writes)).collect();
        // The ranges that touch each byte.
        let users = |byte: u64| ranges.iter().filter(move |(range, ..)| range.contains(&byte));
        let conflicts = |byte: u64| users(byte).count() > 1 && users(byte).any(|(.., writes)| *writes);
        let found = overlap(&mut touched);
        prop_assert_eq!(found.is_some(), (0..64).any(conflicts));
        if let Some(found) = found {
            prop_assert!(!found.shared.is_empty());
            for byte in found.shared.clone() {
                prop_assert!(conflicts(byte));
                for piece in [found.first, found.second] {
                    prop_assert!(users(byte).any(|(_, user, _)| *user == piece));
                }
            }
        }
    }
}

#[test]
fn the_choice_by_number_and_size() {
    let each = |pieces: usize, bytes: u64| mover(pieces, pieces as u64 * bytes);
    for bytes in [1, 4 << 10, 64 << 10, 256 << 10, LARGE_BYTES - 1] {
        assert_eq!(each(FEW, bytes), Mover::Kernel, "{bytes}");
        assert_eq!(each(1024, bytes), Mover::Kernel, "{bytes}");
        assert_eq!(each(FEW - 1, bytes), Mover::CopyEngine, "{bytes}");
    }
    for pieces in [1, FEW, 1024] {
        assert_eq!(each(pieces, LARGE_BYTES), Mover::CopyEngine, "{pieces}");
    }
    assert_eq!(mover(0, 0), Mover::CopyEngine);
    // By the mean: one large piece among small ones.
    assert_eq!(mover(64, 64 * (4 << 10) + LARGE_BYTES), Mover::Kernel);
}
