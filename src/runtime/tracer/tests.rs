//! Operations that complete while the tracer queries events.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::*;
use crate::backend::RawEvent;
use crate::runtime::event_pool::EventPool;
use crate::runtime::traced_op::Note;

/// A device on which each query of an event submits another operation.
struct Busy {
    tracer: Tracer,
    events: Arc<EventPool>,
    tickets: AtomicU64,
    /// Whether that operation is seen complete at once.
    is_seen: AtomicBool,
}

impl Busy {
    fn event(&self) -> EventHandle {
        self.events.get(|_| Ok::<_, ()>(RawEvent(1))).expect("it is made here")
    }

    fn submit(&self) -> u64 {
        let ticket = 1 + self.tickets.fetch_add(1, Ordering::Relaxed);
        let submission = TracedSubmission {
            name: "op".into(),
            note: Note::default(),
            stream: 0,
            stream_name: None,
            partition: None,
            ticket,
            at: std::panic::Location::caller(),
            span: None,
            task: None,
            waits_for: smallvec::smallvec![],
            submitted_ns: ticket,
            buffers_bytes: 0,
        };
        self.tracer.enter(submission, Some((self.event(), self.event())));
        ticket
    }
}

impl AskEvents for Busy {
    fn anchor(&self) -> Option<AnchorEvent> {
        Some(AnchorEvent { event: self.event(), window: (1, 2) })
    }

    fn elapsed_ns(&self, _: &EventHandle, _: &EventHandle) -> Option<f64> {
        assert!(self.tickets.load(Ordering::Relaxed) < 10_000, "it never ends");
        let ticket = self.submit();
        if self.is_seen.load(Ordering::Relaxed) {
            self.tracer.seen(0, ticket, 1);
        }
        Some(1.0)
    }
}

#[test]
fn a_snapshot_of_a_busy_device_ends() {
    let busy = Busy {
        tracer: Tracer::new(),
        events: Arc::default(),
        tickets: AtomicU64::new(0),
        is_seen: AtomicBool::new(false),
    };
    busy.tracer.start(100_000, 1, 0);
    busy.tracer.resolve(&busy, 0);
    for ticket in 1..=200 {
        assert_eq!(busy.submit(), ticket);
    }
    busy.tracer.look(&busy, || 1);
    busy.is_seen.store(true, Ordering::Relaxed);
    busy.tracer.resolve(&busy, 1);
    busy.tracer.resolve(&busy, 2);
    let log = busy.tracer.snapshot().expect("it is on");
    assert!(log.operations[..200].iter().all(|(_, passed)| passed.device_ns.is_some()));
}
