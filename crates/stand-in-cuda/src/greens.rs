//! Green contexts, and sets of multiprocessors.

use std::fmt;

use crate::abi::Handle;

/// As an H200's.
pub(crate) const MULTIPROCESSORS: std::ffi::c_int = 132;

/// Multiprocessors, a bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Multiprocessors([u64; 3]);

impl Multiprocessors {
    pub(crate) const NONE: Self = Multiprocessors([0; 3]);

    pub(crate) fn run(first: u32, len: u32) -> Self {
        let mut set = Self::NONE;
        for at in first..first + len {
            set.0[at as usize / 64] |= 1 << (at % 64);
        }
        set
    }

    pub(crate) fn all() -> Self {
        Self::run(0, MULTIPROCESSORS.unsigned_abs())
    }

    pub(crate) fn count(self) -> u32 {
        self.0.into_iter().map(u64::count_ones).sum()
    }

    fn has(self, at: u32) -> bool {
        self.0[at as usize / 64] >> (at % 64) & 1 == 1
    }

    pub(crate) fn joined(self, other: Self) -> Self {
        Multiprocessors([0, 1, 2].map(|word| self.0[word] | other.0[word]))
    }

    pub(crate) fn overlaps(self, other: Self) -> bool {
        [0, 1, 2].into_iter().any(|word| self.0[word] & other.0[word] != 0)
    }
}

/// `0-7,16-23`.
impl fmt::Display for Multiprocessors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut at, mut separator) = (0, "");
        while at < 192 {
            let end = (at..192).find(|&end| !self.has(end)).unwrap_or(192);
            if end > at {
                write!(f, "{separator}{at}-{}", end - 1)?;
                separator = ",";
            }
            at = end + 1;
        }
        Ok(())
    }
}

/// A green context. One that was destroyed is remembered.
pub(crate) struct Green {
    pub(crate) number: u64,
    pub(crate) device: usize,
    /// The same as a context.
    pub(crate) context: Handle,
    pub(crate) set: Multiprocessors,
    pub(crate) destroyed: bool,
}
