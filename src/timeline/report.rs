//! [`TraceReport`]: where the device's time went, and what it waited for.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::advice::{Advice, advice};
use super::gaps::{Gap, gaps};
use super::trace::{Trace, TracedOp, place, shown};
use crate::runtime::traced_op::TracedWork;

/// Gaps that a report names.
const GAPS: usize = 8;

/// The totals of a [`Trace`]; from [`Trace::report`]. They cover operations with device times only.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TraceReport {
    /// From the first start to the last completion.
    pub length: Duration,
    /// How long at least one of the logged operations ran.
    pub busy: Duration,
    /// One operation in this many was logged.
    pub one_in: u32,
    /// Operations of one name and kind, those that took longest first.
    pub operations: Vec<OpSummary>,
    /// The longest stretches in which a stream had nothing to run and then went on, the longest first.
    pub gaps: Vec<Gap>,
    /// What the program could do better.
    pub advice: Vec<Advice>,
    /// The operations that were on the device when the trace was taken, on each stream.
    pub running: Vec<TracedOp>,
    /// When it was taken, since the device was opened.
    pub taken: Duration,
}

/// Operations of one name and kind.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpSummary {
    /// The kernel's name, or the verb's.
    pub name: Arc<str>,
    /// Their kind of work.
    pub work: TracedWork,
    /// How many there are.
    pub count: usize,
    /// All their times on the device.
    pub total: Duration,
    /// The median of these.
    pub p50: Duration,
    /// The 99th percentile of these; with fewer than a hundred, the longest.
    pub p99: Duration,
    /// The bytes that they copied or filled.
    pub bytes: u64,
}

impl Trace {
    /// Adds up what ran, and finds the longest gaps.
    #[must_use]
    pub fn report(&self) -> TraceReport {
        let timed = self.operations().iter().filter_map(|op| {
            let (start, end) = op.device_time()?;
            Some((op, start, end))
        });
        let mut timed: Vec<_> = timed.collect();
        timed.sort_by_key(|(_, start, _)| *start);
        let (mut busy, mut until) = (Duration::ZERO, Duration::ZERO);
        let mut groups: HashMap<(Arc<str>, TracedWork), (u64, Vec<Duration>)> = HashMap::new();
        for (op, start, end) in &timed {
            busy += end.saturating_sub((*start).max(until));
            until = until.max(*end);
            let (bytes, times) = groups.entry((op.name.clone(), op.work)).or_default();
            *bytes += op.bytes;
            times.push(*end - *start);
        }
        let mut operations: Vec<OpSummary> = groups
            .into_iter()
            .map(|((name, work), (bytes, mut times))| {
                times.sort();
                // The least time that this percentage of them does not exceed.
                let at = |percent: usize| times[(times.len() * percent).div_ceil(100) - 1];
                let (p50, p99) = (at(50), at(99));
                let (count, total) = (times.len(), times.iter().sum());
                OpSummary { name, work, count, total, p50, p99, bytes }
            })
            .collect();
        operations.sort_by(|a, b| b.total.cmp(&a.total).then_with(|| a.name.cmp(&b.name)));
        let first = timed.first().map_or(Duration::ZERO, |(_, start, _)| *start);
        let length = until.saturating_sub(first);
        // Gaps are unknown if some operations were not logged.
        let mut gaps = if self.one_in() == 1 { gaps(&timed) } else { Vec::new() };
        let advice = if self.one_in() == 1 { advice(&timed, &gaps, length) } else { Vec::new() };
        gaps.truncate(GAPS);
        let running = self.operations().iter().filter(|op| op.is_running()).cloned().collect();
        let (one_in, taken) = (self.one_in(), self.taken().0);
        TraceReport { length, busy, one_in, operations, gaps, advice, running, taken }
    }
}

impl fmt::Display for TraceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TraceReport { length, busy, one_in, operations, gaps, advice, running, taken } = self;
        let percent = |of: Duration, all: Duration| match all.is_zero() {
            true => 0.0,
            false => 100.0 * of.as_secs_f64() / all.as_secs_f64(),
        };
        write!(f, "{length:.1?}, busy for {:.1} %", percent(*busy, *length))?;
        match one_in {
            0 | 1 => writeln!(f),
            one_in => writeln!(f, " with one operation of {one_in}"),
        }?;
        let all: Duration = operations.iter().map(|op| op.total).sum();
        for OpSummary { name, count, total, p50, p99, .. } in operations {
            let (share, name) = (percent(*total, all), shown(name));
            writeln!(
                f,
                "{share:5.1} %  {total:>9.1?}  {count:>6} x  p50 {p50:.1?}  p99 {p99:.1?}  {name}"
            )?;
        }
        for op in running {
            let since = taken.saturating_sub(op.started.unwrap_or_default());
            let (name, stream) = (shown(&op.name), op.stream_label());
            writeln!(f, "{stream} has run {name} for {since:.1?}, submitted at {}", place(op.at))?;
        }
        gaps.iter().try_for_each(|gap| writeln!(f, "{gap}"))?;
        advice.iter().try_for_each(|advice| writeln!(f, "advice: {advice}"))
    }
}
