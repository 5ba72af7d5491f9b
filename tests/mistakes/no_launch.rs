// error[E0061]
// k.launch(s, x).queued()

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32]);
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32]) {}
fn call(k: &k, s: &Stream, x: &mut DeviceBuffer<f32>) -> Result<()> {
    k.launch(s, x).queued()
}
