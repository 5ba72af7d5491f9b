//! The synchronization of pure modules, which the tests replace by loom's.
#![forbid(unsafe_code)]

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
