//! How a waiter spends its time: the phases and the numbers behind them (pure).
//!
//! The age of a wait is the time since its stream's head was first waited for, or since the
//! completion in front of it. A stream remembers how long such waits took
//! ([`history`](super::history)); each remembered length opens a *window* around the age at which
//! work of that kind was complete. What is done at an age:
//!
//! | phase | who looks | when |
//! |---|---|---|
//! | check | the polling task itself, yielding in between | in a window of at most [`CHECK_MOST_NS`], and from [`NEAR_NS`] before it on; with nothing remembered, below the age of [`CHECK_NS`] |
//! | watch | the poller, in naps of a part of what is left of the window, and at least its rest | in longer windows, and where no task checks: too many do, the executor is busy, the mode says so |
//! | nap | the poller, in steps that grow with the age, or with the time since the last window | outside of windows: work of a new length is found late by such a step at most |
//! | bell | a doorbell wakes the poller, which naps | with no window ahead, beyond the age of [`BELL_NS`] (`Adaptive`); at any age (`Callback`) |
//! | probe | the poller | naps are at most [`PROBE_NS`], for late or lost doorbells; as often it asks whether the device died |
//!
//! One task a stream checks, and [`CHECKERS`] a device. When a window opens and fewer than [`ALERTS`]
//! check, the poller wakes the first that waits, which checks for itself: the 6 µs that it takes to
//! wake a sleeping worker then pass before the work is complete. Where wake-ups took longer lately,
//! windows open that much earlier. While a task checks, the poller leaves the stream to it.
//!
//! # The numbers
//! H200, driver 580, 16 cores of a virtual machine; printed lines are in `benches/results`.
//!
//! | what | µs | so |
//! |---|---|---|
//! | a query that finds an event pending, complete | 0.17, 1.3 | the newest marker is asked first |
//! | a word written by the stream, against an event | + 0.8 to submit, − 1.3 to see | words for work of at most [`WORD_MOST_NS`] while fewer than [`WORDS_BELOW`] tasks check |
//! | a nap with exact timers: late by, CPU | 2.6, 3 | [`NAP_LEAST_NS`] |
//! | a host function behind 200 µs, 1 ms, 200 ms of waiting: late by | 62, 450, 560 | doorbells only for waits that outlast all that is remembered |
//!
//! # Invariants
//! 1. Every phase ends, a nap after [`PROBE_NS`] at most (`every_phase_makes_progress`).
//! 2. Looks are few: their number grows with the logarithm of the wait, then by probes
//!    (`looks_are_few`).
//! 3. Work of a length never seen is found late by a quarter at most, by as long again where all
//!    waits were alike so far, by a sixteenth with nothing remembered, or by the first nap
//!    (`a_new_length_is_found_in_time`).
#![forbid(unsafe_code)]

use super::history::{History, Window};

/// How the host learns of completions. [`Completion::Adaptive`] suits everybody; the others exist
/// to be compared, and for systems where one of them is out of order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Completion {
    /// Events, and words written by the stream while few tasks wait; the task checks for a moment,
    /// the poller looks when the work may be complete, and a host callback wakes it from long
    /// sleeps.
    #[default]
    Adaptive,
    /// Events; only the poller looks, no callbacks.
    Event,
    /// The stream writes its ticket into a word of mapped pinned memory; the poller looks at words.
    Word,
    /// Each marker arms a host callback; nothing spins.
    Callback,
}

/// With nothing remembered, a task checks for itself up to this age.
pub(crate) const CHECK_NS: u64 = 40_000;
/// Tasks check in windows of at most this length; the poller watches longer ones.
pub(crate) const CHECK_MOST_NS: u64 = 250_000;
/// A window counts as open this long before: a nap is not worthwhile.
pub(crate) const NEAR_NS: u64 = 20_000;
/// The poller rests this many times as long as a round over its streams took, ...
pub(crate) const REST_PART: u64 = 3;
/// ... and at most for so long.
pub(crate) const REST_MOST_NS: u64 = 1_000_000;
/// A stream that others wait for is looked at by who comes new to it if nobody did for so long.
pub(crate) const APART_NS: u64 = 200_000;
/// Who comes new to a stream looks at another one if nobody did for so long.
pub(crate) const HELP_NS: u64 = 20_000;
/// While the executor is busy its own threads look, and the poller rests for so long.
pub(crate) const BUSY_REST_NS: u64 = 200_000;
/// Wake-ups from waits of this length on tell how long a wake-up takes: the processor sleeps deeper.
pub(crate) const LAG_FROM_NS: u64 = 300_000;
/// The longest time from a wake-up to the poll that is allowed for.
pub(crate) const LAG_MOST_NS: u64 = 400_000;
/// Tasks are woken ahead of time while fewer than this check: a worker that is awake serves the
/// others.
pub(crate) const ALERTS: usize = 1;
/// Tasks of one device that check at once; others wait for the poller.
pub(crate) const CHECKERS: usize = 8;
/// Words mark the streams while fewer tasks than this check.
pub(crate) const WORDS_BELOW: usize = 2;
/// ... and their work takes at most so long.
pub(crate) const WORD_MOST_NS: u64 = 30_000;
/// An executor whose tasks take this long to be polled again has other things to do ...
pub(crate) const BUSY_NS: u64 = 40_000;
/// ... until they take less than this again; averages over eight.
pub(crate) const IDLE_NS: u64 = 15_000;
/// How long before and behind a span its window opens and closes, at least.
pub(crate) const LEAD_LEAST_NS: u64 = 30_000;
/// The shortest nap.
pub(crate) const NAP_LEAST_NS: u64 = 8_000;
/// The first look at work of unknown length.
pub(crate) const NAP_FIRST_NS: u64 = 20_000;
/// ... where all work took about as long for a while.
pub(crate) const NAP_STEADY_NS: u64 = 50_000;
/// The longest nap while somebody waits; as often the device is asked how it is.
pub(crate) const PROBE_NS: u64 = 5_000_000;
/// As often an idle device is asked whose loss somebody waits for.
pub(crate) const WATCH_NS: u64 = 1_000_000_000;
/// Doorbells are for waits beyond this age.
pub(crate) const BELL_NS: u64 = 500_000;

