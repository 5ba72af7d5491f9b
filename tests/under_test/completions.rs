//! Runs a test body with each way of learning of completions, on the device under test.

use gpu_await::{Completion, Device, Result, testing};

pub(crate) const ALL: [Completion; 4] =
    [Completion::Adaptive, Completion::Event, Completion::Word, Completion::Callback];

/// Runs `body` once a mode, each on a device of its own.
pub(crate) async fn each<F: Future<Output = Result<()>>>(body: impl Fn(Device) -> F) {
    for mode in ALL {
        if let Err(error) = body(testing::device_with(mode)).await {
            panic!("{mode:?}: {error}");
        }
    }
}
