// error: kernel `k`: expected parameters `name: type`, separated by `,`, at `mut x: &mut [f32],`
// kernel! {

use gpu_await::*;

kernel! {
    unsafe fn k(mut x: &mut [f32]);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32]) {}
