//! Two processes with several ranks each, which are this test again: every verb in calls and in graphs; then one of them is killed while
//! work is pending, and the ranks of the other one go on alone.

use std::time::Instant;

use gpu_await::{Device, DeviceBuffer, Graph, InOut, Op, Stream, ViewMut};
use gpu_await_nccl::{Communicator, Error, Group, LostCause, RankCalls, Reduction};

use crate::support;
use crate::support::process::{self, Job, Rank};
use crate::support::{LIMIT, address, within};

const LEN: usize = 1000;
/// Calls of a rank that follow one another.
const STEPS: usize = 8;
/// How often they are made before anybody looks.
const BURST: usize = 5;

/// Each process has half of the ranks; on GPUs all of one host.
fn one_half_is_killed(of_host_devices: usize, victim: usize) {
    let half = match support::on_gpus() {
        true => Device::count() / 2,
        false => of_host_devices,
    };
    if half < 2 {
        println!("skipped: two processes with several GPUs each need four GPUs");
        return;
    }
    let (address, ranks) = (address(), (0..2 * half).collect::<Vec<_>>());
    let halves = ranks.chunks(half);
    let mut halves: Vec<_> =
        halves.map(|ranks| Rank::here("half", ranks, 2 * half, &address)).collect();
    halves.iter_mut().for_each(Rank::works);
    halves[victim].child.kill().expect("SIGKILL");
    halves.remove(victim);
    halves.into_iter().for_each(Rank::ends_well);
}

#[test]
fn the_second_half_is_killed() {
    one_half_is_killed(2, 1);
}

/// At whose address both met.
#[test]
fn the_first_half_is_killed() {
    one_half_is_killed(3, 0);
}

/// What a child does; by itself nothing.
#[test]
#[ignore = "a child of the others"]
fn child() {
    let Some(Job { ranks, world, address, .. }) = Job::here() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let devices = process::devices(&ranks);
        let join = Group::join_ranks_within(LIMIT, &address, ranks, world);
        let group = within(join).await.expect("a group");
        let comm = within(group.connect(&devices)).await.expect("a communicator");
        comm.set_limit(Some(LIMIT));
        survive(&devices, group, comm).await;
    });
    println!("done");
}

/// The ranks of this process.
struct Half {
    comm: Communicator,
    streams: Vec<Stream>,
    memory: Vec<DeviceBuffer<f32>>,
    graphs: Vec<Graph<(InOut<f32>,)>>,
}

/// A rank's memory.
struct Parts<'m> {
    x: ViewMut<'m, f32>,
    y: ViewMut<'m, f32>,
    z: ViewMut<'m, f32>,
    /// A share of each rank.
    all: ViewMut<'m, f32>,
    others: ViewMut<'m, f32>,
}

impl<'m> Parts<'m> {
    fn of(memory: ViewMut<'m, f32>, world: usize) -> gpu_await::Result<Self> {
        let (x, rest) = memory.split_at_mut(LEN)?;
        let (y, rest) = rest.split_at_mut(LEN)?;
        let (z, rest) = rest.split_at_mut(LEN)?;
        let (all, others) = rest.split_at_mut(world * LEN)?;
        Ok(Parts { x, y, z, all, others })
    }
}

/// What a rank begins with.
fn value(rank: usize) -> f32 {
    1.0 + rank as f32
}

/// Each verb takes what the last one left, so that what is left at the end shows all of them.
fn call<'a>(
    g: &RankCalls<'_, 'a>,
    (step, rank, world): (usize, usize, usize),
    parts: &'a mut Parts<'_>,
) -> gpu_await::Result<()> {
    let Parts { x, y, z, all, others } = parts;
    match step {
        0 => g.all_gather(x, all),
        1 => g.all_to_all(all, others),
        2 => g.reduce_scatter(others, y, Reduction::Sum),
        3 => g.broadcast_in_place(x, world - 1),
        4 => g.reduce_in_place(y, Reduction::Sum, 0),
        5 => g.all_reduce_in_place(x, Reduction::Sum),
        6 => {
            g.send(y, (rank + 1) % world)?;
            g.recv(z, (rank + world - 1) % world)
        }
        _ => g.barrier(),
    }
}

/// What is left of a rank's memory.
fn expected(rank: usize, world: usize) -> Vec<f32> {
    let sum: f32 = (0..world).map(value).sum();
    let reduced = |rank: usize| if rank == 0 { world as f32 * sum } else { sum };
    let x = world as f32 * value(world - 1);
    let (y, z) = (reduced(rank), reduced((rank + world - 1) % world));
    let shares = [x, y, z].into_iter().chain((0..world).map(value));
    let shares = shares.chain((0..world).map(|_| value(rank)));
    shares.flat_map(|share| [share; LEN]).collect()
}

