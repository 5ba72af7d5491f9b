//! Deadlines on a device's clock, without a thread of their own.
//!
//! The device's poller wakes the waiters: it sleeps no longer than until the [first](Deadlines::first) deadline. On a stepped device a step
//! does this, and time advances with the steps.
//!
//! # Invariants
//! 1. A deadline that is dropped leaves nothing behind (`a_close_that_is_given_up_leaves_nothing`).
//! 2. A deadline stored before [`Attention::call_before`](super::attention::Attention::call_before) is seen by the poller before it sleeps
//!    beyond it (`a_registration_is_never_slept_over`).
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use crate::sync::Mutex;
use slab::Slab;
use smallvec::SmallVec;

use crate::thread::contain::wake;

/// No deadline; a clock that counts nanoseconds gets there in 584 years.
pub(crate) const NEVER: u64 = u64::MAX;

/// The deadlines of a device that tasks wait for.
pub(crate) struct Deadlines {
    entries: Mutex<Slab<Sleeper>>,
    /// The earliest of those that were not woken.
    first: AtomicU64,
}

struct Sleeper {
    due: u64,
    /// Taken when it is woken; the entry stays its owner's.
    waker: Option<Waker>,
}

impl Deadlines {
    pub(crate) fn new() -> Self {
        Deadlines { entries: Mutex::default(), first: AtomicU64::new(NEVER) }
    }

    /// The next deadline; `u64::MAX`: none.
    pub(crate) fn first(&self) -> u64 {
        self.first.load(Ordering::SeqCst)
    }

    /// Wakes the waiters whose deadline has passed.
    pub(crate) fn wake_due(&self, now: u64) {
        while self.first() <= now {
            let due: SmallVec<[Waker; 4]> = self.change(|entries| {
                let due = entries.iter_mut().filter(|(_, entry)| entry.due <= now);
                due.filter_map(|(_, entry)| entry.waker.take()).collect()
            });
            due.into_iter().for_each(wake);
        }
    }

    /// Sets the waker for `due`, and returns the previous one.
    pub(crate) fn set(&self, key: &mut Option<usize>, due: u64, waker: Waker) -> Option<Waker> {
        self.change(|entries| match key.and_then(|key| entries.get_mut(key)) {
            Some(entry) => entry.waker.replace(waker),
            None => {
                *key = Some(entries.insert(Sleeper { due, waker: Some(waker) }));
                None
            }
        })
    }

    pub(crate) fn remove(&self, key: usize) -> Option<Waker> {
        self.change(|entries| entries.try_remove(key)?.waker)
    }

    /// Wakers that come out are called and dropped by the caller, without the lock.
    fn change<R>(&self, change: impl FnOnce(&mut Slab<Sleeper>) -> R) -> R {
        let mut entries = self.entries.lock();
        let result = change(&mut entries);
        let waiting = entries.iter().filter(|(_, entry)| entry.waker.is_some());
        let first = waiting.map(|(_, entry)| entry.due).min();
        self.first.store(first.unwrap_or(NEVER), Ordering::SeqCst);
        result
    }
}
