//! A drill: the device is lost on purpose, so that what a service does then can be rehearsed.
//!
//! `--lose-device-after N` opens a host device whose loss can be called for, and calls for it when `N`
//! requests were answered. It needs the feature `test-util`; a service of yours has no use for this
//! file outside of drills and tests.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use gpu_await::Device;
use gpu_await::testing::{self, FaultHandle};

/// Loses its device after so many answers.
pub(crate) struct Drill {
    faults: FaultHandle,
    left: AtomicU64,
}

impl Drill {
    /// A host device, and the drill on it.
    pub(crate) fn open(answers: u64) -> (Device, Drill) {
        let (faults, handle) = testing::faults();
        (testing::host_with(faults), Drill { faults: handle, left: AtomicU64::new(answers) })
    }

    /// Counts an answer.
    pub(crate) fn answered(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.faults.lose_device("the drill of --lose-device-after");
        }
    }
}
