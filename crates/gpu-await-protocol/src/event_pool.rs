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

use super::lock::Mutex;

/// Events to be used again.
pub struct EventPool<E> {
    idle: Mutex<Idle<E>>,
}

struct Idle<E> {
    free: Vec<Arc<EventCell<E>>>,
    /// To be destroyed.
    spoiled: Vec<E>,
    /// Destroys events that come back after the engine is gone.
    destroy: Option<Destroy<E>>,
}

/// Destroys an event without holders.
pub type Destroy<E> = Arc<dyn Fn(E) + Send + Sync>;

/// An event, shared by its handles.
#[derive(Debug)]
pub struct EventCell<E> {
    raw: E,
    spoiled: AtomicBool,
}

/// A share of a borrowed event.
pub struct EventHandle<E: Copy> {
    raw: E,
    /// `None` only inside `drop`.
    cell: Option<Arc<EventCell<E>>>,
    pool: Arc<EventPool<E>>,
}

impl<E> Default for EventPool<E> {
    fn default() -> Self {
        let idle = Idle { free: Vec::new(), spoiled: Vec::new(), destroy: None };
        EventPool { idle: Mutex::new(idle) }
    }
}

impl<E: Copy> EventPool<E> {
    /// Takes a pooled event, or adopts the one that `create` makes; that also gets the spoiled events, and destroys them.
    pub fn get<F>(
        self: &Arc<Self>,
        create: impl FnOnce(Vec<E>) -> Result<E, F>,
    ) -> Result<EventHandle<E>, F> {
        if let Some(pooled) = self.get_idle() {
            return Ok(pooled);
        }
        let spoiled = std::mem::take(&mut self.idle.lock().spoiled);
        let cell = Arc::new(EventCell { raw: create(spoiled)?, spoiled: AtomicBool::new(false) });
        Ok(EventHandle { raw: cell.raw, cell: Some(cell), pool: self.clone() })
    }

    /// Takes a pooled event.
    pub fn get_idle(self: &Arc<Self>) -> Option<EventHandle<E>> {
        let cell = self.idle.lock().free.pop()?;
        Some(EventHandle { raw: cell.raw, cell: Some(cell), pool: self.clone() })
    }

    /// How many can be taken without making one.
    pub fn idle(&self) -> usize {
        self.idle.lock().free.len()
    }

    /// Empties the pool; the caller destroys the events, and `destroy` those that come back later.
    pub fn close(&self, destroy: Destroy<E>) -> Vec<E> {
        let mut idle = self.idle.lock();
        idle.destroy = Some(destroy);
        let mut events = std::mem::take(&mut idle.spoiled);
        events.extend(idle.free.drain(..).map(|cell| cell.raw));
        events
    }

    fn put(&self, mut cell: Arc<EventCell<E>>) {
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

impl<E: Copy> EventHandle<E> {
    /// The event itself.
    pub fn raw(&self) -> E {
        self.raw
    }

    /// Whether this is the only handle.
    pub fn is_sole(&self) -> bool {
        self.cell.as_ref().is_some_and(|cell| Arc::strong_count(cell) == 1)
    }

    /// Marks the event as failed to record: it is never lent again.
    pub fn spoil(&self) {
        if let Some(cell) = &self.cell {
            // ORDERING: Relaxed, see `put`.
            cell.spoiled.store(true, Ordering::Relaxed);
        }
    }
}

impl<E: Copy> Clone for EventHandle<E> {
    fn clone(&self) -> Self {
        EventHandle { raw: self.raw, cell: self.cell.clone(), pool: self.pool.clone() }
    }
}

impl<E: Copy> Drop for EventHandle<E> {
    fn drop(&mut self) {
        if let Some(cell) = self.cell.take() {
            self.pool.put(cell);
        }
    }
}
