//! Keeps a stream for whoever puts work on it.
//!
//! | a stream is | until |
//! |---|---|
//! | open: a handle is there | its last handle is dropped: a user's, or that of a buffer which was made on it and will be freed there |
//! | deserted, its work pending | that is complete; whoever looks after the streams of the device keeps it |
//! | gone: its driver stream is destroyed, its owner dropped | |
//!
//! Nobody comes back to a deserted stream: what is left of it is looked at and waited for through
//! [`Progress`](crate::runtime::progress::Progress).
#![forbid(unsafe_code)]

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::StreamState;

/// The right to put work on a stream.
#[derive(Debug)]
pub(crate) struct StreamHandle(Arc<StreamState>);

impl StreamHandle {
    pub(super) fn new(stream: Arc<StreamState>) -> Arc<Self> {
        Arc::new(StreamHandle(stream))
    }
}

impl Deref for StreamHandle {
    type Target = Arc<StreamState>;

    fn deref(&self) -> &Arc<StreamState> {
        &self.0
    }
}

impl StreamState {
    /// The last handle is dropped. Whoever looks after the streams keeps it while its work is pending,
    /// and lets go of it when it is complete.
    fn desert(self: &Arc<Self>) {
        // ORDERING: SeqCst: against `deactivate`, which stores that it lets go and then looks at this.
        self.deserted.store(true, Ordering::SeqCst);
        // Of a stream that the poller does not have this is the last that anybody has.
        if self.has_dues() || self.queue.is_watched() {
            self.activate();
        }
    }

    /// Whether nobody has a handle.
    pub(crate) fn is_deserted(&self) -> bool {
        // ORDERING: Relaxed: a hint; `deactivate` looks behind a fence, against `desert`.
        self.deserted.load(Ordering::Relaxed)
    }

    /// Whether nobody has a handle, and it gets nowhere any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.is_deserted() && self.is_found_stuck()
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        self.0.desert();
    }
}
