//! How late does an await find a completion whose time nobody could know?
//!
//! Lateness is the time from the launch to the resolved future, less the kernel's own time. Beside it,
//! under the same name with `raw`, a thread for each stream that launches, records and spins on the
//! event: the least there is, at a core a stream. Where waits are long there is a third line, `naps`: the bare
//! driver again, asked by a thread that naps a 64th of the wait in between, at least 20 µs and at most 1 ms.
//! That is what such a bound costs, and how late it is, when nobody must be woken.
//!
//! | lines | the load |
//! |---|---|
//! | `mixed16_log`, `mixed16_uniform` | 16 tasks with a stream each, 5 µs to 2 ms |
//! | `random_1_20ms` | one stream, any length |
//! | `steady_10ms_then_4ms`, `steady_100us_then_10ms` | 40 equal ones, then the one that is measured |
//! | `first_100ms` | on a stream that is new |
//! | `alternating_20us_3ms` | the 3 ms |
//! | `alternating_20us_60us` | the 60 µs: both are checked for, one after the other |
//! | `repeat_200ms` | again and again |
//! | `callback_mode_60ms` | the same, with completions learned by host callbacks alone |
//! | `spawn_60ms_then_await` | a task spawns another, which works 60 ms, and awaits 20 µs; four workers |
//! | `send_then_await_3ms` | a task sends to another, which works 3 ms, and awaits 20 µs |
//! | `roundtrip64` | 64 tasks: 1 KiB up, a kernel, 1 KiB down; raw with as many under way, and with 16 (`roundtrip16`) |
//!
//! The two of executors stand beside a oneshot that a thread sends (`oneshot`).

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use gpu_await::{Completion, Device, Stream, kernels};
use measure::{Sorted, Usage, print, rounds, us, window, work};
use raw::{Raw, RawEvent, RawStream, Seat};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
/// The bounds of the default mode's naps.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(1);
/// Longer kernels are waited for with naps as well.
const LONG_NS: u64 = MS;

fn main() {
    let raw = measure::on_cuda().then(Raw::load);
    let device = measure::device();
    let runtime = measure::workers(measure::cores());
    let bench = measure::on_worker(&runtime, Bench::new(device));
    mixed(&runtime, &bench, raw, "mixed16_log", Lengths::log(5 * US, 2 * MS));
    mixed(&runtime, &bench, raw, "mixed16_uniform", Lengths::uniform(5 * US, 2 * MS));
    let one = |name: &str, loads: Vec<Load>| one(&runtime, &bench, raw, name, &loads);
    let lengths = Lengths::uniform(MS, 20 * MS).take(rounds(200, 2));
    one("random_1_20ms", lengths.map(|ns| Load { before: vec![], ns, fresh: false }).collect());
    one("steady_10ms_then_4ms", after(vec![10 * MS; 40], 4 * MS, rounds(8, 1)));
    one("steady_100us_then_10ms", after(vec![100 * US; 40], 10 * MS, rounds(50, 1)));
    let first = Load { before: vec![], ns: 100 * MS, fresh: true };
    one("first_100ms", vec![first; rounds(15, 1)]);
    one("alternating_20us_3ms", after(vec![20 * US], 3 * MS, rounds(300, 2)));
    one("alternating_20us_60us", after(vec![20 * US], 60 * US, rounds(2000, 2)));
    one("repeat_200ms", after(vec![], 200 * MS, rounds(20, 1)));
    let four = measure::workers(4);
    spawn_then_await(&four, &bench, rounds(20, 1));
    send_then_await(&four, &bench, rounds(100, 2));
    roundtrip(&runtime, &bench, raw, 64);
    drop(bench);
    let callbacks =
        measure::on_worker(&runtime, Bench::new(measure::device_with(Completion::Callback)));
    let loads = after(vec![], 60 * MS, rounds(20, 1));
    self::one(&runtime, &callbacks, None, "callback_mode_60ms", &loads);
}

#[derive(Clone)]
struct Bench {
    device: Device,
    spin: kernels::spin,
    scale: kernels::scale,
}

