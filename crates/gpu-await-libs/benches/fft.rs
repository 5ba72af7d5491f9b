//! Are planned transforms as fast as those of others? `fft_cupy.py` prints CuPy's.
//!
//! Transforms of complex `f32`, out of place, launched without a wait in between: `fft.SHAPE.us` is the time of one, the
//! median of 11 rounds; `fft.call.us` how long the thread is busy for a small one. Without cuFFT it prints nothing.

#[path = "../../../benches/measure.rs"]
mod measure;

fn main() {
    use std::time::Instant;

    use gpu_await_libs::{Complex, Fft};
    use measure::{Sorted, print, rounds, us};

    let device = measure::device();
    let fft = match Fft::load_blocking(&device) {
        Ok(fft) => fft,
        Err(error) => return eprintln!("# nothing to compare: {error}"),
    };
    if !measure::on_cuda() {
        return eprintln!("# nothing to compare on the host device");
    }
    let stream = device.stream().expect("a stream");
    let shapes: &[(&str, &[usize], usize, usize)] = &[
        ("1m", &[1 << 20], 1, 200),
        ("4096x64", &[4096], 64, 200),
        ("256_256_256", &[256, 256, 256], 1, 50),
    ];
    for (name, extents, batch, launches) in shapes {
        let plan = fft.complex::<f32>(extents).batch(*batch).plan_blocking().expect("a plan");
        let len = extents.iter().product::<usize>() * batch;
        let x = stream.full(len, Complex::new(0.5f32, 0.25)).queued().expect("memory");
        let mut y = stream.empty(len).queued().expect("memory");
        let launches = rounds(*launches, 1);
        let mut times = Vec::new();
        for _ in 0..rounds(13, 2) {
            stream.synchronize().expect("completes");
            let start = Instant::now();
            for _ in 0..launches {
                plan.forward(&stream, &x, &mut y).queued().expect("is launched");
            }
            stream.synchronize().expect("completes");
            times.push(us(start.elapsed()) / launches as f64);
        }
        print(&format!("fft.{name}.us"), Sorted::new(times.split_off(2)).p50(), "us");
    }
    let plan = fft.complex::<f32>(&[64]).plan_blocking().expect("a plan");
    let x = stream.full(64, Complex::new(0.5f32, 0.25)).queued().expect("memory");
    let mut y = stream.empty(64).queued().expect("memory");
    let mut times = Vec::new();
    for _ in 0..rounds(200, 2) {
        let start = Instant::now();
        for _ in 0..100 {
            plan.forward(&stream, &x, &mut y).queued().expect("is launched");
        }
        times.push(us(start.elapsed()) / 100.0);
        stream.synchronize().expect("completes");
    }
    print("fft.call.us", Sorted::new(times).p50(), "us");
}
