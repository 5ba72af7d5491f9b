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

use std::any::Any;
use std::convert::Infallible;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Json, Router, middleware};
use gpu_await::{Batcher, Device, PinnedBuffer, PoolShare, Stream, StreamPool};
use metrics_exporter_prometheus::PrometheusHandle;
use tower_http::catch_panic::CatchPanicLayer;
use tracing_appender::non_blocking::ErrorCounter;

use crate::budget::{Budget, Reserved};
use crate::drill::Drill;
use crate::embed_mean::WIDTH;
use crate::embedder::{self, Embed, Embedded};
use crate::failure::Failure;
use crate::health::{self, Health};
use crate::metrics;
use crate::model::{Model, Product};
use crate::observe::{self, Route, Times};
use crate::open_inference;
use crate::options::Options;
use crate::status;
use crate::window::Window;
use crate::wire::{self, Extents, Format};

/// Bytes of an answer that are handed to its connection at once.
const PART: usize = 64 << 10;

/// The error text for a device that does not run the health launch in time.
const STALLED: &str = "the device is stalled";

/// What all requests share; cheap to clone.
#[derive(Clone)]
pub(crate) struct App(Arc<Shared>);

pub(crate) struct Shared {
    pub device: Device,
    pub pool: StreamPool,
    products: StreamPool,
    timeline_writer: Arc<tokio::sync::Mutex<()>>,
    pub model: Arc<Model>,
    pub embedder: Batcher<Embed, Embedded, gpu_await::Error>,
    pub metrics: PrometheusHandle,
    /// Lines of the log that nobody read in time.
    pub dropped: ErrorCounter,
    pub window: Window,
    pub budget: Budget,
    pub health: Arc<Health>,
    health_stream: Stream,
    pub drill: Option<Drill>,
    pub options: Options,
    /// Requests of work answered so far with a result, and with an error.
    pub results: AtomicU64,
    pub errors: AtomicU64,
    /// Why no more requests should come; unset while they should.
    stopping: OnceLock<&'static str>,
}

impl Deref for App {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl App {
    /// Loads the model and makes what serves it. Inside the runtime: it starts tasks.
    ///
    /// # Errors
    /// A model that does not load; a device without room for it.
    pub(crate) async fn start(
        device: Device,
        drill: Option<Drill>,
        metrics: PrometheusHandle,
        dropped: ErrorCounter,
        options: Options,
    ) -> gpu_await::Result<App> {
        let model = Arc::new(Model::load(&device).await?);
        if options.timeline > 0 {
            device.timeline().start(options.timeline)?;
        }
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
        let (health, health_stream) = (Health::new(), device.stream()?);
        let launches = health::watch(
            health.clone(),
            model.clone(),
            health_stream.clone(),
            options.health_timeout_ms,
        );
        tokio::spawn(launches);
        let products = pool.with_share("matmul")?;
        let app = App(Arc::new(Shared {
            device,
            pool,
            products,
            timeline_writer: Arc::default(),
            model,
            embedder,
            metrics,
            dropped,
            window: Window::new(),
            budget: Budget::new(options.buffer_budget_mib << 20),
            health,
            health_stream,
            drill,
            options,
            results: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            stopping: OnceLock::new(),
        }));
        tokio::spawn(status::look(Arc::downgrade(&app.0)));
        Ok(app)
    }

    /// The routes of work.
    pub(crate) fn work(&self) -> Router<App> {
        let work = |path, methods| self.at(Route { path, is_work: true }, methods);
        work("/matmul", post(matmul))
            .merge(work("/embed", post(embed)))
            .merge(open_inference::routes(self))
    }

    /// The routes that tell of the service.
    pub(crate) fn about(&self) -> Router<App> {
        let about = |path, methods| self.at(Route { path, is_work: false }, methods);
        Router::new()
            .merge(about("/", get(async || Html(include_str!("page.html")))))
            .merge(about("/status", get(async |State(app): State<App>| Json(status::of(&app)))))
            .merge(about("/metrics", get(async |State(app): State<App>| metrics::scrape(&app))))
            .merge(about("/timeline", get(timeline)))
            .merge(about("/healthz", get(healthy)))
            .merge(about("/readyz", get(ready)))
    }

