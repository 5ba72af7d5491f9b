//! Is a replayed batch of small kernels faster than their launches, and how far from the bare driver's graph?
//!
//! Compared in one process, for chains of `scale` on one array of 1,024 elements: a batch (`launches`), a replayed batch with other
//! arguments each time (`changed`) and with the same (`unchanged`), and the same three by the bare driver with
//! `cuStreamSynchronize` (`raw_..`). The median of one after the other, each awaited in a task on four workers.
//!
//! `graph`s are the same chains as a `Graph` that takes the array and the factor. All of them, the bare driver too, use the same array:
//! how far it lies from the multiprocessors that run a chain is worth a tenth of its time.
//!
//! | line | is |
//! |---|---|
//! | `replay.N.WHO.us` | a chain of N, from the first call until it was awaited |
//! | `replay.N.WHO.ratio` | by the batch; of `raw_ratio`, by the bare driver's graph |
//! | `graph.N.WHO.us`, `.ratio`, `.raw_ratio` | likewise, of a `Graph` |
//! | `replay.shape_changes.ratio` | chains of 8 lengths in turn, replayed, by batches of them |
//! | `replay.forkjoin.ratio` | 4 chains of 5 kernels of some 5 µs, written one after the other, and one behind them all: replayed, by four streams that are joined |
//! | `replay.threads16.ratio` | requests a second of 16 tasks, each a chain of 10 on a stream of its own, replayed with other arguments, by batches |

#[path = "raw/graphs.rs"]
mod graphs;
#[path = "measure.rs"]
mod measure;

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_await::{
    Device, DeviceBuffer, Graph, Grid, InOut, LaunchConfig, Region, Stream, kernel, kernels,
};
use graphs::Chain;
use measure::{Sorted, Tally, print, rounds, us};

const LEN: usize = 1024;
const TASKS: usize = 16;

kernel! {
    /// `y[i] = x[i]` after so many multiply-adds.
    unsafe fn churn(x: &[f32], y: Out<[f32]>, steps: u32, n: u64 = y.len()) where x.len() == y.len();
    launch = LaunchConfig::for_elements(y.len());
    ptx = include_str!("../kernels/churn.ptx");
    host = |_: &Grid, x: &[f32], y: &mut [f32], _: u32, _: u64| y.copy_from_slice(x);
}

struct Place {
    stream: Stream,
    scale: kernels::scale,
    x: DeviceBuffer<f32>,
    region: Region,
    graph: Graph<(InOut<f32>, f32)>,
}

impl Place {
    /// `kernels` of them in the graph.
    fn new(device: &Device, scale: &kernels::scale, kernels: usize, x: DeviceBuffer<f32>) -> Place {
        let stream = device.stream().expect("a stream");
        let state = (scale.clone(), kernels);
        let graph = device.graph(state, |q, (scale, kernels), (mut x, factor)| {
            (0..*kernels).try_for_each(|_| scale.launch(q, factor, &mut x))
        });
        Place { scale: scale.clone(), x, stream, region: Region::new(), graph }
    }

    async fn graph(&mut self, factor: f32) {
        let Place { stream, x, graph, .. } = self;
        graph.launch(stream, (x, factor)).await.expect("completes");
    }

    async fn batch(&mut self, kernels: usize, factor: f32) {
        let Place { stream, scale, x, .. } = self;
        let op = stream.batch(|q| (0..kernels).try_for_each(|_| scale.launch(q, factor, x)));
        op.await.expect("completes");
    }

    async fn replay(&mut self, kernels: usize, factor: f32) {
        let Place { stream, scale, x, region, .. } = self;
        let op =
            stream.replay(region, |q| (0..kernels).try_for_each(|_| scale.launch(q, factor, x)));
        op.await.expect("completes");
    }
}

fn array(device: &Device) -> DeviceBuffer<f32> {
    device.default_stream().full(LEN, 1.0).synchronize().expect("memory")
}

fn factor(round: usize, changes: bool) -> f32 {
    if changes { 1.0 + round as f32 * 1e-9 } else { 1.0 }
}

/// How a chain is submitted.
#[derive(Clone, Copy)]
enum Way {
    Batch,
    Changed,
    Unchanged,
    GraphChanged,
    GraphUnchanged,
}

async fn alone(
    device: Device,
    scale: kernels::scale,
    x: DeviceBuffer<f32>,
    lengths: Vec<usize>,
    way: Way,
) -> (f64, DeviceBuffer<f32>) {
    let mut place = Place::new(&device, &scale, lengths[0], x);
    let mut times = Vec::new();
    for round in 0..rounds(5000, 20) {
        let length = lengths[round % lengths.len()];
        let start = Instant::now();
        match way {
            Way::Batch => place.batch(length, factor(round, true)).await,
            Way::Changed => place.replay(length, factor(round, true)).await,
            Way::Unchanged => place.replay(length, factor(round, false)).await,
            Way::GraphChanged => place.graph(factor(round, true)).await,
            Way::GraphUnchanged => place.graph(factor(round, false)).await,
        }
        if round > 10 {
            times.push(us(start.elapsed()));
        }
    }
    (Sorted::new(times).p50(), place.x)
}

/// On an array of which nothing is under way.
fn by_hand(length: usize, x: &DeviceBuffer<f32>, way: Way) -> f64 {
    let chain = Chain::on(length, LEN, x.device_ptr());
    let mut times = Vec::new();
    for round in 0..rounds(5000, 20) {
        let start = Instant::now();
        match way {
            Way::Batch => chain.launches(factor(round, true)),
            Way::Changed | Way::GraphChanged => {
                chain.set(factor(round, true));
                chain.launch();
            }
            Way::Unchanged | Way::GraphUnchanged => chain.launch(),
        }
        chain.synchronize();
        times.push(us(start.elapsed()));
    }
    Sorted::new(times).p50()
}

