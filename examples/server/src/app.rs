//! The service: its state, its routes, and what they do.
//!
//! Every route of work has the same shape:
//!
//! 1. read and check the body (`wire`), within the body timeout;
//! 2. have it computed (`engine`): wait for a stream, put the work on it (`model`), await the one future,
//!    encode the answer: all within the request timeout;
//! 3. hand back the answer with the times that it took (`observe` logs and counts them).
//!
//! A client that goes away, or a time limit that passes, drops the handler wherever it is. Nothing has
//! to be cleaned up for that.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use metrics_exporter_prometheus::PrometheusHandle;
use tower_http::catch_panic::CatchPanicLayer;
use tracing_appender::non_blocking::ErrorCounter;

use crate::budget::Budget;
use crate::embed_mean::WIDTH;
use crate::failure::Failure;
use crate::options::Options;
use crate::wire::{self, Extents, Format, Input, Matmul, Matrices, Tokens};
use crate::{Compute, metrics, observe, open_inference};

/// What all requests share.
pub(crate) struct App {
    pub compute: Compute,
    pub metrics: PrometheusHandle,
    /// Lines of the log that nobody read in time.
    pub dropped: ErrorCounter,
    pub budget: Budget,
    pub options: Options,
    /// Why no more requests should come; unset while they should.
    pub stopping: OnceLock<&'static str>,
}

impl App {
    pub(crate) fn new(
        compute: Compute,
        metrics: PrometheusHandle,
        dropped: ErrorCounter,
        options: Options,
    ) -> Arc<App> {
        let budget = Budget::new(options.buffer_budget_mib << 20);
        let stopping = OnceLock::new();
        Arc::new(App { compute, metrics, dropped, budget, options, stopping })
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
    pub(crate) fn not_ready(&self) -> Option<Cow<'static, str>> {
        let state = self.compute.state();
        let stopping = self.stopping.get().copied().map(Cow::Borrowed);
        stopping.or((!state.is_ready).then_some(Cow::Owned(state.text)))
    }
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
        let (encoded, times) = app.compute.compute(input, reserved, encode).await?;
        let body = Body::from(answer_bytes.hold(encoded?));
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
pub(crate) async fn healthy(State(app): State<Arc<App>>) -> Result<String, Failure> {
    let state = app.compute.state();
    if state.is_live { Ok(state.text) } else { Err(Failure::new(503, "unhealthy", state.text)) }
}

/// Whether a load balancer should send requests here.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<&'static str, Failure> {
    app.not_ready().map_or(Ok("ready"), |why| Err(Failure::new(503, "not_ready", why)))
}
