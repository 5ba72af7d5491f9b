//! What does it take to grow memory in place by 2 MiB, and what do neighbours feel of it?
//!
//! Memory grows by a step and shrinks by one, in turns, every millisecond: on an idle device, and beside 8 tasks that each await chains of ten small kernels on a
//! stream of their own. The same by the bare driver, on a thread of its own, beside the same tasks: `cuMemCreate`, `cuMemMap`, `cuMemRelease`,
//! `cuMemSetAccess`; `cuMemUnmap`.
//!
//! | line | is |
//! |---|---|
//! | `growth.WHO.WHERE.grow_p50_us`, `grow_p99_us` | from the call to its end; of ours, to the end of the await |
//! | `growth.WHO.WHERE.shrink_p50_us` | the same of taking it back |
//! | `growth.neighbour.BESIDE.p50_us`, `p99_us` | a chain, from its first launch to the end of the await, beside nobody, ours, the bare driver |

#[path = "measure.rs"]
mod measure;
#[path = "raw/growth.rs"]
mod raw;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gpu_await::{Device, GrowableBuffer, kernels};
use measure::{Sorted, print, rounds, us};
use tokio::runtime::Runtime;

const TASKS: usize = 8;
const KERNELS: usize = 10;
const LEN: usize = 1024;
const STEP: usize = 2 << 20;
const PAUSE: Duration = Duration::from_millis(1);
/// The times during which chains are measured.
const PHASES: [&str; 3] = ["alone", "ours", "raw"];

/// What the tasks see: the phase, and whether to go on.
#[derive(Default)]
struct Load {
    phase: AtomicUsize,
    stop: AtomicBool,
}

/// Memory that grows and shrinks.
trait Grows {
    fn grow(&mut self);
    fn shrink(&mut self);
}

impl Grows for raw::Range {
    fn grow(&mut self) {
        raw::Range::grow(self);
    }

    fn shrink(&mut self) {
        raw::Range::shrink(self);
    }
}

struct Ours(GrowableBuffer<u8>, Runtime);

impl Grows for Ours {
    fn grow(&mut self) {
        self.1.block_on(self.0.grow(STEP)).expect("memory");
    }

    fn shrink(&mut self) {
        self.1.block_on(self.0.shrink(0)).expect("a step");
    }
}

/// Grows and shrinks in turns, and prints how long that took.
fn turns(name: &str, memory: &mut impl Grows, turns: usize) {
    let (mut grow, mut shrink) = (Vec::new(), Vec::new());
    for _ in 0..turns {
        for (times, grows) in [(&mut grow, true), (&mut shrink, false)] {
            let begin = Instant::now();
            if grows {
                memory.grow()
            } else {
                memory.shrink()
            }
            times.push(us(begin.elapsed()));
            thread::sleep(PAUSE);
        }
    }
    let (grow, shrink) = (Sorted::new(grow), Sorted::new(shrink));
    print(&format!("growth.{name}.grow_p50_us"), grow.p50(), "us");
    print(&format!("growth.{name}.grow_p99_us"), grow.p99(), "us");
    print(&format!("growth.{name}.shrink_p50_us"), shrink.p50(), "us");
}

/// Tasks that await chains, until they are told to stop; each returns its times by phase.
fn neighbours(
    device: &Device,
    runtime: &Runtime,
    load: &Arc<Load>,
) -> Vec<tokio::task::JoinHandle<[Vec<f64>; 3]>> {
    let scale = kernels::scale::load_blocking(device).expect("the kernel");
    let task = |_| {
        let stream = device.stream().expect("a stream");
        let mut x = stream.full(LEN, 1.0f32).queued().expect("memory");
        let (load, scale) = (load.clone(), scale.clone());
        runtime.spawn(async move {
            let mut times: [Vec<f64>; 3] = Default::default();
            while !load.stop.load(Ordering::Relaxed) {
                let phase = load.phase.load(Ordering::Relaxed);
                let begin = Instant::now();
                let chain =
                    stream.batch(|q| (0..KERNELS).try_for_each(|_| scale.launch(q, 1.5, &mut x)));
                chain.await.expect("completes");
                if let Some(times) = times.get_mut(phase) {
                    times.push(us(begin.elapsed()));
                }
            }
            times
        })
    };
    (0..TASKS).map(task).collect()
}

fn main() {
    let times = rounds(500, 5);
    let device = measure::device();
    let growable = futures::executor::block_on(device.growable(4 * STEP)).expect("addresses");
    let mut ours = Ours(growable, measure::current_thread());
    let mut bare = measure::on_cuda().then(|| raw::Range::new(4));
    turns("ours.idle", &mut ours, times);
    if let Some(bare) = &mut bare {
        turns("raw.idle", bare, times);
    }
    let (load, runtime) =
        (Arc::new(Load::default()), measure::workers(TASKS.min(measure::cores())));
    let tasks = neighbours(&device, &runtime, &load);
    // As long as the turns that follow.
    thread::sleep(PAUSE * 2 * times as u32);
    load.phase.store(1, Ordering::Relaxed);
    turns("ours.busy", &mut ours, times);
    load.phase.store(2, Ordering::Relaxed);
    if let Some(bare) = &mut bare {
        turns("raw.busy", bare, times);
    }
    load.stop.store(true, Ordering::Relaxed);
    let mut all: [Vec<f64>; 3] = Default::default();
    for task in tasks {
        let times = runtime.block_on(task).expect("no panic");
        all.iter_mut().zip(times).for_each(|(all, times)| all.extend(times));
    }
    for (beside, times) in PHASES.into_iter().zip(all).take(2 + usize::from(bare.is_some())) {
        let times = Sorted::new(times);
        print(&format!("growth.neighbour.{beside}.p50_us"), times.p50(), "us");
        print(&format!("growth.neighbour.{beside}.p99_us"), times.p99(), "us");
    }
}
