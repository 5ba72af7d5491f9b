// error[E0277]: `Owned` is not plain data that device memory or a kernel can hold
// fn scale<T>
use gpu_await::{Grid, LaunchConfig, kernel};

#[derive(Debug)]
pub struct Owned(String);
kernel! {
    pub unsafe fn scale<T>(x: &mut [T]);
    launch = LaunchConfig::for_elements(x.len());
    entry = [Owned: "scale_owned"];
    ptx = "";
}
