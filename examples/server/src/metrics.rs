//! What `/metrics` tells Prometheus. The recorder has no listener of its own: the service renders it.
#![forbid(unsafe_code)]

use ::metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

use crate::app::App;

/// Makes the recorder the process's, and keeps it in order. Call it once, inside the runtime.
///
/// # Errors
/// There is another one.
pub(crate) fn install() -> Result<PrometheusHandle, BuildError> {
    // 10 µs to 10 s, three a decade.
    let decade = |decade| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(decade));
    let seconds: Vec<f64> = (-5..=0).flat_map(decade).chain([10.0]).collect();
    let requests = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &seconds)?
        .set_buckets_for_metric(Matcher::Suffix("_requests".to_owned()), &requests)?
        .install_recorder()?;
    for (name, help) in [
        ("server_request_seconds", "from the head of a request to its answer"),
        ("server_queue_seconds", "a request's wait for a stream"),
        ("server_gpu_seconds", "time on the device, of a request or of a batch"),
        ("server_batch_requests", "requests in a batch"),
    ] {
        describe_histogram!(name, help);
    }
    for (name, help) in [
        ("server_requests_total", "answers made; status=\"gone\": the client left first"),
        (
            "server_connections_ended_total",
            "by end; those of `malformed` and `head_too_large` got a 400 or 431 that is in no other metric",
        ),
    ] {
        describe_counter!(name, help);
    }
    for (name, help) in [
        ("server_body_refused_total", "requests whose body had no room in the budget in time: 429"),
        (
            "server_connections_full_total",
            "times that there were as many connections as may be: further clients wait",
        ),
    ] {
        describe_counter!(name, help);
        // There from the start, as those of the scrape are.
        counter!(name).absolute(0);
    }
    for (name, help) in [
        ("server_in_flight", "requests of work that are being answered"),
        ("server_connections", "open connections"),
    ] {
        describe_gauge!(name, help);
    }
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            // Samples are counted into their buckets also when nobody scrapes.
            tokio::time::sleep(std::time::Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

/// The text for Prometheus.
pub(crate) fn scrape(app: &App) -> String {
    let (bodies, answers) = app.budget.used();
    let gauges = [
        ("server_body_bytes", bodies as u64, "reserved for bodies"),
        ("server_answer_bytes", answers as u64, "reserved for answers"),
        ("server_ready", app.not_ready().is_none().into(), "1 while readiness is"),
        ("server_healthy", app.compute.state().is_live.into(), "1 while health is"),
    ];
    for (name, value, help) in app.compute.gauges().into_iter().chain(gauges) {
        describe_gauge!(name, help);
        gauge!(name).set(value as f64);
    }
    let dropped = app.dropped.dropped_lines() as u64;
    let dropped =
        ("server_log_lines_dropped_total", dropped, "lines of the log that nobody read in time");
    for (name, value, help) in app.compute.counters().into_iter().chain([dropped]) {
        describe_counter!(name, help);
        counter!(name).absolute(value);
    }
    app.metrics.render()
}
