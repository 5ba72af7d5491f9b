//! What does `enqueue` add to a call of another library?
//!
//! Compared in one process: `cuMemsetD8Async` of 256 bytes through [`enqueue`](gpu_await::Stream::enqueue) with one
//! declared range, `.queued()` (`ours`), and bare, with the context current (`raw`): how long the thread is busy for
//! one, in bursts of 100 on an empty stream; the median of the bursts.

#[path = "measure.rs"]
mod measure;

use std::time::Instant;

use cudarc::driver::result;
use gpu_await::Uses;
use measure::{Sorted, print, rounds, us};

const BURST: usize = 100;

fn burst(mut call: impl FnMut(), mut drain: impl FnMut()) -> f64 {
    let mut times = Vec::new();
    for _ in 0..rounds(500, 2) {
        let start = Instant::now();
        (0..BURST).for_each(|_| call());
        times.push(us(start.elapsed()) / BURST as f64);
        drain();
    }
    Sorted::new(times).p50()
}

fn main() {
    let device = measure::device();
    let stream = device.stream().expect("a stream");
    let drain = || stream.synchronize().expect("completes");
    let mut x = stream.zeros::<u8>(256).queued().expect("memory");
    let ptr = x.device_ptr();
    let is_cuda = measure::on_cuda();
    let set = |ptr: u64, stream: u64| {
        // SAFETY: live memory of that length, and a live stream.
        let set = || unsafe { result::memset_d8_async(ptr, 1, 256, stream as _) };
        if is_cuda { set().map_err(|error| error.to_string()) } else { Ok(()) }
    };
    if let Ok(context) = device.cudarc_context() {
        context.bind_to_thread().expect("a context");
        // SAFETY: used while the loan lasts.
        let loan = unsafe { stream.lend_raw() };
        let raw = || set(ptr, loan.handle()).expect("is called");
        print("enqueue.raw.us", burst(raw, drain), "us");
    }
    let ours = || {
        let uses = Uses::new("memset").writes(&mut x);
        // SAFETY: it overwrites what is declared, on the stream.
        let op = unsafe { stream.enqueue(uses, |queue, (x,)| set(x.address(), queue.stream())) };
        op.queued().expect("is enqueued");
    };
    print("enqueue.us", burst(ours, drain), "us");
}
