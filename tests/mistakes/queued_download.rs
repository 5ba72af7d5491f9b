// error[E0277]: `PinnedBuffer<f32>` is read by the host, and only valid when the operation is complete: await it
// fn f(s: &Stream, x: &DeviceBuffer<f32>) { let _ = s.download

use gpu_await::*;

fn f(s: &Stream, x: &DeviceBuffer<f32>) { let _ = s.download(x).queued(); }
