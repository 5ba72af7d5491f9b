//! When a wait is looked at, and by whom (pure).
//!
//! The age of a wait is the time since its stream's head was first waited for, or since the preceding completion. The poller looks at work
//! of some age again after a fraction of that age, so a completion is found late by at most that fraction of the wait, whatever came before
//! ([`cadence`]). A stream's memory of its waits ([`estimator`](super::estimator)) only adds looks: each remembered length opens a *window*
//! around the age at which such work was complete.
//!
//! | age | who looks | when |
//! |---|---|---|
//! | any | the poller | after a 64th of the age: at least [`NAP_LEAST_NS`], at most [`NAP_MOST_NS`] |
//! | in a window | the poller as well | after a 32nd of the rest of the window, but no sooner than its rest |
//! | in a window of at most [`CHECK_MOST_NS`], from [`NAP_LEAST_NS`] before it on | the polling task: a *check* | at each poll |
//! | with nothing remembered, below [`CHECK_NS`] | the polling task: a *check* | at each poll |
//!
//! Between two rounds over its streams the poller sleeps, if only for a moment. Each stream is due at a time of its own, and a poller that came
//! to each in time would never sleep while a dozen waits are under way: on two cores the task that it wakes would wait for its core.
//!
//! A checking task yields between its polls. At most one task checks per stream, and [`CHECKERS`] per device; for a length that does not
//! repeat, where a window is a guess, only while no other task checks. While the poller wakes tasks often ([`OFTEN_NS`]) and no task checks,
//! one of the waiting tasks *stays awake*: it yields again and again without looking, so that a worker of the executor picks up at once
//! what the poller finds. (A sleeping worker is late by some 20 µs, occasionally by hundreds.) It yields its core as well, which the poller
//! may need. The poller leaves a stream to its checker as long as the executor polls it every [`CHECK_AGAIN_NS`]; a checker that is polled
//! later stops checking. When a window opens and no task checks (an awake worker serves the others), the poller wakes the stream's first
//! waiter to check: the latency of waking a sleeping worker, 6 µs and occasionally hundreds, then passes before the work is complete. Until
//! that task checks, the poller looks. After slow wake-ups, windows open that much earlier.
//!
//! # The numbers
//! H200, driver 580, 16 cores of a virtual machine; the printed lines are in `benches/results`.
//!
//! | what | µs | so |
//! |---|---|---|
//! | a query that finds an event pending, complete | 0.17, 1.3 | the newest marker is asked first |
//! | a word written by the stream, vs an event | + 0.8 to submit, − 1.3 to see | words up to [`WORD_MOST_NS`], beside one checking task |
//! | a nap with exact timers: late by, CPU | 2.6, 3 | [`REST_LEAST_NS`], [`NAP_LEAST_NS`] |
//! | a host function behind 200 µs, 1 ms, 200 ms of waiting: late by | 62, 450, 560 | no doorbells: the cadence is as early |
//!
//! What each mechanism gains: the bench line that gets worst without it, alternating in one process (`ablation` in
//! `benches/results/decisions.txt`). Mechanisms that improved no line were removed.
//!
//! | without | the line | µs, or per second |
//! |---|---|---|
//! | checks | await of 8 µs, p50 | 9.7 → 26 |
//! | more than two tasks that check | `mixed16_log`, p99 | 61 → 76 |
//! | waking ahead of time | await of 200 µs, p50 | 13 → 42 |
//! | looks between waking a task ahead and its first check | `mixed16_uniform`, p99 | 94 → 136 |
//! | the lag of wake-ups | repeated 20 ms, p50 | 55 → 85 |
//! | windows | repeated 20 ms, p50 | 57 → 319 |
//! | windows for more than one length | `mixed16_log`, p99 | 83 → 106 |
//! | going on to check in the next window (2026-11-27) | `alternating_20us_60us`, p50 | 10.8 → 14.9 |
//! | words | await of 8 µs, p50 | 9.4 → 10.5 |
//! | a rest as short as a round: four times as long | `mixed16_log`, p99 | 61 → 81 |
//! | a task that stays awake while the poller wakes others often | `mixed16_uniform`, p99 | 51 → 66 |
//! | yielding the core while a task checks or stays awake, on two cores | `mixed16_uniform`, p99 | 76 → 1,476 |
//! | a sleep between any two rounds, on two cores (2026-11-28) | `mixed16_uniform`, p99 | 147 → 1,091 |
//! | a poller and inboxes that never yield, and tasks that stop when yields are costly (2026-11-28) | `busy_cores.threads`, 300 µs, p50 | 31 → 3,344 |
//! | a poller's slices of 0.1 ms (2026-11-28) | `busy_cores.threads`, p99 | 3,737 → 5,094 |
//! | a poller that owes its neighbours nothing ([`owed`](super::owed), 2026-11-28) | `busy_cores.threads`, 3 ms, p50 | 73 → 875 |
//! | sparing checks of lengths that do not repeat | `mixed16_uniform`, cores | 2.5 → 2.9 |
//! | yielding to woken tasks ([`ready_tasks`](super::ready_tasks)) | 1,024 tasks, awaits a second | 529,000 → 456,000 |
//!
//! # Invariants
//! 1. A planned look lies ahead, and no further than the cadence (`every_plan_makes_progress`).
//! 2. Looks are few: their number grows with the logarithm of the wait, then with the longest nap (`looks_are_few`).
//! 3. Work of any length is found late by at most one nap of the cadence, whatever came before (`any_length_is_found_in_time`).
#![forbid(unsafe_code)]