/// Lent memory and retired memory get a marker after this long at the latest.
pub(crate) const MARK_WITHIN_NS: u64 = 1_000_000;
/// A stream without work stays with the poller for this long.
pub(crate) const LINGER_NS: u64 = 20_000_000;
/// Commands without a marker before one is placed, so that depth is known.
pub(crate) const MARK_EVERY: u64 = 128;
/// Markers of a stream that nobody waits for from which on its submitter looks which are complete.
pub(crate) const TIDY_FROM: u64 = 256;
/// Commands in flight above which the next one may block the calling thread: the driver takes 1,021 on
/// a stream.
pub(crate) const CROWDED: u64 = 800;

/// What to do at some age of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It may be complete any moment, up to this age: the task looks itself.
    Check { until_ns: u64 },
    /// The same, for longer than a task may check: the poller looks.
    Watch { until_ns: u64 },
    /// It will hardly be complete: look at the age of `nap_ns`, roughly, but not after `open_ns`.
    Later { nap_ns: u64, open_ns: u64, bell: bool },
}

/// How long before and behind a span of that length its window opens and closes at most.
pub(crate) fn lead_most(span_ns: u64) -> u64 {
    (span_ns / 8).min(CHECK_MOST_NS).max(span_ns / 32).max(LEAD_LEAST_NS)
}

impl Completion {
    pub(crate) fn always_words(self) -> bool {
        self == Completion::Word
    }

    pub(crate) fn may_use_words(self) -> bool {
        matches!(self, Completion::Word | Completion::Adaptive)
    }

    /// Whether tasks check for themselves.
    pub(crate) fn checks(self) -> bool {
        self == Completion::Adaptive
    }

    /// Whether the poller may ask for a doorbell.
    pub(crate) fn rings(self) -> bool {
        matches!(self, Completion::Adaptive | Completion::Callback)
    }

    /// How long the poller naps between two looks within a window that is over in `left_ns`.
    pub(crate) fn watch(self, left_ns: u64, rest_ns: u64) -> u64 {
        match self {
            Completion::Adaptive | Completion::Callback => (left_ns / 32).max(rest_ns),
            // Nobody else looks.
            Completion::Event | Completion::Word => left_ns / 256,
        }
    }
}

/// What to do about a wait of that age; `lag_ns` is how long a task took lately from being woken to
/// being polled.
pub(crate) fn phase(mode: Completion, age_ns: u64, history: &History, lag_ns: u64) -> Phase {
    if mode == Completion::Callback {
        let probe = (age_ns / 4).clamp(BELL_NS, PROBE_NS);
        return Phase::Later { nap_ns: age_ns + probe, open_ns: u64::MAX, bell: true };
    }
    if history.is_empty() && age_ns < CHECK_NS {
        return Phase::Check { until_ns: CHECK_NS };
    }
    // Work of another length than all remembered is looked for as well, more rarely; what was
    // complete in a window mostly is will be soon behind it, if it was not in it.
    let passed_ns = history.passed(age_ns);
    let (part, first_ns) = match history {
        _ if history.is_empty() => (16, NAP_FIRST_NS),
        _ if history.is_steady() && passed_ns == 0 => (1, NAP_STEADY_NS),
        _ => (4, NAP_FIRST_NS),
    };
    let nap = ((age_ns - passed_ns) / part).clamp(first_ns, PROBE_NS);
    match history.window(age_ns) {
        Some(Window { from_ns, until_ns }) => {
            // A task must be woken before its window opens.
            let ahead = NEAR_NS + (lag_ns + lag_ns / 2).min(from_ns / 5);
            let open_ns = from_ns.saturating_sub(ahead);
            if age_ns < open_ns {
                Phase::Later { nap_ns: age_ns + nap, open_ns, bell: false }
            } else if until_ns - from_ns <= CHECK_MOST_NS {
                Phase::Check { until_ns }
            } else {
                Phase::Watch { until_ns }
            }
        }
        None => {
            let bell = mode.rings() && age_ns >= BELL_NS;
            Phase::Later { nap_ns: age_ns + nap, open_ns: u64::MAX, bell }
        }
    }
}

/// How long tasks take from being woken to being polled, given what was known and a new one: what
/// most of them take at most.
pub(crate) fn lag(known_ns: u64, new_ns: u64) -> u64 {
    let lag = if known_ns == 0 {
        new_ns
    } else if new_ns > known_ns {
        known_ns + (new_ns - known_ns) / 2
    } else {
        known_ns - (known_ns - new_ns) / 16
    };
    lag.min(LAG_MOST_NS)
}

/// How long the poller sleeps at least when a round over its streams took `spent_ns`: looks are made
/// under the driver's lock, in which others launch.
pub(crate) fn rest(spent_ns: u64) -> u64 {
    (REST_PART * spent_ns).clamp(NAP_LEAST_NS, REST_MOST_NS)
}

/// A time soon after `at`, by a quarter of the nap at most, that streams with naps of the same length
/// share, so that one wake-up serves them all.
pub(crate) fn together(now: u64, at: u64) -> u64 {
    let quarter = at.saturating_sub(now) / 4;
    at.next_multiple_of(1 << quarter.max(1).ilog2())
}
