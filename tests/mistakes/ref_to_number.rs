// error: kernel `k`: `a: &f32` is not an array: an array is `&[T]`, `&mut [T]` or `Out<[T]>`, and a value is passed as it is, without `&`
// kernel! {

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32], a: &f32);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32], _: &f32) {}
