//! The end of a device, by loss or close: what a driver error means for it, what it refuses, and which waiters it wakes.
//!
//! | waiter | woken by |
//! |---|---|
//! | a `Loss` future, which stays pending and registered after a close | both |
//! | a stream pool with pending acquires | both |
//! | a future that waits for memory | both |
//! | a future that waits for an operation | the loss |
//!
//! # Invariants
//! 1. A key stays its owner's until it is forgotten or the device is lost: the close takes wakers and leaves the keys
//!    (`a_close_ends_waits_for_held_permits`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

use gpu_await_protocol::sync::Mutex;
use slab::Slab;

use super::{DeviceStream, Engine};
use crate::error::{DriverCode, Error, ErrorDetail, Result};
use crate::runtime::attention::Attention;
use crate::runtime::progress::DeviceState;
use crate::thread::exit::{self, ExitGuard};
use crate::thread::{contain, role};

/// Whether the device is closed or about to go, and the tasks that wait to hear of its loss.
pub(crate) struct DeviceEnd {
    state: Arc<DeviceState>,
    attention: Arc<Attention>,
    closed: AtomicBool,
    /// Wakers of futures and pools that wait for the loss of the device; `None` from the close, which takes
    /// the waker, until the next poll.
    mourners: Mutex<Slab<Option<Waker>>>,
    /// `Some` once the last handle is gone; dropped last.
    leaving: Mutex<Option<ExitGuard>>,
}

impl DeviceEnd {
    pub(super) fn new(state: &Arc<DeviceState>, attention: &Arc<Attention>) -> Self {
        DeviceEnd {
            state: state.clone(),
            attention: attention.clone(),
            closed: AtomicBool::new(false),
            mourners: Mutex::default(),
            leaving: Mutex::default(),
        }
    }

    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        // ORDERING: Relaxed: a submission that races with `close` may be on either side of it; one that takes its
        // stream's lock after the closing thread sees it.
        self.closed.load(Ordering::Relaxed)
    }

    /// Resolves with the loss of the device. `key` is the future's, for [`forget_lost`](Self::forget_lost).
    /// The close wakes the waker as well, which is not the loss: see [`check_open`](Engine::check_open).
    pub(crate) fn poll_lost(&self, key: &mut Option<usize>, waker: &Waker) -> Option<Error> {
        if self.state.lost().is_none() {
            // Cloning and dropping a waker is foreign code: both outside the lock.
            let fresh = waker.clone();
            let (stale, is_first) = {
                let mut mourners = self.mourners.lock();
                match key.and_then(|key| mourners.get_mut(key)) {
                    Some(known) => (known.replace(fresh), false),
                    None => {
                        *key = Some(mourners.insert(Some(fresh)));
                        (None, mourners.len() == 1)
                    }
                }
            };
            contain::let_go(stale);
            if is_first {
                // From now on the poller checks an idle device as well.
                self.attention.call();
            }
        }
        // Read again: `lose` sets the loss before it takes the mourners.
        self.state.lost().cloned()
    }

    /// Drops a future's interest in the loss.
    pub(crate) fn forget_lost(&self, key: Option<usize>) {
        let waker = key.and_then(|key| self.mourners.lock().try_remove(key)).flatten();
        contain::let_go(waker);
    }

    /// Whether a future waits for the loss of the device.
    pub(crate) fn is_watched(&self) -> bool {
        !self.mourners.lock().is_empty()
    }
}

impl<S: DeviceStream> Engine<S> {
    /// Refuses work on a device that is gone.
    #[inline]
    pub(crate) fn check_open(&self) -> Result<()> {
        if let Some(lost) = self.state.lost() {
            return Err(lost.clone());
        }
        if self.ending.is_closed() { Err(self.closed()) } else { Ok(()) }
    }

    /// The error of a call on a closed device.
    pub(crate) fn closed(&self) -> Error {
        ErrorDetail::Closed { device: self.label().to_owned() }.into()
    }

    /// Whether anything may be given back to the driver: not on a lost device, nor at the end of the process. A device
    /// counts as lost then as well, but its work goes on.
    pub(crate) fn is_usable(&self) -> bool {
        self.state.lost().is_none() && !exit::begun()
    }

    /// For driver calls on a thread of this crate, where they [may be made](Self::is_usable): the end of the process waits for
    /// the guard.
    pub(crate) fn in_driver(&self) -> Option<ExitGuard> {
        ExitGuard::in_driver().filter(|_| self.state.lost().is_none())
    }

