// error: kernel `scale`: `entry` lists types, and there is no type parameter
// kernel! {
use gpu_await::{Grid, LaunchConfig, kernel};

kernel! {
    pub unsafe fn scale(a: f32, x: &mut [f32]);
    launch = LaunchConfig::for_elements(x.len());
    entry = [f32: "scale_f32"];
    host = twin;
}
fn twin(_: &Grid, _: f32, _: &mut [f32]) {}
