// error[E0277]: `Op<DeviceBuffer<f32>>` is not device memory that can be written as
// s.fill(&mut y, 1.0).queued()
// of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does

use gpu_await::{Result, Stream};

fn call(s: &Stream) -> Result<()> {
    let mut y = s.zeros::<f32>(4);
    s.fill(&mut y, 1.0).queued()
}
