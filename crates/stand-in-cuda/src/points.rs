//! What is reached, and what is in front of it.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::abi::Handle;

/// How many commands of each stream are in front of something.
pub(crate) type Clock = BTreeMap<Handle, u64>;

/// Reaches a point when every stream has dropped its share.
pub(crate) struct Everybody(pub(crate) Arc<Point>);

impl Drop for Everybody {
    fn drop(&mut self) {
        // Once: nobody else reaches this point.
        self.0.0.get_or_init(Instant::now);
    }
}

/// What one event record reaches. A later record of the same event makes another.
#[derive(Default)]
pub(crate) struct Point(pub(crate) OnceLock<Instant>, Clock);

impl Point {
    /// A point behind so much.
    pub(crate) fn behind(clock: Clock) -> Self {
        Point(OnceLock::new(), clock)
    }

    /// What is in front of it.
    pub(crate) fn clock(&self) -> &Clock {
        &self.1
    }

    /// When it was reached; `None` if it was not yet.
    pub(crate) fn reached(&self) -> Option<Instant> {
        self.0.get().copied()
    }
}
