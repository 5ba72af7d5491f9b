//! A fork waits for the threads of this crate.
//!
//! A lock that another thread holds at a fork stays locked in the child. A program knows what its own threads are doing, but not what a poller
//! is doing, which takes locks all the time. So a thread of this crate has a [`Turn`] while it runs, and none while it [rests](rest), that is,
//! sleeps or runs a kernel's twin. A fork begins when all turns have ended, and no other begins before it is over.
//!
//! | who | does |
//! |---|---|
//! | a thread that starts one of this crate | [`starts`] |
//! | a thread of this crate | [`Starting::enter`], [`rest`] and [`pause`], [`leave_for_good`] |
//! | a thread that forks, before the fork | [`hold`] |
//! | the same thread, after it in the parent | [`let_go`] |
//! | the child | nothing: it has no such threads |
//!
//! # Invariants
//! 1. At a fork no thread of this crate holds a lock, unless one has been at a single task for all of [`PATIENCE`], as in a call of the driver
//!    (`a_child_of_a_busy_parent_waits_for_no_lock`).
//! 2. Nor does one hold a lock of the standard library, which takes some as a thread starts and ends: the fork waits for a thread from before
//!    its start until it has entered, and from its last turn until it is gone, unless that takes more than [`MOVING`]
//!    (`a_fork_waits_for_who_starts_or_ends`).
#![forbid(unsafe_code)]

use std::cell::{Cell, OnceCell};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gpu_await_protocol::sync::Mutex;
use gpu_await_protocol::turn::Turn;

use super::exit;
use super::relax::Relax;
use crate::thread::process::{self, PerProcess, Process};

/// How long a fork waits for turns: a driver may keep a thread for as long as a kernel runs.
const PATIENCE: Duration = Duration::from_millis(20);

/// How long it waits for threads that start or end. They may wait for a core, but not for a driver.
const MOVING: Duration = Duration::from_secs(1);

static THREADS: PerProcess<Mutex<OurThreads>> = PerProcess::new(Mutex::default);

/// The threads of this crate in a process.
#[derive(Default)]
struct OurThreads {
    turns: Vec<Weak<Turn>>,
    /// How many are being started.
    starting: u64,
    /// The system's paths of those that have had their last turn.
    ending: Vec<PathBuf>,
    /// How many forks are under way.
    forks: u64,
}

impl OurThreads {
    /// The turns of all threads but the calling one, which may fork as well: in a waker.
    fn others(&self) -> Vec<Arc<Turn>> {
        let is_own = |turn: &Arc<Turn>| own(|own| Arc::ptr_eq(&own.turn, turn)) == Some(true);
        self.turns.iter().filter_map(Weak::upgrade).filter(|turn| !is_own(turn)).collect()
    }
}

/// The calling thread's turn, if it is one of this crate.
struct OwnTurn {
    turn: Arc<Turn>,
    process: Process,
}

thread_local! {
    static OWN: OnceCell<OwnTurn> = const { OnceCell::new() };
    /// How many times the thread holds the others: the functions below may be registered, even twice, in the middle of its fork.
    static HOLDS: Cell<u32> = const { Cell::new(0) };
}

/// The calling thread's turn, if it is one of this crate. Other threads also come here in destructors of their thread-locals, where this one
/// may be gone.
#[inline]
fn own<R>(f: impl FnOnce(&OwnTurn) -> R) -> Option<R> {
    OWN.try_with(|own| own.get().map(f)).ok().flatten()
}

impl OwnTurn {
    fn begin(&self) {
        let mut relax = Relax::default();
        // A child that was forked on this thread inherits the turn as it was, and goes on.
        while !self.turn.try_begin() && self.process.is_here() {
            relax.pause();
        }
    }
}

/// Announces that a thread of this crate is about to be started; dropped, it was not.
pub(super) fn starts() -> Starting {
    process::around_forks(hold, let_go);
    let may_wait = own(|_| ()).is_none() && HOLDS.with(Cell::get) == 0;
    let (begun, mut relax) = (Instant::now(), Relax::default());
    loop {
        let mut threads = THREADS.get().lock();
        // A thread of the program starts none while a fork is under way.
        if threads.forks == 0 || !may_wait || begun.elapsed() > MOVING {
            threads.starting += 1;
            return Starting(Process::this());
        }
        drop(threads);
        relax.pause();
    }
}

