//! Which devices' handles an operation may use: those of its own device, and those documented to work across devices.
#![forbid(unsafe_code)]

use crate::error::{Error, ErrorDetail, Result};
use crate::runtime::Engine;
use crate::runtime::progress::DeviceState;

/// Rejects handles of another device; `peers` allows those of the same kind.
pub(super) fn check_device(
    what: &'static str,
    engine: &Engine,
    other: &Engine,
    peers: bool,
) -> Result<()> {
    if other.state.id == engine.state.id || (peers && other.backend.kind() == engine.backend.kind())
    {
        return Ok(());
    }
    Err(wrong_device(what, engine, other))
}

/// Refuses memory of another device that is lost or closed: the memory is gone, and the driver's error would
/// be mistaken for the loss of this device.
pub(crate) fn check_is_there(engine: &Engine, other: &Engine) -> Result<()> {
    if other.state.id == engine.state.id {
        return Ok(());
    }
    other.check_open().map_err(|error| of_dependency(engine, error))
}

/// Converts another device's error for an operation on this device, which is not itself lost.
pub(crate) fn of_dependency(engine: &Engine, error: Error) -> Error {
    match error.detail() {
        ErrorDetail::DeviceLost { device, .. } if engine.state.lost().is_none() => {
            ErrorDetail::DependencyLost { device: device.clone(), cause: error }.into()
        }
        _ => error,
    }
}

/// Refuses a wait for something on another kind of device: a driver knows only its own handles.
pub(crate) fn check_can_wait(engine: &Engine, other: &DeviceState) -> Result<()> {
    if other.kind == engine.state.kind {
        return Ok(());
    }
    let what = "waiting for a stream or an event of another kind of device";
    Err(ErrorDetail::Unsupported { what, device: engine.label().to_owned() }.into())
}

/// The error for a handle of another device.
pub(crate) fn wrong_device(what: &'static str, expected: &Engine, found: &Engine) -> Error {
    ErrorDetail::WrongDevice {
        what,
        expected: expected.label().to_owned(),
        found: found.label().to_owned(),
    }
    .into()
}
