// error[E0277]: `Op<DeviceBuffer<f32>>` is not device memory of
// s.sum(&x)
// of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does

use gpu_await::{Op, Stream};
use gpu_await_algorithms::Algorithms;

fn call(s: &Stream) -> Op<f32> {
    let x = s.full(4, 1.0f32);
    s.sum(&x)
}
