// error: kernel `k`: `x: Out<f32>` is not an array: say `Out<[f32]>`, also for one element
// kernel! {

use gpu_await::*;

kernel! {
    unsafe fn k(x: Out<f32>);
    launch = LaunchConfig::new(1, 1);
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32]) {}
