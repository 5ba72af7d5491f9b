//! [`Advice`]: what a program could do better, according to a trace.
//!
//! | about | when |
//! |---|---|
//! | small launches | at least [`MANY`] kernels, half of them under [`SHORT`], and more idle time for the host than kernel time |
//! | a wait | a stream idled for another stream's operations for a tenth of the trace |
//! | streams that take turns | both have [`FEW`] operations; see below |
//!
//! Two streams take turns if both had pending operations for longer than the less busy one ran, yet both ran at once for less than a
//! hundredth of that run time. Only the [`BUSIEST`] streams are compared, because the number of pairs grows with their square.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::gaps::{Gap, GapCause, Timed};
use super::trace::{TracedStream, shown};
use crate::runtime::traced_op::TracedWork;

const MANY: usize = 64;
const FEW: usize = 10;
const BUSIEST: usize = 16;
const SHORT: Duration = Duration::from_micros(10);

/// What a program could do better; from [`TraceReport::advice`](crate::TraceReport::advice).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Advice {
    /// Many short kernels whose stream waits for the host between them: [`replay`](crate::Stream::replay) or
    /// [`batch`](crate::Stream::batch) them, or await fewer of them.
    SmallLaunches {
        /// Their stream.
        stream: TracedStream,
        /// How many there are.
        launches: usize,
        /// Their median time on the device.
        p50: Duration,
        /// How long the stream was idle because the next operation was not submitted.
        idle: Duration,
    },
    /// A stream was idle while it waited for operations of another one.
    Waits {
        /// The stream.
        stream: TracedStream,
        /// The other one.
        on: TracedStream,
        /// The operation there that was waited for longest.
        name: Arc<str>,
        /// How long, in total.
        idle: Duration,
        /// That time as a part of the trace.
        share: f64,
    },
    /// Two streams that were both in use never ran at once.
    TakeTurns {
        /// The streams.
        streams: [TracedStream; 2],
        /// How many of their operations wait for the other stream. If none do, something that this crate does not see orders them:
        /// work on the legacy default stream, unless one of them is that stream, or a call that waits for the device.
        waits: usize,
    },
}

