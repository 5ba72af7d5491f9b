// compiles
// 

use gpu_await::{DeviceBuffer, Result, Stream};
use gpu_await_algorithms::{Algorithms, transform};

fn call(stream: &Stream, a: f32, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    const HALF: f64 = 0.5;
    let blend = transform!(|a, x, y| {
        let nearer = a * x + (1.0 - a) * y;
        nearer.gt(1).select(HALF * nearer, nearer.max(0.0))
    });
    stream.transform_in_place(blend, (a, x), y).queued()
}
