//! [`Attempt`]: this process's attempt to meet others. An attempt that was given up, because its future was dropped, ends a moment later: the next
//! one at that address begins then, or it would find its own ranks taken, or the address in use.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::hello::Tag;
use super::{Meeting, NAP};
use crate::patience::Patience;
use gpu_await::sibling::PerProcess;

static ATTEMPTS: PerProcess<Mutex<Vec<Known>>> = PerProcess::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(0);

struct Known {
    number: u64,
    place: (String, Tag),
    patience: Patience,
}

/// An attempt that has not ended.
pub(super) struct Attempt(u64);

impl Attempt {
    /// Blocks while an attempt at that place that was given up is still running.
    pub(super) fn begin(meeting: &Meeting) -> Attempt {
        // ORDERING: Relaxed: each gets a different number.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (place, patience) = ((meeting.address.clone(), meeting.tag()), &meeting.patience);
        loop {
            let mut known = ATTEMPTS.get().lock();
            let is_ending = |other: &Known| other.place == place && !other.patience.is_wanted();
            if !known.iter().any(is_ending) || patience.is_over() {
                known.push(Known { number, place, patience: patience.clone() });
                return Attempt(number);
            }
            drop(known);
            std::thread::sleep(NAP);
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        ATTEMPTS.get().lock().retain(|known| known.number != self.0);
    }
}
