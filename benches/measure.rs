//! What the benches share: arguments, percentiles, CPU time, and how a line is printed.
//!
//! A line is `name value unit`; the units are `ns`, `us`, `ms`, `GB/s`, `cores`, `count`, `ratio`, `MiB` and `TFLOP/s`.
//!
//! | argument | does |
//! |---|---|
//! | `smoke` | few iterations, to see that the bench runs; so on the host device unless it is `full` |
//! | `full` | measures on the host device as on a GPU |
//! | `all-modes` | `await_latency`: the other ways of learning of completions as well |
//! | `streams=K` | `throughput`: spreads the tasks over at most K streams; `server`: its pool has K |
//! | `in_flight=K` | `server`: at most K requests on the device at once |
#![allow(dead_code, reason = "each bench uses a part of it")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu_await::{Completion, Device, testing};
use tokio::runtime::{Builder, Runtime};

/// Whether an argument was given. Others, like cargo's `--bench`, are ignored.
pub(crate) fn argument(name: &str) -> bool {
    std::env::args().skip(1).any(|given| given == name)
}

/// The number given as `name=number`.
pub(crate) fn number(name: &str) -> Option<usize> {
    let given = std::env::args().skip(1);
    let mut values =
        given.filter_map(|arg| arg.strip_prefix(name)?.strip_prefix('=')?.parse().ok());
    values.next()
}

/// Whether the bench runs on a GPU, so that there is a driver for the raw baseline.
pub(crate) fn on_cuda() -> bool {
    std::env::var(testing::TEST_DEVICE).is_ok_and(|name| name.starts_with("cuda"))
}

/// Whether it only has to be seen that the bench runs.
pub(crate) fn is_smoke() -> bool {
    argument("smoke") || !(on_cuda() || argument("full"))
}

/// So many rounds, or few in a smoke test.
pub(crate) fn rounds(full: usize, smoke: usize) -> usize {
    if is_smoke() { smoke } else { full }
}

