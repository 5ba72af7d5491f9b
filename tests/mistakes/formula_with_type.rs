// error: `transform!` takes names between bars and one expression
// stream.transform(transform!(|x: f32| 2.0 * x), (x,), y).queued()

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    stream.transform(transform!(|x: f32| 2.0 * x), (x,), y).queued()
}
