// error[E0277]: `bool` is not plain data that device memory or a kernel can hold
// unsafe fn k(x: &mut [f32], up: bool);

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32], up: bool);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32], _: bool) {}
