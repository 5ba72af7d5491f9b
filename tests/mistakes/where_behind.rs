// compiles
//

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32]);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
    where x.len() == 4;
}
fn twin(_: &Grid, _: &mut [f32]) {}