impl Bench {
    /// With something already awaited.
    async fn new(device: Device) -> Self {
        let spin = kernels::spin::load(&device).await.expect("loads");
        let scale = kernels::scale::load(&device).await.expect("loads");
        let bench = Bench { device, spin, scale };
        let stream = bench.stream();
        for _ in 0..rounds(100, 10) {
            bench.late(&stream, 20 * US).await;
        }
        bench
    }

    fn stream(&self) -> Stream {
        self.device.stream().expect("a stream")
    }

    /// Awaits a kernel of that length; how late, in microseconds.
    async fn late(&self, stream: &Stream, ns: u64) -> f64 {
        let start = Instant::now();
        self.spin.launch(stream, ns).await.expect("completes");
        lateness(start, ns)
    }
}

/// The bare driver: a stream and the event that a thread spins on.
struct Spinner {
    stream: RawStream,
    event: RawEvent,
}

impl Spinner {
    fn new(raw: &'static Raw) -> Self {
        Spinner { stream: raw.stream(), event: raw.event() }
    }

    /// As [`Bench::late`].
    fn late(&self, ns: u64) -> f64 {
        let start = self.start(ns);
        self.event.spin();
        lateness(start, ns)
    }

    /// As [`late`](Self::late), with naps in between.
    fn late_with_naps(&self, ns: u64) -> f64 {
        let start = self.start(ns);
        while !self.event.is_complete() {
            let nap = (start.elapsed() / 64).clamp(SHORTEST_NAP, LONGEST_NAP);
            std::thread::sleep(nap);
        }
        lateness(start, ns)
    }

    fn start(&self, ns: u64) -> Instant {
        let start = Instant::now();
        self.stream.launch_spin(ns);
        self.stream.record(&self.event);
        start
    }
}

fn lateness(start: Instant, ns: u64) -> f64 {
    us(start.elapsed()) - us(Duration::from_nanos(ns))
}

/// Kernel lengths at random, the same in each run.
#[derive(Clone)]
struct Lengths {
    state: u64,
    pick: fn(f64, f64, f64) -> f64,
    least: u64,
    most: u64,
}

impl Lengths {
    fn uniform(least: u64, most: u64) -> Self {
        Lengths { state: 1, pick: |part, least, most| least + part * (most - least), least, most }
    }

    fn log(least: u64, most: u64) -> Self {
        let pick = |part: f64, least: f64, most: f64| least * (most / least).powf(part);
        Lengths { state: 1, pick, least, most }
    }

    fn seeded(mut self, seed: u64) -> Self {
        self.state = seed + 1;
        self
    }
}

impl Iterator for Lengths {
    type Item = u64;

    /// A linear congruential generator: Knuth's constants.
    fn next(&mut self) -> Option<u64> {
        let next = self.state.wrapping_mul(6_364_136_223_846_793_005);
        self.state = next.wrapping_add(1_442_695_040_888_963_407);
        let part = (self.state >> 11) as f64 / (1_u64 << 53) as f64;
        Some((self.pick)(part, self.least as f64, self.most as f64) as u64)
    }
}

fn report(name: &str, late: Vec<f64>, cores: Option<f64>) {
    let late = Sorted::new(late);
    print(&format!("waits.{name}.p50_us"), late.p50(), "us");
    print(&format!("waits.{name}.p99_us"), late.p99(), "us");
    print(&format!("waits.{name}.max_us"), late.max(), "us");
    if let Some(cores) = cores {
        print(&format!("waits.{name}.cores"), cores, "cores");
    }
}

