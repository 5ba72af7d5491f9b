//! Work off the executor, on threads of this crate.
//!
//! | work | thread |
//! |---|---|
//! | frequent: drops of users' values, driver calls that may block, copies; the clock of a batcher without a device | a [`Worker`], one task after another |
//! | rare, and possibly long: loading, trimming ([`offload`], [`detach`]); a device's last acts ([`last_act`]) | one per task |
//!
//! A [`Worker`] starts with the first task sent and ends with its owner. An executor's blocking threads are not used: all of them may be
//! taken, and they end with their runtime.
//!
//! The child of a fork has none of its parent's threads: there a [`Worker`] takes no work once its parent has started it, and an [`Offloaded`]
//! of its parent fails with [`Forked`](ErrorDetail::Forked) unless its result is there (`work_of_the_parent_fails_in_the_child`).
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll};

use futures::channel::oneshot;
use gpu_await_protocol::sync::Mutex;

use crate::error::{ErrorDetail, Result};
use crate::thread::exit::{self, ExitGuard};
use crate::thread::inbox::{Receiver, Sender, inbox};
use crate::thread::process::Process;
use crate::thread::{contain, native};

/// Work for another thread.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// A thread with an inbox.
pub(crate) struct Worker<T> {
    name: &'static str,
    inbox: OnceLock<Sender<T>>,
    /// Held while the thread is started. A thread that the system refuses is requested again by the next
    /// caller.
    starting: Mutex<()>,
}

impl<T: Send + 'static> Worker<T> {
    /// A worker whose thread will have that name.
    pub(crate) const fn new(name: &'static str) -> Self {
        Worker { name, inbox: OnceLock::new(), starting: Mutex::new(()) }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Starts the thread unless it runs. False if the system refuses it, in which case the next call asks again, and in a child that was forked from
    /// the process that has it.
    pub(crate) fn start(&self, work: impl FnOnce(&Receiver<T>) + Send + 'static) -> bool {
        self.sender(work).is_some()
    }

    /// Sends the thread an item, starting it with `work` if need be. Returns the item if that cannot be done.
    pub(crate) fn send(
        &self,
        what: T,
        work: impl FnOnce(&Receiver<T>) + Send + 'static,
    ) -> std::result::Result<(), T> {
        match self.sender(work) {
            Some(inbox) => inbox.send(what),
            None => Err(what),
        }
    }

    fn sender(&self, work: impl FnOnce(&Receiver<T>) + Send + 'static) -> Option<&Sender<T>> {
        if self.inbox.get().is_none() {
            let _starting = self.starting.lock();
            if self.inbox.get().is_none() {
                let (sender, inbox) = inbox();
                // Not logged: the caller may hold a lock.
                native::spawn(self.name, Box::new(move || work(&inbox))).ok()?;
                self.inbox.get_or_init(|| sender);
            }
        }
        self.inbox.get().filter(|inbox| inbox.is_here())
    }
}

/// Does a task; neither it nor its drop ends the thread.
pub(crate) fn run(task: Task) {
    contain::contain(
        "a value's drop, a waker or other foreign code on a thread of this crate",
        task,
    );
}

/// The result of work that another thread does. Dropped, it leaves the work running.
pub(crate) struct Offloaded<R> {
    result: oneshot::Receiver<std::thread::Result<R>>,
    /// The process that the thread runs in.
    process: Process,
}

/// Runs `work` on a thread of its own. Dropped, the future leaves it running.
pub(crate) async fn offload<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
) -> Result<R> {
    let (task, result) = package(Process::remembered(), Unwanted::IsDone, work);
    detach(task)?;
    result.await
}

/// What to do with work whose future was dropped before it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unwanted {
    IsDone,
    IsLeft,
}

/// Work for a thread of `process`, and its result.
pub(crate) fn package<R: Send + 'static>(
    process: Process,
    unwanted: Unwanted,
    work: impl FnOnce() -> R + Send + 'static,
) -> (impl FnOnce() + Send + 'static, Offloaded<R>) {
    let (sender, result) = oneshot::channel();
    // A panic resumes in the future. If nothing waits any more, sending fails, and the result or the panic's
    // payload is dropped here; otherwise sending calls a waker: the caller that runs this contains it.
    let task = move || {
        if unwanted == Unwanted::IsDone || !sender.is_canceled() {
            drop(sender.send(catch_unwind(AssertUnwindSafe(work))));
        }
    };
    (task, Offloaded { result, process })
}

impl<R> Future for Offloaded<R> {
    type Output = Result<R>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<R>> {
        match Pin::new(&mut self.result).poll(cx) {
            Poll::Ready(Ok(Ok(result))) => Poll::Ready(Ok(result)),
            Poll::Ready(Ok(Err(panic))) => resume_unwind(panic),
            // In a child, the thread is the parent's, or never took the work.
            Poll::Pending | Poll::Ready(Err(_)) if !self.process.is_here() => {
                Poll::Ready(Err(ErrorDetail::Forked { device: "the device".to_owned() }.into()))
            }
            // The system refuses a thread, or the process is ending.
            Poll::Ready(Err(oneshot::Canceled)) => Poll::Ready(Err(no_thread())),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// Runs `task` on a thread that ends with it, and that nothing waits for.
///
/// # Errors
/// The system refuses a thread.
pub(crate) fn detach(task: impl FnOnce() + Send + 'static) -> Result<()> {
    let task = move || {
        if let Some(_under_way) = ExitGuard::in_driver() {
            task();
        }
    };
    native::spawn("gpu-await-offload", Box::new(task)).map(drop).map_err(|_| no_thread())
}

/// Runs a device's last act on a thread of its own: it may wait for everything that runs on the GPU, which a
/// drop must not. The end of the process waits for it.
pub(crate) fn last_act(act: impl FnOnce() + Send + 'static) {
    let Some(in_driver) = ExitGuard::in_driver() else { return };
    let leaving = ExitGuard::leaving();
    let act = move || {
        act();
        drop((in_driver, leaving));
    };
    let spawned = native::spawn("gpu-await-close", Box::new(act));
    if spawned.is_err() {
        contain::log(|| {
            tracing::error!("no thread to close a device with: its memory stays registered");
        });
    }
}

/// The system refuses a thread, or the process is ending.
pub(crate) fn no_thread() -> crate::Error {
    if exit::begun() {
        return ErrorDetail::ProcessEnding { what: "work off the executor" }.into();
    }
    ErrorDetail::NoThread { what: "work off the executor" }.into()
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    /// Whatever became of the work, unless its result is there.
    #[test]
    fn work_of_the_parent_fails_in_the_child() {
        let is_forked = |result: Option<Result<u8>>| {
            let error = result.expect("it does not wait").expect_err("nobody does the work");
            assert!(matches!(error.detail(), ErrorDetail::Forked { .. }), "{error}");
        };
        let (task, mut result) = package(Process::parent(), Unwanted::IsDone, || 5);
        is_forked((&mut result).now_or_never());
        drop(task);
        is_forked(result.now_or_never());
        let (task, result) = package(Process::parent(), Unwanted::IsDone, || 5);
        task();
        assert_eq!(result.now_or_never().expect("it is there").expect("no panic"), 5);
        let (task, mut result) = package(Process::this(), Unwanted::IsDone, || 5);
        assert!((&mut result).now_or_never().is_none());
        task();
        assert_eq!(result.now_or_never().expect("it is there").expect("no panic"), 5);
    }
}
