//! Requests gathered into batches, over HTTP.
//!
//! `POST /embed` with `{"ids": [[101, 2054, 102], ..]}` answers `{"embeddings": [[..], ..]}`, a row for each text; with
//! `accept: application/octet-stream` the rows are raw `f32`, little-endian. `x-timeout-ms` bounds the time to the answer, which the server bounds as well.
//! With a tokenizer, `{"texts": ["..", ..]}` does as well: its rows come behind those of the ids.
//! Requests with `x-priority: interactive` go in front of others, or into a partition of their own.
//!
//! | what happened | status |
//! |---|---|
//! | no texts, an empty one, one that is too long, an id that the model does not have, a timeout that is no number | 400 |
//! | too many requests wait, or no result within the time limit | 503, with `retry-after` |
//! | the device failed; an embedding is not finite, by the weights or the range of f16 | 500 |
//!
//! Each text is a request of the batcher, and weighs its tokens. A batch starts when a lane is free, with whatever waits by then.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::future::try_join_all;
use gpu_await::{Batcher, Error, ErrorKind, Partition, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::timeout;

use crate::kernels::Launches;
use crate::metrics::{METRICS, Watched, with_metrics};
use crate::model::{Lane, Model, Shape};
use crate::program::up_to;

/// Texts of a request.
const MOST_TEXTS: usize = 64;
const MAX_WAITING: usize = 4096;
/// What an embedding is that is none.
pub const NOT_FINITE: &str = "not finite: weights or f16 range";
/// Answers that are the numbers' bytes.
const RAW: &str = "application/octet-stream";

/// How requests are served.
#[derive(Clone, Debug, clap::Args)]
pub struct Serving {
    /// How long a client may take for a head, and for a body
    #[arg(long, value_name = "MS", default_value = "10000")]
    pub client_timeout: u64,
    /// How long callers wait for an answer
    #[arg(long, value_name = "MS", default_value = "1000")]
    pub patience: u64,
    /// Batches at once: one is computed while the next is packed
    #[arg(long, value_name = "N", default_value = "2", value_parser = up_to(64))]
    pub lanes: usize,
    /// Texts of a batch
    #[arg(long, value_name = "N", default_value = "64", value_parser = up_to(4096))]
    pub max_texts: usize,
    /// Launch kernel after kernel, instead of a graph
    #[arg(long)]
    pub without_graphs: bool,
    /// Wait for the device on threads, with `spawn_blocking`
    #[arg(long)]
    pub blocking: bool,
    /// A partition of so many multiprocessors for requests with `x-priority: interactive`; the others get the rest
    #[arg(long, value_name = "N")]
    pub interactive: Option<u32>,
}

/// A model behind batchers.
#[derive(Clone)]
pub struct Service {
    batcher: Texts,
    interactive: Texts,
    /// Those have a partition, and a batcher of their own.
    is_divided: bool,
    tokenizer: Option<TextToIds>,
    patience: Duration,
    max_len: usize,
    vocabulary: u32,
}

type Texts = Batcher<Vec<u32>, Vec<f32>>;

/// Converts a text to token ids. The error is the message that the client gets.
pub type TextToIds = Arc<dyn Fn(&str) -> Result<Vec<u32>, String> + Send + Sync>;

impl Service {
    /// Makes lanes, with a graph for every shape of batch, and spawns workers on tokio. Batches have at most `max_tokens` tokens.
    ///
    /// # Errors
    /// Out of device memory; fewer multiprocessors than the partition needs; the device is lost or closed.
    pub async fn new<T: Launches>(
        model: &Model<T>,
        max_tokens: usize,
        serving: Serving,
    ) -> Result<Service> {
        let (mut own, mut rest, device) = (None, None, model.device());
        if let Some(multiprocessors) = serving.interactive {
            own = Some(device.reserve_partition(multiprocessors).await?);
            // A partition protects only if all work is in one.
            let unreserved = device.stats().unreserved_multiprocessors;
            rest = Some(device.reserve_partition(unreserved).await?);
        }
        let batcher = batcher(model, max_tokens, &serving, rest.as_ref()).await?;
        Ok(Service {
            is_divided: own.is_some(),
            interactive: match own {
                Some(own) => self::batcher(model, max_tokens, &serving, Some(&own)).await?,
                None => batcher.with_high_priority(),
            },
            batcher,
            tokenizer: None,
            patience: Duration::from_millis(serving.patience),
            max_len: model.config().max_position_embeddings.min(max_tokens),
            vocabulary: model.config().vocab_size as u32,
        })
    }

    /// Takes texts as well as ids.
    #[must_use]
    pub fn with_tokenizer(self, tokenizer: TextToIds) -> Service {
        Service { tokenizer: Some(tokenizer), ..self }
    }

    fn ids(&self, texts: &[String]) -> Result<Vec<Vec<u32>>, String> {
        if texts.is_empty() {
            return Ok(Vec::new());
        }
        let tokenizer = self.tokenizer.as_ref().ok_or("no tokenizer: this server takes ids")?;
        texts.iter().map(|text| tokenizer(text)).collect()
    }

    /// Validates a request and returns its time limit. The error is the message that the client gets.
    fn check(&self, ids: &[Vec<u32>], headers: &HeaderMap) -> Result<Duration, String> {
        if ids.is_empty() || ids.len() > MOST_TEXTS {
            return Err(format!("{} texts: 1 to {MOST_TEXTS} are possible", ids.len()));
        }
        let most = self.max_len;
        if let Some(text) = ids.iter().find(|text| text.is_empty() || text.len() > most) {
            return Err(format!("a text of {} tokens: 1 to {most} are possible", text.len()));
        }
        if let Some(id) = ids.iter().flatten().find(|id| **id >= self.vocabulary) {
            return Err(format!("id {id}: the vocabulary has {}", self.vocabulary));
        }
        let Some(timeout) = headers.get("x-timeout-ms") else { return Ok(self.patience) };
        let ms = timeout.to_str().ok().and_then(|ms| ms.parse().ok());
        let ms = ms.ok_or("x-timeout-ms: a whole number of milliseconds is needed")?;
        Ok(self.patience.min(Duration::from_millis(ms)))
    }
}

/// Whether it has a length: the device gives zeros where that is 0 or not finite.
#[must_use]
pub fn is_embedding(row: &[f32]) -> bool {
    let square = row.iter().map(|x| x * x).sum::<f32>();
    square > 0.0 && square.is_finite()
}

async fn batcher<T: Launches>(
    model: &Model<T>,
    max_tokens: usize,
    serving: &Serving,
    partition: Option<&Partition>,
) -> Result<Texts> {
    let Serving { lanes: count, max_texts, without_graphs, blocking, .. } = *serving;
    let new_lane = move |model: Model<T>, partition: Option<Partition>| async move {
        let stream = partition.map_or_else(|| model.device().stream(), |part| part.stream())?;
        let lane = model.lane(stream, max_tokens, max_texts).await?;
        Ok::<_, Error>(if without_graphs { lane.without_graphs() } else { lane })
    };
    let mut lanes = Vec::new();
    for _ in 0..count {
        let mut lane = new_lane(model.clone(), partition.cloned()).await?;
        for shape in Shape::all(max_tokens, max_texts) {
            lane.warm(shape).await?;
        }
        lanes.push(lane);
    }
    let lanes = Arc::new(Mutex::new(lanes));
    let (model, partition) = (model.clone(), partition.cloned());
    let builder = Batcher::builder().max_len(max_texts).max_weight(max_tokens as u64);
    let builder = builder.max_in_flight(count).max_waiting(MAX_WAITING);
    // A task for each batch, which is never dropped half-way: its lane comes back.
    let builder = builder.spawn(|batch| drop(tokio::spawn(batch)));
    let (batcher, worker) = builder.build(move |texts: Vec<Vec<u32>>| {
        let (lanes, model, partition) = (lanes.clone(), model.clone(), partition.clone());
        async move {
            let lane = lanes.lock().unwrap_or_else(PoisonError::into_inner).pop();
            // As many batches as lanes are in flight; one that panicked took its lane with it.
            let mut lane: Lane<T> = match lane {
                Some(lane) => lane,
                None => new_lane(model, partition).await?,
            };
            let batch = async move {
                let texts: Vec<&[u32]> = texts.iter().map(|text| &text[..]).collect();
                let hidden = lane.hidden_size();
                let rows = lane.embed(&texts).await;
                let rows =
                    rows.map(|rows| rows.chunks(hidden).map(|row| Ok(row.to_vec())).collect());
                lanes.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
                rows
            };
            if !blocking {
                return batch.await;
            }
            let runtime = tokio::runtime::Handle::current();
            let thread = tokio::task::spawn_blocking(move || runtime.block_on(batch));
            thread.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
        }
    });
    tokio::spawn(worker);
    Ok(batcher)
}

/// The routes.
pub fn router(service: Service) -> Router {
    let health = || async { Json(json!({ "status": "ok" })) };
    let texts = [service.batcher.clone(), service.interactive.clone()];
    let looked_up = if service.is_divided { &texts[..] } else { &texts[..1] }.to_vec();
    let look = move || {
        let waiting: usize = looked_up.iter().map(|texts| texts.stats().waiting).sum();
        METRICS.waiting.set(waiting as i64);
    };
    let routes = Router::new().route("/embed", post(embed)).route("/healthz", get(health));
    with_metrics(routes.with_state(service), look)
}

#[derive(Deserialize)]
struct Request {
    #[serde(default)]
    ids: Vec<Vec<u32>>,
    #[serde(default)]
    texts: Vec<String>,
}

#[derive(Serialize)]
struct Answer {
    embeddings: Vec<Vec<f32>>,
}

/// Dropped, when the client leaves, it takes back what is in no batch.
async fn embed(
    State(service): State<Service>,
    headers: HeaderMap,
    asked: Result<Json<Request>, JsonRejection>,
) -> Result<Response, Failure> {
    let mut watched = Watched::now();
    let answer = answer(&service, &headers, asked).await;
    let status = answer.as_ref().map_or_else(|failure| failure.0, Response::status);
    watched.ends(status.as_str());
    answer
}

async fn answer(
    service: &Service,
    headers: &HeaderMap,
    asked: Result<Json<Request>, JsonRejection>,
) -> Result<Response, Failure> {
    let Json(Request { mut ids, texts }) = asked?;
    let checked = service.ids(&texts).and_then(|more| {
        ids.extend(more);
        service.check(&ids, headers)
    });
    let patience = checked.map_err(|reason| Failure(StatusCode::BAD_REQUEST, reason))?;
    let is_interactive = headers.get("x-priority").is_some_and(|is| is == "interactive");
    let batcher = if is_interactive { &service.interactive } else { &service.batcher };
    let batcher = batcher.with_patience(patience);
    // All of them wait at once; the first error takes the others back.
    let tokens: usize = ids.iter().map(Vec::len).sum();
    let calls = ids.into_iter().map(|ids| batcher.with_weight(ids.len() as u64).call(ids));
    // The batcher's patience ends with the wait, this one with the answer.
    let embeddings = timeout(patience, try_join_all(calls)).await.map_err(|_| {
        Failure(StatusCode::SERVICE_UNAVAILABLE, format!("no result within {patience:?}"))
    })??;
    if !embeddings.iter().all(|row| is_embedding(row)) {
        return Err(Failure(StatusCode::INTERNAL_SERVER_ERROR, NOT_FINITE.into()));
    }
    METRICS.tokens.inc_by(tokens as u64);
    Ok(if headers.get(header::ACCEPT).is_some_and(|accept| accept == RAW) {
        let bytes = bytemuck::cast_slice(&embeddings.concat()).to_vec();
        ([(header::CONTENT_TYPE, RAW)], bytes).into_response()
    } else {
        Json(Answer { embeddings }).into_response()
    })
}

/// What a client gets in place of an answer: `{"error": ".."}`, with `retry-after` if the status is 503.
pub struct Failure(pub StatusCode, pub String);

impl From<JsonRejection> for Failure {
    fn from(refused: JsonRejection) -> Failure {
        Failure(refused.status(), refused.body_text())
    }
}

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
        let answer = (self.0, Json(json!({ "error": self.1 })));
        match self.0 {
            StatusCode::SERVICE_UNAVAILABLE => {
                ([(header::RETRY_AFTER, "1")], answer).into_response()
            }
            _ => answer.into_response(),
        }
    }
}
