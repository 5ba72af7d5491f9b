//! What does an await of a small kernel wait for beside work that fills the GPU?
//!
//! A kernel of 8 blocks for 5 µs is awaited again and again. The hog is a kernel whose blocks run for 2 ms and fill all multiprocessors
//! that its stream has, a few launches ahead.
//!
//! | phase | the small kernel | the hog |
//! |---|---|---|
//! | `idle`, `idle_8`, `idle_32` | in a partition of 16 multiprocessors, from 1, 8 and 32 streams | none |
//! | `raw_equal`, `raw_high` | by the bare driver, which waits in `cuStreamSynchronize`; priority equal to the hog's, and the highest | everywhere |
//! | `equal`, `high` | the same awaited | everywhere |
//! | `raw_partition` | by the bare driver in the partition, from 1 stream | in a partition of the rest, on 1 stream |
//! | `partition`, `partition_8`, `partition_32` | in the partition, from 1, 8 and 32 streams | in a partition of the rest, on as many |
//! | `partition_block_on` | the same as `partition`, awaited by the thread in `block_on` instead of in a task of one of the workers | the same |
//! | `partition_8_high`, `partition_32_high` | the same with the highest priority | the same |
//! | `partition_memory` | in the partition, from 1 stream | there, and copies memory of the device |
//!
//! `isolation.hog.kept` is how many launches the hog completes in its partition, by how many alone on the whole GPU, over its part of the
//! multiprocessors. With 32 streams a side the driver's hardware queues are shared, unless `CUDA_DEVICE_MAX_CONNECTIONS` is 32 when the
//! process begins.
//!
//! `isolation.joins`: a pool under requests moves to a partition of another size 1,000 times (`joins=K`); what the GPU and the process have
//! then, beyond what they had after the first 100; and requests that failed. `only=joins` leaves the rest out. On the host device, where
//! partitions are nominal, the bare driver's phases are left out.

#[path = "hog.rs"]
mod hog;
#[path = "measure.rs"]
mod measure;
#[path = "raw/cuda.rs"]
mod raw;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gpu_await::{Device, ErrorKind, LaunchConfig, Partition, Result, Stream, StreamPool};
use hog::{HOG_BLOCKS, HOG_NS, Hog, spin};
use measure::{Sorted, print, rounds, us, window};
use raw::{Raw, RawStream};
use tokio::runtime::Runtime;

const SMALL_NS: u64 = 5_000;
const SMALL: (u32, u32) = (8, 128);
/// How long a phase takes.
const PHASE: Duration = Duration::from_millis(1000);
/// Until it is tried again.
const PAUSE: Duration = Duration::from_micros(200);
/// The sizes of partitions that come and go.
const SIZES: [u32; 4] = [8, 16, 24, 48];

/// Awaits the small kernel on each stream, for a phase.
fn awaits(runtime: &Runtime, spin: &spin, streams: &[Stream]) -> Sorted {
    let end = Instant::now() + window(PHASE);
    let task = |stream: &Stream| {
        let (spin, stream) = (spin.clone(), stream.clone());
        runtime.spawn(async move {
            let mut times = Vec::new();
            while times.is_empty() || Instant::now() < end {
                let start = Instant::now();
                spin.launch(&stream, LaunchConfig::new(SMALL.0, SMALL.1), SMALL_NS).await?;
                times.push(us(start.elapsed()));
            }
            Ok::<_, gpu_await::Error>(times)
        })
    };
    let tasks: Vec<_> = streams.iter().map(task).collect();
    let times = tasks.into_iter().flat_map(|task| {
        runtime.block_on(task).expect("no panic").expect("the kernel is launched")
    });
    Sorted::new(times.collect())
}

/// The same on one stream, by the calling thread.
fn awaits_here(runtime: &Runtime, spin: &spin, stream: &Stream) -> Sorted {
    let (mut times, end) = (Vec::new(), Instant::now() + window(PHASE));
    runtime.block_on(async {
        while times.is_empty() || Instant::now() < end {
            let start = Instant::now();
            let launched = spin.launch(stream, LaunchConfig::new(SMALL.0, SMALL.1), SMALL_NS);
            launched.await.expect("the kernel is launched");
            times.push(us(start.elapsed()));
        }
    });
    Sorted::new(times)
}

