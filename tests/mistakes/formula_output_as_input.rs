// error[E0505]: cannot move out of `y` because it is borrowed
// stream.transform(transform!(|y| 2.0 * y), (&*y,), y).queued()

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, y: &mut DeviceBuffer<f32>) -> Result<()> {
    stream.transform(transform!(|y| 2.0 * y), (&*y,), y).queued()
}
