//! [`Room`]: what a caller has that was ready before its call.
#![forbid(unsafe_code)]

use std::sync::Weak;

use futures::channel::oneshot;

use crate::error::Result;
use crate::inside::Inside;

/// Who waits for room for a call.
pub(crate) type Place = oneshot::Sender<Result<Room>>;

/// Room for one call at a worker, which is given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Room(Weak<Inside>);

impl Room {
    pub(crate) fn of(inside: &Inside) -> Self {
        Room(inside.this())
    }

    /// Whether it is at this worker; then nobody gives it back but the caller.
    pub(crate) fn into_room_at(self, inside: &Inside) -> bool {
        let is_here = std::ptr::eq(self.0.as_ptr(), inside);
        if is_here {
            let mut room = self;
            drop(std::mem::take(&mut room.0));
        }
        is_here
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(inside) = self.0.upgrade() {
            inside.if_here(|core, _| core.give_back_room());
        }
    }
}
