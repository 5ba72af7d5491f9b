//! How long does making a stream take beside threads that launch without a pause?
//!
//! 16 of them, each with chains of ten small kernels on a stream of its own, one awaited after the other; meanwhile another
//! makes streams, one every 10 ms. The same by the bare driver, where the launching threads stop after two seconds
//! at the latest: by then a stream has been made.
//!
//! | line | is |
//! |---|---|
//! | `stream_creation.WHO.p50_us`, `max_us` | a stream, from the call to the handle |
//! | `stream_creation.launches_ratio` | chains a second while streams are made, by those without |

#[path = "raw/graphs.rs"]
#[allow(dead_code, reason = "a part of it")]
mod graphs;
#[path = "measure.rs"]
mod measure;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gpu_await::{Device, Stream, kernels};
use graphs::Chain;
use measure::{Sorted, print, rounds, us};

const TASKS: usize = 16;
const KERNELS: usize = 10;
const LEN: usize = 1024;
const PAUSE: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(2);

/// What launches, until it is told to stop; how many chains were awaited.
struct Load {
    stop: Arc<AtomicBool>,
    chains: Arc<AtomicU64>,
}

impl Load {
    fn new() -> Load {
        Load { stop: Arc::default(), chains: Arc::default() }
    }

    fn goes_on(&self, start: Instant, limit: Duration) -> bool {
        self.chains.fetch_add(1, Ordering::Relaxed);
        !self.stop.load(Ordering::Relaxed) && start.elapsed() < limit
    }

    fn per_s(&self, time: Duration) -> f64 {
        let before = self.chains.load(Ordering::Relaxed);
        let start = Instant::now();
        thread::sleep(time);
        (self.chains.load(Ordering::Relaxed) - before) as f64 / start.elapsed().as_secs_f64()
    }
}

/// Times of so many calls, and chains a second meanwhile.
fn timed<R>(load: &Load, streams: usize, mut make: impl FnMut() -> R) -> (Vec<f64>, f64) {
    let (mut times, mut made) = (Vec::new(), Vec::new());
    let (start, before) = (Instant::now(), load.chains.load(Ordering::Relaxed));
    for _ in 0..streams {
        let begin = Instant::now();
        made.push(make());
        times.push(us(begin.elapsed()));
        thread::sleep(PAUSE);
    }
    let chains = load.chains.load(Ordering::Relaxed) - before;
    (times, chains as f64 / start.elapsed().as_secs_f64())
}

fn ours(device: &Device, streams: usize) {
    let scale = kernels::scale::load_blocking(device).expect("the kernel");
    let runtime = measure::workers(TASKS.min(measure::cores()));
    let load = Arc::new(Load::new());
    let places: Vec<(Stream, _)> = (0..TASKS)
        .map(|_| {
            let stream = device.stream().expect("a stream");
            let x = stream.full(LEN, 1.0f32).queued().expect("memory");
            (stream, x)
        })
        .collect();
    let tasks: Vec<_> = places
        .into_iter()
        .map(|(stream, mut x)| {
            let (load, scale) = (load.clone(), scale.clone());
            runtime.spawn(async move {
                let start = Instant::now();
                while load.goes_on(start, Duration::MAX) {
                    let chain = stream
                        .batch(|q| (0..KERNELS).try_for_each(|_| scale.launch(q, 1.5, &mut x)));
                    chain.await.expect("completes");
                }
            })
        })
        .collect();
    thread::sleep(PAUSE);
    let without = load.per_s(measure::window(Duration::from_secs(1)));
    let (times, with) = timed(&load, streams, || device.stream().expect("a stream"));
    load.stop.store(true, Ordering::Relaxed);
    tasks.into_iter().for_each(|task| runtime.block_on(task).expect("no panic"));
    let times = Sorted::new(times);
    print("stream_creation.ours.p50_us", times.p50(), "us");
    print("stream_creation.ours.max_us", times.max(), "us");
    print("stream_creation.launches_ratio", with / without, "ratio");
}

fn raw(streams: usize) {
    let chains: Vec<_> = (0..TASKS).map(|_| Chain::new(KERNELS, LEN)).collect();
    let mut all = Vec::new();
    // A stream that waits ends the load: each has one of its own.
    for _ in 0..streams.min(5) {
        let load = Load::new();
        thread::scope(|scope| {
            for chain in &chains {
                let load = &load;
                scope.spawn(move || {
                    chain.bind();
                    let start = Instant::now();
                    while load.goes_on(start, PATIENCE) {
                        chain.launches(1.5);
                        chain.synchronize();
                    }
                });
            }
            thread::sleep(PAUSE);
            all.extend(timed(&load, 1, graphs::stream).0);
            load.stop.store(true, Ordering::Relaxed);
        });
    }
    let times = Sorted::new(all);
    print("stream_creation.raw.p50_us", times.p50(), "us");
    print("stream_creation.raw.max_us", times.max(), "us");
}

fn main() {
    let streams = rounds(20, 3);
    ours(&measure::device(), streams);
    if measure::on_cuda() {
        raw(streams);
    }
}
