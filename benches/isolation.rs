//! What does an await of a small kernel wait for beside work that fills the GPU?
//!
//! A kernel of 8 blocks for 5 µs is awaited again and again. The hog is a kernel whose blocks run for 2 ms and fill all multiprocessors
//! that its stream has, a few launches ahead.
//!
//! | phase | the small kernel | the hog |
//! |---|---|---|
//! | `idle` | in a partition of 16 multiprocessors | none |
//! | `raw_equal`, `raw_high` | by the bare driver, which waits in `cuStreamSynchronize`; priority equal to the hog's, and the highest | everywhere |
//! | `equal`, `high` | the same awaited | everywhere |
//! | `partition` | in a partition of 16, from 1 stream and from 8 | in a partition of the rest, on 1 stream and on 8 |
//!
//! `isolation.hog.kept` is how many launches the hog completes in its partition, by how many alone on the whole GPU, over its part of the
//! multiprocessors. On the host device, where partitions are nominal, only the awaits are made.

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gpu_await::{Device, LaunchConfig, Partition, Result, Stream, kernel};
use measure::{Sorted, print, us, window};
use raw::Raw;
use tokio::runtime::Runtime;

kernel! {
    unsafe fn spin(duration_ns: u64);
    ptx = include_str!("../kernels/spin.ptx");
    host = |_: &gpu_await::Grid, ns: u64| thread::sleep(Duration::from_nanos(ns));
}

const SMALL_NS: u64 = 5_000;
const SMALL: (u32, u32) = (8, 128);
const HOG_NS: u64 = 2_000_000;
/// Blocks of 1024 threads of a launch, for each multiprocessor: four times what it holds.
const HOG_BLOCKS: u32 = 8;
/// How long a phase takes.
const PHASE: Duration = Duration::from_millis(1000);
/// The pause between two awaits.
const PAUSE: Duration = Duration::from_micros(200);

/// Keeps multiprocessors busy until it is dropped, from each of some streams.
struct Hog {
    launched: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<Result<()>>>,
}

impl Hog {
    fn start(runtime: &Runtime, spin: &spin, streams: Vec<Stream>) -> Hog {
        let launched = Arc::new(AtomicU64::new(0));
        let task = |stream: Stream| {
            let (spin, launched) = (spin.clone(), launched.clone());
            let config = LaunchConfig::new(HOG_BLOCKS * stream.multiprocessors(), 1024);
            runtime.spawn(async move {
                loop {
                    spin.launch(&stream, config, HOG_NS).queued()?;
                    // ORDERING: Relaxed: a statistic.
                    launched.fetch_add(1, Ordering::Relaxed);
                    stream.throttle(3).await?;
                }
            })
        };
        let tasks = streams.into_iter().map(task).collect();
        thread::sleep(window(PHASE / 10));
        Hog { launched, tasks }
    }

    /// Launches of one multiprocessor a second, over a phase.
    fn rate(&self) -> f64 {
        let (before, start) = (self.launched.load(Ordering::Relaxed), Instant::now());
        thread::sleep(window(PHASE));
        let launched = self.launched.load(Ordering::Relaxed) - before;
        launched as f64 / start.elapsed().as_secs_f64()
    }

    fn stop(self, runtime: &Runtime, device: &Device) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
        runtime.block_on(device.done()).expect("it ends");
    }
}

/// Awaits the small kernel on each stream, for a phase.
fn awaits(runtime: &Runtime, spin: &spin, streams: &[Stream]) -> Sorted {
    let end = Instant::now() + window(PHASE);
    let task = |stream: &Stream| {
        let (spin, stream) = (spin.clone(), stream.clone());
        runtime.spawn(async move {
            let mut times = Vec::new();
            while times.is_empty() || Instant::now() < end {
                let start = Instant::now();
                spin.launch(&stream, LaunchConfig::new(SMALL.0, SMALL.1), SMALL_NS).await?;
                times.push(us(start.elapsed()));
                tokio::time::sleep(PAUSE).await;
            }
            Ok::<_, gpu_await::Error>(times)
        })
    };
    let tasks: Vec<_> = streams.iter().map(task).collect();
    let times = tasks.into_iter().flat_map(|task| {
        runtime.block_on(task).expect("no panic").expect("the kernel is launched")
    });
    Sorted::new(times.collect())
}

