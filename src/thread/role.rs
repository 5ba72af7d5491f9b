//! The role of the current thread: which code it runs.
//!
//! | role | what it runs | may call the driver | may submit or block |
//! |---|---|---|---|
//! | `Free` | anything else | yes | yes |
//! | `HostFn` | a host function of a stream | no: the driver answers 800 | no |
//! | `Enqueuing` | the closure of `enqueue`, under its stream's submission lock | not through this crate, which takes that lock | no |
//! | `Twin` | a kernel's host twin | yes | no: it would wait for its own stream |
//! | `Poller` | a waker, on a device's poller | yes | no: it would delay every other future of the device |
//!
//! # Invariants
//! 1. Every public call that needs the driver checks the role before it takes a lock or makes a driver call: it returns a typed error, or
//!    answers with what is known and leaves the query to the poller (`every_public_method_inside_a_host_function`,
//!    `every_public_method_inside_enqueue`).
//! 2. No public call blocks in a twin or on a poller (`no_public_method_blocks_inside_a_twin`, `no_public_method_blocks_the_poller`).
//! 3. In a host function and in the closure of `enqueue`, a drop only queues its work (`what_a_host_function_captured_may_be_a_handle`,
//!    `drops_inside_the_closure_only_enqueue`).
#![forbid(unsafe_code)]

use std::cell::Cell;

use crate::error::{ErrorDetail, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Any other thread.
    Free,
    /// Inside a host function of a stream.
    HostFn,
    /// Inside the closure of `enqueue`.
    Enqueuing,
    /// Inside a kernel's host twin.
    Twin,
    /// A device's poller.
    Poller,
}

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::Free) };
}

/// The current thread's role; `Free` while the thread ends.
#[inline]
pub(crate) fn current() -> Role {
    ROLE.try_with(Cell::get).unwrap_or(Role::Free)
}

/// Gives the current thread a role until the guard is dropped.
pub(crate) fn enter(role: Role) -> RoleGuard {
    RoleGuard(ROLE.try_with(|cell| cell.replace(role)).unwrap_or(role))
}

/// Whether this crate may call the driver here.
pub(crate) fn may_call_driver() -> bool {
    !matches!(current(), Role::HostFn | Role::Enqueuing)
}

/// Whether the driver takes calls here at all.
pub(crate) fn driver_takes_calls() -> bool {
    current() != Role::HostFn
}

/// Refuses `what`, which submits or blocks, on threads where it would deadlock. That includes calls for which
/// the driver creates something (a stream, an event, pinned memory, an event's interprocess handle): they
/// wait while any queue is full.
///
/// # Errors
/// [`ErrorDetail::WrongThread`].
#[inline]
pub fn check(what: &'static str) -> Result<()> {
    match current() {
        Role::Free => Ok(()),
        role => Err(wrong_thread(what, role)),
    }
}

/// Refuses `what`, which calls the driver without waiting, or has another thread call it, where this crate
/// may not call the driver.
pub(crate) fn check_driver(what: &'static str) -> Result<()> {
    if may_call_driver() { Ok(()) } else { Err(wrong_thread(what, current())) }
}

#[cold]
fn wrong_thread(what: &'static str, role: Role) -> crate::Error {
    let thread = match role {
        Role::Free | Role::HostFn => "the thread that runs host functions",
        Role::Enqueuing => "a thread inside the closure of `enqueue`",
        Role::Twin => "a host device's worker thread (inside a kernel's host twin)",
        Role::Poller => "a device's poller thread (from a waker)",
    };
    ErrorDetail::WrongThread { what, thread }.into()
}

pub(crate) struct RoleGuard(Role);

impl Drop for RoleGuard {
    fn drop(&mut self) {
        let _ = ROLE.try_with(|cell| cell.set(self.0));
    }
}
