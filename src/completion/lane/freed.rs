//! Device memory that is given up in a stream's order.
//!
//! | it goes | when |
//! |---|---|
//! | to the stream's spares | it is small enough and there is room |
//! | from there to the stream's next allocation of about that size | |
//! | to the driver, behind everything on the stream | otherwise, where a driver call may be made now |
//! | to the driver, by whoever submits next, or the poller | otherwise |
//!
//! # Invariants
//! 1. Memory goes from one buffer to another only on its home stream, behind its last use
//!    (`what_is_freed_is_used_again_behind_its_last_use`).
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Lane;
use crate::backend::DevicePtr;
use crate::completion::spare;
use crate::thread_role::{self, Role};

impl Lane {
    /// Gives up memory behind everything submitted so far, which somebody else may use behind that;
    /// never blocks.
    pub(crate) fn free_in_order(self: &Arc<Self>, ptr: DevicePtr, bytes: u64) {
        let size = spare::rounded(bytes);
        if size.is_none_or(|size| self.spares.lock().put(size, ptr).is_err()) {
            self.give_back(ptr);
        }
    }

    /// Memory for so many bytes that the stream gave up, for what is submitted next; and how much the
    /// driver is to be asked for where there is none.
    pub(crate) fn take_spare(&self, bytes: u64) -> (Option<DevicePtr>, u64) {
        match spare::rounded(bytes).filter(|_| self.engine.options.spare_bytes > 0) {
            Some(size) => (self.spares.lock().take(size), size),
            None => (None, bytes),
        }
    }

    /// How much memory the stream keeps for itself.
    pub(crate) fn spare_bytes(&self) -> u64 {
        self.spares.lock().bytes()
    }

    /// Gives the memory back that the stream keeps for itself.
    pub(crate) fn give_back_spares(self: &Arc<Self>) {
        let spares = self.spares.lock().drain();
        // Asked behind the drain: whoever put them there had submitted their uses.
        let through = self.is_complete(self.submitted());
        for ptr in spares {
            if through { self.engine.free_spare(ptr) } else { self.give_back(ptr) }
        }
    }

    /// Frees memory behind everything submitted so far; never blocks.
    fn give_back(self: &Arc<Self>, ptr: DevicePtr) {
        let freed =
            thread_role::current() == Role::Free && self.try_with(|turn| turn.free(ptr)).is_some();
        if !freed {
            self.deferred.lock().push(ptr);
            // ORDERING: Relaxed: read by whoever submits next, or the poller, which is told below.
            self.has_deferred.store(true, Ordering::Relaxed);
            self.activate();
        }
    }
}
