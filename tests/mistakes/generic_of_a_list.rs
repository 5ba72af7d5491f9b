// compiles
// 
use gpu_await::{Grid, LaunchConfig, kernel};

kernel! {
    /// Declared for a list.
    pub unsafe fn scale<T>(a: T, x: &mut [T]);
    launch = LaunchConfig::for_elements(x.len());
    entry = [f32: "scale_f32", [f32; 2]: "scale_f32x2",];
    host = twin;
}
fn twin<T>(_: &Grid, _: T, _: &mut [T]) {}
pub async fn f(device: &gpu_await::Device) -> gpu_await::Result<()> {
    let scale = scale::<[f32; 2]>::load(device).await?;
    let mut x = device.zeros::<[f32; 2]>(4).queued()?;
    scale.launch(&device.current_stream(), [1.0, 2.0], &mut x).await
}
