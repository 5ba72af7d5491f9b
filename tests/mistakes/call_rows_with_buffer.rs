// error[E0308]: mismatched types
// scale.launch(stream, y)
use gpu_await::{Grid, LaunchConfig, kernel};

kernel! {
    pub unsafe fn scale(x: &mut [[f32]]);
    launch = LaunchConfig::for_elements(x.rows());
    ptx = "";
}
pub fn f(scale: &scale, stream: &gpu_await::Stream, y: &mut gpu_await::DeviceBuffer<f32>) {
    scale.launch(stream, y).abandon();
}
