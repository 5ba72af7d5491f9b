// error: kernel `k`: `x` is a pointer: declare the array, as `&[T]`, `&mut [T]` or `Out<[T]>`; the kernel receives its address
// kernel! {

use gpu_await::*;

kernel! {
    unsafe fn k(x: *const f32, y: &mut [f32]);
    launch = LaunchConfig::for_elements(y.len());
    host = twin;
}
fn twin(_: &Grid, _: *const f32, _: &mut [f32]) {}
