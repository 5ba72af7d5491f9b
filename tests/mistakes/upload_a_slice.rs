// error[E0277]: `&[f32]` is not host data of `_` that an upload can keep
// fn f(s: &Stream, x: &[f32]) { s.upload(x).abandon() }

use gpu_await::*;

fn f(s: &Stream, x: &[f32]) { s.upload(x).abandon() }
