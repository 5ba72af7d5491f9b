//! How long a poller sleeps where its core is busy with others (pure).
//!
//! Linux gives a waking thread its core at once if it has had no more than its share: at equal weights, a sleep as long as its run makes
//! up for that. Woken earlier, it waits for the end of the neighbour's slice, at the next tick. So after a turn the poller sleeps a
//! multiple of that turn, and no call ends this sleep.
//!
//! | the multiple | |
//! |---|---|
//! | is [`LEAST`] | at first |
//! | doubles, up to [`MOST`] | after [`LATE`] sleeps in a row that ended late: its weight is less than the neighbours' |
//! | is halved | [`GOOD`] sleeps later |
//!
//! # Invariants
//! 1. The multiple stays between the two (`a_light_thread_sleeps_longer`).
#![forbid(unsafe_code)]

use super::cadence::NAP_MOST_NS;

/// In halves of a turn.
pub const LEAST: u64 = 3;
/// A thread at `nice` 10 has a ninth of the weight of one at 0.
pub const MOST: u64 = 64;
/// With equal weights, a few sleeps in a row end late too.
pub const LATE: u32 = 8;
/// Sleeps until less is tried.
pub const GOOD: u32 = 4096;

/// What a poller owes its neighbours.
#[derive(Debug)]
pub struct Owed {
    halves: u64,
    late: u32,
    slept: u32,
}

impl Owed {
    /// Owes the least.
    #[inline]
    pub fn new() -> Self {
        Owed { halves: LEAST, late: 0, slept: 0 }
    }

    /// How long to sleep after a turn of that length.
    #[inline]
    pub fn sleep_ns(&self, turn_ns: u64) -> u64 {
        (turn_ns * self.halves / 2).min(NAP_MOST_NS)
    }

    /// A sleep ended, late by a neighbour's slice or not.
    #[inline]
    pub fn slept(&mut self, is_late: bool) {
        self.slept += 1;
        self.late = if is_late { self.late + 1 } else { 0 };
        if self.late == LATE {
            *self = Owed { halves: (2 * self.halves).min(MOST), late: 0, slept: 0 };
        } else if self.slept == GOOD {
            *self = Owed { halves: (self.halves / 2).max(LEAST), late: self.late, slept: 0 };
        }
    }
}

impl Default for Owed {
    fn default() -> Self {
        Owed::new()
    }
}
