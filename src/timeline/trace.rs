//! [`Trace`]: a copy of a device's log, as plain data.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::op::Ticket;
use crate::runtime::traced_op::{Note, TracedSubmission, TracedTimes, TracedWork};
use crate::runtime::tracer::LogSnapshot;

/// The contents of a device's [timeline](crate::DeviceTimeline) at one moment.
#[derive(Clone, Debug)]
pub struct Trace {
    device: String,
    taken: (Duration, SystemTime),
    operations: Vec<TracedOp>,
    dropped: u64,
    one_in: u32,
}

/// An operation of a [`Trace`]. Times are those since the device was opened.
///
/// | time | is when |
/// |---|---|
/// | `submitted` | the call began to put it on its stream |
/// | `started` | everything in front of it on the stream, and everything that it waits for elsewhere, was complete on the device |
/// | `completed` | it was complete on the device |
/// | `seen` | the host learned of that: a look at the stream found it, or a later operation, complete |
/// | `woken` | the task that awaits it was woken because of that; none if no task waited, or if it checked for itself |
/// | `polled` | its future was polled and found it complete; none if it was not awaited, or only together with a later operation of its stream |
///
/// `started` and `completed` are missing for operations that had not got that far when the trace was taken,
/// where the driver could create no event (see [`DeviceTimeline`](crate::DeviceTimeline)), and on a device of
/// `testing::manual`.
///
/// `seen` is late for operations that are not awaited: the host asks a stream how far it is only when something needs to know.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TracedOp {
    /// The kernel's name, or the verb's.
    pub name: Arc<str>,
    /// Its kind of work.
    pub work: TracedWork,
    /// The stream, and the operation's number on it. Operations of a replayed list share one.
    pub ticket: Ticket,
    /// The stream's name, if it has one.
    pub stream_name: Option<Arc<str>>,
    /// How many multiprocessors the stream's [partition](crate::Partition) has, if it is in one.
    pub partition: Option<u32>,
    /// Bytes that are copied or filled.
    pub bytes: u64,
    /// How many launches this crate made for it: of kernels, and of fills and copies that are kernels here. 0 for a launch of a
    /// [`Graph`](crate::Graph).
    pub launches: u32,
    /// Blocks of the grid; this and the next two are those of the last launch.
    pub grid_dim: [u32; 3],
    /// Threads of a block.
    pub block_dim: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_mem_bytes: u32,
    /// Where the program submitted it, or the batch that it is in.
    pub at: &'static Location<'static>,
    /// The number of the [`tracing`] span that it was submitted in, as its subscriber counts.
    pub span: Option<u64>,
    /// The number of the tokio task that put it on its stream, as `tokio::task::Id` prints it. None outside of tokio, in a `block_on`, and
    /// without the crate's `tokio` feature.
    pub task: Option<u64>,
    /// The tickets on other streams, of this or another device, that it waited for; those already complete
    /// are not included.
    pub waits_for: Vec<Ticket>,
    /// The memory that the device's buffers held when it was submitted, as
    /// [`MemoryInfo::allocated_bytes`](crate::MemoryInfo::allocated_bytes).
    pub buffers_bytes: u64,
    /// When the call began to put it on its stream.
    pub submitted: Duration,
    /// When the device began it.
    pub started: Option<Duration>,
    /// When it was complete on the device.
    pub completed: Option<Duration>,
    /// When the host learned of that.
    pub seen: Option<Duration>,
    /// When its task was woken because of that.
    pub woken: Option<Duration>,
    /// When its future was found complete.
    pub polled: Option<Duration>,
    /// How far `started` and `completed` may both be off, because the device has a clock of its own. They are
    /// never before `submitted` or after `seen`.
    pub clock_error: Duration,
}

impl Trace {
    pub(super) fn of(
        device: &str,
        taken: (Duration, SystemTime),
        log: Option<LogSnapshot>,
    ) -> Self {
        let nothing = LogSnapshot { operations: Vec::new(), dropped: 0, one_in: 1 };
        let LogSnapshot { operations, dropped, one_in } = log.unwrap_or(nothing);
        let mut operations: Vec<_> = operations.into_iter().map(TracedOp::from).collect();
        keep_apart(&mut operations);
        Trace { device: device.to_owned(), taken, operations, dropped, one_in }
    }

    /// When it was taken: since the device was opened, like all its times, and by the wall clock.
    #[must_use]
    pub fn taken(&self) -> (Duration, SystemTime) {
        self.taken
    }

    #[cfg(test)]
    pub(super) fn for_test(operations: Vec<TracedOp>) -> Self {
        let taken = (Duration::ZERO, SystemTime::UNIX_EPOCH);
        Trace { device: String::new(), taken, operations, dropped: 0, one_in: 1 }
    }

    /// The device, such as `cuda:0`.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// One operation in this many of each stream was logged; 1: all.
    #[must_use]
    pub fn one_in(&self) -> u32 {
        self.one_in
    }

    /// The operations, in the order in which they were logged; those of one stream are in the order of their tickets.
    #[must_use]
    pub fn operations(&self) -> &[TracedOp] {
        &self.operations
    }

    /// How many earlier operations were dropped to make room for later ones.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The largest [`clock_error`](TracedOp::clock_error).
    #[must_use]
    pub fn clock_error(&self) -> Duration {
        self.operations.iter().map(|op| op.clock_error).max().unwrap_or_default()
    }

