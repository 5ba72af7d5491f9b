//! The state of a host device's streams and events.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::HostCore;

/// A stream's outstanding work; it outlives the stream's handle.
#[derive(Default)]
pub(super) struct Books {
    pub(super) handle: u64,
    /// The handle is destroyed; the stream goes when its queue is empty.
    pub(super) destroyed: AtomicBool,
    /// Unfinished commands of all kinds.
    pub(super) pending: AtomicU64,
    /// Unfinished commands that take a slot in the queue.
    pub(super) depth: Mutex<usize>,
    pub(super) room: Condvar,
    /// The stream waited for an event that is never reached, and its handle is gone: the worker discards
    /// the commands that are left.
    pub(super) given_up: AtomicBool,
}

#[derive(Default)]
pub(super) struct HostEvent {
    /// Records submitted and records reached.
    pub(super) recorded: AtomicU64,
    pub(super) reached: Mutex<Reached>,
    pub(super) changed: Condvar,
    /// The device of the last record.
    pub(super) recorder: Mutex<Weak<HostCore>>,
    /// The last record that the stream was asked for and discarded.
    pub(super) discarded: AtomicU64,
}

impl HostEvent {
    /// Whether a record that was not reached never will be.
    pub(super) fn never_comes(&self, generation: u64) -> bool {
        // ORDERING: Relaxed: the stream that waits polls this.
        self.discarded.load(Ordering::Relaxed) >= generation
            || self.recorder.lock().upgrade().is_none_or(|core| core.fault.get().is_some())
    }

    /// A requested record is not made.
    pub(super) fn discard(&self, generation: u64) {
        // ORDERING: Relaxed: a stream that waits for the event polls this.
        self.discarded.fetch_max(generation, Ordering::Relaxed);
    }

    pub(super) fn reach(&self, generation: u64) {
        let mut reached = self.reached.lock();
        reached.generation = reached.generation.max(generation);
        reached.at = Some(Instant::now());
        self.changed.notify_all();
    }
}

#[derive(Default)]
pub(super) struct Reached {
    pub(super) generation: u64,
    pub(super) at: Option<Instant>,
}

/// Marks an event as reached when every stream has dropped its share.
pub(super) struct Everybody {
    pub(super) event: Arc<HostEvent>,
    pub(super) generation: u64,
}

impl Drop for Everybody {
    fn drop(&mut self) {
        self.event.reach(self.generation);
    }
}
