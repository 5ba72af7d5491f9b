//! How late is an await where every core is busy with other threads?
//!
//! Nine tasks, each on a stream of its own: five launch kernels of 300 µs, four of 3 ms, one after another. On a host device a
//! kernel that sleeps stands for them. Lateness is the time from the launch to the resolved future, less the kernel's own time.
//!
//! | lines | the neighbours |
//! |---|---|
//! | `idle` | none |
//! | `threads` | a thread a core of this process that never sleeps |
//! | `nice10`, `batch` | the same at `nice` 10, and of the policy `SCHED_BATCH` |
//! | `session` | the same in another process, of a session of its own |
//! | `host_fn` | as `threads`; a host function of 30 µs on the host device |
//!
//! | way | how it waits |
//! |---|---|
//! | `raw` | a thread a stream: the bare driver, `cuStreamSynchronize` |
//! | `spawn_blocking` | the same in tokio's `spawn_blocking`, once a kernel |
//! | `await` | this crate |
//! | `block_on` | the same, by a thread a task and no runtime |
//! | `oneshot` | beside `host_fn`: a thread works as long and sends |
//!
//! With the argument `full` it measures on the host device as well. Two cores, or one: `taskset -c 0,1`.

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpu_await::{Device, LaunchConfig, Stream, kernel, kernels};
use measure::{Sorted, cores, print, rounds, us, window, work};
use raw::{Raw, RawStream};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

const SHORT_NS: u64 = 300_000;
const LONG_NS: u64 = 3_000_000;
const TASKS: [u64; 9] = {
    let (s, l) = (SHORT_NS, LONG_NS);
    [s, l, s, l, s, l, s, l, s]
};
/// Set for a child that is a neighbour: for so many seconds at most.
const NEIGHBOUR: &str = "GPU_AWAIT_BENCH_NEIGHBOUR";

fn main() {
    if let Ok(seconds) = std::env::var(NEIGHBOUR) {
        (0..cores()).for_each(|_| drop(std::thread::spawn(spin)));
        std::thread::sleep(Duration::from_secs(seconds.parse().expect("a number")));
        return;
    }
    let raw = measure::on_cuda().then(Raw::load);
    let runtime = measure::workers(cores());
    let bench = measure::on_worker(&runtime, Bench::new(measure::device()));
    for kind in [Kind::None, Kind::Threads, Kind::Nice, Kind::Batch, Kind::Session] {
        let _neighbours = Neighbours::start(kind);
        for way in ["raw", "spawn_blocking", "await", "block_on"] {
            nine(&runtime, &bench, raw, way).report(kind.name(), way);
        }
    }
    let _neighbours = Neighbours::start(Kind::Threads);
    host_fn(&runtime);
}

// ---- neighbours ---------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    None,
    Threads,
    Nice,
    Batch,
    Session,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::None => "idle",
            Kind::Threads => "threads",
            Kind::Nice => "nice10",
            Kind::Batch => "batch",
            Kind::Session => "session",
        }
    }
}

/// Busy until they are dropped.
struct Neighbours {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    child: Option<Child>,
}

impl Neighbours {
    fn start(kind: Kind) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (threads, child) = match kind {
            Kind::None => (0, None),
            Kind::Session => (0, Some(session())),
            _ => (cores(), None),
        };
        let run = |_| {
            let stop = stop.clone();
            std::thread::spawn(move || {
                be(kind);
                // ORDERING: Relaxed: a flag.
                while !stop.load(Ordering::Relaxed) {
                    work(Duration::from_micros(50));
                }
            })
        };
        let threads = (0..threads).map(run).collect();
        // They have their cores.
        std::thread::sleep(window(Duration::from_millis(200)));
        Neighbours { stop, threads, child }
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        // ORDERING: Relaxed: a flag.
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().expect("no panic"));
        if let Some(child) = &mut self.child {
            child.kill().expect("it is ours");
            child.wait().expect("it was started");
        }
    }
}

