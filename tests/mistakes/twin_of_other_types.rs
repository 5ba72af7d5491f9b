// error[E0308]
// host = twin;

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32]);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: &mut [f64]) {}
