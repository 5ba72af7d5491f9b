//! The `tracing` event of a refused request.
//!
//! The target and the fields are documented at [`StreamPool`](super::pool::StreamPool), for pools and batchers.
//!
//! # Invariants
//! 1. Every counted refusal emits one event, even if the caller no longer waits for the answer (`every_refusal_is_an_event`).
//! 2. It is emitted outside every lock, and a subscriber that panics ends nothing.
#![forbid(unsafe_code)]

use crate::error::admitter::Admitter;
use crate::error::{Error, ErrorDetail as D};
use crate::thread::contain;

/// The figures of a refusal.
#[derive(Default)]
struct RefusalFigures {
    waiting: Option<u64>,
    waited_us: Option<u64>,
    remaining_us: Option<u64>,
    expected_us: Option<u64>,
    takes_us: Option<u64>,
}

/// A figure as a field. OpenTelemetry has no unsigned numbers: `tracing-opentelemetry` turns them into strings, which no
/// backend can sum or compare.
pub(super) fn field(figure: u64) -> i64 {
    i64::try_from(figure).unwrap_or(i64::MAX)
}

/// Emits the event for `requests` requests refused with `error`.
pub(super) fn tell(by: &Admitter, requests: usize, error: &Error) {
    contain::log(|| {
        if tracing::enabled!(target: "gpu_await::refusal", tracing::Level::DEBUG) {
            send(by, requests, error);
        }
    });
}

fn send(by: &Admitter, requests: usize, error: &Error) {
    let none = RefusalFigures::default();
    let (reason, figures) = match *error.detail() {
        D::Overloaded { waiting, .. } => {
            ("full", RefusalFigures { waiting: Some(waiting), ..none })
        }
        D::TooLate { remaining_us, expected_us, takes_us, waiting, .. } => (
            "late",
            RefusalFigures {
                waiting: Some(waiting),
                remaining_us: Some(remaining_us),
                expected_us: Some(expected_us),
                takes_us: Some(takes_us),
                ..none
            },
        ),
        D::Expired { waited_us, remaining_us, takes_us, waiting, .. } => (
            "expired",
            RefusalFigures {
                waiting: Some(waiting),
                waited_us: Some(waited_us),
                remaining_us: Some(remaining_us),
                takes_us: Some(takes_us),
                ..none
            },
        ),
        _ => ("closed", none),
    };
    let RefusalFigures { waiting, waited_us, remaining_us, expected_us, takes_us } = figures;
    let requests = field(requests as u64);
    let [waiting, waited_us, remaining_us, expected_us, takes_us] =
        [waiting, waited_us, remaining_us, expected_us, takes_us].map(|figure| figure.map(field));
    let Admitter { kind, name, share } = by;
    tracing::debug!(
        target: "gpu_await::refusal",
        by = %kind, name = name.as_deref(), share = share.as_deref(), reason, requests,
        waiting, waited_us, remaining_us, expected_us, takes_us, %error,
        "refused"
    );
}