    /// Turns a refused call into an error, and determines whether the device is lost. Wakes nobody and logs
    /// nothing: the caller may hold a submission lock.
    pub(crate) fn refused(&self, code: DriverCode) -> Error {
        if code.is_sticky() && !code.may_be_of_a_stream() {
            return self.lose(code);
        }
        if code.is_about_the_caller() {
            return code.into();
        }
        self.check_health().err().unwrap_or_else(|| code.into())
    }

    /// Checks the code of a refused call that the caller can do without: nothing else would notice the loss that it may report.
    pub(crate) fn does_without(&self, code: DriverCode) {
        if code.is_sticky() {
            drop(self.refused(code));
        }
    }

    /// Checks the device's health, where driver calls are possible.
    pub(crate) fn check_health(&self) -> Result<()> {
        if let Some(lost) = self.state.lost() {
            return Err(lost.clone());
        }
        if !role::may_call_driver() {
            return Ok(());
        }
        // SAFETY: the private stream lives as long as the engine.
        let private = || unsafe { self.backend.stream_query(self.shares.private) }.map(drop);
        self.answer(private).map_or(Ok(()), |code| Err(self.lose(code)))
    }

    /// Makes a call that fails only on a lost device. Declares the loss if the call returns a sticky code, or
    /// twice another code that does not blame the caller: a single failure is not a loss, and an unknown code
    /// that persists leaves no future pending.
    pub(crate) fn judged(
        &self,
        question: impl FnMut() -> std::result::Result<(), DriverCode>,
    ) -> Result<()> {
        match self.answer(question) {
            None => Ok(()),
            Some(code) if code.may_be_of_a_stream() => self.check_health(),
            Some(code) => Err(self.lose(code)),
        }
    }

    /// The code that says that the device is lost, or a stream.
    fn answer(
        &self,
        mut question: impl FnMut() -> std::result::Result<(), DriverCode>,
    ) -> Option<DriverCode> {
        let first = question().err()?;
        let code = if first.is_sticky() || first.is_about_the_caller() {
            first
        } else {
            question().err()?
        };
        Some(code).filter(|code| !code.is_about_the_caller())
    }

    /// Declares the device lost. The next sweep resolves its waiters. After `main` the driver may be torn
    /// down before its callers: the device is not at fault then.
    pub(crate) fn lose(&self, code: DriverCode) -> Error {
        let lost = self.state.lose(|| {
            if exit::begun() {
                return ErrorDetail::ProcessEnding { what: code.call }.into();
            }
            let (device, cause) = (self.label().to_owned(), self.backend.loss_cause(code));
            ErrorDetail::DeviceLost { device, cause }.into()
        });
        self.backend.abandon();
        self.pacing.attention.call();
        lost.clone()
    }

    /// Called when the device's last handle is gone: the poller no longer keeps idle streams, and with them this engine, for a while.
    pub(crate) fn leave_soon(&self) {
        if !self.options.stepped {
            *self.ending.leaving.lock() = Some(ExitGuard::leaving());
        }
        self.pacing.attention.hurry();
    }

    /// Refuses work from now on, drops the streams' caches, and wakes the waiters for the loss, which keep
    /// their keys, and those for memory. The caller holds no lock.
    pub(crate) fn close(self: &Arc<Self>) {
        // ORDERING: Relaxed, as below. A waiter that registers too late to be woken takes the lock after
        // this, and sees the store.
        self.ending.closed.store(true, Ordering::Relaxed);
        let wakers: Vec<Waker> =
            self.ending.mourners.lock().iter_mut().filter_map(|(_, waker)| waker.take()).collect();
        wakers.into_iter().for_each(contain::wake);
        self.empty_caches();
        // As if memory had moved: the waiters look, and see the close.
        self.memory.account.lock().release(0);
        self.memory.wake_reclaimers();
        self.memory.wake_reservers();
    }

    /// Wakes every waiter of a lost device and quarantines lent memory; later calls do nothing. The caller
    /// holds no lock.
    pub(crate) fn mourn(&self) {
        if !self.state.tells_of_loss() {
            return;
        }
        let Some(lost) = self.state.lost() else { return };
        // A subscriber that panics must not keep the loss from the waiters.
        if lost.is_device_lost() {
            contain::log(|| {
                tracing::error!(device = %self.label(), error = %lost, "device lost");
            });
        }
        self.memory.reclaimers.take_older(u64::MAX).into_iter().for_each(contain::wake);
        self.memory.wake_reservers();
        for stream in self.registry.streams() {
            stream.mourn();
        }
        // After the waiters that know what they submitted: a handler that ends the process because of the loss may wait for them.
        let mourners = std::mem::take(&mut *self.ending.mourners.lock());
        mourners.into_iter().filter_map(|(_, waker)| waker).for_each(contain::wake);
    }
}