use super::estimator::{CHECK_MOST_NS, Estimator, Window};

/// How the host detects completions. [`Completion::Adaptive`] is right for almost every program; the others
/// exist for comparison, and for systems on which one mechanism does not work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Completion {
    /// Events, and words written by the stream while few tasks wait. The task checks for a moment; the poller
    /// looks when the work may be complete, and at intervals: a completion is found late by at most a 64th of
    /// the wait, or by 20 µs if that is more, and never by more than a millisecond.
    #[default]
    Adaptive,
    /// Events; only the poller looks, and there are no callbacks.
    Event,
    /// Words alone, for tests of them and for benches: the stream writes its ticket into a word of mapped pinned memory; only the
    /// poller looks.
    #[cfg(feature = "test-util")]
    #[doc(hidden)]
    Word,
    /// A host callback behind the awaited work, on up to 16 streams at once, notifies the poller; the driver
    /// delivers it late, some 0.4 ms behind long work on an H200. Until the first look has armed it, and on
    /// streams beyond 16, the poller looks as in the other modes. No task checks.
    Callback,
}

/// With nothing remembered, a task checks for itself up to this age.
pub const CHECK_NS: u64 = 40_000;
/// The poller rests as long as its last round took, and at least this long.
pub const REST_LEAST_NS: u64 = 8_000;
/// Wake-ups from waits of this length on tell how long a wake-up takes: the processor sleeps deeper.
pub const LAG_FROM_NS: u64 = 300_000;
/// The longest time from a wake-up to the poll that is allowed for.
pub const LAG_MOST_NS: u64 = 400_000;
/// Tasks of one device that check at once; others wait for the poller.
pub const CHECKERS: usize = 8;
/// The poller wakes tasks often if at most this long passes in between.
pub const OFTEN_NS: u64 = 200_000;
/// Words mark streams whose work takes at most this long, while at most one task checks.
pub const WORD_MOST_NS: u64 = 30_000;
/// Work of some age is looked at again after this part of it, ...
pub const NAP_PART: u64 = 64;
/// ... but not sooner than this (a window counts as open this long before: a nap is not worthwhile), ...
pub const NAP_LEAST_NS: u64 = 20_000;
/// ... and not later.
pub const NAP_MOST_NS: u64 = 1_000_000;
/// A checking task that is not polled for this long is served by the poller.
pub const CHECK_AGAIN_NS: u64 = 100_000;
/// A thread that gets its core back this late lost it to a neighbour, whose slice is 0.7 ms or more; a shorter delay may be due to a thread of this
/// crate.
pub const SLICE_NS: u64 = 500_000;
/// For this long the cores count as busy with others, ...
pub const BUSY_NS: u64 = 100_000_000;
/// ... and twice as long each time that it happens again soon, up to this.
pub const BUSY_MOST_NS: u64 = 3_200_000_000;
/// While a future waits, the device's health is queried this often.
pub const PROBE_NS: u64 = 5_000_000;
/// An idle device whose loss is awaited is queried this often.
pub const WATCH_NS: u64 = 1_000_000_000;
/// Lent memory and retired memory get a marker after this long at the latest.
pub const MARK_WITHIN_NS: u64 = 1_000_000;
/// A stream without work stays with the poller for this long.
pub const LINGER_NS: u64 = 20_000_000;
/// A marker is placed after this many commands without one, so that the depth of the queue is known. When a
/// stream without waiters has twice as many markers, its submitter sweeps them.
pub const MARK_EVERY: u64 = 128;
/// Commands in flight above which the next one may block the calling thread: the driver takes 1,021 on
/// a stream.
pub const CROWDED: u64 = 800;

