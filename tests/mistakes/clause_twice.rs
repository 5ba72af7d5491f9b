// error: kernel `k`: there are two clauses `host`: remove one
// kernel! {

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32]);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32]) {}
