//! How many bytes of bodies and answers are in memory, over all connections.
//!
//! | part | share of the budget | waiting for it |
//! |---|---|---|
//! | bodies above 64 KiB, or of unknown length | 3/8 | a request, before its body is read |
//! | answers above 64 KiB | 3/8 | a request, before it has a stream |
//! | smaller bodies, smaller answers | 1/8 each | the same: large ones do not hold up small ones |
//!
//! A body is reserved whole and once, so two of them cannot wait for each other's rest. What is decoded from it
//! takes at most twice as much, right or wrong (`json.rs`), and its permit outlives it, also where the request's time
//! is up and the decoding goes on. An answer's permit is released when its last byte has left.
//!
//! Not counted are what a connection itself buffers (`connections.rs`), and the answers that tell of errors and of the service.
//!
//! # A container's limit
//! Give it the budget twice (bodies are half of it, and decoding takes twice as much), pinned memory for `--max-in-flight`
//! products (up to 12 MiB each), which the device's pool keeps, and the buffers of the connections. Memory that is free again is
//! not all the system's at once: glibc's allocator keeps pages for each thread. With the default options but a write timeout of
//! 1.5 s, ten bursts of 40 clients that did not read answers of 4 MiB left 166, 250, 303, 331, 339, 343, 363, 355, 375 and 359 MiB resident, 70 of them pinned: it
//! levels off. `MALLOC_ARENA_MAX` and `MALLOC_TRIM_THRESHOLD_` in the environment, or another allocator, make that less.
#![forbid(unsafe_code)]

use std::sync::Arc;

use axum::body::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::failure::Failure;

/// What is above it is large.
const LARGE: usize = 64 << 10;

#[derive(Clone)]
pub(crate) struct Budget {
    bodies: Side,
    answers: Side,
}

#[derive(Clone)]
struct Side {
    large: Part,
    small: Part,
}

#[derive(Clone)]
struct Part {
    bytes: usize,
    free: Arc<Semaphore>,
}

/// Bytes that may be in memory.
pub(crate) struct Reserved(OwnedSemaphorePermit);

impl Budget {
    pub(crate) fn new(bytes: usize) -> Budget {
        let part = |eighths| {
            let bytes = bytes / 8 * eighths;
            Part { bytes, free: Arc::new(Semaphore::new(bytes)) }
        };
        let side = || Side { large: part(3), small: part(1) };
        Budget { bodies: side(), answers: side() }
    }

    /// Waits until a body of `bytes` may be read.
    pub(crate) async fn body(&self, bytes: usize) -> Result<Reserved, Failure> {
        self.bodies.part(bytes).reserve(bytes).await
    }

    /// Waits until an answer of up to `bytes` may be made.
    pub(crate) async fn answer(&self, bytes: usize) -> Result<Reserved, Failure> {
        self.answers.part(bytes).reserve(bytes).await
    }

    /// Bytes reserved for bodies, and for answers.
    pub(crate) fn used(&self) -> (usize, usize) {
        (self.bodies.used(), self.answers.used())
    }
}

impl Side {
    fn part(&self, bytes: usize) -> &Part {
        if bytes > LARGE { &self.large } else { &self.small }
    }

    fn used(&self) -> usize {
        self.large.used() + self.small.used()
    }
}

impl Part {
    async fn reserve(&self, bytes: usize) -> Result<Reserved, Failure> {
        // One that is larger than all there is waits until it is alone.
        let bytes = bytes.min(self.bytes).try_into().unwrap_or(u32::MAX);
        let permit = self.free.clone().acquire_many_owned(bytes).await;
        permit.map(Reserved).map_err(|error| Failure::internal(&error))
    }

    fn used(&self) -> usize {
        self.bytes - self.free.available_permits()
    }
}

impl Reserved {
    /// Gives back what is above `bytes`.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        drop(self.0.split(self.0.num_permits().saturating_sub(bytes)));
    }

    /// The bytes themselves. They are reserved until the last clone or slice of them is dropped.
    pub(crate) fn hold(mut self, bytes: Vec<u8>) -> Bytes {
        struct Held {
            bytes: Vec<u8>,
            _reserved: Reserved,
        }
        impl AsRef<[u8]> for Held {
            fn as_ref(&self) -> &[u8] {
                &self.bytes
            }
        }
        self.shrink(bytes.len());
        Bytes::from_owner(Held { bytes, _reserved: self })
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const MIB: usize = 1 << 20;

    fn now<T>(future: impl Future<Output = Result<T, Failure>>) -> Option<T> {
        Some(future.now_or_never()?.unwrap())
    }

    #[test]
    fn large_bodies_do_not_hold_up_small_ones() {
        let budget = Budget::new(64 * MIB); // 24 MiB of large bodies
        let first = now(budget.body(16 * MIB)).unwrap();
        assert!(now(budget.body(16 * MIB)).is_none());
        assert!(now(budget.body(1000)).is_some());
        drop(first);
        assert!(now(budget.body(16 * MIB)).is_some());
    }

    #[test]
    fn an_answer_is_held_until_its_last_part_left() {
        let budget = Budget::new(64 * MIB); // 24 MiB of large answers
        let reserved = now(budget.answer(20 * MIB)).unwrap();
        let mut bytes = reserved.hold(vec![0; 2 * MIB]);
        assert_eq!(budget.used(), (0, 2 * MIB));
        let part = bytes.split_to(10);
        drop(bytes);
        assert_eq!(budget.used(), (0, 2 * MIB));
        let small = now(budget.answer(1000)).unwrap();
        drop(part);
        assert_eq!(budget.used(), (0, 1000));
        drop(small);
        assert_eq!(budget.used(), (0, 0));
    }

    #[test]
    fn what_is_larger_than_the_budget_waits_to_be_alone() {
        let budget = Budget::new(8 * MIB);
        let all = now(budget.body(16 * MIB)).unwrap();
        assert_eq!(budget.used(), (3 * MIB, 0));
        drop(all);
        assert_eq!(budget.used(), (0, 0));
    }
}
