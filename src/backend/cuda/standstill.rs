//! Calls that wait for everything that runs on the GPU, and a lock that keeps test gates out of their way.
//!
//! On an H200 (driver 580), `cuModuleLoadDataEx`, `cuModuleUnload` and `cuMemHostUnregister` return only when every running kernel of the
//! context has ended, and while one of them waits, *launches of other threads block too*. So they are made off the executor and never by
//! the poller, and those that can be deferred are deferred until the device is idle.
//!
//! `cuGraphInstantiate` does the same when it needs more memory than all graphs together have ever taken: it was seen twice before there
//! were 200 graphs of ten launches, and not again in that process. It is still called by the launch that needs it: moving it to another
//! thread would only delay that launch too.
//!
//! A test that holds a stream with a gate while another test loads a kernel would deadlock in the driver. With `test-util`, gates and these
//! calls exclude each other. So do gates of different devices: a GPU has few queues (four for downloads, eight for kernels, unless
//! `CUDA_DEVICE_MAX_CONNECTIONS` raises it), and that many streams held up before a download or a kernel keep those of every other stream
//! from starting.
#![forbid(unsafe_code)]

#[cfg(feature = "test-util")]
mod exclusion {
    use std::time::{Duration, Instant};

    use parking_lot::{Condvar, Mutex};

    /// Closed gates, and calls under way that wait for the device.
    struct Gates {
        gates: u32,
        /// Whose gates they are, while there are any.
        owner: u64,
        calls: u32,
    }

    static STATE: Mutex<Gates> = Mutex::new(Gates { gates: 0, owner: 0, calls: 0 });
    static CHANGED: Condvar = Condvar::new();
    /// Longer than any gate stays closed: a thread that has waited for so long proceeds anyway.
    const LIMIT: Duration = Duration::from_secs(30);

    /// A call that waits for the device; dropped when it returned.
    pub(crate) struct Standstill(());

    impl Standstill {
        pub(crate) fn begin() -> Self {
            let mut state = STATE.lock();
            let end = Instant::now() + LIMIT;
            while state.gates > 0 && !CHANGED.wait_until(&mut state, end).timed_out() {}
            state.calls += 1;
            Standstill(())
        }
    }

    impl Drop for Standstill {
        fn drop(&mut self) {
            STATE.lock().calls -= 1;
            CHANGED.notify_all();
        }
    }

    /// A gate that is closed; dropped when it was opened.
    #[derive(Debug)]
    pub(crate) struct Closed(());

    impl Closed {
        /// A gate of the device `owner`.
        pub(crate) fn begin(owner: u64) -> Self {
            let mut state = STATE.lock();
            let end = Instant::now() + LIMIT;
            while (state.calls > 0 || (state.gates > 0 && state.owner != owner))
                && !CHANGED.wait_until(&mut state, end).timed_out()
            {}
            state.gates += 1;
            state.owner = owner;
            Closed(())
        }
    }

    impl Drop for Closed {
        fn drop(&mut self) {
            STATE.lock().gates -= 1;
            CHANGED.notify_all();
        }
    }
}

#[cfg(feature = "test-util")]
pub(crate) use exclusion::{Closed, Standstill};

/// A call that waits for the device.
#[cfg(not(feature = "test-util"))]
pub(crate) struct Standstill(());

#[cfg(not(feature = "test-util"))]
impl Standstill {
    pub(crate) fn begin() -> Self {
        Standstill(())
    }
}
