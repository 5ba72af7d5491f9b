//! What is gained where a kernel starts while the one in front of it still ends, and who pays?
//!
//! Compared in one process, in turn: two devices on one GPU, the first of which has [programmatic edges](gpu_await::Overlap::LaunchesAndEdges),
//! the second full ones alone.
//!
//! | line | is |
//! |---|---|
//! | `overlap.replay.us`, `.full.us`, `.ratio` | 100 formulas on 1,000 elements, each behind the one before: replayed, from the call until awaited |
//! | `overlap.stream.us`, .. | the same as a batch |
//! | `overlap.mixed.per_s`, .. | requests of 200 kernels, 64 at a time: formulas, fills and copies on a few arrays; the ratio is of rates |
//! | `overlap.neighbour.p99_us`, .. | a small kernel on a stream of its own, awaited, while 8 streams replay the first chain over and over |
//! | `overlap.raw.PLACE.us`, `.ratio` | the first chain as a graph of the bare driver, by the place of the trigger: `front` (of the wait), `behind` (it), `end`, `exit` (none); by that with full edges |
//! | `overlap.raw.PLACE.neighbour.p99_us`, `.neighbour.ratio` | the neighbour beside 8 such graphs, by itself beside those with full edges |

#[path = "measure.rs"]
mod measure;
#[path = "raw/overlap.rs"]
mod raw;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu_await::{Device, DeviceBuffer, Overlap, Queue, Region, Result, Stream, kernels, testing};
use gpu_await_algorithms::{Algorithms, transform};
use measure::{Sorted, print, rounds, us, window};
use raw::{Place, WaitingChain};
use tokio::runtime::Runtime;

const LEN: usize = 1000;
const CHAIN: usize = 100;
const MIXED: usize = 200;
const TASKS: usize = 64;
const STREAMS: usize = 16;
const NEIGHBOURS: usize = 8;
const PHASE: Duration = Duration::from_secs(1);

fn main() {
    let runtime = measure::workers(4);
    let devices = [device(true), device(false)];
    for (name, replayed) in [("replay", true), ("stream", false)] {
        let times = in_turn(&devices, |device| {
            measure::on_worker(&runtime, chain(device.clone(), replayed))
        });
        print_two(&format!("overlap.{name}"), "us", times, |[early, full]| early / full);
    }
    let rates = in_turn(&devices, |device| mixed(&runtime, device));
    print_two("overlap.mixed", "per_s", rates, |[early, full]| early / full);
    let neighbours = in_turn(&devices, |device| {
        let device = device.clone();
        let stop = Arc::new(AtomicBool::new(false));
        let busy: Vec<_> =
            (0..NEIGHBOURS).map(|_| runtime.spawn(busy(device.clone(), stop.clone()))).collect();
        let p99 = measure::on_worker(&runtime, neighbour(device));
        // ORDERING: Relaxed: they see it some time.
        stop.store(true, Ordering::Relaxed);
        busy.into_iter().for_each(|busy| runtime.block_on(busy).expect("no panic"));
        p99
    });
    print_two("overlap.neighbour", "p99_us", neighbours, |[early, full]| early / full);
    if measure::on_cuda() {
        by_hand(&runtime, &devices[1]);
    }
}

/// A device on the same GPU.
fn device(overlaps: bool) -> Device {
    let builder =
        testing::builder().overlap(if overlaps { Overlap::LaunchesAndEdges } else { Overlap::Off });
    if measure::on_cuda() { builder.cuda(0).expect("the GPU") } else { builder.host() }
}

/// The means of two rounds.
fn in_turn(devices: &[Device; 2], measured: impl Fn(&Device) -> f64) -> [f64; 2] {
    let [first, second] = [0, 1].map(|_| [0, 1].map(|at| measured(&devices[at])));
    [0, 1].map(|at| (first[at] + second[at]) / 2.0)
}

fn print_two(name: &str, what: &str, [early, full]: [f64; 2], ratio: fn([f64; 2]) -> f64) {
    let unit = if what == "per_s" { "count" } else { "us" };
    print(&format!("{name}.{what}"), early, unit);
    print(&format!("{name}.full.{what}"), full, unit);
    print(&format!("{name}.ratio"), ratio([early, full]), "ratio");
}

fn links(q: &Queue<'_>, x: &mut DeviceBuffer<f32>) -> Result<()> {
    (0..CHAIN).try_for_each(|_| q.transform_in_place(transform!(|x| x * 0.5 + 1.0), (), &mut *x))
}

