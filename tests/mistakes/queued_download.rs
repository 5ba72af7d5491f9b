// error[E0277]: `PinnedBuffer<f32>` is a host value: it is not good before the device got there
// fn f(s: &Stream, x: &DeviceBuffer<f32>) { let _ = s.download

use gpu_await::*;

fn f(s: &Stream, x: &DeviceBuffer<f32>) { let _ = s.download(x).queued(); }
