//! What a driver error means for the device: a refused call, or the loss of the device.

use super::{DeviceStream, Engine};
use crate::error::{DriverCode, Error, ErrorDetail, Result};
use crate::thread::exit::{self, ExitGuard};
use crate::thread::role;

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

    pub(crate) fn lost(&self) -> Option<&Error> {
        self.state.lost()
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

    /// Notes the code of a refused call that something is done without. Without the call, nobody else would notice the loss that it tells of.
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
}
