//! Over HTTP: `POST /generate` answers with a line for each token, as it comes; if they break off, the last line is `{"error": ".."}`. A client that leaves cancels its request.
#![forbid(unsafe_code)]

use std::convert::Infallible;

use axum::body::Body;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use encoder::{Failure, METRICS, Watched, log_failure, with_metrics};
use futures_util::stream::unfold;
use serde_json::json;

use crate::schedule::Request;
use crate::service::{Decoder, Refused};

/// The routes.
pub fn router(decoder: Decoder) -> Router {
    let routes = Router::new().route("/generate", post(generate)).route("/healthz", get(health));
    let looked_up = decoder.clone();
    let look = move || {
        let [waiting, used] = looked_up.waiting_and_used_blocks();
        METRICS.waiting.set(waiting as i64);
        METRICS.blocks_used.set(used as i64);
    };
    with_metrics(routes.with_state(decoder), look)
}

async fn health(State(decoder): State<Decoder>) -> Result<Response, Failure> {
    match decoder.is_serving() {
        true => Ok(Json(json!({ "status": "ok" })).into_response()),
        false => Err(Failure(StatusCode::SERVICE_UNAVAILABLE, Refused::Ended.to_string())),
    }
}

async fn generate(
    State(decoder): State<Decoder>,
    asked: Result<Json<Request>, JsonRejection>,
) -> Result<Response, Failure> {
    let mut watched = Watched::now();
    let tokens = asked.map_err(Failure::from).and_then(|Json(request)| {
        decoder.generate(request).map_err(|refused| {
            let status = match refused {
                Refused::Ended | Refused::Waiting { .. } => StatusCode::SERVICE_UNAVAILABLE,
                _ => StatusCode::BAD_REQUEST,
            };
            Failure(status, refused.to_string())
        })
    });
    let tokens = tokens.inspect_err(|failure| watched.ends(failure.0.as_str()))?;
    let lines = unfold((tokens, watched), |(mut tokens, mut watched)| async move {
        let line = match tokens.next().await {
            Some(Ok(token)) => {
                METRICS.tokens.inc();
                format!("{token}\n")
            }
            Some(Err(broken)) => {
                watched.ends("broken");
                log_failure(&broken.to_string());
                format!("{}\n", json!({ "error": broken.to_string() }))
            }
            None => {
                watched.ends(StatusCode::OK.as_str());
                return None;
            }
        };
        Some((Ok::<_, Infallible>(line), (tokens, watched)))
    });
    let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((kind, Body::from_stream(lines)).into_response())
}
