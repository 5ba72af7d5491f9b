//! What does a request of two hundred small kernels cost, replayed, and what of it is the host's?
//!
//! A request is a chain of `churn` launches of 3 to 10 µs between two arrays of 1,024 elements, all of different lengths. It is replayed
//! with another argument at each launch (`changed`) or with the same (`unchanged`), and compared with a graph of the bare driver whose
//! nodes are set (`raw_changed`), or not, before its launch.
//!
//! | line | is |
//! |---|---|
//! | `long_lists.N.WAY.requests_per_s` | N launches a request, one request after the other, awaited in a task on four workers; the bare driver waits in `cuStreamSynchronize` |
//! | `long_lists.N.WAY.raw_ratio` | by the bare driver's |
//! | `long_lists.N.WAY.host_us` | how long the call takes that submits such a request (the bare driver's: the nodes and the launch), median |
//! | `long_lists.N.raw_changed_asleep.host_us` | the same of a thread that sleeps while most of the request runs, as a worker does: with its core's caches cold, where one that waits in `cuStreamSynchronize` keeps them warm |
//! | `long_lists.200.64_at_a_time.requests_per_s` | changed, of 64 tasks on as many workers as there are cores, each with a stream; the bare driver's: of 64 threads |
//! | `long_lists.200.64_at_a_time.unchanged.requests_per_s` | ours, without changes: a request without the calls that set nodes |

#[path = "measure.rs"]
mod measure;
#[path = "raw/mixed.rs"]
mod mixed;
#[path = "raw/churn.rs"]
mod raw_churn;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use gpu_await::{Device, DeviceBuffer, Grid, LaunchConfig, Op, Region, Result, Stream, kernel};
use measure::{Sorted, Tally, print, rounds, us, window};
use mixed::Mixed;

const LEN: usize = 1024;
const AT_A_TIME: usize = 64;
/// Requests in front of those that are measured.
const WARM: usize = 20;

kernel! {
    /// `y[i] = x[i]` after so many multiply-adds.
    unsafe fn churn(x: &[f32], y: Out<[f32]>, steps: u32, n: u64 = y.len()) where x.len() == y.len();
    launch = LaunchConfig::for_elements(y.len());
    ptx = include_str!("../kernels/churn.ptx");
    host = |_: &Grid, x: &[f32], y: &mut [f32], _: u32, _: u64| y.copy_from_slice(x);
}

/// From some 3 to some 10 us on an H200.
fn steps(kernels: usize) -> Vec<u32> {
    (0..kernels as u32).map(|number| 100 + number * 53 % 320).collect()
}

/// What one request adds to the steps of each launch.
fn more(round: usize, changes: bool) -> u32 {
    if changes { 1 + round as u32 % 2 } else { 1 }
}

struct Request {
    stream: Stream,
    churn: churn,
    arrays: [DeviceBuffer<f32>; 2],
    region: Region,
}

impl Request {
    fn new(device: &Device, churn: &churn) -> Result<Request> {
        let stream = device.stream()?;
        let array = || stream.full(LEN, 1.0f32).synchronize();
        let arrays = [array()?, array()?];
        Ok(Request { churn: churn.clone(), arrays, stream, region: Region::new() })
    }

    fn replay(&mut self, steps: &[u32], more: u32) -> Op<()> {
        let Request { stream, churn, arrays: [a, b], region } = self;
        stream.replay(region, |q| {
            let (mut x, mut y) = (&mut *a, &mut *b);
            for steps in steps {
                churn.launch(q, &*x, y, steps + more)?;
                std::mem::swap(&mut x, &mut y);
            }
            Ok(())
        })
    }
}

/// How long requests and the calls that submit them took.
#[derive(Default)]
struct Times {
    requests: Vec<f64>,
    calls: Vec<f64>,
}

impl Times {
    fn add(&mut self, start: Instant, call: Duration) {
        self.requests.push(us(start.elapsed()));
        self.calls.push(us(call));
    }

    /// Prints the medians; returns the requests a second.
    fn told(mut self, name: &str) -> f64 {
        // The first ones compile.
        let [requests, calls] =
            [self.requests.split_off(WARM), self.calls.split_off(WARM)].map(Sorted::new);
        let per_second = 1e6 / requests.p50();
        print(&format!("{name}.requests_per_s"), per_second, "count");
        print(&format!("{name}.host_us"), calls.p50(), "us");
        per_second
    }

    /// Prints the median of the calls.
    fn told_of_calls(mut self, name: &str) {
        print(&format!("{name}.host_us"), Sorted::new(self.calls.split_off(WARM)).p50(), "us");
    }
}

fn numbers() -> std::ops::Range<usize> {
    0..rounds(1500, 2) + WARM
}

