// error[E0425]
// unsafe fn k(x: &mut [f32], p: flot);

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32], p: flot);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32], _: f32) {}
