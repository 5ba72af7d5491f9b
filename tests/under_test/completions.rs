//! Runs a test body with each way of learning of completions, on the device under test.

use gpu_await::{Device, Result, testing};

use super::modes;

/// Runs `body` once a mode, each on a device of its own.
pub(crate) async fn each<F: Future<Output = Result<()>>>(body: impl Fn(Device) -> F) {
    for mode in modes::ALL {
        if let Err(error) = body(testing::device_with(mode)).await {
            panic!("{mode:?}: {error}");
        }
    }
}
