//! The pool of completion events.
//!
//! An event is borrowed as an [`EventHandle`], shared between the marker that credits a ticket and whatever orders a stream behind it. It
//! returns to the pool with the last handle; the marker keeps its handle until its ticket is complete, so a pooled event is never pending.
//! An event whose record failed, or whose stream went away before it was seen complete, may be pending: it is not lent again, and is
//! destroyed when the next event is created, so that such events do not accumulate. A handle may outlive the engine; its event is then
//! destroyed when the handle is dropped.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::backend::RawEvent;

/// Events to be used again.
#[derive(Default)]
pub(crate) struct EventPool {
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    free: Vec<Arc<EventCell>>,
    /// To be destroyed.
    spoiled: Vec<RawEvent>,
    /// Destroys events that come back after the engine is gone.
    destroy: Option<Destroy>,
}

/// Destroys an event without holders.
pub(crate) type Destroy = Arc<dyn Fn(RawEvent) + Send + Sync>;

#[derive(Debug)]
pub(crate) struct EventCell {
    raw: RawEvent,
    spoiled: AtomicBool,
}

/// A share of a borrowed event.
pub(crate) struct EventHandle {
    raw: RawEvent,
    /// `None` only inside `drop`.
    cell: Option<Arc<EventCell>>,
    pool: Arc<EventPool>,
}

impl EventPool {
    /// Takes a pooled event, or adopts the one that `create` makes; it is shown the events that are not
    /// lent any more, and destroys them.
    pub(crate) fn get<E>(
        self: &Arc<Self>,
        create: impl FnOnce(Vec<RawEvent>) -> Result<RawEvent, E>,
    ) -> Result<EventHandle, E> {
        if let Some(pooled) = self.get_idle() {
            return Ok(pooled);
        }
        let spoiled = std::mem::take(&mut self.idle.lock().spoiled);
        let cell = Arc::new(EventCell { raw: create(spoiled)?, spoiled: AtomicBool::new(false) });
        Ok(EventHandle { raw: cell.raw, cell: Some(cell), pool: self.clone() })
    }

    /// Takes a pooled event.
    pub(crate) fn get_idle(self: &Arc<Self>) -> Option<EventHandle> {
        let cell = self.idle.lock().free.pop()?;
        Some(EventHandle { raw: cell.raw, cell: Some(cell), pool: self.clone() })
    }

    /// How many can be taken without making one.
    pub(crate) fn idle(&self) -> usize {
        self.idle.lock().free.len()
    }

    /// Empties the pool; the caller destroys the events, and `destroy` those that come back later.
    pub(crate) fn close(&self, destroy: Destroy) -> Vec<RawEvent> {
        let mut idle = self.idle.lock();
        idle.destroy = Some(destroy);
        let mut events = std::mem::take(&mut idle.spoiled);
        events.extend(idle.free.drain(..).map(|cell| cell.raw));
        events
    }

    fn put(&self, mut cell: Arc<EventCell>) {
        // The last of the handles returns the event; `into_inner` decides which that is.
        if Arc::get_mut(&mut cell).is_none() {
            match Arc::into_inner(cell) {
                Some(inner) => cell = Arc::new(inner),
                None => return,
            }
        }
        let mut idle = self.idle.lock();
        if let Some(destroy) = idle.destroy.clone() {
            drop(idle);
            destroy(cell.raw);
        // ORDERING: Relaxed: this is the last handle, and getting here ordered the others' before.
        } else if cell.spoiled.load(Ordering::Relaxed) {
            idle.spoiled.push(cell.raw);
        } else {
            idle.free.push(cell);
        }
    }
}

impl EventHandle {
    pub(crate) fn raw(&self) -> RawEvent {
        self.raw
    }

    /// Whether this is the only share.
    pub(crate) fn is_sole(&self) -> bool {
        self.cell.as_ref().is_some_and(|cell| Arc::strong_count(cell) == 1)
    }

    /// Marks the event as failed to record: it is never lent again.
    pub(crate) fn spoil(&self) {
        if let Some(cell) = &self.cell {
            // ORDERING: Relaxed, see `put`.
            cell.spoiled.store(true, Ordering::Relaxed);
        }
    }
}

impl Clone for EventHandle {
    fn clone(&self) -> Self {
        EventHandle { raw: self.raw, cell: self.cell.clone(), pool: self.pool.clone() }
    }
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        if let Some(cell) = self.cell.take() {
            self.pool.put(cell);
        }
    }
}
