//! What does `enqueue` add to a call of another library?
//!
//! Compared in one process, burst by burst in turn: `cuMemsetD8Async` of 256 bytes through
//! [`enqueue`](gpu_await::Stream::enqueue) with one declared range, `.queued()` (`ours`), and bare, with the context
//! current (`raw`): how long the thread is busy for one, in bursts of 100 on an empty stream.
//!
//! | line | is the median of |
//! |---|---|
//! | `enqueue.us`, `enqueue.raw.us` | the bursts |
//! | `enqueue.added.us` | the differences of two bursts, one behind the other |

#[path = "measure.rs"]
mod measure;

use std::time::Instant;

use cudarc::driver::result;
use gpu_await::{RawQueue, RawSlice, Uses};
use measure::{Sorted, print, rounds, us};

const BURST: usize = 100;

fn burst(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    (0..BURST).for_each(|_| call());
    us(start.elapsed()) / BURST as f64
}

fn main() {
    let device = measure::device();
    let stream = device.stream().expect("a stream");
    let mut x = stream.zeros::<u8>(256).queued().expect("memory");
    let ptr = x.device_ptr();
    let is_cuda = measure::on_cuda();
    let set = |ptr: u64, stream: u64| {
        // SAFETY: live memory of that length, and a live stream.
        let set = || unsafe { result::memset_d8_async(ptr, 1, 256, stream as _) };
        if is_cuda { set().map_err(|error| error.to_string()) } else { Ok(()) }
    };
    let (mut bare, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..rounds(1000, 2) {
        if let Ok(context) = device.cudarc_context() {
            context.bind_to_thread().expect("a context");
            // SAFETY: used while the loan lasts.
            let loan = unsafe { stream.lend_raw() };
            bare.push(burst(|| set(ptr, loan.handle()).expect("is called")));
        }
        stream.synchronize().expect("completes");
        ours.push(burst(|| {
            let uses = Uses::new("memset").writes(&mut x);
            let set =
                |queue: &RawQueue<'_>, (x,): (RawSlice<u8>,)| set(x.address(), queue.stream());
            // SAFETY: it overwrites what is declared, on the stream.
            unsafe { stream.enqueue(uses, set) }.queued().expect("is enqueued");
        }));
        stream.synchronize().expect("completes");
    }
    if !bare.is_empty() {
        let added = ours.iter().zip(&bare).map(|(ours, bare)| ours - bare);
        print("enqueue.added.us", Sorted::new(added.collect()).p50(), "us");
        print("enqueue.raw.us", Sorted::new(bare).p50(), "us");
    }
    print("enqueue.us", Sorted::new(ours).p50(), "us");
}
