//! Whether a process still works, by what it publishes and how often its supervisor looks (pure).
//!
//! A thread of the process that does nothing else counts beats, and a task of its executor counts polls. The supervisor looks every [`EVERY`], and judges only by timely looks: after a pause of its own, or of the
//! machine, it starts over.
//!
//! | verdict | when |
//! |---|---|
//! | `Well` | none of the others |
//! | `Stopped` | the system says that it is stopped or traced: reported, never killed |
//! | `Busy` | its executor was not polled for [`STILL`] timely looks: reported |
//! | `Dead` | no beat for [`STILL`] timely looks |
//! | `Hung` | its executor was not polled for longer than the limit, if there is one; not while it starts |
//!
//! # Invariants
//! 1. A pause of the supervisor kills nobody: `Dead` needs ten timely looks in a row without a beat (`a_pause_of_the_supervisor_kills_nobody`).
//! 2. A stopped process is never `Dead` or `Hung`, and starts over when it goes on (`a_stopped_process_is_reported`).
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// How often the supervisor looks.
pub(crate) const EVERY: Duration = Duration::from_millis(500);
/// How many looks in a row without a change are enough.
const STILL: u32 = 10;
/// After this many looks without a beat a process is not relied on: it beats five times between two looks.
const SILENT: u32 = 4;

/// What a process publishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Beat {
    /// Counted by its thread.
    pub(crate) process: u64,
    /// Counted by its executor.
    pub(crate) executor: u64,
}

/// What a look shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Pulse {
    Well,
    Stopped,
    Busy,
    Dead,
    Hung(Duration),
}

/// What the looks at one process have shown.
#[derive(Debug, Default)]
pub(crate) struct Heart {
    last: Option<(Instant, Beat)>,
    process_still: u32,
    executor_still: u32,
}

impl Heart {
    /// Whether it missed the last beats, so that it should not take over.
    pub(crate) fn is_silent(&self) -> bool {
        self.process_still >= SILENT
    }

    /// Looks once. `limit` is how long the executor may go unpolled; `None` while the service starts.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        beat: Beat,
        stopped: bool,
        limit: Option<Duration>,
    ) -> Pulse {
        let last = self.last.replace((now, beat));
        let timely = last.filter(|(at, _)| now.saturating_duration_since(*at) <= 2 * EVERY);
        let Some((_, before)) = timely.filter(|_| !stopped) else {
            (self.process_still, self.executor_still) = (0, 0);
            return if stopped { Pulse::Stopped } else { Pulse::Well };
        };
        let count = |still: u32, same: bool| if same { still + 1 } else { 0 };
        self.process_still = count(self.process_still, before.process == beat.process);
        self.executor_still = count(self.executor_still, before.executor == beat.executor);
        // A process that does not beat does not say how long its calls take either.
        if self.process_still >= STILL {
            return Pulse::Dead;
        }
        let blocked = EVERY * self.executor_still;
        match limit {
            Some(limit) if blocked > limit => Pulse::Hung(blocked),
            _ if self.executor_still >= STILL => Pulse::Busy,
            _ => Pulse::Well,
        }
    }
}
