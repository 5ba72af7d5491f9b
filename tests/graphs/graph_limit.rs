//! The limit of compiled graphs: what goes, what stays, and that it makes no difference to what is computed.

use std::sync::Once;
use std::time::{Duration, Instant};

use gpu_await::testing::{self, Gate};
use gpu_await::{
    Device, DeviceBuffer, Graph, InOut, ListOutcome, Region, Result, Stream, ViewMut, kernels,
};

const LIMIT: usize = 4;
const SOON: Duration = Duration::from_secs(10);
const LEN: usize = 32;

/// More than the tests have at once.
const GRAPHS: usize = 256;

/// Compiles as many graphs as it takes for the driver to have memory for all later ones: for more it may wait for all kernels that
/// run, a closed gate included (`backend/cuda/standstill.rs`), and what was not launched for a second meanwhile is not in use.
fn grow() {
    static GROWN: Once = Once::new();
    GROWN.call_once(|| {
        let device = testing::device();
        let stream = device.stream().expect("a stream");
        let scale = kernels::scale::load_blocking(&device).expect("it loads");
        let mut x = stream.full(LEN, 1.0f32).queued().expect("memory");
        let graphs = (0..GRAPHS).map(|_| {
            device.graph(scale.clone(), |q, scale, (mut x, a): (ViewMut<'_, f32>, f32)| {
                scale.launch(q, a, &mut x)?;
                scale.launch(q, a, &mut x)
            })
        });
        let graphs: Vec<Graph<(InOut<f32>, f32)>> = graphs.collect();
        for graph in &graphs {
            graph.launch(&stream, (&mut x, 1.0)).queued().expect("it is launched");
        }
        stream.synchronize().expect("they are complete");
    });
}

/// A device of the kind under test. The other one keeps this thread's turn on a GPU.
fn device() -> Result<(Device, Device)> {
    device_with(LIMIT)
}

fn device_with(limit: usize) -> Result<(Device, Device)> {
    grow();
    let (builder, turn) = (Device::builder().graph_limit(limit), testing::device());
    let device = match turn.kind() {
        gpu_await::DeviceKind::Cuda => builder.cuda(0)?,
        _ => builder.host(),
    };
    Ok((device, turn))
}

/// `x = a (a x)`, replayed.
async fn replay(
    stream: &Stream,
    region: &mut Region,
    scale: &kernels::scale,
    x: &mut DeviceBuffer<f32>,
    a: f32,
) -> Result<ListOutcome> {
    let twice = stream.replay(region, |q| {
        scale.launch(q, a, &mut *x)?;
        scale.launch(q, a, &mut *x)
    });
    twice.await?;
    Ok(region.last_run()[0].outcome.clone())
}

#[tokio::test]
async fn regions_in_use_keep_their_graphs_and_others_lose_them() -> Result<()> {
    let (device, _turn) = device()?;
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    // The first launch of a kernel is never part of a list.
    scale.launch(&stream, 1.0, &mut x).queued()?;
    let mut regions: Vec<Region> = (0..2 * LIMIT).map(|_| Region::new()).collect();
    let mut wanted = 1.0f32;
    let mut outcomes = Vec::new();
    for round in 0..20 {
        outcomes.clear();
        for region in &mut regions {
            let a = if (round / 5) % 2 == 0 { 2.0 } else { 0.5 };
            outcomes.push(replay(&stream, region, &scale, &mut x, a).await?);
            wanted *= a * a;
            // As many as fit a number.
            if !(1e-30..=1e30).contains(&wanted) {
                stream.fill(&mut x, 1.0).queued()?;
                wanted = 1.0;
            }
        }
        assert!(device.stats().graphs <= LIMIT as u64);
    }
    assert_eq!(stream.download(&x).await?, [wanted; LEN]);
    // Taking turns, the first keep theirs, and the others are launched one by one.
    let is_replayed = |outcome: &&ListOutcome| matches!(outcome, ListOutcome::Replayed { .. });
    assert_eq!(outcomes.iter().filter(is_replayed).count(), LIMIT, "{outcomes:?}");
    assert!(
        outcomes[LIMIT..].iter().all(|outcome| *outcome == ListOutcome::NoPlace),
        "{outcomes:?}"
    );
    assert_eq!(device.stats().graphs_evicted, 0);
    outcomes.clear();
    // Those that had none get the places of those that are not launched any more.
    let start = Instant::now();
    while outcomes.iter().filter(is_replayed).count() < LIMIT {
        assert!(start.elapsed() < SOON, "{outcomes:?}");
        outcomes.clear();
        for region in &mut regions[LIMIT..] {
            outcomes.push(replay(&stream, region, &scale, &mut x, 1.0).await?);
        }
    }
    let stats = device.stats();
    assert_eq!((stats.graphs, stats.graphs_evicted), (LIMIT as u64, LIMIT as u64));
    drop(regions);
    assert_eq!(device.stats().graphs, 0);
    Ok(())
}

