//! [`Room`]: the place of one call at a worker, which goes with the call wherever that goes.
//!
//! | a place | is held by | until |
//! |---|---|---|
//! | reserved | a caller that was ready before its call | its call is entered, or the caller goes |
//! | kept | a call that came back to its group | the group sends it again, or its caller goes |
//! | lent | a call that another worker, which is full, has instead | that worker is done with the call |
//!
//! So a group never has more calls than its workers have places, and no call that was let in loses its place to one that was not.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use futures::channel::oneshot;

use crate::error::Result;
use crate::lender::Lender;

/// Who waits for room for a call.
pub(crate) type Place = oneshot::Sender<Result<Room>>;

/// Room for one call at a worker, which is given back when its last copy is dropped. Not under the lock of any worker.
#[derive(Clone, Debug)]
pub(crate) struct Room(Arc<Held>);

#[derive(Debug)]
struct Held {
    lender: Weak<dyn Lender>,
    is_taken: AtomicBool,
}

impl Room {
    pub(crate) fn of(lender: &Weak<dyn Lender>) -> Self {
        Room(Arc::new(Held { lender: lender.clone(), is_taken: AtomicBool::new(false) }))
    }

    /// Whether somebody else has a copy.
    #[cfg(test)]
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Whether it is at this worker.
    pub(crate) fn is_at(&self, lender: &Weak<dyn Lender>) -> bool {
        self.0.lender.ptr_eq(lender)
    }

    /// Whether it is at this worker; then nobody gives it back but the caller.
    pub(crate) fn take_at(&self, lender: &Weak<dyn Lender>) -> bool {
        self.is_at(lender) && !self.0.is_taken.swap(true, Ordering::SeqCst)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(lender) = self.lender.upgrade().filter(|_| !*self.is_taken.get_mut()) {
            lender.give_back_room();
        }
    }
}
