//! A drill: the device is lost on purpose, so that what a service does then can be rehearsed.
//!
//! `--lose-device-after N` opens a host device whose loss can be called for, and calls for it when `N`
//! requests were answered. It needs the feature `drill`, which turns `test-util` on; a service of yours
//! has no use for this file outside of drills and tests.
#![forbid(unsafe_code)]

#[cfg(not(feature = "drill"))]
pub(crate) use left_out::Drill;
#[cfg(feature = "drill")]
pub(crate) use rehearsed::Drill;

#[cfg(feature = "drill")]
mod rehearsed {
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
        pub(crate) fn open(answers: u64) -> Result<(Device, Drill), &'static str> {
            let (faults, handle) = testing::faults();
            let drill = Drill { faults: handle, left: AtomicU64::new(answers) };
            Ok((testing::host_with(faults), drill))
        }

        /// Counts an answer.
        pub(crate) fn answered(&self) {
            if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
                self.faults.lose_device("the drill of --lose-device-after");
            }
        }
    }
}

#[cfg(not(feature = "drill"))]
mod left_out {
    use gpu_await::Device;

    /// There is none in this program.
    pub(crate) enum Drill {}

    impl Drill {
        /// # Errors
        /// Always: it is left out.
        pub(crate) fn open(_answers: u64) -> Result<(Device, Drill), &'static str> {
            Err("`--lose-device-after` needs a server that was built with the feature `drill`")
        }

        /// Is never called.
        pub(crate) fn answered(&self) {
            match *self {}
        }
    }
}
