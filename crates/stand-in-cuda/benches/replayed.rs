//! Did a node of a replayed list get dearer? In instructions, counted as [`instructions`](../instructions.rs) does, and a program of
//! its own: in one with several kernels the launch of a single one is compiled otherwise.
//!
//! | line | a node of a list of 200 launches |
//! |---|---|
//! | `replay_changed` | each has another value than in the run before |
//! | `replay_same` | nothing changed |
//! | `replay_moved` | one buffer of several is at another address |
//! | `replay_named` | nothing changed, and each names the same 256 blocks of a slab |
//!
//! None is awaited before the last: how often a task asks is a matter of time. Arguments are those of `instructions`; the figures are in `replayed.txt`.

mod counting;

use std::process::ExitCode;

use futures::executor::block_on;
use gpu_await::{Device, Region, Stream, kernels};

use counting::Way;

const LIST: u32 = 200;
/// N: each is a list. What the submitting thread does in place of a late poller, while it warms up, is little beside so many.
const REPLAYS: u32 = 32;

fn main() -> ExitCode {
    let way = |name| Way { name, number: REPLAYS, operations: LIST, runs: 1 };
    let ways = ["replay_changed", "replay_same", "replay_moved", "replay_named"].map(way);
    counting::main("replayed.txt", &ways, counted_work)
}

/// Replays of a chain of launches on a few buffers, as a layer of a model is, twice so many.
fn counted_work(way: &str, lists: u32) {
    let driver = stand_in_cuda::StandIn::open();
    driver.instant(true);
    let device = Device::cuda(0).expect("the stand-in has a device");
    let stream = device.stream().expect("a stream");
    let axpy = kernels::axpy::load_blocking(&device).expect("loads");
    let mut region = Region::new();
    if way == "replay_named" {
        name_blocks(&stream, &axpy, &mut region, [lists + 64, lists]);
    } else {
        chain(&stream, &axpy, &mut region, (way, [lists + 64, lists]));
    }
    block_on(stream.done()).expect("completes");
    // The first launch of the kernel is in no list, so that the second list is longer.
    assert_eq!(region.report().replayed, u64::from(2 * lists + 64 - 3));
    assert_eq!(driver.misuse(), [""; 0]);
}

fn chain(
    stream: &Stream,
    axpy: &kernels::axpy,
    region: &mut Region,
    (way, runs): (&str, [u32; 2]),
) {
    let buffer = || stream.full(16, 1.0f32).queued().expect("is accepted");
    let mut buffers: [_; 8] = std::array::from_fn(|_| buffer());
    // Takes the place of the first in every other run.
    let mut other = buffer();
    let mut run = 0;
    for runs in runs {
        for _ in 0..runs {
            let a = if way == "replay_changed" { run as f32 } else { 1.0 };
            if way == "replay_moved" {
                std::mem::swap(&mut buffers[0], &mut other);
            }
            let op = stream.replay(region, |q| {
                for node in 0..LIST as usize {
                    let at = node % (buffers.len() - 1);
                    let [x, y] = buffers.get_disjoint_mut([at, at + 1]).expect("two of them");
                    axpy.launch(q, a + node as f32, &*x, y)?;
                }
                Ok(())
            });
            op.queued().expect("is accepted");
            run += 1;
        }
        counting::mark();
    }
}

fn name_blocks(stream: &Stream, axpy: &kernels::axpy, region: &mut Region, runs: [u32; 2]) {
    let mut slab = stream.slab::<f32>(1024, 16).queued().expect("is accepted");
    let x = stream.full(slab.len(), 1.0f32).queued().expect("is accepted");
    let blocks: Vec<u32> = (0..256).map(|number| 4 * number).collect();
    for runs in runs {
        for _ in 0..runs {
            let op = stream.replay(region, |q| {
                let mut named = slab.naming_mut(&blocks)?;
                (0..LIST).try_for_each(|_| axpy.launch(q, 1.0, &x, &mut named))
            });
            op.queued().expect("is accepted");
        }
        counting::mark();
    }
}
