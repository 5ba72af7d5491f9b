//! Do awaiting tasks slow down threads that launch?
//!
//! Eight threads launch empty kernels through the bare driver, a stream each and at most 512 in
//! flight, and time each launch. Compared in one process, in turn, half a second each, twice:
//!
//! | phase | meanwhile |
//! |---|---|
//! | `without` | nothing |
//! | `with` | 64 tasks await 500 µs kernels on 16 streams, on four workers |
//! | `with_long` | the same with 5 ms kernels: a tenth of the launches, as many that wait |
//! | `with_raw` | one bare thread keeps four such kernels in flight on each of 16 streams and asks for their events: what the same work costs by itself |
//!
//! `launch.p99_ratio` is `with` by `without`, `long.` and `raw.launch.p99_ratio` those of the other two. On
//! the host device, where there is no driver to launch through, it does nothing.

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use gpu_await::{Device, Stream, kernels};
use measure::{Sorted, print, us, window};
use raw::{Bounded, Raw};
use tokio::runtime::Runtime;

const LAUNCHERS: usize = 8;
const STREAMS: usize = 16;
const TASKS: usize = 64;
const KERNEL_NS: u64 = 500_000;
const LONG_KERNEL_NS: u64 = 5_000_000;
const PHASE: Duration = Duration::from_millis(500);
/// A phase waits so long for its first launch.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the launching threads do, and where they put their times.
#[derive(Clone, Copy)]
enum Phase {
    Unmeasured,
    Without,
    With,
    WithLong,
    WithRaw,
    End,
}

/// The phases that are measured.
const MEASURED: [(Phase, &str); 4] = [
    (Phase::Without, "without"),
    (Phase::With, "with"),
    (Phase::WithLong, "with_long"),
    (Phase::WithRaw, "with_raw"),
];

fn main() {
    let device = measure::device();
    if !measure::on_cuda() {
        return;
    }
    let (raw, runtime) = (Raw::load(), measure::workers(4));
    let phase = AtomicUsize::new(Phase::Unmeasured as usize);
    let seen = AtomicUsize::new(0);
    // ORDERING: Relaxed: all that the launching threads share.
    let set = |now: Phase| phase.store(now as usize, Ordering::Relaxed);
    let measured = |now: Phase| {
        std::thread::sleep(window(PHASE / 5));
        let end = Instant::now() + PATIENCE;
        set(now);
        std::thread::sleep(window(PHASE));
        // On a machine with other things to do, a smoke test's phase is over before a launch.
        while seen.load(Ordering::Relaxed) & (1 << now as usize) == 0 && Instant::now() < end {
            std::thread::yield_now();
        }
        set(Phase::Unmeasured);
    };
    // Before anything runs: loading code waits for what does.
    let tasks = Tasks::prepare(&runtime, &device);
    let mut bounded: Vec<_> = (0..STREAMS).map(|_| Bounded::new(raw, TASKS / STREAMS, 1)).collect();
    let mut kernels = [0; 3];
    let ready = Barrier::new(LAUNCHERS);
    let times = std::thread::scope(|scope| {
        let launchers: Vec<_> =
            (0..LAUNCHERS).map(|_| scope.spawn(|| launcher(raw, &phase, &seen, &ready))).collect();
        let end = End(&phase);
        for _ in 0..2 {
            measured(Phase::Without);
            kernels[0] += tasks.beside(&runtime, KERNEL_NS, || measured(Phase::With));
            kernels[1] += tasks.beside(&runtime, LONG_KERNEL_NS, || measured(Phase::WithLong));
            kernels[2] += beside_a_thread(&mut bounded, || measured(Phase::WithRaw));
        }
        drop(end);
        let mut times: [Vec<f64>; MEASURED.len()] = Default::default();
        for launcher in launchers {
            let mine = launcher.join().expect("no panic");
            times.iter_mut().zip(mine).for_each(|(all, mine)| all.extend(mine));
        }
        times
    });
    let times = times.map(Sorted::new);
    for (times, (_, name)) in times.iter().zip(MEASURED) {
        print(&format!("interference.{name}.launch.p50_us"), times.p50(), "us");
        print(&format!("interference.{name}.launch.p99_us"), times.p99(), "us");
        let seconds = 2.0 * window(PHASE).as_secs_f64();
        print(&format!("interference.{name}.launch.per_s"), times.len() as f64 / seconds, "count");
    }
    let [without, with, with_long, with_raw] = times.map(|times| times.p99());
    print("interference.launch.p99_ratio", with / without, "ratio");
    print("interference.long.launch.p99_ratio", with_long / without, "ratio");
    print("interference.raw.launch.p99_ratio", with_raw / without, "ratio");
    for (kernels, name) in kernels.into_iter().zip(["with", "with_long", "with_raw"]) {
        print(&format!("interference.{name}.kernels"), kernels as f64, "count");
    }
}

