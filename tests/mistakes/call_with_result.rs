// error[E0277]: `Result<DeviceBuffer<f32>, gpu_await::Error>` is not device memory that can be read as `f32`
// axpy.launch(s, 2.0, &x, &mut y).queued()
// of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does

use gpu_await::{DeviceBuffer, Result, Stream, kernels};

fn call(axpy: &kernels::axpy, s: &Stream, mut y: DeviceBuffer<f32>) -> Result<()> {
    let x = s.full(4, 1.0f32).queued();
    axpy.launch(s, 2.0, &x, &mut y).queued()
}
