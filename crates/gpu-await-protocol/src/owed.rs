//! How long a poller sleeps where its core is busy with others (pure).
//!
//! Linux gives a thread that wakes its core at once while it had no more than its share: what it ran is made up for by a sleep as long, at
//! equal weights. Woken before, it waits until the neighbour's slice is over, at the next tick. So behind a turn the poller sleeps a
//! multiple of that turn, and no call ends this sleep.
//!
//! | the multiple | |
//! |---|---|
//! | is [`LEAST`] | at first |
//! | doubles, up to [`MOST`] | with the second of two sleeps that ended late one after the other: its weight is less than the neighbours' |
//! | is halved | after [`GOOD`] sleeps of which no two did |
//!
//! # Invariants
//! 1. The multiple stays between the two (`a_light_thread_sleeps_longer`).
#![forbid(unsafe_code)]

use super::cadence::NAP_MOST_NS;

/// Of a turn.
pub const LEAST: u64 = 2;
/// A thread at `nice` 10 has a ninth of the weight of one at 0.
pub const MOST: u64 = 32;
/// Sleeps until less is tried.
pub const GOOD: u32 = 4096;

/// What a poller owes its neighbours.
#[derive(Debug)]
pub struct Owed {
    times: u64,
    was_late: bool,
    good: u32,
}

impl Owed {
    /// It owes the least.
    #[inline]
    pub fn new() -> Self {
        Owed { times: LEAST, was_late: false, good: 0 }
    }

    /// How long to sleep behind a turn of that length.
    #[inline]
    pub fn sleep_ns(&self, turn_ns: u64) -> u64 {
        (turn_ns * self.times).min(NAP_MOST_NS)
    }

    /// A sleep ended, late by a neighbour's slice or not.
    #[inline]
    pub fn slept(&mut self, is_late: bool) {
        self.good += 1;
        if is_late && self.was_late {
            (self.times, self.good) = ((2 * self.times).min(MOST), 0);
        } else if self.good == GOOD {
            (self.times, self.good) = ((self.times / 2).max(LEAST), 0);
        }
        self.was_late = is_late;
    }
}

impl Default for Owed {
    fn default() -> Self {
        Owed::new()
    }
}
