//! What do copies, allocations and the bookkeeping of buffers cost beside the bare driver?
//!
//! On a GPU each figure has its baseline through the driver API, in the same process, round by
//! round; on the host device there is none. In a smoke test everything is small. Prints `name value
//! unit`: medians, but for the longest poll.
//!
//! `pinned.raw_*` copies from and into the very pinned memory of `pinned.*`, on the same streams;
//! `pinned.raw_host_alloc_*` is the same with memory of `cuMemHostAlloc`.
//!
//! `hazard.same_stream_ns` is the time of a launch with eight tracked buffers less that with eight
//! untracked ones, for one buffer. The driver calls of an edge are counted on a recording host
//! device. `frozen.gain_percent` is what sixteen threads that read the same eight buffers of weights
//! gain from weights that are frozen.
//!
//! `fill.*` are of elements of so many bytes: 4 are the driver's memset, others a launch. `rows.*` are copies of so many bytes
//! of each row of so many, read and written bytes a second; in a list, and by the driver.
//!
//! `pageable.longest_poll_us` is the longest of all polls of the copies' futures, `poll_p999_us` what one
//! in a thousand takes. `pageable.floor_*` are polls that only look at the clock for ten microseconds, on
//! the same thread while another task copies: what the machine adds to anybody's.

#[path = "measure.rs"]
mod measure;
#[path = "raw/copies.rs"]
mod raw;

use std::ffi::c_void;
use std::pin::Pin;
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use gpu_await::{
    Copy2d, Device, DeviceBuffer, DeviceKind, Element, Readable, Region, Stream, View, kernel,
    kernels, testing,
};
use raw::Copies;

kernel! {
    /// Touches nothing of eight buffers.
    unsafe fn touch(
        a: &[f32], b: &[f32], c: &[f32], d: &[f32], e: &[f32], f: &[f32], g: &[f32], h: &[f32]
    );
    launch = gpu_await::LaunchConfig::new(1, 1);
    ptx = TOUCH;
    host = touch_twin;
}

const TOUCH: &str = ".version 8.0\n.target sm_60\n.address_size 64\n.visible .entry touch(\
    .param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d, \
    .param .u64 e, .param .u64 f, .param .u64 g, .param .u64 h) { ret; }\n";

#[expect(clippy::too_many_arguments, reason = "eight buffers")]
fn touch_twin(
    _: &gpu_await::Grid,
    _: &[f32],
    _: &[f32],
    _: &[f32],
    _: &[f32],
    _: &[f32],
    _: &[f32],
    _: &[f32],
    _: &[f32],
) {
}

/// A future whose polls are timed, in microseconds: by the clock, and of the thread's own time.
struct Polled<'a, F> {
    future: F,
    polls: &'a mut Polls,
}

#[derive(Default)]
struct Polls {
    wall_us: Vec<f64>,
    cpu_us: Vec<f64>,
}

impl Polls {
    fn longest(times: &[f64]) -> f64 {
        times.iter().copied().fold(0.0, f64::max)
    }

    fn p999(mut times: Vec<f64>) -> f64 {
        times.sort_by(f64::total_cmp);
        times[times.len() * 999 / 1000]
    }
}

impl<F: Future + Unpin> Future for Polled<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let (start, cpu) = (Instant::now(), thread_us());
        let poll = Pin::new(&mut self.future).poll(cx);
        let (wall_us, cpu_us) = (us(start), thread_us() - cpu);
        self.polls.wall_us.push(wall_us);
        self.polls.cpu_us.push(cpu_us);
        poll
    }
}

/// Looks at the clock for ten microseconds a poll, until a task has ended.
struct Watches(tokio::task::JoinHandle<()>);

impl Future for Watches {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(10) {
            std::hint::spin_loop();
        }
        let ended = Pin::new(&mut self.0).poll(cx).map(Result::unwrap);
        cx.waker().wake_by_ref();
        ended
    }
}

/// The processor time of this thread.
fn thread_us() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is live and of the type that the call fills.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

