//! How many operations can be awaited a second, and what does each cost?
//!
//! Compared in one process, on all cores:
//!
//! | lines | what runs |
//! |---|---|
//! | `throughput.raw` | a thread a core, a stream each, launches and records; nobody waits, but that at most 512 are in flight |
//! | `throughput.raw_wait.depth_D` | the same threads, which launch, record and spin on `cuEventQuery` with D in flight |
//! | `throughput.tasks_N` | N tasks on a worker a core, spread over at most 64 streams (`streams=K` for others), which launch an empty kernel and await it |
//!
//! `cpu_us_per_op` is the CPU time of the process for one operation, whatever it was spent on.

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::sync::Arc;
use std::time::Duration;

use gpu_await::{Device, kernels};
use measure::{Rate, Tally, cores, window};
use raw::{Bounded, Raw};
use tokio::runtime::Runtime;

const WINDOW: Duration = Duration::from_secs(1);

fn main() {
    if measure::on_cuda() {
        let raw = Raw::load();
        bare(raw, 256, 256).print("throughput.raw");
        for depth in [1, 4] {
            bare(raw, depth, 1).print(&format!("throughput.raw_wait.depth_{depth}"));
        }
    }
    let device = measure::device();
    let runtime = measure::workers(cores());
    let most = measure::number("streams").unwrap_or(64).max(1);
    for tasks in [1, 8, 64, 256, 1024] {
        awaited(&runtime, &device, tasks, tasks.min(most))
            .print(&format!("throughput.tasks_{tasks}"));
    }
}

/// Threads that launch and record, and keep to `window` kernels in flight by looking before every
/// `every`-th launch.
fn bare(raw: &'static Raw, in_flight: usize, every: usize) -> Rate {
    let tally = Tally::new(cores());
    std::thread::scope(|scope| {
        for thread in 0..cores() {
            let tally = &tally;
            scope.spawn(move || {
                let mut stream = Bounded::new(raw, in_flight, every);
                loop {
                    stream.make_room();
                    stream.stream.launch_empty();
                    stream.record();
                    if !tally.add(thread) {
                        break stream.stream.synchronize();
                    }
                }
            });
        }
        tally.measure(window(WINDOW))
    })
}

fn awaited(runtime: &Runtime, device: &Device, tasks: usize, streams: usize) -> Rate {
    let empty = runtime.block_on(kernels::empty::load(device)).expect("loads");
    let streams: Vec<_> = (0..streams).map(|_| device.stream().expect("a stream")).collect();
    let tally = Arc::new(Tally::new(tasks));
    let tasks: Vec<_> = (0..tasks)
        .map(|task| {
            let (tally, empty) = (tally.clone(), empty.clone());
            let stream = streams[task % streams.len()].clone();
            runtime.spawn(async move {
                loop {
                    empty.launch(&stream).await.expect("completes");
                    if !tally.add(task) {
                        break;
                    }
                }
            })
        })
        .collect();
    let rate = tally.measure(window(WINDOW));
    for task in tasks {
        runtime.block_on(task).expect("no panic");
    }
    rate
}
