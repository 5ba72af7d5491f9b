//! Whether the device still works: a launch now and then, on a stream of its own and under a deadline of its own.
//!
//! It needs no permit, so a full queue is not ill health. While a launch is late no other one is made: a device that
//! hangs is not given more and more work.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gpu_await::{ErrorKind, Stream};

use crate::model::Model;

/// Between two launches.
const EVERY: Duration = Duration::from_millis(500);

/// What the last launch said.
pub(crate) struct Health(AtomicBool);

impl Health {
    /// The device has just loaded the model.
    pub(crate) fn new() -> Arc<Health> {
        Arc::new(Health(AtomicBool::new(true)))
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

/// Launches, waits up to `limit` for the device, and again.
pub(crate) async fn watch(health: Arc<Health>, model: Arc<Model>, stream: Stream, limit: Duration) {
    loop {
        let mut launch = std::pin::pin!(model.embed(&stream, &[&[0]]));
        let result = match tokio::time::timeout(limit, &mut launch).await {
            Ok(result) => result,
            Err(_) => {
                health.set(false, "the device has not run a launch in time");
                launch.await
            }
        };
        match result.map(drop) {
            Ok(()) => health.set(true, "the device ran a launch"),
            Err(error) if error.is_device_lost() => return health.set(false, "the device is lost"),
            // The server ends.
            Err(error) if error.kind() == ErrorKind::Closed => return,
            Err(error) => health.set(false, &error.to_string()),
        }
        tokio::time::sleep(EVERY).await;
    }
}
