//! The streams of a device: every one that is there.
//!
//! | a stream is | from | until |
//! |---|---|---|
//! | here | its lane is made | its lane is dropped |
//!
//! # Invariants
//! 1. A stream is here until its work is complete or its device lost, so that a wait for the whole
//!    device finds it
//!    (`a_frozen_buffer_outlives_the_reads_of_a_dropped_stream`): nobody drops a lane before, see
//!    [`progress`](super::progress).
#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::protocol::park::Inbox;

pub(crate) struct Registry<S> {
    /// By their ids.
    lanes: Mutex<Vec<(u64, Weak<S>)>>,
    /// Handed to the poller, which has not taken them yet.
    inbox: Inbox<Arc<S>>,
}

impl<S> Registry<S> {
    pub(crate) fn new() -> Self {
        Registry { lanes: Mutex::default(), inbox: Inbox::new() }
    }

    /// Hands a lane to the poller; false if that has ended, and the lane is let go of.
    pub(crate) fn hand_over(&self, lane: Arc<S>) -> bool {
        self.inbox.put(lane).map_err(|lane| let_go([lane])).is_ok()
    }

    /// Takes the lanes that were handed over; true if there were any.
    pub(crate) fn take_handed_over(&self, into: &mut Vec<Arc<S>>) -> bool {
        self.inbox.take(into)
    }

    /// The poller has ended: releases the streams that were handed over, and those that will be.
    pub(crate) fn let_go_of_all(&self) {
        let_go(self.inbox.close());
    }

    pub(crate) fn insert(&self, id: u64, lane: Weak<S>) {
        self.lanes.lock().push((id, lane));
    }

    /// Removes a lane that is being dropped.
    pub(crate) fn remove(&self, id: u64) {
        let mut lanes = self.lanes.lock();
        if let Some(at) = lanes.iter().position(|(known, _)| *known == id) {
            lanes.swap_remove(at);
        }
    }

    /// All of them.
    pub(crate) fn lanes(&self) -> Vec<Arc<S>> {
        self.lanes.lock().iter().filter_map(|(_, lane)| lane.upgrade()).collect()
    }
}

/// Releases streams that have no poller any more. At the end of the process they are leaked instead: other
/// devices may still depend on their pending work.
pub(super) fn let_go<S>(lanes: impl IntoIterator<Item = Arc<S>>) {
    let exits = crate::thread::exit::begun();
    lanes.into_iter().for_each(|lane| if exits { std::mem::forget(lane) } else { drop(lane) });
}
