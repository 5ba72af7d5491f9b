//! A point on a stream: one of its tickets (pure).
//!
//! Every wait is for points: that of an operation, an allocation's next user, an event, another stream.
#![forbid(unsafe_code)]

/// A stream, as far as a point needs to know it: the stream itself, or how far it is.
pub(crate) trait Track: Clone {
    fn id(&self) -> u64;
    /// Whether `ticket` is known to be complete: later work then waits for nothing.
    fn is_complete(&self, ticket: u64) -> bool;
}

/// A point on a stream: complete when the stream has reached the end of the operation with that ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Point<S> {
    pub(crate) stream: S,
    pub(crate) ticket: u64,
}

impl<S: Track> Point<S> {
    /// Whether it is known to be complete.
    pub(crate) fn is_complete(&self) -> bool {
        self.stream.is_complete(self.ticket)
    }
}
