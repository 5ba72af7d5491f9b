//! Requests gathered into batches, over HTTP.
//!
//! `POST /embed` with `{"ids": [[101, 2054, 102], ..]}` answers `{"embeddings": [[..], ..]}`, a row for each text; with
//! `accept: application/octet-stream` the rows are raw `f32`, little-endian. `x-timeout-ms` bounds the time to the answer, which the server bounds as well.
//! With a tokenizer, `{"texts": ["..", ..]}` does as well: its rows come behind those of the ids.
//! Requests with `x-priority: interactive` go in front of others, or into a partition of their own.
//!
//! `README.md` has the statuses. Each text is a request of the batcher, and weighs its tokens. A batch starts when a lane is free, with whatever waits by then.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::future::try_join_all;
use gpu_await::{Batcher, Device, Error, ErrorDetail, ErrorKind, Partition, Result};
use gpu_await_worker::{PausedLimit, Worker, gpu_named};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::isolated::{self, Process};
use crate::kernels::Launches;
use crate::metrics::{METRICS, Watched, log_failure, with_metrics};
use crate::model::{Lane, Model, Shape};
use crate::program::{Failed, Place, off_executor, up_to};
use crate::weights::{Config, Folder};

/// Texts of a request, at most.
pub const MOST_TEXTS: usize = 64;
const MAX_WAITING: usize = 4096;
/// What an embedding is that is none.
pub const NOT_FINITE: &str = "not finite: weights or f16 range";
/// How long the end of the program waits for that of its process, which is killed.
const GONE: Duration = Duration::from_secs(2);
/// Answers that are the numbers' bytes.
const RAW: &str = "application/octet-stream";

/// How requests are served.
#[derive(Clone, Debug, clap::Args, Serialize, Deserialize)]
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
    /// Compute in another process: a GPU fault, an abort or an endless kernel ends that one alone
    #[arg(long)]
    pub isolate: bool,
    /// With --isolate, a second process, which takes over at once
    #[arg(long, requires = "isolate")]
    pub standby: bool,
    /// With --isolate, how long the device may compute a text: a longer one ends the process
    #[arg(long, requires = "isolate", value_name = "MS", default_value = "10000", value_parser = up_to(86_400_000))]
    pub gpu_limit_ms: usize,
}

/// A model that is served.
#[derive(Clone)]
pub struct Service {
    compute: Compute,
    pub(crate) tokenizer: Option<TextToIds>,
    patience: Duration,
    pub(crate) max_len: usize,
    vocabulary: u32,
}

/// What computes: this process, or a worker's, for each text no longer than that.
#[derive(Clone)]
enum Compute {
    Here(Arc<Batchers>),
    Isolated(Worker<Process>, Duration),
}

/// A text to embed.
#[derive(Serialize, Deserialize)]
pub struct Text {
    ids: Vec<u32>,
    is_interactive: bool,
    patience: Duration,
}

/// A model behind batchers.
pub(crate) struct Batchers {
    device: Device,
    texts: Texts,
    /// In a partition of its own, if there is one.
    interactive: Option<Texts>,
}

/// A limit that waits goes with a text's ids until its batch begins.
type Texts = Batcher<(Vec<u32>, Option<PausedLimit>), Vec<f32>>;

/// Converts a text to token ids. The error is the message that the client gets.
type TextToIds = Arc<dyn Fn(&str) -> Result<Vec<u32>, String> + Send + Sync>;

impl Batchers {
    pub(crate) async fn new<T: Launches>(
        model: &Model<T>,
        max_tokens: usize,
        serving: &Serving,
    ) -> Result<Batchers> {
        let (mut own, mut rest, device) = (None, None, model.device());
        if let Some(multiprocessors) = serving.interactive {
            own = Some(device.reserve_partition(multiprocessors).await?);
            // A partition protects only if all work is in one.
            let unreserved = device.stats().unreserved_multiprocessors;
            rest = Some(device.reserve_partition(unreserved).await?);
        }
        let texts = batcher(model, max_tokens, serving, rest.as_ref()).await?;
        let interactive = match &own {
            Some(own) => Some(batcher(model, max_tokens, serving, Some(own)).await?),
            None => None,
        };
        Ok(Batchers { device: device.clone(), texts, interactive })
    }

