//! Calls that take the driver's lock exclusively, and the calls that yield to them.
//!
//! On an H200 (driver 580), `cuStreamCreateWithPriority` waits for a lock that every launch shares and that is never free beside threads
//! that launch without a pause: 16 such threads delayed the creation of a stream by 240 s. So the crate's own launches and copies wait
//! while such a call is pending. They wait until it returns or [`LIMIT`] has passed, since it may be waiting for more than launches, and
//! other libraries' threads do not yield.
//!
//! | [`WAITING`] | a launch, copy, fill or record |
//! |---|---|
//! | 0 | proceeds |
//! | more | waits until it is 0, at most for [`LIMIT`] |
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::thread::relax::Relax;

/// Exclusive calls that have not returned.
static WAITING: AtomicU32 = AtomicU32::new(0);

/// Longer than a call takes once it has the lock.
const LIMIT: Duration = Duration::from_micros(500);

/// A call that takes the lock exclusively; dropped when the call has returned.
pub(super) struct Exclusive(());

impl Exclusive {
    pub(super) fn begin() -> Self {
        // ORDERING: Relaxed, here and below: a hint, which other threads may see early or late.
        WAITING.fetch_add(1, Ordering::Relaxed);
        Exclusive(())
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits while calls that take the lock exclusively are pending.
#[inline]
pub(super) fn give_way() {
    if WAITING.load(Ordering::Relaxed) > 0 {
        wait();
    }
}

#[cold]
fn wait() {
    let (end, mut relax) = (Instant::now() + LIMIT, Relax::default());
    while WAITING.load(Ordering::Relaxed) > 0 && Instant::now() < end {
        relax.pause();
    }
}
