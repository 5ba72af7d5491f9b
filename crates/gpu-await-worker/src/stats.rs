//! [`Stats`]: the figures of a worker.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::error::Cause;
use crate::health::Health;

/// How long the steps of the last start took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovery {
    /// From `SIGKILL` until the process before it was gone; zero if it went by itself, or was the first.
    pub killed_to_reaped: Duration,
    /// Until the process was started: the delay of [`Restart`](crate::Restart).
    pub reaped_to_started: Duration,
    /// Until it said hello.
    pub started_to_hello: Duration,
    /// Until its service had started.
    pub hello_to_serving: Duration,
}

/// The figures of a [`Worker`](crate::Worker).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Whether it serves; `None`, and all figures zero, in a fork of the process that it belongs to.
    pub health: Option<Health>,
    /// The pid of the process that takes its calls.
    pub process: Option<u32>,
    /// The pid of the standby, if there is one that could take over now: see [`WorkerBuilder::standby`](crate::WorkerBuilder::standby).
    pub standby: Option<u32>,
    /// The pid of a standby that is stopped or held by a debugger: it is left alone until it is needed, and killed then.
    pub stopped_standby: Option<u32>,
    /// Device memory in the pool of that process, in bytes, when its service had started. [Kept](crate::Host::keep) memory, and what
    /// the driver takes for the process and its modules, are not included.
    pub device_bytes: u64,
    /// Likewise for the standby: its cost besides the driver's part.
    pub standby_device_bytes: u64,
    /// Calls that have not ended, and abandoned ones that a process still has.
    pub calls: usize,
    /// How many of them the process has.
    pub running: usize,
    /// Those that wait to run alone, one after the other, since each of them may be why a process died: see
    /// [`Call::idempotent`](crate::Call::idempotent). Without a [standby](crate::WorkerBuilder::standby) all other calls wait for them.
    pub suspects: usize,
    /// Bytes of payloads that the front holds for calls that wait for room: see
    /// [`WorkerBuilder::most_waiting_bytes`](crate::WorkerBuilder::most_waiting_bytes).
    pub waiting_bytes: u64,
    /// Processes that were killed and are not gone.
    pub stuck: usize,
    /// Deaths in a row that were early: quick, and while no call ran. See [`Restart`](crate::Restart).
    pub early_deaths: u32,
    /// Why a process died last. A start that the system refuses is no death, nor is an end that it was asked for: by a replacement, or by
    /// [`Worker::close`](crate::Worker::close).
    pub last_cause: Option<Cause>,
    /// How many processes were started.
    pub starts: u64,
    /// How many starts the system refused: for lack of descriptors, memory, threads or processes, including services whose start failed with such an
    /// error. They are tried again, after a delay that grows.
    pub refused_starts: u64,
    /// How many died, including standbys, but not those that were asked to end.
    pub deaths: u64,
    /// How many of them were standbys.
    pub standby_deaths: u64,
    /// Why a standby died last.
    pub last_standby_cause: Option<Cause>,
    /// How often a standby took over.
    pub takeovers: u64,
    /// How often a process was replaced while it served: see [`Worker::replace`](crate::Worker::replace). That is no death.
    pub replacements: u64,
    /// The pid of the replaced process that still answers its calls.
    pub draining: Option<u32>,
    /// Calls that were answered by a response.
    pub answered: u64,
    /// Calls that the service failed, or whose request or response could not be read, written or placed.
    pub failed: u64,
    /// Calls in which the service panicked.
    pub panics: u64,
    /// Calls that were refused because the limit of calls or bytes under way was reached.
    pub overloads: u64,
    /// Calls that were refused because of earlier ones: see [`WorkerBuilder::blame`](crate::WorkerBuilder::blame).
    pub refused: u64,
    /// How often a call was sent again.
    pub retries: u64,
    /// Calls that ended with their process; in a group also those that went on to another one.
    pub lost_calls: u64,
    /// Calls whose deadline passed.
    pub deadlines: u64,
    /// Messages about unknown calls and leases: none, unless a process misbehaves.
    pub stale_messages: u64,
    /// The process that takes the calls is stopped, or held by a debugger. It is not killed for that.
    pub is_stopped: bool,
    /// The executor of the process has not been polled for 5 s: something blocks it.
    pub is_busy: bool,
    /// The steps of the last start.
    pub last_start: Option<Recovery>,
}
