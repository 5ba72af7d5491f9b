// error: kernel `scale`: a kernel has one type parameter at most, without bounds
// kernel! {
use gpu_await::{Grid, LaunchConfig, kernel};

kernel! {
    pub unsafe fn scale<T: Copy>(a: T, x: &mut [T]);
    launch = LaunchConfig::for_elements(x.len());
    entry = [f32: "scale_f32"];
    host = twin;
}
fn twin(_: &Grid, _: f32, _: &mut [f32]) {}
