//! [`Parts`]: an array that successive launches select from, and the counts that each leaves to the next.
//!
//! # Invariants
//! 1. A part is as long as its kernel says (a fact of the image), so that nothing that the kernel counts in `int` overflows
//!    (`parts_fit_the_kernels_integers`), and parts cover the array (`parts_cover_an_array`).
//! 2. A count that a kernel did not write is an error, and never a number: memory for counts between parts starts as [`UNWRITTEN`], a part
//!    that finds that passes it on, and the host refuses counts above the number of elements (`a_kernel_that_leaves_no_count`).
#![forbid(unsafe_code)]

use gpu_await::{ErrorDetail, Result};

/// Marks a count that is not written yet; the kernels call it `unwritten`.
pub(super) const UNWRITTEN: u64 = u64::MAX;
/// Bytes that a part leaves for the next one: two numbers.
pub(super) const LEFT_BYTES: u64 = 16;

/// How the elements of an array are divided among launches: as many each as a launch may take, and the rest for the last.
pub(super) struct Parts {
    elements: u64,
    of_each: u64,
}

impl Parts {
    /// For kernels that take at most this many; fewer, in whole tiles, if asked for.
    pub(super) fn of(elements: u64, most: u32, (tile, asked): (u32, Option<u32>)) -> Self {
        let asked = asked.map_or(u32::MAX, |asked| asked.max(tile) / tile * tile);
        Parts { elements, of_each: u64::from(most.min(asked)) }
    }

    /// At least one: an array without elements has a count as well.
    pub(super) fn count(&self) -> u64 {
        self.elements.div_ceil(self.of_each).max(1)
    }

    /// The length of the longest part.
    pub(super) fn most(&self) -> u64 {
        self.elements.min(self.of_each)
    }

    /// The start and the length of each part.
    pub(super) fn each(&self) -> impl Iterator<Item = [u64; 2]> {
        (0..self.count()).map(|at| {
            let first = at * self.of_each;
            [first, (self.elements - first).min(self.of_each)]
        })
    }
}

/// A count as the host accepts it: never one that no kernel wrote.
pub(super) fn count_of(op: &'static str, found: u64, most: usize) -> Result<usize> {
    let count = usize::try_from(found).ok().filter(|count| *count <= most);
    count.ok_or_else(|| ErrorDetail::BadCount { op, found, most }.into())
}

#[cfg(test)]
mod tests {
    use super::{Parts, UNWRITTEN, count_of};
    use gpu_await::ErrorDetail;

    #[test]
    fn parts_cover_an_array() {
        for of_each in [1, 7, 5632, (1 << 30) / 19_840 * 19_840] {
            let around = [0, 1, of_each - 1, of_each, of_each + 1, 2 * of_each, 2 * of_each + 1];
            for elements in around.into_iter().chain([(1 << 31) + 77, (1 << 32) + 1_003]) {
                if elements / of_each > 1_000_000 {
                    continue;
                }
                let parts = Parts { elements, of_each };
                let mut end = 0;
                for [first, items] in parts.each() {
                    assert_eq!(first, end, "{elements} in parts of {of_each}");
                    assert!(items <= parts.most() && (items > 0 || elements == 0));
                    end = first + items;
                }
                assert_eq!(end, elements, "in parts of {of_each}");
                assert_eq!(parts.each().count() as u64, parts.count());
            }
        }
    }

    #[test]
    fn no_count_is_an_error() {
        assert_eq!(count_of("unique", 9, 9).ok(), Some(9));
        for found in [10, UNWRITTEN] {
            let error = count_of("unique", found, 9).expect_err("it is no count");
            let expected = ErrorDetail::BadCount { op: "unique", found, most: 9 };
            assert_eq!(*error.detail(), expected);
        }
    }
}
