//! Around every request: an id, a span, one line in the log, and what is counted.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ::metrics::{counter, gauge, histogram};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, Version, header};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;

use crate::app::App;
use crate::model::Times;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A request from its head to its answer. Dropped without one, its client has gone.
struct Watched {
    route: String,
    /// It is logged, and in flight.
    is_work: bool,
    start: Instant,
    span: tracing::Span,
    status: Option<u16>,
    times: Option<Times>,
}

/// The layer around each route.
pub(crate) async fn observe(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Use the client's id if it has at most 64 characters, else generate one. ORDERING: Relaxed: ids only have to be unique.
    let theirs = request.headers().get(REQUEST_ID).cloned();
    let id = theirs.filter(|id| id.to_str().is_ok_and(|id| (1..=64).contains(&id.len())));
    let id = id.unwrap_or_else(|| NEXT.fetch_add(1, Ordering::Relaxed).into());
    let span = tracing::info_span!("request", id = id.to_str().unwrap_or_default());
    // Not its path, which clients make up: it becomes a label of metrics.
    let matched = request.extensions().get::<MatchedPath>();
    let mut watched = Watched {
        route: matched.map_or("other", MatchedPath::as_str).to_owned(),
        is_work: matched.is_some() && request.method() == Method::POST,
        start: Instant::now(),
        span: span.clone(),
        status: None,
        times: None,
    };
    if watched.is_work {
        gauge!("server_in_flight").increment(1.0);
    }
    let is_http1 = request.version() < Version::HTTP_2;
    let mut response = next.run(request).instrument(span).await;
    watched.status = Some(response.status().as_u16());
    watched.times = response.extensions().get().copied();
    response.headers_mut().insert(REQUEST_ID, id);
    // A request that is sent as the server closes is lost. HTTP/2 has a frame for that, which the connection sends.
    if is_http1 && app.stopping.get().is_some() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

impl Drop for Watched {
    fn drop(&mut self) {
        let took = self.start.elapsed();
        let status = self.status.map_or("gone".to_owned(), |status| status.to_string());
        let route = self.route.clone();
        histogram!("server_request_seconds", "route" => route.clone()).record(took);
        counter!("server_requests_total", "route" => route.clone(), "status" => status.clone())
            .increment(1);
        let _in_span = self.span.enter();
        if self.is_work {
            gauge!("server_in_flight").decrement(1.0);
            let queue_us = self.times.map(|times| times.queue.as_micros());
            let gpu_us = self.times.map(|times| times.gpu.as_micros());
            tracing::info!(route, %status, queue_us, gpu_us, total_us = took.as_micros(), "done");
        }
    }
}
