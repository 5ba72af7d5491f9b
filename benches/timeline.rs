//! What does the timeline cost, and how true are its times?
//!
//! | line | is |
//! |---|---|
//! | `timeline.queued.off_us`, `.on_us`, `.sampled_us` | how long the thread is busy for a queued launch of an empty kernel, without a log, with one of all operations, and with one of an operation in 100; medians of bursts of 100 on an empty stream, in turn |
//! | `timeline.await.off_us`, `.on_us`, `.sampled_us` | the same of an awaited launch, each the median of 100 |
//! | `timeline.elapsed.off_by_us` | how far a kernel's time in the trace is from what two timed events of a program around it say without a trace (`cuEventElapsedTime`; the median of 20), the median; kernels of 10 µs to 10 ms |
//! | `timeline.elapsed.beyond` | for how many it is more than 2 µs and more than 1 % |
//! | `timeline.spin.off_by_us`, `.beyond` | the same beside what the kernel spins, and ... |
//! | `timeline.spin.events_off_by_us`, `.events_beyond` | ... what the program's events say of that |
//! | `timeline.early` | operations that started before they were submitted, or were complete after they were seen, of a million |
//! | `timeline.early.most_us` | by how much, at most |
//! | `timeline.clock.error_us` | the largest error that the trace says of the device's clock, over a minute |
//! | `timeline.clock.median_error_us` | the median of the operations' errors |

#[path = "measure.rs"]
mod measure;

use std::time::{Duration, Instant};

use gpu_await::{Device, Stream, TracedOp, kernels};
use measure::{Sorted, print, rounds, us, window};

const BURST: usize = 100;
const MODES: [&str; 3] = ["off", "on", "sampled"];
const CAPACITY: usize = 100_000;
/// Longer than the host takes for a few calls.
const BUSY_NS: u64 = 100_000;

fn main() {
    let device = measure::device();
    let runtime = measure::workers(measure::cores().min(4));
    let worked = device.clone();
    measure::on_worker(&runtime, async move {
        cost(&worked).await;
        lengths(&worked).await;
        order(&worked).await;
        clock(&worked).await;
    });
}

fn switch(device: &Device, mode: &str) {
    let timeline = device.timeline();
    match mode {
        "on" => timeline.start(CAPACITY).expect("a log"),
        "sampled" => timeline.start_sampled(CAPACITY, 100).expect("a log"),
        _ => timeline.stop(),
    }
}

async fn cost(device: &Device) {
    let stream = device.stream().expect("a stream");
    let empty = kernels::empty::load(device).await.expect("loads");
    let (mut queued, mut awaited) = ([const { Vec::new() }; 3], [const { Vec::new() }; 3]);
    for _ in 0..rounds(300, 2) {
        for (at, mode) in MODES.into_iter().enumerate() {
            switch(device, mode);
            let start = Instant::now();
            (0..BURST).for_each(|_| empty.launch(&stream).queued().expect("a launch"));
            queued[at].push(us(start.elapsed()) / BURST as f64);
            stream.done().await.expect("completes");
            let mut each = Vec::new();
            for _ in 0..BURST {
                let start = Instant::now();
                empty.launch(&stream).await.expect("completes");
                each.push(us(start.elapsed()));
            }
            awaited[at].push(Sorted::new(each).p50());
        }
    }
    device.timeline().stop();
    for (what, all) in [("queued", queued), ("await", awaited)] {
        for (mode, times) in MODES.into_iter().zip(all) {
            print(&format!("timeline.{what}.{mode}_us"), Sorted::new(times).p50(), "us");
        }
    }
}

