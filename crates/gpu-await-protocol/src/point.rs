//! A point on a stream: one of its tickets (pure).
//!
//! Every wait is for points: that of an operation, an allocation's next user, an event, another stream.
#![forbid(unsafe_code)]

use std::sync::Arc;

/// A stream, as far as a point needs to know it: the stream itself, or its progress.
pub trait Track {
    /// Names the stream.
    fn id(&self) -> u64;
    /// Whether `ticket` is known to be complete: later work then waits for nothing.
    fn is_complete(&self, ticket: u64) -> bool;
}

impl<S: Track + ?Sized> Track for Arc<S> {
    fn id(&self) -> u64 {
        S::id(self)
    }

    fn is_complete(&self, ticket: u64) -> bool {
        S::is_complete(self, ticket)
    }
}

/// A point on a stream: complete when the stream has reached the end of the operation with that ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point<S> {
    /// The stream.
    pub stream: S,
    /// The operation.
    pub ticket: u64,
}

impl<S: Track> Point<S> {
    /// Whether it is known to be complete.
    #[inline]
    pub fn is_complete(&self) -> bool {
        self.stream.is_complete(self.ticket)
    }
}
