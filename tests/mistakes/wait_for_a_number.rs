// error[E0277]: a stream cannot wait for `{integer}`
// fn f(s: &Stream) { s.wait(&3).abandon() }

use gpu_await::*;

fn f(s: &Stream) { s.wait(&3).abandon() }
