//! Stream priorities: what they do, and what they do not; and the gap between a launch and its start.
//!
//! The relations are asserted on a GPU alone: streams of a host device are equal.

use std::time::{Duration, Instant};

use gpu_await::testing::{self, Gate};
use gpu_await::{Device, DeviceKind, LaunchConfig, Result, Stream, kernel};

kernel! {
    /// Keeps every thread busy for so many steps.
    unsafe fn churn(x: &[f32], y: &mut [f32], steps: u32, n: u64 = y.len())
        where x.len() == y.len();
    ptx = include_str!("../../kernels/churn.ptx");
    host = twin;
}

fn twin(_: &gpu_await::Grid, x: &[f32], y: &mut [f32], steps: u32, _n: u64) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = (0..steps).fold(*x, |v, _| v.mul_add(0.999, 0.001));
    }
}

/// So many launches, each of so many blocks of 1024 threads that take so many steps.
#[derive(Clone, Copy)]
struct Load {
    launches: usize,
    blocks: u32,
    steps: u32,
}

fn elements(device: &Device) -> usize {
    if device.kind() == DeviceKind::Cuda { 1 << 20 } else { 100 }
}

/// Puts both loads behind a gate, opens it, and says when each stream was done. `late` has the second
/// one copy something first, so that blocks of the first are resident before.
async fn contend(
    device: &Device,
    churn: &churn,
    late: bool,
    loads: [(i32, Load); 2],
) -> Result<[Duration; 2]> {
    let streams = [
        device.stream_builder().priority(loads[0].0).build()?,
        device.stream_builder().priority(loads[1].0).build()?,
    ];
    let n = elements(device);
    let x = streams[0].full(n, 0.5f32).await?;
    let mut y = [streams[0].zeros(n).await?, streams[1].zeros(n).await?];
    // A copy takes a copy engine and no place for blocks.
    let pinned = device.pinned::<u8>(16 << 20)?;
    let mut copied = streams[1].zeros::<u8>(pinned.len()).await?;
    let gate = Gate::close(&streams[0])?;
    let start = streams[0].record_timed()?;
    streams[1].wait(&start).queued()?;
    let copy = late.then(|| streams[1].upload_into(pinned, &mut copied));
    for turn in 0..loads[0].1.launches.max(loads[1].1.launches) {
        for (((_, load), stream), y) in loads.iter().zip(&streams).zip(&mut y) {
            if turn < load.launches {
                let config = LaunchConfig::new(load.blocks, 1024);
                churn.launch(stream, config, &x, y, load.steps).queued()?;
            }
        }
    }
    let ended = [streams[0].record_timed()?, streams[1].record_timed()?];
    gate.open();
    tokio::try_join!(ended[0].done(), ended[1].done())?;
    drop(copy);
    Ok([ended[0].elapsed_since(&start)?, ended[1].elapsed_since(&start)?])
}

/// The load of the published example: ten launches of 2160 blocks of 1024 threads, over 2^20 elements.
const TEN: Load = Load { launches: 10, blocks: 2160, steps: 2000 };

/// The first stream's time over the second's, the middle of three runs.
async fn ratio(device: &Device, churn: &churn, priorities: [i32; 2]) -> f64 {
    let mut ratios = Vec::new();
    for _ in 0..3 {
        let loads = priorities.map(|priority| (priority, TEN));
        let [a, b] = contend(device, churn, false, loads).await.unwrap();
        ratios.push(a.as_secs_f64() / b.as_secs_f64());
    }
    println!("priorities {priorities:?}: {ratios:.2?}");
    ratios.sort_by(f64::total_cmp);
    ratios[1]
}

#[test]
fn the_range_of_priorities_is_the_devices_and_the_highest_is_the_smaller_number() {
    let device = testing::device();
    let (low, high) = device.priority_range();
    match device.kind() {
        DeviceKind::Cuda => assert!(high <= low, "{low} to {high}"),
        _ => assert_eq!((low, high), (0, 0), "streams of a host device are equal"),
    }
}

