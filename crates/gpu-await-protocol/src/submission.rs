//! The submission lock: one submitter at a time, and `poll` never waits for it (pure).
//!
//! The driver may hold a submitter for a long time (a full queue blocks its thread), and `poll` must not block behind it. So `poll` only *tries*
//! the lock: if that fails, it records the ticket that it needs marked in `wanted`, and the holder serves it when it unlocks.
//!
//! | word | set by | meaning |
//! |---|---|---|
//! | `wanted` | any thread | a waiter needs this ticket and saw no marker at or behind it |
//! | `marked` | the holder of the lock | the highest ticket with a published marker |
//!
//! # Invariants
//! 1. After `want(n)` returned, a marker at or behind *n* is published, or the holder of the lock will serve it when it unlocks
//!    (`a_wanted_marker_is_served_by_whoever_unlocks`). A ticket that is not issued yet is served by its submitter, and makes nobody wait
//!    (`a_ticket_that_is_not_there_yet_is_served_by_who_submits_it`).
//! 2. `marked` rises only after the marker's call succeeded (`a_marker_is_published_after_its_call`).
//! 3. No thread holds two submission locks.
#![forbid(unsafe_code)]

use super::timeline::Timeline;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, fence};

/// The state that [`SubmissionLock`] protects: it can place a marker at its tail.
pub trait Markable {
    /// The arguments that placing a marker needs besides the locked state.
    type Context: ?Sized;
    /// The stream's tickets.
    fn timeline(context: &Self::Context) -> &Timeline;
    /// Places a marker behind `tail`, the last ticket, which is pending; `false` if that failed (the caller's wait is then served by a
    /// later marker or the loss).
    #[must_use]
    fn mark_tail(&mut self, context: &Self::Context, tail: u64) -> bool;
}

/// The lock for submitting to a stream, and the requests that waiters leave for its holder.
#[derive(Debug)]
pub struct SubmissionLock<S> {
    state: Mutex<S>,
    wanted: AtomicU64,
    marked: AtomicU64,
}

impl<S: Markable> SubmissionLock<S> {
    /// A free lock.
    #[inline]
    pub fn new(state: S) -> Self {
        SubmissionLock {
            state: Mutex::new(state),
            wanted: AtomicU64::new(0),
            marked: AtomicU64::new(0),
        }
    }

    /// Whether a marker at or behind `ticket` is published.
    #[inline]
    pub fn is_marked(&self, ticket: u64) -> bool {
        // ORDERING: Acquire pairs with `mark`: a thread that sees the number finds the marker in its queue.
        self.marked.load(Ordering::Acquire) >= ticket
    }

    /// Runs `f` under the lock, then serves markers that were requested meanwhile. Blocks while another
    /// submitter is in the driver.
    #[inline(always)]
    pub fn with<R>(&self, cx: &S::Context, f: impl FnOnce(&mut Locked<'_, S>) -> R) -> R {
        let mut locked = self.locked(self.state.lock());
        let result = f(&mut locked);
        drop(locked);
        self.serve(cx);
        result
    }

    /// Like [`with`](Self::with), unless the lock is taken.
    #[inline]
    pub fn try_with<R>(
        &self,
        cx: &S::Context,
        f: impl FnOnce(&mut Locked<'_, S>) -> R,
    ) -> Option<R> {
        let mut locked = self.locked(self.state.try_lock()?);
        let result = f(&mut locked);
        drop(locked);
        self.serve(cx);
        Some(result)
    }

    /// Asks for a marker at or behind `ticket` and places it if the lock is free. Never blocks.
    #[inline]
    pub fn want(&self, cx: &S::Context, ticket: u64) {
        if self.is_marked(ticket) {
            return;
        }
        // ORDERING: Relaxed, in front of the fence in `serve`: the store of `wanted` and the try of the
        // lock there, against the unlock and the load of `wanted`, are a store-load pair on both sides.
        self.wanted.fetch_max(ticket, Ordering::Relaxed);
        self.serve(cx);
    }

    /// Asks for a marker at or behind `ticket` where none may be placed: the next to unlock, or to
    /// [`serve`](Self::serve), does.
    #[inline]
    pub fn leave(&self, ticket: u64) {
        // ORDERING: Relaxed: the thread that gets it served is notified by means that order this.
        self.wanted.fetch_max(ticket, Ordering::Relaxed);
    }

    /// Places the markers that were asked for while the lock was held.
    #[inline]
    pub fn serve(&self, cx: &S::Context) {
        while let Some(wanted) = self.unserved() {
            if !self.serve_one(cx, wanted) {
                return;
            }
        }
    }

    /// The ticket that needs a marker.
    #[inline]
    fn unserved(&self) -> Option<u64> {
        fence(Ordering::SeqCst);
        // ORDERING: Relaxed, ordered by the fences here and in `want`.
        let wanted = self.wanted.load(Ordering::Relaxed);
        (wanted != 0 && !self.is_marked(wanted)).then_some(wanted)
    }

    /// Whether to look again.
    #[inline(never)]
    fn serve_one(&self, cx: &S::Context, wanted: u64) -> bool {
        let Some(guard) = self.state.try_lock() else {
            return false; // the holder serves it after it unlocks
        };
        match self.locked(guard).mark_tail(cx) {
            None => {
                // The driver refused: a later submission or the loss of the device serves it.
                // ORDERING: Relaxed, as above.
                let (relaxed, none) = (Ordering::Relaxed, 0);
                let _ = self.wanted.compare_exchange(wanted, none, relaxed, relaxed);
                true
            }
            // If it is less, the ticket is not issued yet. All issued tickets have a marker: nothing is left to serve
            // at the unlock.
            Some(tail) => tail >= wanted,
        }
    }

    #[inline]
    fn locked<'a>(&'a self, state: MutexGuard<'a, S>) -> Locked<'a, S> {
        Locked { state, marked: &self.marked }
    }
}

/// The lock, held.
pub struct Locked<'a, S> {
    /// What the lock protects.
    pub state: MutexGuard<'a, S>,
    marked: &'a AtomicU64,
}

impl<S: Markable> Locked<'_, S> {
    /// Places a marker at the tail, unless there is one or it is complete, and publishes it; returns the ticket that it
    /// credits, `None` if the driver refused.
    #[inline]
    pub fn mark_tail(&mut self, cx: &S::Context) -> Option<u64> {
        let timeline = S::timeline(cx);
        let tail = timeline.submitted();
        if self.is_marked(tail) {
            return Some(tail);
        }
        if !timeline.is_complete(tail) && !self.state.mark_tail(cx, tail) {
            return None;
        }
        self.publish_mark(tail);
        Some(tail)
    }

    /// Publishes a marker that was already placed at or behind `ticket`.
    #[inline]
    pub fn publish_mark(&mut self, ticket: u64) {
        // ORDERING: Release pairs with `is_marked`; only the lock's holder writes.
        self.marked.store(ticket, Ordering::Release);
    }

    /// Whether a marker is at or behind that ticket.
    #[inline]
    pub fn is_marked(&self, ticket: u64) -> bool {
        // ORDERING: Relaxed: only the lock's holder, this thread, writes.
        self.marked.load(Ordering::Relaxed) >= ticket
    }
}