/// Sixteen at once.
fn mixed(runtime: &Runtime, bench: &Bench, raw: Option<&'static Raw>, name: &str, of: Lengths) {
    if let Some(raw) = raw {
        let begin = Instant::now() + Duration::from_millis(100);
        let end = begin + Duration::from_secs(1);
        let usage = Usage::start();
        let threads: Vec<_> = (0..16)
            .map(|index| {
                let lengths = of.clone().seeded(index);
                std::thread::spawn(move || {
                    let spinner = Spinner::new(raw);
                    let mut late = Vec::new();
                    for ns in lengths {
                        let start = Instant::now();
                        let lateness = spinner.late(ns);
                        if start > begin {
                            late.push(lateness);
                        }
                        if start > end {
                            break;
                        }
                    }
                    late
                })
            })
            .collect();
        let late = threads.into_iter().flat_map(|thread| thread.join().expect("no panic"));
        report(&format!("{name}.raw"), late.collect(), Some(usage.cores()));
    }
    let begin = Instant::now() + window(Duration::from_millis(200));
    let end = begin + window(Duration::from_secs(2));
    let tasks: Vec<_> = (0..16)
        .map(|index| {
            let (bench, lengths) = (bench.clone(), of.clone().seeded(index));
            runtime.spawn(async move {
                let stream = bench.stream();
                let mut late = Vec::new();
                for ns in lengths {
                    let start = Instant::now();
                    let lateness = bench.late(&stream, ns).await;
                    if start > begin {
                        late.push(lateness);
                    }
                    if start > end {
                        break;
                    }
                }
                late
            })
        })
        .collect();
    let cores = measure::cores_between(begin, end);
    let late = tasks.into_iter().flat_map(|task| runtime.block_on(task).expect("no panic"));
    report(name, late.collect(), Some(cores));
}

/// What is awaited before, on the same stream, and the length that is measured.
#[derive(Clone)]
struct Load {
    before: Vec<u64>,
    ns: u64,
    /// On a stream of its own.
    fresh: bool,
}

fn after(before: Vec<u64>, ns: u64, rounds: usize) -> Vec<Load> {
    vec![Load { before, ns, fresh: false }; rounds]
}

/// One stream at a time.
fn one(runtime: &Runtime, bench: &Bench, raw: Option<&'static Raw>, name: &str, loads: &[Load]) {
    if let Some(raw) = raw {
        let spinner = Spinner::new(raw);
        let few = loads.iter().take(loads.len().div_ceil(4));
        let late = few.map(|load| {
            for ns in load.before.iter().take(2) {
                spinner.late(*ns);
            }
            spinner.late(load.ns)
        });
        report(&format!("{name}.raw"), late.collect(), None);
        if loads.iter().all(|load| load.ns >= LONG_NS && load.before.is_empty()) {
            let (late, cores) = naps(raw, loads);
            report(&format!("{name}.naps"), late, Some(cores));
        }
    }
    let (bench, loads) = (bench.clone(), loads.to_vec());
    let usage = Usage::start();
    let late = measure::on_worker(runtime, async move {
        let mut stream = bench.stream();
        let mut late = Vec::new();
        for load in loads {
            if load.fresh {
                stream = bench.stream();
            }
            for ns in load.before {
                bench.late(&stream, ns).await;
            }
            late.push(bench.late(&stream, load.ns).await);
        }
        late
    });
    report(name, late, Some(usage.cores()));
}

/// How late a thread of its own is that naps, and what it costs in cores.
fn naps(raw: &'static Raw, loads: &[Load]) -> (Vec<f64>, f64) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            measure::exact_naps();
            let spinner = Spinner::new(raw);
            let usage = Usage::start();
            let late = loads.iter().map(|load| spinner.late_with_naps(load.ns)).collect();
            (late, usage.cores())
        });
        thread.join().expect("no panic")
    })
}

/// A oneshot that a thread sends after 20 µs; how late, in microseconds.
async fn oneshot_late() -> f64 {
    let (sender, receiver) = oneshot::channel();
    let start = Instant::now();
    std::thread::spawn(move || {
        work(Duration::from_micros(20));
        sender.send(()).expect("somebody waits");
    });
    receiver.await.expect("is sent");
    lateness(start, 20 * US)
}

fn spawn_then_await(runtime: &Runtime, bench: &Bench, rounds: usize) {
    for way in ["oneshot", "await"] {
        let bench = bench.clone();
        let late = measure::on_worker(runtime, async move {
            let stream = bench.stream();
            let mut late = Vec::new();
            for _ in 0..rounds {
                let neighbour = tokio::spawn(async { work(Duration::from_millis(60)) });
                late.push(match way {
                    "oneshot" => oneshot_late().await,
                    _ => bench.late(&stream, 20 * US).await,
                });
                neighbour.await.expect("no panic");
            }
            late
        });
        let name = if way == "await" { "spawn_60ms_then_await" } else { "spawn_60ms.oneshot" };
        report(name, late, None);
    }
}

