//! Native threads of this crate: how each starts and ends.
//!
//! As a thread that called a driver ends, the driver, and any tool that traces it, runs code of its own, after all code of this crate. If
//! it is torn down meanwhile, the process crashes. So at the end of the process a thread
//!
//! | is | and |
//! |---|---|
//! | ending | the driver is not torn down before it has ended ([`count_ending`]) |
//! | not done with its work, or asleep | never ends: it parks |
//!
//! # Invariants
//! 1. No thread ends while exit handlers run that were registered before this crate's
//!    (`the_end_of_the_process_waits_for_threads_that_end`).
#![forbid(unsafe_code)]

use std::io;
use std::thread::{Builder, JoinHandle, Thread};

use crossbeam_channel::bounded;
use gpu_await_protocol::sync::Mutex;

use super::contain::contain;
use super::exit::{self, ExitGuard};
use super::turn;
use crate::thread::process::PerProcess;

/// The last thread that began to end, having done its work. It joins the one that was here before.
static LAST: PerProcess<Mutex<Option<JoinHandle<()>>>> = PerProcess::new(Mutex::default);

/// Starts a thread of this crate: one that does not end with a panic. (The standard library aborts
/// the process if the payload of a thread's panic panics when it is dropped.)
pub(crate) fn spawn(name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<Thread> {
    let (sender, own_handle) = bounded(1);
    let starting = turn::starts();
    let contained = move || {
        starting.enter();
        contain("a thread of this crate", work);
        turn::leave_for_good();
        // Sent as soon as this thread was started.
        own_handle.recv().into_iter().for_each(end);
    };
    let handle = Builder::new().name(name.to_owned()).spawn(contained)?;
    let thread = handle.thread().clone();
    // The thread does not end before it has its handle.
    sender.send(handle).ok();
    Ok(thread)
}

/// The end of `thread`, which is the calling one. When the process is ending, it does not return.
fn end(thread: JoinHandle<()>) {
    let mut last = LAST.get().lock();
    if exit::begun() {
        drop(last);
        loop {
            std::thread::park();
        }
    }
    let before = last.replace(thread);
    drop(last);
    if let Some(before) = before {
        join(before);
    }
}

/// Waits until nothing runs on the thread, not even destructors of its locals.
fn join(thread: JoinHandle<()>) {
    // Its panics were contained.
    thread.join().ok();
}

/// Counts the threads that were ending when the process [began](exit::begin) to end as one thread in the driver, until they have ended.
pub(crate) fn count_ending() {
    let Some(last) = LAST.get().lock().take() else { return };
    let ending = ExitGuard::ending();
    // A join has no time limit, so it runs on a thread that never calls the driver.
    let join = move || {
        join(last);
        drop(ending);
    };
    // If the system refuses it, nothing is waited for.
    Builder::new().spawn(join).ok();
}