    pub(crate) async fn embed(&self, text: Text, waits: Option<PausedLimit>) -> Result<Vec<f32>> {
        let Text { ids, is_interactive, patience } = text;
        let texts = match &self.interactive {
            Some(own) if is_interactive => own.clone(),
            None if is_interactive => self.texts.with_high_priority(),
            _ => self.texts.clone(),
        };
        texts.with_patience(patience).with_weight(ids.len() as u64).call((ids, waits)).await
    }
}

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
        let batchers = Batchers::new(model, max_tokens, &serving).await?;
        let compute = Compute::Here(Arc::new(batchers));
        Ok(Service::of(compute, model.config(), max_tokens, &serving))
    }

    /// Starts a worker, in whose process the model will be, and does not wait for it.
    ///
    /// # Errors
    /// The folder is not one of such a model; no such GPU; a system that lacks what workers need.
    pub async fn isolated(
        place: &Place,
        max_tokens: usize,
        serving: Serving,
    ) -> Result<Service, Failed> {
        let Place { model, device, .. } = place.clone();
        let open = move || Ok::<_, Failed>((Folder::open(&model)?.config, gpu_named(&device)?));
        let (config, gpu) = off_executor(open).await??;
        let worker = isolated::begin(place, gpu, &config, max_tokens, &serving)?;
        let compute = Compute::Isolated(worker, Duration::from_millis(serving.gpu_limit_ms as u64));
        Ok(Service::of(compute, &config, max_tokens, &serving))
    }

    fn of(compute: Compute, config: &Config, max_tokens: usize, serving: &Serving) -> Service {
        Service {
            compute,
            tokenizer: None,
            patience: Duration::from_millis(serving.patience),
            max_len: config.max_position_embeddings.min(max_tokens),
            vocabulary: config.vocab_size as u32,
        }
    }

    /// Waits until nothing computes any more, and says why: the device is lost, or the worker is given up.
    pub async fn lost(&self) -> Failed {
        match &self.compute {
            Compute::Here(batchers) => batchers.device.lost().await.into(),
            Compute::Isolated(worker, _) => {
                let error = worker.ended().await;
                format!("{error}\n{}", worker.log()).into()
            }
        }
    }

    /// Ends the process of `--isolate`, and waits until it is gone.
    pub async fn close(&self) {
        if let Compute::Isolated(worker, _) = &self.compute {
            // One that the system does not let go ends nothing.
            timeout(GONE, worker.clone().close(Duration::ZERO)).await.ok();
        }
    }

    async fn embed(&self, text: Text) -> Result<Vec<f32>, Failure> {
        match &self.compute {
            Compute::Here(batchers) => Ok(batchers.embed(text, None).await?),
            Compute::Isolated(worker, limit) => {
                let call = worker.call(&text).key(&text.ids).idempotent();
                let answer = call.deadline(text.patience).within(*limit).await?;
                answer.map_err(|(reason, is_refusal)| {
                    if is_refusal {
                        log_failure(&reason);
                    }
                    Failure(StatusCode::SERVICE_UNAVAILABLE, reason)
                })
            }
        }
    }

    /// Sets the metrics that are looked up.
    fn look(&self) {
        let waiting = match &self.compute {
            Compute::Here(batchers) => {
                let all = batchers.interactive.iter().chain([&batchers.texts]);
                all.map(|texts| texts.stats().waiting).sum()
            }
            Compute::Isolated(worker, _) => {
                let stats = worker.stats();
                METRICS.worker_deaths.inner().store(stats.deaths, Ordering::Relaxed);
                let refused = METRICS.worker_refused_starts.inner();
                refused.store(stats.refused_starts, Ordering::Relaxed);
                METRICS.worker_standbys.set(stats.standby.is_some().into());
                stats.calls
            }
        };
        METRICS.waiting.set(waiting as i64);
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
        check(ids, self.max_len, self.vocabulary)?;
        let Some(timeout) = headers.get("x-timeout-ms") else { return Ok(self.patience) };
        let ms = timeout.to_str().ok().and_then(|ms| ms.parse().ok());
        let ms = ms.ok_or("x-timeout-ms: a whole number of milliseconds is needed")?;
        Ok(self.patience.min(Duration::from_millis(ms)))
    }
}

