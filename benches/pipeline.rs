//! How near does a pipeline of copies and kernels come to its slowest stage, and what does it cost
//! that the library orders the streams?
//!
//! `pipeline.efficiency`: items go up, through a kernel that is longer than a copy, and down, each on
//! one of four streams; compared with the slowest of the three stages alone (all items' kernels on
//! one stream).
//!
//! `pipeline.exact_cost`: the same with a stream for each stage, so that every buffer crosses
//! streams twice an item; compared with the bare driver with events in the same places, in the same
//! process, round by round. Both wait on the host for an item's slot before they use it again.
//!
//! Medians.

#[path = "measure.rs"]
mod measure;
#[path = "raw/copies.rs"]
mod raw;

use std::collections::VecDeque;
use std::time::Instant;

use gpu_await::{Device, DeviceBuffer, Op, PinnedBuffer, Stream, kernels};
use measure::{Sorted, print, rounds};
use raw::Copies;

/// Buffers on the device, and pinned pairs.
const SLOTS: usize = 4;

type Pair = (PinnedBuffer<f32>, PinnedBuffer<f32>);

struct Bench {
    device: Device,
    streams: Vec<Stream>,
    scale: kernels::scale,
    spin: kernels::spin,
    slots: Vec<DeviceBuffer<f32>>,
    pairs: VecDeque<Pair>,
    raw: Option<Raw>,
    items: usize,
}

/// The same by hand.
struct Raw {
    copies: Copies,
    from: raw::Pinned,
    to: raw::Pinned,
    slots: Vec<raw::Device>,
}

fn ms(start: Instant) -> f64 {
    measure::ms(start.elapsed())
}

fn median(samples: Vec<f64>) -> f64 {
    Sorted::new(samples).p50()
}

#[tokio::main(worker_threads = 4)]
async fn main() {
    let device = measure::device();
    let (len, items) = (rounds(4 << 20, 1 << 18), rounds(96, 12));
    let raw = measure::on_cuda().then(|| Raw::new(4 * len));
    let mut bench = Bench::new(device, raw, len, items).await;
    // The kernels of an item take longer than either of its copies, also beside each other.
    let copy_us = 1e3 * bench.copies_alone().await / items as f64;
    let spin_ns = (1_300.0 * copy_us) as u64;
    print("pipeline.item_copy_us", copy_us, "us");
    print("pipeline.item_kernel_us", spin_ns as f64 / 1e3, "us");

    let [mut kernels, mut whole, mut crossing, mut by_hand] = [(); 4].map(|()| Vec::new());
    let [mut short, mut short_by_hand] = [(); 2].map(|()| Vec::new());
    for _ in 0..rounds(21, 3) {
        kernels.push(bench.kernels_alone(spin_ns).await);
        whole.push(bench.in_one_stream_each(spin_ns).await);
        crossing.push(bench.crossing(spin_ns).await);
        short.push(bench.crossing(0).await);
        if let Some(raw) = &bench.raw {
            by_hand.push(raw.crossing(spin_ns, len, items));
            short_by_hand.push(raw.crossing(0, len, items));
        }
    }
    let (kernels, whole, crossing) = (median(kernels), median(whole), median(crossing));
    let short = median(short);
    print("pipeline.slowest_stage_ms", kernels, "ms");
    print("pipeline.whole_ms", whole, "ms");
    print("pipeline.efficiency", kernels / whole, "ratio");
    print("pipeline.crossing_ms", crossing, "ms");
    print("pipeline.crossing_efficiency", kernels / crossing, "ratio");
    print("pipeline.copy_bound_ms", short, "ms");
    if bench.raw.is_some() {
        let (by_hand, short_by_hand) = (median(by_hand), median(short_by_hand));
        print("pipeline.raw_crossing_ms", by_hand, "ms");
        print("pipeline.exact_cost", crossing / by_hand, "ratio");
        print("pipeline.raw_copy_bound_ms", short_by_hand, "ms");
        print("pipeline.copy_bound_exact_cost", short / short_by_hand, "ratio");
    }
}

impl Bench {
    async fn new(device: Device, raw: Option<Raw>, len: usize, items: usize) -> Self {
        let streams: Vec<_> = (0..SLOTS).map(|_| device.stream().unwrap()).collect();
        let mut pairs = VecDeque::new();
        for _ in 0..SLOTS {
            let from = device.pinned_async(len).await.unwrap();
            pairs.push_back((from, device.pinned_async(len).await.unwrap()));
        }
        Bench {
            scale: kernels::scale::load(&device).await.unwrap(),
            spin: kernels::spin::load(&device).await.unwrap(),
            slots: (0..SLOTS).map(|n| streams[n].zeros(len).queued().unwrap()).collect(),
            device,
            streams,
            pairs,
            raw,
            items,
        }
    }

