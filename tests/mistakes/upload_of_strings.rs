// error[E0277]: `String` is not plain data that device memory or a kernel can hold
// fn f(s: &Stream) { s.upload(vec![String::new()]).abandon() }

use gpu_await::*;

fn f(s: &Stream) { s.upload(vec![String::new()]).abandon() }