fn told(phase: &str, times: &Sorted) {
    print(&format!("isolation.{phase}.p50_us"), times.p50(), "us");
    print(&format!("isolation.{phase}.p99_us"), times.p99(), "us");
}

/// The same by the bare driver.
fn raw_awaits(small: &RawStream) -> Sorted {
    let (mut times, end) = (Vec::new(), Instant::now() + window(PHASE));
    while times.is_empty() || Instant::now() < end {
        let start = Instant::now();
        small.launch_spinning(SMALL.0, SMALL.1, SMALL_NS);
        small.synchronize();
        times.push(us(start.elapsed()));
    }
    Sorted::new(times)
}

/// Beside a bare hog of as many blocks.
fn beside_raw_hog(raw: &'static Raw, multiprocessors: u32, lowest: i32, priority: i32) -> Sorted {
    let (small, stop) = (raw.stream_with_priority(priority), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let (hog, events) = (raw.stream_with_priority(lowest), [raw.event(), raw.event()]);
            let mut launches = 0;
            // ORDERING: Relaxed: all that the threads share.
            while !stop.load(Ordering::Relaxed) {
                let event = &events[launches % 2];
                while launches >= 2 && !event.is_complete() {
                    thread::sleep(Duration::from_micros(100));
                }
                hog.launch_spinning(HOG_BLOCKS * multiprocessors, 1024, HOG_NS);
                hog.record(event);
                launches += 1;
            }
            hog.synchronize();
        });
        thread::sleep(window(PHASE / 10));
        let times = raw_awaits(&small);
        stop.store(true, Ordering::Relaxed);
        times
    })
}

fn streams(partition: &Partition, count: usize) -> Vec<Stream> {
    streams_of(partition, count, partition.device().priority_range().0)
}

fn streams_of(partition: &Partition, count: usize, priority: i32) -> Vec<Stream> {
    let stream = |_| partition.stream_builder().priority(priority).build().expect("a stream");
    (0..count).map(stream).collect()
}

fn main() {
    let (device, runtime) = (measure::device(), measure::workers(measure::cores()));
    let spin = runtime.block_on(spin::load(&device)).expect("loads");
    if !measure::argument("only=joins") {
        neighbours(&device, &runtime, &spin);
    }
    runtime.block_on(joins(&device, &spin)).expect("partitions come and go");
}

fn neighbours(device: &Device, runtime: &Runtime, spin: &spin) {
    let all = device.multiprocessors();
    let reserved = |multiprocessors| runtime.block_on(device.reserve_partition(multiprocessors));
    let small = reserved(16.min(all / 2).max(1)).expect("multiprocessors");
    for (phase, count) in [("idle", 1), ("idle_8", 8), ("idle_32", 32)] {
        told(phase, &awaits(runtime, spin, &streams(&small, count)));
    }
    let (lowest, highest) = device.priority_range();
    let with_priority =
        |priority| device.stream_builder().priority(priority).build().expect("a stream");
    let raw = measure::on_cuda().then(Raw::load);
    if let Some(raw) = raw {
        told("raw_equal", &beside_raw_hog(raw, all, lowest, lowest));
        told("raw_high", &beside_raw_hog(raw, all, lowest, highest));
    }
    let mut everywhere = 0.0;
    for (phase, priority) in [("equal", lowest), ("high", highest)] {
        let hog = Hog::start(runtime, spin, vec![with_priority(lowest)]);
        told(phase, &awaits(runtime, spin, &[with_priority(priority)]));
        everywhere = hog.rate(PHASE);
        hog.stop(runtime, device);
    }
    // A host device may have one multiprocessor, which the small kernel has.
    let Ok(rest) = reserved(all - small.multiprocessors()) else { return };
    for (phase, count) in [("partition", 1), ("partition_8", 8), ("partition_32", 32)] {
        let hog = Hog::start(runtime, spin, streams(&rest, count));
        let inside = streams(&small, count);
        if let (Some(raw), [one]) = (raw, &inside[..]) {
            // SAFETY: nothing else is put on the stream meanwhile, and what is launched uses no memory.
            let handle = unsafe { one.as_raw() };
            told("raw_partition", &raw_awaits(&raw.stream_of(handle)));
        }
        told(phase, &awaits(runtime, spin, &inside));
        if count > 1 {
            let first = streams_of(&small, count, highest);
            told(&format!("{phase}_high"), &awaits(runtime, spin, &first));
        } else {
            told(&format!("{phase}_block_on"), &awaits_here(runtime, spin, &inside[0]));
            // Its launches are smaller by its part, so that as many of them are its share.
            print("isolation.hog.kept", hog.rate(PHASE) / everywhere, "ratio");
        }
        hog.stop(runtime, device);
    }
    let hog = Hog::copying(runtime, streams(&rest, 1));
    told("partition_memory", &awaits(runtime, spin, &streams(&small, 1)));
    hog.stop(runtime, device);
}

