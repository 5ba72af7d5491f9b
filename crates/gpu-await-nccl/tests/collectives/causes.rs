//! Who loses a communicator tells the other ranks why, and they report the same rank.

use std::time::Duration;

use gpu_await::testing::{self, FaultHandle};
use gpu_await::{Device, DeviceBuffer, DeviceKind, Graph, InOut, Op};
use gpu_await_nccl::{Communicator, Error, LostCause, Reduction, UniqueId};

use crate::support::{LIMIT, connect, groups, says_all_once, within};

const SOON: Duration = Duration::from_millis(300);

fn ones(device: &Device, len: usize) -> DeviceBuffer<f32> {
    device.ones(len).queued().expect("memory")
}

/// Communicators of a rank each: of one process, and over TCP.
async fn both(
    world: usize,
    device: &Device,
) -> [(Vec<gpu_await_nccl::Group>, Vec<Communicator>); 2] {
    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    let rank = |rank| Communicator::builder(id, world).limit(LIMIT).rank(rank, device).connect();
    let here = futures::future::try_join_all((0..world).map(rank));
    let groups = groups(world).await;
    let comms = connect(&groups, device).await;
    [(Vec::new(), within(here).await.expect("connected")), (groups, comms)]
}

/// Why an operation failed, and by which rank.
async fn lost(op: Op<()>) -> (LostCause, usize) {
    let error = within(op).await.expect_err("it is lost");
    says_all_once(&error);
    let lost = Error::lost(&error).expect("of a lost communicator");
    (lost.cause.clone(), lost.origin())
}

#[tokio::test]
async fn an_abort() {
    let device = Device::host();
    for (_groups, comms) in both(4, &device).await {
        let mut x: Vec<_> = comms.iter().map(|_| ones(&device, 10)).collect();
        let ops: Vec<_> = comms
            .iter()
            .zip(&mut x)
            .filter(|(comm, _)| comm.ranks() != [2])
            .map(|(comm, x)| comm.all_reduce_in_place(x, Reduction::Sum))
            .collect();
        within(comms[2].abort()).await.expect("aborted");
        for op in ops {
            let (cause, origin) = lost(op).await;
            assert!(matches!(cause, LostCause::PeerAborted { rank: 2 }), "{cause}");
            assert_eq!(origin, 2);
        }
    }
}

#[tokio::test]
async fn a_limit() {
    let device = Device::host();
    for (_groups, comms) in both(4, &device).await {
        comms[1].set_limit(Some(SOON));
        let mut x: Vec<_> = comms.iter().map(|_| ones(&device, 10)).collect();
        // Rank 3 never calls, and is told as well.
        let calls = comms.iter().zip(&mut x).take(3);
        let ops: Vec<_> =
            calls.map(|(comm, x)| comm.all_reduce_in_place(x, Reduction::Sum)).collect();
        for (rank, op) in ops.into_iter().enumerate() {
            let (cause, origin) = lost(op).await;
            match cause {
                LostCause::TimedOut { limit: SOON } if rank == 1 => {}
                LostCause::PeerTimedOut { rank: 1, limit: SOON } if rank != 1 => {}
                cause => panic!("rank {rank}: {cause}"),
            }
            assert_eq!(origin, 1);
        }
        while comms[3].lost().is_none() {
            tokio::task::yield_now().await;
        }
        assert_eq!(comms[3].lost().expect("lost").origin(), 1);
    }
}

/// Where more than two ranks differ, each reports two that do.
#[tokio::test]
async fn a_mismatch() {
    let device = Device::host();
    for (_groups, comms) in both(4, &device).await {
        let mut x: Vec<_> =
            (0..4).map(|rank| ones(&device, if rank == 2 { 11 } else { 10 })).collect();
        let ops: Vec<_> = (comms.iter().zip(&mut x))
            .map(|(comm, x)| comm.all_reduce_in_place(x, Reduction::Sum))
            .collect();
        for op in ops {
            let (cause, _) = lost(op).await;
            let LostCause::Mismatch { ranks, calls } = &cause else { panic!("{cause}") };
            assert!(ranks.contains(&2), "{cause}");
            for (rank, call) in ranks.iter().zip(calls) {
                let len = if *rank == 2 { 11 } else { 10 };
                assert_eq!(*call, format!("all_reduce(Sum) of {len} F32"));
            }
        }
    }
}