/// Ends the launching threads, also when something panics: they are joined.
struct End<'p>(&'p AtomicUsize);

impl Drop for End<'_> {
    fn drop(&mut self) {
        // ORDERING: Relaxed, see `main`.
        self.0.store(Phase::End as usize, Ordering::Relaxed);
    }
}

/// Launches until the end; the times of its launches, by phase. `seen` has a bit for each phase with
/// launches.
fn launcher(
    raw: &'static Raw,
    phase: &AtomicUsize,
    seen: &AtomicUsize,
    ready: &Barrier,
) -> [Vec<f64>; MEASURED.len()] {
    let mut times: [Vec<f64>; MEASURED.len()] = Default::default();
    let mut stream = Bounded::new(raw, 256, 256);
    // Beside threads that launch, the driver may take seconds to make an event.
    ready.wait();
    loop {
        stream.make_room();
        let start = Instant::now();
        stream.stream.launch_empty();
        let took = us(start.elapsed());
        stream.record();
        // ORDERING: Relaxed, see `main`.
        let now = phase.load(Ordering::Relaxed);
        if now == Phase::End as usize {
            stream.stream.synchronize();
            return times;
        }
        if let Some(index) = MEASURED.iter().position(|(phase, _)| *phase as usize == now) {
            times[index].push(took);
            if times[index].len() == 1 {
                // ORDERING: Relaxed, see `main`.
                seen.fetch_or(1 << now, Ordering::Relaxed);
            }
        }
    }
}

/// What the tasks await.
struct Tasks {
    spin: kernels::spin,
    streams: Vec<Stream>,
}

impl Tasks {
    fn prepare(runtime: &Runtime, device: &Device) -> Self {
        let spin = runtime.block_on(kernels::spin::load(device)).expect("loads");
        let streams = (0..STREAMS).map(|_| device.stream().expect("a stream")).collect();
        Tasks { spin, streams }
    }

    /// Has the tasks await kernels while `body` runs, and counts these.
    fn beside(&self, runtime: &Runtime, kernel_ns: u64, body: impl FnOnce()) -> u64 {
        let stop = Arc::new(AtomicBool::new(false));
        let tasks: Vec<_> = (0..TASKS)
            .map(|task| {
                let (spin, stop) = (self.spin.clone(), stop.clone());
                let stream = self.streams[task % STREAMS].clone();
                runtime.spawn(async move {
                    let mut kernels = 0;
                    // ORDERING: Relaxed: whoever needs the count joins the task.
                    while !stop.load(Ordering::Relaxed) {
                        spin.launch(&stream, kernel_ns).await.expect("completes");
                        kernels += 1;
                    }
                    kernels
                })
            })
            .collect();
        body();
        // ORDERING: Relaxed, as above.
        stop.store(true, Ordering::Relaxed);
        tasks.into_iter().map(|task| runtime.block_on(task).expect("no panic")).sum()
    }
}

/// Has one thread keep as many kernels in flight while `body` runs, and counts these.
fn beside_a_thread(streams: &mut [Bounded], body: impl FnOnce()) -> u64 {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut kernels = 0;
            // ORDERING: Relaxed: the thread is joined.
            while !stop.load(Ordering::Relaxed) {
                let before = kernels;
                for stream in streams.iter_mut() {
                    if stream.has_room() {
                        stream.stream.launch_spin(KERNEL_NS);
                        stream.record();
                        kernels += 1;
                    }
                }
                if kernels == before {
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
            streams.iter().for_each(|stream| stream.stream.synchronize());
            kernels
        });
        body();
        // ORDERING: Relaxed, as above.
        stop.store(true, Ordering::Relaxed);
        thread.join().expect("no panic")
    })
}
