//! Which of this crate's threads the current one is.
//!
//! On a thread that runs host functions, and on a device's poller, submissions and blocking waits
//! would dead-lock or stall every other future of the device: they are a typed error there, and a
//! drop only enqueues.
#![forbid(unsafe_code)]

use std::cell::Cell;

use crate::error::{ErrorDetail, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Anybody's thread.
    Free,
    /// Inside a host function of a stream.
    HostFn,
    /// A device's poller.
    Poller,
}

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::Free) };
}

/// The current thread's role; `Free` while the thread ends.
pub(crate) fn current() -> Role {
    ROLE.try_with(Cell::get).unwrap_or(Role::Free)
}

/// Gives the current thread a role until the guard is dropped.
pub(crate) fn enter(role: Role) -> RoleGuard {
    RoleGuard(ROLE.try_with(|cell| cell.replace(role)).unwrap_or(role))
}

/// Refuses `what` on threads where it would dead-lock.
pub(crate) fn check(what: &'static str) -> Result<()> {
    let thread = match current() {
        Role::Free => return Ok(()),
        Role::HostFn => "the thread that runs host functions",
        Role::Poller => "a device's poller thread (from a waker)",
    };
    Err(ErrorDetail::WrongThread { what, thread }.into())
}

pub(crate) struct RoleGuard(Role);

impl Drop for RoleGuard {
    fn drop(&mut self) {
        let _ = ROLE.try_with(|cell| cell.set(self.0));
    }
}
