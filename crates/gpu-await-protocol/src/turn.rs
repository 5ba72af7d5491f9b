//! The turns of a thread of the runtime: the whole time in which it may hold a lock (pure).
//!
//! The child of a fork has a copy of its parent's memory and one thread: a lock that another one held stays locked. So a fork waits until
//! the threads of the runtime are between two turns, and keeps them there.
//!
//! | value | meaning | left by |
//! |---|---|---|
//! | 0 | asleep, or about to be | the thread, which begins a turn; a fork |
//! | `TAKEN` | at work | the thread |
//! | `TAKEN` + *n* `HOLD` | at work, *n* forks wait | the thread, which ends its turn soon |
//! | *n* `HOLD` | held by *n* forks | those forks |
//!
//! # Invariants
//! 1. From the moment that a fork finds a thread [at rest](Turn::is_at_rest) until it lets go, the thread begins no turn, and what the
//!    thread did in earlier ones is seen (`a_fork_finds_no_thread_in_its_turn`).
#![forbid(unsafe_code)]

use crate::sync::{AtomicU64, Ordering};

const TAKEN: u64 = 1;
const HOLD: u64 = 2;

/// The turns of one thread.
#[derive(Debug)]
pub struct Turn(AtomicU64);

impl Turn {
    /// For a thread that starts while this many forks are under way.
    pub fn new(forks: u64) -> Self {
        Turn(AtomicU64::new(forks * HOLD))
    }

    /// The thread: begins a turn, unless a fork holds it back.
    #[must_use]
    #[inline]
    pub fn try_begin(&self) -> bool {
        // ORDERING: Acquire, pairs with `let_go`: what a fork's handlers did is over.
        self.0.compare_exchange(0, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// The thread: ends its turn.
    #[inline]
    pub fn end(&self) {
        // ORDERING: Release, pairs with `is_at_rest`.
        self.0.fetch_sub(TAKEN, Ordering::Release);
    }

    /// The thread, in its turn: whether a fork waits for its end.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        // ORDERING: Relaxed: a fork that is seen late waits for longer.
        self.0.load(Ordering::Relaxed) > TAKEN
    }

    /// A fork: lets the thread begin no other turn.
    pub fn hold(&self) {
        // ORDERING: Relaxed: nothing is read before `is_at_rest`. In this word's modification order, no turn begins after it.
        self.0.fetch_add(HOLD, Ordering::Relaxed);
    }

    /// A fork that holds the thread: whether it is between two turns.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        // ORDERING: Acquire, pairs with `end`.
        self.0.load(Ordering::Acquire) & TAKEN == 0
    }

    /// A fork: the thread may go on.
    pub fn let_go(&self) {
        // ORDERING: Release, pairs with `try_begin`.
        self.0.fetch_sub(HOLD, Ordering::Release);
    }
}
