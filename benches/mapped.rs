//! From which size on is a kernel faster on a copy than on the host's own memory?
//!
//! Compared in one process, for requests of several sizes: one launch on [`Mapped`](gpu_await::Mapped) memory, and
//! the host has it again (`mapped`); upload, launch and download in one batch (`three_calls`); and the first by the
//! bare driver, with `cuStreamSynchronize` (`raw`). The median of one request after the other, awaited in a task on
//! four workers; and requests a second of 16 tasks, each with a stream of its own.
//!
//! `ratio` is the first over the second.

#[path = "measure.rs"]
mod measure;
#[path = "raw/copies.rs"]
mod raw;

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_await::{Device, DeviceBuffer, Mapped, PinnedBuffer, Stream, kernels};
use measure::{Sorted, Tally, print, rounds, us};
use raw::Copies;

const TASKS: usize = 16;

/// One task's stream and memory.
struct Place {
    stream: Stream,
    scale: kernels::scale,
    mapped: Mapped<f32>,
    pinned: Option<PinnedBuffer<f32>>,
    on_device: DeviceBuffer<f32>,
}

impl Place {
    fn new(device: &Device, scale: &kernels::scale, bytes: usize) -> Place {
        let (stream, len) = (device.stream().expect("a stream"), bytes / 4);
        Place {
            mapped: stream.pinned(len).expect("memory").into_mapped(),
            pinned: stream.pinned(len).ok(),
            on_device: stream.zeros(len).queued().expect("memory"),
            scale: scale.clone(),
            stream,
        }
    }

    async fn in_place(&mut self) {
        self.scale.launch(&self.stream, 1.5, &mut self.mapped).queued().expect("is launched");
        let answer = self.mapped.host().await.expect("completes");
        answer[0] = 1.0;
    }

    async fn copied(&mut self) {
        let mut request = self.pinned.take().expect("it came back");
        request[0] = 1.0;
        let (scale, on_device) = (&self.scale, &mut self.on_device);
        let answer = self.stream.batch(|queue| {
            let request = queue.upload_into(request, on_device)?;
            scale.launch(queue, 1.5, on_device)?;
            Ok((request, queue.download(on_device)?))
        });
        let (request, answer) = answer.await.expect("completes");
        std::hint::black_box(answer[0]);
        self.pinned = Some(request);
    }
}

async fn alone(device: Device, scale: kernels::scale, bytes: usize, in_place: bool) -> f64 {
    let mut place = Place::new(&device, &scale, bytes);
    let mut times = Vec::new();
    for round in 0..rounds(5000, 20) {
        let start = Instant::now();
        if in_place {
            place.in_place().await;
        } else {
            place.copied().await;
        }
        if round > 10 {
            times.push(us(start.elapsed()));
        }
    }
    Sorted::new(times).p50()
}

fn by_hand(raw: &Copies, bytes: usize) -> f64 {
    let memory = raw.pinned(bytes);
    let mut times = Vec::new();
    for _ in 0..rounds(5000, 20) {
        let start = Instant::now();
        raw.scale(0, 1.5, raw::Device(memory.0 as u64), bytes / 4);
        raw.synchronize(0);
        times.push(us(start.elapsed()));
    }
    Sorted::new(times).p50()
}

fn together(device: &Device, scale: &kernels::scale, bytes: usize, in_place: bool) -> f64 {
    let runtime = measure::workers(TASKS.min(measure::cores()));
    let tally = Arc::new(Tally::new(TASKS));
    let tasks: Vec<_> = (0..TASKS)
        .map(|who| {
            let (mut place, tally) = (Place::new(device, scale, bytes), tally.clone());
            runtime.spawn(async move {
                loop {
                    if in_place {
                        place.in_place().await;
                    } else {
                        place.copied().await;
                    }
                    if !tally.add(who) {
                        return;
                    }
                }
            })
        })
        .collect();
    let rate = tally.measure(measure::window(Duration::from_secs(1)));
    for task in tasks {
        runtime.block_on(task).expect("the task does not panic");
    }
    rate.per_second
}

fn main() {
    let runtime = measure::workers(4);
    let device = measure::device();
    let scale = kernels::scale::load_blocking(&device).expect("the kernel");
    let raw = measure::on_cuda().then(|| Copies::new(1));
    for (name, bytes) in
        [("1kib", 1 << 10), ("16kib", 16 << 10), ("128kib", 128 << 10), ("1mib", 1 << 20)]
    {
        if let Some(raw) = &raw {
            print(&format!("mapped.{name}.raw.us"), by_hand(raw, bytes), "us");
        }
        let one = |in_place| {
            let task = alone(device.clone(), scale.clone(), bytes, in_place);
            measure::on_worker(&runtime, task)
        };
        let (in_place, copied) = (one(true), one(false));
        print(&format!("mapped.{name}.us"), in_place, "us");
        print(&format!("mapped.{name}.three_calls.us"), copied, "us");
        print(&format!("mapped.{name}.ratio"), in_place / copied, "ratio");
        let [in_place, copied] = [true, false].map(|how| together(&device, &scale, bytes, how));
        print(&format!("mapped.{name}.threads16.requests_per_s"), in_place, "count");
        print(&format!("mapped.{name}.threads16.three_calls.requests_per_s"), copied, "count");
        print(&format!("mapped.{name}.threads16.ratio"), in_place / copied, "ratio");
    }
}
