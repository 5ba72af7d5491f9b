//! How often does an operation ask for heap memory?
//!
//! All allocations of the process are counted, on whatever thread, while an empty kernel is launched
//! and awaited (`await`) or launched with `.queued()` (`queued`), after a warm-up. To compare with:
//! none. The driver's own (C) allocations are not seen; the host device's are, it is no driver.

#[path = "measure.rs"]
mod measure;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_await::kernels;
use measure::{print, rounds};

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
    let rounds = rounds(10_000, 200);
    let runtime = measure::workers(4);
    let (awaited, queued) = measure::on_worker(&runtime, async move {
        let stream = device.stream().expect("a stream");
        let empty = kernels::empty::load(&device).await.expect("loads");
        let mut awaited = 0;
        let mut queued = 0;
        // The first time round warms up.
        for _ in 0..2 {
            let before = count();
            for _ in 0..rounds {
                empty.launch(&stream).await.expect("completes");
            }
            awaited = count() - before;
            let before = count();
            for round in 0..rounds {
                empty.launch(&stream).queued().expect("is accepted");
                if round % 256 == 255 {
                    // The driver blocks behind a thousand launches.
                    stream.done().await.expect("completes");
                }
            }
            queued = count() - before;
            stream.done().await.expect("completes");
        }
        (awaited, queued)
    });
    print("allocs.await.per_op", awaited as f64 / rounds as f64, "count");
    print("allocs.queued.per_op", queued as f64 / rounds as f64, "count");
}

fn count() -> u64 {
    // ORDERING: Relaxed: a statistic.
    ALLOCATIONS.load(Ordering::Relaxed)
}