fn us(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// Gigabytes a second, from bytes and microseconds.
fn gb_s(bytes: usize, us: f64) -> f64 {
    bytes as f64 / us / 1e3
}

struct Bench {
    device: Device,
    raw: Option<Copies>,
    /// Rounds of what takes long.
    rounds: usize,
    /// Bytes of a large copy.
    large: usize,
}

#[tokio::main(worker_threads = 4)]
async fn main() {
    let device = measure::device();
    let smoke = measure::is_smoke();
    let bench = Bench {
        raw: (device.kind() == DeviceKind::Cuda).then(|| Copies::new(2)),
        device,
        rounds: if smoke { 3 } else { 15 },
        large: if smoke { 32 << 20 } else { 256 << 20 },
    };
    // On the main thread, where the raw calls find their context current.
    bench.run().await;
}

impl Bench {
    async fn run(&self) {
        self.pageable().await;
        self.pinned().await;
        self.allocations().await;
        self.fills().await;
        self.rows().await;
        self.small().await;
        self.same_stream().await;
        edges();
        self.frozen().await;
    }

    async fn pageable(&self) {
        let stream = self.device.stream().unwrap();
        let bytes = self.large;
        let source: Arc<[u8]> = vec![7; bytes].into();
        let (mut up, mut down, mut polls) = (Vec::new(), Vec::new(), Polls::default());
        let (mut raw_up, mut raw_down, mut raw_fresh) = (Vec::new(), Vec::new(), Vec::new());
        let mut touched = vec![1_u8; bytes];
        let mut into = Vec::new();
        for round in 0..=self.rounds {
            let start = Instant::now();
            let upload = Box::pin(stream.upload_staged(source.clone()));
            let x = Polled { future: upload, polls: &mut polls }.await.unwrap();
            stream.done().await.unwrap();
            up.push(us(start));
            let start = Instant::now();
            let download = Box::pin(stream.download_staged(&x));
            let back = Polled { future: download, polls: &mut polls }.await.unwrap();
            down.push(us(start));
            assert!(back[bytes - 1] == 7);
            let start = Instant::now();
            let back = stream.download_staged_into(&x, back).await.unwrap();
            into.push(us(start));
            drop(back);
            if let Some(raw) = &self.raw {
                let there = raw.device(bytes);
                let start = Instant::now();
                raw.upload(0, there, source.as_ptr().cast(), bytes);
                raw.synchronize(0);
                raw_up.push(us(start));
                let start = Instant::now();
                raw.download(0, touched.as_mut_ptr().cast(), there, bytes);
                raw.synchronize(0);
                raw_down.push(us(start));
                let mut fresh: Vec<u8> = Vec::with_capacity(bytes);
                let start = Instant::now();
                raw.download(0, fresh.as_mut_ptr().cast(), there, bytes);
                raw.synchronize(0);
                raw_fresh.push(us(start));
                raw.free(there);
            }
            if round == 0 {
                // The first makes threads and pinned memory.
                let (wall_us, cpu_us) = (&polls.wall_us, &polls.cpu_us);
                println!("pageable.first_longest_poll_us {:.1} us", Polls::longest(wall_us));
                println!("pageable.first_longest_poll_cpu_us {:.1} us", Polls::longest(cpu_us));
                (up, down, polls) = (Vec::new(), Vec::new(), Polls::default());
            }
        }
        println!("pageable.upload_gb_s {:.2} GB/s", gb_s(bytes, median(up)));
        println!("pageable.download_gb_s {:.2} GB/s", gb_s(bytes, median(down)));
        println!("pageable.download_into_gb_s {:.2} GB/s", gb_s(bytes, median(into)));
        println!("pageable.longest_poll_us {:.1} us", Polls::longest(&polls.wall_us));
        println!("pageable.longest_poll_cpu_us {:.1} us", Polls::longest(&polls.cpu_us));
        println!("pageable.poll_p999_us {:.1} us", Polls::p999(polls.wall_us));
        self.floor(&stream, &source).await;
        if self.raw.is_some() {
            println!("pageable.driver_upload_gb_s {:.2} GB/s", gb_s(bytes, median(raw_up)));
            println!("pageable.driver_download_gb_s {:.2} GB/s", gb_s(bytes, median(raw_down)));
            println!(
                "pageable.driver_fresh_download_gb_s {:.2} GB/s",
                gb_s(bytes, median(raw_fresh))
            );
        }
    }

    async fn floor(&self, stream: &Stream, source: &Arc<[u8]>) {
        let mut polls = Polls::default();
        for _ in 0..self.rounds {
            let (stream, source) = (stream.clone(), source.clone());
            let copies = tokio::spawn(async move {
                let x = stream.upload_staged(source).await.unwrap();
                drop(stream.download_staged(&x).await.unwrap());
            });
            Polled { future: Watches(copies), polls: &mut polls }.await;
        }
        println!("pageable.floor_longest_poll_us {:.1} us", Polls::longest(&polls.wall_us));
        println!("pageable.floor_poll_p999_us {:.1} us", Polls::p999(polls.wall_us));
    }

    /// Ours and the driver's by turns: on the same two streams, from and into the same pinned memory,
    /// one copy of the same size in flight a stream. And once more with pinned memory of the driver's.
    async fn pinned(&self) {
        let (s, t) = (self.device.stream().unwrap(), self.device.stream().unwrap());
        let bytes = self.large;
        let mut x = s.zeros::<u8>(bytes).await.unwrap();
        let y = t.zeros::<u8>(bytes).await.unwrap();
        let mut there = self.device.pinned_async::<u8>(bytes).await.unwrap();
        let mut back = self.device.pinned_async::<u8>(bytes).await.unwrap();
        there.fill(1);
        back.fill(1);
        let raw = self.raw.as_ref().map(|_| {
            // SAFETY: used here only, while both streams live, and never captured.
            let raw = Copies::over(&[&s, &t].map(|stream| unsafe { stream.as_raw() }));
            let ends = (raw.device(bytes), raw.device(bytes));
            let host = (raw.pinned(bytes), raw.pinned(bytes));
            (raw, ends, host)
        });
        let [mut ours, mut theirs, mut allocated] = [(); 3].map(|()| Directions::default());
        for round in 0..=self.rounds {
            for turn in 0..3 {
                match ((round + turn) % 3, &raw) {
                    (0, _) => {
                        let start = Instant::now();
                        there = s.upload_into(there, &mut x).await.unwrap();
                        ours.up.push(us(start));
                        let start = Instant::now();
                        back = t.download_into(&y, back).await.unwrap();
                        ours.down.push(us(start));
                        let start = Instant::now();
                        let up = s.upload_into(there, &mut x);
                        (there, back) = up.and(t.download_into(&y, back)).await.unwrap();
                        ours.both.push(us(start));
                    }
                    (1, Some((raw, ends, _))) => {
                        let host = (there.as_ptr().cast(), back.as_mut_ptr().cast());
                        theirs.copy(raw, *ends, host, bytes);
                    }
                    (2, Some((raw, ends, host))) => {
                        allocated.copy(raw, *ends, (host.0.0.cast_const(), host.1.0), bytes);
                    }
                    _ => {}
                }
            }
            if round == 0 {
                // The first maps and wakes up.
                [&mut ours, &mut theirs, &mut allocated].into_iter().for_each(Directions::clear);
            }
        }
        ours.print("pinned.", bytes);
        if let Some((raw, (a, b), _)) = &raw {
            theirs.print("pinned.raw_", bytes);
            allocated.print("pinned.raw_host_alloc_", bytes);
            raw.free(*a);
            raw.free(*b);
        }
    }

    async fn fills(&self) {
        self.fill("4_bytes", [1u8, 2, 3, 4], 0).await;
        self.fill("3_bytes", [1u8, 2, 3], 0).await;
        self.fill("7_bytes", [1u8, 2, 3, 4, 5, 6, 7], 0).await;
        self.fill("8_bytes", 0.1f64.to_ne_bytes(), 0).await;
        self.fill("8_bytes_off_a_line", 0.1f64.to_ne_bytes(), 1).await;
        self.fill("16_bytes", [1u32, 2, 3, 4], 0).await;
    }

    /// All elements but the first `skipped`.
    async fn fill<T: Element>(&self, name: &str, value: T, skipped: usize) {
        let stream = self.device.stream().unwrap();
        let mut x = stream.zeros::<T>(self.large / size_of::<T>()).await.unwrap();
        let mut times = Vec::new();
        for _ in 0..=self.rounds {
            let start = Instant::now();
            stream.fill(&mut x.slice_mut(skipped..).unwrap(), value).await.unwrap();
            times.push(us(start));
        }
        let rate = gb_s(self.large, median(times));
        println!("fill.{name}_gb_s {rate:.1} GB/s");
    }

    async fn rows(&self) {
        let stream = self.device.stream().unwrap();
        let x = stream.zeros::<u8>(self.large).await.unwrap();
        let mut to = stream.zeros::<u8>(self.large).await.unwrap();
        let mut region = Region::new();
        for (row_bytes, pitch) in [(3, 4), (4, 8), (64, 128), (1000, 1003), (1024, 2048)] {
            let count = self.large / pitch;
            let rows = Copy2d::new(row_bytes, count).source_pitch(pitch);
            let [mut ours, mut listed, mut theirs] = [(); 3].map(|()| Vec::new());
            for _ in 0..=self.rounds {
                let start = Instant::now();
                stream.copy_2d(&x, &mut to, rows).await.unwrap();
                ours.push(us(start));
                let start = Instant::now();
                let list = stream.replay(&mut region, |q| q.copy_2d(&x, &mut to, rows));
                list.await.unwrap();
                listed.push(us(start));
                if let Some(raw) = &self.raw {
                    let ends = [x.device_ptr(), to.device_ptr()].map(raw::Device);
                    let start = Instant::now();
                    raw.copy_rows(0, ends, [row_bytes, count, pitch]);
                    raw.synchronize(0);
                    theirs.push(us(start));
                }
            }
            let bytes = 2 * row_bytes * count;
            let print = |what: &str, times: Vec<f64>| {
                let rate = gb_s(bytes, median(times));
                println!("rows.{what}{row_bytes}_of_{pitch}_gb_s {rate:.1} GB/s");
            };
            print("", ours);
            print("listed_", listed);
            if self.raw.is_some() {
                print("raw_", theirs);
            }
        }
    }

    async fn allocations(&self) {
        const MIB: usize = 1 << 20;
        const EACH: usize = 100;
        let stream = self.device.stream().unwrap();
        let [mut ours, mut theirs, mut pinned] = [(); 3].map(|()| Vec::new());
        drop(self.device.pinned_async::<u8>(MIB).await.unwrap());
        for _ in 0..30 * self.rounds {
            let start = Instant::now();
            for _ in 0..EACH {
                drop(stream.zeros::<u8>(MIB).queued().unwrap());
            }
            ours.push(us(start) / EACH as f64);
            stream.done().await.unwrap();
            if let Some(raw) = &self.raw {
                let start = Instant::now();
                (0..EACH).for_each(|_| raw.zeros(MIB));
                theirs.push(us(start) / EACH as f64);
                raw.synchronize(0);
            }
            let start = Instant::now();
            for _ in 0..EACH {
                drop(self.device.pinned::<u8>(MIB).unwrap());
            }
            pinned.push(us(start) / EACH as f64);
        }
        println!("alloc.zeros_1mib_us {:.3} us", median(ours));
        if self.raw.is_some() {
            println!("alloc.raw_zeros_1mib_us {:.3} us", median(theirs));
        }
        println!("alloc.pinned_1mib_us {:.3} us", median(pinned));
    }

    async fn small(&self) {
        const LEN: usize = 1024;
        let stream = self.device.stream().unwrap();
        let scale = kernels::scale::load(&self.device).await.unwrap();
        let mut x = stream.zeros::<f32>(LEN).await.unwrap();
        let mut pinned = Some((stream.pinned(LEN).unwrap(), stream.pinned(LEN).unwrap()));
        let ends = self
            .raw
            .as_ref()
            .map(|raw| (raw.pinned(4 * LEN), raw.pinned(4 * LEN), raw.device(4 * LEN)));
        let [mut ours, mut fresh, mut theirs] = [(); 3].map(|()| Vec::new());
        for _ in 0..200 * self.rounds {
            let (from, to) = pinned.take().unwrap();
            let start = Instant::now();
            let op = stream.batch(|queue| {
                let from = queue.upload_into(from, &mut x)?;
                scale.launch(queue, 2.0, &mut x)?;
                Ok((from, queue.download_into(&x, to)?))
            });
            pinned = Some(op.await.unwrap());
            ours.push(us(start));
            let data = [1.0f32; LEN];
            let start = Instant::now();
            let op = stream.batch(|queue| {
                let mut x = queue.upload(data)?;
                scale.launch(queue, 2.0, &mut x)?;
                queue.download_vec(&x)
            });
            let last = op.await.unwrap()[LEN - 1];
            // The stand-in driver computes nothing.
            assert!(last == 2.0 || measure::is_smoke());
            fresh.push(us(start));
            if let (Some(raw), Some((from, to, there))) = (&self.raw, ends) {
                let start = Instant::now();
                raw.upload(0, there, from.0, 4 * LEN);
                raw.scale(0, 2.0, there, LEN);
                raw.download(0, to.0, there, 4 * LEN);
                raw.synchronize(0);
                theirs.push(us(start));
            }
        }
        println!("small.roundtrip_4kib_us {:.2} us", median(ours));
        println!("small.roundtrip_4kib_from_vec_us {:.2} us", median(fresh));
        if self.raw.is_some() {
            println!("small.raw_roundtrip_4kib_us {:.2} us", median(theirs));
        }
    }

    async fn same_stream(&self) {
        let stream = self.device.stream().unwrap();
        let kernel = touch::load(&self.device).await.unwrap();
        let buffers = eight(&stream);
        stream.done().await.unwrap();
        let (mut tracked, mut untracked) = (Vec::new(), Vec::new());
        for _ in 0..100 * self.rounds {
            tracked.push(launches(&stream, &kernel, &views(&buffers, true)));
            stream.done().await.unwrap();
            untracked.push(launches(&stream, &kernel, &views(&buffers, false)));
            stream.done().await.unwrap();
        }
        let (tracked, untracked) = (median(tracked), median(untracked));
        println!("hazard.same_stream_ns {:.1} ns", (tracked - untracked) * 1e3 / 8.0);
        println!("hazard.launch_8_buffers_us {tracked:.3} us");
        println!("hazard.launch_8_untracked_us {untracked:.3} us");
    }

    async fn frozen(&self) {
        const THREADS: usize = 16;
        let kernel = touch::load(&self.device).await.unwrap();
        let stream = self.device.default_stream();
        let weights = eight(stream);
        let mut frozen = Vec::new();
        for buffer in eight(stream) {
            frozen.push(buffer.freeze().await.unwrap());
        }
        self.device.done().await.unwrap();
        let (mut tracked_us, mut frozen_us) = (Vec::new(), Vec::new());
        let device = &self.device;
        for round in 0..20 * self.rounds {
            let is_tracked = round % 2 == 0;
            let barrier = Barrier::new(THREADS);
            let took: Vec<f64> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..THREADS)
                    .map(|_| {
                        scope.spawn(|| {
                            let stream = device.stream().unwrap();
                            barrier.wait();
                            let took = match is_tracked {
                                true => launches(&stream, &kernel, &weights),
                                false => launches(&stream, &kernel, &frozen),
                            };
                            stream.synchronize().unwrap();
                            took
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            (if is_tracked { &mut tracked_us } else { &mut frozen_us }).push(median(took));
        }
        let (tracked_us, frozen_us) = (median(tracked_us), median(frozen_us));
        println!("frozen.tracked_us {tracked_us:.3} us");
        println!("frozen.frozen_us {frozen_us:.3} us");
        println!("frozen.gain_percent {:.1} %", (tracked_us / frozen_us - 1.0) * 100.0);
    }
}

/// Microseconds up, down and both at once.
#[derive(Default)]
struct Directions {
    up: Vec<f64>,
    down: Vec<f64>,
    both: Vec<f64>,
}

impl Directions {
    fn clear(&mut self) {
        *self = Directions::default();
    }

    fn copy(
        &mut self,
        raw: &Copies,
        (a, b): (raw::Device, raw::Device),
        (from, to): (*const c_void, *mut c_void),
        bytes: usize,
    ) {
        let start = Instant::now();
        raw.upload(0, a, from, bytes);
        raw.synchronize(0);
        self.up.push(us(start));
        let start = Instant::now();
        raw.download(1, to, b, bytes);
        raw.synchronize(1);
        self.down.push(us(start));
        let start = Instant::now();
        raw.upload(0, a, from, bytes);
        raw.download(1, to, b, bytes);
        raw.synchronize(0);
        raw.synchronize(1);
        self.both.push(us(start));
    }

    fn print(self, name: &str, bytes: usize) {
        println!("{name}upload_gb_s {:.2} GB/s", gb_s(bytes, median(self.up)));
        println!("{name}download_gb_s {:.2} GB/s", gb_s(bytes, median(self.down)));
        println!("{name}duplex_gb_s {:.2} GB/s", gb_s(2 * bytes, median(self.both)));
    }
}

fn eight(stream: &Stream) -> Vec<DeviceBuffer<f32>> {
    (0..8).map(|_| stream.zeros(64).queued().unwrap()).collect()
}

fn views(buffers: &[DeviceBuffer<f32>], tracked: bool) -> Vec<View<'_, f32>> {
    let view = |buffer| {
        let view = DeviceBuffer::view(buffer);
        // SAFETY: complete before, never written again, and alive until the device is done.
        if tracked { view } else { unsafe { view.untracked() } }
    };
    buffers.iter().map(view).collect()
}

/// Microseconds for one of two hundred launches: below the depth at which the driver blocks.
fn launches(stream: &Stream, kernel: &touch, x: &[impl Readable<f32>]) -> f64 {
    const LAUNCHES: usize = 200;
    let start = Instant::now();
    for _ in 0..LAUNCHES {
        let op = kernel.launch(stream, &x[0], &x[1], &x[2], &x[3], &x[4], &x[5], &x[6], &x[7]);
        op.queued().unwrap();
    }
    us(start) / LAUNCHES as f64
}

/// The driver calls that order a stream behind another one.
fn edges() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let mut x: Vec<_> = (0..2).map(|_| a.zeros::<f32>(64).queued().unwrap()).collect();
    let gate = testing::Gate::close_for(&a, Duration::from_secs(10)).unwrap();
    a.fill(&mut x[0], 1.0).queued().unwrap();
    a.fill(&mut x[1], 1.0).queued().unwrap();
    let calls = |work: &mut dyn FnMut()| {
        handle.record();
        work();
        let calls = handle.calls();
        ["stream_wait_event", "event_record"]
            .map(|name| calls.iter().filter(|call| **call == name).count())
    };
    // The first edge of a device: from now on each operation on a buffer is followed by its event.
    b.fill(&mut x[0], 2.0).queued().unwrap();
    let [ordered_waits, _] = calls(&mut || b.fill(&mut x[1], 2.0).queued().unwrap());
    let [waits, events] = calls(&mut || a.fill(&mut x[0], 3.0).queued().unwrap());
    gate.open();
    println!("hazard.other_stream_driver_calls {} calls", waits + events);
    println!("hazard.other_stream_waits {waits} calls");
    println!("hazard.already_ordered_waits {ordered_waits} calls");
    println!("hazard.events_an_operation {events} calls");
    device.synchronize().unwrap();
}
