//! `GET /metrics`, for Prometheus. Both servers use it.
#![forbid(unsafe_code)]

use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use prometheus_client::registry::Registry;

use crate::serve::Failure;

/// How long nothing may have failed before the log says so.
const QUIET: Duration = Duration::from_secs(1);

/// When a request failed last; `None` if the log says that they are answered.
static FAILED: Mutex<Option<Instant>> = Mutex::new(None);

/// Logs that requests fail for a reason that is the server's, unless the last line says so.
pub fn log_failure(why: &str) {
    if FAILED.lock().unwrap_or_else(PoisonError::into_inner).replace(Instant::now()).is_none() {
        tracing::warn!("requests fail: {why}");
    }
}

fn log_answer() {
    let mut failed = FAILED.lock().unwrap_or_else(PoisonError::into_inner);
    if failed.take_if(|at| at.elapsed() > QUIET).is_some() {
        tracing::info!("requests are answered again");
    }
}

/// What a process has done.
#[expect(missing_docs, reason = "Prometheus is told")]
pub struct Metrics {
    pub tokens: Counter,
    pub waiting: Gauge,
    pub blocks_used: Gauge,
    pub worker_deaths: Counter,
    pub worker_refused_starts: Counter,
    pub worker_standbys: Gauge,
    requests: Family<[(&'static str, String); 1], Counter>,
    seconds: Histogram,
    registry: Registry,
}

/// The metrics of this process.
pub static METRICS: LazyLock<Metrics> = LazyLock::new(|| {
    let (tokens, waiting, blocks_used) = <(Counter, Gauge, Gauge)>::default();
    let (worker_deaths, worker_refused_starts, worker_standbys) =
        <(Counter, Counter, Gauge)>::default();
    // 100 µs to 52 s.
    let seconds = Histogram::new(exponential_buckets(1e-4, 2.0, 20));
    let (requests, mut registry) = (Family::default(), Registry::with_prefix("model"));
    let outcomes = "by status; `left`: the client did; `broken`: the answer ended early";
    registry.register("requests", outcomes, Family::clone(&requests));
    registry.register(
        "request_seconds",
        "from the whole request to the end of the answer",
        seconds.clone(),
    );
    registry.register("tokens", "of texts that were embedded, or new ones", tokens.clone());
    let waits = "requests that have not begun; with --isolate, all that have not ended";
    registry.register("waiting", waits, waiting.clone());
    registry.register("blocks_used", "of a decoder's cache", blocks_used.clone());
    let deaths = "processes of --isolate that died, standbys among them";
    registry.register("worker_deaths", deaths, worker_deaths.clone());
    let refused = "starts of such a process that the system refused";
    registry.register("worker_refused_starts", refused, worker_refused_starts.clone());
    registry.register("worker_standbys", "that could take over now", worker_standbys.clone());
    Metrics {
        tokens,
        waiting,
        blocks_used,
        worker_deaths,
        worker_refused_starts,
        worker_standbys,
        requests,
        seconds,
        registry,
    }
});

/// Adds `GET /metrics`, and an error for what is not there. `look` sets the metrics that are looked up.
pub fn with_metrics(routes: Router, look: impl Fn() + Clone + Send + Sync + 'static) -> Router {
    let metrics = move || async move {
        look();
        let mut text = String::new();
        encode(&mut text, &METRICS.registry).expect("a `String` takes any text");
        ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0")], text)
    };
    let none = |status: StatusCode| async move { Failure(status, status.to_string()).counted() };
    let routes = routes.route("/metrics", get(metrics));
    let routes = routes.fallback(move || none(StatusCode::NOT_FOUND));
    routes.method_not_allowed_fallback(move || none(StatusCode::METHOD_NOT_ALLOWED))
}

impl Failure {
    /// Counts a request that no handler has.
    pub(crate) fn counted(self) -> Failure {
        count(self.0.as_str().into());
        self
    }
}

fn count(outcome: String) {
    METRICS.requests.get_or_create(&[("outcome", outcome)]).inc();
}

/// A request that a handler has, counted when this is dropped.
pub struct Watched(Instant, String);

impl Watched {
    /// Its client leaves, unless it [ends](Watched::ends).
    #[must_use]
    pub fn now() -> Watched {
        Watched(Instant::now(), "left".into())
    }

    /// Says how it ends, unless that was said.
    pub fn ends(&mut self, outcome: &str) {
        if self.1 == "left" {
            self.1 = outcome.into();
            if outcome == "200" {
                log_answer();
            }
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        METRICS.seconds.observe(self.0.elapsed().as_secs_f64());
        count(std::mem::take(&mut self.1));
    }
}
