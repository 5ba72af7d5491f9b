//! The driver queries of a [`Tracer`](crate::runtime::tracer::Tracer): when events were reached, and anchors of the device's clock.

use std::sync::Arc;
use std::time::Duration;

use super::{DeviceStream, Engine};
use crate::backend::{NOT_READY, Query};
use crate::error::{ErrorDetail, EventProblem, Result};
use crate::runtime::event_pool::EventHandle;
use crate::runtime::tracer::{AnchorEvent, AskEvents};
use crate::thread::relax::Relax;
use crate::thread::role;

/// Timed events that are made before the first traced operation needs one.
const TIMED: usize = 256;

/// The closest of this many tries is taken.
const TRIES: usize = 8;

/// A try that takes longer, in nanoseconds, is abandoned: the device or the processor is busy.
const GIVEN_UP_NS: u64 = 10_000_000;

impl<S: DeviceStream> Engine<S> {
    /// Asks for the traced operations to be resolved.
    #[cold]
    pub(crate) fn call_to_resolve(self: &Arc<Self>) {
        self.errand(|engine| engine.resolve_traced());
    }

    /// Starts the log of operations. Blocks for about a millisecond.
    pub(crate) fn start_tracing(&self, capacity: usize, one_in: u32) -> Result<()> {
        role::check_driver("starting the timeline")?;
        self.check_health()?;
        if !self.options.stepped {
            let events = TIMED.min(capacity.saturating_mul(2));
            drop((0..events).map_while(|_| self.timed_event_now()).collect::<Vec<_>>());
        }
        self.tracer.start(capacity, one_in, self.pacing.now());
        self.resolve_traced();
        Ok(())
    }

    /// Resolves traced operations that are complete. Only where driver calls may be made.
    pub(crate) fn resolve_traced(&self) {
        // The clock of a stepped device is not that of its events.
        if !self.options.stepped {
            self.tracer.resolve(self, self.pacing.now());
        }
    }

    /// The time between two timed events of this device, both complete.
    pub(crate) fn elapsed(&self, start: &EventHandle, end: &EventHandle) -> Result<Duration> {
        role::check_driver("asking for the time between events")?;
        // SAFETY: the handles keep the events.
        let elapsed = unsafe { self.backend.event_elapsed_ms(start.raw(), end.raw()) };
        let ms = elapsed.map_err(|code| match code.code {
            NOT_READY => {
                let (which, problem) = ("one of the events", EventProblem::Incomplete);
                ErrorDetail::Event { which, problem }.into()
            }
            _ => self.refused(code),
        })?;
        Duration::try_from_secs_f64(f64::from(ms) / 1e3).map_err(|_| {
            let (which, problem) = ("the start event", EventProblem::BehindEnd);
            ErrorDetail::Event { which, problem }.into()
        })
    }

    /// `timed_event` of the pools, for callers that can do without: `None` if one would have to be created while the driver cannot.
    pub(crate) fn timed_event_now(&self) -> Option<EventHandle> {
        let pooled = self.pools.idle_timed_event();
        pooled.or_else(|| {
            let may_make = !self.registry.streams().iter().any(|stream| stream.may_sit_in_driver());
            may_make.then(|| self.pools.timed_event().ok()).flatten()
        })
    }

    fn try_anchor(&self) -> Option<AnchorEvent> {
        let event = self.timed_event_now()?;
        let (before, mut relax) = (self.pacing.now(), Relax::default());
        // SAFETY: the private stream lives as long as the engine; the event is pooled, so nothing is pending on it.
        if unsafe { self.backend.event_record(event.raw(), self.shares.private) }.is_err() {
            event.spoil();
            return None;
        }
        loop {
            // SAFETY: the handle keeps the event.
            let answer = unsafe { self.backend.event_query(event.raw()) };
            let after = self.pacing.now();
            match answer {
                Ok(Query::Complete) => {
                    return Some(AnchorEvent { event, window: (before, after) });
                }
                Ok(Query::Pending) if after - before < GIVEN_UP_NS => {
                    if after - before > GIVEN_UP_NS / 100 {
                        relax.pause();
                    } else {
                        std::hint::spin_loop();
                    }
                }
                _ => {
                    // It may be pending.
                    event.spoil();
                    return None;
                }
            }
        }
    }
}

impl<S: DeviceStream> AskEvents for Engine<S> {
    fn anchor(&self) -> Option<AnchorEvent> {
        let tries = (0..TRIES).filter_map(|_| self.try_anchor());
        tries.min_by_key(|anchor| anchor.window.1 - anchor.window.0)
    }

    fn elapsed_ns(&self, from: &EventHandle, to: &EventHandle) -> Option<f64> {
        // SAFETY: the handles keep the events.
        let elapsed_ms = unsafe { self.backend.event_elapsed_ms(from.raw(), to.raw()) };
        elapsed_ms.ok().map(|ms| f64::from(ms) * 1e6)
    }
}
