// error[E0277]: `Op<DeviceBuffer<f32>>` is not device memory that can be read as `f32`
// s.launch(k, LaunchConfig::for_elements(4), (&x, y)).queued()
// of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does

use gpu_await::{DeviceBuffer, In, InOut, Kernel, LaunchConfig, Result, Stream};

fn call(k: &Kernel<(In<f32>, InOut<f32>)>, s: &Stream, y: &mut DeviceBuffer<f32>) -> Result<()> {
    let x = s.full(4, 1.0f32);
    s.launch(k, LaunchConfig::for_elements(4), (&x, y)).queued()
}
