//! [`Refused`]: an error that returns what was passed to the call.
#![forbid(unsafe_code)]

use std::fmt;
use std::panic::Location;

use super::Error;

/// Why a call that takes memory was refused, with that memory.
///
/// `?` turns it into an [`Error`]; pinned memory then returns to its pool, and device memory is freed.
///
/// Returned by [`Op::accepted`](crate::Op::accepted) and by the verbs of [`Queue`](crate::Queue) that
/// take a pinned buffer.
pub struct Refused<T> {
    /// The reason.
    pub error: Error,
    /// The value passed to the call, unchanged. `None` if the driver refused midway: the device may still
    /// use the memory, which returns to its pool when the stream is past that point. Also `None` if an upload
    /// found no pinned memory to copy its data to.
    pub value: Option<T>,
}

/// The errors of verbs: an [`Error`], possibly with the value that was passed.
pub(crate) trait AtLine {
    /// The error of a call at this line, unless it already has one.
    fn at_line(self, at: &'static Location<'static>) -> Self;
}

impl AtLine for Error {
    fn at_line(self, at: &'static Location<'static>) -> Self {
        self.called_at(at)
    }
}

impl<T> AtLine for Refused<T> {
    fn at_line(self, at: &'static Location<'static>) -> Self {
        Refused { error: self.error.called_at(at), ..self }
    }
}

/// The result of a call outside a queue.
pub(crate) trait Here {
    /// With the line of the caller.
    fn here(self) -> Self;
}

impl<T> Here for Result<T, Error> {
    #[track_caller]
    #[inline]
    fn here(self) -> Self {
        let at = Location::caller();
        self.map_err(|error| error.called_at(at))
    }
}

impl<T> From<Refused<T>> for Error {
    fn from(refused: Refused<T>) -> Self {
        refused.error
    }
}

/// An error with nothing to return.
impl<T> From<Error> for Refused<T> {
    fn from(error: Error) -> Self {
        Refused { error, value: None }
    }
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl<T> std::error::Error for Refused<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}
