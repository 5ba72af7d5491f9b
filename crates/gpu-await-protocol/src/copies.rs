//! A copy of many pieces: which pieces may be copied together, and by what (pure).
//!
//! The pieces of a copy are moved in any order, by whatever is quickest. So **no byte that a piece writes may be touched by another piece**,
//! nor by its own source.
//!
//! | pieces | are moved by | because |
//! |---|---|---|
//! | fewer than [`FEW`] | copy engines, a call each | a launch takes as long as that many calls |
//! | of [`LARGE_BYTES`] or more on average | copy engines, a call each | they are as quick, and take no multiprocessor |
//! | others | one kernel | a call takes longer than its bytes |
//!
//! # Invariants
//! 1. Pieces are refused if and only if two ranges share a byte that one of them writes (`refused_as_the_bytes_say`).
//! 2. The choice depends on number and bytes alone (`the_choice_by_number_and_size`).
#![forbid(unsafe_code)]

use std::ops::Range;

/// From this number on a kernel is quicker, if the pieces are small.
pub const FEW: usize = 4;
/// From this mean size on the copy engines are as quick as a kernel: they move 48 to 50 GB/s at this size, and 35 to 39 at a quarter of it,
/// while the kernel moves 51 to 52 (H200).
pub const LARGE_BYTES: u64 = 1 << 20;

/// What moves the pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// The copy engines: one call of the driver a piece.
    CopyEngine,
    /// One launch, on multiprocessors.
    Kernel,
}

/// What moves this many pieces, of this many bytes together, where the caller leaves the choice.
#[must_use]
pub fn mover(pieces: usize, bytes: u64) -> Mover {
    if pieces < FEW || bytes / pieces as u64 >= LARGE_BYTES {
        Mover::CopyEngine
    } else {
        Mover::Kernel
    }
}

/// A range of addresses that a piece reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct Touched {
    start: u64,
    end: u64,
    piece: u32,
    writes: bool,
}

/// Two pieces that must not be copied together, and a byte range that both touch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The one whose range begins first.
    pub first: u32,
    /// The other one; the same where a piece overlaps its own source.
    pub second: u32,
    /// The addresses that they share.
    pub shared: Range<u64>,
}

impl Touched {
    /// What piece number `piece` touches.
    #[must_use]
    pub fn new(range: Range<u64>, piece: u32, writes: bool) -> Self {
        Touched { start: range.start, end: range.end, piece, writes }
    }
}

/// Finds two ranges that share a byte which one of them writes. Sorts the ranges.
#[must_use]
pub fn overlap(touched: &mut [Touched]) -> Option<Overlap> {
    touched.sort_unstable_by_key(|range| range.start);
    // Of the ranges so far, those that end last: of all, and of those that are written.
    let mut any: Option<&Touched> = None;
    let mut written: Option<&Touched> = None;
    for range in touched.iter().filter(|range| range.start < range.end) {
        let before = if range.writes { any } else { written };
        if let Some(before) = before.filter(|before| range.start < before.end) {
            let shared = range.start..range.end.min(before.end);
            return Some(Overlap { first: before.piece, second: range.piece, shared });
        }
        let ends_later = |known: Option<&Touched>| known.is_none_or(|known| known.end < range.end);
        if ends_later(any) {
            any = Some(range);
        }
        if range.writes && ends_later(written) {
            written = Some(range);
        }
    }
    None
}
