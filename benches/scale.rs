//! Does waiting get dearer with the number of futures, or of streams?
//!
//! | lines | what is measured | compare |
//! |---|---|---|
//! | `scale.pending_N` | N tasks wait behind a closed gate, for 1,024 points on 64 streams; from the gate's opening until the last of them ran, by N | the three N: a rise is work that grows with futures |
//! | `scale.streams_N` | an await of an empty kernel while N streams are open: on each in turn, and on one of them | 1 with 1,000 streams; `scale.sync`: `cuStreamSynchronize` |
//!
//! The device's own work behind the gate is the same for every N, so the time for one falls with N
//! before it is flat.

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use gpu_await::testing::Gate;
use gpu_await::{Device, Op, Stream, kernels};
use measure::{Sorted, cores, print, rounds, us};
use raw::Raw;
use tokio::runtime::Runtime;
use tokio::sync::Notify;

const STREAMS: usize = 64;
const POINTS_A_STREAM: usize = 16;

fn main() {
    let raw = measure::on_cuda().then(Raw::load);
    let device = measure::device();
    let runtime = measure::workers(cores());
    if let Some(raw) = raw {
        let stream = raw.stream();
        let round = |_| {
            let start = Instant::now();
            stream.launch_empty();
            stream.synchronize();
            us(start.elapsed())
        };
        (0..rounds(500, 5)).map(round).for_each(drop);
        let samples = Sorted::new((0..rounds(5000, 50)).map(round).collect());
        print("scale.sync.p50_us", samples.p50(), "us");
    }
    for streams in [1, 1000] {
        open_streams(&runtime, &device, streams);
    }
    for (futures, name) in [(1000, "1k"), (10_000, "10k"), (100_000, "100k")] {
        let repeats = (0..rounds(5, 1)).map(|_| pending(&runtime, &device, futures));
        let took = Sorted::new(repeats.collect());
        print(&format!("scale.pending_{name}.resolve_us_per_op"), took.p50(), "us");
    }
}

fn open_streams(runtime: &Runtime, device: &Device, count: usize) {
    let device = device.clone();
    measure::on_worker(runtime, async move {
        let empty = kernels::empty::load(&device).await.expect("loads");
        let streams: Vec<_> = (0..count).map(|_| device.stream().expect("a stream")).collect();
        let samples = rounds(5000, 50);
        // Once each at least, to warm up.
        awaits(&empty, &streams, rounds(count.max(500), 5)).await;
        let each = awaits(&empty, &streams, samples).await;
        print(&format!("scale.streams_{count}.await.p50_us"), each.p50(), "us");
        if count > 1 {
            let one = awaits(&empty, &streams[..1], samples).await;
            print(&format!("scale.streams_{count}.await_on_one.p50_us"), one.p50(), "us");
        }
    });
}

/// Times of awaits on the streams in turn.
async fn awaits(empty: &kernels::empty, streams: &[Stream], count: usize) -> Sorted {
    let mut samples = Vec::with_capacity(count);
    for stream in streams.iter().cycle().take(count) {
        let start = Instant::now();
        empty.launch(stream).await.expect("completes");
        samples.push(us(start.elapsed()));
    }
    Sorted::new(samples)
}

/// Has `futures` tasks wait, lets them go, and returns the time that it took for each.
fn pending(runtime: &Runtime, device: &Device, futures: usize) -> f64 {
    let empty = runtime.block_on(kernels::empty::load(device)).expect("loads");
    let streams: Vec<_> = (0..STREAMS).map(|_| device.stream().expect("a stream")).collect();
    let gate = Gate::close(&streams[0]).expect("a gate");
    let closed = streams[0].record().expect("an event");
    for stream in &streams[1..] {
        stream.wait(&closed).queued().expect("is accepted");
    }
    let mut points = Vec::new();
    for _ in 0..POINTS_A_STREAM {
        for stream in &streams {
            empty.launch(stream).queued().expect("is accepted");
            points.push(stream.record().expect("an event"));
        }
    }
    let waiting = Arc::new(Waiting::default());
    let tasks: Vec<_> = (0..futures)
        .map(|index| {
            let (op, waiting) = (points[index % points.len()].done(), waiting.clone());
            runtime.spawn(async move { waiting.wait_for(op).await })
        })
        .collect();
    runtime.block_on(async {
        // Every one of them was polled, and has given up checking for itself.
        waiting.begun.reached(futures).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let start = Instant::now();
        gate.open();
        waiting.ended.reached(futures).await;
        let took = us(start.elapsed()) / futures as f64;
        assert!(!gate.timed_out(), "all of them were waiting before the gate opened");
        for task in tasks {
            task.await.expect("no panic");
        }
        took
    })
}

/// How many tasks have begun and have ended to wait.
#[derive(Default)]
struct Waiting {
    begun: Counter,
    ended: Counter,
}

#[derive(Default)]
struct Counter {
    count: AtomicUsize,
    target: AtomicUsize,
    notify: Notify,
}

impl Waiting {
    async fn wait_for(&self, mut op: Op<()>) {
        let mut polled = false;
        poll_fn(|cx| {
            let poll = Pin::new(&mut op).poll(cx);
            if !std::mem::replace(&mut polled, true) {
                assert!(poll.is_pending(), "the gate is closed");
                self.begun.add();
            }
            match poll {
                Poll::Ready(result) => {
                    result.expect("completes");
                    Poll::Ready(())
                }
                Poll::Pending => Poll::Pending,
            }
        })
        .await;
        self.ended.add();
    }
}

impl Counter {
    fn add(&self) {
        let count = self.count.fetch_add(1, Ordering::SeqCst) + 1;
        if count == self.target.load(Ordering::SeqCst) {
            self.notify.notify_one();
        }
    }

    async fn reached(&self, target: usize) {
        self.target.store(target, Ordering::SeqCst);
        while self.count.load(Ordering::SeqCst) < target {
            self.notify.notified().await;
        }
    }
}
