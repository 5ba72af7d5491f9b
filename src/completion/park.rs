//! When the poller may sleep, and who must wake it (pure).
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | `RUNNING` | sweeping; will look at everything once more before it sleeps | the poller |
//! | `PARKING` | has announced that it will sleep and is looking once more | the poller, or `notify_before` |
//! | `PARKED` | asleep until `until`, or about to be | `notify_before`, or the poller after its time-out |
//!
//! A registrant stores its waker and when it wants to be looked after, fences, and calls
//! [`notify_before`](ParkState::notify_before). The poller announces `PARKING`, fences, scans,
//! writes down until when it sleeps, and sleeps only if nobody came in between. Who is content with
//! the end of that sleep lets it sleep.
//!
//! # Invariants
//! 1. A waker stored before `notify_before(due)` is seen by a scan, or the poller is woken, or
//!    sleeps until `due` at the latest (`a_registration_is_never_slept_over`).
#![forbid(unsafe_code)]

use crate::sync::{AtomicU8, AtomicU64, Ordering, fence};

const RUNNING: u8 = 0;
const PARKING: u8 = 1;
const PARKED: u8 = 2;

#[derive(Debug)]
pub(crate) struct ParkState {
    state: AtomicU8,
    /// When the sleep ends.
    until: AtomicU64,
}

impl ParkState {
    pub(crate) fn new() -> Self {
        ParkState { state: AtomicU8::new(RUNNING), until: AtomicU64::new(0) }
    }

    /// Poller: announces that it will sleep. It must scan everything after this.
    pub(crate) fn begin(&self) {
        self.state.store(PARKING, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Poller: after the scan. True: sleep now, until `until` at the latest. False: somebody came,
    /// scan again.
    #[must_use]
    pub(crate) fn commit(&self, until: u64) -> bool {
        self.until.store(until, Ordering::SeqCst);
        let parked =
            self.state.compare_exchange(PARKING, PARKED, Ordering::SeqCst, Ordering::SeqCst);
        parked.is_ok()
    }

    /// Poller: awake again, or it found something to do while parking.
    pub(crate) fn resume(&self) {
        self.state.store(RUNNING, Ordering::SeqCst);
    }

    /// Anybody, after storing what the poller should see at `due`, at the latest; 0: at once. True:
    /// the poller sleeps for longer and the caller must unpark its thread.
    #[must_use]
    pub(crate) fn notify_before(&self, due: u64) -> bool {
        fence(Ordering::SeqCst);
        match self.state.load(Ordering::SeqCst) {
            RUNNING => false,
            // Read after the state: it belongs to this sleep or a later one, and before each the
            // poller scanned.
            PARKED if self.until.load(Ordering::SeqCst) <= due => false,
            _ => self.state.swap(RUNNING, Ordering::SeqCst) == PARKED,
        }
    }
}
