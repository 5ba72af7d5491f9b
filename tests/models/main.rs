//! Pure modules, compiled from their very sources, each against a model of what it must do.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod cases;
}

/// The pure modules.
#[path = "../../src"]
mod sources {
    #[path = "memory/account.rs"]
    pub(crate) mod account;
    #[expect(dead_code, reason = "the crate uses the rest")]
    #[path = "serve/admission.rs"]
    pub(crate) mod admission;
    #[path = "runtime/protocol/backlog.rs"]
    pub(crate) mod backlog;
    #[path = "memory/block_cache.rs"]
    pub(crate) mod block_cache;
    #[path = "memory/buddy.rs"]
    pub(crate) mod buddy;
    #[expect(dead_code, unreachable_pub, reason = "the crate uses the rest and shows it")]
    #[path = "runtime/protocol/cadence.rs"]
    pub(crate) mod cadence;
    #[path = "runtime/protocol/checkers.rs"]
    pub(crate) mod checkers;
    #[path = "runtime/protocol/estimator.rs"]
    pub(crate) mod estimator;
    #[expect(dead_code, reason = "the crate uses the rest")]
    #[path = "serve/batching.rs"]
    pub(crate) mod gather;
    #[path = "memory/hazard.rs"]
    pub(crate) mod hazard;
    #[path = "serve/lines.rs"]
    pub(crate) mod lines;
    #[path = "memory/point.rs"]
    pub(crate) mod point;
    #[path = "serve/took.rs"]
    pub(crate) mod took;
    #[path = "runtime/protocol/waiters.rs"]
    pub(crate) mod waiters;
}

/// What `checkers.rs` and `backlog.rs` need of the crate.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
}

mod account;
mod admission;
mod block_cache;
mod buddy;
mod cadence;
mod hazard;
