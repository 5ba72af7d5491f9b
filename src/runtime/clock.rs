//! [`Clock`]: a clock and its deadlines. [`Pacing`]: when a device's poller and its tasks look.
//!
//! | a clock of | follows | its deadlines are fired by |
//! |---|---|---|
//! | a device | the system's | the device's poller, also when the device is lost or closed, until it is gone |
//! | a stepped device | its steps | its steps |
//! | no device: a batcher without a pool | the system's | a thread of its own, from the first deadline |
//!
//! In the child of a fork nothing fires a deadline that a thread of the parent would have fired ([`Clock::is_inherited`]).
//!
//! Each waiter has a [`Deadline`] of its own, so that no stalled task delays another. This module and [`Engine`](super::Engine) are all that
//! pools and batchers know of the runtime.
//!
//! # Invariants
//! 1. A deadline fires at its time, or at the end of its clock; if nothing would fire it, it is ready at once (`tests/serving/deadlines.rs`,
//!    `a_child_waits_for_no_thread_of_its_parent`).
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use super::attention::Attention;
use super::progress::DeviceState;
use crate::system;
use crate::thread::contain::{self, wake};
use crate::thread::inbox::{Nothing, Receiver};
use crate::thread::process::Process;
use crate::thread::worker::Worker;
use gpu_await_protocol::cadence;
use gpu_await_protocol::checkers::Checkers;
use gpu_await_protocol::deadlines::{Deadlines, NEVER};

/// A clock, in nanoseconds since its origin.
pub(crate) struct Clock {
    origin: Instant,
    /// The process that made it, and its device or batcher.
    process: Process,
    keeper: TimeKeeper,
    deadlines: Deadlines<Waker>,
}

/// What advances a clock and fires its deadlines.
enum TimeKeeper {
    Poller(Arc<Attention>),
    /// The time of a stepped device, which only its steps advance.
    Steps(AtomicU64),
    /// Gets a message when a new deadline is the earliest.
    Thread(Worker<()>),
}

/// Resolves at a time of a clock, or at once if nothing would fire it.
pub(crate) struct Deadline {
    clock: Arc<Clock>,
    due: u64,
    key: Option<u64>,
}

impl Clock {
    /// The clock of a device whose poller has this attention.
    fn of_poller(attention: &Arc<Attention>) -> Arc<Self> {
        Clock::new(TimeKeeper::Poller(attention.clone()))
    }

    /// The clock of a stepped device.
    fn of_steps() -> Arc<Self> {
        Clock::new(TimeKeeper::Steps(AtomicU64::new(0)))
    }

    /// A clock with a thread of its own, from the first deadline.
    pub(crate) fn of_thread() -> Arc<Self> {
        Clock::new(TimeKeeper::Thread(Worker::new("gpu-await-clock")))
    }

    fn new(keeper: TimeKeeper) -> Arc<Self> {
        let (process, deadlines) = (Process::remembered(), Deadlines::new());
        Arc::new(Clock { origin: Instant::now(), process, keeper, deadlines })
    }

    pub(crate) fn now(&self) -> u64 {
        match &self.keeper {
            // ORDERING: Relaxed: times are for guesses.
            TimeKeeper::Steps(now) => now.load(Ordering::Relaxed),
            // 584 years.
            _ => self.origin.elapsed().as_nanos() as u64,
        }
    }

    /// The time `limit` from now; `None` if it is out of range.
    pub(crate) fn after(&self, limit: Duration) -> Option<u64> {
        self.now().checked_add(u64::try_from(limit.as_nanos()).ok()?)
    }

    /// The clock's time at `at`; on a stepped device, as far ahead as `at` is from now.
    pub(crate) fn time_of(&self, at: Instant) -> u64 {
        let time = match &self.keeper {
            TimeKeeper::Steps(_) => self.after(at.saturating_duration_since(Instant::now())),
            _ => u64::try_from(at.saturating_duration_since(self.origin).as_nanos()).ok(),
        };
        time.unwrap_or(NEVER)
    }

