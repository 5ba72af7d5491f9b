//! The service: its state, and what its routes do.
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
use std::sync::{Arc, OnceLock};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use metrics_exporter_prometheus::PrometheusHandle;
use tracing_appender::non_blocking::ErrorCounter;

use crate::Compute;
use crate::budget::Budget;
use crate::embed_mean::WIDTH;
use crate::failure::Failure;
use crate::options::Options;
use crate::wire::{self, Format, Input, Matmul};

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
    let (checked, body, reserved) = wire::body((&app.budget, &app.options), request, check).await?;
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

/// Whether whoever runs this should let it live.
pub(crate) async fn healthy(State(app): State<Arc<App>>) -> Result<String, Failure> {
    let state = app.compute.state();
    if state.is_live { Ok(state.text) } else { Err(Failure::new(503, "unhealthy", state.text)) }
}

/// Whether a load balancer should send requests here.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<&'static str, Failure> {
    app.not_ready().map_or(Ok("ready"), |why| Err(Failure::new(503, "not_ready", why)))
}
