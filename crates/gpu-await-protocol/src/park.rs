//! When the poller may sleep, and who must wake it (pure).
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | `RUNNING` | sweeping; will look at everything once more before it sleeps | the poller |
//! | `PARKING` | has announced that it will sleep and is looking once more | the poller, or `notify_before` |
//! | `PARKED` | asleep until `until`, or about to be | `notify_before`, or the poller after its time-out |
//!
//! A registrant stores its waker and its due time, fences, and calls [`notify_before`](ParkState::notify_before). The poller announces
//! `PARKING`, fences, looks once more, stores the end of its sleep, and sleeps only if no registrant called meanwhile. A registrant whose
//! due time is at or after that end does not call.
//!
//! # Invariants
//! 1. A waker stored before `notify_before(due)` is seen by a scan, or the poller is woken, or sleeps until `due` at the latest
//!    (`a_registration_is_never_slept_over`).
#![forbid(unsafe_code)]

use crate::sync::{AtomicU8, AtomicU64, Ordering, Plain, fence};

const RUNNING: u8 = 0;
const PARKING: u8 = 1;
const PARKED: u8 = 2;

/// The poller's work between two sleeps.
pub trait Rounds {
    /// Looks at all that is due; true if anything moved, so that it is worth looking again.
    fn round(&mut self) -> bool;
    /// When to look next, after a round in which nothing moved.
    fn sleep_until(&mut self) -> u64;
}

/// Items handed to a poller, until it has ended.
#[derive(Debug)]
pub struct Inbox<T> {
    /// `None` once items are no longer taken.
    items: Plain<Option<Vec<T>>>,
}

impl<T> Inbox<T> {
    /// An empty inbox.
    #[inline]
    pub fn new() -> Self {
        Inbox { items: Plain::new(Some(Vec::new())) }
    }

    /// Hands an item over; returns it if it will not be taken.
    #[inline]
    pub fn put(&self, item: T) -> Result<(), T> {
        match &mut *self.items.lock() {
            Some(items) => {
                items.push(item);
                Ok(())
            }
            None => Err(item),
        }
    }

    /// Moves all to `into`; true if there were any.
    #[inline]
    pub fn take(&self, into: &mut Vec<T>) -> bool {
        let mut items = self.items.lock();
        let Some(items) = &mut *items else { return false };
        let any = !items.is_empty();
        into.append(items);
        any
    }

    /// Takes no more items; returns the remaining ones.
    #[inline]
    pub fn close(&self) -> Vec<T> {
        self.items.lock().take().unwrap_or_default()
    }
}

/// Whether the poller sleeps, and until when.
#[derive(Debug)]
pub struct ParkState {
    state: AtomicU8,
    /// When the sleep ends.
    until: AtomicU64,
}

impl ParkState {
    /// The state of a running poller.
    #[inline]
    pub fn new() -> Self {
        ParkState { state: AtomicU8::new(RUNNING), until: AtomicU64::new(0) }
    }

    /// Poller: until when to sleep; `None`: it looks again.
    #[inline]
    pub fn look(&self, rounds: &mut impl Rounds) -> Option<u64> {
        if rounds.round() {
            return None;
        }
        // The poller announces its sleep, then looks once more: a registrant that read the state before
        // the announcement did not call, but has stored its waker.
        // ORDERING: Relaxed, before the fence: against `notify_before`.
        self.state.store(PARKING, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if rounds.round() {
            self.resume();
            return None;
        }
        Some(rounds.sleep_until())
    }

    /// Poller: after [`look`](Self::look). True: sleep now, until `until` at the latest. False: a registrant
    /// called, look again.
    #[must_use]
    #[inline]
    pub fn commit(&self, until: u64) -> bool {
        // ORDERING: Relaxed: published by the exchange.
        self.until.store(until, Ordering::Relaxed);
        // ORDERING: Release pairs with `notify_before`, which reads `until` behind this.
        let (set, fail) = (Ordering::Release, Ordering::Relaxed);
        self.state.compare_exchange(PARKING, PARKED, set, fail).is_ok()
    }

    /// Poller: awake again, or it found something to do while parking.
    #[inline]
    pub fn resume(&self) {
        // ORDERING: Relaxed: it looks before it announces the next sleep, behind a fence.
        self.state.store(RUNNING, Ordering::Relaxed);
    }

    /// Any thread, after storing what the poller should see at `due`, at the latest; 0: at once. True: the
    /// poller sleeps for longer and the caller must unpark its thread.
    #[must_use]
    #[inline]
    pub fn notify_before(&self, due: u64) -> bool {
        fence(Ordering::SeqCst);
        // ORDERING: Acquire pairs with `commit`.
        match self.state.load(Ordering::Acquire) {
            RUNNING => false,
            // Read after the state: it belongs to this sleep or a later one, and before each the
            // poller scanned.
            // ORDERING: Relaxed, as said.
            PARKED if self.until.load(Ordering::Relaxed) <= due => false,
            // ORDERING: Relaxed: behind the fence; the poller looks again or is unparked.
            _ => self.state.swap(RUNNING, Ordering::Relaxed) == PARKED,
        }
    }
}
