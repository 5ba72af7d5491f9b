//! The streams of a device.
//!
//! | a stream is | from | until |
//! |---|---|---|
//! | registered | its creation | the end of its drop |
//!
//! # Invariants
//! 1. A stream is registered until its work is complete or its device lost, so that a wait for the whole device finds it
//!    (`a_frozen_buffer_outlives_the_reads_of_a_dropped_stream`): it is not dropped before, see [`progress`](super::progress).
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use gpu_await_protocol::sync::{Mutex, MutexGuard};
use gpu_await_protocol::timeline::Point;

use super::progress::{PointStream, Progress, StreamRef};
use gpu_await_protocol::park::Inbox;

/// A launch on a stream of another device.
type VisitPoint<S> = Point<Arc<Progress<S>>>;

/// The streams of a device, and what is known of all of them.
pub(crate) struct Registry<S> {
    /// By their ids.
    streams: Mutex<Vec<(u64, Weak<S>)>>,
    /// Handed to the poller, which has not taken them yet.
    inbox: Inbox<Arc<S>>,
    /// Set once a stream was released whose work will never be complete.
    gave_up: AtomicBool,
    /// Launches on streams of other devices that have nodes on this one; the last one of each stream.
    visits: Mutex<Vec<VisitPoint<S>>>,
    /// Set once a buffer was used by two streams: from then on dependencies between streams are exact.
    crossed: AtomicBool,
}

impl<S: PointStream> Registry<S> {
    pub(crate) fn new() -> Self {
        let (gave_up, crossed) = (AtomicBool::new(false), AtomicBool::new(false));
        let (streams, visits) = (Mutex::default(), Mutex::default());
        Registry { streams, inbox: Inbox::new(), gave_up, visits, crossed }
    }

    /// Hands a stream to the poller; false if that has ended, and the stream is released.
    pub(crate) fn hand_over(&self, stream: Arc<S>) -> bool {
        self.inbox.put(stream).map_err(|stream| let_go([stream])).is_ok()
    }

    /// Takes the streams that were handed over; true if there were any.
    pub(crate) fn take_handed_over(&self, into: &mut Vec<Arc<S>>) -> bool {
        self.inbox.take(into)
    }

    /// The poller has ended: releases the streams that were handed over, and those that will be.
    pub(crate) fn let_go_of_all(&self) {
        let_go(self.inbox.close());
    }

    pub(crate) fn insert(&self, id: u64, stream: Weak<S>) {
        self.streams.lock().push((id, stream));
    }

    /// Whether a stream is being dropped.
    pub(crate) fn is_one_ending(&self) -> bool {
        self.streams.lock().iter().any(|(_, stream)| stream.strong_count() == 0)
    }

    /// Removes a stream whose drop has released everything it had.
    pub(crate) fn remove(&self, id: u64) {
        let mut streams = self.streams.lock();
        if let Some(at) = streams.iter().position(|(known, _)| *known == id) {
            streams.swap_remove(at);
        }
    }

    /// All of them.
    pub(crate) fn streams(&self) -> Vec<StreamRef<S>> {
        self.streams.lock().iter().filter_map(|(_, stream)| StreamRef::through(stream)).collect()
    }

    /// All of them. The caller must hold no lock: dropping this list may end one of them.
    pub(crate) fn streams_unlocked(&self) -> Vec<Arc<S>> {
        self.streams().into_iter().map(StreamRef::unlocked).collect()
    }

    /// Called when a stream is released whose work will never be complete.
    pub(crate) fn give_up_stream(&self) {
        // ORDERING: Release pairs with `has_given_up_streams`: a thread that no longer finds the stream reads
        // this.
        self.gave_up.store(true, Ordering::Release);
    }

    pub(crate) fn has_given_up_streams(&self) -> bool {
        // ORDERING: Acquire, see above.
        self.gave_up.load(Ordering::Acquire)
    }

    /// A launch on a stream of another device has nodes on this one.
    pub(crate) fn visited(&self, by: VisitPoint<S>) {
        let stream = by.stream.id;
        let (mut visits, over) = self.running(|visit| visit.stream.id != stream);
        visits.push(by);
        // May be the last references to their streams: dropped outside the lock.
        drop((visits, over));
    }

    /// The launches that are not complete, except on lost devices, where they never will be.
    pub(crate) fn visits(&self) -> Vec<VisitPoint<S>> {
        let (visits, over) = self.running(|_| true);
        let running = visits.clone();
        drop((visits, over));
        running
    }

    /// The launches that still run, and those that are over.
    fn running(
        &self,
        stays: impl Fn(&VisitPoint<S>) -> bool,
    ) -> (MutexGuard<'_, Vec<VisitPoint<S>>>, Vec<VisitPoint<S>>) {
        let mut visits = self.visits.lock();
        let runs = |visit: &VisitPoint<S>| {
            stays(visit) && !visit.is_complete() && visit.stream.device().lost().is_none()
        };
        let (running, over) = std::mem::take(&mut *visits).into_iter().partition(runs);
        *visits = running;
        (visits, over)
    }

    /// Whether dependencies between streams are exact, so that operations are followed by events as long as these are used.
    pub(crate) fn is_exact(&self) -> bool {
        // ORDERING: Relaxed: a submitter that misses the switch by one operation makes a later
        // dependency wait longer, never shorter.
        self.crossed.load(Ordering::Relaxed)
    }

    pub(crate) fn set_exact(&self) {
        // ORDERING: Relaxed, as above.
        self.crossed.store(true, Ordering::Relaxed);
    }
}

/// Releases streams that have no poller any more. At the end of the process they are leaked instead: other
/// devices may still depend on their pending work.
pub(super) fn let_go<S>(streams: impl IntoIterator<Item = Arc<S>>) {
    let exits = crate::thread::exit::begun();
    streams
        .into_iter()
        .for_each(|stream| if exits { std::mem::forget(stream) } else { drop(stream) });
}