/// A wait, at some moment.
#[derive(Clone, Copy, Debug)]
pub struct Age {
    /// Since the head of the stream was waited for, or since the preceding completion.
    pub age_ns: u64,
    /// How long a task recently took from being woken to being polled.
    pub lag_ns: u64,
    /// How long the poller rests between two rounds, at least.
    pub rest_ns: u64,
    /// A doorbell is armed behind the awaited work.
    pub is_armed: bool,
}

/// What to do about a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// It may be complete at any moment: up to this age a task may check.
    pub check_until_ns: Option<u64>,
    /// Whether that is a length that repeats, or the first.
    pub repeats: bool,
    /// The age at which the poller looks, at the latest, if no task does.
    pub look_ns: u64,
}

impl Completion {
    /// Whether words mark all work.
    #[doc(hidden)]
    #[inline]
    pub fn always_words(self) -> bool {
        #[cfg(feature = "test-util")]
        return self == Completion::Word;
        #[cfg(not(feature = "test-util"))]
        false
    }

    /// Whether words mark any work.
    #[doc(hidden)]
    #[inline]
    pub fn may_use_words(self) -> bool {
        self == Completion::Adaptive || self.always_words()
    }

    /// Whether tasks check for themselves.
    #[doc(hidden)]
    #[inline]
    pub fn checks(self) -> bool {
        self == Completion::Adaptive
    }

    /// Whether the poller asks for doorbells.
    #[doc(hidden)]
    #[inline]
    pub fn rings(self) -> bool {
        self == Completion::Callback
    }

    /// How long the poller naps between two looks within a window that is over in `left_ns`.
    #[doc(hidden)]
    #[inline]
    pub fn watch(self, left_ns: u64, rest_ns: u64) -> u64 {
        match self {
            Completion::Adaptive => (left_ns / 32).max(rest_ns),
            // Nothing else looks.
            _ => left_ns / 256 + 1,
        }
    }
}

/// The longest nap between two looks at work of that age.
#[inline]
pub fn cadence(age_ns: u64) -> u64 {
    (age_ns / NAP_PART).clamp(NAP_LEAST_NS, NAP_MOST_NS)
}

/// The plan for a wait of that age. Inlined, so that the compiler drops the time of the next look for callers
/// that only ask whether to check.
#[inline(always)]
pub fn plan(mode: Completion, age: Age, estimator: &Estimator) -> Plan {
    let Age { age_ns, lag_ns, rest_ns, is_armed } = age;
    if is_armed {
        let nap = (age_ns / 4).clamp(NAP_MOST_NS, PROBE_NS);
        return Plan { check_until_ns: None, repeats: true, look_ns: age_ns + nap };
    }
    let look_ns = age_ns + cadence(age_ns).max(rest_ns);
    let mut plan = Plan { check_until_ns: None, repeats: true, look_ns };
    if mode == Completion::Callback {
        return plan;
    }
    match estimator.window(age_ns) {
        None if estimator.is_empty() && age_ns < CHECK_NS => plan.check_until_ns = Some(CHECK_NS),
        None => {}
        Some(Window { from_ns, until_ns, repeats }) => {
            plan.repeats = repeats;
            // A task must be woken before its window opens.
            let ahead = NAP_LEAST_NS + (lag_ns + lag_ns / 2).min(from_ns / 5);
            let open_ns = from_ns.saturating_sub(ahead);
            if age_ns < open_ns {
                plan.look_ns = plan.look_ns.min(open_ns);
            } else {
                let nap = mode.watch(until_ns - age_ns, rest_ns);
                plan.look_ns = plan.look_ns.min(age_ns + nap);
                let is_short = until_ns - from_ns <= CHECK_MOST_NS;
                plan.check_until_ns = is_short.then_some(until_ns);
            }
        }
    }
    plan
}

/// How long tasks take from being woken to being polled, updated with a new sample: an upper bound for most
/// of them.
#[inline]
pub fn lag(known_ns: u64, new_ns: u64) -> u64 {
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
#[inline]
pub fn rest(spent_ns: u64) -> u64 {
    spent_ns.max(REST_LEAST_NS)
}
