//! When a stream's work was waited for and looked at, and how long it took.
//!
//! All times are of the engine's clock, in nanoseconds.
//!
//! ORDERING: Relaxed throughout: times, for guesses.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gpu_await_protocol::cadence;
use gpu_await_protocol::cadence::{Age, Completion, Plan};
use gpu_await_protocol::estimator::Estimator;
use gpu_await_protocol::sync::Mutex;

#[derive(Default)]
pub(super) struct Pace {
    /// When the work at the head was first waited for, or the work in front of it was complete.
    head_since: AtomicU64,
    /// When the stream was last seen not to have moved.
    pending_at: AtomicU64,
    /// When a task last looked for itself.
    checked_at: AtomicU64,
    /// The end of the last window for which a task was woken to check.
    alerted: AtomicU64,
    /// When the poller last woke a task, until that is polled; 0: it did not.
    woken_at: AtomicU64,
    /// The highest ticket behind which a doorbell was armed. Only the poller arms.
    armed: AtomicU64,
    estimator: Mutex<Estimator>,
    /// Whether all work that it remembers is short.
    is_short: AtomicBool,
}

impl Pace {
    /// The work at the head is waited for from now on.
    #[inline]
    pub(super) fn waited_for(&self, now: u64) {
        self.head_since.store(now, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn head_since(&self) -> u64 {
        self.head_since.load(Ordering::Relaxed)
    }

    /// A look saw nothing new.
    #[inline]
    pub(super) fn was_pending(&self, now: u64) {
        self.pending_at.store(now, Ordering::Relaxed);
    }

    /// A look saw that the stream moved. Remembers how long the work at the head took, if it was waited for: a future that
    /// checks is not entered yet.
    #[inline]
    pub(super) fn moved(&self, now: u64, has_waiters: impl FnOnce() -> bool) {
        let since = self.head_since.swap(now, Ordering::Relaxed);
        if has_waiters() || self.is_checked(now) {
            let pending_at = self.pending_at.load(Ordering::Relaxed);
            let mut estimator = self.estimator.lock();
            estimator.learn(pending_at.saturating_sub(since), now.saturating_sub(since));
            self.is_short.store(estimator.is_short(cadence::WORD_MOST_NS), Ordering::Relaxed);
        }
    }

    /// The time of the last look.
    #[inline]
    pub(super) fn looked_at(&self) -> u64 {
        self.pending_at.load(Ordering::Relaxed).max(self.head_since())
    }

    /// Whether all work that it remembers is short.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }

    /// Whether a task looks for itself, and was polled lately.
    #[inline]
    pub(super) fn is_checked(&self, now: u64) -> bool {
        let checked_at = self.checked_at.load(Ordering::Relaxed);
        checked_at + cadence::CHECK_AGAIN_NS > now && checked_at != 0
    }

    /// A task looks for itself at `now`; 0: it stops.
    #[inline]
    pub(super) fn check(&self, now: u64) {
        self.checked_at.store(now, Ordering::Relaxed);
    }

    /// Whether a window is open for which a task was woken to check.
    #[inline]
    pub(super) fn is_alerted(&self, now: u64) -> bool {
        self.alerted.load(Ordering::Relaxed) > now
    }

    /// Whether a task was woken to check until `until`. Only the poller alerts.
    pub(super) fn is_alerted_until(&self, until: u64) -> bool {
        self.alerted.load(Ordering::Relaxed) == until
    }

    /// A task is woken now, to check until `until`.
    pub(super) fn alert(&self, now: u64, since: u64, until: u64) {
        self.alerted.store(until, Ordering::Relaxed);
        self.woke(now, since);
    }

    /// A task is woken now that waited since then: its poll shows how long that takes.
    pub(super) fn woke(&self, now: u64, since: u64) {
        if now.saturating_sub(since) >= cadence::LAG_FROM_NS {
            self.woken_at.store(now, Ordering::Relaxed);
        }
    }

    /// When the poller woke the task that is polled now, if it did.
    #[inline]
    pub(super) fn take_woken(&self) -> Option<u64> {
        if self.woken_at.load(Ordering::Relaxed) == 0 {
            return None;
        }
        Some(self.woken_at.swap(0, Ordering::Relaxed)).filter(|woken_at| *woken_at != 0)
    }

    /// Whether a doorbell was armed at or behind `ticket`.
    #[inline]
    pub(super) fn is_armed(&self, ticket: u64) -> bool {
        self.armed.load(Ordering::Relaxed) >= ticket
    }

    /// A doorbell is armed behind `ticket`.
    pub(super) fn arm(&self, ticket: u64) {
        self.armed.store(ticket, Ordering::Relaxed);
    }

    /// The plan for the wait for the work at the head, behind the ticket `completed`, and when that began.
    #[inline(always)]
    pub(super) fn plan(
        &self,
        completion: Completion,
        completed: u64,
        now: u64,
        lag_ns: u64,
        rest_ns: u64,
    ) -> (u64, Plan) {
        let since = self.head_since();
        let age_ns = now.saturating_sub(since);
        let age = Age { age_ns, lag_ns, rest_ns, is_armed: self.is_armed(completed + 1) };
        (since, cadence::plan(completion, age, &self.estimator.lock()))
    }
}
