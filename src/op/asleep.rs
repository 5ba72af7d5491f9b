//! A thread that blocks on one operation, as a waker (pure).
//!
//! It does not use `park`: the thread's token is shared, and a foreign waker that the thread calls during a check may itself wait and
//! consume the token (`a_nested_wait_takes_no_wake_up`).
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::task::Wake;

use gpu_await_protocol::lock::{Condvar, Mutex};

#[derive(Default)]
pub(crate) struct Asleep {
    woken: Mutex<bool>,
    wakes: Condvar,
}

impl Asleep {
    /// Blocks until woken; a wake-up since the last call counts.
    pub(crate) fn until_woken(&self) {
        let mut woken = self.woken.lock();
        while !std::mem::take(&mut *woken) {
            woken = self.wakes.wait(woken);
        }
    }
}

impl Wake for Asleep {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        *self.woken.lock() = true;
        self.wakes.notify_one();
    }
}
