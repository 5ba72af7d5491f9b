//! Which launches of a stream may start before the preceding launch has ended (pure).
//!
//! A kernel *waits first* if every thread of every block executes `griddepcontrol.wait` before anything that can have an effect, whatever
//! its arguments. Launched behind a kernel, with the driver's attribute for it, it may start early: its wait returns when that kernel is
//! complete. By induction, completion of such a launch proves completion of everything in front of it, as long as completion of the command
//! directly in front of it does. That is not known of others' work.
//!
//! | the last command in front of a launch that waits first | the launch |
//! |---|---|
//! | another launch, that was accepted | may overlap with it |
//! | anything else: others' work, a graph, a copy, a wait for another stream, a launch that the driver refused | is behind everything |
//!
//! Tickets without a command (an allocation, an empty list) change nothing: what is in front of them is in front of the next launch.
//!
//! # Invariants
//! 1. When the body of a launch begins, everything in front of it is complete (`every_order_keeps_the_programs` of `gpu-await`).
#![forbid(unsafe_code)]

use crate::sync::{AtomicU64, Ordering};

/// What the launches of a stream may overlap with; changed under its submission lock. Launches of kernels that do not wait first neither
/// read nor write it.
#[derive(Debug)]
pub struct Overlap {
    /// The last ticket with a command that no launch may overlap with; 0 if a launch is known to be behind it.
    // ORDERING: Relaxed, everywhere: the lock orders it.
    full_behind: AtomicU64,
    /// The last ticket of a launch that may overlap; for messages.
    allowed: AtomicU64,
}

impl Default for Overlap {
    fn default() -> Self {
        Overlap::new()
    }
}

impl Overlap {
    /// For an empty stream.
    #[must_use]
    pub fn new() -> Self {
        Overlap { full_behind: AtomicU64::new(0), allowed: AtomicU64::new(0) }
    }

    /// No launch overlaps with what the ticket puts on the stream.
    #[inline]
    pub fn demand_full(&self, ticket: u64) {
        self.full_behind.store(ticket, Ordering::Relaxed);
    }

    /// The ticket puts nothing on the stream for a launch to follow.
    #[inline]
    pub fn pass_on(&self, ticket: u64) {
        if self.full_behind.load(Ordering::Relaxed) + 1 == ticket {
            self.demand_full(ticket);
        }
    }

    /// Whether a launch of the ticket may overlap with the launch in front of it.
    #[must_use]
    pub fn may_overlap(&self, ticket: u64) -> bool {
        self.full_behind.load(Ordering::Relaxed) + 1 < ticket
    }

    /// Records an accepted launch that waits first, whether it overlaps or not: when it is complete, so is what was in front of it.
    pub fn launched(&self, ticket: u64, overlaps: bool) {
        self.full_behind.store(0, Ordering::Relaxed);
        if overlaps {
            self.allowed.store(ticket, Ordering::Relaxed);
        }
    }

    /// Whether a launch of a ticket that the caller submitted may overlap; `None` once a later one may. The lock need not be held.
    #[must_use]
    pub fn was_allowed(&self, ticket: u64) -> Option<bool> {
        match self.allowed.load(Ordering::Relaxed).cmp(&ticket) {
            std::cmp::Ordering::Less => Some(false),
            std::cmp::Ordering::Equal => Some(true),
            std::cmp::Ordering::Greater => None,
        }
    }
}
