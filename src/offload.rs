//! Blocking work, off the executor: tokio's blocking pool inside a tokio runtime, a thread elsewhere;
//! and a [`Crew`], the few threads that copy between pageable and pinned memory.
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll};

use crossbeam_channel::{Receiver, Sender, unbounded};
use futures::channel::oneshot;

use crate::error::{DriverCode, Result};

type Task = Box<dyn FnOnce() + Send>;

/// The result of work that another thread does. Dropped, it leaves the work running.
pub(crate) struct Offloaded<R>(oneshot::Receiver<std::thread::Result<R>>);

/// Runs `work` where it may block. Dropped, the future leaves it running.
pub(crate) async fn offload<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
) -> Result<R> {
    let (task, result) = package(work);
    Place::here().spawn(task)?;
    result.await
}

fn package<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
) -> (impl FnOnce() + Send + 'static, Offloaded<R>) {
    let (sender, receiver) = oneshot::channel();
    // Nobody waits any more if sending fails: then the result is dropped here.
    let task = move || drop(sender.send(catch_unwind(AssertUnwindSafe(work))));
    (task, Offloaded(receiver))
}

impl<R> Future for Offloaded<R> {
    type Output = Result<R>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<R>> {
        Pin::new(&mut self.0).poll(cx).map(|received| match received {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(panic)) => resume_unwind(panic),
            // The runtime was shut down before it ran the task, or there is no thread.
            Err(oneshot::Canceled) => Err(no_thread()),
        })
    }
}

/// Where blocking work of the calling task goes.
struct Place {
    #[cfg(feature = "tokio")]
    runtime: Option<tokio::runtime::Handle>,
}

impl Place {
    fn here() -> Place {
        Place {
            #[cfg(feature = "tokio")]
            runtime: tokio::runtime::Handle::try_current().ok(),
        }
    }

    /// Makes a thread where none is free.
    fn spawn(self, task: impl FnOnce() + Send + 'static) -> Result<()> {
        #[cfg(feature = "tokio")]
        if let Some(runtime) = self.runtime {
            runtime.spawn_blocking(task);
            return Ok(());
        }
        let spawned = std::thread::Builder::new().name("gpu-await-offload".to_owned()).spawn(task);
        spawned.map(drop).map_err(|_| no_thread())
    }
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

    /// As [`offload`], begun in the order of the calls: one of the threads makes that for the work, if
    /// one has to be made.
    pub(crate) fn offload<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Offloaded<R> {
        let (task, result) = package(work);
        let place = Place::here();
        // Refused, the task is dropped, and whoever waits for it sees that.
        self.send(Box::new(move || drop(place.spawn(task))));
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
            // It may wake somebody whose waker panics: the thread goes on.
            if catch_unwind(AssertUnwindSafe(task)).is_err() {
                tracing::error!("a waker panicked");
            }
        }
    };
    let name = "gpu-await-staging".to_owned();
    // Refused: those that there are do the work. Not logged: the caller may be the first to use them.
    drop(std::thread::Builder::new().name(name).spawn(work));
}
