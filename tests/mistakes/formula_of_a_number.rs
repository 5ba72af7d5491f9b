// error[E0277]: a formula of `transform!` cannot end with `{float}`
// stream.transform(transform!(|_x| 1.0), (x,), y).queued()

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    stream.transform(transform!(|_x| 1.0), (x,), y).queued()
}