async fn chain(device: Device, replayed: bool) -> f64 {
    let stream = device.stream().expect("a stream");
    let mut x = stream.full(LEN, 1.0f32).await.expect("memory");
    let (mut region, mut times) = (Region::new(), Vec::new());
    for round in 0..rounds(3000, 5) {
        let start = Instant::now();
        match replayed {
            true => stream.replay(&mut region, |q| links(q, &mut x)).await,
            false => stream.batch(|q| links(q, &mut x)).await,
        }
        .expect("completes");
        if round > 3 {
            times.push(us(start.elapsed()));
        }
    }
    Sorted::new(times).p50()
}

/// A request's kernels: two of three formulas, the others fills and copies.
fn request(q: &Queue<'_>, [x, y, z]: &mut [DeviceBuffer<f32>; 3]) -> Result<()> {
    for number in 0..MIXED / 10 {
        for _ in 0..3 {
            q.transform_in_place(transform!(|x| x * 0.5 + 1.0), (), &mut *x)?;
            q.transform(transform!(|x| x * 2.0), (&*x,), &mut *y)?;
        }
        q.copy(&*y, &mut *z)?;
        q.transform_in_place(transform!(|y, z| y + z), (&*y,), &mut *z)?;
        q.fill(&mut *y, number as f32)?;
        q.copy(&*z, &mut *x)?;
    }
    Ok(())
}

/// Requests a second.
fn mixed(runtime: &Runtime, device: &Device) -> f64 {
    let streams: Vec<Stream> = (0..STREAMS).map(|_| device.stream().expect("a stream")).collect();
    let done = Arc::new(AtomicU64::new(0));
    let end = Instant::now() + window(PHASE);
    let start = Instant::now();
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (stream, done) = (streams[task % STREAMS].clone(), done.clone());
            runtime.spawn(async move {
                let array = |_| stream.full(LEN, 1.0f32).queued().expect("memory");
                let (mut arrays, mut region) = ([0, 1, 2].map(array), Region::new());
                while Instant::now() < end {
                    let op = stream.replay(&mut region, |q| request(q, &mut arrays));
                    op.await.expect("completes");
                    // ORDERING: Relaxed: a count.
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    tasks.into_iter().for_each(|task| runtime.block_on(task).expect("no panic"));
    done.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64()
}

async fn busy(device: Device, stop: Arc<AtomicBool>) {
    let stream = device.stream().expect("a stream");
    let mut x = stream.full(LEN, 1.0f32).await.expect("memory");
    let mut region = Region::new();
    // ORDERING: Relaxed: it is seen some time.
    while !stop.load(Ordering::Relaxed) {
        stream.replay(&mut region, |q| links(q, &mut x)).await.expect("completes");
    }
}

/// The p99 of a small kernel that is awaited.
async fn neighbour(device: Device) -> f64 {
    let stream = device.stream().expect("a stream");
    let scale = kernels::scale::load(&device).await.expect("the kernel");
    let mut x = stream.full(LEN, 1.0f32).await.expect("memory");
    let (end, mut times) = (Instant::now() + window(PHASE), Vec::new());
    while Instant::now() < end || times.len() < 10 {
        let start = Instant::now();
        scale.launch(&stream, 1.0, &mut x).await.expect("completes");
        times.push(us(start.elapsed()));
    }
    Sorted::new(times).p99()
}

fn by_hand(runtime: &Runtime, device: &Device) {
    let places = [
        ("full", Place::Exit, false),
        ("front", Place::Front, true),
        ("behind", Place::BehindTheWait, true),
        ("end", Place::End, true),
        ("exit", Place::Exit, true),
    ];
    let mut full = (1.0, 1.0);
    for (name, place, programmatic) in places {
        let chain = |_| WaitingChain::new(place, programmatic, CHAIN, LEN as u32);
        let chains: Vec<_> = (0..NEIGHBOURS).map(chain).collect();
        let mut times = Vec::new();
        for _ in 0..rounds(3000, 5) {
            let start = Instant::now();
            chains[0].launch();
            chains[0].synchronize();
            times.push(us(start.elapsed()));
        }
        let chain_us = Sorted::new(times).p50();
        let measured = runtime.spawn(neighbour(device.clone()));
        chains.iter().for_each(WaitingChain::launch);
        while !measured.is_finished() {
            for chain in &chains {
                chain.synchronize();
                chain.launch();
            }
        }
        chains.iter().for_each(WaitingChain::synchronize);
        let p99 = runtime.block_on(measured).expect("no panic");
        if !programmatic {
            full = (chain_us, p99);
        }
        print(&format!("overlap.raw.{name}.us"), chain_us, "us");
        print(&format!("overlap.raw.{name}.neighbour.p99_us"), p99, "us");
        if programmatic {
            print(&format!("overlap.raw.{name}.ratio"), chain_us / full.0, "ratio");
            print(&format!("overlap.raw.{name}.neighbour.ratio"), p99 / full.1, "ratio");
        }
    }
}
