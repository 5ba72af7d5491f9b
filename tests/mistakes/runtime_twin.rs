// error[E0631]
// fn f(d: &Device) { let _ = Kernel::<(InOut<f32>, u32)>::host

use gpu_await::*;

fn f(d: &Device) { let _ = Kernel::<(InOut<f32>, u32)>::host(d, "k", |_: &Grid, x: &[f32], n: u32| ()); }
