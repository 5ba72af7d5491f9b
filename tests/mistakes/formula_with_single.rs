// error[E0277]: `f32` cannot be computed with in a formula
// stream.transform(transform!(|x| x.max(0.0f32)), (x,), y).queued()

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    stream.transform(transform!(|x| x.max(0.0f32)), (x,), y).queued()
}