impl Half {
    fn new(devices: &[Device], comm: &Communicator) -> Half {
        let world = comm.world();
        let streams: Vec<_> = devices.iter().map(|it| it.stream().expect("a stream")).collect();
        let zeros = |stream: &Stream| stream.zeros((3 + 2 * world) * LEN).queued().expect("memory");
        let memory = streams.iter().map(zeros).collect();
        let graph = |(rank, device): (usize, &Device)| {
            device.graph::<(InOut<f32>,), _, _>(
                (comm.clone(), rank),
                |q, (comm, rank), (memory,)| {
                    let mut parts = Parts::of(memory, comm.world())?;
                    let calls = comm.in_graph_of(q, *rank)?;
                    (0..STEPS).try_for_each(|step| {
                        calls.group(|g| call(g, (step, *rank, comm.world()), &mut parts))
                    })
                },
            )
        };
        let graphs = comm.ranks().into_iter().zip(devices).map(graph).collect();
        Half { comm: comm.clone(), streams, memory, graphs }
    }

    fn begin(&mut self) {
        let ranks = self.comm.ranks().into_iter();
        for (rank, (stream, memory)) in ranks.zip(self.streams.iter().zip(&mut self.memory)) {
            let mut x = memory.slice_mut(..LEN).expect("a part");
            stream.fill(&mut x, value(rank)).queued().expect("a fill");
        }
    }

    /// Each step of all ranks as one operation.
    fn call(&mut self) -> Vec<Op<()>> {
        self.begin();
        let (ranks, world) = (self.comm.ranks(), self.comm.world());
        let parts = self.memory.iter_mut().map(|memory| Parts::of(memory.slice_mut(..)?, world));
        let mut parts = parts.collect::<Result<Vec<_>, _>>().expect("parts");
        let step = |step: usize| {
            self.comm.group(|g| {
                let mut ranks = ranks.iter().zip(&mut parts);
                ranks.try_for_each(|(rank, parts)| {
                    call(&g.rank(*rank)?, (step, *rank, world), parts)
                })
            })
        };
        (0..STEPS).map(step).collect()
    }

    /// The steps of each rank as one operation.
    fn launch(&mut self) -> Vec<Op<()>> {
        self.begin();
        let memory = self.streams.iter().zip(&mut self.memory);
        let launch =
            |(graph, (stream, memory)): (&Graph<_>, (&Stream, _))| graph.launch(stream, (memory,));
        self.graphs.iter().zip(memory).map(launch).collect()
    }

    async fn check(&self) {
        for (rank, (stream, memory)) in
            self.comm.ranks().into_iter().zip(self.streams.iter().zip(&self.memory))
        {
            let found = within(stream.download(memory)).await.expect("data");
            assert!(*found == expected(rank, self.comm.world()), "rank {rank}");
        }
    }

    /// In calls, which connect the ranks, and in graphs.
    async fn works(&mut self) {
        for ops in [Half::call, Half::launch] {
            for op in ops(self) {
                within(op).await.expect("it works");
            }
            self.check().await;
        }
    }
}

/// Works until the other process is killed, and then alone.
async fn survive(devices: &[Device], group: Group, comm: Communicator) {
    let (world, ranks) = (comm.world(), comm.ranks());
    let others: Vec<_> = (0..world).filter(|rank| !ranks.contains(rank)).collect();
    let mut half = Half::new(devices, &comm);
    half.works().await;
    let mut rounds = 0;
    loop {
        let mut ops = Vec::new();
        for _ in 0..BURST {
            ops.extend(half.call());
            ops.extend(half.launch());
        }
        let began = Instant::now();
        let mut errors = Vec::new();
        for op in ops {
            errors.extend(within(op).await.err());
        }
        for error in &errors {
            let lost = Error::lost(error).unwrap_or_else(|| panic!("not of a loss: {error}"));
            assert!(matches!(lost.cause, LostCause::PeerGone { .. }), "{error}");
            assert!(others.contains(&lost.origin()), "{error}");
        }
        if !errors.is_empty() {
            assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
            break;
        }
        half.check().await;
        rounds += 1;
        if rounds == 5 {
            println!("working");
        }
    }
    for op in half.call().into_iter().chain(half.launch()) {
        let error = within(op).await.unwrap_err();
        assert!(Error::lost(&error).is_some(), "{error}");
    }
    let (rest, recovered) = within(group.recover(devices)).await.expect("those who are left");
    assert_eq!((rest.world(), recovered.world()), (ranks.len(), ranks.len()));
    recovered.set_limit(Some(LIMIT));
    Half::new(devices, &recovered).works().await;
    let shrunk = within(comm.shrink(&others)).await.expect("those who are left");
    assert_eq!(shrunk.world(), ranks.len());
    Half::new(devices, &shrunk).works().await;
}
