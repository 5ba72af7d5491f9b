//! Does an await keep its promise in a program that is busy?
//!
//! Two tasks for each core, on a worker a core: each works 50 µs on the CPU, then launches a kernel
//! on a stream of its own and waits for it; what is measured is the wait, launch included. Compared
//! in one process: `.await` (`await`), and `cuStreamSynchronize` inside `spawn_blocking` (`blocking`),
//! for an empty kernel and one of 100 µs (`_100us`). `requests_per_s` is what all tasks together got
//! through.

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_await::{Device, Stream, kernels};
use measure::{Sorted, cores, print, us, window};
use raw::{Raw, RawStream};
use tokio::runtime::Runtime;

/// What a request costs on the CPU.
const HOST_WORK: Duration = Duration::from_micros(50);
const WINDOW: Duration = Duration::from_secs(1);

fn main() {
    let raw = measure::on_cuda().then(Raw::load);
    let device = measure::device();
    let runtime = measure::workers(cores());
    for (ns, suffix) in [(0, ""), (100_000, "_100us")] {
        if let Some(raw) = raw {
            let streams = (0..2 * cores()).map(|_| Way::Blocking(Arc::new(raw.stream())));
            serve(&runtime, &format!("server_like.blocking{suffix}"), streams.collect(), ns);
        }
        let awaiting = runtime.block_on(Awaiting::load(&device));
        let streams = (0..2 * cores()).map(|_| {
            let stream = device.stream().expect("a stream");
            Way::Await(stream, awaiting.clone())
        });
        serve(&runtime, &format!("server_like.await{suffix}"), streams.collect(), ns);
    }
}

#[derive(Clone)]
struct Awaiting {
    empty: kernels::empty,
    spin: kernels::spin,
}

impl Awaiting {
    async fn load(device: &Device) -> Self {
        let empty = kernels::empty::load(device).await.expect("loads");
        Awaiting { empty, spin: kernels::spin::load(device).await.expect("loads") }
    }
}

/// How a task waits for its kernels.
enum Way {
    Await(Stream, Awaiting),
    Blocking(Arc<RawStream>),
}

impl Way {
    async fn launch_and_wait(&self, ns: u64) {
        match self {
            Way::Await(stream, kernels) if ns == 0 => {
                kernels.empty.launch(stream).await.expect("completes");
            }
            Way::Await(stream, kernels) => {
                kernels.spin.launch(stream, ns).await.expect("completes");
            }
            Way::Blocking(stream) => {
                let stream = stream.clone();
                let blocking = tokio::task::spawn_blocking(move || {
                    stream.launch(ns);
                    stream.synchronize();
                });
                blocking.await.expect("no panic");
            }
        }
    }
}

/// Has each of the tasks work and wait in turn, and prints how long the waits took.
fn serve(runtime: &Runtime, name: &str, ways: Vec<Way>, ns: u64) {
    let begin = Instant::now() + window(WINDOW / 5);
    let end = begin + window(WINDOW);
    let tasks: Vec<_> = ways
        .into_iter()
        .map(|way| {
            runtime.spawn(async move {
                let mut waits = Vec::new();
                loop {
                    measure::work(HOST_WORK);
                    let start = Instant::now();
                    way.launch_and_wait(ns).await;
                    let now = Instant::now();
                    // One at least, however short the window of a smoke test.
                    if now > end && !waits.is_empty() {
                        break waits;
                    }
                    if start > begin {
                        waits.push(us(now - start));
                    }
                }
            })
        })
        .collect();
    let cores = measure::cores_between(begin, end);
    let waits = tasks.into_iter().flat_map(|task| runtime.block_on(task).expect("no panic"));
    let waits: Vec<f64> = waits.collect();
    let requests = waits.len() as f64 / window(WINDOW).as_secs_f64();
    let waits = Sorted::new(waits);
    for (p, percentile) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)] {
        print(&format!("{name}.{p}_us"), waits.percentile(percentile), "us");
    }
    print(&format!("{name}.requests_per_s"), requests, "count");
    print(&format!("{name}.cores"), cores, "cores");
}