/// So long, or briefly in a smoke test.
pub(crate) fn window(full: Duration) -> Duration {
    if is_smoke() { full / 50 } else { full }
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The device of the bench.
pub(crate) fn device() -> Device {
    device_with(Completion::default())
}

/// The device of the bench, with completions learned in a given way. Says on stderr if there will be
/// no results.
pub(crate) fn device_with(completion: Completion) -> Device {
    if is_smoke() && !on_cuda() {
        eprintln!("# smoke test on the host device: these are no results");
    } else if is_smoke() {
        eprintln!("# smoke test: these are no results");
    }
    testing::device_with(completion)
}

pub(crate) fn workers(count: usize) -> Runtime {
    Builder::new_multi_thread().worker_threads(count).enable_all().build().expect("a runtime")
}

pub(crate) fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Runs a future as a spawned task, on a worker, and waits for it.
pub(crate) fn on_worker<F>(runtime: &Runtime, future: F) -> F::Output
where
    F: Future<Output: Send> + Send + 'static,
{
    runtime.block_on(runtime.spawn(future)).expect("the task does not panic")
}

/// Prints a line. Cores and small counts show four decimals, so that next to nothing is not zero.
pub(crate) fn print(name: &str, value: f64, unit: &str) {
    let decimals = match unit {
        "cores" => 4,
        "count" if value.fract() == 0.0 || value >= 1000.0 => 0,
        "count" => 4,
        "ms" | "ratio" => 3,
        _ => 2,
    };
    println!("{name} {value:.decimals$} {unit}");
}

pub(crate) fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Measurements of one thing, in ascending order.
pub(crate) struct Sorted(Vec<f64>);

impl Sorted {
    /// # Panics
    /// Without measurements.
    pub(crate) fn new(mut samples: Vec<f64>) -> Self {
        assert!(!samples.is_empty(), "nothing was measured");
        samples.sort_by(f64::total_cmp);
        Sorted(samples)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn percentile(&self, p: f64) -> f64 {
        let last = self.0.len() - 1;
        self.0[(last as f64 * p).round() as usize]
    }

    pub(crate) fn p50(&self) -> f64 {
        self.percentile(0.5)
    }

    pub(crate) fn p99(&self) -> f64 {
        self.percentile(0.99)
    }

    pub(crate) fn max(&self) -> f64 {
        self.percentile(1.0)
    }
}

/// CPU time of this process, all threads, against the clock.
pub(crate) struct Usage {
    cpu: Duration,
    wall: Instant,
}

impl Usage {
    pub(crate) fn start() -> Self {
        Usage { cpu: cpu_time(), wall: Instant::now() }
    }

    pub(crate) fn cpu(&self) -> Duration {
        cpu_time() - self.cpu
    }

    pub(crate) fn wall(&self) -> Duration {
        self.wall.elapsed()
    }

    pub(crate) fn cores(&self) -> f64 {
        self.cpu().as_secs_f64() / self.wall().as_secs_f64()
    }
}

/// Blocks until `end`, and returns the cores that the process used from `begin` to then.
pub(crate) fn cores_between(begin: Instant, end: Instant) -> f64 {
    std::thread::sleep(begin.saturating_duration_since(Instant::now()));
    let usage = Usage::start();
    std::thread::sleep(end.saturating_duration_since(Instant::now()));
    usage.cores()
}

/// Keeps the calling thread busy.
pub(crate) fn work(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Lets the calling thread's naps end in time: the system may otherwise add 50 µs.
pub(crate) fn exact_naps() {
    const LEAST_NS: libc::c_ulong = 1;
    // SAFETY: this option takes one integer and touches only the calling thread's slack.
    let refused = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, LEAST_NS) };
    assert_eq!(refused, 0);
}

fn cpu_time() -> Duration {
    // SAFETY: all zeros is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is live and of the type that the call fills.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let time = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec as u64) + Duration::from_micros(t.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Operations counted by many, each on a cache line of its own, until told to stop.
pub(crate) struct Tally {
    stop: AtomicBool,
    counts: Vec<Count>,
}

#[repr(align(128))]
struct Count(AtomicU64);

/// Operations in a stretch of time, and what they cost.
pub(crate) struct Rate {
    pub(crate) per_second: f64,
    pub(crate) cpu_us_per_op: f64,
}

impl Tally {
    pub(crate) fn new(counters: usize) -> Self {
        let counts = (0..counters).map(|_| Count(AtomicU64::new(0))).collect();
        Tally { stop: AtomicBool::new(false), counts }
    }

    /// Counts one operation of `who`, its only writer. False when it is time to stop.
    pub(crate) fn add(&self, who: usize) -> bool {
        let count = &self.counts[who].0;
        // ORDERING: Relaxed: a statistic with one writer.
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        // ORDERING: Relaxed: whoever needs what happened before joins the writer.
        !self.stop.load(Ordering::Relaxed)
    }

    /// Lets it run to warm up, measures for `window`, and stops it.
    pub(crate) fn measure(&self, window: Duration) -> Rate {
        std::thread::sleep(window / 5);
        let (before, usage) = (self.total(), Usage::start());
        std::thread::sleep(window);
        let (ops, cpu, wall) = (self.total() - before, usage.cpu(), usage.wall());
        // ORDERING: Relaxed, see `add`.
        self.stop.store(true, Ordering::Relaxed);
        let ops = ops as f64;
        Rate { per_second: ops / wall.as_secs_f64(), cpu_us_per_op: us(cpu) / ops.max(1.0) }
    }

    fn total(&self) -> u64 {
        // ORDERING: Relaxed: a statistic.
        self.counts.iter().map(|count| count.0.load(Ordering::Relaxed)).sum()
    }
}

impl Rate {
    pub(crate) fn print(&self, name: &str) {
        print(&format!("{name}.ops_per_s"), self.per_second, "count");
        print(&format!("{name}.cpu_us_per_op"), self.cpu_us_per_op, "us");
    }
}
