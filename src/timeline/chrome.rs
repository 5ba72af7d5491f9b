//! A trace as JSON of the Trace Event Format, which Chrome's tracing page, Perfetto and Speedscope read.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io;
use std::time::Duration;

use super::trace::{Trace, TracedOp, place};
use crate::op::Ticket;

/// The process that the lanes of the device are shown in, and that of the host's.
const DEVICE: u32 = 1;
const HOST: u32 = 2;
const TASKS: u32 = 3;

impl Trace {
    /// Writes the trace as JSON: a lane for each stream, with a bar from started to completed for each operation; asynchronous events from
    /// submitted to when the future of an operation was woken or polled, in the processes "in tasks" and "on the host" with the task or the stream as
    /// their thread (Perfetto's page names their rows by the operation; [`write_perfetto`](Self::write_perfetto) has a track for each task); arrows from an operation to those of other streams that waited for it; what buffers held, over time. Times
    /// are microseconds.
    ///
    /// # Errors
    /// What the writer says.
    ///
    /// # Source
    /// The Trace Event Format of Chromium's tracing.
    pub fn write_chrome_json(&self, out: &mut impl io::Write) -> io::Result<()> {
        write!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        let tasks: BTreeSet<u64> = self.operations().iter().filter_map(|op| op.task).collect();
        let tasks = tasks.iter().map(|task| (*task, format!("task {task}"))).collect();
        let processes = [
            (DEVICE, "on the device", self.streams()),
            (HOST, "on the host", self.streams()),
            (TASKS, "in tasks", tasks),
        ];
        let mut comma = "";
        for (process, place, lanes) in processes {
            let name = format!("{} {place}", self.device());
            let name = JsonText(&name);
            write!(
                out,
                "{comma}\n{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{process},\"args\":{{\"name\":{name}}}}}"
            )?;
            comma = ",";
            for (lane, name) in lanes {
                let name = JsonText(&name);
                write!(
                    out,
                    ",\n{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{process},\"tid\":{lane},\"args\":{{\"name\":{name}}}}}"
                )?;
            }
        }
        let ends: HashMap<Ticket, (Duration, Duration)> = self
            .operations()
            .iter()
            .filter_map(|op| Some((op.ticket, op.runs(self.taken().0)?)))
            .collect();
        for (number, op) in self.operations().iter().enumerate() {
            write_op(out, (number, op), op.runs(self.taken().0), &ends)?;
        }
        writeln!(out, "\n]}}")
    }
}

fn write_op(
    out: &mut impl io::Write,
    (number, op): (usize, &TracedOp),
    runs: Option<(Duration, Duration)>,
    ends: &HashMap<Ticket, (Duration, Duration)>,
) -> io::Result<()> {
    let (name, stream) = (JsonText(&op.name), op.ticket.stream);
    if let Some((started, completed)) = runs {
        let (ts, dur) = (Micros(started), Micros(completed - started));
        write!(
            out,
            ",\n{{\"ph\":\"X\",\"pid\":{DEVICE},\"tid\":{stream},\"ts\":{ts},\"dur\":{dur},\"name\":{name},\"cat\":\"{:?}\",\"args\":{}}}",
            op.work,
            Details(op)
        )?;
        for on in &op.waits_for {
            let Some((start, end)) = ends.get(on) else { continue };
            // Within its bar, or the arrow begins at nothing.
            let end = end.saturating_sub(Duration::from_nanos(1)).max(*start);
            let id = format!("{}.{}.{number}", on.stream, on.number);
            write!(
                out,
                ",\n{{\"ph\":\"s\",\"pid\":{DEVICE},\"tid\":{},\"ts\":{},\"id\":\"{id}\",\"name\":\"waits for\",\"cat\":\"wait\"}},\n\
                     {{\"ph\":\"f\",\"bp\":\"e\",\"pid\":{DEVICE},\"tid\":{stream},\"ts\":{ts},\"id\":\"{id}\",\"name\":\"waits for\",\"cat\":\"wait\"}}",
                on.stream,
                Micros(end)
            )?;
        }
    }
    write!(
        out,
        ",\n{{\"ph\":\"C\",\"pid\":{DEVICE},\"ts\":{},\"name\":\"memory of buffers\",\"args\":{{\"bytes\":{}}}}}",
        Micros(op.submitted),
        op.buffers_bytes
    )?;
    // Operations of one stream or task may overlap.
    if let Some(known) = op.known_at() {
        let (begin, end) = (Micros(op.submitted), Micros(known));
        let (process, lane) = op.task.map_or((HOST, stream), |task| (TASKS, task));
        for (ph, ts) in [("b", begin), ("e", end)] {
            write!(
                out,
                ",\n{{\"ph\":\"{ph}\",\"pid\":{process},\"tid\":{lane},\"ts\":{ts},\"id\":{number},\"name\":{name},\"cat\":\"host\"}}"
            )?;
        }
    }
    Ok(())
}

/// The other facts about an operation, as a JSON object.
struct Details<'a>(&'a TracedOp);

impl fmt::Display for Details<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let op = self.0;
        write!(f, "{{\"ticket\":{},\"at\":{}", op.ticket.number, JsonText(&place(op.at)))?;
        if let Some(span) = op.span {
            // Wider than a reader's numbers may be.
            write!(f, ",\"span\":\"{span}\"")?;
        }
        if let Some(task) = op.task {
            write!(f, ",\"task\":{task}")?;
        }
        if op.bytes > 0 {
            write!(f, ",\"bytes\":{}", op.bytes)?;
        }
        if op.launches > 0 {
            let ([gx, gy, gz], [bx, by, bz]) = (op.grid_dim, op.block_dim);
            write!(f, ",\"launches\":{},\"grid\":[{gx},{gy},{gz}]", op.launches)?;
            write!(f, ",\"block\":[{bx},{by},{bz}],\"shared_mem_bytes\":{}", op.shared_mem_bytes)?;
        }
        for (name, time) in op.times() {
            if let Some(time) = time {
                write!(f, ",\"{name}_us\":{}", Micros(time))?;
            }
        }
        f.write_str("}")
    }
}

/// Microseconds, to the nanosecond.
pub(super) struct Micros(pub(super) Duration);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0.as_nanos();
        write!(f, "{}.{:03}", ns / 1000, ns % 1000)
    }
}

/// A string of JSON.
pub(super) struct JsonText<'a>(pub(super) &'a str);

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
