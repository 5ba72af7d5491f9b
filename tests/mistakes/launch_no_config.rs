// error[E0308]
// launch = x.len();

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32]);
    launch = x.len();
    host = twin;
}
fn twin(_: &Grid, _: &mut [f32]) {}
