//! One sweep serves all: a try-lock whose loser is never forgotten (pure).
//!
//! Many tasks and the poller may want to query the driver about one stream at once; one does, the others move on. A loser sets `missed`,
//! because the holder may have queried before the loser's marker was placed; the holder reads it after it has unlocked, and sweeps again.
//!
//! # Invariants
//! 1. After `run` returned false, a whole sweep begins after that call began (`a_missed_sweep_is_made_up_for`).
#![forbid(unsafe_code)]

use crate::sync::{AtomicBool, Ordering};

/// Lets one thread sweep at a time.
#[derive(Debug)]
pub struct SweepGate {
    busy: AtomicBool,
    missed: AtomicBool,
}

impl SweepGate {
    /// A gate that no thread holds.
    #[inline]
    pub fn new() -> Self {
        SweepGate { busy: AtomicBool::new(false), missed: AtomicBool::new(false) }
    }

    /// Runs `sweep` unless another thread does; false if another thread will.
    ///
    /// ORDERING: SeqCst on both words: the loser stores `missed` after it saw `busy`, the holder
    /// loads `missed` after it cleared `busy`; one of the two must see the other's store.
    #[inline]
    pub fn run(&self, mut sweep: impl FnMut()) -> bool {
        let mut swept = false;
        loop {
            if self.busy.swap(true, Ordering::SeqCst) {
                self.missed.store(true, Ordering::SeqCst);
                // The holder may have left between the two lines above: then nothing else looks.
                if self.busy.load(Ordering::SeqCst) {
                    return swept;
                }
                continue;
            }
            // Read, not only written: the thread that set `missed` relies on this sweep, which must see what
            // that thread knew.
            self.missed.swap(false, Ordering::SeqCst);
            let unlock = Unlock(&self.busy);
            sweep();
            drop(unlock);
            swept = true;
            if !self.missed.load(Ordering::SeqCst) {
                return true;
            }
        }
    }
}

/// Unlocks also when the sweep unwinds.
struct Unlock<'a>(&'a AtomicBool);

impl Drop for Unlock<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