#[tokio::test]
async fn a_high_stream_takes_about_half_the_time_of_a_low_one_it_competes_with() {
    let device = testing::device();
    let churn = churn::load(&device).await.unwrap();
    let (low, high) = device.priority_range();
    let relations = [
        ratio(&device, &churn, [high, low]).await,
        ratio(&device, &churn, [low, low]).await,
        ratio(&device, &churn, [low, high]).await,
    ];
    if device.kind() == DeviceKind::Host {
        return;
    }
    let [high_first, equal, swapped] = relations;
    assert!(high_first < 0.75, "high over low: {high_first:.2}");
    assert!((0.8..1.25).contains(&equal), "equal: {equal:.2}");
    assert!(swapped > 1.0 / 0.75, "low over high: {swapped:.2}");
}

#[tokio::test]
async fn a_high_stream_overtakes_the_blocks_of_a_low_one_that_are_not_resident() {
    let device = testing::device();
    let churn = churn::load(&device).await.unwrap();
    let (low, high) = device.priority_range();
    // One grid of many short blocks is on the device before the high stream's single launch.
    let many = Load { launches: 1, blocks: 20 * 2160, steps: 2000 };
    let one = Load { launches: 1, blocks: 2160, steps: 2000 };
    let [many, one] = contend(&device, &churn, true, [(low, many), (high, one)]).await.unwrap();
    println!("low {many:?}, high {one:?}");
    if device.kind() == DeviceKind::Cuda {
        assert!(one < many / 2, "low {many:?}, high {one:?}");
    }
}

#[tokio::test]
async fn blocks_that_are_resident_are_not_pre_empted() {
    let device = testing::device();
    let churn = churn::load(&device).await.unwrap();
    let (low, high) = device.priority_range();
    // As many blocks as there is room for, and long: nothing else starts before they are through.
    let resident = churn.occupancy().resident_blocks(&LaunchConfig::new(1, 1024)).unwrap();
    let long = Load { launches: 1, blocks: resident, steps: 200_000 };
    let short = Load { launches: 1, blocks: 1, steps: 1 };
    let [long, short] = contend(&device, &churn, true, [(low, long), (high, short)]).await.unwrap();
    println!("low {long:?}, high {short:?}");
    if device.kind() == DeviceKind::Cuda {
        assert!(short > long / 2, "low {long:?}, high {short:?}");
    }
}

#[tokio::test]
async fn the_gap_between_a_launch_and_its_start_can_be_measured() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let churn = churn::load(&device).await.unwrap();
    let x = stream.full(100, 0.5f32).await.unwrap();
    let mut y = stream.zeros::<f32>(100).await.unwrap();
    let gate = Gate::close(&stream).unwrap();
    let submitted = Instant::now();
    let op = stream.batch(|queue| {
        let started = queue.host_fn(Instant::now)?;
        churn.launch(queue, LaunchConfig::for_elements(100), &x, &mut y, 10)?;
        Ok((started, queue.host_fn(Instant::now)?))
    });
    // Another stream goes there and back meanwhile, many times.
    let other = device.stream().unwrap();
    let mut meanwhile = submitted;
    for _ in 0..100 {
        meanwhile = other.host_fn(Instant::now).await.unwrap();
    }
    gate.open();
    let (started, ended) = op.await.unwrap();
    assert!(!gate.timed_out());
    assert!(submitted < meanwhile && meanwhile <= started && started <= ended);
}

#[test]
fn two_threads_submit_to_streams_of_their_own_and_wait_for_them() {
    let device = testing::device();
    let churn = futures::executor::block_on(churn::load(&device)).unwrap();
    let (low, high) = device.priority_range();
    let n = elements(&device);
    let run = |stream: Stream, seed: f32| -> Result<()> {
        let x = stream.full(n, seed).queued()?;
        let mut y = stream.zeros::<f32>(n).queued()?;
        for _ in 0..10 {
            let config = LaunchConfig::new(2160, 1024);
            churn.launch(&stream, config, &x, &mut y, 3).queued()?;
        }
        let y = stream.download(&y).synchronize()?;
        let expected = (0..3).fold(seed, |v, _| v.mul_add(0.999, 0.001));
        assert!(y.iter().all(|y| *y == expected), "{} {expected}", y[0]);
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads = [(high, 0.25), (low, 0.75)].map(|(priority, seed)| {
            let stream = device.stream_builder().priority(priority).build().unwrap();
            let run = &run;
            scope.spawn(move || run(stream, seed))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
}
