// error[E0434]: can't capture dynamic environment in a fn item
// stream.transform(transform!(|x| a * x), (x,), y).queued()

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, a: f32, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    stream.transform(transform!(|x| a * x), (x,), y).queued()
}
