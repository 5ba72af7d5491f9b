//! What does a launch cost that nobody awaits?
//!
//! Compared in one process, round by round in turn: 100 launches of an empty kernel through the bare
//! driver and one `cuStreamSynchronize` (`raw`); 99 launches `.queued()` and one awaited
//! (`await_last`). The time of a launch is that of the round by 100, the median of all rounds.

#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::time::Instant;

use gpu_await::{Stream, kernels};
use measure::{Sorted, print, rounds, us};
use raw::{Raw, RawStream};

const CHAIN: usize = 100;

fn main() {
    let raw = measure::on_cuda().then(|| Raw::load().stream());
    let device = measure::device();
    measure::current_thread().block_on(async {
        let stream = device.stream().expect("a stream");
        let empty = kernels::empty::load(&device).await.expect("loads");
        let (mut bare, mut ours) = (Vec::new(), Vec::new());
        let (warm_up, rounds) = (rounds(100, 2), rounds(1000, 20));
        for round in 0..warm_up + rounds {
            // Whoever comes second finds the device awake: take turns.
            let bare_first = round % 2 == 0;
            let before = raw.as_ref().filter(|_| bare_first).map(bare_round);
            let mine = await_round(&stream, &empty).await;
            let after = raw.as_ref().filter(|_| !bare_first).map(bare_round);
            if round >= warm_up {
                ours.push(mine);
                bare.extend(before.or(after));
            }
        }
        if raw.is_some() {
            print("chain100.raw.us_per_op", Sorted::new(bare).p50(), "us");
        }
        print("chain100.await_last.us_per_op", Sorted::new(ours).p50(), "us");
    });
}

fn bare_round(stream: &RawStream) -> f64 {
    let start = Instant::now();
    (0..CHAIN).for_each(|_| stream.launch_empty());
    stream.synchronize();
    us(start.elapsed()) / CHAIN as f64
}

async fn await_round(stream: &Stream, empty: &kernels::empty) -> f64 {
    let start = Instant::now();
    for _ in 1..CHAIN {
        empty.launch(stream).queued().expect("is accepted");
    }
    empty.launch(stream).await.expect("completes");
    us(start.elapsed()) / CHAIN as f64
}
