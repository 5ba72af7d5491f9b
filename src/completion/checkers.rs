//! Which tasks of a device check for themselves (pure).
//!
//! A permit is held until a time: a future that was leaked in the middle of a check gives its permit
//! back by the clock.
//!
//! # Invariants
//! 1. At most [`CHECKERS`] permits are held (`permits_are_few_and_come_back`).
//! 2. Nobody gives back a permit that has gone to another (`a_late_checker_returns_nothing`).
#![forbid(unsafe_code)]

use super::policy::CHECKERS;
use crate::sync::{AtomicU64, Ordering};

/// The permits of one device: until when each is held (0 if it is free).
#[derive(Debug)]
pub(crate) struct Checkers {
    permits: [AtomicU64; CHECKERS],
}

/// A permit that is held.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckPermit {
    index: u8,
    until: u64,
}

impl Checkers {
    pub(crate) fn new() -> Self {
        Checkers { permits: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Takes a permit until `until`, if one is free.
    pub(crate) fn enter(&self, now: u64, until: u64) -> Option<CheckPermit> {
        for (index, permit) in (0..).zip(&self.permits) {
            // ORDERING: Relaxed throughout: a permit protects nothing.
            let held = permit.load(Ordering::Relaxed);
            if held <= now
                && permit
                    .compare_exchange(held, until, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            {
                return Some(CheckPermit { index, until });
            }
        }
        None
    }

    /// How many permits are held.
    pub(crate) fn held(&self, now: u64) -> usize {
        // ORDERING: Relaxed, as above.
        self.permits.iter().filter(|permit| permit.load(Ordering::Relaxed) > now).count()
    }

    /// Gives a permit back.
    pub(crate) fn leave(&self, permit: CheckPermit) {
        let slot = &self.permits[usize::from(permit.index)];
        // ORDERING: Relaxed, as above. It fails where the time was over and another took the permit.
        let _ = slot.compare_exchange(permit.until, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl CheckPermit {
    /// When it must be given back.
    pub(crate) fn until(self) -> u64 {
        self.until
    }
}
