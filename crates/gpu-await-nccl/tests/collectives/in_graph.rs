//! Collectives in graphs: each launch makes them, in order with all others of the communicator, and fails with it.

mod exchange;
use std::time::{Duration, Instant};

use gpu_await::{Device, DeviceBuffer, ErrorDetail, Graph, InOut, Stream, kernels};
use gpu_await_nccl::{
    Communicator, CommunicatorBuilder, Error, LostCause, Reduction, UniqueId, stats,
};

use crate::child;
use crate::support;
use crate::support::{LIMIT, all, devices, ours, within};

const LEN: usize = 1000;
const SOON: Duration = Duration::from_millis(300);

type Step = Graph<(InOut<f32>,)>;

/// Each rank's device, a stream of it, and a graph with calls of the rank.
struct Ranks {
    comm: Communicator,
    devices: Vec<Device>,
    streams: Vec<Stream>,
    steps: Vec<Step>,
}

impl Ranks {
    async fn new(most: usize) -> Ranks {
        let devices = devices(most);
        let comm = all(&devices).await;
        let streams = devices.iter().map(|device| device.stream().expect("a stream")).collect();
        let steps = devices.iter().enumerate().map(|(rank, device)| step(device, &comm, rank));
        let steps = steps.collect();
        Ranks { comm, devices, streams, steps }
    }

    fn world(&self) -> usize {
        self.devices.len()
    }

    fn full(&self, len: usize, value: impl Fn(usize) -> f32) -> Vec<DeviceBuffer<f32>> {
        let full = |(rank, stream): (usize, &Stream)| stream.full(len, value(rank)).queued();
        self.streams.iter().enumerate().map(|it| full(it).expect("memory")).collect()
    }

    /// Every rank's graph, all of them before one is waited for.
    fn launch(&self, x: &mut [DeviceBuffer<f32>]) {
        for ((step, stream), x) in self.steps.iter().zip(&self.streams).zip(x) {
            step.launch(stream, (x,)).queued().expect("launched");
        }
    }

    async fn check(&self, x: &[DeviceBuffer<f32>], expected: f32) {
        for (stream, x) in self.streams.iter().zip(x) {
            let found = within(stream.download(x)).await.expect("it works");
            assert!(found.iter().all(|found| *found == expected), "{} {expected}", found[0]);
        }
    }
}

/// `x` is twice the sum of all ranks' `x`.
fn step(device: &Device, comm: &Communicator, rank: usize) -> Step {
    let scale = kernels::scale::load_blocking(device).expect("a kernel");
    device.graph((scale, comm.clone(), rank), |q, (scale, comm, rank), (mut x,)| {
        comm.in_graph_of(q, *rank)?.all_reduce_in_place(&mut x, Reduction::Sum)?;
        scale.launch(q, 2.0, &mut x)
    })
}

/// Why its communicator was lost.
fn cause(error: &gpu_await::Error) -> &LostCause {
    match Error::lost(error) {
        Some(lost) => &lost.cause,
        None => panic!("not of a lost communicator: {error}"),
    }
}

#[tokio::test]
async fn each_launch_makes_the_calls() {
    let _turn = support::turn().await;
    for most in [1, 2, 3] {
        let ranks = Ranks::new(most).await;
        let world = ranks.world();
        for round in 0..10 {
            let mut x = ranks.full(LEN, |rank| (rank + round) as f32);
            let sum: f32 = (0..world).map(|rank| (rank + round) as f32).sum();
            ranks.launch(&mut x);
            ranks.launch(&mut x);
            ranks.check(&x, 2.0 * (2.0 * sum * world as f32)).await;
        }
        let mut x = ranks.full(LEN, |_| 1.0);
        for round in 0..10 {
            for (stream, x) in ranks.streams.iter().zip(&mut x) {
                stream.fill(x, round as f32).queued().expect("a fill");
            }
            ranks.launch(&mut x);
            ranks.check(&x, (2 * round * world) as f32).await;
        }
        for step in &ranks.steps {
            let report = step.report();
            assert!(report.replayed >= 9 && report.failed == 0, "{report:?}");
        }
    }
}