    /// All uploads on one stream beside all downloads on another.
    async fn copies_alone(&mut self) -> f64 {
        let (first, second) = self.slots.split_at_mut(1);
        let (up, down) = (&self.streams[0], &self.streams[1]);
        self.device.done().await.unwrap();
        let mut took = f64::MAX;
        for _ in 0..3 {
            let start = Instant::now();
            for _ in 0..self.items {
                let (from, to) = self.pairs.pop_front().unwrap();
                let copies = up.upload_into(from, &mut first[0]);
                let copies = copies.and(down.download_into(&second[0], to));
                self.pairs.push_back(copies.await.unwrap());
            }
            took = took.min(ms(start));
        }
        took
    }

    async fn kernels_alone(&mut self, spin_ns: u64) -> f64 {
        let stream = &self.streams[0];
        self.device.done().await.unwrap();
        let start = Instant::now();
        for n in 0..self.items {
            self.scale.launch(stream, 2.0, &mut self.slots[n % SLOTS]).queued().unwrap();
            self.spin.launch(stream, spin_ns).queued().unwrap();
        }
        stream.done().await.unwrap();
        ms(start)
    }

    async fn in_one_stream_each(&mut self, spin_ns: u64) -> f64 {
        // The kernels of all items on one stream, one behind the other, as on a GPU that one of them
        // fills: these spin on a single thread and would run side by side.
        let kernels = self.device.stream().unwrap();
        self.device.done().await.unwrap();
        let mut flying: VecDeque<Op<Pair>> = VecDeque::new();
        let start = Instant::now();
        for n in 0..self.items {
            if flying.len() == SLOTS {
                self.pairs.push_back(flying.pop_front().unwrap().await.unwrap());
            }
            let (from, to) = self.pairs.pop_front().unwrap();
            let (stream, x) = (&self.streams[n % SLOTS], &mut self.slots[n % SLOTS]);
            let up = stream.upload_into(from, x);
            self.scale.launch(stream, 2.0, x).queued().unwrap();
            kernels.wait(stream).queued().unwrap();
            self.spin.launch(&kernels, spin_ns).queued().unwrap();
            stream.wait(&kernels).queued().unwrap();
            flying.push_back(up.and(stream.download_into(x, to)));
        }
        self.land(flying).await;
        ms(start)
    }

    /// A stream for each stage; the order between them is the library's.
    async fn crossing(&mut self, spin_ns: u64) -> f64 {
        self.device.done().await.unwrap();
        let mut flying: VecDeque<Op<Pair>> = VecDeque::new();
        let start = Instant::now();
        for n in 0..self.items {
            if flying.len() == SLOTS {
                self.pairs.push_back(flying.pop_front().unwrap().await.unwrap());
            }
            let (from, to) = self.pairs.pop_front().unwrap();
            let [up, compute, down, ..] = &self.streams[..] else { unreachable!("four") };
            let x = &mut self.slots[n % SLOTS];
            let uploaded = up.upload_into(from, x);
            self.spin.launch(compute, spin_ns).queued().unwrap();
            self.scale.launch(compute, 2.0, x).queued().unwrap();
            flying.push_back(uploaded.and(down.download_into(x, to)));
        }
        self.land(flying).await;
        ms(start)
    }

    async fn land(&mut self, flying: VecDeque<Op<Pair>>) {
        for op in flying {
            self.pairs.push_back(op.await.unwrap());
        }
    }
}

impl Raw {
    fn new(bytes: usize) -> Self {
        let copies = Copies::new(3);
        let slots = (0..SLOTS).map(|_| copies.device(bytes)).collect();
        let (from, to) = (copies.pinned(SLOTS * bytes), copies.pinned(SLOTS * bytes));
        Raw { copies, from, to, slots }
    }

    /// [`Bench::crossing`], with an event after each stage and a wait before the next.
    fn crossing(&self, spin_ns: u64, len: usize, items: usize) -> f64 {
        const UP: usize = 0;
        const COMPUTE: usize = 1;
        const DOWN: usize = 2;
        let (copies, bytes) = (&self.copies, 4 * len);
        let events: Vec<_> = (0..SLOTS).map(|_| [(); 3].map(|()| copies.event())).collect();
        let start = Instant::now();
        for n in 0..items {
            let (slot, [up, computed, down]) = (n % SLOTS, events[n % SLOTS]);
            let x = self.slots[slot];
            if n >= SLOTS {
                copies.synchronize_event(down);
                copies.wait(UP, down);
            }
            copies.upload(UP, x, self.from.at(slot * bytes), bytes);
            copies.record(up, UP);
            copies.spin(COMPUTE, spin_ns);
            copies.wait(COMPUTE, up);
            copies.scale(COMPUTE, 2.0, x, len);
            copies.record(computed, COMPUTE);
            copies.wait(DOWN, computed);
            copies.download(DOWN, self.to.at(slot * bytes), x, bytes);
            copies.record(down, DOWN);
        }
        (0..3).for_each(|stream| copies.synchronize(stream));
        let took = ms(start);
        events.into_iter().flatten().for_each(|event| copies.destroy(event));
        took
    }
}
