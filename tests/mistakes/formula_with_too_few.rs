// error[E0277]: `(&DeviceBuffer<f32>,)` are not the arguments of a formula over
// stream.transform(transform!(|a, x| a * x), (x,), y).queued()

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    stream.transform(transform!(|a, x| a * x), (x,), y).queued()
}
