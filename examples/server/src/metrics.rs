//! What `/metrics` tells Prometheus. The recorder has no listener of its own: the service renders it.
//!
//! | metric | kind | what |
//! |---|---|---|
//! | `server_requests_total{route,status}` | counter | answers made, whether their clients read them or not; `status="gone"`: the client left first |
//! | `server_request_seconds{route}` | histogram | from the head of a request to its answer |
//! | `server_in_flight` | gauge | requests of work that are being answered |
//! | `server_queue_seconds` | histogram | how long a request waited for a stream |
//! | `server_gpu_seconds{route}` | histogram | time on the device, of a request or of a batch |
//! | `server_batch_requests` | histogram | requests in a batch of `/embed` |
//! | `server_{body,pool,embed}_refused_total` | counter | requests answered 429: no room for the body, for a wait, or too little time |
//! | `server_{pool,embed}_expired_total` | counter | requests that waited until it was too late: 429 while their time is not over, then 503 |
//! | `server_pool_*`, `server_embed_*`, `server_device_*`, .. | gauge, counter | as of the scrape: see [`scrape`] |
#![forbid(unsafe_code)]

use std::time::Duration;

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

use crate::app::App;

/// How often samples are counted into their buckets when nobody scrapes.
const UPKEEP: Duration = Duration::from_secs(5);

/// Makes the recorder the process's, and keeps it in order. Call it once, inside the runtime.
///
/// # Errors
/// There is another one.
pub(crate) fn install() -> Result<PrometheusHandle, BuildError> {
    // 10 µs to 10 s, three a decade.
    let seconds: Vec<f64> = (-5..=0)
        .flat_map(|decade| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(decade)))
        .chain([10.0])
        .collect();
    let requests: Vec<f64> = (0..=6).map(|power| f64::from(1 << power)).collect();
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &seconds)?
        .set_buckets_for_metric(Matcher::Suffix("_requests".to_owned()), &requests)?
        .install_recorder()?;
    describe_counter!(
        "server_requests_total",
        "answers made, whether their clients read them or not; status=\"gone\": the client left first"
    );
    describe_counter!(
        "server_body_refused_total",
        "requests whose body had no room in the budget in time: 429"
    );
    // There from the start, as those of the scrape are.
    counter!("server_body_refused_total").absolute(0);
    describe_gauge!("server_in_flight", "requests of work that are being answered");
    for (name, help) in [
        ("server_request_seconds", "from the head of a request to its answer"),
        ("server_queue_seconds", "a request's wait for a stream"),
        ("server_gpu_seconds", "time on the device, of a request or of a batch"),
        ("server_batch_requests", "requests in a batch"),
    ] {
        describe_histogram!(name, help);
    }
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP).await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

/// A request of work came in: 1, or is answered: -1.
pub(crate) fn in_flight(by: f64) {
    gauge!("server_in_flight").increment(by);
}

/// A request was answered with `status`, or its client left.
pub(crate) fn answered(route: &'static str, status: String, took: Duration) {
    counter!("server_requests_total", "route" => route, "status" => status).increment(1);
    histogram!("server_request_seconds", "route" => route).record(took);
}

/// The budget had no room for the body of a request in time.
pub(crate) fn body_refused() {
    counter!("server_body_refused_total").increment(1);
}

/// A request got its stream.
pub(crate) fn queued(waited: Duration) {
    histogram!("server_queue_seconds").record(waited);
}

/// The device was at work on it for so long.
pub(crate) fn on_device(route: &'static str, gpu: Duration) {
    histogram!("server_gpu_seconds", "route" => route).record(gpu);
}

/// Requests were gathered.
pub(crate) fn batch(requests: usize) {
    histogram!("server_batch_requests").record(requests as f64);
}

/// The text for Prometheus.
pub(crate) fn scrape(app: &App) -> String {
    let (pool, device, embed) = (app.pool.stats(), app.device.stats(), app.embedder.stats());
    let (bodies, answers) = app.budget.used();
    for (name, value, help) in [
        ("server_pool_in_flight", pool.in_flight as u64, "requests on the device"),
        ("server_pool_waiting", pool.waiting as u64, "requests that wait for a stream"),
        ("server_embed_waiting", embed.waiting as u64, "requests that wait for a batch"),
        ("server_body_bytes", bodies as u64, "reserved for bodies"),
        ("server_answer_bytes", answers as u64, "reserved for answers"),
        ("server_ready", app.not_ready().is_none().into(), "1 while readiness is"),
        ("server_healthy", app.health.is_good().into(), "1 while the device runs launches in time"),
        ("server_device_operations_in_flight", device.in_flight, "operations on the device"),
        ("server_device_allocated_bytes", device.allocated_bytes, "device memory"),
        ("server_device_allocations", device.allocations, "buffers"),
        (
            "server_device_pending_bytes",
            device.pending_bytes,
            "device memory that waits to be freed",
        ),
        ("server_device_lent_bytes", device.lent_bytes, "host memory lent to operations"),
        ("server_device_pinned_bytes", device.pinned_bytes, "pinned memory"),
        ("server_device_pinned_used_bytes", device.pinned_used_bytes, "pinned memory in use"),
    ] {
        describe_gauge!(name, help);
        gauge!(name).set(value as f64);
    }
    let dropped = app.dropped.dropped_lines() as u64;
    let expired =
        "requests that waited until it was too late: 429 while their time is not over, then 503";
    for (name, value, help) in [
        ("server_pool_refused_total", pool.refused, "requests that the pool refused: 429"),
        ("server_pool_expired_total", pool.expired, expired),
        ("server_embed_refused_total", embed.refused, "requests that the batcher refused: 429"),
        ("server_embed_expired_total", embed.expired, expired),
        ("server_device_wake_ups_total", device.wake_ups, "tasks woken by the device's poller"),
        ("server_log_lines_dropped_total", dropped, "lines of the log that nobody read in time"),
    ] {
        describe_counter!(name, help);
        counter!(name).absolute(value);
    }
    app.metrics.render()
}
