// error[E0277]: a kernel cannot be launched on `{integer}`
// fn f(k: &axpy, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f

use gpu_await::*;

kernel! {
    unsafe fn axpy(a: f32, x: &[f32], y: &mut [f32], n: u64 = y.len()) where x.len() == y.len();
    launch = LaunchConfig::for_elements(y.len());
    host = twin;
}
fn twin(_: &Grid, _: f32, _: &[f32], _: &mut [f32], _: u64) {}

fn f(k: &axpy, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) { let _ = k.launch(&3, 2.0, x, y); }