async fn replayed(mut request: Request, steps: Arc<Vec<u32>>, changes: bool) -> Times {
    let mut times = Times::default();
    for round in numbers() {
        let start = Instant::now();
        let op = request.replay(&steps, more(round, changes));
        let call = start.elapsed();
        op.await.expect("completes");
        times.add(start, call);
    }
    times
}

/// `asleep`: for so long of each request.
fn by_hand(mixed: &Mixed, steps: &[u32], changes: bool, asleep: Duration) -> Times {
    let mut times = Times::default();
    for round in numbers() {
        let start = Instant::now();
        if changes {
            mixed.set(steps.iter().map(|steps| steps + more(round, true)));
        }
        mixed.launch();
        let call = start.elapsed();
        if !asleep.is_zero() {
            thread::sleep(asleep);
        }
        mixed.synchronize();
        times.add(start, call);
    }
    times
}

fn alone(device: &Device, churn: &churn, kernels: usize) -> Result<()> {
    let runtime = measure::workers(4);
    let steps = Arc::new(steps(kernels));
    let raw = measure::on_cuda().then(|| Mixed::new(&steps, LEN));
    for (way, changes) in [("changed", true), ("unchanged", false)] {
        let task = replayed(Request::new(device, churn)?, Arc::clone(&steps), changes);
        let name = format!("long_lists.{kernels}.{way}");
        let ours = measure::on_worker(&runtime, task).told(&name);
        if let Some(raw) = &raw {
            let raw = by_hand(raw, &steps, changes, Duration::ZERO)
                .told(&format!("long_lists.{kernels}.raw_{way}"));
            print(&format!("{name}.raw_ratio"), ours / raw, "ratio");
        }
    }
    if let Some(raw) = &raw {
        // The shortest kernel takes 3 us.
        let asleep = Duration::from_micros(3 * kernels as u64);
        by_hand(raw, &steps, true, asleep)
            .told_of_calls(&format!("long_lists.{kernels}.raw_changed_asleep"));
    }
    Ok(())
}

/// Requests a second.
fn replayed_together(
    device: &Device,
    churn: &churn,
    steps: &Arc<Vec<u32>>,
    changes: bool,
) -> Result<f64> {
    let runtime = measure::workers(measure::cores());
    let tally = Arc::new(Tally::new(AT_A_TIME));
    let requests: Result<Vec<_>> = (0..AT_A_TIME).map(|_| Request::new(device, churn)).collect();
    let task = |(who, mut request): (usize, Request)| {
        let (steps, tally) = (Arc::clone(steps), Arc::clone(&tally));
        runtime.spawn(async move {
            for round in 0.. {
                request.replay(&steps, more(round, changes)).await.expect("completes");
                if !tally.add(who) {
                    break;
                }
            }
        })
    };
    let tasks: Vec<_> = requests?.into_iter().enumerate().map(task).collect();
    let rate = tally.measure(window(Duration::from_secs(2)));
    for task in tasks {
        runtime.block_on(task).expect("no panic");
    }
    Ok(rate.per_second)
}

fn together(device: &Device, churn: &churn, kernels: usize) -> Result<()> {
    let steps = Arc::new(steps(kernels));
    let [changed, unchanged] =
        [true, false].map(|changes| replayed_together(device, churn, &steps, changes));
    let (changed, unchanged) = (changed?, unchanged?);
    let name = format!("long_lists.{kernels}.{AT_A_TIME}_at_a_time");
    print(&format!("{name}.requests_per_s"), changed, "count");
    print(&format!("{name}.unchanged.requests_per_s"), unchanged, "count");
    if !measure::on_cuda() {
        return Ok(());
    }
    let graphs: Vec<_> = (0..AT_A_TIME).map(|_| Mixed::new(&steps, LEN)).collect();
    let tally = Tally::new(AT_A_TIME);
    let raw = thread::scope(|scope| {
        for (who, mixed) in graphs.into_iter().enumerate() {
            let (tally, steps) = (&tally, &steps);
            scope.spawn(move || {
                mixed.bind();
                for round in 0.. {
                    mixed.set(steps.iter().map(|steps| steps + more(round, true)));
                    mixed.launch();
                    mixed.synchronize();
                    if !tally.add(who) {
                        break;
                    }
                }
            });
        }
        tally.measure(window(Duration::from_secs(2)))
    });
    print(&format!("{name}.raw.requests_per_s"), raw.per_second, "count");
    print(&format!("{name}.raw_ratio"), changed / raw.per_second, "ratio");
    Ok(())
}

fn main() {
    let device = measure::device();
    let churn = churn::load_blocking(&device).expect("the kernel");
    for kernels in [10, 100, 200, 400] {
        alone(&device, &churn, kernels).expect("memory");
    }
    together(&device, &churn, 200).expect("memory");
}
