//! [`Summary`]: the combined effect of several consecutive operations on a piece of memory (pure).
//!
//! | a range is | as one operation |
//! |---|---|
//! | read, and never written | a read |
//! | overwritten before anything reads it | an overwrite |
//! | read, and written by the same or a later operation | a read and write |
//!
//! # Invariants
//! 1. A byte must be readable before, and counts as written after, exactly as if the operations came one by one
//!    (`as_one_by_one`).
#![forbid(unsafe_code)]

use std::ops::Range;

use super::range_map::RangeMap;
use gpu_await_protocol::hazard::Mode;

#[derive(Debug, Default)]
pub(crate) struct Summary(RangeMap<Done>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Done {
    reads_first: bool,
    writes: bool,
}

impl Summary {
    /// Adds the next operation.
    pub(crate) fn add(&mut self, range: Range<u64>, mode: Mode) {
        self.0.change(range, |done| {
            done.reads_first |= mode != Mode::Overwrite && !done.writes;
            done.writes |= mode.writes();
        });
    }

    /// The combined uses, in the order of their addresses.
    pub(crate) fn uses(&self) -> Vec<(Range<u64>, Mode)> {
        let mut uses: Vec<(Range<u64>, Mode)> = Vec::new();
        for (range, done) in self.0.iter() {
            let mode = match (done.reads_first, done.writes) {
                (true, true) => Mode::ReadWrite,
                (false, true) => Mode::Overwrite,
                (_, false) => Mode::Read,
            };
            match uses.last_mut() {
                Some((last, known)) if *known == mode && last.end == range.start => {
                    last.end = range.end
                }
                _ => uses.push((range.clone(), mode)),
            }
        }
        uses
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn as_one_by_one(operations in prop::collection::vec((0_u64..20, 0_u64..9, 0_usize..3), 0..12)) {
            let mut summary = Summary::default();
            // For each byte: whether it must be readable before, and whether it is written after.
            let mut bytes = [(false, false); 30];
            for (start, len, mode) in operations {
                let mode = [Mode::Read, Mode::Overwrite, Mode::ReadWrite][mode];
                summary.add(start..start + len, mode);
                for (needed, written) in &mut bytes[start as usize..(start + len) as usize] {
                    *needed |= mode != Mode::Overwrite && !*written;
                    *written |= mode.writes();
                }
            }
            let mut summed = [(false, false); 30];
            let uses = summary.uses();
            for (range, mode) in &uses {
                range.clone().for_each(|at| summed[at as usize] = (*mode != Mode::Overwrite, mode.writes()));
            }
            prop_assert_eq!(bytes, summed);
            let mergeable = |pair: &[(Range<u64>, Mode)]| pair[0].1 == pair[1].1 && pair[0].0.end == pair[1].0.start;
            prop_assert!(!uses.windows(2).any(mergeable));
        }
    }
}
