//! The one thread that hears, kills and reaps the processes of all workers of this process, and the one that starts them.
//!
//! Both start with the first worker and never end: the kernel signals a process of a worker when the thread that started it ends. Starts have a
//! thread of their own because it waits for the new process to execute its program, which may take long on a cold disk, or if that is stopped.
//! That thread also frees what dead processes leave: the memory of their answers goes with its last mapping, at 0.1 ms and more a MiB. The
//! other one waits in one `poll` for the sockets, handles and pipes of all, and blocks nowhere else: handles show deaths, `waitid` does not
//! wait, and pipes are read as far as they go.
//!
//! # Invariants
//! 1. A panic on this thread ends the worker that it was looking after, or all of them if there was none, with a cause, and all their calls.
//!    The thread goes on (`a_panic_ends_one_worker`, `a_panic_between_workers_ends_all`).
//! 2. If the system refuses `poll`, everything is checked instead, so that no death goes unseen (`each_state_cause_and_step_is_told_once`).
//! 3. A process that is slow to start holds up no other worker's calls, and no handle of its own (`a_slow_start_holds_up_nobody`).
//! 4. No memory is unmapped under a worker's lock, or on the thread that hears calls (`what_a_process_leaves_is_freed_elsewhere`).
#![forbid(unsafe_code)]

#[cfg(test)]
mod tests;

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use gpu_await_protocol::lock::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::codec::panic_text;
use crate::error::{Error, Result};
use crate::system;
#[cfg(test)]
use crate::trips;
use crate::watch::{Watch, Watched};

/// A worker, as these threads see it.
pub(crate) trait Supervised: fmt::Debug + Send + Sync {
    /// Starts a process, which gets this number: for the thread that may wait.
    fn start(&self, incarnation: u32);
    /// Receives what its processes have sent, and delivers it.
    fn hear(&self, now: Instant, ready: &Watch, buffer: &mut [u8]);
    /// Does everything else that is ready or due; returns what to wait for next.
    fn turn(&self, now: Instant, ready: &Watch, buffer: &mut [u8]) -> Watch;
    /// Ends it because of a panic.
    fn give_up(&self, why: &str);
    /// Its longest packet.
    fn packet_bytes(&self) -> usize;
}

/// The thread's inbox.
#[derive(Debug)]
struct Supervisor {
    event: OwnedFd,
    new: Mutex<Vec<Arc<dyn Supervised>>>,
    errands: Mutex<Errands>,
    more_errands: Condvar,
}

/// What the other thread does next.
#[derive(Debug, Default)]
struct Errands {
    /// Starts a worker's process, with its number.
    starts: VecDeque<(Arc<dyn Supervised>, u32)>,
    /// Drops processes that were reaped, and workers that have ended.
    gone: Vec<Box<dyn Any + Send>>,
}

static SUPERVISOR: OnceLock<Result<Supervisor>> = OnceLock::new();

/// Hands a worker to the thread, which looks after it from its next turn on.
pub(crate) fn supervise(worker: Arc<dyn Supervised>) -> Result<()> {
    let supervisor = SUPERVISOR.get_or_init(begin).as_ref().map_err(Clone::clone)?;
    supervisor.new.lock().push(worker);
    system::signal_event(supervisor.event.as_fd());
    Ok(())
}

/// Has a process of this worker started; the worker hears of it.
pub(crate) fn start(worker: Arc<dyn Supervised>, incarnation: u32) {
    if let Some(Ok(supervisor)) = SUPERVISOR.get() {
        supervisor.errands.lock().starts.push_back((worker, incarnation));
        supervisor.more_errands.notify_one();
    }
}

/// Has these dropped on the other thread.
pub(crate) fn free<T: Send + 'static>(gone: impl IntoIterator<Item = T>) {
    let mut gone = gone.into_iter().map(|it| -> Box<dyn Any + Send> { Box::new(it) }).peekable();
    if let Some(Ok(supervisor)) = SUPERVISOR.get().filter(|_| gone.peek().is_some()) {
        supervisor.errands.lock().gone.extend(gone);
        supervisor.more_errands.notify_one();
    }
}

/// Makes the thread look at everything.
pub(crate) fn wake() {
    if let Some(Ok(supervisor)) = SUPERVISOR.get() {
        system::signal_event(supervisor.event.as_fd());
    }
}

fn begin() -> Result<Supervisor> {
    let event = system::event().map_err(|error| Error::system("eventfd", error))?;
    let thread = std::thread::Builder::new().name("gpu-await-workers".to_owned());
    // The static is set when this function returns, and the thread waits for that.
    let starter = std::thread::Builder::new().name("gpu-await-starts".to_owned());
    let refused = |error| Error::system("starting a thread", error);
    thread.spawn(run).map_err(refused)?;
    starter.spawn(run_starts).map_err(refused)?;
    warn_of_group_kills();
    let (new, errands, more_errands) = (Mutex::default(), Mutex::default(), Condvar::new());
    Ok(Supervisor { event, new, errands, more_errands })
}