/// All of them as ranks, every two of which are connected.
async fn connected(devices: &[Device]) -> Communicator {
    let id = UniqueId::new(devices[0].kind()).expect("an id");
    let builder = Communicator::builder(id, devices.len()).connect_pairs().limit(LIMIT);
    let rank = |builder: CommunicatorBuilder, (rank, device)| builder.rank(rank, device);
    let builder = devices.iter().enumerate().fold(builder, rank);
    within(builder.connect()).await.expect("connected")
}

/// Every verb, against a plain computation; calls that share nothing else run in the order in which they are written.
#[tokio::test]
async fn every_verb_in_a_graph() {
    let _turn = support::turn().await;
    let Ranks { devices, streams, .. } = Ranks::new(2).await;
    let (world, comm) = (devices.len(), connected(&devices).await);
    type Slots = (InOut<f32>, InOut<f32>, InOut<f32>, InOut<f32>);
    let graph = |(rank, device): (usize, &Device)| {
        device.graph::<Slots, _, _>(
            (comm.clone(), rank),
            |q, (comm, rank), (mut a, mut b, mut c, mut d)| {
                let (world, calls) = (comm.world(), comm.in_graph_of(q, *rank)?);
                // a: a share of each rank; b: one.
                calls.all_gather(&b, &mut a)?;
                calls.all_to_all(&a, &mut c)?;
                calls.reduce_scatter(&c, &mut b, Reduction::Sum)?;
                calls.broadcast_in_place(&mut d, world - 1)?;
                calls.reduce_in_place(&mut c, Reduction::Max, 0)?;
                calls.all_reduce(&b, &mut d.slice_mut(..b.len())?, Reduction::Sum)
            },
        )
    };
    let graphs: Vec<_> = devices.iter().enumerate().map(graph).collect();
    let full = |value: fn(usize) -> f32, len: usize| {
        let full = |(rank, stream): (usize, &Stream)| stream.full(len, value(rank)).queued();
        streams.iter().enumerate().map(|it| full(it).expect("memory")).collect::<Vec<_>>()
    };
    for _ in 0..3 {
        let (mut a, mut b) = (full(|_| 0.0, world * 8), full(|rank| 1.0 + rank as f32, 8));
        let (mut c, mut d) = (full(|_| 0.0, world * 8), full(|rank| 10.0 * rank as f32, 16));
        for (at, (graph, stream)) in graphs.iter().zip(&streams).enumerate() {
            let slots = (&mut a[at], &mut b[at], &mut c[at], &mut d[at]);
            graph.launch(stream, slots).queued().expect("launched");
        }
        for (rank, stream) in streams.iter().enumerate() {
            let get = async |x| within(stream.download(x)).await.expect("it works").to_vec();
            let gathered: Vec<f32> = (0..world * 8).map(|at| 1.0 + (at / 8) as f32).collect();
            assert_eq!(get(&a[rank]).await, gathered);
            // Share i of rank j is share j of rank i: each has its own value world times.
            let own = 1.0 + rank as f32;
            let largest = if rank == 0 { world as f32 } else { own };
            assert_eq!(get(&c[rank]).await, vec![largest; world * 8]);
            let sum = (world * (world + 1) / 2) as f32;
            assert_eq!(get(&b[rank]).await, [sum; 8]);
            let last = 10.0 * (world - 1) as f32;
            let mut expected = vec![sum * world as f32; 8];
            expected.extend([last; 8]);
            assert_eq!(get(&d[rank]).await, expected);
        }
    }
    // An order for each of them behind the first.
    assert!(graphs[0].dot().matches("->").count() >= 5, "{}", graphs[0].dot());
}

/// Launches on other streams and calls of the communicator itself, in the order in which they are made.
#[tokio::test]
async fn in_order_with_other_calls() {
    let _turn = support::turn().await;
    let ranks = Ranks::new(2).await;
    let world = ranks.world() as f32;
    let other: Vec<_> =
        ranks.devices.iter().map(|device| device.stream().expect("a stream")).collect();
    let (mut x, mut y, mut z) =
        (ranks.full(LEN, |_| 1.0), ranks.full(77, |_| 1.0), ranks.full(LEN, |_| 1.0));
    for round in 0..30 {
        for (on, memory, value) in [
            (&ranks.streams, &mut x, 1.0),
            (&ranks.streams, &mut y, 2.0 + round as f32),
            (&other, &mut z, 3.0),
        ] {
            for (stream, memory) in on.iter().zip(memory) {
                stream.fill(memory, value).queued().expect("a fill");
            }
        }
        ranks.launch(&mut x);
        let op = ranks.comm.group(|g| {
            let mut y = y.iter_mut().enumerate();
            y.try_for_each(|(rank, y)| g.rank(rank)?.all_reduce_in_place(y, Reduction::Sum))
        });
        op.queued().expect("called");
        for ((step, stream), z) in ranks.steps.iter().zip(&other).zip(&mut z) {
            step.launch(stream, (z,)).queued().expect("launched");
        }
        ranks.check(&z, 6.0 * world).await;
        ranks.check(&y, (2.0 + round as f32) * world).await;
        ranks.check(&x, 2.0 * world).await;
    }
    assert!(ranks.comm.lost().is_none());
}

