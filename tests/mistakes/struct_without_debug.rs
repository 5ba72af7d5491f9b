// error[E0277]
// unsafe fn k(x: &mut [f32], p: Params);

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32], p: Params);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Params { a: f32 }
fn twin(_: &Grid, _: &mut [f32], _: Params) {}
