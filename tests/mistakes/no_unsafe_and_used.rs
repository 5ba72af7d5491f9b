// error: kernel `k`: write `unsafe fn`: a declaration vouches for the kernel's types and bounds
// kernel! {

use gpu_await::*;

kernel! {
    fn k(x: &mut [f32]);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32]) {}
fn call(s: &Stream, x: &mut DeviceBuffer<f32>) -> Result<()> {
    k::load_blocking(&s.device())?.launch(s, x).queued()
}
