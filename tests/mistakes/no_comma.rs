// error: kernel `k`: expected parameters `name: type`, separated by `,`, at `a: f32 x: &mut [f32],`
// kernel! {

use gpu_await::*;

kernel! {
    unsafe fn k(a: f32 x: &mut [f32]);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: f32, _: &mut [f32]) {}
