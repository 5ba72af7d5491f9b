//! [`Refused`]: an error that returns what the call was given.
#![forbid(unsafe_code)]

use std::fmt;

use super::Error;

/// Why a call that takes memory was refused, and that memory.
///
/// `?` makes an [`Error`] of it; pinned memory then returns to its pool, and device memory is freed.
///
/// Returned by [`Op::accepted`](crate::Op::accepted) and by the verbs of [`Queue`](crate::Queue) that
/// take a pinned buffer.
pub struct Refused<T> {
    /// The reason.
    pub error: Error,
    /// What the call was passed, unchanged. `None` if the driver refused in the middle: the device may still
    /// use the memory, which returns to its pool when the stream is past that point. Also `None` if an upload
    /// found no pinned memory to copy its data to.
    pub value: Option<T>,
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
