//! What does it cost to wait for long, and does anything come back late because of it?
//!
//! | lines | compare |
//! |---|---|
//! | `idle` | the CPU of an open device with nothing in flight, with that of a bare context (`idle.raw`) |
//! | `long` | an await of a 200 ms kernel (one; eight tasks with a stream each) with `cuStreamSynchronize` (`long.sync`): CPU, and the time beyond the kernel's own |
//! | `timeout` | `tokio::time::timeout` of 10 ms over a 200 ms kernel with the 10 ms asked for |
//! | `overwait` | an await of a 1 ms kernel with a 200 ms one behind it on the stream, with an event query in a loop (`overwait.raw`) |
//!
//! Medians of ten rounds on four workers; the first round, in which the engine may still learn, is a
//! line of its own (`first`) and in no other.

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::time::{Duration, Instant};

use gpu_await::{Device, Stream, kernels};
use measure::{Sorted, Usage, ms, print, rounds, us, window};
use raw::Raw;
use tokio::runtime::Runtime;
use tokio::time::timeout;

const LONG: Duration = Duration::from_millis(200);

fn main() {
    let raw = measure::on_cuda().then(Raw::load);
    if raw.is_some() {
        idle("idle.raw");
    }
    let device = measure::device();
    let runtime = measure::workers(4);
    let bench = measure::on_worker(&runtime, Bench::new(device));
    idle("idle");
    if let Some(raw) = raw {
        long_sync(raw);
    }
    long(&runtime, &bench, "long.await_200ms", 1);
    long(&runtime, &bench, "long.await_200ms_8_streams", 8);
    time_out(&runtime, &bench);
    if let Some(raw) = raw {
        overwait_raw(raw);
    }
    overwait(&runtime, &bench);
}

#[derive(Clone)]
struct Bench {
    device: Device,
    spin: kernels::spin,
}

impl Bench {
    /// With something already awaited.
    async fn new(device: Device) -> Self {
        let spin = kernels::spin::load(&device).await.expect("loads");
        let bench = Bench { device, spin };
        let stream = bench.stream();
        for _ in 0..rounds(100, 10) {
            bench.spin.launch(&stream, 100_000).await.expect("completes");
        }
        bench
    }

    fn stream(&self) -> Stream {
        self.device.stream().expect("a stream")
    }

    fn launch(&self, stream: &Stream, time: Duration) -> gpu_await::Op<()> {
        self.spin.launch(stream, ns(time))
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).expect("a short time")
}

fn idle(name: &str) {
    std::thread::sleep(window(Duration::from_millis(200)));
    let usage = Usage::start();
    std::thread::sleep(window(Duration::from_secs(2)));
    print(&format!("{name}.cores"), usage.cores(), "cores");
}

fn long_sync(raw: &'static Raw) {
    let stream = raw.stream();
    let usage = Usage::start();
    let round = |_| {
        let start = Instant::now();
        stream.launch_spin(ns(LONG));
        stream.synchronize();
        us(start.elapsed()) - us(LONG)
    };
    let added = Sorted::new((0..rounds(4, 1)).map(round).collect());
    print("long.sync.cores", usage.cores(), "cores");
    print("long.sync.added_us", added.p50(), "us");
}

/// `tasks` tasks, each with a stream of its own, await a long kernel at the same time.
fn long(runtime: &Runtime, bench: &Bench, name: &str, tasks: usize) {
    let streams: Vec<_> = (0..tasks).map(|_| bench.stream()).collect();
    let round = || {
        let spawn = |stream: &Stream| {
            let (bench, stream) = (bench.clone(), stream.clone());
            runtime.spawn(async move {
                let start = Instant::now();
                bench.launch(&stream, LONG).await.expect("completes");
                us(start.elapsed()) - us(LONG)
            })
        };
        let tasks: Vec<_> = streams.iter().map(spawn).collect();
        let added = tasks.into_iter().map(|task| runtime.block_on(task).expect("no panic"));
        added.collect::<Vec<_>>()
    };
    print(&format!("{name}.first_added_us"), Sorted::new(round()).max(), "us");
    let usage = Usage::start();
    let added = Sorted::new((0..rounds(10, 1)).flat_map(|_| round()).collect());
    print(&format!("{name}.cores"), usage.cores(), "cores");
    print(&format!("{name}.added_us"), added.p50(), "us");
    print(&format!("{name}.added_max_us"), added.max(), "us");
}

/// The first round by itself, the others' median and maximum.
fn report(name: &str, what: &str, mut times: Vec<f64>) {
    print(&format!("{name}.first_ms"), times.remove(0), "ms");
    let times = Sorted::new(times);
    print(&format!("{name}.{what}_ms"), times.p50(), "ms");
    print(&format!("{name}.{what}_max_ms"), times.max(), "ms");
}

fn time_out(runtime: &Runtime, bench: &Bench) {
    let bench = bench.clone();
    let times = measure::on_worker(runtime, async move {
        let stream = bench.stream();
        let mut times = Vec::new();
        for _ in 0..=rounds(10, 1) {
            let start = Instant::now();
            let late = timeout(Duration::from_millis(10), bench.launch(&stream, LONG)).await;
            times.push(ms(start.elapsed()));
            assert!(late.is_err(), "the kernel is longer than the time-out");
            stream.done().await.expect("completes");
        }
        times
    });
    report("timeout.10ms_over_200ms", "returns", times);
}

fn overwait(runtime: &Runtime, bench: &Bench) {
    let bench = bench.clone();
    let times = measure::on_worker(runtime, async move {
        let stream = bench.stream();
        let mut times = Vec::new();
        for _ in 0..=rounds(10, 1) {
            let start = Instant::now();
            let first = bench.launch(&stream, Duration::from_millis(1));
            bench.launch(&stream, LONG).queued().expect("is accepted");
            first.await.expect("completes");
            times.push(ms(start.elapsed()));
            stream.done().await.expect("completes");
        }
        times
    });
    report("overwait.1ms_before_200ms", "resolves", times);
}

fn overwait_raw(raw: &'static Raw) {
    let (stream, event) = (raw.stream(), raw.event());
    let round = |_| {
        let start = Instant::now();
        stream.launch_spin(1_000_000);
        stream.record(&event);
        stream.launch_spin(ns(LONG));
        event.spin();
        let time = ms(start.elapsed());
        stream.synchronize();
        time
    };
    let times = Sorted::new((0..rounds(4, 1)).map(round).collect());
    print("overwait.raw.resolves_ms", times.p50(), "ms");
}