fn told(phase: &str, times: &Sorted) {
    print(&format!("isolation.{phase}.p50_us"), times.p50(), "us");
    print(&format!("isolation.{phase}.p99_us"), times.p99(), "us");
}

/// The same by the bare driver, beside a bare hog of as many blocks.
fn raw_awaits(raw: &'static Raw, multiprocessors: u32, lowest: i32, priority: i32) -> Sorted {
    let (small, stop) = (raw.stream_with_priority(priority), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let (hog, events) = (raw.stream_with_priority(lowest), [raw.event(), raw.event()]);
            let mut launches = 0;
            // ORDERING: Relaxed: all that the threads share.
            while !stop.load(Ordering::Relaxed) {
                let event = &events[launches % 2];
                while launches >= 2 && !event.is_complete() {
                    thread::sleep(Duration::from_micros(100));
                }
                hog.launch_spinning(HOG_BLOCKS * multiprocessors, 1024, HOG_NS);
                hog.record(event);
                launches += 1;
            }
            hog.synchronize();
        });
        thread::sleep(window(PHASE / 10));
        let (mut times, end) = (Vec::new(), Instant::now() + window(PHASE));
        while times.is_empty() || Instant::now() < end {
            let start = Instant::now();
            small.launch_spinning(SMALL.0, SMALL.1, SMALL_NS);
            small.synchronize();
            times.push(us(start.elapsed()));
            thread::sleep(PAUSE);
        }
        stop.store(true, Ordering::Relaxed);
        Sorted::new(times)
    })
}

fn main() {
    let (device, runtime) = (measure::device(), measure::workers(4));
    let spin = runtime.block_on(spin::load(&device)).expect("loads");
    let all = device.multiprocessors();
    let reserved = |multiprocessors| runtime.block_on(device.reserve_partition(multiprocessors));
    let small = reserved(16.min(all / 2).max(1)).expect("multiprocessors");
    if !measure::on_cuda() {
        told("idle", &awaits(&runtime, &spin, &[small.stream().expect("a stream")]));
        return;
    }
    let streams = |partition: &Partition, count: usize| -> Vec<Stream> {
        (0..count).map(|_| partition.stream().expect("a stream")).collect()
    };
    let idle = streams(&small, 1);
    told("idle", &awaits(&runtime, &spin, &idle));
    let (lowest, highest) = device.priority_range();
    let with_priority =
        |priority| device.stream_builder().priority(priority).build().expect("a stream");
    let raw = Raw::load();
    told("raw_equal", &raw_awaits(raw, all, lowest, lowest));
    told("raw_high", &raw_awaits(raw, all, lowest, highest));
    let mut everywhere = 0.0;
    for (phase, priority) in [("equal", lowest), ("high", highest)] {
        let hog = Hog::start(&runtime, &spin, vec![with_priority(lowest)]);
        told(phase, &awaits(&runtime, &spin, &[with_priority(priority)]));
        everywhere = hog.rate();
        hog.stop(&runtime, &device);
    }
    let rest = reserved(all - small.multiprocessors()).expect("the rest");
    for count in [1, 8] {
        let hog = Hog::start(&runtime, &spin, streams(&rest, count));
        let phase = if count == 1 { "partition" } else { "partition_8" };
        told(phase, &awaits(&runtime, &spin, &streams(&small, count)));
        if count == 1 {
            // Its launches are smaller by its part, so that as many of them are its share.
            print("isolation.hog.kept", hog.rate() / everywhere, "ratio");
        }
        hog.stop(&runtime, &device);
    }
}
