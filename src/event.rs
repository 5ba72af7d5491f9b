//! [`Event`]: a recorded point of a stream.
//!
//! | an event | is recorded by | and is |
//! |---|---|---|
//! | a mark | [`Stream::record`](crate::Stream::record) | a ticket; its marker may be shared with other tickets |
//! | timed | [`Stream::record_timed`](crate::Stream::record_timed) | a ticket with a device timestamp |
//! | created first | [`Event::record`], repeatedly | either of the above: the last record counts |
//! | part of a graph | [`Event::record_in`], in each launch | the launch's ticket, with a timestamp of its position in the graph |
//! | interprocess | [`Event::record`], in any process that has it | the driver's own event |
//!
//! # Invariants
//! 1. Recording again creates a new point: waits for the old one are unaffected (`recording_again_leaves_who_waits_for_the_first_point`).
//! 2. Measuring elapsed time never waits. A missing prerequisite is a typed error; they are checked in this order: timing, a record,
//!    completion, the same device, the right direction (`elapsed_time_says_what_is_missing_in_order`, `a_start_behind_the_end_is_an_error`).

pub(crate) mod builder;
pub(crate) mod interprocess;

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gpu_await_protocol::sync::Mutex;

use self::interprocess::SharedEvent;
use crate::backend::{EventOptions, Query, StreamOptions};
use crate::error::refused::Here;
use crate::error::{ErrorDetail, EventProblem, Result};
use crate::op::{HostValue, Op};
use crate::runtime::event_pool::EventHandle;
use crate::runtime::stream_state::{StreamHandle, StreamState};
use crate::runtime::{Engine, MarkedPoint, Point};
use crate::submit::{EventNode, Footprint, submit, wrong_device};
use crate::thread::role;

/// A point on a stream: other streams can wait for it, the host can await it, and the time between two timed
/// events can be measured.
///
/// It stands for all work submitted to its stream before it was recorded, and for nothing later. Cheap to
/// clone; clones are the same event. An event that was never recorded is complete, as in CUDA.
#[derive(Clone)]
pub struct Event {
    inner: Arc<Inner>,
}

/// The fields are dropped in this order: the last holder of the engine drops the event pool with it.
struct Inner {
    /// Where it was last recorded.
    last: Mutex<Option<Recorded>>,
    /// Its record as a graph node.
    node: OnceLock<Arc<EventNode>>,
    shared: Option<Interprocess>,
    options: EventOptions,
    engine: Arc<Engine>,
}

/// A record of an event.
#[derive(Clone)]
pub(crate) struct Recorded {
    at: MarkedPoint,
    /// The event that holds the timestamp.
    time: Option<EventHandle>,
}

impl Recorded {
    /// A record at a point with a marker of its own.
    pub(crate) fn behind(at: MarkedPoint, timing: bool) -> Self {
        let own = at.marker.as_ref().filter(|_| timing);
        Recorded { time: own.map(|marker| marker.event.clone()), at }
    }

    /// A record in the middle of the operation that ends at the point.
    pub(crate) fn in_front_of(at: Point, node: Option<&Arc<EventNode>>) -> Self {
        Recorded { at: at.into(), time: node.map(|node| node.event().clone()) }
    }
}

/// An event that several processes share.
struct Interprocess {
    event: Arc<SharedEvent>,
    /// A stream of this crate that waits for the event, so that the host can wait for a ticket.
    observer: OnceLock<Arc<StreamHandle>>,
}

/// Something to wait for on a stream.
pub(crate) enum Mark {
    Point(MarkedPoint),
    /// The last record at the time when the wait is submitted.
    Shared(Arc<SharedEvent>),
}

impl Event {
    /// An event that is already recorded.
    pub(crate) fn recorded(engine: &Arc<Engine>, at: MarkedPoint, timing: bool) -> Self {
        let engine = engine.clone();
        let options = EventOptions { timing, ..EventOptions::default() };
        let (last, node) = (Mutex::new(Some(Recorded::behind(at, timing))), OnceLock::new());
        Event { inner: Arc::new(Inner { engine, options, last, node, shared: None }) }
    }