/// With `memory.oom.group`, the kernel kills the supervisor with a process that has too much memory.
fn warn_of_group_kills() {
    if system::memory_group_file("memory.oom.group").is_some_and(|on| on.trim() == "1") {
        tracing::warn!(
            "memory.oom.group is 1: the kernel kills this process together with a worker that has too much memory"
        );
    }
}

/// A worker, and what it waits for.
struct LookedAfter {
    worker: Arc<dyn Supervised>,
    watch: Watch,
}

/// Starts processes, one after the other, and frees what others left; no lock is held meanwhile.
fn run_starts() {
    let Ok(supervisor) = SUPERVISOR.wait() else { return };
    loop {
        let (start, gone) = {
            let mut errands = supervisor.errands.lock();
            while errands.starts.is_empty() && errands.gone.is_empty() {
                errands = supervisor.more_errands.wait(errands);
            }
            (errands.starts.pop_front(), std::mem::take(&mut errands.gone))
        };
        if let Some((worker, incarnation)) = start {
            // A panic there has ended the worker.
            let start = || worker.start(incarnation);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(start)) {
                drop(panic_text(panic));
            }
        }
        // Each on its own: a panic leaves the others to be dropped.
        gone.into_iter().for_each(|it| drop(catch_unwind(AssertUnwindSafe(|| drop(it)))));
    }
}

fn run() {
    let Ok(supervisor) = SUPERVISOR.wait() else { return };
    let mut workers: Vec<LookedAfter> = Vec::new();
    let mut buffer = Vec::new();
    loop {
        let round = || look_after(supervisor, &mut workers, &mut buffer);
        let Err(panic) = catch_unwind(AssertUnwindSafe(round)) else { continue };
        let why = panic_text(panic);
        for LookedAfter { worker, watch } in &mut workers {
            worker.give_up(&why);
            *watch = Watch::default();
        }
        // Whatever it is may happen again.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Gives each worker its turn, and waits.
fn look_after(supervisor: &Supervisor, workers: &mut Vec<LookedAfter>, buffer: &mut Vec<u8>) {
    for worker in std::mem::take(&mut *supervisor.new.lock()) {
        if !workers.iter().any(|known| Arc::ptr_eq(&known.worker, &worker)) {
            workers.push(LookedAfter { worker, watch: Watch::default() });
        }
    }
    let longest = workers.iter().map(|known| known.worker.packet_bytes()).max();
    if let Some(longest) = longest.filter(|longest| *longest > buffer.len()) {
        buffer.resize(longest, 0);
    }
    let now = Instant::now();
    // Answers of all workers are delivered before anything else is done.
    for LookedAfter { worker, watch } in &*workers {
        worker.hear(now, watch, &mut buffer[..worker.packet_bytes()]);
    }
    for LookedAfter { worker, watch } in &mut *workers {
        let ready = std::mem::take(watch);
        *watch = worker.turn(now, &ready, &mut buffer[..worker.packet_bytes()]);
    }
    free(workers.extract_if(.., |known| known.watch.ended).map(|known| known.worker));
    #[cfg(test)]
    trips::trip();
    wait(supervisor, workers);
}

/// Waits until something is ready or due, and leaves in the watches what is ready.
fn wait(supervisor: &Supervisor, workers: &mut [LookedAfter]) {
    let due = workers.iter().filter_map(|worker| worker.watch.due).min();
    let limit = due.map(|due| {
        let rest = due.saturating_duration_since(Instant::now());
        Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: i64::from(rest.subsec_nanos()) }
    });
    let ready: Vec<PollFlags> = {
        let mut fds = vec![PollFd::new(&supervisor.event, PollFlags::IN)];
        for watched in workers.iter().flat_map(|worker| watched(&worker.watch)) {
            let Watched { ends, flags, .. } = watched;
            let all = [&ends.socket, &ends.handle, &ends.pipes[0], &ends.pipes[1]];
            let wanted = all.into_iter().zip(flags).filter(|(_, flags)| !flags.is_empty());
            fds.extend(wanted.map(|(fd, flags)| PollFd::new(fd, *flags)));
        }
        match system::poll(&mut fds, limit) {
            Ok(()) => fds.iter().map(PollFd::revents).collect(),
            // For example with more descriptors than the process may have by now: all are checked, without waiting for any.
            Err(_) => {
                std::thread::sleep(Duration::from_millis(10));
                vec![PollFlags::all(); fds.len()]
            }
        }
    };
    let mut ready = ready.into_iter();
    if ready.next().is_some_and(|flags| !flags.is_empty()) {
        system::clear_event(supervisor.event.as_fd());
    }
    for worker in workers {
        let Watch { processes, stuck, .. } = &mut worker.watch;
        for watched in processes.iter_mut().chain(stuck) {
            for flags in watched.flags.iter_mut().filter(|flags| !flags.is_empty()) {
                *flags = ready.next().unwrap_or(PollFlags::empty());
            }
        }
    }
}

fn watched(watch: &Watch) -> impl Iterator<Item = &Watched> {
    watch.processes.iter().chain(&watch.stuck)
}
