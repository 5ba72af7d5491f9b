//! A trace as Perfetto's protocol buffers.
//!
//! Only the required fields are written, by their numbers in `trace_packet.proto`, `track_descriptor.proto`, `track_event.proto` and
//! `debug_annotation.proto`.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use super::trace::{Trace, TracedOp, place};
use crate::op::Ticket;
use crate::runtime::traced_op::TracedWork;

/// All packets have one writer.
const SEQUENCE: u64 = 1;

/// Numbers of tracks, which are never those of streams.
const DEVICE: u64 = 1 << 62;
const HOST: u64 = 2 << 62;
const IN_FLIGHT: u64 = 3 << 62;
const MEMORY: u64 = IN_FLIGHT + 1;
const TASKS: u64 = IN_FLIGHT + 2;
const TO_DEVICE: u64 = IN_FLIGHT + 3;
const TO_HOST: u64 = IN_FLIGHT + 4;

/// The kind of an event: part of a slice, or a counter's value.
#[derive(Clone, Copy)]
enum EventType {
    Begin = 1,
    End = 2,
    Counter = 4,
}

/// A message, or what is in one.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(&mut self, field: u64, value: u64) {
        self.varint(field << 3);
        self.varint(value);
    }

    fn fixed(&mut self, field: u64, value: u64) {
        self.varint(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
    }

    fn message(&mut self, field: u64, fill: impl FnOnce(&mut Message)) {
        let mut inner = Message::default();
        fill(&mut inner);
        self.bytes(field, &inner.0);
    }
}

/// An event on a track, with its time.
struct TrackEvent<'a> {
    at: Duration,
    kind: EventType,
    track: u64,
    op: Option<&'a TracedOp>,
    value: u64,
    /// Arrows that begin here, and that end here.
    flows: Vec<u64>,
    ends_flows: Vec<u64>,
}

impl Trace {
    /// Writes the trace for [Perfetto](https://ui.perfetto.dev): a track for each stream, on which operations last from started to completed; a track
    /// for each tokio task, and for each stream that others used, on which awaited operations last from submitted to when their future was woken or
    /// polled; arrows from an operation to those of other streams that waited for it; and, over time, how many operations were in flight, what
    /// buffers held, and how many streams were copying in each direction. (The driver does not say which copy engine took a copy.) Times are
    /// nanoseconds since the device was opened. The output is binary: a protobuf trace, not JSON.
    ///
    /// # Errors
    /// What the writer returns.
    ///
    /// # Source
    /// `perfetto/trace/trace.proto`.
    pub fn write_perfetto(&self, out: &mut impl io::Write) -> io::Result<()> {
        let mut trace = Message::default();
        let parents = [(DEVICE, "on the device"), (HOST, "on the host"), (TASKS, "in tasks")];
        for (track, place) in parents {
            describe(&mut trace, track, &format!("{} {place}", self.device()), |_| {});
        }
        /// The track of counters.
        const BYTES: u64 = 3;
        let counters = [
            (IN_FLIGHT, "operations in flight", 0),
            (MEMORY, "memory of buffers", BYTES),
            (TO_DEVICE, "copies to the device", 0),
            (TO_HOST, "copies to the host", 0),
        ];
        for (track, name, unit) in counters {
            describe(&mut trace, track, name, |track| {
                track.message(8, |counter| counter.number(3, unit));
            });
        }
        for (stream, name) in self.streams() {
            describe(&mut trace, DEVICE + stream, &name, |track| track.number(5, DEVICE));
        }
        let waits = self.waits_on_tracks(&mut trace);
        for event in self.track_events(&waits) {
            event.write(&mut trace);
        }
        out.write_all(&trace.0)
    }

    /// Describes tracks on which no two waits of the host overlap, and returns the track of each operation's wait.
    fn waits_on_tracks(&self, trace: &mut Message) -> Vec<Option<u64>> {
        let mut ends: HashMap<(u64, u64), Vec<(u64, Duration)>> = HashMap::new();
        let (mut next, names) = (HOST + 1, HashMap::<u64, String>::from_iter(self.streams()));
        let track_of = |op: &TracedOp| {
            let end = op.known_at()?;
            let whose = op.task.map_or((HOST, op.ticket.stream), |task| (TASKS, task));
            let tracks = ends.entry(whose).or_default();
            if let Some((track, until)) = tracks.iter_mut().find(|track| track.1 <= op.submitted) {
                *until = end;
                return Some(*track);
            }
            let (parent, number) = whose;
            let of_task = (parent == TASKS).then(|| format!("task {number}"));
            let name = of_task.as_ref().unwrap_or_else(|| &names[&op.ticket.stream]);
            describe(trace, next, name, |track| track.number(5, parent));
            tracks.push((next, end));
            next += 1;
            Some(next - 1)
        };
        self.operations().iter().map(track_of).collect()
    }

