// error: kernel `k`: `x: [f32]` is an array by value: say `&[T]`, `&mut [T]` or `Out<[T]>`
// kernel! {

use gpu_await::*;

kernel! {
    unsafe fn k(x: [f32]);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32]) {}