/// Memory of the device that is taken, descriptors of the process.
fn holds(device: &Device) -> (f64, f64) {
    let memory = device.memory().expect("the device answers");
    let taken = (memory.total_bytes - memory.free_bytes) as f64 / f64::from(1 << 20);
    let descriptors = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    (taken, descriptors as f64)
}

/// Partitions that come and go under requests.
async fn joins(device: &Device, spin: &spin) -> Result<()> {
    let joins = measure::number("joins").unwrap_or_else(|| rounds(1000, 120));
    // The next one is there before the one before is given back.
    let most = device.multiprocessors() / 2;
    if most == 0 {
        return Ok(());
    }
    let pool = StreamPool::builder().streams(device, 4).max_in_flight(8).build()?;
    let (asked, failed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let requests = (0..8).map(|_| {
        let (pool, spin, asked, failed) =
            (pool.clone(), spin.clone(), asked.clone(), failed.clone());
        tokio::spawn(async move {
            loop {
                let answer = async {
                    let stream = pool.acquire().await?;
                    spin.launch(&stream, LaunchConfig::new(SMALL.0, SMALL.1), SMALL_NS).await
                };
                let is_lost = answer.await.is_err();
                // ORDERING: Relaxed, here and below: statistics.
                asked.fetch_add(1, Ordering::Relaxed);
                failed.fetch_add(u64::from(is_lost), Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        })
    });
    let requests: Vec<_> = requests.collect();
    let (mut before, mut times) = ((0.0, 0.0), Vec::new());
    for join in 0..joins {
        let size = SIZES[join % SIZES.len()].min(most);
        let start = Instant::now();
        let partition = loop {
            match device.reserve_partition(size).await {
                // Work of a partition before is still there.
                Err(error) if error.kind() == ErrorKind::Overloaded => {
                    tokio::time::sleep(PAUSE).await;
                }
                reserved => break reserved?,
            }
        };
        pool.move_to(&partition)?;
        times.push(us(start.elapsed()));
        let since = asked.load(Ordering::Relaxed);
        while asked.load(Ordering::Relaxed) < since + 8 {
            tokio::time::sleep(PAUSE).await;
        }
        if join == 99 {
            before = holds(device);
        }
    }
    requests.iter().for_each(tokio::task::JoinHandle::abort);
    let after = holds(device);
    print("isolation.joins.p50_us", Sorted::new(times).p50(), "us");
    print("isolation.joins.memory_grown", after.0 - before.0, "MiB");
    print("isolation.joins.descriptors_grown", after.1 - before.1, "count");
    print("isolation.joins.requests", asked.load(Ordering::Relaxed) as f64, "count");
    print("isolation.joins.lost", failed.load(Ordering::Relaxed) as f64, "count");
    Ok(())
}
