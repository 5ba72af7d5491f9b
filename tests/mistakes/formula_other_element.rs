// error[E0277]: `&mut DeviceBuffer<f32>` cannot be written by a formula over `f64`
// stream.transform(transform!(|x| 2.0 * x), (x,), y).queued()

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, x: &DeviceBuffer<f64>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    stream.transform(transform!(|x| 2.0 * x), (x,), y).queued()
}
