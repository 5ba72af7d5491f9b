//! A thread for work that may block.
//!
//! A user's closure or value may block or panic in its `Drop`, which must affect neither the sweep nor the driver's callback thread. Some
//! driver calls block as well: the poller leaves them to a second thread of this kind.
//!
//! A device starts the thread for users' values when it opens (`values_go_without_another_thread`), and the thread for driver calls with
//! the first call that is sent to it. If the system refuses the thread, tasks are kept until the poller calls [`Reaper::send_left`]
//! (`a_shortage_of_threads_passes`).
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gpu_await_protocol::sync::Mutex;

use crate::thread::exit::ExitGuard;
use crate::thread::inbox::Receiver;
use crate::thread::worker::{self, Task, Worker};

pub(crate) struct Reaper {
    worker: Worker<Task>,
    has_begun: AtomicBool,
    /// Tasks sent while the system refused a thread.
    left: Mutex<Vec<Task>>,
    /// Their number; stored under the lock.
    left_count: AtomicU64,
}

impl Reaper {
    /// A reaper whose thread has that name.
    pub(crate) fn new(thread: &'static str) -> Self {
        Reaper {
            worker: Worker::new(thread),
            has_begun: AtomicBool::new(false),
            left: Mutex::default(),
            left_count: AtomicU64::new(0),
        }
    }

    /// Starts the thread; if the system refuses it, the next task asks again.
    pub(crate) fn start(&self) {
        self.worker.start(bury);
    }

    /// Whether anything was ever sent.
    pub(crate) fn has_begun(&self) -> bool {
        // ORDERING: Acquire, pairs with `enqueue`: a thread that learned of a value from another one sees that it was
        // sent.
        self.has_begun.load(Ordering::Acquire) || self.left() > 0
    }

    /// Whether this is the reaper's thread, or another reaper's.
    pub(crate) fn is_here(&self) -> bool {
        std::thread::current().name() == Some(self.worker.name())
    }

    /// How many tasks wait for a thread.
    pub(crate) fn left(&self) -> u64 {
        // ORDERING: Relaxed: the thread that keeps a task calls the poller afterwards.
        self.left_count.load(Ordering::Relaxed)
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
        // ORDERING: Release, see `has_begun`.
        self.has_begun.store(true, Ordering::Release);
        if let Err(unsent) = self.worker.send(remains, bury) {
            // Not logged: the caller may hold a lock.
            self.keep([unsent]);
        }
    }

    /// Sends the kept tasks again. Those that still have no thread stay, except one, which is returned for the
    /// caller to run or to keep.
    pub(crate) fn send_left(&self) -> Option<Task> {
        if self.left() == 0 {
            return None;
        }
        let left = std::mem::take(&mut *self.left.lock());
        let mut unsent: Vec<_> =
            left.into_iter().filter_map(|task| self.worker.send(task, bury).err()).collect();
        let one = unsent.pop();
        self.keep(unsent);
        one
    }

    /// Keeps tasks that have no thread, or come too early.
    pub(crate) fn keep(&self, tasks: impl IntoIterator<Item = Task>) {
        let mut left = self.left.lock();
        left.extend(tasks);
        // ORDERING: Relaxed, see `left`.
        self.left_count.store(left.len() as u64, Ordering::Relaxed);
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        if let Some(task) = self.send_left() {
            // Here nothing may block: leaking is the lesser evil.
            std::mem::forget(task);
            std::mem::forget(std::mem::take(self.left.get_mut()));
        }
    }
}

fn bury(remains: &Receiver<Task>) {
    remains.iter().for_each(worker::run);
}