/// What is replayed all the time gets the place of what is replayed now and then, in whatever order they came.
#[tokio::test]
async fn a_region_that_is_used_often_gets_a_place() -> Result<()> {
    let (device, _turn) = device()?;
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    scale.launch(&stream, 1.0, &mut x).queued()?;
    let mut regions: Vec<Region> = (0..LIMIT).map(|_| Region::new()).collect();
    for _ in 0..3 {
        for region in &mut regions {
            replay(&stream, region, &scale, &mut x, 1.0).await?;
        }
    }
    let mut often = Region::new();
    let before = device.stats().lists;
    for _ in 0..40 {
        replay(&stream, &mut often, &scale, &mut x, 1.0).await?;
    }
    // New; then at most sixteen times without a place: then another was not launched in all of them.
    let report = often.report();
    assert!(report.no_place <= 16 && report.plain == 1 + report.no_place, "{report:?}");
    assert_eq!((report.compiled, report.replayed), (1, 38 - report.no_place), "{report:?}");
    assert_eq!(device.stats().graphs_evicted, 1);
    let mut of_device = before;
    of_device += report;
    assert_eq!(device.stats().lists, of_device);
    Ok(())
}

/// One with something in it that only a graph runs takes a place in any case, from one whose launch is under way as well.
#[tokio::test]
async fn graphs_that_need_a_place_get_it() -> Result<()> {
    let (device, _turn) = device()?;
    let streams = [device.stream()?, device.stream()?];
    let scale = kernels::scale::load(&device).await?;
    let mut graphs: Vec<Graph<(InOut<f32>, f32)>> = Vec::new();
    for _ in 0..2 * LIMIT {
        let event = device.event_builder().timed(true).build()?;
        graphs.push(device.graph((scale.clone(), event), |q, (scale, event), (mut x, a)| {
            scale.launch(q, a, &mut x)?;
            event.record_in(q)?;
            scale.launch(q, a, &mut x)
        }));
    }
    let mut x = streams[0].full(LEN, 1.0f32).queued()?;
    for round in 0..6 {
        let gate = Gate::close(&streams[round % 2])?;
        let a = if round % 2 == 0 { 2.0 } else { 0.5 };
        for graph in &graphs {
            graph.launch(&streams[round % 2], (&mut x, a)).queued()?;
        }
        assert!(device.stats().graphs <= LIMIT as u64);
        gate.open();
    }
    assert_eq!(streams[0].download(&x).await?, [1.0; LEN]);
    let evicted = device.stats().graphs_evicted;
    assert!(evicted >= (12 * LIMIT - LIMIT) as u64, "{evicted}");
    drop(graphs);
    assert_eq!(device.stats().graphs, 0);
    Ok(())
}

/// Each takes the only place from the others, at any moment of their launches.
#[test]
fn graphs_that_need_it_share_one_place() -> Result<()> {
    const THREADS: usize = 3;
    const LAUNCHES: u32 = 4000;
    let (device, _turn) = device_with(1)?;
    let event = device.event_builder().timed(true).build()?;
    let graph: Graph<(InOut<u32>, u32)> = device.graph(event, |q, event, (mut x, n)| {
        q.fill(&mut x, n)?;
        event.record_in(q)
    });
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let stream = device.stream().expect("a stream");
                let mut x = stream.zeros::<u32>(LEN).queued().expect("memory");
                for n in 0..LAUNCHES {
                    graph.launch(&stream, (&mut x, n)).queued().expect("it is launched");
                }
                let last = futures::executor::block_on(stream.download(&x)).expect("no failure");
                assert_eq!(last, [LAUNCHES - 1; LEN]);
            });
        }
    });
    drop(graph);
    assert_eq!(device.stats().graphs, 0);
    Ok(())
}

/// A graph of launches alone is launched one by one where there is no place for it, and says so.
#[tokio::test]
async fn a_graph_without_a_place_computes_the_same() -> Result<()> {
    let (device, _turn) = device()?;
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let graphs: Vec<Graph<(InOut<f32>, f32)>> = (0..LIMIT + 1)
        .map(|_| {
            device.graph(scale.clone(), |q, scale, (mut x, a)| {
                scale.launch(q, a, &mut x)?;
                scale.launch(q, a, &mut x)
            })
        })
        .collect();
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    for round in 0..10 {
        for graph in &graphs {
            graph.launch(&stream, (&mut x, if round % 2 == 0 { 2.0 } else { 0.5 })).queued()?;
        }
    }
    assert_eq!(stream.download(&x).await?, [1.0; LEN]);
    let last = graphs[LIMIT].report();
    assert_eq!((last.compiled, last.replayed, last.plain), (0, 0, 10));
    assert_eq!(graphs[0].report().compiled, 1);
    Ok(())
}

/// While they are evicted by others all the time.
#[test]
fn many_threads_share_few_places() -> Result<()> {
    const THREADS: usize = 6;
    const ROUNDS: usize = 60;
    let (device, _turn) = device()?;
    let scale = futures::executor::block_on(kernels::scale::load(&device).into_future())?;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (device, scale) = (&device, &scale);
            scope.spawn(move || {
                futures::executor::block_on(async {
                    let stream = device.stream()?;
                    let mut x = stream.full(LEN, 1.0f32).queued()?;
                    let mut regions = [Region::new(), Region::new(), Region::new()];
                    for round in 0..ROUNDS {
                        let region = &mut regions[(round * (thread + 1) / 7) % 3];
                        let a = if round % 2 == 0 { 2.0 } else { 0.5 };
                        replay(&stream, region, scale, &mut x, a).await?;
                        assert!(device.stats().graphs <= LIMIT as u64);
                    }
                    assert_eq!(stream.download(&x).await?, [1.0; LEN]);
                    Ok::<_, gpu_await::Error>(())
                })
                .expect("it computes the same");
            });
        }
    });
    assert_eq!(device.stats().graphs, 0);
    Ok(())
}
