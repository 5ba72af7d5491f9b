//! What does it cost to compute in another process?
//!
//! 1 KiB up, a small kernel, 1 KiB down: in this process, and as a call of a worker (`inside`: as its service sees it); the same call without
//! the device; and 1 KiB there and back between two threads that wait in `poll` on the same kind of socket, which is the least that two processes could do. The same with answers that are
//! held until the device is well (`held`). Then 1,024 callers at once, and a payload of 64 MiB on its way to the device.

#[path = "service.rs"]
mod service;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use gpu_await::Device;
use service::{Ask, Bench, Small, builder, is_smoke, on_gpu, print, quantile};

fn main() {
    gpu_await_worker::init::<Bench>();
    let rounds = if is_smoke() { 20 } else { 20_000 };
    print("worker.ping_pong.p50_us", ping_pong(rounds), "us");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let device = if on_gpu() { Device::cuda(0) } else { Ok(Device::host()) }.expect("a device");
        let small = std::sync::Arc::new(Small::new(&device).await.expect("it loads"));
        let worker = builder(0).payload_bytes(64 << 20, 64 << 20).spawn().await.expect("it starts");
        let x = vec![1.0f32; 256];

        let four = builder(0).threads(4).spawn().await.expect("it starts");
        let held = builder(0).hold_answers(true).spawn().await.expect("it starts");
        let hot = builder(0).hot(Duration::from_micros(100)).spawn().await;
        let hot = hot.expect("it starts");

        let mut inside =
            latencies(rounds, async || drop(small.run(x.clone()).await.unwrap())).await;
        let ask = Ask::Small(x.clone());
        let mut called = latencies(rounds, async || drop(worker.call(&ask).await.unwrap())).await;
        let ask = Ask::Timed(x.clone());
        let mut inside_there = Vec::new();
        for _ in 0..rounds / 4 {
            inside_there.push(f64::from(worker.call(&ask).await.unwrap()[0]));
        }
        let ask = Ask::Echo(x.clone());
        let mut echoed = latencies(rounds, async || drop(worker.call(&ask).await.unwrap())).await;
        let mut fours = latencies(rounds, async || drop(four.call(&ask).await.unwrap())).await;
        let mut hots = latencies(rounds, async || drop(hot.call(&ask).await.unwrap())).await;
        let ask = Ask::Small(x.clone());
        let mut holding = latencies(rounds, async || drop(held.call(&ask).await.unwrap())).await;
        let mut four = latencies(rounds, async || drop(four.call(&ask).await.unwrap())).await;
        let mut hot = latencies(rounds, async || drop(hot.call(&ask).await.unwrap())).await;
        for (name, values) in [
            ("in_process", &mut inside),
            ("call", &mut called),
            ("call.inside", &mut inside_there),
            ("held.call", &mut holding),
            ("echo", &mut echoed),
            ("four_threads.call", &mut four),
            ("four_threads.echo", &mut fours),
            ("hot.call", &mut hot),
            ("hot.echo", &mut hots),
        ] {
            print(&format!("worker.{name}.p50_us"), quantile(values, 0.5), "us");
            print(&format!("worker.{name}.p99_us"), quantile(values, 0.99), "us");
        }
        for (name, values) in [("added", &mut called), ("hot.added", &mut hot)] {
            let added = quantile(values, 0.5) - quantile(&mut inside, 0.5);
            print(&format!("worker.{name}.p50_us"), added, "us");
        }

        let callers = if is_smoke() { 16 } else { 1024 };
        let (small_here, x_here) = (small.clone(), x.clone());
        let here = throughput(callers, rounds, move || {
            let (small, x) = (small_here.clone(), x_here.clone());
            async move { drop(small.run(x).await.unwrap()) }
        })
        .await;
        let (caller, y) = (held, x.clone());
        let with_holds = throughput(callers, rounds, move || {
            let (worker, ask) = (caller.clone(), Ask::Small(y.clone()));
            async move { drop(worker.call(ask).await.unwrap()) }
        })
        .await;
        let caller = worker.clone();
        let there = throughput(callers, rounds, move || {
            let (worker, ask) = (caller.clone(), Ask::Small(x.clone()));
            async move { drop(worker.call(ask).await.unwrap()) }
        })
        .await;
        print("worker.throughput.in_process_per_s", here, "/s");
        print("worker.throughput.calls_per_s", there, "/s");
        print("worker.throughput.ratio", there / here, "ratio");
        print("worker.throughput.held", with_holds / there, "of the same without");

        let (mut best, mut best_copy) = (f64::MAX, f64::MAX);
        let bytes = if is_smoke() { 1 << 20 } else { 64 << 20 };
        for _ in 0..if is_smoke() { 2 } else { 20 } {
            let lease = worker.lease(bytes).await.unwrap();
            let begun = Instant::now();
            let copy = worker.call(Ask::Payload(1)).lease(lease).await.unwrap();
            best = best.min(begun.elapsed().as_secs_f64());
            best_copy = best_copy.min(f64::from(copy[0]));
        }
        print("worker.payload.copy_gb_per_s", bytes as f64 / best_copy / 1e9, "GB/s");
        print("worker.payload.call_gb_per_s", bytes as f64 / best / 1e9, "GB/s");
    });
}

/// Each round's time, in microseconds.
async fn latencies(rounds: usize, work: impl AsyncFn()) -> Vec<f64> {
    for _ in 0..rounds / 10 {
        work().await;
    }
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let begun = Instant::now();
        work().await;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    times
}

/// Requests a second of so many callers.
async fn throughput<F: Future<Output = ()> + Send + 'static>(
    callers: usize,
    rounds: usize,
    work: impl Fn() -> F + Clone + Send + 'static,
) -> f64 {
    let each = (rounds * 8 / callers).max(1);
    let begun = Instant::now();
    let callers = (0..callers).map(|_| {
        let work = work.clone();
        tokio::spawn(async move {
            for _ in 0..each {
                work().await;
            }
        })
    });
    let callers: Vec<_> = callers.collect();
    let count = callers.len();
    for caller in callers {
        caller.await.unwrap();
    }
    (count * each) as f64 / begun.elapsed().as_secs_f64()
}

/// 1 KiB to a thread that sleeps, and back.
fn ping_pong(rounds: usize) -> f64 {
    let (mut here, mut there) = std::os::unix::net::UnixStream::pair().expect("two sockets");
    let other = std::thread::spawn(move || {
        let mut bytes = [0u8; 1024];
        while there.read_exact(&mut bytes).is_ok() && there.write_all(&bytes).is_ok() {}
    });
    let mut bytes = [0u8; 1024];
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let begun = Instant::now();
        here.write_all(&bytes).expect("the other side reads");
        here.read_exact(&mut bytes).expect("the other side answers");
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    drop(here);
    other.join().expect("the other side ends");
    quantile(&mut times, 0.5)
}
