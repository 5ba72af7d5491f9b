//! Sends and receives in graphs, alone and in groups: what neighbours exchange in each step.

use std::time::Instant;

use gpu_await::{Device, DeviceBuffer, InOut, Queue, ViewMut, kernels};
use gpu_await_nccl::{Communicator, Error, LostCause, Reduction};

use super::{LEN, Ranks, SOON, Step, cause, connected};
use crate::support::{self, LIMIT, all, devices, within};

/// Cells of each rank between copies of its neighbours' cells, in a ring.
struct Ring {
    ranks: Ranks,
    cells: Vec<DeviceBuffer<f32>>,
}

impl Ring {
    async fn new(most: usize) -> Ring {
        let devices = devices(most);
        let comm = connected(&devices).await;
        let streams = devices.iter().map(|device| device.stream().expect("a stream")).collect();
        let steps = devices.iter().enumerate().map(|(rank, device)| halos(device, &comm, rank));
        let ranks = Ranks { steps: steps.collect(), comm, devices, streams };
        let cells = ranks.full(3 * LEN, |_| 0.0);
        Ring { ranks, cells }
    }

    fn launch(&mut self) {
        self.ranks.launch(&mut self.cells);
    }
}

fn neighbours(rank: usize, world: usize) -> (usize, usize) {
    ((rank + world - 1) % world, (rank + 1) % world)
}

/// A rank's cells get those of the rank before, and twice those of the rank after.
fn halos(device: &Device, comm: &Communicator, rank: usize) -> Step {
    let axpy = kernels::axpy::load_blocking(device).expect("a kernel");
    device.graph::<(InOut<f32>,), _, _>(
        (axpy, comm.clone(), rank),
        |q, (axpy, comm, rank), (x,)| {
            let (before, after) = neighbours(*rank, comm.world());
            let (mut above, x) = x.split_at_mut(LEN)?;
            let (mut own, mut below) = x.split_at_mut(LEN)?;
            // In this order also where one rank is on both sides.
            comm.in_graph_of(q, *rank)?.group(|g| {
                g.send(&own, before)?;
                g.recv(&mut below, after)?;
                g.send(&own, after)?;
                g.recv(&mut above, before)
            })?;
            axpy.launch(q, 1.0, &above, &mut own)?;
            axpy.launch(q, 2.0, &below, &mut own)
        },
    )
}

#[tokio::test]
async fn halos_of_a_ring() {
    const ROUNDS: usize = 5;
    const STEPS: usize = 10;
    let _turn = support::turn().await;
    for most in [1, 2, 3, 8] {
        let mut ring = Ring::new(most).await;
        let world = ring.ranks.world();
        for round in 0..ROUNDS {
            let mut expected: Vec<f32> = (0..world).map(|rank| (1 + rank + round) as f32).collect();
            let streams = ring.ranks.streams.iter().zip(&mut ring.cells);
            for ((stream, x), value) in streams.zip(&expected) {
                stream.fill(x, *value).queued().expect("a fill");
            }
            for _ in 0..STEPS {
                ring.launch();
                let sum = |rank: usize| {
                    let (before, after) = neighbours(rank, world);
                    expected[rank] + expected[before] + 2.0 * expected[after]
                };
                expected = (0..world).map(sum).collect();
            }
            let streams = ring.ranks.streams.iter().zip(&ring.cells);
            for ((stream, x), expected) in streams.zip(expected) {
                let own = x.slice(LEN..2 * LEN).expect("its own");
                assert_eq!(within(stream.download(&own)).await.expect("sums"), [expected; LEN]);
            }
        }
        for step in &ring.ranks.steps {
            let report = step.report();
            let once = (ROUNDS * STEPS - 1) as u64;
            assert!(report.replayed >= once && report.failed == 0, "{report:?}");
        }
    }
}

/// More ranges than a verb has, collectives beside sends, and a send to the own rank: one node of the graph.
#[tokio::test]
async fn a_group_of_many_calls() {
    const PARTS: usize = 8;
    let _turn = support::turn().await;
    let devices = devices(2);
    let (world, comm) = (devices.len(), connected(&devices).await);
    type Slots = (InOut<f32>, InOut<f32>, InOut<f32>);
    let graph = |(rank, device): (usize, &Device)| {
        device.graph::<Slots, _, _>((comm.clone(), rank), |q, (comm, rank), (a, mut b, c)| {
            let (rank, (before, after)) = (*rank, neighbours(*rank, comm.world()));
            // All parts of a go to the next rank; c gets those of the one before, and one of its own.
            let sent: Vec<_> = (0..PARTS)
                .map(|part| a.slice(part * LEN..(part + 1) * LEN))
                .collect::<Result<_, _>>()?;
            let (mut got, mut rest) = (Vec::new(), c);
            for _ in 0..PARTS {
                let (part, others) = rest.split_at_mut(LEN)?;
                got.push(part);
                rest = others;
            }
            comm.in_graph_of(q, rank)?.group(|g| {
                g.all_reduce_in_place(&mut b, Reduction::Sum)?;
                for (x, y) in sent.iter().zip(&mut got) {
                    g.send(x, after)?;
                    g.recv(y, before)?;
                }
                g.send(&sent[3], rank)?;
                g.recv(&mut rest, rank)?;
                g.barrier()
            })
        })
    };
    let graphs: Vec<_> = devices.iter().enumerate().map(graph).collect();
    let number = |rank: usize, part: usize| (1000 * rank + part) as f32;
    for round in 0..5 {
        let make = |(rank, device): (usize, &Device)| {
            let a: Vec<f32> = (0..PARTS * LEN).map(|at| number(rank + round, at / LEN)).collect();
            let (b, c) = (device.full(7, rank as f32), device.empty((PARTS + 1) * LEN));
            Ok((device.upload(a).queued()?, b.queued()?, c.queued()?))
        };
        let made: Result<Vec<_>, Error> = devices.iter().enumerate().map(make).collect();
        let mut memory = made.expect("memory");
        for (graph, (device, (a, b, c))) in graphs.iter().zip(devices.iter().zip(&mut memory)) {
            graph.launch(device, (a, b, c)).queued().expect("launched");
        }
        for (rank, (device, (_, b, c))) in devices.iter().zip(&memory).enumerate() {
            let sum = (world * (world - 1) / 2) as f32;
            assert_eq!(within(device.download(b)).await.expect("a sum"), [sum; 7]);
            let (before, _) = neighbours(rank, world);
            // A rank that is alone gets all of them of itself.
            let mut expected: Vec<f32> =
                (0..PARTS * LEN).map(|at| number(before + round, at / LEN)).collect();
            expected.extend([number(rank + round, 3); LEN]);
            assert_eq!(within(device.download(c)).await.expect("parts"), expected);
        }
    }
    assert_eq!(graphs[0].dot().matches("group").count(), 1, "{}", graphs[0].dot());
}

