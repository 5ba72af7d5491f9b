//! When the poller may sleep (pure).
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | `RUNNING` | sweeping; will look at everything once more before it sleeps | the poller |
//! | `PARKING` | has announced that it will sleep and is looking once more | the poller, or `notify` |
//! | `PARKED` | asleep or about to be | `notify`, or the poller after its time-out |
//!
//! A registrant stores its waker, fences, and calls [`notify`](ParkState::notify). The poller
//! announces `PARKING`, fences, scans, and sleeps only if nobody came in between.
//!
//! # Invariants
//! 1. A waker stored before `notify` is seen by a scan, or the poller is woken
//!    (`a_registration_is_never_slept_over`).
#![forbid(unsafe_code)]

use crate::sync::{AtomicU8, Ordering, fence};

const RUNNING: u8 = 0;
const PARKING: u8 = 1;
const PARKED: u8 = 2;

#[derive(Debug)]
pub(crate) struct ParkState(AtomicU8);

impl ParkState {
    pub(crate) fn new() -> Self {
        ParkState(AtomicU8::new(RUNNING))
    }

    /// Poller: announces that it will sleep. It must scan everything after this.
    pub(crate) fn begin(&self) {
        self.0.store(PARKING, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Poller: after the scan. True: sleep now. False: somebody came, scan again.
    #[must_use]
    pub(crate) fn commit(&self) -> bool {
        self.0.compare_exchange(PARKING, PARKED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Poller: awake again, or it found something to do while parking.
    pub(crate) fn resume(&self) {
        self.0.store(RUNNING, Ordering::SeqCst);
    }

    /// Anybody, after storing what the poller should see. True: the poller sleeps and the caller
    /// must unpark its thread.
    #[must_use]
    pub(crate) fn notify(&self) -> bool {
        fence(Ordering::SeqCst);
        if self.0.load(Ordering::SeqCst) == RUNNING {
            return false;
        }
        self.0.swap(RUNNING, Ordering::SeqCst) == PARKED
    }
}
