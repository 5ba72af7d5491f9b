//! Around every request: an id, a span, one line in the log, and what is counted.
//!
//! The span continues the trace of a `traceparent` header (W3C Trace Context) or begins one, which the answer's
//! `traceparent` and the log name. With `--otlp-endpoint` a collector gets it, with the times in the queue, on the device and until the
//! answer, and a span for each batch, which links to those of its requests (`export`).
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Status, TraceContextExt};
use opentelemetry_http::{HeaderExtractor, HeaderInjector};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::{Instrument, field};
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::app::App;
use crate::metrics;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// How long a request waited for its stream, and how long the device was at work on it. A handler
/// leaves it in its response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub queue: Duration,
    pub gpu: Duration,
}

/// What a request asks for; not its path, which clients make up: it becomes a name of metrics.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub path: &'static str,
    /// It is logged, counted as a result or an error, and in flight.
    pub is_work: bool,
}

impl Route {
    /// None of ours.
    pub(crate) const OTHER: Route = Route { path: "other", is_work: false };
}

/// The layer around each route.
pub(crate) async fn observe(
    State((app, route)): State<(App, Route)>,
    request: Request,
    next: Next,
) -> Response {
    let id = request_id(&request);
    let id_text = id.to_str().unwrap_or_default();
    let span =
        tracing::info_span!("request", otel.kind = "server", id = id_text, trace_id = field::Empty);
    span.set_attribute("http.request.method", request.method().as_str().to_owned());
    span.set_attribute("http.route", route.path);
    let traces = TraceContextPropagator::new();
    // Refused by a span that the filter leaves out: there is no trace then.
    span.set_parent(traces.extract(&HeaderExtractor(request.headers()))).ok();
    let context = span.context();
    span.record("trace_id", field::display(context.span().span_context().trace_id()));
    let watched = Watched::new(app, route, span.clone());
    let mut response = next.run(request).instrument(span).await;
    watched.answered(&response);
    response.headers_mut().insert(REQUEST_ID, id);
    traces.inject_context(&context, &mut HeaderInjector(response.headers_mut()));
    response
}

/// The client's, if it is short; one of ours otherwise.
fn request_id(request: &Request) -> HeaderValue {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let theirs = request.headers().get(REQUEST_ID);
    let usable = |id: &&HeaderValue| id.to_str().is_ok_and(|id| (1..=64).contains(&id.len()));
    theirs.filter(usable).cloned().unwrap_or_else(|| {
        // ORDERING: Relaxed: only different numbers are asked for.
        NEXT.fetch_add(1, Ordering::Relaxed).into()
    })
}

/// A request from its head to its answer. Dropped without one, its client has gone.
struct Watched {
    app: App,
    route: Route,
    start: Instant,
    span: tracing::Span,
    done: bool,
}

impl Watched {
    fn new(app: App, route: Route, span: tracing::Span) -> Watched {
        let watched = Watched { app, route, start: Instant::now(), span, done: false };
        if route.is_work {
            metrics::in_flight(1.0);
        }
        watched
    }

    fn answered(mut self, response: &Response) {
        self.done = true;
        let (took, status) = (self.start.elapsed(), response.status().as_u16());
        metrics::answered(self.route.path, status.to_string(), took);
        let times = response.extensions().get::<Times>();
        let micros =
            |time: fn(&Times) -> Duration| times.map(|times| time(times).as_micros() as u64);
        let (queue_us, gpu_us) = (micros(|times| times.queue), micros(|times| times.gpu));
        let (route, total_us) = (self.route.path, took.as_micros() as u64);
        // For the trace; the log has them in the event.
        let set = |name, value: u64| self.span.set_attribute(name, value as i64);
        set("http.response.status_code", status.into());
        queue_us.into_iter().for_each(|us| set("queue_us", us));
        gpu_us.into_iter().for_each(|us| set("gpu_us", us));
        set("total_us", total_us);
        if response.status().is_server_error() {
            self.span.set_status(Status::error(""));
        }
        let _in_span = self.span.enter();
        if self.route.is_work {
            tracing::info!(route, status, queue_us, gpu_us, total_us, "answered");
            self.app.count(response.status(), took);
        } else {
            tracing::debug!(route, status, total_us, "answered");
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.route.is_work {
            metrics::in_flight(-1.0);
        }
        if !self.done {
            let took = self.start.elapsed();
            metrics::answered(self.route.path, "gone".to_owned(), took);
            let (route, total_us) = (self.route.path, took.as_micros() as u64);
            self.span.in_scope(|| tracing::info!(route, total_us, "the client has gone"));
        }
    }
}