    /// Advances the clock of a stepped device, at most to the middle of its range: times ahead of it must fit in the range as well.
    #[cfg(feature = "test-util")]
    pub(crate) fn advance(&self, by: Duration) {
        let TimeKeeper::Steps(now) = &self.keeper else { return };
        let by = u64::try_from(by.as_nanos()).unwrap_or(NEVER);
        let later = |now: u64| Some(now.saturating_add(by).min(u64::MAX / 2));
        // ORDERING: Relaxed, as above.
        now.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later).ok();
    }

    /// The next deadline, or [`NEVER`].
    pub(crate) fn first(&self) -> u64 {
        self.deadlines.first()
    }

    /// Wakes the waiters whose deadline has passed.
    pub(crate) fn tell(&self) {
        self.deadlines.take_due(self.now()).into_iter().for_each(wake);
    }

    /// Ends the clock: fires all deadlines; later ones are ready at once.
    pub(crate) fn end(&self) {
        self.deadlines.end().into_iter().for_each(wake);
    }

    /// Whether this process inherited it, with its device or batcher, through a fork.
    pub(crate) fn is_inherited(&self) -> bool {
        !self.process.is_here()
    }

    /// Whether deadlines will fire: not if the system refuses the clock's thread, nor if the clock is [inherited](Self::is_inherited).
    pub(crate) fn is_kept(self: &Arc<Self>) -> bool {
        match &self.keeper {
            TimeKeeper::Thread(worker) => worker.start(keep_time(self)),
            TimeKeeper::Poller(_) | TimeKeeper::Steps(_) => !self.is_inherited(),
        }
    }

    /// Registers a deadline; false if nothing would fire it.
    fn enter(self: &Arc<Self>, due: u64, key: &mut Option<u64>, waker: Waker) -> bool {
        if !self.is_kept() {
            contain::let_go(waker);
            return false;
        }
        let entered = match self.deadlines.enter(due, key, waker) {
            Ok(entered) => entered,
            Err(waker) => {
                contain::let_go(waker);
                return false;
            }
        };
        match &self.keeper {
            TimeKeeper::Poller(attention) => attention.call_before(due),
            TimeKeeper::Thread(worker) if entered.is_first => {
                // `is_kept` started the thread.
                worker.send((), keep_time(self)).ok();
            }
            TimeKeeper::Steps(_) | TimeKeeper::Thread(_) => {}
        }
        contain::let_go(entered.stale);
        true
    }
}

/// The work of a clock's own thread, which ends with the clock.
fn keep_time(clock: &Arc<Clock>) -> impl FnOnce(&Receiver<()>) + Send + 'static {
    let clock: Weak<Clock> = Arc::downgrade(clock);
    move |calls| {
        system::minimize_timer_slack();
        while let Some(clock) = clock.upgrade() {
            clock.tell();
            let first = Some(clock.first()).filter(|first| *first != NEVER);
            let until = first.and_then(|ns| clock.origin.checked_add(Duration::from_nanos(ns)));
            // The thread does not keep its clock alive while it waits.
            drop(clock);
            if calls.recv_until(until) == Err(Nothing::More) {
                return;
            }
        }
    }
}

impl Deadline {
    pub(crate) fn at(clock: &Arc<Clock>, due: u64) -> Self {
        Deadline { clock: clock.clone(), due, key: None }
    }

    /// `limit` from now; [`Duration::MAX`] is no deadline at all.
    pub(crate) fn after(clock: &Arc<Clock>, limit: Duration) -> Self {
        Deadline::at(clock, clock.after(limit).unwrap_or(NEVER))
    }

    pub(crate) fn due(&self) -> u64 {
        self.due
    }

    /// Registers `waker` for the deadline, which may have passed; false if nothing would wake it.
    pub(crate) fn wakes(&mut self, waker: Waker) -> bool {
        self.clock.enter(self.due, &mut self.key, waker)
    }
}

impl Future for Deadline {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.clock.now() >= self.due {
            return Poll::Ready(());
        }
        let is_entered = self.due == NEVER || self.wakes(cx.waker().clone());
        if is_entered { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            contain::let_go(self.clock.deadlines.remove(self.due, key));
        }
    }
}

/// When a device's poller and its tasks look, and what they learned about that.
pub(crate) struct Pacing {
    /// Wakes the poller.
    pub(crate) attention: Arc<Attention>,
    /// The device's time, and the moments at which the poller wakes tasks.
    pub(crate) clock: Arc<Clock>,
    /// Permits for tasks that check for themselves, or stay awake.
    pub(crate) checkers: CachePadded<Checkers>,
    /// How long the poller rests between two rounds, at least.
    ///
    /// ORDERING: Relaxed, as for the next: an estimate.
    rest_ns: AtomicU64,
    /// The recent delay between a task's wake-up to check and its poll.
    lag_ns: AtomicU64,
}

impl Pacing {
    pub(super) fn new(state: &Arc<DeviceState>, stepped: bool) -> Self {
        let attention = Arc::new(Attention::new(state, stepped));
        let clock = if stepped { Clock::of_steps() } else { Clock::of_poller(&attention) };
        Pacing {
            attention,
            clock,
            checkers: CachePadded::new(Checkers::new()),
            rest_ns: AtomicU64::new(cadence::REST_LEAST_NS),
            lag_ns: AtomicU64::new(0),
        }
    }

    /// The device's time, in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.clock.now()
    }

    /// How long the poller rests between two rounds, at least, in nanoseconds.
    #[inline]
    pub(crate) fn rest_ns(&self) -> u64 {
        self.rest_ns.load(Ordering::Relaxed)
    }

    /// Records how long a round of the poller took; only the poller calls this.
    pub(crate) fn spent(&self, ns: u64) {
        self.rest_ns.store(cadence::rest(ns), Ordering::Relaxed);
    }

    /// The recent delay between a task's wake-up to check and its poll.
    #[inline]
    pub(crate) fn lag_ns(&self) -> u64 {
        self.lag_ns.load(Ordering::Relaxed)
    }

    /// Records that a task was polled `ns` after it was woken to check.
    pub(crate) fn learn_lag(&self, ns: u64) {
        self.lag_ns.store(cadence::lag(self.lag_ns(), ns), Ordering::Relaxed);
    }
}