/// A call of two ranks, by its number.
fn call(comm: &Communicator, which: usize, x: &mut DeviceBuffer<f32>) -> Op<()> {
    let other = 1 - comm.ranks()[0];
    match which {
        0 => comm.all_reduce_in_place(x, Reduction::Sum),
        1 => comm.all_reduce_in_place(x, Reduction::Max),
        2 => comm.reduce_in_place(x, Reduction::Sum, 0),
        3 => comm.reduce_in_place(x, Reduction::Sum, 1),
        4 => comm.broadcast_in_place(x, 0),
        5 => comm.broadcast_in_place(x, 1),
        6 => comm.all_gather_in_place(x),
        7 => comm.reduce_scatter_in_place(x, Reduction::Sum),
        8 => comm.barrier(),
        9 => comm.recv(x, other),
        _ => comm.send(x, other),
    }
}

/// Every two calls of two ranks that are not one call, or a send and its receive, are found to differ, long before a limit.
#[tokio::test]
async fn every_two_calls() {
    const CALLS: usize = 11;
    const SEND: usize = 10;
    let device = Device::host();
    for first in 0..CALLS {
        for second in 0..CALLS {
            let is_one = first == second && first < 9;
            let is_sent = first.max(second) == SEND && first.min(second) >= 9;
            if is_one || is_sent {
                continue;
            }
            let id = UniqueId::new(DeviceKind::Host).expect("an id");
            let rank = |rank| Communicator::builder(id, 2).rank(rank, &device).connect();
            let comms = futures::try_join!(rank(0), rank(1)).expect("connected");
            let (mut x, mut y) = (ones(&device, 8), ones(&device, 8));
            let ops = [call(&comms.0, first, &mut x), call(&comms.1, second, &mut y)];
            let results = within(futures::future::join_all(ops)).await;
            for (result, which) in results.into_iter().zip([first, second]) {
                match result {
                    Err(error) => {
                        let cause = &Error::lost(&error).expect("lost").cause;
                        let is_right = matches!(cause, LostCause::Mismatch { ranks, .. } if ranks[0] != ranks[1]);
                        assert!(is_right, "{first}, {second}: {cause}");
                    }
                    // It was read, which is all that is said.
                    Ok(()) => assert_eq!(which, SEND, "{first}, {second}"),
                }
            }
            while comms.0.lost().is_none() || comms.1.lost().is_none() {
                tokio::task::yield_now().await;
            }
        }
    }
}

