//! Keeps a stream alive for its users. Memory that was made on it does not.
//!
//! | a stream is | until |
//! |---|---|
//! | open: it has a handle | the last handle is dropped; its resources are released then |
//! | deserted, its work pending | the work is complete; the owner of the device's streams keeps it |
//! | gone: its driver stream is destroyed, its owner dropped | |
//!
//! A deserted stream gets no handle again: the rest of its work is looked at and waited for through
//! [`Progress`](crate::runtime::progress::Progress).
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use gpu_await_protocol::sync::Mutex;

use super::StreamState;
use crate::runtime::weak_list::WeakList;
use crate::thread::locks;

/// An object made for one stream and useless without it, whose owner may hold it for longer: compiled graphs, and the memory
/// they keep.
pub(crate) trait OfStream: Send + Sync {
    /// The stream has no handle any more: releases the object's resources.
    fn stream_is_gone(&self);
}

/// The right to put work on a stream.
pub(crate) struct StreamHandle {
    stream: Arc<StreamState>,
    belongings: Mutex<WeakList<dyn OfStream>>,
}

impl StreamHandle {
    pub(super) fn new(stream: Arc<StreamState>) -> Arc<Self> {
        Arc::new(StreamHandle { stream, belongings: Mutex::default() })
    }

    /// Registers an object to be released when the stream is gone.
    pub(crate) fn has(&self, belonging: Weak<dyn OfStream>) {
        self.belongings.lock().push(belonging);
    }
}

impl fmt::Debug for StreamHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stream.fmt(f)
    }
}

impl Deref for StreamHandle {
    type Target = Arc<StreamState>;

    fn deref(&self) -> &Arc<StreamState> {
        &self.stream
    }
}

impl StreamState {
    /// The last handle is dropped. The owner of the device's streams keeps the stream while its work is
    /// pending, and releases it when it is complete.
    fn desert(self: &Arc<Self>) {
        // ORDERING: SeqCst: against `deactivate`, which stores that it lets go and then looks at this.
        self.deserted.store(true, Ordering::SeqCst);
        if let Some(share) = self.driver.partition() {
            share.stream_ends();
        }
        // If the poller does not have the stream, this is the last reference.
        if self.has_dues() || self.waiters.is_watched() || self.awaits_its_word() {
            self.activate();
        }
    }

    /// Whether a write of its word may be pending: the poller then keeps the stream until the word's line can be returned. A lost device
    /// keeps its lines.
    fn awaits_its_word(&self) -> bool {
        self.markers.word().is_some_and(|word| word.is_late(|| true))
            && self.engine.lost().is_none()
            && !self.is_stuck()
    }

    /// Whether it has no handle.
    #[inline]
    pub(crate) fn is_deserted(&self) -> bool {
        // ORDERING: Relaxed: a hint; `deactivate` looks behind a fence, against `desert`.
        self.deserted.load(Ordering::Relaxed)
    }

    /// Whether it has no handle and will make no progress any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.is_deserted() && self.is_found_stuck()
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        locks::assert_none("a stream");
        // First of all: this retires objects behind the stream's work, which the following looks at.
        self.belongings.get_mut().alive().iter().for_each(|belonging| belonging.stream_is_gone());
        self.stream.desert();
    }
}
