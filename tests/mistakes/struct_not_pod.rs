// error[E0277]: `Params` is not plain data that device memory or a kernel can hold
// unsafe fn k(x: &mut [f32], p: Params);

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32], p: Params);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Params { a: f32 }
fn twin(_: &Grid, _: &mut [f32], _: Params) {}
