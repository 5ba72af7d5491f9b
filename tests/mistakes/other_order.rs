// compiles
//

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32]);
    host = twin;
    launch = LaunchConfig::for_elements(x.len());
}
fn twin(_: &Grid, _: &mut [f32]) {}