fn spin() {
    loop {
        std::hint::spin_loop();
    }
}

/// This program again, in a session of its own.
fn session() -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.env(NEIGHBOUR, "60");
    let leave = || {
        // SAFETY: no arguments; it is safe between `fork` and `exec`.
        let left = unsafe { libc::setsid() };
        if left < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: the closure calls `setsid` alone.
    unsafe { command.pre_exec(leave) };
    command.spawn().expect("it starts")
}

/// Gives the calling thread its policy.
fn be(kind: Kind) {
    let refused = match kind {
        // SAFETY: integers alone; on Linux it is the calling thread's.
        Kind::Nice => unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) },
        Kind::Batch => {
            // SAFETY: all zeros is a valid `sched_param`.
            let param: libc::sched_param = unsafe { std::mem::zeroed() };
            // SAFETY: `param` lives; the policy takes no other.
            unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const param) }
        }
        _ => 0,
    };
    assert_eq!(refused, 0);
}

// ---- nine tasks ---------------------------------------------------------------------------------

#[derive(Clone)]
struct Bench {
    device: Device,
    spin: kernels::spin,
    /// On a host device.
    nap: Option<nap>,
}

/// What was measured: the kernels' lengths, and how late each was.
struct Late {
    late: Vec<(u64, f64)>,
    seconds: f64,
}

impl Late {
    fn report(&self, neighbours: &str, way: &str) {
        let of = |ns| self.late.iter().filter(move |(len, _)| *len == ns).map(|(_, late)| *late);
        let line = |what: &str| format!("busy_cores.{neighbours}.{way}.{what}");
        print(&line("300us_p50_us"), Sorted::new(of(SHORT_NS).collect()).p50(), "us");
        print(&line("3ms_p50_us"), Sorted::new(of(LONG_NS).collect()).p50(), "us");
        let all = Sorted::new(self.late.iter().map(|(_, late)| *late).collect());
        print(&line("p99_us"), all.p99(), "us");
        print(&line("ops_per_s"), self.late.len() as f64 / self.seconds, "count");
    }
}

impl Bench {
    async fn new(device: Device) -> Self {
        let spin = kernels::spin::load(&device).await.expect("loads");
        let nap = if measure::on_cuda() { None } else { nap::load(&device).await.ok() };
        Bench { device, spin, nap }
    }

    async fn kernel(&self, stream: &Stream, ns: u64) {
        let launched = match &self.nap {
            Some(nap) => nap.launch(stream, ns),
            None => self.spin.launch(stream, ns),
        };
        launched.await.expect("completes");
    }
}

kernel! {
    /// Keeps its stream busy, and no core.
    unsafe fn nap(nanoseconds: u64);
    launch = LaunchConfig::new(1, 1);
    host = |_, nanoseconds| sleep(nanoseconds);
}

/// A kernel of the host device.
fn sleep(ns: u64) {
    measure::exact_naps();
    std::thread::sleep(Duration::from_nanos(ns));
}

/// A kernel of the bare driver; blocks the thread.
fn kernel(stream: Option<&RawStream>, ns: u64) {
    match stream {
        Some(stream) => {
            stream.launch_spin(ns);
            stream.synchronize();
        }
        None => sleep(ns),
    }
}

/// For how long, and from when on it counts.
#[derive(Clone, Copy)]
struct Stretch {
    begin: Instant,
    end: Instant,
}

/// The kernels of one task.
struct Series {
    ns: u64,
    stretch: Stretch,
    late: Vec<(u64, f64)>,
}

impl Series {
    fn new(ns: u64, stretch: Stretch) -> Self {
        Series { ns, stretch, late: Vec::new() }
    }

