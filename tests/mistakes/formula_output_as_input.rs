// error[E0502]: cannot borrow `*y` as mutable because it is also borrowed as immutable
// stream.transform(transform!(|y| 2.0 * y), (&*y,), y).queued()

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, y: &mut DeviceBuffer<f32>) -> Result<()> {
    stream.transform(transform!(|y| 2.0 * y), (&*y,), y).queued()
}
