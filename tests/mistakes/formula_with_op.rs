// error[E0277]: `Op<DeviceBuffer<f32>>` is not device memory that can be read
// stream.transform(transform!(|x| 2.0 * x), (&x,), y).queued()
// of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, y: &mut DeviceBuffer<f32>) -> Result<()> {
    let x = stream.full(4, 1.0f32);
    stream.transform(transform!(|x| 2.0 * x), (&x,), y).queued()
}