fn send_then_await(runtime: &Runtime, bench: &Bench, rounds: usize) {
    for way in ["oneshot", "await"] {
        let bench = bench.clone();
        let late = measure::on_worker(runtime, async move {
            let (sender, mut receiver) = mpsc::channel(1);
            let neighbour = tokio::spawn(async move {
                while receiver.recv().await.is_some() {
                    work(Duration::from_millis(3));
                }
            });
            let stream = bench.stream();
            let mut late = Vec::new();
            for _ in 0..rounds {
                sender.send(()).await.expect("is received");
                late.push(match way {
                    "oneshot" => oneshot_late().await,
                    _ => bench.late(&stream, 20 * US).await,
                });
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            drop(sender);
            neighbour.await.expect("no panic");
            late
        });
        let name = if way == "await" { "send_then_await_3ms" } else { "send_3ms.oneshot" };
        report(name, late, None);
    }
}

/// Round trips of 1 KiB by 16 threads with the bare driver, each with so many under way, every one on a
/// stream of its own. It asks for them in turn.
fn roundtrip_raw(raw: &'static Raw, under_way: usize, run: Duration) {
    let (threads, ready) = (16, Barrier::new(16));
    let start = |seat: &mut Seat, event: &RawEvent| {
        let now = Instant::now();
        seat.start(2.0, event);
        now
    };
    let times: Vec<f64> = std::thread::scope(|scope| {
        let spin = || {
            let mut seats: Vec<_> =
                (0..under_way).map(|_| (Seat::new(raw, 256), raw.event())).collect();
            ready.wait();
            let end = Instant::now() + run;
            let mut starts: Vec<_> =
                seats.iter_mut().map(|(seat, event)| start(seat, event)).collect();
            let mut times = Vec::new();
            // One at least, however short the window of a smoke test.
            while times.is_empty() || Instant::now() < end {
                for ((seat, event), started) in seats.iter_mut().zip(&mut starts) {
                    if event.is_complete() {
                        times.push(us(started.elapsed()));
                        *started = start(seat, event);
                    }
                }
            }
            seats.iter().for_each(|(_, event)| event.spin());
            times
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(spin)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    let name = format!("roundtrip{}.raw", threads * under_way);
    let per_second = times.len() as f64 / run.as_secs_f64();
    report(&name, times, None);
    print(&format!("waits.{name}.ops_per_s"), per_second, "count");
}

/// Round trips of 1 KiB by so many tasks.
fn roundtrip(runtime: &Runtime, bench: &Bench, raw: Option<&'static Raw>, tasks: usize) {
    let run = window(Duration::from_secs(2));
    if let Some(raw) = raw {
        roundtrip_raw(raw, 1, run / 4);
        roundtrip_raw(raw, tasks / 16, run / 4);
    }
    let begin = Instant::now() + run / 10;
    let end = begin + run;
    let tasks: Vec<_> = (0..tasks)
        .map(|_| {
            let bench = bench.clone();
            runtime.spawn(async move {
                let stream = bench.stream();
                let mut values = bench.device.pinned::<f32>(256).expect("memory");
                let mut times = Vec::new();
                loop {
                    let start = Instant::now();
                    let mut x = stream.upload(values).queued().expect("is accepted");
                    bench.scale.launch(&stream, 2.0, &mut x).queued().expect("is accepted");
                    values = stream.download(&x).await.expect("completes");
                    let now = Instant::now();
                    if now > end && !times.is_empty() {
                        break times;
                    }
                    if start > begin {
                        times.push(us(now - start));
                    }
                }
            })
        })
        .collect();
    let cores = measure::cores_between(begin, end);
    let times = tasks.into_iter().flat_map(|task| runtime.block_on(task).expect("no panic"));
    let times: Vec<f64> = times.collect();
    print("waits.roundtrip64.ops_per_s", times.len() as f64 / run.as_secs_f64(), "count");
    report("roundtrip64", times, Some(cores));
}
