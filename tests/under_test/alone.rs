//! One test at a time on a GPU. Loading a kernel waits for everything that runs there, the gates of other tests among
//! it, and holds up the driver's calls of all threads meanwhile: tests that close gates and load would time one another out.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpu_await::{Device, testing};

use super::host_threads;

static TESTS: Mutex<()> = Mutex::new(());

thread_local! {
    /// Until the thread ends: each test has one of its own.
    static TURN: Option<MutexGuard<'static, ()>> =
        on_cuda().then(|| {
            let turn = TESTS.lock().unwrap_or_else(PoisonError::into_inner);
            await_last_acts();
            turn
        });
}

/// Waits until the previous test's device is torn down, on the threads `gpu-await-close` and `gpu-await-cuda`: unregistering its memory
/// would wait for the work of the next test.
fn await_last_acts() {
    let end = Instant::now() + Duration::from_secs(5);
    while host_threads::threads_called("gpu-await-c") > 0 && Instant::now() < end {
        std::thread::yield_now();
    }
}

fn on_cuda() -> bool {
    std::env::var(testing::TEST_DEVICE).is_ok_and(|name| name.starts_with("cuda"))
}

/// The device under test, for one test after the other if it is a GPU.
pub(crate) fn device() -> Device {
    TURN.with(|_| ());
    testing::device()
}
