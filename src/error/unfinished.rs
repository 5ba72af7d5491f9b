//! [`Unfinished`]: what remains when a device or a pool did not finish in time.
#![forbid(unsafe_code)]

use std::fmt;

/// What a device or a stream pool still had to finish when a time limit passed; a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unfinished {
    /// Streams with operations in flight, or whose permits are held.
    pub streams: u64,
    /// Operations in flight on them.
    pub operations: u64,
    /// [Loans](crate::Stream::lend_memory) of memory that have not ended.
    pub loans: u64,
    /// Permits of stream pools that are not released: a request holds its stream, or the device has not finished its work.
    pub permits: u64,
    /// Freed memory that waits for device work.
    pub pending_bytes: u64,
    /// Values of the program (owners of adopted memory, kept values, functions) that are being dropped on a thread of the
    /// crate, one after another, or are queued there.
    pub drops: u64,
}

impl fmt::Display for Unfinished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unfinished { streams, operations, loans, permits, pending_bytes, drops } = *self;
        write!(f, "in flight are {operations} operations on {streams} streams")?;
        let rest = [
            (permits, "permits of stream pools held"),
            (loans, "pieces of memory on loan to other libraries"),
            (pending_bytes, "bytes of memory not free yet"),
            (drops, "values of the program's being dropped, or next"),
        ];
        rest.iter().filter(|(n, _)| *n > 0).try_for_each(|(n, what)| write!(f, ", {n} {what}"))
    }
}
