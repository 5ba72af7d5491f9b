//! [`Event`]: a recorded point of a stream.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::completion::events::EventHandle;
use crate::completion::lane::Lane;
use crate::error::{ErrorDetail, Result};
use crate::hazard::Track;
use crate::op::{Op, Point, Value};

/// A point of a stream that others can wait for, the host can await, and (recorded with
/// [`record_timed`](crate::Stream::record_timed)) time can be measured between.
///
/// It stands for all work submitted to its stream before it was recorded, and for nothing later.
/// Cheap to clone.
#[derive(Clone)]
pub struct Event {
    lane: Arc<Lane>,
    ticket: u64,
    handle: Option<EventHandle>,
    timed: bool,
}

/// A point with the event behind it, where one is at hand.
pub(crate) struct Mark {
    pub(crate) point: Point,
    pub(crate) event: Option<EventHandle>,
}

impl Event {
    pub(crate) fn ticket(&self) -> u64 {
        self.ticket
    }

    pub(crate) fn new(
        lane: &Arc<Lane>,
        ticket: u64,
        handle: Option<EventHandle>,
        timed: bool,
    ) -> Self {
        Event { lane: lane.clone(), ticket, handle, timed }
    }

    /// Resolves when the stream has reached the point: *complete on the device*.
    pub fn done(&self) -> Op<()> {
        Op::pending(&self.lane, self.ticket, Value::Here(()))
    }

    /// Whether the stream has reached the point, by asking the device. Never blocks.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.done().is_complete()
    }

    /// Blocks the calling thread until the stream has reached the point.
    ///
    /// # Blocking
    /// Yes: not from async code; `event.done().await` there.
    ///
    /// # Errors
    /// The loss of the device; a thread on which it would dead-lock.
    pub fn synchronize(&self) -> Result<()> {
        self.done().synchronize()
    }

    /// The time on the device between two timed events, `start` before `self`.
    ///
    /// # Errors
    /// In this order: [`ErrorDetail::Event`] if one was not recorded with timing or is not complete
    /// yet (it does not wait); [`ErrorDetail::WrongDevice`] if they are of two devices.
    ///
    /// # Source
    /// `cuEventElapsedTime`: about half a microsecond of resolution.
    pub fn elapsed_since(&self, start: &Event) -> Result<Duration> {
        let (Some(end), Some(begin)) = (self.timing_handle(), start.timing_handle()) else {
            let reason = "not recorded with timing: use `record_timed`";
            return Err(ErrorDetail::Event { reason }.into());
        };
        if !self.is_complete() || !start.is_complete() {
            return Err(ErrorDetail::Event { reason: "not complete yet: await it first" }.into());
        }
        let engine = self.lane.engine();
        if start.lane.engine().id != engine.id {
            return Err(crate::submit::wrong_device(
                "the start event",
                engine,
                start.lane.engine(),
            ));
        }
        engine.elapsed(begin, end)
    }

    fn timing_handle(&self) -> Option<&EventHandle> {
        self.handle.as_ref().filter(|_| self.timed)
    }

    pub(crate) fn mark(&self) -> Mark {
        let point = Point { lane: self.lane.clone(), ticket: self.ticket };
        Mark { point, event: self.handle.clone() }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event(ticket {} of stream {})", self.ticket, self.lane.id())
    }
}