/// A send in one graph, and its receive in another one or in a call.
#[tokio::test]
async fn a_send_and_its_receive() {
    let _turn = support::turn().await;
    let devices = devices(2);
    if devices.len() < 2 {
        return;
    }
    let comm = connected(&devices).await;
    let scale = kernels::scale::load_blocking(&devices[0]).expect("a kernel");
    let send = devices[0].graph::<(InOut<f32>, f32), _, _>(
        (scale, comm.clone()),
        |q, (scale, comm), (mut x, by)| {
            scale.launch(q, by, &mut x)?;
            comm.in_graph_of(q, 0)?.send(&x, 1)
        },
    );
    let receive = devices[1].graph::<(InOut<f32>,), _, _>(comm.clone(), |q, comm, (mut y,)| {
        comm.in_graph_of(q, 1)?.recv(&mut y, 0)
    });
    let mut x = devices[0].ones::<f32>(LEN).queued().expect("memory");
    let mut y = devices[1].zeros::<f32>(LEN).queued().expect("memory");
    for round in 1..=20 {
        send.launch(&devices[0], (&mut x, 2.0)).queued().expect("launched");
        let received = match round % 4 {
            0 => comm.group(|g| g.rank(1)?.recv(&mut y, 0)).queued(),
            _ => receive.launch(&devices[1], (&mut y,)).queued(),
        };
        received.expect("called");
        if round % 2 == 0 {
            let found = within(devices[1].download(&y)).await.expect("what was sent");
            assert_eq!(found, [f32::exp2(round as f32); LEN]);
        }
    }
}

/// Where a rank is not connected yet, NCCL waits for it in the call, or while that is captured.
#[tokio::test]
async fn a_peer_that_never_connects() {
    let _turn = support::turn().await;
    let devices = devices(2);
    if devices.len() < 2 {
        return;
    }
    for in_graph in [true, false] {
        let comm = all(&devices).await;
        comm.set_limit(Some(SOON));
        let mut y = devices[0].zeros::<f32>(LEN).queued().expect("memory");
        let receive = devices[0].graph::<(InOut<f32>,), _, _>(comm.clone(), |q, comm, (mut y,)| {
            comm.in_graph_of(q, 0)?.recv(&mut y, 1)
        });
        let (device, (send, made)) = (devices[0].clone(), futures::channel::oneshot::channel());
        let mut call = move || match in_graph {
            true => receive.launch(&device, (&mut y,)),
            false => comm.group(|g| g.rank(0)?.recv(&mut y, 1)),
        };
        std::thread::spawn(move || send.send(call()));
        let op = within(made).await.expect("the call returns");
        let error = within(op).await.unwrap_err();
        assert!(matches!(cause(&error), LostCause::TimedOut { .. }), "{error}");
    }
}

/// Every launch that waits for the neighbour fails, and so does all that is behind it.
#[tokio::test]
async fn a_peer_that_never_launches() {
    let _turn = support::turn().await;
    let Ring { ranks, mut cells } = Ring::new(2).await;
    if ranks.world() < 2 {
        return;
    }
    ranks.launch(&mut cells);
    let receive = |q: &Queue<'_>, comm: &Communicator, (mut y,): (ViewMut<'_, f32>,)| {
        comm.in_graph_of(q, 0)?.recv(&mut y, 1)
    };
    let receive = ranks.devices[0].graph::<(InOut<f32>,), _, _>(ranks.comm.clone(), receive);
    let other = ranks.devices[0].stream().expect("a stream");
    let mut y = other.zeros::<f32>(LEN).queued().expect("memory");
    ranks.check(&cells, 0.0).await;
    ranks.comm.set_limit(Some(SOON));
    let began = Instant::now();
    let mut step = || ranks.steps[0].launch(&ranks.streams[0], (&mut cells[0],)).submitted();
    let ops = [step(), step(), receive.launch(&other, (&mut y,)).submitted()];
    let read = other.download(&y);
    for op in ops {
        let error = within(op.expect("launched")).await.unwrap_err();
        assert!(matches!(cause(&error), LostCause::TimedOut { .. }), "{error}");
    }
    assert!(Error::lost(&within(read).await.unwrap_err()).is_some());
    assert!(began.elapsed() >= SOON && began.elapsed() < LIMIT, "{:?}", began.elapsed());
    let late = ranks.steps[1].launch(&ranks.streams[1], (&mut cells[1],));
    let error = within(late).await.unwrap_err();
    assert!(matches!(cause(&error), LostCause::TimedOut { .. }), "{error}");
}
