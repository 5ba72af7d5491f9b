//! How much longer is an await than a blocking wait?
//!
//! Compared in one process: `cuStreamSynchronize` in a plain thread (`sync`), and `.await` in a task
//! spawned on four tokio workers (`await`), for an empty kernel (`latency`: all of the time) and for
//! kernels of known length (`overhead_*`: the time beyond the kernel's own). `cores` is the CPU time
//! of the process while it awaits, submissions included.
//!
//! With the argument `all-modes` the other ways of learning of completions follow, by their names.

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::time::Instant;

use gpu_await::{Completion, Device, kernels};
use measure::{Sorted, Usage, print, rounds, us};
use raw::Raw;
use tokio::runtime::Runtime;

/// A kernel's own time and how often it is awaited.
struct Case {
    name: &'static str,
    ns: u64,
    rounds: usize,
}

fn main() {
    let runtime = measure::workers(4);
    let raw = measure::on_cuda().then(Raw::load);
    let cases = [
        Case { name: "latency", ns: 0, rounds: rounds(10_000, 50) },
        Case { name: "overhead_50us", ns: 50_000, rounds: rounds(5000, 50) },
        Case { name: "overhead_200us", ns: 200_000, rounds: rounds(2000, 20) },
        Case { name: "overhead_1000us", ns: 1_000_000, rounds: rounds(1000, 10) },
    ];
    let mut modes = vec![(Completion::Adaptive, "")];
    if measure::argument("all-modes") {
        modes.extend([
            (Completion::Event, "event."),
            (Completion::Word, "word."),
            (Completion::Callback, "callback."),
        ]);
    }
    for (mode, prefix) in modes {
        let device = measure::device_with(mode);
        for case in &cases {
            let name = format!("{prefix}{}", case.name);
            if let Some(raw) = raw {
                report(&format!("{name}.sync"), synchronized(raw, case), case.ns);
            }
            let (samples, cores) = awaited(&runtime, &device, case);
            report(&format!("{name}.await"), samples, case.ns);
            print(&format!("{name}.await.cores"), cores, "cores");
        }
    }
}

fn report(name: &str, samples: Vec<f64>, own_ns: u64) {
    let (samples, own) = (Sorted::new(samples), own_ns as f64 / 1e3);
    for (p, percentile) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)] {
        print(&format!("{name}.{p}_us"), samples.percentile(percentile) - own, "us");
    }
}

/// Rounds that are not counted: the first launches, the pools, what the engine learns.
fn warm_up(case: &Case) -> usize {
    case.rounds / 10
}

fn synchronized(raw: &'static Raw, case: &Case) -> Vec<f64> {
    let stream = raw.stream();
    let round = |_| {
        let start = Instant::now();
        stream.launch(case.ns);
        stream.synchronize();
        us(start.elapsed())
    };
    (0..warm_up(case)).map(round).for_each(drop);
    (0..case.rounds).map(round).collect()
}

fn awaited(runtime: &Runtime, device: &Device, case: &Case) -> (Vec<f64>, f64) {
    let (device, ns) = (device.clone(), case.ns);
    let (warm_up, rounds) = (warm_up(case), case.rounds);
    measure::on_worker(runtime, async move {
        let stream = device.stream().expect("a stream");
        let empty = kernels::empty::load(&device).await.expect("loads");
        let spin = kernels::spin::load(&device).await.expect("loads");
        let round = async || {
            let start = Instant::now();
            let op = if ns == 0 { empty.launch(&stream) } else { spin.launch(&stream, ns) };
            op.await.expect("completes");
            us(start.elapsed())
        };
        for _ in 0..warm_up {
            round().await;
        }
        let mut samples = Vec::with_capacity(rounds);
        let usage = Usage::start();
        for _ in 0..rounds {
            samples.push(round().await);
        }
        (samples, usage.cores())
    })
}
