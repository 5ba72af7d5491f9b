//! What markers are made of: events, words, and bells behind events.
//!
//! An event may return after its engine is gone, if a user's handle or a log entry kept it. It is destroyed then.

use std::sync::Arc;

use gpu_await_protocol::sync::Mutex;

use crate::backend::{Backend, DriverResult, EventOptions, RawEvent, RawStream};
use crate::runtime::doorbell::Bells;
use crate::runtime::event_pool::{Destroy, EventHandle, EventPool};
use crate::runtime::progress::DeviceState;
use crate::runtime::words::Words;
use crate::thread::worker;

pub(crate) struct MarkerPools {
    backend: Arc<dyn Backend>,
    state: Arc<DeviceState>,
    events: Arc<EventPool>,
    timed_events: Arc<EventPool>,
    pub(crate) words: Words,
    /// Private streams for doorbells.
    pub(crate) bells: Bells,
}

impl MarkerPools {
    pub(super) fn new(backend: &Arc<dyn Backend>, state: &Arc<DeviceState>) -> Self {
        MarkerPools {
            backend: backend.clone(),
            state: state.clone(),
            events: Arc::default(),
            timed_events: Arc::default(),
            words: Words::default(),
            bells: Bells::default(),
        }
    }

    /// Borrows an event for a marker.
    pub(crate) fn event(&self) -> DriverResult<EventHandle> {
        self.events.get(|spoiled| self.make_event(EventOptions::default(), spoiled))
    }

    /// Borrows an event for a marker, if the pool has one.
    pub(crate) fn idle_event(&self) -> Option<EventHandle> {
        self.events.get_idle()
    }

    /// Ensures that some events, plain and timed, are ready to be borrowed.
    pub(crate) fn stock_events(&self) -> DriverResult<()> {
        const STOCK: usize = 32;
        const TIMED: usize = 8;
        // All borrowed at once, and returned.
        type Handles = DriverResult<Vec<EventHandle>>;
        if self.events.idle() < STOCK {
            (0..STOCK).map(|_| self.event()).collect::<Handles>()?;
        }
        if self.timed_events.idle() < TIMED {
            (0..TIMED).map(|_| self.timed_event()).collect::<Handles>()?;
        }
        Ok(())
    }

    /// Borrows an event that measures time.
    pub(crate) fn timed_event(&self) -> DriverResult<EventHandle> {
        let options = EventOptions { timing: true, ..EventOptions::default() };
        self.timed_events.get(|spoiled| self.make_event(options, spoiled))
    }

    fn make_event(&self, options: EventOptions, spoiled: Vec<RawEvent>) -> DriverResult<RawEvent> {
        for event in spoiled {
            // SAFETY: its last handle is gone, and the driver allows that it is still pending.
            if unsafe { self.backend.event_destroy(event) }.is_err() {
                self.state.count_unreturned();
            }
        }
        self.backend.event_create(options)
    }

    /// Borrows an event that measures time, if the pool has one.
    pub(super) fn idle_timed_event(&self) -> Option<EventHandle> {
        self.timed_events.get_idle()
    }

    /// The end of the engine: the events and the bells' streams, for the caller to destroy.
    pub(super) fn close(&self) -> (Vec<RawEvent>, Vec<RawStream>) {
        let destroy = destroy_later(&self.backend);
        let mut events: Vec<RawEvent> = self.events.close(destroy.clone());
        events.extend(self.timed_events.close(destroy));
        (events, self.bells.drain())
    }
}

/// Destroys events that return after their engine is gone, all of them on one thread; until `main` returns.
fn destroy_later(backend: &Arc<dyn Backend>) -> Destroy {
    let backend = backend.clone();
    // `Some` while a thread destroys events: those that it has not taken yet.
    let late: Arc<Mutex<Option<Vec<RawEvent>>>> = Arc::default();
    Arc::new(move |event| {
        let mut waiting = late.lock();
        if let Some(waiting) = &mut *waiting {
            return waiting.push(event);
        }
        *waiting = Some(vec![event]);
        drop(waiting);
        let (backend, late) = (backend.clone(), late.clone());
        worker::last_act(move || {
            loop {
                let events = {
                    let mut waiting = late.lock();
                    let Some(events) = waiting.take().filter(|events| !events.is_empty()) else {
                        return;
                    };
                    *waiting = Some(Vec::new());
                    events
                };
                for event in events {
                    // SAFETY: the event was pooled: it has no other holder.
                    let _ = unsafe { backend.event_destroy(event) };
                }
            }
        });
    })
}
