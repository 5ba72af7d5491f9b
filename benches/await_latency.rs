//! How much longer is an await than a blocking wait?
//!
//! Compared in one process: `cuStreamSynchronize` in a plain thread, and `.await` in a task spawned
//! on four tokio workers. Prints `name value unit`; on the host device (a smoke test) there is no raw
//! baseline.

#[path = "raw/cuda.rs"]
mod raw;

use std::time::{Duration, Instant};

use gpu_await::{Completion, DeviceKind, kernels, testing};

fn percentile(samples: &mut [f64], p: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let last = samples.len() - 1;
    samples[(last as f64 * p).round() as usize]
}

fn report(name: &str, samples: &mut [f64], minus_us: f64) {
    println!("{name}.p50_us {:.2} us", percentile(samples, 0.5) - minus_us);
    println!("{name}.p99_us {:.2} us", percentile(samples, 0.99) - minus_us);
}

/// CPU time of this process.
fn cpu() -> Duration {
    // SAFETY: all zeros is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is live and of the type that the call fills.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let time = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec as u64) + Duration::from_micros(t.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .enable_all()
        .build()
        .expect("tokio");
    let smoke = testing::device().kind() == DeviceKind::Host;
    let rounds = if smoke { 50 } else { 5000 };
    for mode in [Completion::Adaptive, Completion::Event, Completion::Word, Completion::Callback] {
        let prefix = match mode {
            Completion::Adaptive => String::new(),
            other => format!("{other:?}.").to_lowercase(),
        };
        for (what, ns) in [
            ("latency", 0),
            ("overhead_50us", 50_000),
            ("overhead_200us", 200_000),
            ("overhead_1000us", 1_000_000),
        ] {
            let rounds = if ns > 100_000 { rounds / 10 } else { rounds };
            if !smoke {
                let raw = raw::Raw::new();
                let mut samples = Vec::new();
                for _ in 0..rounds {
                    let start = Instant::now();
                    if ns == 0 {
                        raw.launch_empty()
                    } else {
                        raw.launch_spin(ns)
                    }
                    raw.synchronize();
                    samples.push(start.elapsed().as_secs_f64() * 1e6);
                }
                report(&format!("{prefix}{what}.sync"), &mut samples, ns as f64 / 1e3);
            }
            let device = testing::device_with(mode);
            let (mut samples, cores) = runtime.block_on(async move {
                tokio::spawn(async move {
                    let stream = device.stream().unwrap();
                    let empty = kernels::empty::load(&device).await.unwrap();
                    let spin = kernels::spin::load(&device).await.unwrap();
                    let mut samples = Vec::new();
                    let (cpu_start, wall_start) = (cpu(), Instant::now());
                    for _ in 0..rounds {
                        let start = Instant::now();
                        if ns == 0 {
                            empty.launch(&stream).await.unwrap();
                        } else {
                            spin.launch(&stream, ns).await.unwrap();
                        }
                        samples.push(start.elapsed().as_secs_f64() * 1e6);
                    }
                    let cores =
                        (cpu() - cpu_start).as_secs_f64() / wall_start.elapsed().as_secs_f64();
                    (samples, cores)
                })
                .await
                .unwrap()
            });
            report(&format!("{prefix}{what}.await"), &mut samples, ns as f64 / 1e3);
            println!("{prefix}{what}.await.cores {cores:.3} cores");
        }
    }
}
