//! The route and its handler.
//!
//! | what happened | status |
//! |---|---|
//! | tokens that the model does not have, too many, none | 400 |
//! | no result within the time limit; the device is lost or closed, or out of memory | 503 |
//! | candle failed | 500 |
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use gpu_await::ErrorKind;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::timeout;

use crate::lanes::Lanes;
use crate::model::{MAX_TOKENS, VOCABULARY};

/// For a whole request; the wait for a lane is a part of it.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
struct Request {
    tokens: Vec<u32>,
}

#[derive(Serialize)]
struct Answer<'a> {
    embedding: &'a [f32],
}

pub(crate) fn router(lanes: Arc<Lanes>) -> Router {
    Router::new().route("/embed", post(embed)).with_state(lanes)
}

/// Dropped at any point, when the client leaves or time is up, it leaves nothing to clean up: the work goes on, and
/// its memory and its permit are released when the device has finished.
async fn embed(
    State(lanes): State<Arc<Lanes>>,
    Json(Request { tokens }): Json<Request>,
) -> Result<Response, Failure> {
    if tokens.is_empty() || tokens.len() > MAX_TOKENS {
        let message = format!("{} tokens: 1 to {MAX_TOKENS} are possible", tokens.len());
        return Err(Failure::Invalid(message));
    }
    if let Some(token) = tokens.iter().find(|token| **token >= VOCABULARY) {
        let message = format!("token {token}: the model has {VOCABULARY}");
        return Err(Failure::Invalid(message));
    }
    let embedding = timeout(LIMIT, lanes.embed(tokens)).await.map_err(|_| Failure::TimedOut)?;
    Ok(Json(Answer { embedding: &embedding? }).into_response())
}

enum Failure {
    Invalid(String),
    TimedOut,
    Device(gpu_await::Error),
}

impl From<gpu_await::Error> for Failure {
    fn from(error: gpu_await::Error) -> Failure {
        Failure::Device(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let (status, message) = match self {
            Failure::Invalid(message) => (StatusCode::BAD_REQUEST, message),
            Failure::TimedOut => {
                (StatusCode::SERVICE_UNAVAILABLE, format!("no result within {LIMIT:?}"))
            }
            Failure::Device(error) => {
                eprintln!("a request failed: {error}");
                let status = match error.kind() {
                    ErrorKind::DeviceLost | ErrorKind::Closed | ErrorKind::OutOfMemory => {
                        StatusCode::SERVICE_UNAVAILABLE
                    }
                    _ => StatusCode::INTERNAL_SERVER_ERROR,
                };
                (status, "the server's log says more".to_owned())
            }
        };
        (status, Json(json!({ "error": message }))).into_response()
    }
}