    /// The streams, in the order of their first operations.
    pub(super) fn streams(&self) -> Vec<(u64, String)> {
        let mut known = HashSet::new();
        let firsts = self.operations.iter().filter(|op| known.insert(op.ticket.stream));
        firsts.map(|op| (op.ticket.stream, op.stream_label())).collect()
    }
}

/// A stream of a trace; formatted as `stream 3 "left"`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedStream {
    /// Its id, as in [`Ticket::stream`](crate::Ticket::stream).
    pub id: u64,
    /// Its [name](crate::StreamBuilder::name), if it was given one.
    pub name: Option<Arc<str>>,
    /// How many multiprocessors its [partition](crate::Partition) has, if it is in one.
    pub partition: Option<u32>,
}

impl fmt::Display for TracedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "stream {} \"{}\"", self.id, shown(name))?,
            None => write!(f, "stream {}", self.id)?,
        }
        match self.partition {
            Some(multiprocessors) => write!(f, " (partition of {multiprocessors})"),
            None => Ok(()),
        }
    }
}

impl TracedOp {
    /// A label of the stream, for people.
    pub(super) fn stream_label(&self) -> String {
        self.stream().to_string()
    }

    pub(super) fn stream(&self) -> TracedStream {
        let (id, name) = (self.ticket.stream, self.stream_name.clone());
        TracedStream { id, name, partition: self.partition }
    }

    /// Its six times in order, with the names of the fields.
    pub(super) fn times(&self) -> [(&'static str, Option<Duration>); 6] {
        [
            ("submitted", Some(self.submitted)),
            ("started", self.started),
            ("completed", self.completed),
            ("seen", self.seen),
            ("woken", self.woken),
            ("polled", self.polled),
        ]
    }

    /// When it ran on the device; if it is still running, up to when the trace was taken.
    pub(super) fn runs(&self, taken: Duration) -> Option<(Duration, Duration)> {
        let started = self.started?;
        Some((started, self.completed.unwrap_or(taken.max(started))))
    }

    /// Whether it was on the device when the trace was taken.
    pub(super) fn is_running(&self) -> bool {
        self.started.is_some() && self.completed.is_none()
    }

    /// When it ran on the device, if that is known.
    #[must_use]
    pub fn device_time(&self) -> Option<(Duration, Duration)> {
        self.started.zip(self.completed)
    }
}

impl From<(TracedSubmission, TracedTimes)> for TracedOp {
    fn from((submission, passed): (TracedSubmission, TracedTimes)) -> Self {
        let TracedSubmission {
            name,
            note,
            stream,
            stream_name,
            partition,
            ticket,
            at,
            span,
            task,
            ..
        } = submission;
        let Note { work, bytes, launches, grid_dim, block_dim, shared_mem_bytes } = note;
        let ticket = Ticket { stream, number: ticket };
        let waits_for = submission.waits_for.into_iter();
        let waits_for = waits_for.map(|(stream, number)| Ticket { stream, number }).collect();
        let exactly = |ns: Option<u64>| ns.map(Duration::from_nanos);
        let about = |ns: f64| Duration::from_nanos(ns.max(0.0).round() as u64);
        TracedOp {
            name,
            work,
            ticket,
            stream_name,
            partition,
            bytes,
            launches,
            grid_dim,
            block_dim,
            shared_mem_bytes,
            at,
            span,
            task,
            waits_for,
            buffers_bytes: submission.buffers_bytes,
            submitted: Duration::from_nanos(submission.submitted_ns),
            started: passed.device_ns.map(|(start, _)| start).or(passed.since_ns).map(about),
            completed: passed.device_ns.map(|(_, end)| about(end)),
            // Concurrent threads record these: a thread that acted on the completion had seen it.
            seen: exactly(
                [passed.seen_ns, passed.woken_ns, passed.polled_ns].into_iter().flatten().min(),
            ),
            woken: exactly(
                passed
                    .woken_ns
                    .map(|woken| passed.polled_ns.map_or(woken, |polled| woken.min(polled))),
            ),
            polled: exactly(passed.polled_ns),
            clock_error: about(passed.clock_error_ns),
        }
    }
}

/// A line of the program.
pub(super) fn place(at: &Location<'_>) -> String {
    format!("{}:{}", at.file(), at.line())
}

/// A name as people can read it: without control characters, and not longer than a line.
pub(super) fn shown(name: &str) -> String {
    const MOST: usize = 60;
    let mut shown: String = name
        .chars()
        .take(MOST)
        .flat_map(|c| match c.is_control() {
            true => c.escape_default().collect::<Vec<_>>(),
            false => vec![c],
        })
        .collect();
    if name.chars().nth(MOST).is_some() {
        shown.push('…');
    }
    shown
}

/// Operations of one stream do not overlap, and none starts before it is submitted or is complete after it is seen: anything else is the
/// rounding of their times, or the error of the device's clock.
fn keep_apart(operations: &mut [TracedOp]) {
    let mut ends = std::collections::HashMap::new();
    for op in operations {
        let seen = op.seen.unwrap_or(Duration::MAX);
        let Some(started) = &mut op.started else { continue };
        let end = ends.entry(op.ticket.stream).or_insert(Duration::ZERO);
        *started = (*started).max(*end).max(op.submitted).min(seen);
        if let Some(completed) = &mut op.completed {
            *completed = (*completed).min(seen).max(*started);
            *end = *completed;
        }
    }
}
