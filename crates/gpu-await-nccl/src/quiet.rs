//! [`Quiet`]: NCCL frees communicators while no collective of the process is pending.
//!
//! Freeing releases pinned memory. The driver then waits for the work of all devices, and blocks every other call meanwhile: a collective that
//! waits for another rank of this process, which is just being launched, would never end. (On two H100s in one process this happened in 4 of
//! 27 runs of a test that ended one communicator and launched graphs of another.)
//!
//! | | waits for |
//! |---|---|
//! | freeing | everything that is pending, but not for other frees: NCCL's ranks of one process wait for one another there |
//! | work of several ranks of the process that becomes pending | frees that began before; at most a limit, as NCCL may never return |
//!
//! # Invariants
//! 1. During a free, nothing has passed that became pending before that free (`what_passes_is_not_beside_a_free`).
//! 2. Every waiter is woken (the same test; loom finds one that sleeps forever).
#![forbid(unsafe_code)]

use std::sync::PoisonError;
use std::time::Duration;

use crate::sync::{Condvar, Mutex, MutexGuard};

pub(crate) struct Quiet {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// How much work is pending.
    pending: usize,
    /// How many frees are running.
    freeing: usize,
    /// The process is ending: nothing more is freed.
    is_over: bool,
}

impl Quiet {
    pub(crate) fn new() -> Quiet {
        let state = State { pending: 0, freeing: 0, is_over: false };
        Quiet { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Some work becomes pending. Does not wait: before the work goes on it [passes](Self::pass).
    pub(crate) fn begin(&self) {
        self.lock().pending += 1;
    }

    /// It is no longer pending.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.pending -= 1;
        if state.pending == 0 {
            self.changed.notify_all();
        }
    }

    /// Waits until nothing is being freed. A free that exceeds the limit is no longer waited for by others either.
    pub(crate) fn pass(&self, limit: Duration) {
        let mut state = self.lock();
        while state.freeing > 0 {
            let waited = self.changed.wait_timeout(state, limit);
            let (next, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = next;
            if timeout.timed_out() {
                state.freeing = 0;
                self.changed.notify_all();
            }
        }
    }

    /// Runs `free` when nothing is pending; never if the process ends first.
    pub(crate) fn free(&self, free: impl FnOnce()) {
        let mut state = self.lock();
        while !state.is_over && state.pending > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.is_over {
            return;
        }
        state.freeing += 1;
        drop(state);
        free();
        let mut state = self.lock();
        // Unless a waiter has given up on it.
        state.freeing = state.freeing.saturating_sub(1);
        if state.freeing == 0 {
            self.changed.notify_all();
        }
    }

    /// The process ends.
    pub(crate) fn end_all(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }
}
