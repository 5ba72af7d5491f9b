// error[E0277]: `Vec<f32>` is not device memory that can be read
// stream.transform(transform!(|x| 2.0 * x), (&x,), y).queued()

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, x: Vec<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    stream.transform(transform!(|x| 2.0 * x), (&x,), y).queued()
}
