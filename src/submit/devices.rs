//! Whose handles an operation may use: those of its own device, and what is documented to work across
//! devices.
#![forbid(unsafe_code)]

use crate::completion::device_state::DeviceState;
use crate::completion::engine::Engine;
use crate::error::{Error, ErrorDetail, Result};

/// Refuses what belongs to another device; `peers` allows those of the same kind.
pub(super) fn check_device(
    what: &'static str,
    engine: &Engine,
    other: &Engine,
    peers: bool,
) -> Result<()> {
    if other.id == engine.id || (peers && other.backend.kind() == engine.backend.kind()) {
        return Ok(());
    }
    Err(wrong_device(what, engine, other))
}

/// Refuses a wait for something of another kind of device: only handles of one driver mean anything to
/// it.
pub(crate) fn check_can_wait(engine: &Engine, other: &DeviceState) -> Result<()> {
    if other.kind == engine.state.kind {
        return Ok(());
    }
    let what = "waiting for a stream or an event of another kind of device";
    Err(ErrorDetail::Unsupported { what, device: engine.label().to_owned() }.into())
}

/// The error of something that belongs to another device.
pub(crate) fn wrong_device(what: &'static str, expected: &Engine, found: &Engine) -> Error {
    ErrorDetail::WrongDevice {
        what,
        expected: expected.label().to_owned(),
        found: found.label().to_owned(),
    }
    .into()
}