/// A thread that is about to be started.
pub(super) struct Starting(Process);

impl Starting {
    /// The calling thread is the announced one, and has started.
    pub(super) fn enter(self) {
        let mut threads = THREADS.get().lock();
        let turn = Arc::new(Turn::new(threads.forks));
        threads.turns.retain(|turn| turn.strong_count() > 0);
        threads.turns.push(Arc::downgrade(&turn));
        drop(threads);
        let process = self.0;
        OWN.with(|own| {
            let own = own.get_or_init(|| OwnTurn { turn, process });
            // From here on a fork waits for its turn.
            drop(self);
            own.begin();
        });
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        // A child has none of its parent's threads.
        if self.0.is_here() {
            THREADS.get().lock().starting -= 1;
        }
    }
}

/// Called when the calling thread, which has entered, has nothing of this crate left to run but its end.
pub(super) fn leave_for_good() {
    // Only Linux tells when a thread is gone.
    if !cfg!(miri)
        && let Ok(own) = std::fs::read_link("/proc/thread-self")
    {
        let mut threads = THREADS.get().lock();
        threads.ending.retain(|thread| thread.exists());
        threads.ending.push(Path::new("/proc").join(own));
    }
    leave();
}

fn leave() {
    own(|own| own.turn.end());
}

/// Sleeps, or runs foreign code that may take long, between two turns. The caller holds no lock that the child of a fork may want.
pub(crate) fn rest<R>(sleep: impl FnOnce() -> R) -> R {
    leave();
    // Foreign code is contained by the caller.
    let slept = sleep();
    own(OwnTurn::begin);
    slept
}

/// For a thread that does not sleep: ends its turn and begins another if a fork waits.
#[inline]
pub(crate) fn pause() {
    if own(|own| own.turn.is_wanted()) == Some(true) {
        rest(|| ());
    }
}

/// Runs before a fork.
fn hold() {
    let Some(threads) = THREADS.made() else { return };
    {
        let mut threads = threads.lock();
        threads.forks += 1;
        HOLDS.with(|holds| holds.set(holds.get() + 1));
        threads.others().iter().for_each(|turn| turn.hold());
    }
    let (begun, mut relax) = (Instant::now(), Relax::default());
    loop {
        // Under one lock: a thread that has had its last turn is then among those that end.
        let (are_moving, are_busy) = {
            let mut threads = threads.lock();
            threads.ending.retain(|thread| thread.exists());
            // At the end of the process a thread that is ending stays.
            let are_ending = !threads.ending.is_empty() && !exit::begun();
            let others = threads.others();
            (threads.starting > 0 || are_ending, others.iter().any(|turn| !turn.is_at_rest()))
        };
        let waited = begun.elapsed();
        if !(are_moving && waited < MOVING || are_busy && waited < PATIENCE) {
            return;
        }
        relax.pause();
    }
}

/// Runs in the parent after a fork.
fn let_go() {
    let holds = HOLDS.with(Cell::get);
    let Some(threads) = THREADS.made().filter(|_| holds > 0) else { return };
    HOLDS.with(|left| left.set(holds - 1));
    let mut threads = threads.lock();
    if threads.forks == 0 {
        // This is a child that was forked on this thread, and then registered them.
        return;
    }
    threads.forks -= 1;
    threads.others().iter().for_each(|turn| turn.let_go());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How long a fork waits now.
    fn held() -> Duration {
        let begun = Instant::now();
        hold();
        let held = begun.elapsed();
        let_go();
        held
    }

    #[test]
    fn a_fork_waits_for_who_starts_or_ends() {
        let starting = starts();
        assert!(held() >= MOVING, "it did not enter");
        drop(starting);
        THREADS.get().lock().ending.push(Path::new("/proc/self").to_owned());
        assert!(held() >= MOVING, "it is not gone");
        THREADS.get().lock().ending.clear();
        // At least one of these: other tests have threads as well.
        assert!((0..50).any(|_| held() < PATIENCE), "there is nobody");
    }
}
