//! Whether the device still works: a launch now and then, on a stream of its own and under a deadline of its own.
//!
//! It needs no permit, so a full queue is not ill health. While a launch is late no other one is made: a device that
//! hangs is not given more and more work.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gpu_await::{ErrorKind, Stream};
use tokio::time::{sleep, timeout};

use crate::model::Model;

/// Between two launches.
const EVERY: Duration = Duration::from_millis(500);

/// What the last launch said.
pub(crate) struct Health(AtomicBool);

impl Health {
    /// Starts the task that launches, waits up to `limit` for the device, and begins again. It ends with the device.
    pub(crate) fn watch(model: Arc<Model>, stream: Stream, limit: Duration) -> Arc<Health> {
        // The device has just loaded the model.
        let health = Arc::new(Health(AtomicBool::new(true)));
        let watched = health.clone();
        tokio::spawn(async move {
            loop {
                let mut launch = std::pin::pin!(model.embed(&stream, &[&[0]]));
                let result = match timeout(limit, &mut launch).await {
                    Ok(result) => result,
                    Err(_) => {
                        watched.set(false, "the device has not run a launch in time");
                        launch.await
                    }
                };
                match result.map(drop) {
                    Ok(()) => watched.set(true, "the device ran a launch"),
                    Err(error) if error.kind() == ErrorKind::Closed => return,
                    Err(error) => watched.set(false, &error.to_string()),
                }
                sleep(EVERY).await;
            }
        });
        health
    }

    pub(crate) fn is_good(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    fn set(&self, is_good: bool, why: &str) {
        if self.0.swap(is_good, Ordering::SeqCst) != is_good {
            tracing::warn!(is_good, why, "health");
        }
    }
}
