//! Calls that take the driver's lock for themselves, and those that give way to them.
//!
//! Seen on an H200 (driver 580): `cuStreamCreateWithPriority` waits for a lock that every launch shares, and beside threads that
//! launch without a pause it is never free: 16 of them kept a stream from being made for 240 s. So what this crate puts on
//! streams waits meanwhile, for a while: until the call returned, or [`LIMIT`] is over, as it may wait for more than
//! launches, and threads that are not ours give way to nobody.
//!
//! | [`WAITING`] | a launch, copy, fill or record |
//! |---|---|
//! | 0 | goes on |
//! | more | waits until it is 0, at most for [`LIMIT`] |
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Exclusive calls that did not return.
static WAITING: AtomicU32 = AtomicU32::new(0);

/// Longer than a call needs that gets the lock.
const LIMIT: Duration = Duration::from_micros(500);

/// A call that wants the lock for itself; dropped when it returned.
pub(super) struct Exclusive(());

impl Exclusive {
    pub(super) fn begin() -> Self {
        // ORDERING: Relaxed, here and below: a hint to others, who are early or late.
        WAITING.fetch_add(1, Ordering::Relaxed);
        Exclusive(())
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Lets those in front that want the lock for themselves.
#[inline]
pub(super) fn give_way() {
    if WAITING.load(Ordering::Relaxed) > 0 {
        wait();
    }
}

#[cold]
fn wait() {
    let end = Instant::now() + LIMIT;
    while WAITING.load(Ordering::Relaxed) > 0 && Instant::now() < end {
        std::thread::yield_now();
    }
}
