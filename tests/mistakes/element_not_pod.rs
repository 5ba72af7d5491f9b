// error[E0277]: `bool` is not plain data that device memory or a kernel can hold
// unsafe fn k(x: &mut [bool]);

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [bool]);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: &mut [bool]) {}
