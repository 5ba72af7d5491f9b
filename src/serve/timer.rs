//! A timer for any executor, exact to a few microseconds.
//!
//! A runtime's own timers are too coarse for a batch (tokio's have millisecond resolution), and a pool has no runtime. So a batcher with a
//! delay, and a pool whose requests have deadlines, each have a timer thread, which starts with the first time-out and ends with its owner.
#![forbid(unsafe_code)]

use std::task::Waker;
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError};

use crate::system;
use crate::thread::contain;
use crate::thread::worker::Worker;

/// Whom to wake, and when.
type Set = (Instant, Waker);

pub(crate) struct Timer {
    worker: Worker<Set>,
}

impl Timer {
    /// A timer whose thread will have that name.
    pub(crate) const fn new(name: &'static str) -> Self {
        Timer { worker: Worker::new(name) }
    }

    /// Wakes `waker` at `at`, replacing the earlier setting; false if the system refuses a thread.
    pub(crate) fn set(&self, at: Instant, waker: Waker) -> bool {
        self.worker.send((at, waker), run).is_ok()
    }
}

fn run(sets: &Receiver<Set>) {
    system::minimize_timer_slack();
    let mut set: Option<Set> = None;
    loop {
        let next = match &set {
            Some((at, _)) => sets.recv_deadline(*at),
            None => sets.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(newer) => {
                let older = set.replace(newer);
                contain::contain("the drop of a waker", || drop(older));
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Some((_, waker)) = set.take() {
                    contain::wake(waker);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
