//! The end of a device, by loss or close: which waiters it wakes.
//!
//! | waiter | woken by |
//! |---|---|
//! | a `Loss` future, which stays pending and registered after a close | both |
//! | a stream pool with pending acquires | both |
//! | a future that waits for memory | both |
//! | a future that waits for an operation | the loss |
//!
//! # Invariants
//! 1. A key stays its owner's until it is forgotten or the device is lost: the close takes wakers and leaves the keys
//!    (`a_close_ends_waits_for_held_permits`).
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

use super::{DeviceStream, Engine};
use crate::error::Error;
use crate::thread::contain;

impl<S: DeviceStream> Engine<S> {
    /// Refuses work from now on, drops the streams' caches, and wakes the waiters for the loss, which keep
    /// their keys, and those for memory. The caller holds no lock.
    pub(crate) fn close(self: &Arc<Self>) {
        // ORDERING: Relaxed, as below. A waiter that registers too late to be woken takes the lock after
        // this, and sees the store.
        self.closed.store(true, Ordering::Relaxed);
        let wakers: Vec<Waker> =
            self.mourners.lock().iter_mut().filter_map(|(_, waker)| waker.take()).collect();
        wakers.into_iter().for_each(contain::wake);
        self.empty_caches();
        // As if memory had moved: the waiters look, and see the close.
        self.account.lock().release(0);
        self.wake_reclaimers();
        self.wake_reservers();
    }

    /// Wakes the futures that wait for a reservation, which look and see the loss or the close.
    fn wake_reservers(&self) {
        let wakers = self.account.lock().reservations.take_wakers();
        wakers.into_iter().for_each(contain::wake);
    }

    /// Resolves with the loss of the device. `key` is the future's, for [`forget_lost`](Self::forget_lost).
    /// The close wakes the waker as well, which is not the loss: see [`check_open`](Self::check_open).
    pub(crate) fn poll_lost(&self, key: &mut Option<usize>, waker: &Waker) -> Option<Error> {
        if self.state.lost().is_none() {
            // Cloning and dropping a waker is foreign code: both outside the lock.
            let fresh = waker.clone();
            let (stale, is_first) = {
                let mut mourners = self.mourners.lock();
                match key.and_then(|key| mourners.get_mut(key)) {
                    Some(known) => (known.replace(fresh), false),
                    None => {
                        *key = Some(mourners.insert(Some(fresh)));
                        (None, mourners.len() == 1)
                    }
                }
            };
            contain::let_go(stale);
            if is_first {
                // From now on the poller checks an idle device as well.
                self.attention.call();
            }
        }
        // Read again: `lose` sets the loss before it takes the mourners.
        self.state.lost().cloned()
    }

    /// Drops a future's interest in the loss.
    pub(crate) fn forget_lost(&self, key: Option<usize>) {
        let waker = key.and_then(|key| self.mourners.lock().try_remove(key)).flatten();
        contain::let_go(waker);
    }

    /// Whether a future waits for the loss of the device, or for a reservation, which an idle device keeps waiting as well.
    pub(crate) fn is_watched(&self) -> bool {
        !self.mourners.lock().is_empty() || self.account.lock().reservations.waiting() > 0
    }

    /// Wakes every waiter of a lost device and quarantines lent memory; later calls do nothing. The caller
    /// holds no lock.
    pub(crate) fn mourn(&self) {
        if !self.state.tells_of_loss() {
            return;
        }
        let Some(lost) = self.state.lost() else { return };
        // A subscriber that panics must not keep the loss from the waiters.
        if lost.is_device_lost() {
            contain::log(|| {
                tracing::error!(device = %self.label(), error = %lost, "device lost");
            });
        }
        let mourners = std::mem::take(&mut *self.mourners.lock());
        mourners.into_iter().filter_map(|(_, waker)| waker).for_each(contain::wake);
        self.reclaimers.take_older(u64::MAX).into_iter().for_each(contain::wake);
        self.wake_reservers();
        for stream in self.streams() {
            stream.mourn();
        }
    }
}
