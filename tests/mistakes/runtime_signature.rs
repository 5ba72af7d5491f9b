// error[E0277]: `bool` is not a type of kernel parameters
// fn f(m: &Module) { let _ = unsafe { m.kernel::<(InOut<f32>, 

use gpu_await::*;

fn f(m: &Module) { let _ = unsafe { m.kernel::<(InOut<f32>, bool)>("k") }; }
