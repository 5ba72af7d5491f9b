//! Where does the time of an await go when there are many tasks a worker: into the GPU and its poller, or into the executor's ready queue?
//!
//! N tasks a worker, a worker a core, spread over at most 64 streams, each launches an empty kernel and awaits it, again and again.
//!
//! | lines | from, to |
//! |---|---|
//! | `ready_queue.tasks_N_a_worker.until_woken_p50_us` | the submission, the last wake-up before the future is ready |
//! | `ready_queue.tasks_N_a_worker.until_polled_p50_us` | that wake-up, the poll that it asked for: only the executor is in between |
//! | `ready_queue.tasks_N_a_worker.whole_p50_us` | the submission, the future's readiness |
//! | `ready_queue.tasks_N_a_worker.in_flight_by_rate_us` | all tasks over the rate: by Little's law the mean of one whole turn of a task |
//! | `ready_queue.yields_N_a_worker.turn_p50_us` | one poll of a task, the next, where all do nothing but yield: the same queue without a GPU |
//!
//! A future that is ready at its first poll was woken by nobody, and is not counted.

#[path = "measure.rs"]
mod measure;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use gpu_await::{Device, kernels};
use measure::{Sorted, cores, print, us, window};
use tokio::runtime::Runtime;

const WINDOW: Duration = Duration::from_millis(500);

fn main() {
    let (device, runtime) = (measure::device(), measure::workers(cores()));
    for per_worker in [2, 16, 64] {
        let tasks = per_worker * cores();
        // By the worker, so that the names do not depend on the machine.
        let name = format!("ready_queue.tasks_{per_worker}_a_worker");
        awaits(&runtime, &device, tasks).print(&name, tasks);
        let turns = Sorted::new(yields(&runtime, tasks));
        print(&format!("ready_queue.yields_{per_worker}_a_worker.turn_p50_us"), turns.p50(), "us");
    }
}

/// Says when it was last woken, in nanoseconds from a beginning.
struct Stamp {
    begin: Instant,
    woken: AtomicU64,
    task: Mutex<Option<Waker>>,
}

impl Stamp {
    fn now(&self) -> u64 {
        self.begin.elapsed().as_nanos() as u64
    }
}

impl Wake for Stamp {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // ORDERING: Relaxed: the poll that follows is ordered behind it by the task's own wake-up.
        self.woken.store(self.now(), Ordering::Relaxed);
        if let Some(task) = &*self.task.lock().expect("nobody panics") {
            task.wake_by_ref();
        }
    }
}

/// Microseconds of single awaits, and how many ended.
#[derive(Default)]
struct Parts {
    until_woken: Vec<f64>,
    until_polled: Vec<f64>,
    whole: Vec<f64>,
    seconds: f64,
}

impl Parts {
    fn print(self, name: &str, tasks: usize) {
        let turn_us = self.seconds * 1e6 * tasks as f64 / self.whole.len() as f64;
        let line = |what: &str, us| print(&format!("{name}.{what}"), us, "us");
        line("until_woken_p50_us", Sorted::new(self.until_woken).p50());
        line("until_polled_p50_us", Sorted::new(self.until_polled).p50());
        line("whole_p50_us", Sorted::new(self.whole).p50());
        line("in_flight_by_rate_us", turn_us);
    }
}

fn awaits(runtime: &Runtime, device: &Device, tasks: usize) -> Parts {
    let empty = runtime.block_on(kernels::empty::load(device)).expect("loads");
    let streams: Vec<_> = (0..tasks.min(64)).map(|_| device.stream().expect("a stream")).collect();
    let begin = Instant::now();
    let end = begin + window(WINDOW);
    let tasks: Vec<_> = (0..tasks)
        .map(|task| {
            let (empty, stream) = (empty.clone(), streams[task % streams.len()].clone());
            runtime.spawn(async move {
                let mut parts = Parts::default();
                // One that counts, unless none ever does.
                while Instant::now() < end
                    || (parts.until_woken.is_empty() && parts.whole.len() < 1000)
                {
                    let stamp =
                        Arc::new(Stamp { begin, woken: AtomicU64::new(0), task: Mutex::default() });
                    let submitted = stamp.now();
                    let (woken, polled) = timed(empty.launch(&stream), &stamp).await;
                    let us = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
                    parts.whole.push(us(submitted, polled));
                    if woken > 0 {
                        parts.until_woken.push(us(submitted, woken));
                        parts.until_polled.push(us(woken, polled));
                    }
                }
                parts
            })
        })
        .collect();
    let mut all = Parts::default();
    for task in tasks {
        let parts = runtime.block_on(task).expect("no panic");
        all.until_woken.extend(parts.until_woken);
        all.until_polled.extend(parts.until_polled);
        all.whole.extend(parts.whole);
    }
    all.seconds = begin.elapsed().as_secs_f64();
    all
}

/// When the future was last woken before the poll that found it ready, and when that was.
async fn timed<F: Future>(future: F, stamp: &Arc<Stamp>) -> (u64, u64) {
    let mut future = pin!(future);
    let waker = Waker::from(stamp.clone());
    poll_fn(|cx| {
        stamp.task.lock().expect("nobody panics").get_or_insert_with(|| cx.waker().clone());
        // ORDERING: Relaxed, see `wake_by_ref`.
        let (woken, polled) = (stamp.woken.load(Ordering::Relaxed), stamp.now());
        let ready = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        if ready { Poll::Ready((woken, polled)) } else { Poll::Pending }
    })
    .await
}

fn yields(runtime: &Runtime, tasks: usize) -> Vec<f64> {
    let end = Instant::now() + window(WINDOW) / 2;
    let tasks: Vec<_> = (0..tasks)
        .map(|_| {
            runtime.spawn(async move {
                let mut turns = Vec::new();
                while turns.is_empty() || Instant::now() < end {
                    let start = Instant::now();
                    tokio::task::yield_now().await;
                    turns.push(us(start.elapsed()));
                }
                turns
            })
        })
        .collect();
    tasks.into_iter().flat_map(|task| runtime.block_on(task).expect("no panic")).collect()
}
