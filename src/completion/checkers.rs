//! Which tasks of a device check for themselves (pure).
//!
//! A place is held until a time: a future that was leaked in the middle of a check gives its place
//! back by the clock.
//!
//! # Invariants
//! 1. At most [`CHECKERS`] places are held (`places_are_few_and_come_back`).
//! 2. Nobody gives back a place that has gone to another (`a_late_checker_returns_nothing`).
#![forbid(unsafe_code)]

use super::policy::CHECKERS;
use crate::sync::{AtomicU64, Ordering};

/// The places of one device: until when each is held (0 if it is free).
#[derive(Debug)]
pub(crate) struct Checkers {
    places: [AtomicU64; CHECKERS],
    /// When one was last taken.
    last: AtomicU64,
}

/// A place that is held.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    index: u8,
    until: u64,
}

impl Checkers {
    pub(crate) fn new() -> Self {
        Checkers { places: std::array::from_fn(|_| AtomicU64::new(0)), last: AtomicU64::new(0) }
    }

    /// Takes a place until `until`, if one is free.
    pub(crate) fn enter(&self, now: u64, until: u64) -> Option<Place> {
        for (index, place) in (0..).zip(&self.places) {
            // ORDERING: Relaxed throughout: a place protects nothing.
            let held = place.load(Ordering::Relaxed);
            if held <= now
                && place.compare_exchange(held, until, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                self.last.store(now, Ordering::Relaxed);
                return Some(Place { index, until });
            }
        }
        None
    }

    /// How many places are held.
    pub(crate) fn held(&self, now: u64) -> usize {
        // ORDERING: Relaxed, as above.
        self.places.iter().filter(|place| place.load(Ordering::Relaxed) > now).count()
    }

    /// When a task last began to look for itself.
    pub(crate) fn last(&self) -> u64 {
        // ORDERING: Relaxed, as above.
        self.last.load(Ordering::Relaxed)
    }

    /// Gives a place back.
    pub(crate) fn leave(&self, place: Place) {
        let slot = &self.places[usize::from(place.index)];
        // ORDERING: Relaxed, as above. It fails where the time was over and another took the place.
        let _ = slot.compare_exchange(place.until, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl Place {
    /// When it must be given back.
    pub(crate) fn until(self) -> u64 {
        self.until
    }
}
