//! Blocking work, off the executor, on threads of this crate.
//!
//! | work | threads |
//! |---|---|
//! | rare, and may take long: loading, trimming ([`offload`]) | its own |
//! | copying between pageable and pinned memory ([`Crew::run`]) | the device's few |
//! | what a busy stream or the driver may hold up ([`Crew::offload`]) | one for each [`Line`] that has some, however much that is |
//!
//! An executor's own threads for blocking work are not used: others may have taken them all, and they
//! end with their runtime.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use crossbeam_channel::{Receiver, Sender, unbounded};
use futures::channel::oneshot;
use parking_lot::Mutex;

use crate::error::{DriverCode, ErrorDetail, Result};
use crate::thread::contain;
use crate::thread::exit::{self, ExitGuard};

type Task = Box<dyn FnOnce() + Send>;

/// The result of work that another thread does. Dropped, it leaves the work running.
pub(crate) struct Offloaded<R>(oneshot::Receiver<std::thread::Result<R>>);

/// Runs `work` on a thread of its own. Dropped, the future leaves it running.
pub(crate) async fn offload<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
) -> Result<R> {
    let (task, result) = package(Unwanted::IsDone, work);
    detach(task)?;
    result.await
}

/// What becomes of work whose future was dropped before it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unwanted {
    IsDone,
    IsLeft,
}

fn package<R: Send + 'static>(
    unwanted: Unwanted,
    work: impl FnOnce() -> R + Send + 'static,
) -> (impl FnOnce() + Send + 'static, Offloaded<R>) {
    let (sender, receiver) = oneshot::channel();
    // A panic goes on in the future. If nobody waits any more, sending fails, and the result or the
    // panic's payload is dropped here; else sending calls a waker: whoever runs this contains it.
    let task = move || {
        if unwanted == Unwanted::IsDone || !sender.is_canceled() {
            drop(sender.send(catch_unwind(AssertUnwindSafe(work))));
        }
    };
    (task, Offloaded(receiver))
}

impl<R> Future for Offloaded<R> {
    type Output = Result<R>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<R>> {
        Pin::new(&mut self.0).poll(cx).map(|received| match received {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(panic)) => resume_unwind(panic),
            // There is no thread, or the process is ending.
            Err(oneshot::Canceled) => Err(no_thread()),
        })
    }
}

/// Runs `task` on a thread that ends with it, and for which nobody waits.
///
/// # Errors
/// There is no thread.
pub(crate) fn detach(task: impl FnOnce() + Send + 'static) -> Result<()> {
    let task = move || {
        if let Some(_under_way) = ExitGuard::in_driver() {
            task();
        }
    };
    contain::spawn("gpu-await-offload", task).map(drop).map_err(|_| no_thread())
}

fn no_thread() -> crate::Error {
    if exit::begun() {
        return ErrorDetail::ProcessEnding { what: "work off the executor" }.into();
    }
    DriverCode { call: "thread spawn", code: 304 }.into()
}

/// A device's few threads for host copies. The first starts with the device, because a future's poll has
/// no time to make one; each starts the next when it gets its first task. They end with the device.
pub(crate) struct Crew {
    /// How many threads there are: half of the cores, at least 2 and at most 8. One copies about
    /// 10 GB/s and a GPU's link takes 55.
    threads: usize,
    queue: OnceLock<Sender<Task>>,
    /// Those that have a thread.
    lines: Mutex<HashMap<Line, VecDeque<Task>>>,
    /// Pieces of pinned memory that were asked for.
    pinned: AtomicUsize,
}

/// Work that is held up by the same thing, and so is done one after the other, in the order of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Line {
    /// A stream, by its id.
    Stream(u64),
    /// Making pinned memory: as many as a device has threads.
    Pinned(usize),
}

