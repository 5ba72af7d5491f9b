//! [`DriverCode`]: a number that a call of the driver returned, and what it says of the call, the caller, the context and the driver.
#![forbid(unsafe_code)]

use std::fmt;

use super::{Error, ErrorDetail, ErrorKind, codes};

/// A number that a CUDA driver call returned, with the name of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DriverCode {
    /// The driver entry point, e.g. `cuLaunchKernel`.
    pub call: &'static str,
    /// The `CUresult` it returned, as a number: it may be newer than this crate.
    pub code: i32,
}

impl DriverCode {
    /// Returns the code's name in `cuda.h`, if this crate knows it.
    #[must_use]
    pub fn name(&self) -> Option<&'static str> {
        codes::NAMES.iter().find(|(code, _)| *code == self.code).map(|(_, name)| *name)
    }

    /// What the caller can do, whichever call returned it. Codes that mean "not on this machine, or not in this
    /// process" and those that mean "out of memory" have kinds of their own; the rest are the driver's.
    pub(super) fn kind(self) -> ErrorKind {
        match self.code {
            2 => ErrorKind::OutOfMemory,
            34 | 100 | 222 | 801 | 803 | 804 => ErrorKind::Unsupported,
            _ => ErrorKind::Driver,
        }
    }

    /// `CUDA_ERROR_NOT_PERMITTED`: returned by every call inside a host function.
    pub(crate) const NOT_PERMITTED: i32 = 800;
    pub(crate) const NOT_SUPPORTED: i32 = 801;
    const INVALID_VALUE: i32 = 1;
    const NOT_FOUND: i32 = 500;
    pub(crate) const OUT_OF_MEMORY: i32 = 2;

    /// `CUDA_ERROR_INVALID_HANDLE`.
    pub(crate) const INVALID_HANDLE: i32 = 400;

    /// `CUDA_ERROR_STUB_LIBRARY`: the toolkit's library for linking.
    pub(crate) const STUB: i32 = 34;

    /// Not a driver code: returned by a host device if the system refuses a thread.
    pub(crate) const NO_THREAD: i32 = i32::MIN;

    /// `CUDA_ERROR_ILLEGAL_STATE`: returned by a host device for work that its stream would never have room for.
    pub(crate) const ILLEGAL_STATE: i32 = 401;

    /// Whether this code, from opening a device, means that the driver does not work.
    #[cfg(feature = "cuda")]
    pub(crate) fn says_that_the_driver_is_broken(self) -> bool {
        self.code == 100 || codes::what_now(self.code).is_some()
    }

    /// Whether this code means that the context can no longer be used.
    pub(crate) fn is_sticky(self) -> bool {
        matches!(
            self.code,
            4 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911
        )
    }

    /// Whether this code means that the driver does not support the request, and never will: a second attempt may request less.
    pub(crate) fn is_not_known_here(self) -> bool {
        matches!(
            self.code,
            DriverCode::INVALID_VALUE | DriverCode::NOT_FOUND | DriverCode::NOT_SUPPORTED
        )
    }

    /// Whether this code may be about the context of a single, adopted stream. It is about the device's context if work outside that
    /// stream gets it as well.
    pub(crate) fn may_be_of_a_stream(self) -> bool {
        matches!(self.code, 709 | 917)
    }

    /// Whether this code is about the calling thread, or a capture: it says nothing about the device.
    pub(crate) fn is_about_the_caller(self) -> bool {
        matches!(self.code, DriverCode::NOT_PERMITTED | 900..=909)
    }
}

impl fmt::Display for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{} returned {} ({name})", self.call, self.code),
            None => write!(f, "{} returned {}", self.call, self.code),
        }
    }
}

/// 800 is the driver's answer to any call from a host function, of whatever library: the thread is wrong, not the
/// device.
impl From<DriverCode> for Error {
    fn from(code: DriverCode) -> Self {
        match code.code {
            DriverCode::NOT_PERMITTED => {
                let thread = "a thread where the driver permits no calls, as in a host function \
                              (CUDA_ERROR_NOT_PERMITTED, 800)";
                ErrorDetail::WrongThread { what: code.call, thread }.into()
            }
            DriverCode::NO_THREAD => {
                ErrorDetail::NoThread { what: "a stream of a host device" }.into()
            }
            _ => ErrorDetail::Driver { op: None, code }.into(),
        }
    }
}
