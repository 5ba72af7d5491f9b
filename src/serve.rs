//! What a service needs around streams: a bound on the work in flight, and requests gathered into
//! batches.
//!
//! | file | what it is |
//! |---|---|
//! | [`pool`] | [`StreamPool`](pool::StreamPool): streams, lent with a bound on what is in flight |
//! | [`admission`] | who is let in and who waits (pure) |
//! | [`batcher`] | [`Batcher`](batcher::Batcher): single requests, run together |
//! | [`gather`] | when a batch is ready (pure) |
//! | [`timer`] | one time-out on any executor, exact to some microseconds |
//! | [`layers`] | both as `tower::Service` (feature `tower`) |
#![forbid(unsafe_code)]

pub(crate) mod admission;
pub(crate) mod batcher;
pub(crate) mod gather;
#[cfg(feature = "tower")]
pub(crate) mod layers;
pub(crate) mod pool;
pub(crate) mod timer;