    fn unrecorded(
        engine: &Arc<Engine>,
        options: EventOptions,
        shared: Option<Arc<SharedEvent>>,
    ) -> Self {
        let shared = shared.map(|event| Interprocess { event, observer: OnceLock::new() });
        let (engine, last, node) = (engine.clone(), Mutex::default(), OnceLock::new());
        Event { inner: Arc::new(Inner { engine, options, last, node, shared }) }
    }

    /// An event of another process.
    pub(crate) fn imported(engine: &Arc<Engine>, event: Arc<SharedEvent>) -> Self {
        let options = EventOptions { interprocess: true, ..EventOptions::default() };
        Event::unrecorded(engine, options, Some(event))
    }

    /// Resolves when the stream has passed the last recorded point. Ready proves *complete on the device*.
    ///
    /// # Blocking
    /// No; but the first call for an interprocess event creates a stream, as [`Device::stream`](crate::Device::stream) does.
    ///
    /// # Errors
    /// The loss of the device.
    #[track_caller]
    pub fn done(&self) -> Op<()> {
        if let Some(shared) = &self.inner.shared {
            return self.observe(shared).here().unwrap_or_else(Op::failed);
        }
        match self.last() {
            Some(last) => Op::until(last.at.point),
            None => Op::at_points(Vec::new(), HostValue::here(())),
        }
    }

