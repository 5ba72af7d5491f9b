//! Containment of foreign code: a waker, destructor, kernel twin or subscriber that panics ends no thread of this crate, and no process:
//! a panic that leaves a `Drop` while its thread unwinds aborts.
//!
//! Every call of `tracing` goes through [`log`] or [`catch`], and no `Drop` runs foreign code outside of this module.
//!
//! A panic's payload is foreign as well: its `Drop` may panic, with a payload whose `Drop` panics. It is dropped here; a payload that keeps
//! panicking is leaked. A panic that leaves a drop while another one unwinds ends the process, and a `Vec` drops its elements in one go: so
//! this crate holds foreign values as [`Contained`], one by one.
//!
//! # Invariants
//! 1. Nothing unwinds out of a function of this module, and no payload ends a thread (`a_waker_whose_panic_panics_ends_nothing` and its
//!    siblings in `tests/errors/panics.rs`).
//! 2. A [`Contained`] value that panics in its drop ends nothing, also while a panic unwinds (`requests_that_panic_in_their_drop` and its
//!    siblings in `tests/serving/batch_panics.rs`).
//! 3. No subscriber's panic leaves a call of this crate, and none of foreign code leaves a `Drop` of it
//!    (`a_subscriber_that_panics_at_everything`).
#![forbid(unsafe_code)]

use std::any::Any;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::{Poll, Waker};

/// How many payloads of one panic are dropped, each thrown by the drop of the one before.
const PAYLOADS: usize = 8;

/// A foreign value: its drop is contained, wherever it happens.
#[derive(Debug)]
pub(crate) struct Contained<T>(
    /// `None` only while it is dropped.
    Option<T>,
);

impl<T> Contained<T> {
    pub(crate) fn new(value: T) -> Self {
        Contained(Some(value))
    }

    pub(crate) fn into_inner(mut self) -> T {
        self.0.take().unwrap_or_else(|| unreachable!("it is taken when it is dropped"))
    }
}

impl<T> Deref for Contained<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().unwrap_or_else(|| unreachable!("it is taken when it is dropped"))
    }
}

impl<T> DerefMut for Contained<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().unwrap_or_else(|| unreachable!("it is taken when it is dropped"))
    }
}

impl<T> Drop for Contained<T> {
    fn drop(&mut self) {
        if let Some(value) = self.0.take() {
            contain("the drop of a value", || drop(value));
        }
    }
}

/// Drops foreign values one by one.
pub(crate) fn drop_each<T>(values: impl IntoIterator<Item = T>) {
    values.into_iter().for_each(let_go);
}

/// Runs foreign code; if it panicked, returns the panic's message.
pub(crate) fn catch<R>(run: impl FnOnce() -> R) -> Result<R, String> {
    hold(run).map_err(message_of)
}

/// The message of a panic whose payload was held.
#[cold]
pub(crate) fn message_of(payload: Box<dyn Any + Send>) -> String {
    let message = message(&*payload);
    discard(payload);
    message
}

/// Runs foreign code; if it panicked, returns the payload, for a caller that resumes the panic.
#[inline]
pub(crate) fn hold<R>(run: impl FnOnce() -> R) -> std::thread::Result<R> {
    catch_unwind(AssertUnwindSafe(run))
}

/// Runs foreign code; if it panicked, logs that `what` did, and returns `None`.
pub(crate) fn contain<R>(what: &'static str, run: impl FnOnce() -> R) -> Option<R> {
    hold(run).map_err(|payload| report(what, payload)).ok()
}

#[cold]
fn report(what: &'static str, payload: Box<dyn Any + Send>) {
    let message = message_of(payload);
    log(|| tracing::error!(message, "{what} panicked"));
}

/// Calls `tracing`: a subscriber is foreign code.
pub(crate) fn log(event: impl FnOnce()) {
    // There is nothing left to report to.
    catch(event).ok();
}

/// Wakes a task; a waker that panics affects nothing else.
pub(crate) fn wake(waker: Waker) {
    contain("a waker", || waker.wake());
}

/// [`wake`] that keeps the waker.
pub(crate) fn wake_by_ref(waker: &Waker) {
    contain("a waker", || waker.wake_by_ref());
}

/// Drops a value of foreign code: a waker, or what a user passed.
pub(crate) fn let_go<T>(value: T) {
    contain("the drop of a waker or of a user's value", || drop(value));
}

/// [`catch`] for a future, which is dropped when it has ended: its drop may panic as well.
pub(crate) async fn catch_future<F: Future>(future: F) -> Result<F::Output, String> {
    let mut future = pin!(Some(future));
    let ended = std::future::poll_fn(|cx| {
        let polled = catch(|| future.as_mut().as_pin_mut().map(|future| future.poll(cx)));
        match polled {
            Ok(Some(polled)) => polled.map(Ok),
            Ok(None) => unreachable!("it is there until it ended"),
            Err(message) => Poll::Ready(Err(message)),
        }
    })
    .await;
    contain("the drop of a future", || future.set(None));
    ended
}

/// Drops a payload, and payloads thrown by its drop.
fn discard(mut payload: Box<dyn Any + Send>) {
    for _ in 0..PAYLOADS {
        match catch_unwind(AssertUnwindSafe(|| drop(payload))) {
            Ok(()) => return,
            Err(next) => payload = next,
        }
    }
    std::mem::forget(payload);
}

/// A panic's message, if it has one.
pub(crate) fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "(no message)".to_owned())
}
