//! [`Quiet`]: NCCL frees communicators while no collective of the process is pending.
//!
//! It frees pinned memory. The driver then waits for the work of all devices, and keeps every other call out meanwhile: a collective that
//! waits for another rank of this process, which is just being launched, would never end. (On two H100s in one process this happened in 4 of
//! 27 runs of a test that ended one communicator and launched graphs of another.)
//!
//! | | waits for |
//! |---|---|
//! | freeing | everything that is pending; not for others that are freed: NCCL's ranks of one process wait for one another there |
//! | what becomes pending, of several ranks of the process | what is freed, if it was begun before; at most a limit, as NCCL may never return |
//!
//! # Invariants
//! 1. While one is freed, nothing has passed that became pending before it was freed (`what_passes_is_not_beside_a_free`).
//! 2. Whoever waits is woken (the same; loom finds who sleeps for ever).
#![forbid(unsafe_code)]

use std::sync::PoisonError;
use std::time::Duration;

use crate::sync::{Condvar, Mutex, MutexGuard};

pub(crate) struct Quiet {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// What is pending.
    pending: usize,
    /// What is being freed.
    freeing: usize,
    /// The process ends: nothing is freed any more.
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

    /// Something becomes pending. Does not wait: before it goes on it [passes](Self::pass).
    pub(crate) fn begin(&self) {
        self.lock().pending += 1;
    }

    /// It is pending no more.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.pending -= 1;
        if state.pending == 0 {
            self.changed.notify_all();
        }
    }

    /// Waits until nothing is freed. What takes longer than the limit is not waited for by others either.
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
        // Unless somebody has given up waiting for it.
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
