// error: kernel `k`: `config` is not a clause: there are `where`, `launch`, `ptx`, `cuda`, `entry`, `programmatic` and `host`, as in `host = twin;`
// kernel! {

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32]);
    config = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32]) {}
