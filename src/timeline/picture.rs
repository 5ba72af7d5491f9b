//! A trace as text: a lane for each stream.
#![forbid(unsafe_code)]

use std::fmt;
use std::time::Duration;

use super::trace::{Trace, TracedOp};
use crate::runtime::traced_op::TracedWork;

/// A picture of a trace; from [`Trace::picture`].
#[derive(Clone, Debug)]
pub struct TracePicture<'a> {
    trace: &'a Trace,
    columns: usize,
}

impl Trace {
    /// Draws the trace with 10 to 1,000 columns of time: a line for each stream, with a sign for the operation
    /// that ran longest in each column, or a dot where the stream was idle for more than half of it.
    #[must_use]
    pub fn picture(&self, columns: usize) -> TracePicture<'_> {
        TracePicture { trace: self, columns: columns.clamp(10, 1000) }
    }
}

/// The sign of what an operation does, and what it is called.
fn sign(work: TracedWork) -> (char, &'static str) {
    match work {
        TracedWork::Order => ('.', "order"),
        TracedWork::Kernel => ('#', "kernel"),
        TracedWork::List => ('=', "list"),
        TracedWork::ToDevice => ('v', "to device"),
        TracedWork::ToHost => ('^', "to host"),
        TracedWork::Copy => ('>', "copy"),
        TracedWork::Fill => ('o', "fill"),
        TracedWork::HostFn => ('h', "host function"),
        TracedWork::Foreign => ('x', "library"),
    }
}

impl fmt::Display for TracePicture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timed: Vec<(&TracedOp, Duration, Duration)> = self
            .trace
            .operations()
            .iter()
            .filter_map(|op| op.runs(self.trace.taken().0).map(|(start, end)| (op, start, end)))
            .collect();
        let (Some(begin), Some(end)) =
            (timed.iter().map(|timed| timed.1).min(), timed.iter().map(|timed| timed.2).max())
        else {
            return writeln!(f, "{}: nothing with a time of the device", self.trace.device());
        };
        let length = (end - begin).max(Duration::from_nanos(1));
        writeln!(f, "{}: {} operations in {length:.1?}", self.trace.device(), timed.len())?;
        let column_ns = length.as_secs_f64() * 1e9 / self.columns as f64;
        let streams = self.trace.streams();
        let width = streams.iter().map(|(_, name)| name.chars().count()).max().unwrap_or(0);
        let mut used = Vec::new();
        for (stream, name) in streams {
            // How long each column is in use, and by what for longest.
            let mut lane = vec![(0.0, 0.0, ' '); self.columns];
            for (op, start, end) in timed.iter().filter(|timed| timed.0.ticket.stream == stream) {
                let at = |time: Duration| (time - begin).as_secs_f64() * 1e9 / column_ns;
                let (start, end) = (at(*start), at(*end));
                let (sign, meaning) = sign(op.work);
                let first = (start as usize).min(self.columns - 1);
                let last = (end as usize).min(self.columns - 1);
                for (column, (used, most, shown)) in
                    lane.iter_mut().enumerate().take(last + 1).skip(first)
                {
                    let within = end.min((column + 1) as f64) - start.max(column as f64);
                    *used += within;
                    // An operation that takes no time is shown as well, where nothing else is.
                    if within > *most || *shown == ' ' {
                        (*most, *shown) = (within, sign);
                    }
                }
                if !used.contains(&(sign, meaning)) {
                    used.push((sign, meaning));
                }
            }
            let cell = |(used, _, sign): (f64, f64, char)| {
                if sign != ' ' && used < 0.5 { '·' } else { sign }
            };
            let lane: String = lane.into_iter().map(cell).collect();
            writeln!(f, "{name:width$} |{lane}|")?;
        }
        let meanings: Vec<String> =
            used.into_iter().map(|(sign, meaning)| format!("{sign} {meaning}")).collect();
        writeln!(f, "{:width$}  {}  · idle for more than half", "", meanings.join("  "))
    }
}
