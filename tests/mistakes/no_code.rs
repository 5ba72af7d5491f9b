// error: kernel `k`: there is no code: add `ptx = ..;` or `cuda = ..;` for GPUs, `host = ..;` for host devices, or both
// kernel! {

use gpu_await::*;

kernel! {
    unsafe fn k(x: &mut [f32]);
    launch = LaunchConfig::for_elements(x.len());
}