/// The advice on operations sorted by their starts, with all their gaps and the total length.
pub(super) fn advice(timed: &[Timed<'_>], gaps: &[Gap], length: Duration) -> Vec<Advice> {
    let mut streams: BTreeMap<u64, Vec<Timed<'_>>> = BTreeMap::new();
    for op in timed {
        streams.entry(op.0.ticket.stream).or_default().push(*op);
    }
    let small = streams.values().filter_map(|ops| small_launches(ops, gaps));
    let mut advice: Vec<Advice> = small.collect();
    advice.extend(waits(gaps, length));
    let mut all: Vec<_> = streams.values().collect();
    all.sort_by_key(|ops| std::cmp::Reverse(runs_for(ops)));
    all.truncate(BUSIEST);
    for (at, a) in all.iter().enumerate() {
        advice.extend(all[at + 1..].iter().filter_map(|b| take_turns(a, b)));
    }
    advice
}

fn small_launches(ops: &[Timed<'_>], gaps: &[Gap]) -> Option<Advice> {
    let kernels = ops.iter().filter(|(op, ..)| op.work == TracedWork::Kernel);
    let mut times: Vec<Duration> = kernels.map(|(_, start, end)| *end - *start).collect();
    times.sort();
    let stream = ops.first()?.0.stream();
    let of_host = |gap: &&Gap| gap.stream.id == stream.id && gap.because == GapCause::Host;
    let idle = gaps.iter().filter(of_host).map(|gap| gap.length).sum();
    let p50 = *times.get(times.len() / 2)?;
    let is_said = times.len() >= MANY && p50 < SHORT && idle > times.iter().sum::<Duration>();
    is_said.then_some(Advice::SmallLaunches { stream, launches: times.len(), p50, idle })
}

fn waits(gaps: &[Gap], length: Duration) -> Vec<Advice> {
    // For each pair the total, and the longest gap, which comes first.
    let mut pairs: BTreeMap<(u64, u64), (Duration, &Gap)> = BTreeMap::new();
    for gap in gaps {
        let GapCause::Stream { stream: on, .. } = &gap.because else { continue };
        let pair = pairs.entry((gap.stream.id, on.id)).or_insert((Duration::ZERO, gap));
        pair.0 += gap.length;
    }
    let said = pairs.into_values().filter_map(|(idle, longest)| {
        let GapCause::Stream { name, stream: on, .. } = &longest.because else { return None };
        let share = idle.as_secs_f64() / length.as_secs_f64();
        let (stream, on, name) = (longest.stream.clone(), on.clone(), name.clone());
        (share >= 0.1).then_some(Advice::Waits { stream, on, name, idle, share })
    });
    said.collect()
}

fn take_turns(of_a: &[Timed<'_>], of_b: &[Timed<'_>]) -> Option<Advice> {
    if of_a.len() < FEW || of_b.len() < FEW {
        return None;
    }
    let lesser = runs_for(of_a).min(runs_for(of_b));
    let [there_a, there_b] = [of_a, of_b].map(|ops| stretches(ops, |(op, ..)| op.submitted));
    // They could have: both had operations.
    if at_once(&there_a, &there_b) < lesser {
        return None;
    }
    let [runs_a, runs_b] = [of_a, of_b].map(|ops| stretches(ops, |(_, start, _)| *start));
    let ordered = |ops: &[Timed<'_>], other: u64| {
        ops.iter().filter(|(op, ..)| op.waits_for.iter().any(|on| on.stream == other)).count()
    };
    let mut streams = [of_a.first()?.0.stream(), of_b.first()?.0.stream()];
    let waits = ordered(of_a, streams[1].id) + ordered(of_b, streams[0].id);
    streams.sort_by_key(|stream| stream.id);
    (at_once(&runs_a, &runs_b) * 100 < lesser).then_some(Advice::TakeTurns { streams, waits })
}

/// How long a stream's operations ran.
fn runs_for(ops: &[Timed<'_>]) -> Duration {
    ops.iter().map(|(_, start, end)| *end - *start).sum()
}

/// The times in which a stream has operations, up to their ends: sorted and disjoint.
fn stretches(
    ops: &[Timed<'_>],
    from: impl Fn(&Timed<'_>) -> Duration,
) -> Vec<(Duration, Duration)> {
    let mut stretches: Vec<(Duration, Duration)> = Vec::new();
    for op in ops {
        let (start, end) = (from(op), op.2);
        match stretches.last_mut().filter(|last| start <= last.1) {
            Some(last) => last.1 = last.1.max(end),
            None => stretches.push((start, end)),
        }
    }
    stretches
}

/// How long two of these overlap.
fn at_once(a: &[(Duration, Duration)], b: &[(Duration, Duration)]) -> Duration {
    let (mut at_a, mut at_b, mut together) = (0, 0, Duration::ZERO);
    while let (Some(x), Some(y)) = (a.get(at_a), b.get(at_b)) {
        together += x.1.min(y.1).saturating_sub(x.0.max(y.0));
        if x.1 < y.1 {
            at_a += 1;
        } else {
            at_b += 1;
        }
    }
    together
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Advice::SmallLaunches { stream, launches, p50, idle } => write!(
                f,
                "{launches} launches of {p50:.1?} on {stream}, which was idle for {idle:.1?} between them: put several on it \
                 at once (`replay`, `batch`), and await the last"
            ),
            Advice::Waits { stream, on, name, idle, share } => write!(
                f,
                "{stream} was idle for {idle:.1?} ({:.0} %) for operations of {on}, longest for {}",
                100.0 * share,
                shown(name)
            ),
            Advice::TakeTurns { streams: [a, b], waits: 0 } => write!(
                f,
                "{a} and {b} never ran at once, and nothing in the trace orders them: the device is full, or something else \
                 does (work on the legacy default stream, a call that waits for the device)"
            ),
            Advice::TakeTurns { streams: [a, b], waits } => write!(
                f,
                "{a} and {b} never ran at once: {waits} of their operations wait for the other stream, as they use the \
                 same memory or are told to"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::panic::Location;

    use super::*;
    use crate::op::Ticket;
    use crate::timeline::trace::{Trace, TracedOp};

    /// A stream, the start and the end of its operation, and the stream whose preceding operation it waits for.
    type Op = (u64, (u64, u64), Option<u64>);

    fn stream(id: u64) -> TracedStream {
        TracedStream { id, name: None, partition: None }
    }

    /// An operation that waits for another stream was submitted long before; the others are submitted as they
    /// start.
    fn trace(ops: &[Op]) -> Trace {
        traced(ops, false)
    }

    fn submitted_at_once(ops: &[Op]) -> Trace {
        traced(ops, true)
    }

    fn traced(ops: &[Op], at_once: bool) -> Trace {
        let mut numbers: HashMap<u64, u64> = HashMap::new();
        let ops = ops.iter().map(|(stream, (start, end), on)| {
            let on =
                on.map(|on| Ticket { stream: on, number: numbers.get(&on).copied().unwrap_or(0) });
            let number = numbers.entry(*stream).or_default();
            *number += 1;
            let (start, end) = (Duration::from_micros(*start), Duration::from_micros(*end));
            let submitted = if at_once || on.is_some() { Duration::ZERO } else { start };
            TracedOp {
                name: "kernel".into(),
                work: TracedWork::Kernel,
                ticket: Ticket { stream: *stream, number: *number },
                stream_name: None,
                partition: None,
                bytes: 0,
                launches: 1,
                grid_dim: [1; 3],
                block_dim: [1; 3],
                shared_mem_bytes: 0,
                at: Location::caller(),
                span: None,
                task: None,
                waits_for: on.into_iter().collect(),
                buffers_bytes: 0,
                submitted,
                started: Some(start),
                completed: Some(end),
                seen: None,
                woken: None,
                polled: None,
                clock_error: Duration::ZERO,
            }
        });
        Trace::for_test(ops.collect())
    }

    #[test]
    fn small_launches() {
        let of = |every: u64| {
            let ops: Vec<_> = (0..100).map(|at| (1, (at * every, at * every + 3), None)).collect();
            trace(&ops).report().advice
        };
        let idle = Duration::from_micros(99 * 17);
        let p50 = Duration::from_micros(3);
        assert_eq!(of(20), [Advice::SmallLaunches { stream: stream(1), launches: 100, p50, idle }]);
        assert_eq!(of(5), [], "the device is busy for longer than it is idle");
    }

    #[test]
    fn a_stream_that_waits() {
        // Stream 2 waits for each of the first stream's operations, and then runs beside the next.
        let ops: Vec<_> = (0..5)
            .flat_map(|at| {
                [
                    (1, (at * 100, at * 100 + 90), None),
                    (2, (at * 100 + 90, at * 100 + 110), Some(1)),
                ]
            })
            .collect();
        let report = trace(&ops).report();
        let Advice::Waits { stream: waits, on, idle, share, .. } = &report.advice[0] else {
            panic!("{report}")
        };
        assert_eq!((waits.id, on.id, *idle), (2, 1, Duration::from_micros(4 * 80)));
        assert!((0.6..0.7).contains(share), "{share}");
        assert!(
            report.to_string().contains(
                "advice: stream 2 was idle for 320.0µs (63 %) for operations of stream 1"
            ),
            "{report}"
        );
    }

    #[test]
    fn streams_that_take_turns() {
        let turns = |on: fn(u64) -> Option<u64>, is_early: bool| {
            let op = |at: u64| (1 + at % 2, (at * 100, at * 100 + 100), on(1 + at % 2));
            let ops: Vec<_> = (0..40).map(op).collect();
            let trace = if is_early { submitted_at_once(&ops) } else { trace(&ops) };
            trace.report().advice
        };
        let said = |advice: Vec<Advice>| {
            advice.into_iter().find(|one| matches!(one, Advice::TakeTurns { .. }))
        };
        let told = |waits| Some(Advice::TakeTurns { streams: [1, 2].map(stream), waits });
        assert_eq!(said(turns(|stream| Some(3 - stream), true)), told(40));
        assert_eq!(said(turns(|_| None, true)), told(0));
        assert_eq!(said(turns(|_| None, false)), None, "the host submits one after the other");
        // Side by side.
        let beside: Vec<_> =
            (0..40).map(|at| (1 + at % 2, (at / 2 * 100, at / 2 * 100 + 90), None)).collect();
        assert_eq!(said(submitted_at_once(&beside).report().advice), None);
    }

    #[test]
    fn of_many_streams() {
        let ops: Vec<_> =
            (0..4000 * 20).map(|at| (at % 4000, (at * 10, at * 10 + 5), None)).collect();
        let advice = submitted_at_once(&ops).report().advice;
        assert!(advice.len() <= BUSIEST * BUSIEST, "{}", advice.len());
    }
}