    /// These routes, and an answer for any other path.
    pub(crate) fn serve(&self, routes: Router<App>) -> Router {
        let other = self.observed(Route::OTHER, Router::new().fallback(no_such_path));
        let close = middleware::from_fn_with_state(self.clone(), close);
        other.merge(routes).layer(close).with_state(self.clone())
    }

    pub(crate) fn at(&self, route: Route, methods: MethodRouter<App>) -> Router<App> {
        let methods = methods.fallback(async || {
            let message = "this path takes another method: see the `Allow` header";
            Failure::new(StatusCode::METHOD_NOT_ALLOWED, "method", message)
        });
        self.observed(route, Router::new().route(route.path, methods))
    }

    pub(crate) fn observed(&self, route: Route, router: Router<App>) -> Router<App> {
        // A panic is one request's: its client gets an answer, the connection goes on.
        let panicked =
            |_: Box<dyn Any + Send>| Failure::internal(&"a handler panicked").into_response();
        router
            .layer(CatchPanicLayer::custom(panicked))
            .layer(middleware::from_fn_with_state((self.clone(), route), observe::observe))
    }

    /// Turns readiness off; the first reason stays.
    pub(crate) fn stop(&self, why: &'static str) {
        self.stopping.get_or_init(|| why);
    }

    /// Why no more requests should come.
    pub(crate) fn stopping(&self) -> Option<&'static str> {
        self.stopping.get().copied()
    }

    /// Why requests should go elsewhere.
    pub(crate) fn not_ready(&self) -> Option<&'static str> {
        self.stopping().or((!self.health.is_good()).then_some(STALLED))
    }

    /// Counts an answered request of work. ORDERING: Relaxed: statistics.
    pub(crate) fn count(&self, status: StatusCode, took: Duration) {
        self.window.record(status, took);
        if status.is_success() {
            self.results.fetch_add(1, Ordering::Relaxed);
        } else {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(drill) = &self.drill {
            drill.answered(&self.health_stream);
        }
    }
}

/// Asks HTTP/1 clients to close their connections while the server shuts down: a request that is sent as the server closes is lost.
async fn close(State(app): State<App>, request: Request, next: Next) -> Response {
    // HTTP/2 has a frame for that, which the connection sends.
    let is_told = request.version() < Version::HTTP_2;
    let mut response = next.run(request).await;
    if is_told && app.stopping().is_some() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

pub(crate) async fn no_such_path() -> Failure {
    Failure::new(StatusCode::NOT_FOUND, "not_found", "no such path")
}

async fn matmul(
    State(app): State<App>,
    extents: Result<Query<Extents>, QueryRejection>,
    request: Request,
) -> Result<Response, Failure> {
    let format = |headers: &HeaderMap| wire::format(headers, &[Format::Json, Format::Raw]);
    let (format, upload) = wire::body(request, &app.budget, &app.options, format).await?;
    let extents = match format {
        Format::Json => None,
        Format::Raw => match extents {
            Ok(Query(extents)) => Some(extents),
            Err(error) => return Err(Failure::invalid(format!("m, k and n: {error}"))),
        },
    };
    within(&app, async {
        let input = upload.decode(move |bytes| match extents {
            None => wire::matmul_from_json(bytes),
            Some(extents) => wire::matmul_from_raw(extents, bytes),
        });
        let (input, reserved) = input.await?;
        let [m, _, n] = input.shape;
        // In front of the wait for a stream: answers that nobody reads must not keep streams from others.
        let answer_bytes = app.budget.answer(wire::answer_bytes(format, m * n)).await?;
        let (c, times) = multiply(&app, input, reserved).await?;
        let length = size_of_val(&c[..]);
        let encoded = wire::compute(length, move || {
            let encoded = match format {
                Format::Json => wire::matmul_to_json(&c, n),
                Format::Raw => Ok(bytemuck::cast_slice(&c).to_vec()),
            };
            encoded.map(|encoded| answer_bytes.hold(encoded))
        });
        Ok(answer(format, encoded.await??, times))
    })
    .await
}

/// The GPU's part of a product. What is `reserved` is for `input`, which goes as soon as it is in pinned memory.
pub(crate) async fn multiply(
    app: &App,
    input: wire::Matmul,
    reserved: Reserved,
) -> Result<(PinnedBuffer<f32>, Times), Failure> {
    let stream = app.products.acquire().await?;
    let queue = stream.waited();
    metrics::queued(queue);

    // Behind the wait for a stream, so that pinned memory is bounded by what is in flight.
    let product = Product::new(&app.device, input.shape, &input.a, &input.b).await?;
    drop((input, reserved));
    let result = app.model.matmul(&stream, product); // on the device from here on
    let (c, gpu) = result.await?; // the one wait for it
    metrics::on_device("/matmul", gpu);
    Ok((c, Times { queue, gpu }))
}

async fn embed(State(app): State<App>, request: Request) -> Result<Response, Failure> {
    let format = |headers: &HeaderMap| wire::format(headers, &[Format::Json]);
    let (format, upload) = wire::body(request, &app.budget, &app.options, format).await?;
    within(&app, async {
        let (tokens, _reserved) = upload.decode(wire::embed_from_json).await?;
        let answer_bytes = app.budget.answer(wire::answer_bytes(format, WIDTH)).await?;
        let (embedding, times) = look_up(&app, tokens).await?;
        Ok(answer(format, answer_bytes.hold(wire::embed_to_json(&embedding)?), times))
    })
    .await
}

/// Waits with others for a batch; a request that is dropped before leaves it.
pub(crate) async fn look_up(app: &App, tokens: Vec<u32>) -> Result<([f32; WIDTH], Times), Failure> {
    let embedder = app.embedder.with_weight(tokens.len() as u64);
    let request = Embed { tokens, since: Instant::now() };
    let Embedded { embedding, queue, gpu } = embedder.call(request).await?;
    Ok((embedding, Times { queue, gpu }))
}

/// Whether whoever runs this should let it live.
pub(crate) async fn healthy(State(app): State<App>) -> Result<&'static str, Failure> {
    match app.health.is_good() {
        true => Ok("ok"),
        false => Err(unavailable("unhealthy", STALLED)),
    }
}

