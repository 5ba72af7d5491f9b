//! The atomics and the lock of the pure modules.
//!
//! `tests/loom.rs` compiles the same pure modules against loom's types by putting a module of the
//! same name in this one's place.
#![forbid(unsafe_code)]

/// A lock without `try_lock`.
pub(crate) use parking_lot::Mutex as Plain;
pub(crate) use parking_lot::{Mutex, MutexGuard};
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
