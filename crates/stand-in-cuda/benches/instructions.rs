//! Did an operation get dearer? In instructions, which have no noise.
//!
//! Counted by callgrind on the stand-in driver, which completes all of them within the call; compared with the
//! figures in `instructions.txt` beside this file:
//!
//! | line | one of these |
//! |---|---|
//! | `queued` | a launch of the kernel `empty`, with `.queued()` |
//! | `partition` | the same on a stream in a partition |
//! | `await` | the first, awaited |
//! | `enqueue` | an `enqueue` of nothing |
//! | `shared` | an `enqueue` of nothing that updates a buffer, where streams share buffers, and no other waits for this one |
//!
//! | argument | does |
//! |---|---|
//! | none | prints the counts, if there is a valgrind |
//! | `check` | fails if a count is more than 5 % above its figure |
//! | `update` | writes the figures: `cargo bench -p stand-in-cuda -- update` |
//!
//! The figures' first line is the compiler that made them. Another one may count otherwise: that is
//! said, and the figures hold all the same.
//!
//! Here and not among the benches of `gpu-await`: so little else is built with optimization for it.
//!
//! # What is counted
//! 1. The instructions of this program's own code (this crate, and what is linked into it) on the
//!    thread that submits and awaits, and of the copies (`memcpy` and its like) that it calls: a value of some
//!    hundred bytes that is moved is one. Not the driver's, nothing else of libc's, not the poller's.
//! 2. Of 2 N operations, after a warm-up, the second N, divided by N. `enqueue` runs them twice, `shared` three times, and
//!    takes the lowest count.
//! 3. Always the same path: an await finds its operation complete the first time that it asks, and
//!    that thread's clock moves by 50 ns a reading, because under callgrind everything takes long and
//!    the engine would settle for a long wait.

mod counting;

use std::process::ExitCode;

use futures::executor::block_on;
use gpu_await::{Device, DeviceBuffer, Error, RawQueue, Stream, Uses, kernels};

use counting::Way;

/// N: a multiple of the launches after which a marker is placed.
const OPERATIONS: u32 = 1024;

fn main() -> ExitCode {
    let way = |(name, runs)| Way { name, number: OPERATIONS, operations: 1, runs };
    // If the poller is late, by chance, the submitting thread queries shared streams itself: 140 instructions more; 10 where nothing waits.
    let ways =
        [("queued", 1), ("partition", 1), ("await", 1), ("enqueue", 2), ("shared", 3)].map(way);
    counting::main("instructions.txt", &ways, counted_work)
}

/// What a child does: opens the device, warms up, and executes so many operations, twice.
fn counted_work(way: &str, operations: u32) {
    let driver = stand_in_cuda::StandIn::open();
    driver.instant(true);
    let device = Device::cuda(0).expect("the stand-in has a device");
    block_on(async {
        let stream = match way {
            "partition" => device.reserve_partition(1).await.expect("is free").stream(),
            _ => device.stream(),
        };
        let stream = stream.expect("a stream");
        let empty = kernels::empty::load(&device).await.expect("loads");
        let mut x = match way {
            "shared" => Some(shared_buffer(&driver, &device, &stream).await),
            _ => None,
        };
        let warm_up = [("await", 256), ("queued", 2 * OPERATIONS), (way, 64)];
        let stages = warm_up.map(|(way, operations)| (way, operations, 1));
        for (way, operations, times) in stages.into_iter().chain([(way, operations, 2)]) {
            for _ in 0..times {
                for _ in 0..operations {
                    match way {
                        "queued" | "partition" => {
                            empty.launch(&stream).queued().expect("is accepted");
                        }
                        "await" => empty.launch(&stream).await.expect("completes"),
                        "enqueue" => {
                            let nothing = |_: &RawQueue<'_>, ()| Ok::<_, Error>(());
                            // SAFETY: nothing is put on the stream.
                            let op = unsafe { stream.enqueue(Uses::new("none"), nothing) };
                            op.queued().expect("is accepted");
                        }
                        _ => update(&stream, x.as_mut().expect("made above")),
                    }
                }
                if times == 2 {
                    counting::mark();
                }
            }
            stream.done().await.expect("completes");
            driver.clear();
        }
    });
    assert_eq!(driver.misuse(), [""; 0]);
}

#[inline(never)]
fn update(stream: &Stream, x: &mut DeviceBuffer<u8>) {
    let uses = Uses::new("none").updates(x);
    // SAFETY: nothing is put on the stream.
    let op = unsafe { stream.enqueue(uses, |_, _| Ok::<_, Error>(())) };
    op.queued().expect("is accepted");
}

/// A buffer that another stream has read, while it was written.
async fn shared_buffer(
    driver: &stand_in_cuda::StandIn,
    device: &Device,
    stream: &Stream,
) -> DeviceBuffer<u8> {
    // Fills and copies are not complete within the call.
    driver.instant(false);
    let other = device.stream().expect("a stream");
    let mut x = stream.zeros(16).queued().expect("is accepted");
    let mut y = other.zeros(16).queued().expect("is accepted");
    let held = driver.hold();
    stream.fill(&mut x, 1).queued().expect("is accepted");
    other.copy(&x, &mut y).queued().expect("is accepted");
    drop(held);
    device.done().await.expect("completes");
    driver.instant(true);
    x
}