const CHAINS: usize = 4;
/// Some 5 us on an H200.
const STEPS: u32 = 230;

/// Chains on buffers of their own, and a last kernel for each of these that reads the next one's.
async fn forkjoin(device: Device, replayed: bool) -> f64 {
    let churn = churn::load(&device).await.expect("the kernel");
    let streams: Vec<_> = (0..CHAINS).map(|_| device.stream().expect("a stream")).collect();
    let buffer = |_| streams[0].full(LEN, 1.0f32).queued().expect("memory");
    let (mut a, mut b): (Vec<_>, Vec<_>) =
        ((0..CHAINS).map(buffer).collect(), (0..CHAINS).map(buffer).collect());
    let mut end = streams[0].full(LEN, 1.0f32).queued().expect("memory");
    let mut region = Region::new();
    let mut times = Vec::new();
    for round in 0..rounds(2000, 20) {
        let start = Instant::now();
        if replayed {
            let op = streams[0].replay(&mut region, |q| {
                for (a, b) in a.iter_mut().zip(&mut b) {
                    for _ in 0..5 {
                        churn.launch(q, &*a, b, STEPS)?;
                        std::mem::swap(a, b);
                    }
                }
                a.iter().try_for_each(|a| churn.launch(q, a, &mut end, 1))
            });
            op.await.expect("completes");
        } else {
            let each = streams.iter().zip(a.iter_mut().zip(&mut b));
            for (stream, (a, b)) in each {
                let chain = stream.batch(|q| {
                    for _ in 0..5 {
                        churn.launch(q, &*a, b, STEPS)?;
                        std::mem::swap(a, b);
                    }
                    Ok(())
                });
                chain.queued().expect("is launched");
            }
            let join =
                streams[0].batch(|q| a.iter().try_for_each(|a| churn.launch(q, a, &mut end, 1)));
            join.await.expect("completes");
        }
        if round > 10 {
            times.push(us(start.elapsed()));
        }
    }
    Sorted::new(times).p50()
}

fn together(device: &Device, scale: &kernels::scale, replayed: bool) -> f64 {
    let runtime = measure::workers(TASKS.min(measure::cores()));
    let tally = Arc::new(Tally::new(TASKS));
    // Before anything is launched: making a stream waits for that.
    let place = |_| Place::new(device, scale, 1, array(device));
    let places: Vec<_> = (0..TASKS).map(place).collect();
    let tasks: Vec<_> = places
        .into_iter()
        .enumerate()
        .map(|(who, mut place)| {
            let tally = tally.clone();
            runtime.spawn(async move {
                for round in 0.. {
                    if replayed {
                        place.replay(10, factor(round, true)).await;
                    } else {
                        place.batch(10, factor(round, true)).await;
                    }
                    if !tally.add(who) {
                        return;
                    }
                }
            })
        })
        .collect();
    let rate = tally.measure(measure::window(Duration::from_secs(1)));
    for task in tasks {
        runtime.block_on(task).expect("the task does not panic");
    }
    rate.per_second
}

fn main() {
    let runtime = measure::workers(4);
    let device = measure::device();
    let scale = kernels::scale::load_blocking(&device).expect("the kernel");
    let mut x = Some(array(&device));
    let mut measured = |lengths: &[usize], way| {
        let array = x.take().expect("it came back");
        let task = alone(device.clone(), scale.clone(), array, lengths.to_vec(), way);
        let (time, array) = measure::on_worker(&runtime, task);
        let raw =
            (measure::on_cuda() && lengths.len() == 1).then(|| by_hand(lengths[0], &array, way));
        x = Some(array);
        (time, raw)
    };
    for length in [1, 3, 10, 100] {
        let (launches, raw_launches) = measured(&[length], Way::Batch);
        print(&format!("replay.{length}.launches.us"), launches, "us");
        let ways = [
            ("replay", "changed", Way::Changed),
            ("replay", "unchanged", Way::Unchanged),
            ("graph", "changed", Way::GraphChanged),
            ("graph", "unchanged", Way::GraphUnchanged),
        ];
        for (who, name, way) in ways {
            let line = |what: &str| format!("{who}.{length}.{what}");
            let (ours, raw) = measured(&[length], way);
            print(&line(&format!("{name}.us")), ours, "us");
            print(&line(&format!("{name}.ratio")), ours / launches, "ratio");
            if let Some(raw) = raw {
                print(&line(&format!("raw_{name}.us")), raw, "us");
                print(&line(&format!("{name}.raw_ratio")), ours / raw, "ratio");
            }
        }
        if let Some(raw) = raw_launches {
            print(&format!("replay.{length}.raw_launches.us"), raw, "us");
        }
    }
    let lengths = [10, 11, 12, 13, 14, 15, 16, 17];
    let [batches, replayed] = [Way::Batch, Way::Changed].map(|way| measured(&lengths, way).0);
    print("replay.shape_changes.launches.us", batches, "us");
    print("replay.shape_changes.us", replayed, "us");
    print("replay.shape_changes.ratio", replayed / batches, "ratio");
    let [streams, replayed] = [false, true]
        .map(|replayed| measure::on_worker(&runtime, forkjoin(device.clone(), replayed)));
    print("replay.forkjoin.streams.us", streams, "us");
    print("replay.forkjoin.us", replayed, "us");
    print("replay.forkjoin.ratio", replayed / streams, "ratio");
    let [batches, replayed] = [false, true].map(|replayed| together(&device, &scale, replayed));
    print("replay.threads16.launches_per_s", batches, "count");
    print("replay.threads16.requests_per_s", replayed, "count");
    print("replay.threads16.ratio", replayed / batches, "ratio");
}
