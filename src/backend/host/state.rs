//! The state of a host device's streams and events.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use gpu_await_protocol::lock::{Condvar, Mutex};
use smallvec::{SmallVec, smallvec};

use super::HostCore;

/// A stream's outstanding work; it outlives the stream's handle.
#[derive(Default)]
pub(super) struct Books {
    pub(super) handle: u64,
    /// The handle is destroyed; the stream goes once its queue is empty.
    pub(super) destroyed: AtomicBool,
    /// Unfinished commands of all kinds.
    pub(super) pending: AtomicU64,
    /// Unfinished commands that take a slot in the queue.
    pub(super) depth: Mutex<usize>,
    pub(super) room: Condvar,
    /// The stream waits for an event that is never reached, and its handle is gone: the worker discards the
    /// remaining commands.
    pub(super) given_up: AtomicBool,
    /// The head waits for an event that is never reached: no room is freed in the queue any more. Set under the lock of `depth`.
    pub(super) stands_still: AtomicBool,
}

impl Books {
    /// Releases the threads that wait for room, since none will be freed.
    pub(super) fn stand_still(&self) {
        let _depth = self.depth.lock();
        // ORDERING: Relaxed: read under the lock, or by a stream that polls.
        if !self.stands_still.swap(true, Ordering::Relaxed) {
            self.room.notify_all();
        }
    }
}

#[derive(Default)]
pub(super) struct HostEvent {
    /// Records submitted and records reached.
    pub(super) recorded: AtomicU64,
    pub(super) reached: Mutex<Reached>,
    pub(super) changed: Condvar,
    pub(super) last_record: Mutex<LastRecord>,
    /// The last requested record that a stream discarded.
    pub(super) discarded: AtomicU64,
}

impl HostEvent {
    /// Whether a record that has not been reached never will be.
    pub(super) fn never_comes(&self, generation: u64) -> bool {
        // ORDERING: Relaxed: the stream that waits polls this.
        self.discarded.load(Ordering::Relaxed) >= generation
            || self.last_record.lock().stands_still()
    }

    /// The number of the next record, which waits for the queues of these streams.
    pub(super) fn next_record(
        &self,
        core: &Arc<HostCore>,
        streams: SmallVec<[Weak<Books>; 1]>,
    ) -> u64 {
        // ORDERING: SeqCst, see `stream_wait_event`.
        let generation = self.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        *self.last_record.lock() = LastRecord { core: Arc::downgrade(core), streams };
        generation
    }

    /// An event with one record, on this stream.
    pub(super) fn recorded_once(core: &Arc<HostCore>, books: &Arc<Books>) -> (Arc<Self>, u64) {
        let event = Arc::new(HostEvent::default());
        let generation = event.next_record(core, smallvec![Arc::downgrade(books)]);
        (event, generation)
    }

    /// A requested record will not be made.
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

/// What an event's last record waits for.
#[derive(Default)]
pub(super) struct LastRecord {
    core: Weak<HostCore>,
    /// The streams that may not have reached it yet.
    streams: SmallVec<[Weak<Books>; 1]>,
}

impl LastRecord {
    /// Returns whether a record that has not been reached yet never will be. A destroyed stream counts as having finished its queue.
    fn stands_still(&self) -> bool {
        // ORDERING: Relaxed: the caller polls.
        let stands_still = |books: Arc<Books>| books.stands_still.load(Ordering::Relaxed);
        self.core.upgrade().is_none_or(|core| core.fault.get().is_some())
            || self.streams.iter().filter_map(Weak::upgrade).any(stands_still)
    }
}

/// Marks an event as reached when every stream has dropped its share.
pub(super) struct Everybody {
    pub(super) event: Arc<HostEvent>,
    pub(super) generation: u64,
}

impl Everybody {
    /// A stream has reached it.
    pub(super) fn arrive(&self, books: &Books) {
        let mut last_record = self.event.last_record.lock();
        last_record.streams.retain(|stream| !std::ptr::eq(stream.as_ptr(), books));
    }
}

impl Drop for Everybody {
    fn drop(&mut self) {
        self.event.reach(self.generation);
    }
}
