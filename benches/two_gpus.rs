//! Is a step on two GPUs faster as one graph than one operation after the other?
//!
//! A step is a chain of 50 `churn` launches of some 3.5 µs on each device, and then a halo each way: the end of one device's array is copied
//! to the beginning of the other's. One step after the other, awaited in a task on four workers.
//!
//! | line | is |
//! |---|---|
//! | `two_gpus.graph.us` | one launch of a graph of both devices, median |
//! | `two_gpus.launches.us` | operations on two streams, which the library orders |
//! | `two_gpus.ratio` | the first by the second; at most 1.05 times the bare driver's |
//! | `two_gpus.raw...` | the same by the bare driver, with events |
//!
//! On a machine with one GPU nothing is printed, so `benches/lines.txt` has none of these; on the host device, a smoke test with two of them.

#[path = "measure.rs"]
mod measure;
#[path = "raw/churn.rs"]
mod raw_churn;
#[path = "raw/two_gpus.rs"]
mod two_gpus;

use std::time::Instant;

use gpu_await::{Device, DeviceBuffer, Grid, InOut, LaunchConfig, Result, Stream, kernel, testing};
use measure::{Sorted, print, rounds, us};
use two_gpus::TwoGpus;

const KERNELS: usize = 50;
const STEPS: u32 = 130;
const LEN: usize = 4096;
const HALO: usize = 256;

kernel! {
    /// `y[i] = x[i]` after so many multiply-adds.
    unsafe fn churn(x: &[f32], y: &mut [f32], steps: u32, n: u64 = y.len()) where x.len() == y.len();
    launch = LaunchConfig::for_elements(y.len());
    ptx = include_str!("../kernels/churn.ptx");
    host = |_: &Grid, x: &[f32], y: &mut [f32], _: u32, _: u64| y.copy_from_slice(x);
}

struct Half {
    stream: Stream,
    churn: churn,
    arrays: [DeviceBuffer<f32>; 2],
}

impl Half {
    /// The end of the other's array.
    fn gets(&mut self, other: &Half) -> Result<()> {
        let end = other.arrays[0].slice(LEN - HALO..)?;
        self.stream.copy(&end, &mut self.arrays[0].slice_mut(..HALO)?).queued()
    }
}

async fn half(device: &Device) -> Result<Half> {
    let stream = device.stream()?;
    let arrays = [stream.full(LEN, 0.0f32).await?, stream.full(LEN, 0.0f32).await?];
    Ok(Half { stream, churn: churn::load(device).await?, arrays })
}

fn median(times: Vec<f64>) -> f64 {
    Sorted::new(times).p50()
}

async fn launches(mut halves: [Half; 2]) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..rounds(1000, 4) {
        let start = Instant::now();
        for number in 0..KERNELS {
            for Half { stream, churn, arrays: [a, b] } in &mut halves {
                let (x, y) = if number % 2 == 0 { (&*a, b) } else { (&*b, a) };
                churn.launch(stream, x, y, STEPS).queued()?;
            }
        }
        let [first, second] = &mut halves;
        second.gets(first)?;
        first.gets(second)?;
        futures::try_join!(halves[0].stream.done(), halves[1].stream.done())?;
        times.push(us(start.elapsed()));
    }
    Ok(median(times))
}

async fn graph(devices: [Device; 2], halves: [Half; 2]) -> Result<f64> {
    type Slots = (InOut<f32>, InOut<f32>, InOut<f32>, InOut<f32>);
    let [Half { stream, churn: here, arrays: [mut a, mut b] }, other] = halves;
    let Half { churn: there, arrays: [mut c, mut d], .. } = other;
    let graph = devices[0].graph_across::<Slots, _, _, 1>(
        [&devices[1]],
        (here, there),
        |q, [other], (here, there), (mut a, mut b, mut c, mut d)| {
            for _ in 0..KERNELS / 2 {
                here.launch(q, &a, &mut b, STEPS)?;
                here.launch(q, &b, &mut a, STEPS)?;
                there.launch(other, &c, &mut d, STEPS)?;
                there.launch(other, &d, &mut c, STEPS)?;
            }
            let end = LEN - HALO..;
            other.copy(&a.slice(end.clone())?, &mut c.slice_mut(..HALO)?)?;
            q.copy(&c.slice(end)?, &mut a.slice_mut(..HALO)?)
        },
    );
    let mut times = Vec::new();
    for _ in 0..rounds(1000, 4) {
        let start = Instant::now();
        graph.launch(&stream, (&mut a, &mut b, &mut c, &mut d)).await?;
        times.push(us(start.elapsed()));
    }
    Ok(median(times))
}

fn main() {
    let (raw, devices) = if measure::on_cuda() {
        let Some(raw) = TwoGpus::new(KERNELS, STEPS, LEN, HALO) else { return };
        (Some(raw), [measure::device(), testing::peer_device()])
    } else {
        (None, [measure::device(), testing::peer_device()])
    };
    let runtime = measure::workers(4);
    let halves = || {
        let halves = async {
            Ok::<_, gpu_await::Error>([half(&devices[0]).await?, half(&devices[1]).await?])
        };
        runtime.block_on(halves).expect("memory")
    };
    let ours = measure::on_worker(&runtime, launches(halves())).expect("completes");
    let graph = measure::on_worker(&runtime, graph(devices.clone(), halves())).expect("completes");
    print("two_gpus.launches.us", ours, "us");
    print("two_gpus.graph.us", graph, "us");
    print("two_gpus.ratio", graph / ours, "ratio");
    let Some(raw) = raw else { return };
    let timed = |step: &dyn Fn()| {
        let times = (0..rounds(1000, 4)).map(|_| {
            let start = Instant::now();
            step();
            us(start.elapsed())
        });
        median(times.collect())
    };
    let (launches, graph) = (timed(&|| raw.launches()), timed(&|| raw.graph()));
    print("two_gpus.raw.launches.us", launches, "us");
    print("two_gpus.raw.graph.us", graph, "us");
    print("two_gpus.raw.ratio", graph / launches, "ratio");
}
