//! A thread for what may block.
//!
//! A closure or a value of the user's may block or panic in its `Drop`; neither the sweep nor the
//! driver's callback thread may suffer for it. Some driver calls block as well: the poller leaves them
//! to another such thread. It starts when something is first sent.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::thread::exit::ExitGuard;
use crate::thread::worker::{self, Task, Worker};

pub(crate) struct Reaper {
    worker: Worker<Task>,
    /// How much was leaked because the system gave no thread.
    leaked: AtomicU64,
}

impl Reaper {
    /// One whose thread has that name.
    pub(crate) fn new(thread: &'static str) -> Self {
        Reaper { worker: Worker::new(thread), leaked: AtomicU64::new(0) }
    }

    /// How much was leaked because the system gave no thread.
    pub(crate) fn leaked(&self) -> u64 {
        // ORDERING: Relaxed: a statistic.
        self.leaked.load(Ordering::Relaxed)
    }

    /// Runs `remains` on the reaper's thread. The end of the process waits for it, briefly: it may keep
    /// a device.
    pub(crate) fn send(&self, remains: impl FnOnce() + Send + 'static) {
        let leaving = ExitGuard::leaving();
        self.enqueue(Box::new(move || {
            remains();
            drop(leaving);
        }));
    }

    /// Runs `remains` on the reaper's thread, unless the process ends before.
    pub(crate) fn enqueue(&self, remains: Task) {
        let bury =
            |remains: &crossbeam_channel::Receiver<Task>| remains.iter().for_each(worker::run);
        if let Err(unsent) = self.worker.send(remains, bury) {
            // Leaking is the lesser evil, and it is counted. Not logged: the caller may hold a lock.
            // ORDERING: Relaxed, as above.
            self.leaked.fetch_add(1, Ordering::Relaxed);
            std::mem::forget(unsent);
        }
    }

    /// Drops `value` on the reaper's thread.
    pub(crate) fn drop_later(&self, value: Box<dyn std::any::Any + Send>) {
        self.send(move || drop(value));
    }
}