async fn lengths(device: &Device) {
    let stream = device.stream().expect("a stream");
    let spin = kernels::spin::load(device).await.expect("loads");
    let [mut beside_events, mut beside_spin, mut events_beside_spin] =
        [(); 3].map(|()| Errors::default());
    for spin_ns in [10_000, 100_000, 1_000_000, 10_000_000] {
        let runs = rounds(20, 2);
        let spun = spin_ns as f64 / 1e3;
        device.timeline().stop();
        let mut between_events = Vec::new();
        for _ in 0..runs {
            // The device is busy until all of it is there: otherwise the host's calls are between the events.
            spin.launch(&stream, BUSY_NS).queued().expect("a launch");
            let timed = stream.timed(|queue| spin.launch(queue, spin_ns));
            between_events.push(us(timed.await.expect("completes").1));
        }
        let by_events = Sorted::new(between_events.clone()).p50();
        between_events.into_iter().for_each(|took| events_beside_spin.add(took, spun));
        device.timeline().start(CAPACITY).expect("a log");
        for _ in 0..runs {
            spin.launch(&stream, BUSY_NS).queued().expect("a launch");
            spin.launch(&stream, spin_ns).await.expect("completes");
        }
        let trace = device.timeline().snapshot().expect("a trace");
        for op in trace.operations().iter().skip(1).step_by(2) {
            let (started, completed) = op.device_time().expect("its times");
            let took = us(completed - started);
            beside_events.add(took, by_events);
            beside_spin.add(took, spun);
        }
    }
    beside_events.print("timeline.elapsed.");
    beside_spin.print("timeline.spin.");
    events_beside_spin.print("timeline.spin.events_");
}

/// How far times are from what they should be.
#[derive(Default)]
struct Errors {
    all: Vec<f64>,
    beyond: usize,
}

impl Errors {
    fn add(&mut self, took: f64, expected: f64) {
        let off_by = (took - expected).abs();
        self.all.push(off_by);
        self.beyond += usize::from(off_by > 2.0 && off_by > expected / 100.0);
    }

    fn print(self, name: &str) {
        print(&format!("{name}off_by_us"), Sorted::new(self.all).p50(), "us");
        print(&format!("{name}beyond"), self.beyond as f64, "count");
    }
}

/// By how much the device was ahead of the host's call, or behind its look: microseconds, if it was.
fn early_us(op: &TracedOp) -> f64 {
    let Some((started, completed)) = op.device_time() else { return 0.0 };
    let seen = op.seen.unwrap_or(completed);
    us(op.submitted.saturating_sub(started).max(completed.saturating_sub(seen)))
}

async fn order(device: &Device) {
    let streams: Vec<Stream> = (0..4).map(|_| device.stream().expect("a stream")).collect();
    let empty = kernels::empty::load(device).await.expect("loads");
    let mut early = Vec::new();
    for _ in 0..rounds(20, 1) {
        device.timeline().start(50_000).expect("a log");
        for _ in 0..rounds(125, 2) {
            for stream in &streams {
                (0..BURST - 1).for_each(|_| empty.launch(stream).queued().expect("a launch"));
            }
            for stream in &streams {
                empty.launch(stream).await.expect("completes");
            }
        }
        let trace = device.timeline().snapshot().expect("a trace");
        assert!(trace.operations().iter().all(|op| op.device_time().is_some()), "without times");
        early.extend(trace.operations().iter().map(early_us));
    }
    let count = early.iter().filter(|by| **by > 0.0).count();
    print("timeline.early", count as f64, "count");
    print("timeline.early.most_us", Sorted::new(early).max(), "us");
}

async fn clock(device: &Device) {
    let stream = device.stream().expect("a stream");
    let empty = kernels::empty::load(device).await.expect("loads");
    device.timeline().start(CAPACITY).expect("a log");
    let start = Instant::now();
    loop {
        empty.launch(&stream).await.expect("completes");
        tokio::time::sleep(Duration::from_millis(20)).await;
        if start.elapsed() >= window(Duration::from_secs(60)) {
            break;
        }
    }
    let trace = device.timeline().snapshot().expect("a trace");
    let errors = Sorted::new(trace.operations().iter().map(|op| us(op.clock_error)).collect());
    print("timeline.clock.error_us", errors.max(), "us");
    print("timeline.clock.median_error_us", errors.p50(), "us");
    device.timeline().stop();
}
