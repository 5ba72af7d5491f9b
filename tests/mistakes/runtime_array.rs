// error[E0277]: `&mut [f32]` is not a type of kernel parameters
// fn f(m: &Module) { let _ = unsafe { m.kernel::<(&mut [f32],)

use gpu_await::*;

fn f(m: &Module) { let _ = unsafe { m.kernel::<(&mut [f32],)>("k") }; }
