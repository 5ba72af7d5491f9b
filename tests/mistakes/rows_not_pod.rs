// error[E0277]: `bool` is not plain data that device memory or a kernel can hold
// x: &mut [[bool]]
use gpu_await::{Grid, LaunchConfig, kernel};

kernel! {
    pub unsafe fn scale(x: &mut [[bool]]);
    launch = LaunchConfig::for_elements(x.rows());
    ptx = "";
}