/// A launch is complete when all ranks have launched theirs.
#[tokio::test]
async fn a_barrier_in_a_graph() {
    let _turn = support::turn().await;
    let Some((ranks, mut x)) = two_that_ran().await else { return };
    let graph = |(rank, device): (usize, &Device)| {
        device.graph::<(InOut<f32>,), _, _>((ranks.comm.clone(), rank), |q, (comm, rank), _| {
            comm.in_graph_of(q, *rank)?.barrier()
        })
    };
    let graphs: Vec<_> = ranks.devices.iter().enumerate().map(graph).collect();
    for first in [0, 1, 0, 1] {
        let mut launch = |rank: usize| {
            let launched = graphs[rank].launch(&ranks.streams[rank], (&mut x[rank],));
            launched.submitted().expect("launched")
        };
        let mut early = launch(first);
        let waited = tokio::time::timeout(Duration::from_millis(50), &mut early).await;
        assert!(waited.is_err(), "the other rank has not launched");
        within(launch(1 - first)).await.expect("both have");
        within(early).await.expect("both have");
    }
}

/// Two ranks whose graphs ran once, and what they ran on; none where there is one GPU.
async fn two_that_ran() -> Option<(Ranks, Vec<DeviceBuffer<f32>>)> {
    let ranks = Ranks::new(2).await;
    if ranks.world() < 2 {
        return None;
    }
    let mut x = ranks.full(LEN, |_| 1.0);
    ranks.launch(&mut x);
    ranks.check(&x, 4.0).await;
    Some((ranks, x))
}

