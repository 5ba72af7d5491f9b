// error[E0277]: `[f32; 2]` is not a number that memory can be filled with ones of
// fn f(s: &Stream) { s.ones::<[f32; 2]>(3).abandon() }

use gpu_await::*;

fn f(s: &Stream) { s.ones::<[f32; 2]>(3).abandon() }
