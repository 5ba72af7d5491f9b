//! [`Watch`]: what the supervisor's thread waits for.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::PollFlags;

/// What the supervisor polls of a process.
#[derive(Debug)]
pub(crate) struct Ends {
    pub(crate) socket: OwnedFd,
    pub(crate) handle: OwnedFd,
    /// Its output and its errors.
    pub(crate) pipes: [OwnedFd; 2],
}

/// What the supervisor's thread waits for, for one worker: descriptors with the events awaited or, after a poll, the events that occurred.
#[derive(Default)]
pub(crate) struct Watch {
    pub(crate) processes: Vec<Watched>,
    /// Only the handles of processes that were set aside.
    pub(crate) stuck: Vec<Watched>,
    pub(crate) due: Option<Instant>,
    /// Nothing will ever happen again.
    pub(crate) ended: bool,
}

/// The index of a process's socket among its descriptors.
pub(crate) const SOCKET: usize = 0;

/// The descriptors of a process: its socket, its handle, its output, its errors.
pub(crate) struct Watched {
    pub(crate) incarnation: u32,
    pub(crate) ends: Arc<Ends>,
    pub(crate) flags: [PollFlags; 4],
}
