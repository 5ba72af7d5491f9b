//! Tasks that were woken and have not been polled since (pure).
//!
//! While there are such tasks, the executor's workers are behind. A task that goes from one operation to the next would then keep its
//! worker, since its operation is often complete at the first look; so a new wait yields to the others, once (`who_was_woken_goes_first`).
//!
//! The count is approximate: it includes blocked threads and siblings in one `join!`, and excludes tasks that were woken ahead of time. A
//! future that was woken and is never polled or dropped stays counted until the device is idle and its poller resets the count
//! ([`forget`](ReadyTasks::forget)). Too high a count costs a wait one turn of its executor; too low a count costs a woken task one turn.
#![forbid(unsafe_code)]

use crate::sync::{AtomicU64, Ordering};

/// How many tasks of one device were woken and not polled.
///
/// ORDERING: Relaxed throughout: it protects nothing.
#[derive(Debug)]
pub struct ReadyTasks(AtomicU64);

impl ReadyTasks {
    /// No task waits.
    #[inline]
    pub fn new() -> Self {
        ReadyTasks(AtomicU64::new(0))
    }

    /// A task is woken.
    #[inline]
    pub fn enter(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// A task that was woken is polled, or its future dropped.
    #[inline]
    pub fn leave(&self) {
        // The count may have been reset.
        let less = |count: u64| count.checked_sub(1);
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Whether no task waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    /// Resets the count of tasks that were never polled.
    #[inline]
    pub fn forget(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
