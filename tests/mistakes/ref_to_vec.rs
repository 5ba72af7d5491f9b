// error: kernel `k`: `x: &Vec<f32>` is not an array: an array is `&[T]`, `&mut [T]` or `Out<[T]>`, and a value is passed as it is, without `&`
// kernel! {

use gpu_await::*;

kernel! {
    unsafe fn k(x: &Vec<f32>, y: &mut [f32]);
    launch = LaunchConfig::for_elements(y.len());
    host = twin;
}
fn twin(_: &Grid, _: &[f32], _: &mut [f32]) {}
