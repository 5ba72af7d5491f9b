//! Calls that wait for everything that runs on the GPU, and a lock that keeps test gates out of their way.
//!
//! On an H200 (driver 580), `cuModuleLoadDataEx`, `cuModuleUnload` and `cuMemHostUnregister` return only when every running kernel of the
//! context has ended, and while one of them waits, *launches of other threads block too*. So they are made off the executor and never by
//! the poller, and deferred until the device is idle where possible.
//!
//! `cuGraphInstantiate` does the same when it needs more memory than all graphs together have ever taken: it was seen twice before there
//! were 200 graphs of ten launches, and not again in that process. It is still called by the launch that needs it: moving it to another
//! thread would only delay that launch too.
//!
//! A test that holds a stream with a gate while another test loads a kernel would deadlock in the driver. With `test-util`, gates and these
//! calls exclude each other. So do gates of different devices: a GPU has few queues (four for downloads, eight for kernels, unless
//! `CUDA_DEVICE_MAX_CONNECTIONS` raises it), and that many streams held up before a download or a kernel keep those of every other stream
//! from starting.
//!
//! # Invariants
//! 1. A gate past its own limit holds up nothing, even if nobody opens or drops it (`a_gate_past_its_limit_holds_up_nothing`).
#![forbid(unsafe_code)]

#[cfg(feature = "test-util")]
mod exclusion {
    use std::time::{Duration, Instant};

    use gpu_await_protocol::lock::{Condvar, Mutex, MutexGuard};

    /// Closed gates, and calls in progress that wait for the device.
    struct Gates {
        gates: Vec<KnownGate>,
        calls: u32,
        /// The number of the next gate.
        next: u64,
    }

    struct KnownGate {
        number: u64,
        owner: u64,
        is_open: Box<dyn Fn() -> bool + Send>,
    }

    static STATE: Mutex<Gates> = Mutex::new(Gates { gates: Vec::new(), calls: 0, next: 0 });
    static CHANGED: Condvar = Condvar::new();
    /// Longer than any gate stays closed: a thread that has waited this long proceeds anyway.
    const LIMIT: Duration = Duration::from_secs(30);
    /// How often a waiting thread checks the gates: one that opens by its own limit notifies nobody.
    const LOOK: Duration = Duration::from_millis(5);

    impl Gates {
        /// Whether a gate of a device other than `owner` is closed.
        fn has_closed(&mut self, owner: Option<u64>) -> bool {
            self.gates.retain(|gate| !(gate.is_open)());
            self.gates.iter().any(|gate| Some(gate.owner) != owner)
        }
    }

    fn wait_while(must_wait: impl Fn(&mut Gates) -> bool) -> MutexGuard<'static, Gates> {
        let (mut state, end) = (STATE.lock(), Instant::now() + LIMIT);
        while must_wait(&mut state) && Instant::now() < end {
            state = CHANGED.wait_for(state, LOOK);
        }
        state
    }

    /// A call that waits for the device; dropped when the call has returned.
    pub(crate) struct Standstill(());

    impl Standstill {
        pub(crate) fn begin() -> Self {
            wait_while(|state| state.has_closed(None)).calls += 1;
            Standstill(())
        }
    }

    impl Drop for Standstill {
        fn drop(&mut self) {
            STATE.lock().calls -= 1;
            CHANGED.notify_all();
        }
    }

    /// A closed gate; dropped when it has been opened.
    #[derive(Debug)]
    pub(crate) struct Closed(u64);

    impl Closed {
        /// A gate of the device `owner`. It may open before this is dropped, by its own limit: `is_open` is then true.
        pub(crate) fn begin(owner: u64, is_open: impl Fn() -> bool + Send + 'static) -> Self {
            let mut state = wait_while(|state| state.calls > 0 || state.has_closed(Some(owner)));
            let number = state.next;
            state.next += 1;
            state.gates.push(KnownGate { number, owner, is_open: Box::new(is_open) });
            Closed(number)
        }
    }

    impl Drop for Closed {
        fn drop(&mut self) {
            STATE.lock().gates.retain(|gate| gate.number != self.0);
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
