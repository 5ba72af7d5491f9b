// error: kernel `scale`: list the types that `T` may be
// kernel! {
use gpu_await::{Grid, LaunchConfig, kernel};

kernel! {
    pub unsafe fn scale<T>(a: T, x: &mut [T]);
    launch = LaunchConfig::for_elements(x.len());
    host = twin;
}
fn twin(_: &Grid, _: f32, _: &mut [f32]) {}
