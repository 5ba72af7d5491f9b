//! The synchronization of pure modules, which tests replace by loom's.
#![forbid(unsafe_code)]

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