    /// Queries whether the stream has passed the last recorded point. Never blocks. Inside a host function it
    /// answers from known state, and the poller queries.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match &self.inner.shared {
            // A failed query counts as complete: nothing more will happen.
            Some(shared) => !matches!(shared.event.query(), Ok(Query::Pending)),
            None => self.done().is_complete(),
        }
    }

    /// Blocks the calling thread until the stream has passed the last recorded point.
    ///
    /// # Blocking
    /// Yes: in async code use `event.done().await` instead. The thread polls briefly and then sleeps; with
    /// [`blocking_sync`](builder::EventBuilder::blocking_sync) it sleeps at once.
    ///
    /// # Errors
    /// The loss of the device; a thread that would deadlock.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let mut done = self.done();
        if self.inner.options.blocking_sync {
            done.never_check();
        }
        done.synchronize()
    }

    /// Returns the time on the device from `start` to `self`; both must be timed.
    ///
    /// # Errors
    /// Checked in this order: [`ErrorDetail::Event`] with [`EventProblem::Untimed`],
    /// [`EventProblem::Unrecorded`] or [`EventProblem::Incomplete`] (it does not wait);
    /// [`ErrorDetail::WrongDevice`] if the two belong to different devices; [`EventProblem::BehindEnd`] if
    /// the device reached `self` before `start`.
    ///
    /// # Source
    /// `cuEventElapsedTime`: about half a microsecond of resolution.
    #[track_caller]
    pub fn elapsed_since(&self, start: &Event) -> Result<Duration> {
        self.time_since(start).here()
    }

    fn time_since(&self, start: &Event) -> Result<Duration> {
        role::check_driver("asking for the time between events")?;
        let both = [("the end event", self), ("the start event", start)];
        let problem = |which, problem| Err(ErrorDetail::Event { which, problem }.into());
        for (which, event) in both {
            if !event.inner.options.timing {
                return problem(which, EventProblem::Untimed);
            }
        }
        let (Some(end), Some(begin)) = (self.last(), start.last()) else {
            let which = if self.last().is_none() { both[0].0 } else { both[1].0 };
            return problem(which, EventProblem::Unrecorded);
        };
        for (which, last) in [(both[0].0, &end), (both[1].0, &begin)] {
            if !Op::until(last.at.point.clone()).is_complete() {
                return problem(which, EventProblem::Incomplete);
            }
        }
        let (engine, other) = (&self.inner.engine, &start.inner.engine);
        if other.state.id != engine.state.id {
            return Err(wrong_device("the start event", engine, other));
        }
        match (&begin.time, &end.time) {
            (Some(begin), Some(end)) => engine.elapsed(begin, end),
            // Both were recorded with timing, so the events exist.
            _ => problem(both[0].0, EventProblem::Untimed),
        }
    }

    /// Returns the event's handle for another process on the same machine: plain bytes, to be sent by any
    /// means and opened with [`Device::import_event`](crate::Device::import_event).
    ///
    /// # Ownership
    /// This event must live as long as the other process uses its own.
    ///
    /// # Blocking
    /// For one driver call.
    ///
    /// # Errors
    /// [`EventProblem::NotInterprocess`]; a driver error.
    ///
    /// # Source
    /// `cuIpcGetEventHandle`.
    pub fn export(&self) -> Result<[u8; 64]> {
        role::check("exporting an event")?;
        match &self.inner.shared {
            Some(shared) => shared.event.export(),
            None => {
                let problem = EventProblem::NotInterprocess;
                Err(ErrorDetail::Event { which: "the event", problem }.into())
            }
        }
    }

    fn last(&self) -> Option<Recorded> {
        self.inner.last.lock().clone()
    }

    pub(crate) fn set_last(&self, recorded: Recorded) {
        let before = self.inner.last.lock().replace(recorded);
        // After the lock: dropping it may return an event.
        drop(before);
    }

    pub(crate) fn options(&self) -> EventOptions {
        self.inner.options
    }

    pub(crate) fn shared(&self) -> Option<&Arc<SharedEvent>> {
        self.inner.shared.as_ref().map(|shared| &shared.event)
    }

    pub(crate) fn check_device(&self, engine: &Engine) -> Result<()> {
        let own = &self.inner.engine;
        if engine.state.id == own.state.id {
            Ok(())
        } else {
            Err(wrong_device("the event", engine, own))
        }
    }

    /// Its record as a graph node; `None` if it is not timed.
    pub(crate) fn node(&self) -> Result<Option<&Arc<EventNode>>> {
        let Inner { node, engine, options, .. } = &*self.inner;
        if !options.timing {
            return Ok(None);
        }
        if let Some(node) = node.get() {
            return Ok(Some(node));
        }
        let event = engine.pools.timed_event().map_err(|code| engine.refused(code))?;
        Ok(Some(node.get_or_init(|| EventNode::new(event))))
    }

    /// Makes the observer stream wait for the driver's event, so that the host can wait for a ticket.
    #[track_caller]
    fn observe(&self, shared: &Interprocess) -> Result<Op<()>> {
        role::check("submitting work")?;
        let engine = &self.inner.engine;
        let stream = match shared.observer.get() {
            Some(stream) => stream,
            None => {
                let name = Some("event".into());
                let stream = StreamState::open(engine, StreamOptions::default(), name)?;
                shared.observer.get_or_init(|| stream)
            }
        };
        let ticket = submit::<false>(
            &stream.state,
            Location::caller(),
            (&mut Footprint::new("event"), true),
            1,
            &mut |raw| Ok(raw.wait_shared(&shared.event)?),
        )?;
        Ok(Op::pending(&stream.state, ticket, HostValue::here(())))
    }

    /// The mark that a stream waits for; `None` if the event was never recorded.
    pub(crate) fn mark(&self) -> Option<Mark> {
        if let Some(shared) = &self.inner.shared {
            return Some(Mark::Shared(shared.event.clone()));
        }
        self.last().map(|last| Mark::Point(last.at))
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.inner.shared, self.last()) {
            (Some(_), _) => f.write_str("Event(interprocess)"),
            (None, Some(Recorded { at: MarkedPoint { point, .. }, .. })) => {
                write!(f, "Event(ticket {} of stream {})", point.ticket, point.stream.id)
            }
            (None, None) => f.write_str("Event(never recorded)"),
        }
    }
}