/// Whether a load balancer should send requests here.
pub(crate) async fn ready(State(app): State<App>) -> Result<&'static str, Failure> {
    match app.not_ready() {
        None => Ok("ready"),
        Some(why) => Err(unavailable("not_ready", why)),
    }
}

/// What the device did last, as a page.
pub(crate) async fn timeline(State(app): State<App>) -> Result<Html<Bytes>, Failure> {
    if !app.device.timeline().is_on() {
        let message = "the server logs no operations: start it with --timeline N";
        return Err(Failure::new(StatusCode::NOT_FOUND, "not_found", message));
    }
    // One page at a time, even if its client disconnects, and within the budget until it is read: a page may have many MiB.
    let Ok(writing) = app.timeline_writer.clone().try_lock_owned() else {
        return Err(unavailable("busy", "another one is being written"));
    };
    let device = app.device.clone();
    let written = tokio::task::spawn_blocking(move || {
        let mut page = Vec::new();
        let trace = device.timeline().snapshot().map_err(|error| error.to_string())?;
        trace.write_html(&mut page).map_err(|error| error.to_string())?;
        Ok((page, writing))
    });
    let page: Result<_, String> =
        written.await.map_err(|error| error.to_string()).and_then(|page| page);
    let (page, _writing) = page.map_err(|error| Failure::internal(&error))?;
    let reserved = app.budget.answer(page.len()).await?;
    Ok(Html(reserved.hold(page)))
}

fn unavailable(kind: &'static str, why: &'static str) -> Failure {
    Failure::new(StatusCode::SERVICE_UNAVAILABLE, kind, why)
}

/// Time is up for this request; the device goes on with what it was given.
pub(crate) async fn within(
    app: &App,
    work: impl Future<Output = Result<Response, Failure>>,
) -> Result<Response, Failure> {
    let limit = app.options.request_timeout_ms;
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(Failure::timed_out()))
}

/// In parts, so that a connection can tell a client that reads slowly from one that does not.
pub(crate) fn answer(format: Format, mut body: Bytes, times: Times) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(format.content_type())),
        (header::CONTENT_LENGTH, body.len().into()),
    ];
    let parts = std::iter::from_fn(move || {
        let part = body.split_to(body.len().min(PART));
        (!part.is_empty()).then_some(Ok::<_, Infallible>(part))
    });
    let body = Body::from_stream(futures::stream::iter(parts));
    let mut response = (headers, body).into_response();
    response.extensions_mut().insert(times);
    response
}
