//! What `/status` tells the page, and the task that asks the device whether it has work.
#![forbid(unsafe_code)]

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use crate::app::{App, Shared};

/// How often the device is asked whether it has work, for the share of time in which it had.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The state of the service, as JSON.
pub(crate) fn of(app: &App) -> Value {
    let (pool, device, embed) = (app.pool.stats(), app.device.stats(), app.embedder.stats());
    let (second, ten_seconds, minute) = app.window.summaries();
    let streams: Vec<Value> = pool
        .streams
        .iter()
        .map(|stream| {
            json!({
                "id": stream.id, "device": stream.device, "priority": stream.priority,
                "in_flight": stream.in_flight, "backlog": stream.backlog,
            })
        })
        .collect();
    json!({
        "device": app.device.to_string(),
        "ready": app.not_ready().is_none(),
        "reason": app.not_ready(),
        "uptime_s": app.window.uptime().as_secs_f64(),
        "results": app.results.load(Ordering::Relaxed),
        "errors": app.errors.load(Ordering::Relaxed),
        "pool": {
            "in_flight": pool.in_flight, "max_in_flight": pool.max_in_flight,
            "waiting": pool.waiting, "max_waiting": pool.max_waiting,
            "granted": pool.granted,
        },
        "refused": pool.refused + embed.refused,
        "expired": pool.expired + embed.expired,
        "streams": streams,
        "embed": {
            "waiting": embed.waiting, "batches": embed.batches, "requests": embed.requests,
        },
        "memory": {
            "allocations": device.allocations, "allocated_bytes": device.allocated_bytes,
            "pending_bytes": device.pending_bytes, "lent_bytes": device.lent_bytes,
            "pinned_bytes": device.pinned_bytes, "pinned_used_bytes": device.pinned_used_bytes,
        },
        "operations_in_flight": device.in_flight,
        "second": second,
        "ten_seconds": ten_seconds,
        "minute": minute,
    })
}

/// Looks at the device now and then while the service lives.
pub(crate) async fn look(app: Weak<Shared>) {
    let mut every = tokio::time::interval(LOOK_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    loop {
        every.tick().await;
        let Some(app) = app.upgrade() else { return };
        app.window.look(app.device.stats().in_flight > 0);
    }
}
