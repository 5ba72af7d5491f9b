//! The health of workers and groups at one moment, as plain data: for readiness and liveness probes, and for people.
#![forbid(unsafe_code)]

use std::fmt;
use std::time::Instant;

use crate::error::Cause;

/// Whether a worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Health {
    /// Its first process starts, or the first one after it was given up.
    Starting,
    /// Calls are answered.
    Serving,
    /// Its process died, or is dying; the next one starts, or will. Calls wait.
    Restarting,
    /// It is closing, as asked.
    Closing,
    /// It was closed.
    Closed,
    /// Its processes died early too often, or the first one did not serve.
    GivenUp,
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Health::Starting => "starting",
            Health::Serving => "serving",
            Health::Restarting => "restarting",
            Health::Closing => "closing",
            Health::Closed => "closed",
            Health::GivenUp => "given up",
        })
    }
}

/// The health of a [`Worker`](crate::Worker): see [`Worker::health`](crate::Worker::health). It prints as a line, such as
/// `restarting for 1.2s, after: signal 9`, without what processes wrote: that is in the cause.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerHealth {
    /// Whether it serves; `None` in a fork of the process that it belongs to.
    pub health: Option<Health>,
    /// Since when.
    pub since: Instant,
    /// For a worker that does not serve: why its last process died, or is being killed; if there was none, why the system refused to start one.
    pub cause: Option<Cause>,
    /// Its process is stopped, or held by a debugger.
    pub is_stopped: bool,
    /// The executor of its process has not been polled for 5 s: something blocks it.
    pub is_busy: bool,
    /// The name of [kept](crate::Host::keep_mut) memory that its process asked for and that is another process's, which has not ended, or another
    /// worker's: no call is sent until it is this one's.
    pub waits_for: Option<String>,
    /// Why the system refused the last attempt to start a process or a standby: it is tried again after a growing delay.
    pub refusal: Option<Cause>,
    /// For a serving worker with a [standby](crate::WorkerBuilder::standby) option: why no standby is started until another process serves.
    pub no_standby: Option<Cause>,
}

impl WorkerHealth {
    /// Whether calls are answered now: a process serves, is neither stopped nor blocked, and has the kept memory that it writes.
    ///
    /// A readiness probe answers 200 if so, and 503 otherwise, also while a process is started again: calls would wait.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.health == Some(Health::Serving)
            && !self.is_stopped
            && !self.is_busy
            && self.waits_for.is_none()
    }

    /// Whether nothing will change by itself: it was given up or closed.
    ///
    /// A liveness probe answers 503 if so, where restarting the front should help, and 200 otherwise. For a worker of a group, which is
    /// probed, ask [`GroupHealth::has_ended`].
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.health, Some(Health::GivenUp | Health::Closed))
    }
}

impl fmt::Display for WorkerHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(health) = self.health else { return f.write_str("a fork has no workers") };
        write!(f, "{health} for {:.1?}", self.since.elapsed())?;
        if self.is_stopped {
            f.write_str(", but its process is stopped or traced")?;
        }
        if self.is_busy {
            f.write_str(", but its executor is blocked")?;
        }
        if let Some(name) = &self.waits_for {
            write!(f, ", but it waits for kept memory {name:?}, which another process may write")?;
        }
        if let Some(cause) = &self.cause {
            write!(f, ", after: {}", cause.brief())?;
        }
        if let Some(cause) = &self.no_standby {
            write!(f, ", but no standby is started any more, after: {}", cause.brief())?;
        }
        match self.refusal.as_ref().filter(|refusal| Some(*refusal) != self.cause.as_ref()) {
            Some(refusal) => write!(f, ", and the next start: {}", refusal.brief()),
            None => Ok(()),
        }
    }
}

/// The health of a [`Group`](crate::Group): see [`Group::health`](crate::Group::health). It prints how many of its workers serve, and a line for each.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupHealth {
    /// The health of its workers, in the order in which they were given.
    pub workers: Vec<WorkerHealth>,
}

impl GroupHealth {
    /// Whether calls are answered now: by one worker at least. A readiness probe answers 200 if so, and 503 otherwise.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.workers.iter().any(WorkerHealth::is_serving)
    }

    /// Whether all of its workers are given up or closed. Those that are given up are probed, so this may change; a liveness probe that answers
    /// 503 waits for longer than [`Restart::most_delay`](crate::Restart::most_delay).
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.workers.iter().all(WorkerHealth::has_ended)
    }
}

impl fmt::Display for GroupHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let serving = self.workers.iter().filter(|worker| worker.is_serving()).count();
        write!(f, "{serving} of {} serve", self.workers.len())?;
        for (at, worker) in self.workers.iter().enumerate() {
            write!(f, "\nworker {at}: {worker}")?;
        }
        Ok(())
    }
}
