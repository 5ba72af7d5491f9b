//! Waits until a device has given everything back.

use std::time::{Duration, Instant};

use gpu_await::Device;

const LIMIT: Duration = Duration::from_secs(10);

/// Waits until nothing is in flight, lent, retired or allocated.
pub(crate) async fn settled(device: &Device) {
    let end = Instant::now() + LIMIT;
    loop {
        let stats = device.stats();
        if stats.in_flight + stats.lent_bytes + stats.pending_bytes + stats.allocations == 0 {
            return;
        }
        assert!(Instant::now() < end, "never given back: {stats:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
