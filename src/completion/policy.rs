//! How a waiter spends its time: the phases and the numbers behind them (pure).
//!
//! | phase | who looks | from | until |
//! |---|---|---|---|
//! | check | the polling task itself, yielding in between | the first poll | [`CHECK_FOR`] or [`CHECKS`] |
//! | sweep | the poller, without sleeping | registration | [`SWEEP_FOR`] without progress |
//! | park | nobody; a doorbell wakes the poller | the sweep's end | completion |
//! | probe | the poller, after a time-out | parked for [`probe_after`] | it backs off with age |
//!
//! The numbers are first guesses from `benches/results`; each may move, none is part of the API.
#![forbid(unsafe_code)]

use std::time::Duration;

/// How the host learns of completions. [`Completion::Adaptive`] suits everybody; the others exist
/// to be compared, and for systems where one of them is out of order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Completion {
    /// Events; the task checks for a moment, then the poller sweeps, then it sleeps until a host
    /// callback rings.
    #[default]
    Adaptive,
    /// Events; the poller sweeps and sleeps in ever longer steps, no callbacks.
    Event,
    /// The stream writes its ticket into a word of mapped pinned memory; the poller looks at words.
    Word,
    /// Each marker arms a host callback; nothing spins.
    Callback,
}

/// A task checks for itself for at most this long.
pub(crate) const CHECK_FOR: Duration = Duration::from_micros(30);
/// ... and at most so many times.
pub(crate) const CHECKS: u32 = 400;
/// Tasks of one device that check at once; others go to the poller.
pub(crate) const CHECKERS: u32 = 4;
/// The poller sweeps for so long without progress before it sleeps.
pub(crate) const SWEEP_FOR: Duration = Duration::from_micros(100);
/// Lent memory and retired memory get a marker after this long at the latest.
pub(crate) const MARK_WITHIN: Duration = Duration::from_millis(1);
/// A stream without work stays with the poller for this long.
pub(crate) const LINGER: Duration = Duration::from_millis(20);
/// Commands without a marker before one is placed, so that depth is known.
pub(crate) const MARK_EVERY: u32 = 128;
/// Submissions in flight above which a drop leaves its free to the poller.
pub(crate) const BUSY_QUEUE: u64 = 800;

impl Completion {
    pub(crate) fn uses_words(self) -> bool {
        self == Completion::Word
    }

    /// Whether a parked poller asks for a doorbell.
    pub(crate) fn arms_doorbells(self) -> bool {
        matches!(self, Completion::Adaptive | Completion::Callback)
    }

    /// Whether tasks check for themselves. `learned` is how long waits on this stream took lately.
    pub(crate) fn checks(self, learned: Duration) -> bool {
        self == Completion::Adaptive && learned <= 3 * CHECK_FOR
    }

    /// How long the poller sweeps without progress before it sleeps.
    pub(crate) fn sweep_for(self) -> Duration {
        if self == Completion::Callback { Duration::ZERO } else { SWEEP_FOR }
    }
}

/// How long a parked poller sleeps at most, if it has been without progress for `age` and somebody
/// waits.
pub(crate) fn probe_after(mode: Completion, age: Duration) -> Duration {
    let (least, most) = if mode.arms_doorbells() {
        (Duration::from_micros(500), Duration::from_millis(5))
    } else {
        // Nothing rings: the time-out is the mechanism.
        (Duration::from_micros(20), Duration::from_millis(1))
    };
    (age / 4).clamp(least, most)
}
