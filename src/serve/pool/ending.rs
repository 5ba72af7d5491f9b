//! How a pool learns that a device was lost or closed, or that a stream waits for a lost device.
#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};
use std::task::{Wake, Waker};

use super::{PoolCore, PoolState};
use crate::error::Error;
use crate::runtime::Engine;
use crate::thread::contain;
use gpu_await_protocol::admission::Wakers;

/// Wakes a pool with waiting requests when a device was lost or closed.
struct Ending(Weak<PoolCore>);

impl PoolCore {
    fn engine(&self, slot: usize) -> &Arc<Engine> {
        &self.slots[slot].engine
    }

    /// Removes the slots of devices that take no more work. Returns the wakers, to be woken outside
    /// the lock.
    pub(super) fn look_after(&self, book: &mut PoolState) -> Wakers {
        let mut wakers = Wakers::new();
        for &first in &self.devices {
            let engine = self.engine(first);
            let Err(error) = engine.check_open() else { continue };
            let slots =
                (first..self.slots.len()).filter(|at| self.engine(*at).state.id == engine.state.id);
            for slot in slots {
                if book.admission.is_usable(slot) {
                    book.gone = Some(error.clone());
                    wakers.extend(book.admission.lose(slot));
                }
            }
        }
        wakers
    }

    /// Removes a slot whose stream is stuck. Returns the wakers, to be woken outside the lock.
    pub(super) fn lose(&self, slot: usize, error: Error) -> Wakers {
        let mut book = self.book.lock();
        book.gone = Some(error);
        book.admission.lose(slot)
    }

    /// Registers the pool's wakers with the devices. True if they were not registered before: the caller then checks the devices, since one that
    /// ended earlier does not wake the pool.
    pub(super) fn watch(self: &Arc<Self>) -> bool {
        let mut is_new = false;
        self.watches.get_or_init(|| {
            is_new = true;
            let waker = Waker::from(Arc::new(Ending(Arc::downgrade(self))));
            let register = |&slot: &usize| {
                let mut key = None;
                self.engine(slot).ending.poll_lost(&mut key, &waker);
                key
            };
            self.devices.iter().map(register).collect()
        });
        is_new
    }
}

impl Drop for PoolCore {
    fn drop(&mut self) {
        for (slot, key) in self.devices.iter().zip(self.watches.take().into_iter().flatten()) {
            self.engine(*slot).ending.forget_lost(key);
        }
    }
}

impl Wake for Ending {
    fn wake(self: Arc<Self>) {
        let Some(shared) = self.0.upgrade() else { return };
        let wakers = shared.look_after(&mut shared.book.lock());
        wakers.into_iter().for_each(contain::wake);
    }
}
