//! [`Room`]: the permit of one call at a worker, which goes with the call wherever that goes.
//!
//! | a permit | is held by | until |
//! |---|---|---|
//! | reserved | a caller that was ready before its call | its call is entered, or the caller goes |
//! | kept | a call that came back to its group | the group sends it again, or its caller goes |
//! | lent | a call that another worker, which is full, has instead | that worker is done with the call |
//!
//! So a group never has more calls than its workers have permits, and no admitted call loses its permit to one that was not admitted.
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use futures::task::AtomicWaker;
use gpu_await_protocol::lock::Mutex;

use crate::error::Result;
use crate::lender::Lender;

/// The worker's end of a wait for room. What it gives arrives at once, under the slot's lock, so that a waiter that goes gives it back, and
/// nobody else does: in transit the room would belong to nobody.
#[derive(Debug)]
pub(crate) struct Place(Arc<Slot>);

/// The other end: resolves to the room, or to why there will be none; `None` if the worker forgot it in a panic.
#[derive(Debug)]
pub(crate) struct Awaited(Arc<Slot>);

/// A waiter to wake, outside the lock.
#[derive(Debug)]
pub(crate) struct Given(Arc<Slot>);

#[derive(Debug, Default)]
struct Slot {
    holds: Mutex<Holds>,
    waker: AtomicWaker,
}

#[derive(Debug, Default)]
enum Holds {
    #[default]
    Nothing,
    Room(Result<Room>),
    /// The worker's end is gone.
    Forgotten,
    /// Nobody waits any more.
    Gone,
}

impl Place {
    pub(crate) fn new() -> (Place, Awaited) {
        let slot = Arc::new(Slot::default());
        (Place(slot.clone()), Awaited(slot))
    }

    /// Whether nobody waits any more.
    pub(crate) fn is_canceled(&self) -> bool {
        matches!(*self.0.holds.lock(), Holds::Gone)
    }

    /// Gives the room, unless nobody waits any more.
    pub(crate) fn give(self, room: Result<Room>) -> std::result::Result<Given, Result<Room>> {
        let mut holds = self.0.holds.lock();
        if matches!(*holds, Holds::Gone) {
            return Err(room);
        }
        *holds = Holds::Room(room);
        drop(holds);
        Ok(Given(self.0.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut holds = self.0.holds.lock();
        if let Holds::Nothing = *holds {
            *holds = Holds::Forgotten;
            drop(holds);
            self.0.waker.wake();
        }
    }
}

impl Given {
    pub(crate) fn wake(self) {
        self.0.waker.wake();
    }
}

impl Future for Awaited {
    type Output = Option<Result<Room>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.waker.register(cx.waker());
        let mut holds = self.0.holds.lock();
        match std::mem::replace(&mut *holds, Holds::Gone) {
            Holds::Nothing => {
                *holds = Holds::Nothing;
                Poll::Pending
            }
            Holds::Room(room) => Poll::Ready(Some(room)),
            Holds::Forgotten | Holds::Gone => Poll::Ready(None),
        }
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        // Dropped after the lock is released.
        let held = std::mem::replace(&mut *self.0.holds.lock(), Holds::Gone);
        drop(held);
    }
}

/// Room for one call at a worker, given back when its last copy is dropped, which must not be under the lock of any worker.
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

    /// Whether there is another copy.
    #[cfg(test)]
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Whether it is at this worker.
    pub(crate) fn is_at(&self, lender: &Weak<dyn Lender>) -> bool {
        self.0.lender.ptr_eq(lender)
    }

    /// Whether it is at this worker; then only the caller gives it back.
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
