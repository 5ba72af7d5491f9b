//! How often does an operation ask for heap memory?
//!
//! All allocations of the process are counted, on whatever thread, while an empty kernel is launched
//! and awaited (`await`) or launched with `.queued()` (`queued`), or while 200 are replayed, each with another argument each time
//! (`replay`), or three launched as a graph (`graph`): the median of five windows, so that what a thread asks for once in its life is
//! in none. To compare with: none. What the driver, in
//! C, allocates is not seen; what the host device does is, but that is no driver.

#[path = "measure.rs"]
mod measure;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_await::{Graph, InOut, Region, kernels};
use measure::{Sorted, print, rounds};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, which counts.
struct Counting;

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // ORDERING: Relaxed: a statistic.
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's layout, as it came.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn main() {
    let device = measure::device();
    let rounds = rounds(2048, 256);
    let runtime = measure::workers(4);
    let [awaited, queued, replay, graph] = measure::on_worker(&runtime, async move {
        let stream = device.stream().expect("a stream");
        let empty = kernels::empty::load(&device).await.expect("loads");
        let scale = kernels::scale::load(&device).await.expect("loads");
        let mut x = stream.full(1024, 1.0f32).await.expect("memory");
        let mut region = Region::new();
        let graph: Graph<(InOut<f32>,)> = device.graph(scale.clone(), |q, scale, (mut x,)| {
            (0..3).try_for_each(|_| scale.launch(q, 1.0, &mut x))
        });
        let [mut awaited, mut queued, mut replayed, mut launched] = [const { Vec::new() }; 4];
        for window in 0..6 {
            let before = count();
            for _ in 0..rounds {
                empty.launch(&stream).await.expect("completes");
            }
            let between = count();
            for round in 0..rounds {
                empty.launch(&stream).queued().expect("is accepted");
                if round % 256 == 255 {
                    // The driver blocks behind a thousand launches.
                    stream.done().await.expect("completes");
                }
            }
            let queue_ends = count();
            for round in 0..rounds {
                let factor = 1.0 + round as f32 * 1e-9;
                let op = stream.replay(&mut region, |q| {
                    (0..200).try_for_each(|_| scale.launch(q, factor, &mut x))
                });
                op.await.expect("completes");
            }
            let replay_ends = count();
            for _ in 0..rounds {
                graph.launch(&stream, (&mut x,)).await.expect("completes");
            }
            // The first window warms up.
            if window > 0 {
                let per_op = |from: u64, to: u64| (to - from) as f64 / rounds as f64;
                awaited.push(per_op(before, between));
                queued.push(per_op(between, queue_ends));
                replayed.push(per_op(queue_ends, replay_ends));
                launched.push(per_op(replay_ends, count()));
            }
        }
        [awaited, queued, replayed, launched].map(Sorted::new)
    });
    print("allocs.await.per_op", awaited.p50(), "count");
    print("allocs.queued.per_op", queued.p50(), "count");
    print("allocs.replay.per_op", replay.p50(), "count");
    print("allocs.graph.per_op", graph.p50(), "count");
}

fn count() -> u64 {
    // ORDERING: Relaxed: a statistic.
    ALLOCATIONS.load(Ordering::Relaxed)
}