#[tokio::test]
async fn an_abort_fails_a_launch() {
    let _turn = support::turn().await;
    if child::parameter().is_none() {
        child::run(concat!(module_path!(), "::an_abort_fails_a_launch"), "");
        return;
    }
    let Some((ranks, mut x)) = two_that_ran().await else { return };
    // Rank 1 does not launch.
    let op = ranks.steps[0].launch(&ranks.streams[0], (&mut x[0],)).submitted().expect("launched");
    let read = ranks.devices[0].download(&x[0]);
    assert!(!op.is_complete());
    within(ranks.comm.abort()).await.expect("aborted");
    let error = within(op).await.unwrap_err();
    assert!(matches!(cause(&error), LostCause::Aborted), "{error}");
    let error = within(read).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    // Refused from now on, whether or not anything else is new.
    let mut y = ranks.full(LEN, |_| 1.0);
    for memory in [&mut x[1], &mut y[1]] {
        let error = ranks.steps[1].launch(&ranks.streams[1], (memory,)).await.unwrap_err();
        assert!(matches!(cause(&error), LostCause::Aborted), "{error}");
    }
    // Another one of the same ranks works, beside graphs of this one.
    let lost = ranks;
    let comm = within(lost.comm.shrink(&[])).await.expect("all of them");
    let steps = lost.devices.iter().enumerate().map(|(rank, device)| step(device, &comm, rank));
    let (steps, devices, streams) = (steps.collect(), lost.devices.clone(), lost.streams.clone());
    let ranks = Ranks { comm, devices, streams, steps };
    let mut x = ranks.full(LEN, |_| 1.0);
    ranks.launch(&mut x);
    ranks.check(&x, 4.0).await;
    drop((lost, ranks));
    let end = Instant::now() + LIMIT;
    while stats().threads_in_nccl > 0 {
        assert!(Instant::now() < end, "freed with the last graph: {:?}", stats());
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_limit_fails_a_launch() {
    let _turn = support::turn().await;
    let Some((ranks, mut x)) = two_that_ran().await else { return };
    ranks.comm.set_limit(Some(SOON));
    // Launches that nobody waits for are seen to be complete.
    for _ in 0..10 {
        ranks.launch(&mut x);
    }
    let end = Instant::now() + 3 * SOON;
    while Instant::now() < end {
        tokio::task::yield_now().await;
    }
    assert!(ranks.comm.lost().is_none(), "{:?}", ranks.comm.lost());
    let op = ranks.steps[1].launch(&ranks.streams[1], (&mut x[1],));
    let error = within(op).await.unwrap_err();
    assert!(matches!(cause(&error), LostCause::TimedOut { .. }), "{error}");
}

/// One thread has calls captured, again and again, and another one makes calls: neither waits for the other for ever.
#[tokio::test]
async fn captured_beside_calls() {
    const ROUNDS: usize = 300;
    let _turn = support::turn().await;
    let ranks = Ranks::new(1).await;
    let (comm, stream) = (ranks.comm.clone(), ranks.streams[0].clone());
    let mut x = [ranks.full(LEN, |_| 1.0).remove(0), ranks.full(LEN, |_| 1.0).remove(0)];
    let mut y = ranks.full(LEN, |_| 1.0).remove(0);
    let captures = tokio::task::spawn_blocking(move || {
        for round in 0..ROUNDS {
            // Another buffer than the last time.
            ranks.steps[0].launch(&stream, (&mut x[round % 2],)).synchronize()?;
        }
        Ok::<_, gpu_await::Error>(())
    });
    let calls = tokio::task::spawn_blocking(move || {
        for _ in 0..ROUNDS {
            comm.all_reduce_in_place(&mut y, Reduction::Max).synchronize()?;
        }
        Ok::<_, gpu_await::Error>(())
    });
    let (captures, calls) = within(futures::future::join(captures, calls)).await;
    captures.expect("a thread").expect("captured");
    calls.expect("a thread").expect("called");
}

/// The graph keeps the communicator; a communicator that shrinks waits for its launches.
#[tokio::test]
async fn kept_by_the_graph() {
    let _turn = support::turn().await;
    let ranks = Ranks::new(2).await;
    let world = ranks.world() as f32;
    let mut x = ranks.full(LEN, |_| 1.0);
    ranks.launch(&mut x);
    if ranks.world() > 1 {
        let smaller = within(ranks.comm.shrink(&[1])).await.expect("the other");
        within(smaller.barrier()).await.expect("alone");
    }
    ranks.check(&x, 2.0 * world).await;
    let Ranks { devices, streams, steps, comm } = ranks;
    let again = comm.clone();
    drop(comm);
    let ranks = Ranks { devices, streams, steps, comm: again };
    let mut y = ranks.full(LEN, |_| 1.0);
    ranks.launch(&mut y);
    ranks.check(&y, 2.0 * world).await;
}

#[tokio::test]
async fn what_a_graph_refuses() {
    let _turn = support::turn().await;
    let ranks = Ranks::new(2).await;
    let (world, device) = (ranks.world(), &ranks.devices[0]);
    let mut x = ranks.full(LEN + 1, |_| 1.0).remove(0);
    let graph = |rank: usize| {
        device.graph::<(InOut<f32>,), _, _>((ranks.comm.clone(), rank), |q, (comm, rank), (x,)| {
            let calls = comm.in_graph_of(q, *rank)?;
            let (mut x, y) = x.split_at_mut(3)?;
            calls.all_reduce(&y, &mut x, Reduction::Sum)
        })
    };
    let error = graph(world).launch(&ranks.streams[0], (&mut x,)).await.unwrap_err();
    assert!(matches!(ours(error), Error::NotLocal { .. }));
    let error = graph(0).launch(&ranks.streams[0], (&mut x,)).await.unwrap_err();
    assert!(matches!(ours(error), Error::WrongLength { found: 3, .. }));
    let comm = ranks.comm.clone();
    let alone = device.graph::<(InOut<f32>,), _, _>(comm, |q, comm, (mut x,)| {
        comm.in_graph(q)?.all_reduce_in_place(&mut x, Reduction::Sum)
    });
    ranks.streams[0].fill(&mut x, 1.0).queued().expect("healed");
    let launched = alone.launch(&ranks.streams[0], (&mut x,)).await;
    match world {
        1 => launched.expect("the only one"),
        _ => assert!(matches!(ours(launched.unwrap_err()), Error::SeveralRanks { .. })),
    }
    // No such rank, itself without a group, and a refusal that a closure ignores.
    let receive = |peer: usize| {
        let state = (ranks.comm.clone(), peer);
        device.graph::<(InOut<f32>,), _, _>(state, |q, (comm, peer), (mut x,)| {
            comm.in_graph_of(q, 0)?.recv(&mut x, *peer)
        })
    };
    let error = receive(world).launch(&ranks.streams[0], (&mut x,)).await.unwrap_err();
    assert!(matches!(ours(error), Error::BadRank { .. }));
    let error = receive(0).launch(&ranks.streams[0], (&mut x,)).await.unwrap_err();
    assert!(matches!(ours(error), Error::OwnRank { op: "recv", rank: 0 }));
    let ignores = device.graph::<(InOut<f32>,), _, _>(ranks.comm.clone(), |q, comm, (x,)| {
        let (mut x, y) = x.split_at_mut(1)?;
        comm.in_graph_of(q, 0)?.group(|g| {
            let _ignored = g.send(&y, comm.world());
            g.recv(&mut x, 0)
        })
    });
    ranks.streams[0].fill(&mut x, 1.0).queued().expect("healed");
    let error = ignores.launch(&ranks.streams[0], (&mut x,)).await.unwrap_err();
    assert!(matches!(ours(error), Error::BadRank { .. }));
    let nothing = device.graph::<(InOut<f32>,), _, _>(ranks.comm.clone(), |q, comm, _| {
        comm.in_graph_of(q, 0)?.group(|_| Ok(()))
    });
    ranks.streams[0].fill(&mut x, 1.0).queued().expect("healed");
    within(nothing.launch(&ranks.streams[0], (&mut x,))).await.expect("nothing is waited for");
    if world > 1 && support::on_gpus() {
        let step = step(device, &ranks.comm, 1);
        ranks.streams[0].fill(&mut x, 1.0).queued().expect("healed");
        let error = step.launch(&ranks.streams[0], (&mut x,)).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    }
    assert!(ranks.comm.lost().is_none());
}

/// Once, in a batch as well.
#[tokio::test]
async fn the_error_of_a_lost_communicator_says_what_was_called() {
    let device = Device::host();
    let comm = all(std::slice::from_ref(&device)).await;
    drop(comm.abort());
    let (stream, mut x) =
        (device.stream().expect("a stream"), device.ones::<f32>(4).queued().expect("memory"));
    let batch = stream.batch(|q| comm.in_graph(q)?.all_reduce_in_place(&mut x, Reduction::Sum));
    let error = batch.await.unwrap_err();
    assert_eq!(
        error.detail().to_string(),
        "all_reduce: the communicator of rank 0 is lost: it was aborted"
    );
}

/// What a refused call would have written counts as failed, in a batch as well; other calls work.
#[tokio::test]
async fn after_a_refused_call() {
    let _turn = support::turn().await;
    let ranks = Ranks::new(1).await;
    let (comm, stream) = (&ranks.comm, &ranks.streams[0]);
    let unwritten = stream.empty::<f32>(LEN).queued().expect("memory");
    let mut x = ranks.full(LEN, |_| 1.0);
    let mut y = stream.ones::<f32>(LEN + 1).queued().expect("memory");
    for round in 0..4 {
        let refused = stream.batch(|q| {
            let calls = comm.in_graph(q)?;
            match round {
                0 => calls.all_reduce(&unwritten, &mut y.slice_mut(1..)?, Reduction::Sum),
                1 => calls.all_reduce(&x[0], &mut y, Reduction::Sum),
                2 => calls.recv(&mut y, 0),
                _ => calls.group(|g| {
                    g.recv(&mut y, 0)?;
                    g.send(&x[0], 1)
                }),
            }
        });
        within(refused).await.unwrap_err();
        let error = within(stream.download(&y)).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{round}: {error}");
        stream.fill(&mut y, 1.0).queued().expect("healed");
        // In a graph, and in a call.
        ranks.launch(&mut x);
        within(comm.all_reduce_in_place(&mut x[0], Reduction::Sum)).await.expect("it works");
        ranks.check(&x, f32::exp2((1 + round) as f32)).await;
    }
    let mut own = stream.ones::<f32>(LEN).queued().expect("memory");
    within(comm.recv(&mut own, 0)).await.unwrap_err();
    let error = within(stream.download(&own)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
}
