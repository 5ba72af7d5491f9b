//! The `tracing` events of reservations, with target `gpu_await::reservation`.
#![forbid(unsafe_code)]

use std::panic::Location;

use crate::error::Error;
use crate::runtime::Engine;
use crate::thread::contain;

/// A request that waited was granted.
pub(super) fn granted_late(engine: &Engine, bytes: u64, since: u64, at: &'static Location<'_>) {
    contain::log(|| {
        let waited_us = field(engine.pacing.now().saturating_sub(since) / 1_000);
        let (device, bytes, waiting) = (engine.label(), field(bytes), waiting(engine));
        tracing::debug!(
            target: "gpu_await::reservation",
            device, bytes, waited_us, waiting, %at, "granted late"
        );
    });
}

/// A request was refused, or was not granted in time.
pub(super) fn refused(engine: &Engine, bytes: u64, is_late: bool, error: &Error) {
    contain::log(|| {
        let (device, bytes, waiting) = (engine.label(), field(bytes), waiting(engine));
        let reason = if is_late { "late" } else { "refused" };
        tracing::debug!(
            target: "gpu_await::reservation",
            device, bytes, waiting, reason, %error, "refused"
        );
    });
}

fn waiting(engine: &Engine) -> i64 {
    field(engine.memory.account.lock().reservations.waiting() as u64)
}

/// OpenTelemetry has no unsigned numbers.
fn field(figure: u64) -> i64 {
    i64::try_from(figure).unwrap_or(i64::MAX)
}
