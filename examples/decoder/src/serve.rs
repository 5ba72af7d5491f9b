//! Over HTTP: `POST /generate` answers with a line for each token, as it comes. A client that leaves cancels its request.
#![forbid(unsafe_code)]

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use futures_core::Stream;
use gpu_await::Result;
use serde::Deserialize;

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

struct Lines(Tokens);

/// The routes.
pub fn router(decoder: Decoder) -> Router {
    Router::new().route("/generate", post(generate)).with_state(decoder)
}

async fn generate(State(decoder): State<Decoder>, Json(asked): Json<Asked>) -> Response {
    let Asked { ids, new, stop, temperature, top_k, seed } = asked;
    let sampling = Sampling { temperature, top_k, seed };
    match decoder.generate(Request { ids, new, stop, sampling }) {
        Ok(tokens) => Body::from_stream(Lines(tokens)).into_response(),
        Err(refused) => {
            let status = match refused {
                Refused::Ended => StatusCode::SERVICE_UNAVAILABLE,
                _ => StatusCode::BAD_REQUEST,
            };
            (status, format!("{refused}\n")).into_response()
        }
    }
}

impl Stream for Lines {
    type Item = Result<String>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let token = ready!(Pin::new(&mut self.0).poll_next(cx));
        Poll::Ready(token.map(|token| token.map(|token| format!("{token}\n"))))
    }
}
