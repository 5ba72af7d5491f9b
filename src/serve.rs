//! Services around streams: a bound on the work in flight, and requests gathered into batches.
//!
//! | file | what it is |
//! |---|---|
//! | [`pool`] | [`StreamPool`](pool::StreamPool): streams, lent with a bound on what is in flight |
//! | [`admission`] | which requests are admitted, wait or are refused (pure) |
//! | [`cancellable_queues`] | queues whose entries may leave from anywhere (pure) |
//! | [`service_times`] | an estimator of how long permits and batches take (pure) |
//! | [`refusal`] | the `tracing` event of a refused request |
//! | [`batcher`] | [`Batcher`](batcher::Batcher): single requests, run together |
//! | [`batching`] | when a batch is ready (pure) |
//! | [`tower`] | both as `tower::Service` (feature `tower`) |
//!
//! Times come from a [`Clock`](crate::runtime::clock::Clock), the pool's first device's, whose poller signals each deadline even to stalled tasks.
#![forbid(unsafe_code)]

pub(crate) mod batcher;
pub(crate) mod pool;
mod refusal;
#[cfg(feature = "tower")]
pub(crate) mod tower;
