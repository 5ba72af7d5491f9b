//! [`Traced`]: the [`Tracer`](crate::runtime::tracer::Tracer)'s log entry for an operation that is being submitted.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::panic::Location;
use std::sync::Arc;

use super::footprint::Footprint;
use super::raw::Raw;
use crate::runtime::event_pool::EventHandle;
use crate::runtime::stream_state::StreamState;
use crate::runtime::traced_op::{Note, TracedSubmission};
use crate::runtime::tracer::Between;
use crate::runtime::{MarkedPoint, coop};
use crate::thread::contain;

/// No tracer, or the operation's entry; chosen at compile time, so that an untraced submission has no extra instructions.
pub(super) trait TracedAs {
    /// The commands that the operation adds to the stream's queue: a timed event takes a slot there, as a
    /// launch does.
    const COMMANDS: u32;
    /// The note that its driver calls update, if there is one.
    fn note(&self) -> Option<&Cell<Note>>;
    /// Called between the waits and the driver calls.
    fn starts(&self, raw: &Raw<'_>);
    /// Called after the driver calls.
    fn ends(&self, raw: &Raw<'_>);
    /// Enters it with its ticket; called under the lock of its stream.
    fn enter(self, stream: &StreamState, ticket: u64, waits_for: &[MarkedPoint]);
}

pub(super) struct Traced {
    name: Arc<str>,
    at: &'static Location<'static>,
    span: Option<u64>,
    task: Option<u64>,
    submitted_ns: u64,
    /// The kind of its driver calls.
    note: Cell<Note>,
    events: Option<Between>,
    /// Set if one of its events was not recorded.
    is_untimed: Cell<bool>,
}

impl Traced {
    /// The entry of an operation about to be submitted, if the log takes it. Calls the subscriber: not to be called under a lock.
    #[cold]
    #[inline(never)]
    pub(super) fn of(
        stream: &StreamState,
        footprint: &Footprint<'_>,
        at: &'static Location<'static>,
    ) -> Option<Self> {
        if !stream.engine.tracer.takes(stream.progress.timeline.submitted() + 1) {
            return None;
        }
        let span = contain::catch(|| tracing::Span::current().id().map(|id| id.into_u64()));
        let span = span.unwrap_or(None);
        Some(Traced::new(stream, footprint.name().to_arc(), at, span))
    }

    /// The entry of a list about to be submitted, under the lock of its stream.
    #[cold]
    #[inline(never)]
    pub(super) fn of_list(
        stream: &StreamState,
        first: &Arc<str>,
        launches: usize,
        at: &'static Location<'static>,
    ) -> Option<Self> {
        if !stream.engine.tracer.takes(stream.progress.timeline.submitted() + 1) {
            return None;
        }
        let name = match launches {
            1 => first.clone(),
            _ => format!("{first} and {} more", launches - 1).into(),
        };
        Some(Traced::new(stream, name, at, None))
    }

    fn new(
        stream: &StreamState,
        name: Arc<str>,
        at: &'static Location<'static>,
        span: Option<u64>,
    ) -> Self {
        let (note, submitted_ns) = (Cell::default(), stream.engine.pacing.now());
        let event = || stream.engine.timed_event_now();
        let is_timed = !stream.engine.options.stepped;
        let events = is_timed.then(|| event().zip(event())).flatten();
        let (task, is_untimed) = (coop::task(), Cell::new(false));
        Traced { name, at, span, task, submitted_ns, note, events, is_untimed }
    }

    /// Notes how many launches it consists of, one by one or in a graph.
    pub(super) fn launched(&self, launches: usize) {
        let mut note = self.note.get();
        note.launches = launches as u32;
        self.note.set(note);
    }

    fn record(&self, raw: &Raw<'_>, which: impl FnOnce(&Between) -> &EventHandle) {
        let Some(event) = self.events.as_ref().map(which) else { return };
        if let Err(code) = raw.record(event) {
            raw.stream.engine.does_without(code);
            self.is_untimed.set(true);
        }
    }
}

impl TracedAs for () {
    const COMMANDS: u32 = 0;

    #[inline(always)]
    fn note(&self) -> Option<&Cell<Note>> {
        None
    }
    #[inline(always)]
    fn starts(&self, _raw: &Raw<'_>) {}
    #[inline(always)]
    fn ends(&self, _raw: &Raw<'_>) {}
    #[inline(always)]
    fn enter(self, _stream: &StreamState, _ticket: u64, _waits_for: &[MarkedPoint]) {}
}

impl TracedAs for Traced {
    const COMMANDS: u32 = 2;

    fn note(&self) -> Option<&Cell<Note>> {
        Some(&self.note)
    }

    fn starts(&self, raw: &Raw<'_>) {
        self.record(raw, |(start, _)| start);
    }

    fn ends(&self, raw: &Raw<'_>) {
        self.record(raw, |(_, end)| end);
    }

    fn enter(self, stream: &StreamState, ticket: u64, waits_for: &[MarkedPoint]) {
        let Traced { name, at, span, task, submitted_ns, note, events, is_untimed } = self;
        let waits_for = waits_for.iter().map(|on| (on.point.stream.id, on.point.ticket));
        let submission = TracedSubmission {
            name,
            note: note.get(),
            stream: stream.progress.id,
            stream_name: stream.driver.name().map(Arc::from),
            partition: stream.driver.partition().map(|share| share.multiprocessors()),
            ticket,
            at,
            span,
            task,
            waits_for: waits_for.collect(),
            submitted_ns,
            buffers_bytes: stream.engine.memory.account.lock().figures().of_buffers(),
        };
        let events = events.filter(|(start, end)| {
            if is_untimed.get() {
                // Either may be pending: a refused record may have been made all the same.
                start.spoil();
                end.spoil();
            }
            !is_untimed.get()
        });
        stream.engine.tracer.enter(submission, events);
    }
}