/// Sends wait when too much is under way; nothing is lost, and a limit ends the wait.
#[tokio::test]
async fn sends_are_bounded() {
    const LEN: usize = 1 << 18;
    let device = Device::host();
    for (_groups, comms) in both(2, &device).await {
        let x = ones(&device, LEN);
        let ops: Vec<_> = (0..40).map(|_| comms[0].send(&x, 1)).collect();
        within(async {
            while !ops[2].is_complete() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        // Rank 1's receives are counted by what rank 0 could go on with.
        assert!(!ops[39].is_complete());
        let mut y = device.zeros::<f32>(LEN).queued().expect("memory");
        for _ in 0..40 {
            within(comms[1].recv(&mut y, 0)).await.expect("sent");
        }
        within(futures::future::try_join_all(ops)).await.expect("taken");
        assert_eq!(device.download(&y).await.expect("ones"), [1.0; LEN]);

        comms[0].set_limit(Some(SOON));
        let ops: Vec<_> = (0..10).map(|_| comms[0].send(&x, 1)).collect();
        let mut ends = within(futures::future::join_all(ops)).await;
        let error = ends.pop().expect("ten").expect_err("nobody receives");
        let cause = &Error::lost(&error).expect("lost").cause;
        assert!(matches!(cause, LostCause::TimedOut { limit: SOON }), "{error}");
    }
}

/// A rank that sends to itself is bounded as well.
#[tokio::test]
async fn sends_to_oneself() {
    const LEN: usize = 2 << 20;
    let device = Device::host();
    for (_groups, comms) in both(2, &device).await {
        let (x, mut y) = (ones(&device, LEN), device.zeros::<f32>(LEN).queued().expect("memory"));
        for _ in 0..3 {
            let both = comms[0].group(|g| {
                g.rank(0)?.send(&x, 0)?;
                g.rank(0)?.recv(&mut y, 0)
            });
            within(both).await.expect("it is one group");
        }
        assert_eq!(device.download(&y).await.expect("ones")[LEN - 1], 1.0);
        comms[0].set_limit(Some(SOON));
        let (cause, _) = lost(comms[0].group(|g| g.rank(0)?.send(&x, 0))).await;
        assert!(matches!(cause, LostCause::TimedOut { limit: SOON }), "{cause}");
    }
}

/// What was to write a call's input failed: the other ranks do not wait for the call.
#[tokio::test]
async fn an_input_that_failed() {
    let device = Device::host();
    for (_groups, comms) in both(3, &device).await {
        let mut x: Vec<_> = comms.iter().map(|_| ones(&device, 10)).collect();
        // What a refused call would have written counts as failed.
        let y = ones(&device, 11);
        assert!(comms[1].all_reduce(&y, &mut x[1], Reduction::Sum).await.is_err());
        assert!(comms[1].lost().is_none());
        let ops: Vec<_> = (comms.iter().zip(&mut x))
            .map(|(comm, x)| comm.all_reduce_in_place(x, Reduction::Sum))
            .collect();
        for (rank, op) in ops.into_iter().enumerate() {
            let error = within(op).await.expect_err("an input failed");
            if rank != 1 {
                let cause = &Error::lost(&error).expect("lost").cause;
                assert!(matches!(cause, LostCause::InputFailed { rank: 1, .. }), "{cause}");
            }
        }
        let lost = comms[1].lost().expect("it is lost");
        assert!(matches!(lost.cause, LostCause::InputFailed { rank: 1, .. }), "{lost}");
    }
}

/// A launch of a graph makes no call then: the other rank does not take the next one for it.
#[tokio::test]
async fn an_input_of_a_launch_that_failed_before_it() {
    let device = Device::host();
    for (_groups, comms) in both(2, &device).await {
        let steps = comms.iter().map(|comm| {
            let step = device.graph::<(InOut<f32>,), _, _>(comm.clone(), |q, comm, (mut x,)| {
                comm.in_graph(q)?.all_reduce_in_place(&mut x, Reduction::Sum)
            });
            (step, device.stream().expect("a stream"))
        });
        let steps: Vec<_> = steps.collect();
        let mut x: Vec<_> = comms.iter().map(|_| ones(&device, 10)).collect();
        for failing in [false, true] {
            if failing {
                // What a refused copy would have written counts as failed.
                device.copy(&ones(&device, 11), &mut x[1]).queued().expect_err("lengths differ");
            }
            let launches = steps.iter().zip(&mut x);
            let launches: Vec<Op<()>> =
                launches.map(|((step, stream), x)| Graph::launch(step, stream, (x,))).collect();
            for (rank, launch) in launches.into_iter().enumerate() {
                match within(launch).await {
                    Ok(()) => assert!(!failing, "{rank}"),
                    Err(error) => {
                        assert!(failing, "{error}");
                        let lost = Error::lost(&error).map(|lost| lost.cause.clone());
                        assert_eq!(lost.is_some(), rank == 0, "{error}");
                    }
                }
            }
        }
        for comm in &comms {
            let (cause, _) = lost(comm.barrier()).await;
            assert!(matches!(cause, LostCause::InputFailed { rank: 1, .. }), "{cause}");
        }
    }
}

/// A batch makes the call at once: the other rank would wait for it.
#[tokio::test]
async fn an_input_of_a_batch_that_failed() {
    let device = Device::host();
    for (_groups, comms) in both(2, &device).await {
        let stream = device.stream().expect("a stream");
        let (mut x, mut y) = (ones(&device, 10), ones(&device, 10));
        device.copy(&ones(&device, 11), &mut y).queued().expect_err("lengths differ");
        let peer = comms[0].all_reduce_in_place(&mut x, Reduction::Sum);
        let batch =
            stream.batch(|q| comms[1].in_graph(q)?.all_reduce_in_place(&mut y, Reduction::Sum));
        within(batch).await.expect_err("its input failed");
        let (cause, _) = lost(peer).await;
        assert!(matches!(cause, LostCause::InputFailed { rank: 1, .. }), "{cause}");
        assert!(comms[1].lost().is_some());
    }
}

/// The call was made before its input failed: the other rank may have succeeded, and both learn of it.
#[tokio::test]
async fn an_input_that_fails_late() {
    let device = Device::host();
    for (_groups, comms) in both(2, &device).await {
        // Its other rank never calls.
        let devices = [Device::host(), device.clone()];
        let other = within(Communicator::all(&devices)).await.expect("connected");
        let mut x = [ones(&device, 10), ones(&device, 10)];
        let late = other.group(|g| g.rank(1)?.all_reduce_in_place(&mut x[1], Reduction::Sum));
        let [first, second] = &mut x;
        let ops = [(&comms[0], first), (&comms[1], second)]
            .map(|(comm, x)| comm.all_reduce_in_place(x, Reduction::Sum));
        // Not before: this thread may be held up for as long, and an input that failed before the call fails all of it.
        other.set_limit(Some(SOON));
        assert!(matches!(lost(late).await.0, LostCause::TimedOut { limit: SOON }));
        let [told, failed] = ops;
        assert!(Error::lost(&within(failed).await.expect_err("its input failed")).is_some());
        assert!(comms[1].lost().is_some(), "who asks is told at once");
        drop(told);
        let by = std::time::Instant::now() + LIMIT;
        while comms[0].lost().is_none() {
            assert!(std::time::Instant::now() < by, "it is lost by its input");
            tokio::task::yield_now().await;
        }
        for comm in &comms {
            let (cause, origin) = lost(comm.barrier()).await;
            assert!(matches!(cause, LostCause::InputFailed { rank: 1, .. }), "{cause}");
            assert_eq!(origin, 1);
        }
    }
}

/// The ranks of one process that get data of it fail, and those that get none do not.
#[tokio::test]
async fn an_input_that_fails_late_beside_other_ranks() {
    type Made = gpu_await::Result<()>;
    type Group<'g, 'a> = gpu_await_nccl::RankCalls<'g, 'a>;
    type Call =
        for<'a> fn(&Group<'_, 'a>, usize, &'a DeviceBuffer<f32>, &'a mut DeviceBuffer<f32>) -> Made;
    // Each with the lengths and the ranks that get data of rank 1.
    let calls: [(Call, [usize; 2], &[usize]); 9] = [
        (|g, _, x, y| g.all_reduce(x, y, Reduction::Sum), [6, 6], &[0, 1, 2]),
        (|g, _, x, y| g.all_gather(x, y), [2, 6], &[0, 1, 2]),
        (|g, _, x, y| g.reduce_scatter(x, y, Reduction::Sum), [6, 2], &[0, 1, 2]),
        (|g, _, x, y| g.all_to_all(x, y), [6, 6], &[0, 1, 2]),
        (|g, _, x, y| g.reduce(x, y, Reduction::Sum, 2), [6, 6], &[2]),
        (|g, _, x, y| g.broadcast(x, y, 1), [6, 6], &[0, 1, 2]),
        (|g, _, x, y| g.broadcast(x, y, 0), [6, 6], &[]),
        (
            |g, rank, x, y| {
                g.send(x, (rank + 1) % 3)?;
                g.recv(y, (rank + 2) % 3)
            },
            [6, 6],
            &[1, 2],
        ),
        (|g, _, _, _| g.barrier(), [6, 6], &[]),
    ];
    let devices: Vec<_> = (0..3).map(|_| Device::host()).collect();
    for (which, (call, lens, fail)) in calls.into_iter().enumerate() {
        let late = within(Communicator::all(&devices)).await.expect("connected");
        let comm = within(Communicator::all(&devices)).await.expect("connected");
        comm.set_limit(Some(LIMIT));
        let mut x: Vec<_> = devices.iter().map(|device| ones(device, lens[0])).collect();
        let mut y: Vec<_> = devices.iter().map(|device| ones(device, lens[1])).collect();
        // Its other ranks never call.
        let never = late.group(|g| g.rank(1)?.all_reduce_in_place(&mut x[1], Reduction::Sum));
        let op = comm.group(|g| {
            let ranks = x.iter().zip(&mut y).enumerate();
            ranks.into_iter().try_for_each(|(rank, (x, y))| call(&g.rank(rank)?, rank, x, y))
        });
        let reads: Vec<_> = devices.iter().zip(&y).map(|(device, y)| device.download(y)).collect();
        // As above.
        late.set_limit(Some(SOON));
        assert!(matches!(lost(never).await.0, LostCause::TimedOut { limit: SOON }));
        assert_eq!(within(op).await.is_err(), !fail.is_empty(), "{which}");
        for (rank, read) in reads.into_iter().enumerate() {
            let read = within(read).await;
            assert_eq!(read.is_err(), fail.contains(&rank), "{which}, {rank}: {read:?}");
        }
        if !fail.is_empty() {
            let cause = comm.lost().expect("lost").cause;
            assert!(matches!(cause, LostCause::InputFailed { rank: 1, .. }), "{which}: {cause}");
        }
    }
}

/// Communicators of a rank each, the last of which has a device that can be lost: of one process, and over TCP.
async fn both_with_faults(
    world: usize,
) -> [(Vec<gpu_await_nccl::Group>, Vec<Communicator>, Vec<Device>, FaultHandle); 2] {
    let make = async |id: Option<UniqueId>| {
        let (faults, handle) = testing::faults();
        let mut devices: Vec<_> = (1..world).map(|_| Device::host()).collect();
        devices.push(testing::host_with(faults));
        let groups = if id.is_none() { groups(world).await } else { Vec::new() };
        let connect = async |rank: usize, device: &Device| match id {
            Some(id) => {
                let builder = Communicator::builder(id, world).limit(LIMIT);
                builder.rank(rank, device).connect().await
            }
            None => groups[rank].builder(device).limit(LIMIT).connect().await,
        };
        let comms = devices.iter().enumerate().map(|(rank, device)| connect(rank, device));
        let comms = within(futures::future::try_join_all(comms)).await.expect("connected");
        (groups, comms, devices, handle)
    };
    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    [make(Some(id)).await, make(None).await]
}

/// The other ranks learn of the loss even if the rank of the lost device makes no further call.
#[tokio::test]
async fn a_device_that_is_lost_while_nothing_is_pending() {
    for (_groups, comms, devices, handle) in both_with_faults(3).await {
        let mut x = ones(&devices[0], 10);
        let op = comms[0].all_reduce_in_place(&mut x, Reduction::Sum);
        handle.lose_device("a test");
        let (cause, origin) = lost(op).await;
        assert!(matches!(cause, LostCause::PeerFailed { rank: 2, .. }), "{cause}");
        assert_eq!(origin, 2);
        let own = comms[2].lost().expect("it is lost");
        assert!(matches!(own.cause, LostCause::DeviceLost { rank: 2, .. }), "{own}");
    }
}

/// Also if its last handle is dropped before anybody has looked.
#[tokio::test]
async fn a_device_that_is_lost_by_who_drops_its_communicator() {
    for (_groups, mut comms, devices, handle) in both_with_faults(3).await {
        let (mut x, mut y) = (ones(&devices[0], 10), ones(&devices[2], 10));
        let op = comms[0].all_reduce_in_place(&mut x, Reduction::Sum);
        let own = comms[2].all_reduce_in_place(&mut y, Reduction::Sum);
        handle.lose_device("a test");
        within(own).await.expect_err("its device is lost");
        drop(comms.pop());
        let (cause, origin) = lost(op).await;
        assert!(matches!(cause, LostCause::PeerFailed { rank: 2, .. }), "{cause}");
        assert_eq!(origin, 2);
    }
}

/// A call that a lost or closed device refuses loses the communicator on every rank.
#[tokio::test]
async fn a_call_on_a_device_that_is_lost_or_closed() {
    for closes in [true, false] {
        for (_groups, comms, devices, handle) in both_with_faults(3).await {
            let (mut x, mut y) = (ones(&devices[0], 10), ones(&devices[2], 10));
            let op = comms[0].all_reduce_in_place(&mut x, Reduction::Sum);
            if closes {
                within(devices[2].close(LIMIT)).await.expect("closed");
            } else {
                handle.lose_device("a test");
                within(devices[2].fill(&mut y, 1.0)).await.expect_err("it is lost");
            }
            let refused = comms[2].all_reduce_in_place(&mut y, Reduction::Sum).queued();
            refused.expect_err("it makes no call");
            let (cause, origin) = lost(op).await;
            assert!(matches!(cause, LostCause::PeerFailed { rank: 2, .. }), "{cause}");
            assert_eq!(origin, 2);
        }
    }
}

/// The origin is the rank of the lost device, not the first rank of its process.
#[tokio::test]
async fn the_rank_of_a_device_that_is_lost() {
    let (faults, handle) = testing::faults();
    let devices = [Device::host(), Device::host(), testing::host_with(faults)];
    let comm = within(Communicator::all(&devices)).await.expect("connected");
    let (mut x, mut y) = (ones(&devices[0], 10), ones(&devices[2], 10));
    let op = comm.group(|g| g.rank(0)?.all_reduce_in_place(&mut x, Reduction::Sum));
    handle.lose_device("a test");
    within(devices[2].fill(&mut y, 1.0)).await.expect_err("it is lost");
    let (cause, origin) = lost(op).await;
    assert_eq!((origin, cause.to_string().matches("lost").count()), (2, 1), "{cause}");
    assert_eq!(comm.lost().expect("it is lost").origin(), 2);
}

/// Who has seen an operation fail with the loss of a device need not wait until the watchdog has looked.
#[tokio::test]
async fn a_lost_device_is_known_at_once() {
    for _ in 0..20 {
        let (faults, handle) = testing::faults();
        let devices = [Device::host(), testing::host_with(faults)];
        let comm = within(Communicator::all(&devices)).await.expect("connected");
        let mut x = ones(&devices[1], 10);
        let op = comm.group(|g| g.rank(1)?.all_reduce_in_place(&mut x, Reduction::Sum));
        assert!(comm.lost().is_none());
        handle.lose_device("a test");
        within(devices[1].zeros::<f32>(10)).await.expect_err("it is lost");
        let lost = comm.lost().expect("its device is");
        assert!(matches!(lost.cause, LostCause::DeviceLost { rank: 1, .. }), "{lost}");
        within(op).await.expect_err("it is lost");
    }
}

/// The first call after a peer's abort is refused, even if nothing was pending.
#[tokio::test]
async fn a_call_behind_a_loss_is_refused() {
    let device = Device::host();
    for (_groups, comms) in both(2, &device).await {
        within(comms[0].abort()).await.expect("aborted");
        while comms[1].lost().is_none() {
            tokio::task::yield_now().await;
        }
        let mut x = ones(&device, 10);
        let refused = comms[1].all_reduce_in_place(&mut x, Reduction::Sum).queued();
        let refused = refused.expect_err("it is lost");
        assert_eq!(Error::lost(&refused).expect("why").origin(), 0);
    }
}
