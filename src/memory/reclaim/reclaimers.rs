//! Futures that wait until memory is freed.
//!
//! # Invariants
//! 1. A future that registered with a version of the account is woken when the version changes: it raises the count before it reads the
//!    version, and the count is checked after each change of the version (`a_reclaimed_future_hears_of_a_drop`).
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use gpu_await_protocol::sync::Mutex;
use slab::Slab;

use crate::thread::contain;

/// The wakers, each with the version of the account that its future saw.
#[derive(Default)]
pub(crate) struct Reclaimers {
    waiting: Mutex<Slab<(u64, Option<Waker>)>>,
    count: AtomicU64,
}

impl Reclaimers {
    /// Whether any future waits.
    pub(crate) fn are_there(&self) -> bool {
        // ORDERING: SeqCst, here and below, see the invariant.
        self.count.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn enter(&self) -> usize {
        let mut waiting = self.waiting.lock();
        self.count.fetch_add(1, Ordering::SeqCst);
        waiting.insert((0, None))
    }

    /// Has `waker` woken when the version exceeds `version`.
    pub(crate) fn wait(&self, key: usize, version: u64, waker: &Waker) {
        // Cloning and dropping a waker is foreign code: both outside the lock.
        let fresh = Some(waker.clone());
        let stale = {
            let mut waiting = self.waiting.lock();
            waiting.get_mut(key).map(|known| std::mem::replace(known, (version, fresh)))
        };
        contain::let_go(stale);
    }

    pub(crate) fn leave(&self, key: usize) {
        let waker = {
            let mut waiting = self.waiting.lock();
            self.count.fetch_sub(1, Ordering::SeqCst);
            waiting.try_remove(key)
        };
        contain::let_go(waker);
    }

    /// The wakers of futures that saw an older version, for the caller to wake.
    pub(crate) fn take_older(&self, version: u64) -> Vec<Waker> {
        let mut waiting = self.waiting.lock();
        let older = waiting.iter_mut().filter(|(_, (seen, _))| *seen < version);
        older.filter_map(|(_, (_, waker))| waker.take()).collect()
    }
}
