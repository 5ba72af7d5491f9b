//! How many bytes of bodies and answers are in memory, over all connections.
//!
//! | part | share of the budget | waiting for it |
//! |---|---|---|
//! | bodies above 64 KiB, or of unknown length | 3/8 | a request, before its body is read |
//! | answers above 64 KiB | 3/8 | a request, before it has a stream |
//! | smaller bodies, smaller answers | 1/8 each | the same: large ones do not hold up small ones |
//!
//! A body is reserved whole and once, so two of them cannot wait for each other's rest, until its numbers are in pinned memory. An answer's
//! bytes are reserved until the last one has left.
//!
//! Not counted are what JSON becomes while it is decoded (the size of its body again for numbers, some ten times it for empty rows), what a
//! connection itself buffers (`connections.rs`), and answers that tell of errors and of the service.
#![forbid(unsafe_code)]

use std::sync::Arc;

use axum::body::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::failure::Failure;

/// What is above it is large.
const LARGE: usize = 64 << 10;

pub(crate) struct Budget {
    bodies: Side,
    answers: Side,
}

/// The parts of what is small and what is large, each with its size.
struct Side([(usize, Arc<Semaphore>); 2]);

/// Bytes that may be in memory.
pub(crate) struct Reserved(OwnedSemaphorePermit);

impl Budget {
    pub(crate) fn new(bytes: usize) -> Budget {
        let part = |bytes| (bytes, Arc::new(Semaphore::new(bytes)));
        let side = || Side([part(bytes / 8), part(bytes / 8 * 3)]);
        Budget { bodies: side(), answers: side() }
    }

    /// Waits until a body of `bytes` may be read.
    pub(crate) async fn body(&self, bytes: usize) -> Result<Reserved, Failure> {
        self.bodies.reserve(bytes).await
    }

    /// Waits until an answer of up to `bytes` may be made.
    pub(crate) async fn answer(&self, bytes: usize) -> Result<Reserved, Failure> {
        self.answers.reserve(bytes).await
    }

    /// Bytes reserved for bodies, and for answers.
    pub(crate) fn used(&self) -> (usize, usize) {
        let used = |Side(parts): &Side| {
            parts.iter().map(|(bytes, free)| bytes - free.available_permits()).sum()
        };
        (used(&self.bodies), used(&self.answers))
    }
}

impl Side {
    async fn reserve(&self, bytes: usize) -> Result<Reserved, Failure> {
        let (most, free) = &self.0[usize::from(bytes > LARGE)];
        // One that is larger than all there is waits until it is alone.
        let bytes = u32::try_from(bytes.min(*most)).unwrap_or(u32::MAX);
        let permit = free.clone().acquire_many_owned(bytes).await;
        permit.map(Reserved).map_err(|error| Failure::internal(&error))
    }
}

impl Reserved {
    /// The bytes of an answer. They are reserved until the last clone or slice of them is dropped.
    pub(crate) fn hold(mut self, bytes: Vec<u8>) -> Bytes {
        struct Held(Vec<u8>, #[expect(dead_code, reason = "it is kept")] Reserved);
        impl AsRef<[u8]> for Held {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        drop(self.0.split(self.0.num_permits().saturating_sub(bytes.len())));
        Bytes::from_owner(Held(bytes, self))
    }
}