    /// One more kernel, which was launched then; false if it was the last. One at least, however short a smoke test is.
    fn add(&mut self, start: Instant) -> bool {
        let goes_on = start < self.stretch.end;
        if start > self.stretch.begin && (goes_on || self.late.is_empty()) {
            let own = Duration::from_nanos(self.ns);
            self.late.push((self.ns, us(start.elapsed()) - us(own)));
        }
        goes_on
    }
}

/// The kernels of one task, awaited.
async fn awaits(bench: Bench, ns: u64, stretch: Stretch) -> Vec<(u64, f64)> {
    let stream = bench.device.stream().expect("a stream");
    let mut series = Series::new(ns, stretch);
    loop {
        let start = Instant::now();
        bench.kernel(&stream, ns).await;
        if !series.add(start) {
            break series.late;
        }
    }
}

fn nine(runtime: &Runtime, bench: &Bench, raw: Option<&'static Raw>, way: &str) -> Late {
    let begin = Instant::now() + window(Duration::from_millis(200));
    let stretch = Stretch { begin, end: begin + window(Duration::from_secs(1)) };
    let late = match way {
        "raw" => {
            let run = |ns| {
                std::thread::spawn(move || {
                    let stream = raw.map(Raw::stream);
                    let mut series = Series::new(ns, stretch);
                    loop {
                        let start = Instant::now();
                        kernel(stream.as_ref(), ns);
                        if !series.add(start) {
                            break series.late;
                        }
                    }
                })
            };
            let threads = TASKS.map(run);
            threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
        }
        "spawn_blocking" => {
            let tasks = TASKS.map(|ns| {
                runtime.spawn(async move {
                    let stream = Arc::new(raw.map(Raw::stream));
                    let mut series = Series::new(ns, stretch);
                    loop {
                        let (start, stream) = (Instant::now(), stream.clone());
                        let done =
                            tokio::task::spawn_blocking(move || kernel((*stream).as_ref(), ns));
                        done.await.expect("no panic");
                        if !series.add(start) {
                            break series.late;
                        }
                    }
                })
            });
            let joined = tasks.into_iter().flat_map(|task| runtime.block_on(task));
            joined.flatten().collect()
        }
        "block_on" => {
            let threads = TASKS.map(|ns| {
                let awaits = awaits(bench.clone(), ns, stretch);
                std::thread::spawn(move || futures::executor::block_on(awaits))
            });
            threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
        }
        _ => {
            let tasks = TASKS.map(|ns| runtime.spawn(awaits(bench.clone(), ns, stretch)));
            let joined = tasks.into_iter().flat_map(|task| runtime.block_on(task));
            joined.flatten().collect()
        }
    };
    Late { late, seconds: (stretch.end - stretch.begin).as_secs_f64() }
}

// ---- a host function ----------------------------------------------------------------------------

/// A host function of 30 µs on the host device, and a oneshot whose sender works as long.
fn host_fn(runtime: &Runtime) {
    const WORK: Duration = Duration::from_micros(30);
    let rounds = rounds(300, 3);
    let late = |start: Instant| us(start.elapsed()) - us(WORK);
    for way in ["oneshot", "await"] {
        let times = measure::on_worker(runtime, async move {
            let device = Device::host();
            let stream = device.stream().expect("a stream");
            let mut times = Vec::new();
            for _ in 0..rounds {
                let start = Instant::now();
                if way == "await" {
                    stream.host_fn(|| work(WORK)).await.expect("completes");
                } else {
                    let (sender, receiver) = oneshot::channel();
                    std::thread::spawn(move || {
                        work(WORK);
                        sender.send(()).expect("somebody waits");
                    });
                    receiver.await.expect("is sent");
                }
                times.push(late(start));
                tokio::time::sleep(Duration::from_micros(500)).await;
            }
            times
        });
        let times = Sorted::new(times);
        print(&format!("busy_cores.host_fn.{way}.p50_us"), times.p50(), "us");
        print(&format!("busy_cores.host_fn.{way}.p99_us"), times.p99(), "us");
    }
}