    /// Ordered by time; at equal times, ends come before beginnings.
    fn track_events(&self, waits: &[Option<u64>]) -> Vec<TrackEvent<'_>> {
        let numbers: HashMap<Ticket, usize> =
            self.operations().iter().enumerate().map(|(at, op)| (op.ticket, at)).collect();
        let mut flows: Vec<Vec<u64>> = vec![Vec::new(); self.operations().len()];
        let mut ends_flows = flows.clone();
        let mut flow = 0;
        for (at, op) in self.operations().iter().enumerate() {
            for from in op.waits_for.iter().filter_map(|on| numbers.get(on)) {
                flow += 1;
                flows[*from].push(flow);
                ends_flows[at].push(flow);
            }
        }
        let mut events = Vec::new();
        let mut changes = Vec::new();
        for (number, op) in self.operations().iter().enumerate() {
            let event =
                |at, kind, track| TrackEvent { op: Some(op), ..TrackEvent::new(at, kind, track) };
            if let Some((started, completed)) = op.runs(self.taken().0) {
                let track = DEVICE + op.ticket.stream;
                let (flows, ends_flows) =
                    (std::mem::take(&mut flows[number]), std::mem::take(&mut ends_flows[number]));
                events.push(TrackEvent {
                    flows,
                    ends_flows,
                    ..event(started, EventType::Begin, track)
                });
                events.push(event(completed, EventType::End, track));
                changes.extend([(op.submitted, 1_i64, IN_FLIGHT), (completed, -1, IN_FLIGHT)]);
                let direction = match op.work {
                    TracedWork::ToDevice => Some(TO_DEVICE),
                    TracedWork::ToHost => Some(TO_HOST),
                    _ => None,
                };
                if let Some(direction) = direction {
                    changes.extend([(started, 1, direction), (completed, -1, direction)]);
                }
            }
            if let (Some(known), Some(track)) = (op.known_at(), waits[number]) {
                events.push(event(op.submitted, EventType::Begin, track));
                events.push(event(known, EventType::End, track));
            }
        }
        let counter = |at, track, value| TrackEvent {
            value,
            ..TrackEvent::new(at, EventType::Counter, track)
        };
        events.extend(
            self.operations().iter().map(|op| counter(op.submitted, MEMORY, op.buffers_bytes)),
        );
        changes.sort();
        let mut counts = HashMap::<u64, i64>::new();
        events.extend(changes.into_iter().map(|(at, change, track)| {
            let count = counts.entry(track).or_default();
            *count += change;
            counter(at, track, (*count).max(0).unsigned_abs())
        }));
        // Stable: an operation that takes no time begins before it ends.
        events.sort_by_key(|event| event.at);
        events
    }
}

impl TracedOp {
    /// When the awaiting task learned of the completion.
    pub(super) fn known_at(&self) -> Option<Duration> {
        self.polled.or(self.woken)
    }
}

/// Describes a track, and adds what `more` says: its parent, or that it is a counter.
fn describe(trace: &mut Message, track: u64, name: &str, more: impl FnOnce(&mut Message)) {
    trace.message(1, |packet| {
        packet.number(10, SEQUENCE);
        packet.message(60, |described| {
            described.number(1, track);
            described.bytes(2, name.as_bytes());
            more(described);
        });
    });
}

impl TrackEvent<'_> {
    /// An event without an operation and without arrows.
    fn new(at: Duration, kind: EventType, track: u64) -> Self {
        let (flows, ends_flows) = (Vec::new(), Vec::new());
        TrackEvent { at, kind, track, op: None, value: 0, flows, ends_flows }
    }

    fn write(&self, trace: &mut Message) {
        trace.message(1, |packet| {
            packet.number(8, self.at.as_nanos() as u64);
            packet.number(10, SEQUENCE);
            packet.message(11, |event| {
                event.number(9, self.kind as u64);
                event.number(11, self.track);
                match (self.kind, self.op) {
                    (EventType::Begin, Some(op)) => self.tell(event, op),
                    (EventType::Counter, _) => event.number(30, self.value),
                    _ => {}
                }
            });
        });
    }

    fn tell(&self, event: &mut Message, op: &TracedOp) {
        event.bytes(22, format!("{:?}", op.work).as_bytes());
        event.bytes(23, op.name.as_bytes());
        self.flows.iter().for_each(|flow| event.fixed(47, *flow));
        self.ends_flows.iter().for_each(|flow| event.fixed(48, *flow));
        let mut note = |name: &str, value: u64| {
            event.message(4, |note| {
                note.bytes(10, name.as_bytes());
                note.number(3, value);
            });
        };
        note("ticket", op.ticket.number);
        note("bytes", op.bytes);
        note("launches", u64::from(op.launches));
        if let Some(span) = op.span {
            note("span", span);
        }
        if let Some(task) = op.task {
            note("task", task);
        }
        if op.launches > 0 {
            note("shared_mem_bytes", op.shared_mem_bytes.into());
        }
        note("submitted_ns", op.submitted.as_nanos() as u64);
        let times = [("seen_ns", op.seen), ("woken_ns", op.woken), ("polled_ns", op.polled)];
        for (name, time) in times {
            if let Some(time) = time {
                note(name, time.as_nanos() as u64);
            }
        }
        let mut text = |name: &str, value: &str| {
            event.message(4, |note| {
                note.bytes(10, name.as_bytes());
                note.bytes(6, value.as_bytes());
            });
        };
        text("at", &place(op.at));
        if op.launches > 0 {
            text("grid", &format!("{:?}", op.grid_dim));
            text("block", &format!("{:?}", op.block_dim));
        }
    }
}