impl Crew {
    /// Asks the system how many cores there are: not in a poll, it reads files for that.
    pub(crate) fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Crew {
            threads: (cores / 2).clamp(2, 8),
            queue: OnceLock::new(),
            lines: Mutex::default(),
            pinned: AtomicUsize::new(0),
        }
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Starts the first thread, unless it runs; otherwise the first task does.
    pub(crate) fn start(&self) {
        self.queue();
    }

    /// Runs `work` on one of the threads, in the order of the calls.
    pub(crate) fn run<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Offloaded<R> {
        let (task, result) = package(Unwanted::IsDone, work);
        self.send(Box::new(task));
        result
    }

    /// Runs `work` on the thread of a line, which is there while the line has work. One of the crew makes
    /// it: that may take longer than a poll has.
    pub(crate) fn offload<R: Send + 'static>(
        self: &Arc<Self>,
        line: Line,
        unwanted: Unwanted,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Offloaded<R> {
        let (task, result) = package(unwanted, work);
        let task: Task = Box::new(task);
        let is_first = match self.lines.lock().entry(line) {
            Entry::Occupied(mut tasks) => {
                tasks.get_mut().push_back(task);
                false
            }
            Entry::Vacant(tasks) => {
                tasks.insert(VecDeque::from([task]));
                true
            }
        };
        if is_first {
            let worker = LineWorker { crew: self.clone(), line, ended: false };
            // Refused, the line is dropped, and whoever waits for it sees that.
            self.send(Box::new(move || drop(detach(move || worker.run()))));
        }
        result
    }

    /// Runs `work` on a new thread, which a thread of the crew spawns. The result is dropped.
    pub(crate) fn detach(&self, work: impl FnOnce() + Send + 'static) {
        self.send(Box::new(move || drop(detach(work))));
    }

    /// The line for the next piece of pinned memory.
    pub(crate) fn next_of_pinned(&self) -> Line {
        // ORDERING: Relaxed: any of them will do.
        Line::Pinned(self.pinned.fetch_add(1, Ordering::Relaxed) % self.threads)
    }

    /// Drops `value` on one of the threads: giving much memory back to the system takes long.
    pub(crate) fn drop_there(&self, value: impl Send + 'static) {
        self.send(Box::new(move || drop(value)));
    }

    fn send(&self, task: Task) {
        // Without any thread the task is dropped here, and whoever waits for it sees that.
        drop(self.queue().send(task));
    }

    fn queue(&self) -> &Sender<Task> {
        self.queue.get_or_init(|| {
            let (sender, receiver) = unbounded::<Task>();
            start(receiver, self.threads);
            sender
        })
    }
}

/// Who does the work of a line.
struct LineWorker {
    crew: Arc<Crew>,
    line: Line,
    ended: bool,
}

impl LineWorker {
    fn run(mut self) {
        while let Some(task) = self.next() {
            contain::contain("a waker or the drop of offloaded work", task);
        }
    }

    fn next(&mut self) -> Option<Task> {
        let mut lines = self.crew.lines.lock();
        let task = lines.get_mut(&self.line).and_then(VecDeque::pop_front);
        if task.is_none() {
            // Under the lock: what comes next has a thread of its own.
            lines.remove(&self.line);
            self.ended = true;
        }
        task
    }
}

impl Drop for LineWorker {
    fn drop(&mut self) {
        if !self.ended {
            // There is no thread, or the process is ending.
            let left = self.crew.lines.lock().remove(&self.line);
            drop(left);
        }
    }
}

/// Starts a thread for `tasks`, which starts another one, up to `threads` in all.
fn start(tasks: Receiver<Task>, threads: usize) {
    let work = move || {
        let mut more = (threads > 1).then(|| tasks.clone());
        for task in tasks {
            if let Some(tasks) = more.take() {
                start(tasks, threads - 1);
            }
            contain::contain("a waker or the drop of offloaded work", task);
        }
    };
    // Refused: those that there are do the work. Not logged: the caller may be the first to use them.
    drop(contain::spawn("gpu-await-staging", work));
}
