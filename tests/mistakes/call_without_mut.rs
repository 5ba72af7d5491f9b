// error[E0308]
// axpy.launch(s, 2.0, x, &y).queued()

use gpu_await::*;

kernel! {
    unsafe fn axpy(a: f32, x: &[f32], y: &mut [f32], n: u64 = y.len()) where x.len() == y.len();
    launch = LaunchConfig::for_elements(y.len());
    host = twin;
}
fn twin(_: &Grid, _: f32, _: &[f32], _: &mut [f32], _: u64) {}

fn call(axpy: &axpy, s: &Stream, x: &DeviceBuffer<f32>, mut y: DeviceBuffer<f32>) -> Result<()> {
    axpy.launch(s, 2.0, x, &y).queued()
}
