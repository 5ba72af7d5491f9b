//! A trace as a single-file HTML page.
#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::time::{Duration, UNIX_EPOCH};

use super::trace::{Trace, TracedOp, place};

/// The page, and the place of the trace in it.
const PAGE: &str = include_str!("page.html");
const PLACE: &str = "/*TRACE*/";

impl Trace {
    /// Writes a self-contained page that needs no network and no other program: a lane for each stream, to zoom and move; for
    /// each operation its six times, what it waited for, and where the program submitted it; the longest gaps, and the
    /// [advice](super::report::TraceReport::advice) of the report.
    ///
    /// # Errors
    /// What the writer returns.
    pub fn write_html(&self, out: &mut impl io::Write) -> io::Result<()> {
        let Some((before, behind)) = PAGE.split_once(PLACE) else {
            unreachable!("the page has a place for the trace")
        };
        out.write_all(before.as_bytes())?;
        self.write_json(out)?;
        out.write_all(behind.as_bytes())
    }

    /// The trace as the page reads it; times are microseconds.
    fn write_json(&self, out: &mut impl io::Write) -> io::Result<()> {
        let (device, dropped, one_in) = (JsonText(self.device()), self.dropped(), self.one_in());
        let (taken, wall) = self.taken();
        let wall = wall.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        write!(out, "{{\"taken\":{},\"taken_ms\":{wall},", Micros(taken))?;
        write!(out, "\"device\":{device},\"dropped\":{dropped},\"one_in\":{one_in},\"streams\":[")?;
        for (at, (stream, name)) in self.streams().iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(out, "{comma}{{\"id\":{stream},\"name\":{}}}", JsonText(name))?;
        }
        write!(out, "],\"operations\":[")?;
        for (at, op) in self.operations().iter().enumerate() {
            write!(out, "{}", if at == 0 { "\n" } else { ",\n" })?;
            write_op(out, op)?;
        }
        let report = self.report();
        write!(out, "],\"gaps\":[")?;
        for (at, gap) in report.gaps.iter().enumerate() {
            let (comma, text) = (if at == 0 { "" } else { "," }, gap.to_string());
            let (from, length) = (Micros(gap.from), Micros(gap.length));
            write!(
                out,
                "{comma}{{\"from\":{from},\"length\":{length},\"text\":{}}}",
                JsonText(&text)
            )?;
        }
        write!(out, "],\"advice\":[")?;
        for (at, advice) in report.advice.iter().enumerate() {
            let (comma, text) = (if at == 0 { "" } else { "," }, advice.to_string());
            write!(out, "{comma}{}", JsonText(&text))?;
        }
        write!(out, "]}}")
    }
}

fn write_op(out: &mut impl io::Write, op: &TracedOp) -> io::Result<()> {
    let at = place(op.at);
    let (name, at, work) = (JsonText(&op.name), JsonText(&at), op.work);
    let (stream, ticket) = (op.ticket.stream, op.ticket.number);
    write!(out, "{{\"name\":{name},\"work\":\"{work:?}\",\"stream\":{stream},\"ticket\":{ticket}")?;
    let (grid, block, shared) = (op.grid_dim, op.block_dim, op.shared_mem_bytes);
    write!(out, ",\"bytes\":{},\"launches\":{},\"grid\":{grid:?}", op.bytes, op.launches)?;
    write!(out, ",\"buffers_bytes\":{}", op.buffers_bytes)?;
    write!(out, ",\"block\":{block:?},\"shared_mem_bytes\":{shared},\"at\":{at},\"span\":")?;
    match op.span {
        // Wider than a number in the page's JavaScript.
        Some(span) => write!(out, "\"{span}\"")?,
        None => write!(out, "null")?,
    }
    if let Some(task) = op.task {
        write!(out, ",\"task\":{task}")?;
    }
    write!(out, ",\"waits_for\":[")?;
    for (at, on) in op.waits_for.iter().enumerate() {
        let comma = if at == 0 { "" } else { "," };
        write!(out, "{comma}[{},{}]", on.stream, on.number)?;
    }
    write!(out, "],\"clock_error\":{}", Micros(op.clock_error))?;
    for (name, time) in op.times() {
        match time {
            Some(time) => write!(out, ",\"{name}\":{}", Micros(time))?,
            None => write!(out, ",\"{name}\":null")?,
        }
    }
    write!(out, "}}")
}

/// Microseconds, to the nanosecond.
struct Micros(Duration);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0.as_nanos();
        write!(f, "{}.{:03}", ns / 1000, ns % 1000)
    }
}

/// A string of JSON.
struct JsonText<'a>(&'a str);

impl fmt::Display for JsonText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"")?;
        for c in self.0.chars() {
            match c {
                '"' => f.write_str("\\\"")?,
                '\\' => f.write_str("\\\\")?,
                // In a page it would start an element.
                '<' => f.write_str("\\u003c")?,
                c if c < ' ' => write!(f, "\\u{:04x}", u32::from(c))?,
                c => write!(f, "{c}")?,
            }
        }
        f.write_str("\"")
    }
}
