//! What a request is told when it fails: a status, a word for programs, a sentence for people.
//!
//! | what the device said | status | why |
//! |---|---|---|
//! | `Overloaded` | 429, `Retry-After: 1` | the queue is full: the same request works later |
//! | `TimedOut`, `OutOfMemory` | 503, `Retry-After: 1` | there was too much to do: the same |
//! | `DeviceLost`, `Closed` | 503 | this process cannot answer it any more; another one may |
//! | anything else | 500 | a mistake of ours: the log has the details, the client none of them |
#![forbid(unsafe_code)]

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use gpu_await::ErrorKind;
use serde_json::json;

/// Characters of a message: what it quotes of a request may be of any length.
const MESSAGE: usize = 200;

/// A request's failure. Becomes `{"error": {"kind": .., "message": ..}}`, and stays in the response's extensions.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub status: StatusCode,
    kind: &'static str,
    pub message: String,
}

impl Failure {
    pub(crate) fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Failure {
        let mut message = message.into();
        if let Some((end, _)) = message.char_indices().nth(MESSAGE) {
            message.truncate(end);
            message.push('…');
        }
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Failure { status, kind, message }
    }

    /// A request that is wrong in itself: 400.
    pub(crate) fn invalid(message: impl Into<String>) -> Failure {
        Failure::new(400, "invalid", message)
    }

    /// There is too much to do: 429.
    pub(crate) fn overloaded() -> Failure {
        Failure::new(429, "overloaded", "too many requests are waiting: try again in a moment")
    }

    /// The request's time limit passed: 503. The device goes on; what it was doing is not stopped.
    pub(crate) fn timed_out() -> Failure {
        Failure::new(503, "timed_out", "no result within the time limit")
    }

    /// The device has no memory for it: 503.
    pub(crate) fn out_of_memory() -> Failure {
        Failure::new(503, "out_of_memory", "no memory for this request now")
    }

    /// A mistake of ours: 500, and a line in the log.
    pub(crate) fn internal(error: &dyn std::fmt::Display) -> Failure {
        tracing::error!(%error, "a request failed");
        Failure::new(500, "internal", "this is a fault of the server: its log says more")
    }
}

impl From<gpu_await::Error> for Failure {
    fn from(error: gpu_await::Error) -> Failure {
        match error.kind() {
            ErrorKind::Overloaded => Failure::overloaded(),
            ErrorKind::TimedOut => Failure::timed_out(),
            ErrorKind::OutOfMemory => {
                tracing::warn!(%error, "out of memory");
                Failure::out_of_memory()
            }
            ErrorKind::DeviceLost => Failure::new(503, "device_lost", "the device is lost"),
            ErrorKind::Closed => Failure::new(503, "shutting_down", "the server is shutting down"),
            _ => Failure::internal(&error),
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let error = json!({ "error": { "kind": self.kind, "message": self.message } });
        let mut response = (self.status, Json(error)).into_response();
        let headers = response.headers_mut();
        // There was too much to do.
        if let "overloaded" | "timed_out" | "out_of_memory" = self.kind {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        // The rest of the body may still be on its way: no request can follow it.
        if let StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT = self.status {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.extensions_mut().insert(self);
        response
    }
}
