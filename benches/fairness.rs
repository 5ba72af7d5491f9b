//! Do tasks that await the GPU leave room for the others of their executor?
//!
//! | lines | what runs | compare with |
//! |---|---|---|
//! | `fairness` | on one worker thread: eight tasks that await 100 µs kernels, a stream each, and one that only yields; how long it takes until that is polled again | `fairness.raw`: eight threads that launch and `cuStreamSynchronize` |
//! | `timers` | on a current-thread runtime: a task that sleeps 1 ms again and again, beside one that awaits 30 kernels of 100 µs on 30 streams, joined by `futures` (`timers`) and by this crate (`timers.gpu_join_all`); how much longer than 1 ms each sleep took | `timers.alone`: the sleeping task only |

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::future::join_all;
use gpu_await::{Device, kernels};
use measure::{Sorted, Tally, Usage, print, us, window};
use raw::Raw;

const KERNEL_NS: u64 = 100_000;
const TASKS: usize = 8;
const JOINED: usize = 30;
const SLEEP: Duration = Duration::from_millis(1);

fn main() {
    let raw = measure::on_cuda().then(Raw::load);
    let device = measure::device();
    if let Some(raw) = raw {
        print("fairness.raw.kernels_per_s", threads(raw), "count");
    }
    fairness(&device);
    timers(&device);
}

/// Kernels a second, by a thread for each stream.
fn threads(raw: &'static Raw) -> f64 {
    let tally = Tally::new(TASKS);
    std::thread::scope(|scope| {
        for thread in 0..TASKS {
            let tally = &tally;
            scope.spawn(move || {
                let stream = raw.stream();
                loop {
                    stream.launch_spin(KERNEL_NS);
                    stream.synchronize();
                    if !tally.add(thread) {
                        break;
                    }
                }
            });
        }
        tally.measure(window(Duration::from_millis(500))).per_second
    })
}

fn fairness(device: &Device) {
    let runtime = measure::workers(1);
    let spin = runtime.block_on(kernels::spin::load(device)).expect("loads");
    let tally = Arc::new(Tally::new(TASKS));
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (tally, spin) = (tally.clone(), spin.clone());
            let stream = device.stream().expect("a stream");
            runtime.spawn(async move {
                loop {
                    spin.launch(&stream, KERNEL_NS).await.expect("completes");
                    if !tally.add(task) {
                        break;
                    }
                }
            })
        })
        .collect();
    let stop = Arc::new(AtomicBool::new(false));
    let measured = Arc::new(AtomicBool::new(false));
    let yielding = runtime.spawn({
        let (stop, measured) = (stop.clone(), measured.clone());
        async move {
            let mut turns = Vec::with_capacity(4_000_000);
            // ORDERING: Relaxed: flags of the clock only.
            while !stop.load(Ordering::Relaxed) {
                let start = Instant::now();
                tokio::task::yield_now().await;
                // ORDERING: Relaxed, as above.
                if measured.load(Ordering::Relaxed) && turns.len() < turns.capacity() {
                    turns.push(us(start.elapsed()));
                }
            }
            turns
        }
    });
    std::thread::sleep(window(Duration::from_millis(200)));
    // ORDERING: Relaxed, as above.
    measured.store(true, Ordering::Relaxed);
    let usage = Usage::start();
    let rate = tally.measure(window(Duration::from_secs(1)));
    let cores = usage.cores();
    // ORDERING: Relaxed, as above.
    stop.store(true, Ordering::Relaxed);
    let turns = Sorted::new(runtime.block_on(yielding).expect("no panic"));
    for task in tasks {
        runtime.block_on(task).expect("no panic");
    }
    print("fairness.yield.p50_us", turns.p50(), "us");
    print("fairness.yield.p99_us", turns.p99(), "us");
    print("fairness.yield.max_us", turns.max(), "us");
    print("fairness.kernels_per_s", rate.per_second, "count");
    print("fairness.cores", cores, "cores");
}

/// Who is beside the sleeping task.
#[derive(Clone, Copy)]
enum Beside {
    Nobody,
    Futures,
    Ours,
}

fn timers(device: &Device) {
    for (beside, name) in [
        (Beside::Nobody, "timers.alone"),
        (Beside::Futures, "timers"),
        (Beside::Ours, "timers.gpu_join_all"),
    ] {
        let (late, kernels_per_s) = lateness(device.clone(), beside);
        let late = Sorted::new(late);
        print(&format!("{name}.lateness_p50_us"), late.p50(), "us");
        print(&format!("{name}.lateness_p99_us"), late.p99(), "us");
        if !matches!(beside, Beside::Nobody) {
            print(&format!("{name}.kernels_per_s"), kernels_per_s, "count");
        }
    }
}

/// How much longer than asked for each sleep took, and the kernels a second beside it.
fn lateness(device: Device, beside: Beside) -> (Vec<f64>, f64) {
    measure::current_thread().block_on(async move {
        let spin = kernels::spin::load(&device).await.expect("loads");
        let streams: Vec<_> = (0..JOINED).map(|_| device.stream().expect("a stream")).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let joining = tokio::spawn({
            let stop = stop.clone();
            async move {
                let mut kernels = 0;
                // ORDERING: Relaxed: one thread.
                while !stop.load(Ordering::Relaxed) {
                    let ops = streams.iter().map(|stream| spin.launch(stream, KERNEL_NS));
                    match beside {
                        Beside::Nobody => break,
                        Beside::Futures => drop(join_all(ops).await),
                        Beside::Ours => drop(gpu_await::join_all(ops).await.expect("completes")),
                    }
                    kernels += JOINED;
                }
                kernels
            }
        });
        let sleeping = tokio::spawn(async {
            let (mut late, begin) = (Vec::new(), Instant::now());
            while late.is_empty() || begin.elapsed() < window(Duration::from_secs(2)) {
                let start = Instant::now();
                tokio::time::sleep(SLEEP).await;
                late.push(us(start.elapsed()) - us(SLEEP));
            }
            (late, begin.elapsed())
        });
        let (late, took) = sleeping.await.expect("no panic");
        // ORDERING: Relaxed, as above.
        stop.store(true, Ordering::Relaxed);
        let kernels = joining.await.expect("no panic");
        (late, kernels as f64 / took.as_secs_f64())
    })
}
