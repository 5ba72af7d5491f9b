// error[E0599]: no method named `queued` found for enum `Result<T, E>`
// q.fill(y, 1.0).queued()

use gpu_await::{DeviceBuffer, Result, Stream};

fn call(s: &Stream, y: &mut DeviceBuffer<f32>) -> Result<()> {
    s.batch(|q| q.fill(y, 1.0).queued()).queued()
}
