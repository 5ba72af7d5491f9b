//! A lane whose tickets stand for everything on the device, whoever put it there.
//!
//! It has no driver stream of its own. A ticket's marker is an event that the driver records behind
//! all streams of the context.
//!
//! | queues | the marker is placed | by |
//! |---|---|---|
//! | all have room | before the call returns | the caller |
//! | one is full, its submitter sits in the driver | when there is room: the driver holds up who records | the errands' thread |
//!
//! # Invariants
//! 1. The caller is never held up by somebody else's full queue
//!    (`a_full_queue_holds_up_nobody_else`).

use std::sync::Arc;

use super::{Lane, Origin};
use crate::completion::engine::Engine;
use crate::error::{DriverCode, Result};

impl Lane {
    /// A lane for [`mark_everything`](Self::mark_everything). It has the engine's own stream, on
    /// which nothing is put here, and leaves it to the engine.
    pub(crate) fn open_whole(engine: &Arc<Engine>) -> Result<Arc<Lane>> {
        engine.check_open()?;
        let (stream, name) = (engine.private, Some("whole device".into()));
        Ok(Lane::over(engine, stream, 0, name, None, Origin::Engine))
    }

    /// Takes a ticket behind everything on the device, whoever put it there, and returns it; `None`
    /// if the driver cannot tell. Only on a [whole](Self::open_whole) lane, which has no other tickets:
    /// each of its markers stands for all that the one before stood for.
    pub(crate) fn mark_everything(self: &Arc<Self>) -> Result<Option<u64>> {
        const NOT_SUPPORTED: i32 = 801;
        let engine = &self.engine;
        if engine.backend.limits().records_all && engine.lanes().iter().any(|l| l.is_held_up()) {
            return Ok(Some(self.mark_everything_later()));
        }
        let event = engine.event().map_err(|code| engine.refused(code))?;
        let marked = self.with(|turn| {
            let ticket = turn.next_ticket();
            // SAFETY: the event is pooled, so nothing is pending on it, and the handle keeps it.
            let recorded = unsafe { engine.backend.event_record_all(event.raw()) };
            recorded.inspect_err(|code| {
                if code.code != NOT_SUPPORTED {
                    event.spoil();
                }
            })?;
            self.timeline.publish(ticket);
            turn.enter_event(ticket, event);
            Ok(ticket)
        });
        match marked {
            Ok(ticket) => Ok(Some(ticket)),
            Err(DriverCode { code: NOT_SUPPORTED, .. }) => Ok(None),
            Err(code) => Err(engine.refused(code)),
        }
    }

    /// [`mark_everything`](Self::mark_everything) where the driver would hold up the caller until a full
    /// queue has room: the ticket is there now, its marker follows from another thread.
    #[cold]
    fn mark_everything_later(self: &Arc<Self>) -> u64 {
        let ticket = self.with(|turn| {
            let ticket = turn.next_ticket();
            self.timeline.publish(ticket);
            ticket
        });
        let lane = self.clone();
        self.engine.errand(move |engine| {
            if let Err(code) = lane.place_everything() {
                // Our own streams are waited for one by one; of others' the driver does not tell.
                let error = engine.refused(code);
                tracing::warn!(device = engine.label(), %error, "others' streams are not waited for");
                lane.complete_all();
            }
        });
        ticket
    }

    /// Records behind everything on the device and credits the tail with it, unless somebody did. Not
    /// under the lock: the driver may hold it up.
    pub(super) fn place_everything(self: &Arc<Self>) -> std::result::Result<(), DriverCode> {
        let tail = self.submitted();
        let event = self.engine.event()?;
        // SAFETY: the event is pooled, so nothing is pending on it, and the handle keeps it.
        let recorded = unsafe { self.engine.backend.event_record_all(event.raw()) };
        recorded.inspect_err(|_| event.spoil())?;
        self.with(|turn| {
            if turn.is_marked(tail) {
                // Pending, and nobody's marker.
                event.spoil();
            } else {
                turn.enter_event(tail, event);
            }
        });
        Ok(())
    }

    /// Completes what was submitted to a whole lane, and wakes who waits for it.
    fn complete_all(&self) {
        self.timeline.complete(self.submitted());
        self.settle();
    }

    /// Whether its tickets stand for the whole device: see [`mark_everything`](Self::mark_everything).
    pub(super) fn is_whole(&self) -> bool {
        !self.owned && !self.is_shared()
    }
}
