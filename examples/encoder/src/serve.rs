//! Requests gathered into batches, over HTTP.
//!
//! `POST /embed` with `{"ids": [[101, 2054, 102], ..]}` answers `{"embeddings": [[..], ..]}`, a row for each text.
//!
//! | what happened | status |
//! |---|---|
//! | no texts, an empty one, one that is too long, an id that the model does not have | 400 |
//! | too many requests wait, or no result within the time limit | 503 |
//! | the device failed | 500 |
//!
//! Each text is a request of the batcher, and weighs its tokens. A batch starts when a lane is free, with whatever waits by then.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use gpu_await::{BatchWorker, Batcher, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::kernels::Precision;
use crate::model::{Lane, Model, Shape};

/// Texts of a batch.
pub const MAX_TEXTS: usize = 64;
/// Batches under way at once: one is computed while the next is packed.
const LANES: usize = 2;
const MAX_WAITING: usize = 4096;

/// A model behind a batcher.
#[derive(Clone)]
pub struct Service {
    batcher: Batcher<Vec<u32>, Vec<f32>>,
    max_len: usize,
    vocabulary: u32,
}

impl Service {
    /// Makes lanes, with a graph for every shape of batch, and the worker, which is to be spawned on tokio. Batches have at most
    /// `max_tokens` tokens, and callers wait up to `patience`.
    ///
    /// # Errors
    /// Out of device memory; the device is lost or closed.
    pub async fn new<T: Precision>(
        model: &Model<T>,
        max_tokens: usize,
        patience: Duration,
    ) -> Result<(Service, BatchWorker)> {
        let mut lanes = Vec::new();
        for _ in 0..LANES {
            let mut lane = model.lane(max_tokens, MAX_TEXTS).await?;
            for shape in Shape::all(max_tokens, MAX_TEXTS) {
                lane.warm(shape).await?;
            }
            lanes.push(lane);
        }
        let lanes = Arc::new(Mutex::new(lanes));
        let model = model.clone();
        let max_len = model.config().max_position_embeddings.min(max_tokens);
        let vocabulary = model.config().vocab_size as u32;
        let hidden = model.config().hidden_size;
        let builder = Batcher::builder().max_len(MAX_TEXTS).max_weight(max_tokens as u64);
        let builder = builder.max_in_flight(LANES).max_waiting(MAX_WAITING).patience(patience);
        // A task for each batch, which is never dropped half-way: its lane comes back.
        let builder = builder.spawn(|batch| drop(tokio::spawn(batch)));
        let (batcher, worker) = builder.build(move |texts: Vec<Vec<u32>>| {
            let (lanes, model) = (lanes.clone(), model.clone());
            async move {
                let lane = lanes.lock().unwrap_or_else(PoisonError::into_inner).pop();
                // As many batches as lanes are in flight; one that panicked took its lane with it.
                let mut lane: Lane<T> = match lane {
                    Some(lane) => lane,
                    None => model.lane(max_tokens, MAX_TEXTS).await?,
                };
                let texts: Vec<&[u32]> = texts.iter().map(|text| &text[..]).collect();
                let rows = lane
                    .embed(&texts)
                    .await
                    .map(|rows| rows.chunks(hidden).map(|row| Ok(row.to_vec())).collect());
                lanes.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
                rows
            }
        });
        Ok((Service { batcher, max_len, vocabulary }, worker))
    }

    fn check(&self, ids: &[u32]) -> std::result::Result<(), String> {
        if ids.is_empty() || ids.len() > self.max_len {
            return Err(format!(
                "a text of {} tokens: 1 to {} are possible",
                ids.len(),
                self.max_len
            ));
        }
        match ids.iter().find(|id| **id >= self.vocabulary) {
            Some(id) => Err(format!("id {id}: the vocabulary has {}", self.vocabulary)),
            None => Ok(()),
        }
    }
}

/// The routes.
pub fn router(service: Service) -> Router {
    Router::new().route("/embed", post(embed)).with_state(service)
}

#[derive(Deserialize)]
struct Request {
    ids: Vec<Vec<u32>>,
}

#[derive(Serialize)]
struct Answer {
    embeddings: Vec<Vec<f32>>,
}

/// Dropped, when the client leaves, it takes back what is in no batch.
async fn embed(
    State(service): State<Service>,
    Json(Request { ids }): Json<Request>,
) -> Result<Json<Answer>, Failure> {
    let reason = match ids.len() {
        1..=MAX_TEXTS => ids.iter().find_map(|text| service.check(text).err()),
        texts => Some(format!("{texts} texts: 1 to {MAX_TEXTS} are possible")),
    };
    if let Some(reason) = reason {
        return Err(Failure(StatusCode::BAD_REQUEST, reason));
    }
    // All of them wait at once; the first error takes the others back.
    let calls: Vec<_> = ids
        .into_iter()
        .map(|ids| service.batcher.with_weight(ids.len() as u64).call(ids))
        .collect();
    let mut embeddings = Vec::with_capacity(calls.len());
    for call in calls {
        embeddings.push(call.await?);
    }
    Ok(Json(Answer { embeddings }))
}

struct Failure(StatusCode, String);

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let status = match error.kind() {
            ErrorKind::Overloaded
            | ErrorKind::TimedOut
            | ErrorKind::Closed
            | ErrorKind::DeviceLost => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Failure(status, error.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.0, Json(json!({ "error": self.1 }))).into_response()
    }
}
