//! The states of a worker, from its first process to its end (pure).
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | `Waiting(until)` | there is no process; one is started then | `tick` → `Starting` |
//! | `Starting(since)` | the process has not said that it serves; it has said hello, or not | `serves` → `Serving`; a limit → `Killing` |
//! | `Serving(since)` | calls are sent | `drain`, `kill`, `reaped` |
//! | `Draining(until)` | no call is sent; the process ends when it has answered what it has | `tick` → `Killing`, `reaped` |
//! | `Killing(since)` | `SIGKILL` was sent | `reaped`; after the grace `tick` sets the process aside as *stuck* |
//! | `Ended` | closed, or given up: there will be no process | `revive`, of one that was given up → `Waiting` |
//!
//! A pause of the supervisor, or of the machine, counts in none of them (`a_pause_counts_in_no_limit`).
//!
//! A process that is set aside is watched until it is reaped, and counts: with more of them than allowed, no other is started.
//!
//! # Invariants
//! 1. At most one process of a worker is not stuck (`a_worker_has_one_process`).
//! 2. Whatever the order of events, a process is started again or the worker has `Ended`: no state waits for ever for a death that
//!    `SIGKILL` does not bring (`a_worker_has_one_process`).
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use crate::restart::{Deaths, Next, Restart, Sign};

/// How long each state may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) hello: Duration,
    pub(crate) start: Duration,
    pub(crate) kill_grace: Duration,
    pub(crate) most_stuck: usize,
}

/// Where the process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Waiting(Instant),
    Starting { since: Instant, said_hello: bool },
    Serving(Instant),
    Draining(Instant),
    Killing { since: Instant, served: Option<Instant> },
    Ended,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Step {
    Nothing,
    /// Start a process.
    Start,
    /// Kill it: it did not say hello in time.
    NoHello,
    /// Kill it: its service did not start in time.
    NoStart,
    /// Kill it: it did not end in time.
    NoEnd,
    /// It cannot be killed: set it aside.
    SetAside,
    /// The worker is given up.
    GiveUp,
    /// The worker has ended, as it was asked to.
    End,
}

/// The life of one worker.
#[derive(Debug)]
pub(crate) struct Life {
    phase: Phase,
    deaths: Deaths,
    stuck: usize,
    /// No other process is to be started.
    closing: bool,
}

impl Life {
    pub(crate) fn new(now: Instant) -> Self {
        Life { phase: Phase::Waiting(now), deaths: Deaths::default(), stuck: 0, closing: false }
    }

    /// One that has ended, with so many processes that are not gone.
    pub(crate) fn over(stuck: usize) -> Self {
        Life { phase: Phase::Ended, deaths: Deaths::default(), stuck, closing: false }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    pub(crate) fn early_deaths(&self) -> u32 {
        self.deaths.early()
    }

    pub(crate) fn stuck(&self) -> usize {
        self.stuck
    }

    pub(crate) fn is_serving(&self) -> bool {
        matches!(self.phase, Phase::Serving(_))
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// When `tick` has something to do.
    pub(crate) fn next_due(&self, limits: &Limits) -> Option<Instant> {
        match self.phase {
            Phase::Waiting(until) | Phase::Draining(until) => Some(until),
            Phase::Starting { since, said_hello } => {
                Some(since + if said_hello { limits.start } else { limits.hello })
            }
            Phase::Killing { since, .. } => Some(since + limits.kill_grace),
            Phase::Serving(_) | Phase::Ended => None,
        }
    }

    /// Nobody looked for so long: that is not the process' time.
    pub(crate) fn held_up(&mut self, time: Duration) {
        match &mut self.phase {
            Phase::Starting { since, .. } | Phase::Killing { since, .. } => *since += time,
            Phase::Draining(until) => *until += time,
            Phase::Waiting(_) | Phase::Serving(_) | Phase::Ended => {}
        }
    }

    /// Time passes. Moves on only where it says so: the caller kills or starts, and says that.
    pub(crate) fn tick(&mut self, now: Instant, limits: &Limits) -> Step {
        if self.next_due(limits).is_none_or(|due| now < due) {
            return Step::Nothing;
        }
        match self.phase {
            Phase::Waiting(_) => {
                self.phase = Phase::Starting { since: now, said_hello: false };
                Step::Start
            }
            Phase::Starting { said_hello, .. } => {
                if said_hello {
                    Step::NoStart
                } else {
                    Step::NoHello
                }
            }
            Phase::Draining(_) => Step::NoEnd,
            Phase::Killing { .. } => {
                self.stuck += 1;
                Step::SetAside
            }
            Phase::Serving(_) | Phase::Ended => Step::Nothing,
        }
    }

    /// The process said hello.
    pub(crate) fn said_hello(&mut self) {
        if let Phase::Starting { said_hello, .. } = &mut self.phase {
            *said_hello = true;
        }
    }

    /// The service started; false if nobody waited for that.
    pub(crate) fn serves(&mut self, now: Instant) -> bool {
        let starts = matches!(self.phase, Phase::Starting { said_hello: true, .. });
        if starts {
            self.phase = Phase::Serving(now);
        }
        starts
    }

    /// No other process is started. What serves ends until then, and what does not is to be killed: returns whether it must be.
    pub(crate) fn close(&mut self, until: Instant) -> bool {
        self.closing = true;
        match self.phase {
            Phase::Serving(_) => {
                self.phase = Phase::Draining(until);
                false
            }
            Phase::Waiting(_) => {
                self.phase = Phase::Ended;
                false
            }
            Phase::Starting { .. } => true,
            Phase::Draining(_) | Phase::Killing { .. } | Phase::Ended => false,
        }
    }

    /// The process was sent `SIGKILL`.
    pub(crate) fn killed(&mut self, now: Instant) {
        self.phase = match self.phase {
            Phase::Starting { .. } => Phase::Killing { since: now, served: None },
            Phase::Serving(since) => Phase::Killing { since: now, served: Some(since) },
            Phase::Draining(_) => Phase::Killing { since: now, served: Some(now) },
            other => other,
        };
    }

    /// The process is gone, could not be started, or was set aside.
    pub(crate) fn gone(
        &mut self,
        now: Instant,
        sign: Sign,
        policy: &Restart,
        limits: &Limits,
    ) -> Step {
        let served = match self.phase {
            Phase::Starting { .. } => None,
            Phase::Serving(since) => Some(since),
            Phase::Draining(_) => Some(now),
            Phase::Killing { served, .. } => served,
            Phase::Waiting(_) | Phase::Ended => return Step::Nothing,
        };
        if self.closing {
            self.phase = Phase::Ended;
            return Step::End;
        }
        let served = served.map(|since| now.saturating_duration_since(since));
        match self.deaths.count(policy, served, sign) {
            Next::StartAfter(delay) if self.stuck <= limits.most_stuck => {
                self.phase = Phase::Waiting(now + delay);
                Step::Nothing
            }
            _ => {
                self.phase = Phase::Ended;
                Step::GiveUp
            }
        }
    }

    /// No process is started any more; there is none.
    pub(crate) fn end(&mut self) {
        self.phase = Phase::Ended;
    }

    /// Begins anew, as if no process had died. Those that were set aside still count.
    pub(crate) fn revive(&mut self, now: Instant) {
        (self.phase, self.deaths) = (Phase::Waiting(now), Deaths::default());
    }

    /// A process that was set aside is gone after all.
    pub(crate) fn unstuck(&mut self) {
        self.stuck -= 1;
    }
}
