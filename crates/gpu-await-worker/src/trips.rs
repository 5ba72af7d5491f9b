//! Panics and delays that tests inject into the code that looks after workers.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

/// Where a panic is injected.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trip {
    Turn = 1,
    Lose = 2,
}

/// Panics at one of these places, once.
#[derive(Debug, Default)]
pub(crate) struct Trips {
    armed: AtomicU8,
    /// A start waits.
    pub(crate) is_slow: AtomicBool,
    /// One waits now.
    pub(crate) waits: AtomicBool,
}

impl Trips {
    /// Waits in the start of a process.
    pub(crate) fn slow(&self) {
        while self.is_slow.load(Ordering::SeqCst) {
            self.waits.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn trip(&self, at: Trip) {
        let armed = self.armed.compare_exchange(at as u8, 0, Ordering::SeqCst, Ordering::SeqCst);
        assert!(armed.is_err(), "injected");
    }

    pub(crate) fn arm(&self, at: Trip) {
        self.armed.store(at as u8, Ordering::SeqCst);
    }
}

/// Between two workers' turns.
pub(crate) static BETWEEN: AtomicBool = AtomicBool::new(false);

pub(crate) fn trip() {
    assert!(!BETWEEN.swap(false, Ordering::SeqCst), "injected between");
}

/// The thread that unmapped a slab of [`RARE`] bytes last.
pub(crate) static UNMAPPED: gpu_await_protocol::lock::Mutex<Option<String>> =
    gpu_await_protocol::lock::Mutex::new(None);

/// The slab of responses that one test has.
pub(crate) const RARE: usize = 29 * 4096;

pub(crate) fn unmaps(bytes: usize) {
    if bytes == RARE {
        *UNMAPPED.lock() = std::thread::current().name().map(str::to_owned);
    }
}
