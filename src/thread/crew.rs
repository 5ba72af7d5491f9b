//! A device's threads for host copies, and for calls that may be held up.
//!
//! | work | threads |
//! |---|---|
//! | copying between pageable and pinned memory ([`Crew::run`]) | the device's few |
//! | calls that a busy stream or the driver may hold up ([`Crew::offload`]) | one per [`Line`] that has any, however many calls it has |
//! | rare and long: taking a share, shared memory ([`Crew::run_alone`]) | one each |
//!
//! A close waits for all of it: if the requester is gone, the result is dropped on that thread.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpu_await_protocol::sync::Mutex;

use super::inbox::Receiver;
use super::native;
use super::worker::{Offloaded, Task, Unwanted, Worker, detach, package, run};
use crate::error::Result;
use crate::thread::process::Process;

/// The name of its threads.
const NAME: &str = "gpu-await-staging";

/// A device's few threads for host copies. The first starts with the device, because a future's poll has
/// no time to make one; each starts the next when it gets its first task. They end with the device.
pub(crate) struct Crew {
    /// How many threads there are: half of the cores, at least 2 and at most 8. One copies about
    /// 10 GB/s and a GPU's link takes 55.
    pub(crate) threads: usize,
    /// The process that they run in.
    process: Process,
    worker: Worker<Task>,
    /// Has one more reference for each task, until that is dropped.
    tasks: Arc<()>,
    /// The lines that have a thread.
    lines: Mutex<HashMap<Line, VecDeque<Task>>>,
    /// Pieces of pinned memory that were asked for.
    pinned: AtomicUsize,
}

/// Work that the same thing may hold up, and that therefore runs one at a time, in the order of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Line {
    /// A stream, by its id.
    Stream(u64),
    /// Making pinned memory: as many as a device has threads.
    Pinned(usize),
}

impl Crew {
    /// Asks the system for the number of cores: not in a poll, because that reads files.
    pub(crate) fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Crew {
            threads: (cores / 2).clamp(2, 8),
            process: Process::remembered(),
            worker: Worker::new(NAME),
            tasks: Arc::default(),
            lines: Mutex::default(),
            pinned: AtomicUsize::new(0),
        }
    }

    /// Starts the first thread, unless it runs; otherwise the first task does.
    pub(crate) fn start(&self) {
        self.worker.start(work(self.threads));
    }

    /// Runs `work` on one of the threads, in the order of the calls.
    pub(crate) fn run<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Offloaded<R> {
        let (task, result) = package(self.process, Unwanted::IsDone, work);
        self.send(task);
        result
    }

    /// Runs `work` on the thread of a line, which exists while the line has work. One of the crew starts it,
    /// because that may take longer than a poll should.
    pub(crate) fn offload<R: Send + 'static>(
        self: &Arc<Self>,
        line: Line,
        unwanted: Unwanted,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Offloaded<R> {
        let (task, result) = package(self.process, unwanted, work);
        let task: Task = Box::new(self.counted(task));
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
            // If this is refused, the line is dropped, and its waiters see that.
            self.send(move || drop(detach(move || worker.run())));
        }
        result
    }

    /// Runs `work` on a new thread, which a thread of the crew spawns. The result is dropped.
    pub(crate) fn detach(&self, work: impl FnOnce() + Send + 'static) {
        self.send(move || drop(detach(work)));
    }

    /// The line for the next piece of pinned memory.
    pub(crate) fn next_of_pinned(&self) -> Line {
        // ORDERING: Relaxed: any of them will do.
        Line::Pinned(self.pinned.fetch_add(1, Ordering::Relaxed) % self.threads)
    }

    /// Drops `value` on one of the threads: giving much memory back to the system takes long.
    pub(crate) fn drop_there(&self, value: impl Send + 'static) {
        self.send(move || drop(value));
    }

    /// Runs `work` on a thread of its own. Dropped, the future leaves it running.
    pub(crate) async fn run_alone<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R> {
        let (task, result) = package(self.process, Unwanted::IsDone, work);
        detach(self.counted(task))?;
        result.await
    }

    /// Whether there is anything to do: a task whose future was dropped may still hold memory.
    pub(crate) fn is_busy(&self) -> bool {
        Arc::strong_count(&self.tasks) > 1
    }

    fn counted(&self, task: impl FnOnce() + Send + 'static) -> impl FnOnce() + Send + 'static {
        let one = self.tasks.clone();
        move || {
            task();
            drop(one);
        }
    }

    fn send(&self, task: impl FnOnce() + Send + 'static) {
        // Without any thread the task is dropped here, and its waiter sees that.
        drop(self.worker.send(Box::new(self.counted(task)), work(self.threads)));
    }
}

/// The worker of a line.
struct LineWorker {
    crew: Arc<Crew>,
    line: Line,
    ended: bool,
}

impl LineWorker {
    fn run(mut self) {
        while let Some(task) = self.next() {
            run(task);
        }
    }

    fn next(&mut self) -> Option<Task> {
        let mut lines = self.crew.lines.lock();
        let task = lines.get_mut(&self.line).and_then(VecDeque::pop_front);
        if task.is_none() {
            // Under the lock: later work gets a thread of its own.
            lines.remove(&self.line);
            self.ended = true;
        }
        task
    }
}

impl Drop for LineWorker {
    fn drop(&mut self) {
        if !self.ended {
            // The system refuses a thread, or the process is ending.
            let left = self.crew.lines.lock().remove(&self.line);
            drop(left);
        }
    }
}

/// The loop of a thread that belongs to a group of `threads`: with its first task it starts the next one.
fn work(threads: usize) -> impl FnOnce(&Receiver<Task>) + Send + 'static {
    move |tasks| {
        let mut is_first = true;
        for task in tasks.iter() {
            if std::mem::take(&mut is_first) && threads > 1 {
                let (tasks, work) = (tasks.clone(), work(threads - 1));
                // If it is refused, the existing threads do the work.
                native::spawn(NAME, Box::new(move || work(&tasks))).ok();
            }
            run(task);
        }
    }
}
