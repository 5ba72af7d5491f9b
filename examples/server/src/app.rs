//! The service: its state, its routes, and what they do.
//!
//! Every route of work has the same shape:
//!
//! 1. read and check the body (`wire`), within the body timeout;
//! 2. wait for a stream, put the work on it (`model`), await the one future, encode the answer: all
//!    within the request timeout;
//! 3. hand back the answer with the times that it took (`observe` logs and counts them).
//!
//! A client that goes away, or a time limit that passes, drops the handler wherever it is. Nothing has
//! to be cleaned up for that: what is on the device goes on, its memory comes back when the device has
//! finished, and the permit of the pool only then.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ::metrics::histogram;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use gpu_await::{Batcher, Device, PinnedBuffer, PoolShare, StreamPool};
use metrics_exporter_prometheus::PrometheusHandle;
use tower_http::catch_panic::CatchPanicLayer;
use tracing_appender::non_blocking::ErrorCounter;

use crate::budget::{Budget, Reserved};
use crate::embed_mean::WIDTH;
use crate::embedder::{self, Embed, Embedded};
use crate::failure::Failure;
use crate::health::Health;
use crate::model::Model;
use crate::observe::{self, Times};
use crate::options::Options;
use crate::wire::{self, Extents, Format, Matmul, Matrices, Tokens};
use crate::{metrics, open_inference};

/// What all requests share.
pub(crate) struct App {
    pub device: Device,
    pub pool: StreamPool,
    products: StreamPool,
    pub model: Arc<Model>,
    pub embedder: Batcher<Embed, Embedded, gpu_await::Error>,
    pub metrics: PrometheusHandle,
    /// Lines of the log that nobody read in time.
    pub dropped: ErrorCounter,
    pub budget: Budget,
    pub health: Arc<Health>,
    pub options: Options,
    /// Why no more requests should come; unset while they should.
    pub stopping: OnceLock<&'static str>,
}

impl App {
    /// Loads the model and makes what serves it. Inside the runtime: it starts tasks.
    ///
    /// # Errors
    /// A model that does not load; a device without room for it.
    pub(crate) async fn start(
        device: Device,
        metrics: PrometheusHandle,
        dropped: ErrorCounter,
        options: Options,
    ) -> gpu_await::Result<Arc<App>> {
        let model = Arc::new(Model::load(&device).await?);
        let pool = StreamPool::builder()
            .streams(&device, options.streams)
            .max_in_flight(options.max_in_flight)
            .max_waiting(options.max_waiting)
            // A request that cannot be answered by then is refused at once, and nobody computes for callers that have gone.
            .patience(options.request_timeout_ms)
            // Products take long, and others stand behind them on the device: half of the permits are never theirs.
            .share(PoolShare::new("matmul").max_in_flight(options.max_in_flight.div_ceil(2)))
            .share(PoolShare::new("embed"))
            .build()?;
        let (embedder, worker) = embedder::start(
            &pool.with_share("embed")?,
            model.clone(),
            options.max_waiting,
            options.request_timeout_ms,
        );
        tokio::spawn(worker);
        let health = Health::watch(model.clone(), device.stream()?, options.health_timeout_ms);
        let products = pool.with_share("matmul")?;
        Ok(Arc::new(App {
            device,
            pool,
            products,
            model,
            embedder,
            metrics,
            dropped,
            budget: Budget::new(options.buffer_budget_mib << 20),
            health,
            options,
            stopping: OnceLock::new(),
        }))
    }

    /// The routes of work.
    pub(crate) fn work() -> Router<Arc<App>> {
        Router::new()
            .route("/matmul", post(matmul))
            .route("/embed", post(embed))
            .merge(open_inference::routes())
    }

    /// The routes that tell of the service.
    pub(crate) fn about() -> Router<Arc<App>> {
        Router::new()
            .route("/metrics", get(async |State(app): State<Arc<App>>| metrics::scrape(&app)))
            .route("/healthz", get(healthy))
            .route("/readyz", get(ready))
    }

    /// These routes, and an answer for any other path or method.
    pub(crate) fn serve(self: &Arc<App>, routes: Router<Arc<App>>) -> Router {
        routes
            .fallback(async || Failure::new(404, "not_found", "no such path"))
            .method_not_allowed_fallback(async || {
                let message = "this path takes another method: see the `Allow` header";
                Failure::new(405, "method", message)
            })
            // A panic is one request's: its client gets an answer, the connection goes on.
            .layer(CatchPanicLayer::custom(|_| {
                Failure::internal(&"a handler panicked").into_response()
            }))
            .layer(middleware::from_fn(open_inference::errors))
            .layer(middleware::from_fn_with_state(self.clone(), observe::observe))
            .with_state(self.clone())
    }

