//! [`Deadlines`]: the times on one clock at which tasks are to be woken (pure).
//!
//! | a deadline is | left by |
//! |---|---|
//! | entered, with a waker | its time, or the end of its clock, when its waker is woken; its drop |
//! | fired | – |
//!
//! The time keeper [takes](Deadlines::take_due) those that are due, and sleeps no longer than until the [first](Deadlines::first).
//! Times are nanoseconds of the caller's clock.
//!
//! # Invariants
//! 1. A deadline that is dropped leaves nothing behind (`a_close_that_is_given_up_leaves_nothing`).
//! 2. A deadline that is entered before the poller is [called](super::park::ParkState::notify_before) is taken before the poller
//!    sleeps beyond it, and one that is entered beside the end of its clock fires or is refused (`a_deadline_is_never_slept_over`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use smallvec::SmallVec;

use crate::sync::{AtomicU64, Ordering, Plain};

/// No deadline; a clock that counts nanoseconds gets there in 584 years.
pub const NEVER: u64 = u64::MAX;

/// What to wake when the lock is released.
pub type Due<W> = SmallVec<[W; 4]>;

/// The deadlines of a clock, with their wakers.
#[derive(Debug)]
pub struct Deadlines<W> {
    entries: Plain<DeadlineEntries<W>>,
    /// The earliest of them.
    first: AtomicU64,
}

#[derive(Debug)]
struct DeadlineEntries<W> {
    /// By time; the second number tells apart those of one time.
    wakers: BTreeMap<(u64, u64), W>,
    entered: u64,
    ended: bool,
}

/// A deadline that was entered, perhaps again.
#[derive(Debug)]
#[must_use]
pub struct EnteredDeadline<W> {
    /// The previous waker, to be dropped without the lock.
    pub stale: Option<W>,
    /// Whether nothing is due before it.
    pub is_first: bool,
}

impl<W> Deadlines<W> {
    /// A clock without deadlines.
    pub fn new() -> Self {
        let entries = DeadlineEntries { wakers: BTreeMap::new(), entered: 0, ended: false };
        Deadlines { entries: Plain::new(entries), first: AtomicU64::new(NEVER) }
    }

    /// The next deadline, or [`NEVER`].
    pub fn first(&self) -> u64 {
        self.first.load(Ordering::SeqCst)
    }

    /// Takes the wakers whose time has come.
    pub fn take_due(&self, now: u64) -> Due<W> {
        if self.first() > now {
            return Due::new();
        }
        self.change(|entries| {
            let later = entries.wakers.split_off(&(now.saturating_add(1), 0));
            std::mem::replace(&mut entries.wakers, later).into_values().collect()
        })
    }

    /// Enters a waker for `due`, or another one for the same; the waker comes back if the clock has ended.
    pub fn enter(
        &self,
        due: u64,
        key: &mut Option<u64>,
        waker: W,
    ) -> Result<EnteredDeadline<W>, W> {
        self.change(|entries| {
            if entries.ended {
                return Err(waker);
            }
            let number = *key.get_or_insert_with(|| {
                entries.entered += 1;
                entries.entered
            });
            let stale = entries.wakers.insert((due, number), waker);
            let first = entries.wakers.first_key_value();
            let is_first = first.is_some_and(|(first, _)| *first == (due, number));
            Ok(EnteredDeadline { stale, is_first })
        })
    }

    /// Removes a deadline that is dropped.
    pub fn remove(&self, due: u64, key: u64) -> Option<W> {
        self.change(|entries| entries.wakers.remove(&(due, key)))
    }

    /// Ends the clock: all are due.
    pub fn end(&self) -> Due<W> {
        self.change(|entries| {
            entries.ended = true;
            std::mem::take(&mut entries.wakers).into_values().collect()
        })
    }

    fn change<R>(&self, change: impl FnOnce(&mut DeadlineEntries<W>) -> R) -> R {
        let mut entries = self.entries.lock();
        let result = change(&mut entries);
        let first = entries.wakers.first_key_value().map_or(NEVER, |((due, _), _)| *due);
        // Under the lock, in the order of the changes.
        self.first.store(first, Ordering::SeqCst);
        result
    }
}
