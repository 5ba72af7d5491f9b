//! A thread for what may block.
//!
//! A closure or a value of the user's may block or panic in its `Drop`; neither the sweep nor the
//! driver's callback thread may suffer for it. Some driver calls block as well: the poller leaves them
//! to another such thread. It starts when something is first sent.
#![forbid(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::{Sender, unbounded};

use crate::thread::contain;
use crate::thread::exit::ExitGuard;

/// Something to be dropped elsewhere, or a last act that makes driver calls.
pub(crate) type Remains = Box<dyn FnOnce() + Send>;

pub(crate) struct Reaper {
    /// How much was leaked because the system gave no thread.
    leaked: AtomicU64,
    thread: &'static str,
    queue: OnceLock<Option<Sender<Remains>>>,
}

impl Reaper {
    /// One whose thread has that name.
    pub(crate) fn new(thread: &'static str) -> Self {
        Reaper { leaked: AtomicU64::new(0), thread, queue: OnceLock::new() }
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
    pub(crate) fn enqueue(&self, remains: Remains) {
        let queue = self.queue.get_or_init(|| {
            let (sender, receiver) = unbounded::<Remains>();
            let spawned = contain::spawn(self.thread, move || receiver.iter().for_each(bury));
            spawned.ok().map(|_| sender)
        });
        match queue {
            // A thread that cannot be had: leaking is the lesser evil, and it is counted. Not logged:
            // the caller may hold a lock.
            None => {
                // ORDERING: Relaxed, as above.
                self.leaked.fetch_add(1, Ordering::Relaxed);
                std::mem::forget(remains);
            }
            Some(queue) => {
                if let Err(unsent) = queue.send(remains) {
                    std::mem::forget(unsent);
                }
            }
        }
    }

    /// Drops `value` on the reaper's thread.
    pub(crate) fn drop_later(&self, value: Box<dyn std::any::Any + Send>) {
        self.send(move || drop(value));
    }
}

fn bury(remains: Remains) {
    contain::contain("the drop of a value that was lent to a stream", remains);
}
