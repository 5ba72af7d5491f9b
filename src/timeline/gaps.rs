//! [`Gap`]: an interval in which a stream had nothing to run, and why.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use super::trace::{TracedOp, TracedStream, place, shown};
use crate::op::Ticket;

/// A stretch in which a stream had nothing to run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Gap {
    /// The operation after it.
    pub before: Ticket,
    /// Its name.
    pub name: Arc<str>,
    /// The stream.
    pub stream: TracedStream,
    /// Where the program submitted it.
    pub at: &'static Location<'static>,
    /// When it began, since the device was opened.
    pub from: Duration,
    /// How long it was.
    pub length: Duration,
    /// The cause: what the next operation waited for.
    pub because: GapCause,
}

/// The cause of a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GapCause {
    /// For the host, which had not submitted it.
    Host,
    /// For an operation of another stream.
    Stream {
        /// The operation.
        ticket: Ticket,
        /// Its name.
        name: Arc<str>,
        /// The other stream.
        stream: TracedStream,
    },
    /// For the device: it was submitted, and waited for nothing that the trace knows.
    Device,
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Gap { name, stream, at, from, length, because, .. } = self;
        let (name, at) = (shown(name), place(at));
        write!(f, "{stream} idle for {length:.1?} at {from:.1?}: {name} ({at}) waited for ")?;
        match because {
            GapCause::Host => f.write_str("the host to submit it"),
            GapCause::Stream { name, stream, .. } => write!(f, "{} of {stream}", shown(name)),
            GapCause::Device => f.write_str("the device"),
        }
    }
}

/// An operation with its times on the device.
pub(super) type Timed<'t> = (&'t TracedOp, Duration, Duration);

/// The gaps of operations that are sorted by their starts, the longest first.
pub(super) fn gaps(timed: &[Timed<'_>]) -> Vec<Gap> {
    let known: HashMap<Ticket, &Timed<'_>> =
        timed.iter().map(|timed| (timed.0.ticket, timed)).collect();
    let mut last: HashMap<u64, Duration> = HashMap::new();
    let mut gaps = Vec::new();
    for (op, start, end) in timed {
        let before = last.insert(op.ticket.stream, *end);
        let Some(from) = before.filter(|before| before < start) else { continue };
        // The dependency that completed last, if that was in the gap.
        let waited_for = op.waits_for.iter().filter_map(|on| known.get(on).copied());
        let waited_for = waited_for.max_by_key(|(op, _, end)| (*end, op.ticket));
        let because = match waited_for.filter(|(.., end)| *end > from) {
            Some((.., end)) if op.submitted > *end => GapCause::Host,
            Some((on, ..)) => {
                let (ticket, name, stream) = (on.ticket, on.name.clone(), on.stream());
                GapCause::Stream { ticket, name, stream }
            }
            None if op.submitted > from => GapCause::Host,
            None => GapCause::Device,
        };
        let (before, name, stream) = (op.ticket, op.name.clone(), op.stream());
        let (at, length) = (op.at, *start - from);
        gaps.push(Gap { before, name, stream, at, from, length, because });
    }
    gaps.sort_by_key(|gap| std::cmp::Reverse(gap.length));
    gaps
}
