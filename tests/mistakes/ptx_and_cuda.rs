// error: kernel `scale`: there is code for GPUs twice
// kernel! {
use gpu_await::{Grid, LaunchConfig, kernel};

kernel! {
    pub unsafe fn scale(a: f32, x: &mut [f32]);
    launch = LaunchConfig::for_elements(x.len());
    ptx = "";
    cuda = "";
}
