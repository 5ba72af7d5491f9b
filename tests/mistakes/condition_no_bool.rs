// error[E0308]
// unsafe fn k(x: &mut [f32]) where x.len();

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32]) where x.len();
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32]) {}
