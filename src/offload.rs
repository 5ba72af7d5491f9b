//! Blocking work, off the executor, on threads of this crate: a thread of its own for what is rare and
//! may take long ([`offload`]), and a device's [`Crew`], the few threads that copy between pageable and
//! pinned memory.
//!
//! An executor's own threads for blocking work are not used: others may have taken them all, and they
//! end with their runtime.
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll};

use crossbeam_channel::{Receiver, Sender, unbounded};
use futures::channel::oneshot;

use crate::at_exit::UnderWay;
use crate::contain;
use crate::error::{DriverCode, Result};

type Task = Box<dyn FnOnce() + Send>;

/// The result of work that another thread does. Dropped, it leaves the work running.
pub(crate) struct Offloaded<R>(oneshot::Receiver<std::thread::Result<R>>);

/// Runs `work` on a thread of its own. Dropped, the future leaves it running.
pub(crate) async fn offload<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
) -> Result<R> {
    let (task, result) = package(work);
    detach(task)?;
    result.await
}

fn package<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
) -> (impl FnOnce() + Send + 'static, Offloaded<R>) {
    let (sender, receiver) = oneshot::channel();
    // A panic goes on in the future. If nobody waits any more, sending fails, and the result or the
    // panic's payload is dropped here; else sending calls a waker: whoever runs this contains it.
    let task = move || drop(sender.send(catch_unwind(AssertUnwindSafe(work))));
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
        if let Some(_under_way) = UnderWay::begin() {
            task();
        }
    };
    contain::spawn("gpu-await-offload", task).map(drop).map_err(|_| no_thread())
}

fn no_thread() -> crate::Error {
    DriverCode { call: "thread spawn", code: 304 }.into()
}

/// A device's few threads for host copies. The first starts with the device, because a future's poll has
/// no time to make one; each starts the next when it gets its first task. They end with the device.
pub(crate) struct Crew {
    /// How many threads there are: half of the cores, at least 2 and at most 8. One copies about
    /// 10 GB/s and a GPU's link takes 55.
    threads: usize,
    queue: OnceLock<Sender<Task>>,
}

impl Crew {
    /// Asks the system how many cores there are: not in a poll, it reads files for that.
    pub(crate) fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Crew { threads: (cores / 2).clamp(2, 8), queue: OnceLock::new() }
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
        let (task, result) = package(work);
        self.send(Box::new(task));
        result
    }

    /// As [`offload`], begun in the order of the calls: one of the threads makes the one for the work,
    /// which may take longer than a poll has.
    pub(crate) fn offload<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Offloaded<R> {
        let (task, result) = package(work);
        // Refused, the task is dropped, and whoever waits for it sees that.
        self.send(Box::new(move || drop(detach(task))));
        result
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
