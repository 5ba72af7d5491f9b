//! Counters of the crate, and its threads, some of which may never return from NCCL.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::quiet::Quiet;
use gpu_await::sibling::PerProcess;

/// Counters of this process; see [`stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Communicators that have handles or pending work.
    pub communicators: usize,
    /// Communicators lost since the process started. One with nothing pending when a peer ended is counted at its next call.
    pub lost_communicators: usize,
    /// Threads that are connecting, aborting or freeing a communicator. A thread that stays here is stuck in NCCL and lost, together
    /// with what NCCL allocated for its communicator.
    pub threads_in_nccl: usize,
}

pub(crate) static COUNTS: PerProcess<Counts> = PerProcess::new(Counts::default);

/// The counters, and whether the process ends.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) communicators: AtomicUsize,
    pub(crate) lost: AtomicUsize,
    threads: AtomicUsize,
    /// The process is ending: no thread enters NCCL any more.
    ending: AtomicBool,
}

static QUIET: PerProcess<Quiet> = PerProcess::new(Quiet::new);

/// The work that is pending in this process, as of the watchdog's last look, and the frees that are running.
pub(crate) fn quiet() -> &'static Quiet {
    QUIET.get()
}

/// Returns the counters of this process.
#[must_use]
pub fn stats() -> Stats {
    // ORDERING: Relaxed: statistics.
    let (of, counts) = (|count: &AtomicUsize| count.load(Ordering::Relaxed), COUNTS.get());
    Stats {
        communicators: of(&counts.communicators),
        lost_communicators: of(&counts.lost),
        threads_in_nccl: of(&counts.threads),
    }
}

/// Counts what is alive.
pub(crate) struct Counted(&'static AtomicUsize);

impl Counted {
    pub(crate) fn one(of: &'static AtomicUsize) -> Counted {
        // ORDERING: SeqCst: for threads, see `end_at_exit`.
        of.fetch_add(1, Ordering::SeqCst);
        Counted(of)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // ORDERING: SeqCst, as above.
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs code that may call wakers, which are foreign: a panic ends neither a thread of the crate nor the work that follows.
pub(crate) fn contain<R>(run: impl FnOnce() -> R) -> Option<R> {
    // The payload's own drop may panic.
    catch_unwind(AssertUnwindSafe(run)).map_err(std::mem::forget).ok()
}

/// Starts a thread of the crate.
pub(crate) fn spawn(
    what: &'static str,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let builder = Builder::new().name(format!("nccl-{what}"));
    builder.spawn(run).map_err(|error| Error::Thread { what, reason: error.to_string() })
}

/// The process is ending. Waits for threads in NCCL, up to the limit, since the driver would shut down under them otherwise.
pub(crate) fn end_at_exit(limit: Duration) {
    // ORDERING: SeqCst: a thread is counted before it looks at this, so it is seen here, or sees it.
    let counts = COUNTS.get();
    counts.ending.store(true, Ordering::SeqCst);
    let end = Instant::now() + limit;
    while counts.threads.load(Ordering::SeqCst) > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    quiet().end_all();
}

/// Whether the process is ending.
pub(crate) fn is_ending() -> bool {
    COUNTS.get().ending.load(Ordering::SeqCst)
}

/// Runs a call of NCCL's that may never return. If no thread can be started, or the process is ending, it does not run: what it
/// would have freed is leaked.
pub(crate) fn on_thread_that_may_be_lost(what: &'static str, run: impl FnOnce() + Send + 'static) {
    let counted = Counted::one(&COUNTS.get().threads);
    if is_ending() {
        return;
    }
    let spawned = spawn(what, move || {
        let _counted = counted;
        run();
    });
    drop(spawned);
}
