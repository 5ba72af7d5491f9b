// error[E0277]: a batch cannot return `std::ops::Range<usize>`
// fn f

use gpu_await::*;

fn f(s: &Stream) { s.batch(|_| Ok(0..3_usize)).abandon() }
