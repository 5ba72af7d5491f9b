//! Drills: the device fails on purpose, so that what a service does then can be rehearsed.
//!
//! `--lose-device-after N` and `--stall-health-after N` open a host device that fails in that way when `N`
//! requests were answered. They need the feature `drill` (`cargo run --release -p gpu-await-example-server --features drill`), which turns
//! `test-util` on; a service of yours has no use for this file outside of drills and tests.
#![forbid(unsafe_code)]

#[cfg(not(feature = "drill"))]
pub(crate) use left_out::Drill;
#[cfg(feature = "drill")]
pub(crate) use rehearsed::Drill;

#[cfg(feature = "drill")]
mod rehearsed {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use gpu_await::testing::{self, FaultHandle, Gate};
    use gpu_await::{Device, Stream};

    use crate::options::Options;

    const STALL: Duration = Duration::from_secs(3);

    /// Fails its device after so many answers.
    pub(crate) struct Drill {
        faults: FaultHandle,
        loses: bool,
        left: AtomicU64,
        gate: Mutex<Option<Gate>>,
    }

    impl Drill {
        /// A host device, and the drill on it, if one is asked for.
        pub(crate) fn open(options: &Options) -> Result<Option<(Device, Drill)>, &'static str> {
            let Some(answers) = options.lose_device_after.or(options.stall_health_after) else {
                return Ok(None);
            };
            let (faults, handle) = testing::faults();
            let drill = Drill {
                faults: handle,
                loses: options.lose_device_after.is_some(),
                left: AtomicU64::new(answers),
                gate: Mutex::new(None),
            };
            Ok(Some((testing::host_with(faults), drill)))
        }

        /// Counts an answer.
        pub(crate) fn answered(&self, health: &Stream) {
            if self.left.fetch_sub(1, Ordering::SeqCst) != 1 {
            } else if self.loses {
                self.faults.lose_device("the drill of --lose-device-after");
            } else if let (Ok(mut gate), Ok(closed)) =
                (self.gate.lock(), Gate::close_for(health, STALL))
            {
                *gate = Some(closed);
            }
        }
    }
}

#[cfg(not(feature = "drill"))]
mod left_out {
    use gpu_await::{Device, Stream};

    use crate::options::Options;

    /// There is none in this program.
    pub(crate) enum Drill {}

    impl Drill {
        /// # Errors
        /// One is asked for: it is left out.
        pub(crate) fn open(options: &Options) -> Result<Option<(Device, Drill)>, &'static str> {
            match options.lose_device_after.or(options.stall_health_after) {
                None => Ok(None),
                Some(_) => Err("drills need a server that was built with the feature `drill`"),
            }
        }

        /// Is never called.
        pub(crate) fn answered(&self, _health: &Stream) {
            match *self {}
        }
    }
}
