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

/// What the supervisor's thread waits for, of one worker: descriptors with what is awaited, or, after a poll, what is there.
#[derive(Default)]
pub(crate) struct Watch {
    pub(crate) processes: Vec<Watched>,
    /// Of processes that were set aside, their handles alone.
    pub(crate) stuck: Vec<Watched>,
    pub(crate) due: Option<Instant>,
    /// Nothing will ever be there again.
    pub(crate) ended: bool,
}

/// The place of a process' socket among its descriptors.
pub(crate) const SOCKET: usize = 0;

/// The descriptors of a process: its socket, its handle, its output, its errors.
pub(crate) struct Watched {
    pub(crate) incarnation: u32,
    pub(crate) ends: Arc<Ends>,
    pub(crate) flags: [PollFlags; 4],
}
