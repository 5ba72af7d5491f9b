//! What a pool remembers of permits that were held for long.

use std::time::{Duration, Instant};

use gpu_await::testing::Gate;
use gpu_await::{Result, StreamPool};

/// Takes a permit, and gives it back when the device has been busy with it for so long.
pub(crate) async fn hold_for(pool: &StreamPool, time: Duration) -> Result<()> {
    let stream = pool.acquire().await?;
    let gate = Gate::close(&stream)?;
    drop(stream);
    let taken = Instant::now();
    while taken.elapsed() < time {
        tokio::task::yield_now().await;
    }
    gate.open();
    Ok(())
}
