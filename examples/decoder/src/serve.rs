//! Over HTTP: `POST /generate` answers with a line for each token, as it comes; if they break off, the last line is `{"error": ".."}`. A client that leaves cancels its request.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use encoder::{Failure, METRICS, Watched, with_metrics};
use futures_core::Stream;
use serde::Deserialize;
use serde_json::json;

use crate::schedule::Request;
use crate::service::{Decoder, Refused, Tokens};
use crate::steps::Sampling;

#[derive(Deserialize)]
struct Asked {
    ids: Vec<u32>,
    new: usize,
    stop: Option<u32>,
    #[serde(default)]
    temperature: f32,
    #[serde(default)]
    top_k: u32,
    #[serde(default)]
    seed: u64,
}

struct Lines(Tokens, Watched);

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
    asked: Result<Json<Asked>, JsonRejection>,
) -> Result<Response, Failure> {
    let mut watched = Watched::now();
    let tokens = asked.map_err(Failure::from).and_then(|Json(asked)| {
        let Asked { ids, new, stop, temperature, top_k, seed } = asked;
        let sampling = Sampling { temperature, top_k, seed };
        decoder.generate(Request { ids, new, stop, sampling }).map_err(|refused| {
            let status = match refused {
                Refused::Ended | Refused::Waiting { .. } => StatusCode::SERVICE_UNAVAILABLE,
                _ => StatusCode::BAD_REQUEST,
            };
            Failure(status, refused.to_string())
        })
    });
    let tokens = tokens.inspect_err(|failure| watched.ends(failure.0.as_str()))?;
    let lines = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((lines, Body::from_stream(Lines(tokens, watched))).into_response())
}

impl Stream for Lines {
    type Item = Result<String, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let token = ready!(Pin::new(&mut self.0).poll_next(cx));
        let line = match token {
            Some(Ok(token)) => {
                METRICS.tokens.inc();
                format!("{token}\n")
            }
            Some(Err(broken)) => {
                self.1.ends("broken");
                format!("{}\n", json!({ "error": broken.to_string() }))
            }
            None => {
                self.1.ends(StatusCode::OK.as_str());
                return Poll::Ready(None);
            }
        };
        Poll::Ready(Some(Ok(line)))
    }
}