    /// Why requests should go elsewhere.
    pub(crate) fn not_ready(&self) -> Option<&'static str> {
        let stalled = (!self.health.is_good()).then_some("the device is stalled");
        self.stopping.get().copied().or(stalled)
    }

    /// The GPU's part of a product. What is `reserved` is for `input`, which goes as soon as it is in pinned memory.
    async fn multiply(
        &self,
        input: Matmul,
        reserved: Reserved,
    ) -> Result<(PinnedBuffer<f32>, Times), Failure> {
        let stream = self.products.acquire().await?;
        let queue = stream.waited();
        histogram!("server_queue_seconds").record(queue);
        // Pinned, so that copies need no thread; where its pool has to grow, that is off the executor. Behind the wait for a stream: pinned
        // memory is bounded by what is in flight.
        let Matmul { shape: [m, k, n], a, b } = input;
        let mut pinned = self.device.pinned_async(m * k + k * n).await?;
        pinned[..m * k].copy_from_slice(&a);
        pinned[m * k..].copy_from_slice(&b);
        let c = self.device.pinned_async(m * n).await?;
        drop((a, b, reserved));
        let result = self.model.matmul(&stream, [m, k, n], pinned, c); // on the device from here on
        let (c, gpu) = result.await?; // the one wait for it
        histogram!("server_gpu_seconds", "route" => "/matmul").record(gpu);
        Ok((c, Times { queue, gpu }))
    }

    /// Waits with others for a batch; a request that is dropped before leaves it.
    async fn look_up(&self, tokens: Vec<u32>) -> Result<([f32; WIDTH], Times), Failure> {
        let embedder = self.embedder.with_weight(tokens.len() as u64);
        let request = Embed { tokens, since: Instant::now() };
        let Embedded { embedding, times } = embedder.call(request).await?;
        Ok((embedding, times))
    }
}

/// What a request asks for, checked.
pub(crate) enum Input {
    Matmul(Matmul),
    Embed(Vec<u32>),
}

/// What every route of work does. `check` looks at the head, `decode` at the body; `encode` writes a result of this shape down, with what
/// `decode` kept for it.
pub(crate) async fn answer<C, K>(
    app: &App,
    request: Request,
    check: impl FnOnce(&HeaderMap) -> Result<C, Failure>,
    decode: impl FnOnce(C, &[u8]) -> Result<(Format, Input, K), Failure>,
    encode: impl FnOnce(K, Format, &[usize], &[f32]) -> Result<Vec<u8>, Failure>,
) -> Result<Response, Failure> {
    let (checked, body, reserved) = wire::body(app, request, check).await?;
    let work = async {
        let (format, input, kept) = wire::compute(body.len(), || decode(checked, &body))?;
        drop(body);
        let shape = match &input {
            Input::Matmul(Matmul { shape: [m, _, n], .. }) => vec![*m, *n],
            Input::Embed(_) => vec![WIDTH],
        };
        // In front of the wait for a stream: answers that nobody reads must not keep streams from others.
        let answer_bytes = format.answer_bytes(shape.iter().product());
        let answer_bytes = app.budget.answer(answer_bytes).await?;
        let encode = |values: &[f32]| {
            wire::compute(size_of_val(values), || encode(kept, format, &shape, values))
        };
        let (encoded, times) = match input {
            Input::Matmul(input) => {
                let (c, times) = app.multiply(input, reserved).await?;
                (encode(&c)?, times)
            }
            Input::Embed(tokens) => {
                let (embedding, times) = app.look_up(tokens).await?;
                (encode(&embedding)?, times)
            }
        };
        let body = Body::from(answer_bytes.hold(encoded));
        let mut response = ([(header::CONTENT_TYPE, format.content_type())], body).into_response();
        response.extensions_mut().insert(times);
        Ok(response)
    };
    // A timeout drops the future; the device still finishes the submitted work.
    let limit = app.options.request_timeout_ms;
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(Failure::timed_out()))
}

async fn matmul(
    State(app): State<Arc<App>>,
    extents: Result<Query<Extents>, QueryRejection>,
    request: Request,
) -> Result<Response, Failure> {
    let check = |headers: &_| Format::of(headers, &[Format::Json, Format::Raw]);
    let decode = |format, body: &_| {
        let input = match (format, extents) {
            (Format::Json, _) => {
                wire::from_json(body).and_then(|Matrices { a, b }| Matmul::new(a, b))
            }
            (Format::Raw, Ok(Query(extents))) => Matmul::from_raw(extents, body),
            (Format::Raw, Err(error)) => Err(Failure::invalid(format!("m, k and n: {error}"))),
        };
        Ok((format, Input::Matmul(input?), ()))
    };
    answer(&app, request, check, decode, |(), format, shape, c| match format {
        Format::Json => {
            wire::to_json(c, &HashMap::from([("c", c.chunks_exact(shape[1]).collect::<Vec<_>>())]))
        }
        Format::Raw => Ok(bytemuck::cast_slice(c).to_vec()),
    })
    .await
}

async fn embed(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let check = |headers: &_| Format::of(headers, &[Format::Json]);
    let decode = |format, body: &_| {
        let Tokens { tokens } = wire::from_json(body)?;
        Ok((format, Input::Embed(wire::check_tokens(tokens)?), ()))
    };
    answer(&app, request, check, decode, |(), _, _, embedding| {
        wire::to_json(embedding, &HashMap::from([("embedding", embedding)]))
    })
    .await
}

/// Whether whoever runs this should let it live.
pub(crate) async fn healthy(State(app): State<Arc<App>>) -> Result<&'static str, Failure> {
    let stalled = || Failure::new(503, "unhealthy", "the device is stalled");
    if app.health.is_good() { Ok("ok") } else { Err(stalled()) }
}

/// Whether a load balancer should send requests here.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<&'static str, Failure> {
    app.not_ready().map_or(Ok("ready"), |why| Err(Failure::new(503, "not_ready", why)))
}