/// Whether a model has such texts. The error is the message.
pub fn check(texts: &[Vec<u32>], most: usize, vocabulary: u32) -> Result<(), String> {
    if let Some(text) = texts.iter().find(|text| text.is_empty() || text.len() > most) {
        return Err(format!("a text of {} tokens: 1 to {most} are possible", text.len()));
    }
    let unknown = texts.iter().flatten().find(|id| **id >= vocabulary);
    unknown.map_or(Ok(()), |id| Err(format!("id {id}: the vocabulary has {vocabulary}")))
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
    let (lanes, hidden) = (Arc::new(Mutex::new(lanes)), model.config().hidden_size);
    let (model, partition) = (model.clone(), partition.cloned());
    let builder = Batcher::builder().max_len(max_texts).max_weight(max_tokens as u64);
    let builder = builder.max_in_flight(count).max_waiting(MAX_WAITING);
    // A task for each batch, which is never dropped half-way: its lane comes back.
    let builder = builder.spawn(|batch| drop(tokio::spawn(batch)));
    let (batcher, worker) = builder.build(move |texts: Vec<(Vec<u32>, _)>| {
        // From here on the limits count.
        let texts: Vec<_> = texts.into_iter().map(|(ids, _waits)| ids).collect();
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
    let looked_up = service.clone();
    let look = move || looked_up.look();
    let routes = Router::new().route("/embed", post(embed)).route("/healthz", get(health));
    with_metrics(routes.with_state(service), look)
}

async fn health(State(service): State<Service>) -> Result<Json<Value>, Failure> {
    if let Compute::Isolated(worker, _) = &service.compute
        && let health = worker.health()
        && !health.is_serving()
    {
        return Err(Failure(StatusCode::SERVICE_UNAVAILABLE, health.to_string()));
    }
    Ok(Json(json!({ "status": "ok" })))
}

#[derive(Deserialize)]
struct Request {
    #[serde(default)]
    ids: Vec<Vec<u32>>,
    #[serde(default)]
    texts: Vec<String>,
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
    // All of them wait at once; the first error takes the others back.
    let tokens: usize = ids.iter().map(Vec::len).sum();
    let calls = ids.into_iter().map(|ids| service.embed(Text { ids, is_interactive, patience }));
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
        Json(BTreeMap::from([("embeddings", embeddings)])).into_response()
    })
}

/// What a client gets in place of an answer: `{"error": ".."}`, with `retry-after` if the status is 503.
pub struct Failure(pub StatusCode, pub String);

/// Whether the system refuses a thread: a 503 that the log has.
pub(crate) fn is_refusal(error: &Error) -> bool {
    matches!(error.detail(), ErrorDetail::NoThread { .. })
}

impl From<JsonRejection> for Failure {
    fn from(refused: JsonRejection) -> Failure {
        Failure(refused.status(), refused.body_text())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        if is_refusal(&error) {
            log_failure(&error.to_string());
        }
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
        if self.0 == StatusCode::INTERNAL_SERVER_ERROR {
            log_failure(&self.1);
        }
        let answer = (self.0, Json(json!({ "error": self.1 })));
        match self.0 {
            StatusCode::SERVICE_UNAVAILABLE => {
                ([(header::RETRY_AFTER, "1")], answer).into_response()
            }
            _ => answer.into_response(),
        }
    }
}
