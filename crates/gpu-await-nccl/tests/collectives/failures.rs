//! What fails resolves in time, and nothing else is harmed.

use std::time::{Duration, Instant};

use gpu_await::{Device, DeviceBuffer, DeviceKind, ErrorDetail, Op};
use gpu_await_nccl::{Communicator, Error, LostCause, Reduction, UniqueId, stats};

use crate::support;
use crate::support::{LIMIT, all, devices, ours, says_all_once, within};

const LEN: usize = 1000;
/// Long enough for a busy machine to say who is missing.
const SOON: Duration = Duration::from_secs(1);

fn ones(device: &Device) -> DeviceBuffer<f32> {
    device.ones(LEN).queued().expect("memory")
}

/// An operation of rank 0 alone: the other ranks do not call.
fn alone(comm: &Communicator, x: &mut DeviceBuffer<f32>) -> Op<()> {
    comm.group(|g| g.rank(0)?.all_reduce_in_place(x, Reduction::Sum))
}

/// Why its communicator was lost.
fn cause(error: &gpu_await::Error) -> &LostCause {
    says_all_once(error);
    match Error::lost(error) {
        Some(lost) => &lost.cause,
        None => panic!("not of a lost communicator: {error}"),
    }
}

/// Two devices, or none where there is one GPU: with a world of one nothing is ever pending.
fn two() -> Option<Vec<Device>> {
    let devices = devices(2);
    (devices.len() == 2).then_some(devices)
}

#[tokio::test]
async fn abort_while_pending() {
    let _turn = support::turn().await;
    let Some(devices) = two() else { return };
    let (comm, other) = (all(&devices).await, all(&devices).await);
    let mut x = ones(&devices[0]);
    let op = alone(&comm, &mut x);
    let read = devices[0].download(&x);
    assert!(!op.is_complete());
    within(comm.abort()).await.expect("aborted");
    let error = within(op).await.unwrap_err();
    assert!(matches!(cause(&error), LostCause::Aborted), "{error}");
    // So does who has read it, before and after.
    for error in [within(read).await.unwrap_err(), devices[0].download(&x).await.unwrap_err()] {
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
        assert!(Error::lost(&error).is_some(), "{error}");
    }
    // It is refused from now on, at once.
    let mut y = ones(&devices[0]);
    let error = alone(&comm, &mut y).submitted().unwrap_err();
    assert!(matches!(cause(&error), LostCause::Aborted), "{error}");
    assert!(matches!(comm.lost().expect("lost").cause, LostCause::Aborted));
    // The other communicator of these devices works, and so does a new one.
    for comm in [other, all(&devices).await] {
        let mut x: Vec<_> = devices.iter().map(ones).collect();
        let op = comm.group(|g| {
            x.iter_mut()
                .enumerate()
                .try_for_each(|(rank, x)| g.rank(rank)?.all_reduce_in_place(x, Reduction::Sum))
        });
        within(op).await.expect("it works");
        assert_eq!(devices[1].download(&x[1]).await.expect("sums"), [2.0; LEN]);
    }
}

#[tokio::test]
async fn a_rank_that_never_calls() {
    let _turn = support::turn().await;
    let Some(devices) = two() else { return };
    let comm = all(&devices).await;
    comm.set_limit(Some(SOON));
    let (mut x, mut y) = (ones(&devices[0]), ones(&devices[0]));
    let began = Instant::now();
    let ops = [alone(&comm, &mut x), alone(&comm, &mut y)];
    for op in ops {
        let error = within(op).await.unwrap_err();
        assert!(
            matches!(cause(&error), LostCause::TimedOut { limit } if *limit == SOON),
            "{error}"
        );
    }
    assert!(began.elapsed() >= SOON && began.elapsed() < LIMIT, "{:?}", began.elapsed());
}

/// A time limit of the caller's gives up one wait, and nothing else.
#[tokio::test]
async fn timeout_leaves_it_working() {
    let _turn = support::turn().await;
    let Some(devices) = two() else { return };
    let comm = all(&devices).await;
    let (mut x, mut y) = (ones(&devices[0]), ones(&devices[1]));
    let waited = tokio::time::timeout(Duration::from_millis(20), alone(&comm, &mut x)).await;
    assert!(waited.is_err(), "rank 1 has not called");
    assert!(comm.lost().is_none());
    let op = comm.group(|g| g.rank(1)?.all_reduce_in_place(&mut y, Reduction::Sum));
    within(op).await.expect("now it has");
    for (device, sums) in devices.iter().zip([&x, &y]) {
        assert_eq!(device.download(sums).await.expect("sums"), [2.0; LEN]);
    }
}

/// The last handle goes while work is pending: that goes on.
#[tokio::test]
async fn drop_never_aborts() {
    let _turn = support::turn().await;
    let Some(devices) = two() else { return };
    let comm = all(&devices).await;
    let (mut x, mut y) = (ones(&devices[0]), ones(&devices[1]));
    let gated = devices[1].stream().expect("a stream");
    let gate = gpu_await::testing::Gate::close(&gated).expect("a gate");
    gated.fill(&mut y, 3.0).queued().expect("behind the gate");
    let op = comm.group(|g| {
        g.rank(0)?.all_reduce_in_place(&mut x, Reduction::Sum)?;
        g.rank(1)?.all_reduce_in_place(&mut y, Reduction::Sum)
    });
    drop(comm);
    assert!(!op.is_complete());
    gate.open();
    within(op).await.expect("it goes on");
    assert_eq!(devices[0].download(&x).await.expect("sums"), [4.0; LEN]);
}

/// The host twin finds what NCCL would hang of.
#[tokio::test]
async fn calls_that_differ() {
    let devices = [Device::host(), Device::host()];
    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    let connect =
        |id, rank: usize| Communicator::builder(id, 2).rank(rank, &devices[rank]).connect();
    let (zero, one) = futures::try_join!(connect(id, 0), connect(id, 1)).expect("connected");
    let (mut x, mut y) = (ones(&devices[0]), devices[1].ones::<f32>(LEN + 1).queued().expect("y"));
    let ops = [
        zero.all_reduce_in_place(&mut x, Reduction::Sum),
        one.all_reduce_in_place(&mut y, Reduction::Sum),
    ];
    for op in ops {
        let error = within(op).await.unwrap_err();
        let LostCause::Mismatch { ranks, calls } = cause(&error) else { panic!("{error}") };
        for (rank, call) in ranks.iter().zip(calls) {
            assert_eq!(*call, format!("all_reduce(Sum) of {} F32", LEN + rank));
        }
    }

    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    let (zero, one) = futures::try_join!(connect(id, 0), connect(id, 1)).expect("connected");
    let (mut x, mut y) = (ones(&devices[0]), ones(&devices[1]));
    let ops = [
        zero.all_reduce_in_place(&mut x, Reduction::Sum),
        one.all_reduce_in_place(&mut y, Reduction::Max),
    ];
    for op in ops {
        assert!(Error::lost(&within(op).await.unwrap_err()).is_some());
    }
}

#[tokio::test]
async fn abort_reaches_the_other_ranks() {
    let devices = [Device::host(), Device::host()];
    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    let connect = |rank: usize| Communicator::builder(id, 2).rank(rank, &devices[rank]).connect();
    let (zero, one) = futures::try_join!(connect(0), connect(1)).expect("connected");
    let mut x = ones(&devices[0]);
    let op = zero.recv(&mut x, 1);
    one.abort().await.expect("aborted");
    let error = within(op).await.unwrap_err();
    assert!(matches!(cause(&error), LostCause::PeerAborted { rank: 1 }), "{error}");
}

#[tokio::test]
async fn a_rank_that_leaves() {
    let devices = [Device::host(), Device::host()];
    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    let connect = |rank: usize| Communicator::builder(id, 2).rank(rank, &devices[rank]).connect();
    let (zero, one) = futures::try_join!(connect(0), connect(1)).expect("connected");
    let (mut x, y) = (ones(&devices[0]), devices[1].full(LEN, 5.0f32).queued().expect("y"));
    one.send(&y, 0).abandon();
    drop(one);
    // What it sent before arrives.
    within(zero.recv(&mut x, 1)).await.expect("sent");
    assert_eq!(devices[0].download(&x).await.expect("fives"), [5.0; LEN]);
    let error = within(zero.recv(&mut x, 1)).await.unwrap_err();
    assert!(matches!(cause(&error), LostCause::PeerLeft { rank: 1 }), "{error}");
}

#[tokio::test]
async fn refused_calls() {
    let _turn = support::turn().await;
    let devices = devices(2);
    let (comm, world) = (all(&devices).await, devices.len());
    let (x, mut y) = (ones(&devices[0]), devices[0].ones::<f32>(LEN + 1).queued().expect("y"));
    let op = comm.group(|g| g.rank(0)?.all_reduce(&x, &mut y, Reduction::Sum));
    assert!(matches!(ours(op.await.unwrap_err()), Error::WrongLength { expected: LEN, .. }));
    // What it would have written counts as failed, until it is overwritten.
    let error = devices[0].download(&y).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    devices[0].fill(&mut y, 1.0).queued().expect("healed");
    devices[0].download(&y).await.expect("good");

    let op = comm.group(|g| g.rank(world).map(drop));
    assert!(matches!(ours(op.await.unwrap_err()), Error::NotLocal { .. }));
    let op = comm.group(|g| g.rank(0)?.broadcast_in_place(&mut y, world));
    assert!(matches!(ours(op.await.unwrap_err()), Error::BadRank { .. }));
    devices[0].fill(&mut y, 1.0).queued().expect("healed");
    if world > 1 {
        let op = comm.all_reduce_in_place(&mut y, Reduction::Sum);
        assert!(matches!(ours(op.await.unwrap_err()), Error::SeveralRanks { .. }));
        let op = comm.group(|g| g.rank(0)?.all_gather_in_place(&mut y));
        assert!(matches!(ours(op.await.unwrap_err()), Error::NotShared { found: 1001, .. }));
        // Memory of another rank's device.
        let mut z = ones(&devices[1]);
        let op = comm.group(|g| g.rank(0)?.all_reduce_in_place(&mut z, Reduction::Sum));
        let error = op.await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    } else {
        let op = comm.send(&x, 0);
        assert!(matches!(ours(op.await.unwrap_err()), Error::OwnRank { rank: 0, .. }));
    }
    assert!(comm.lost().is_none(), "nothing was called");
}

#[tokio::test]
async fn communicators_that_cannot_be() {
    let device = Device::host();
    let id = || UniqueId::new(DeviceKind::Host).expect("an id");
    let of = |id, world| Communicator::builder(id, world);
    let error = Communicator::all(&[]).await.unwrap_err();
    assert!(matches!(error, Error::NoRanks { .. }), "{error}");
    let error = of(id(), 2).rank(2, &device).connect().await.unwrap_err();
    assert!(matches!(error, Error::BadRank { rank: 2, world: 2 }), "{error}");
    let error = of(id(), 2).rank(1, &device).rank(1, &device).connect().await.unwrap_err();
    assert!(matches!(error, Error::DuplicateRank { rank: 1 }), "{error}");
    let nobodys = UniqueId::from_bytes([0; 128]);
    let error = of(nobodys, 1).rank(0, &device).connect().await.unwrap_err();
    assert!(matches!(error, Error::BadId { .. }), "{error}");

    let lonely = id();
    let waits = of(lonely, 3).rank(1, &device).connect_limit(SOON).connect();
    let error = within(waits).await.unwrap_err();
    assert!(matches!(&error, Error::MissingRanks { missing, .. } if *missing == [0, 2]), "{error}");
    let taken = id();
    // One of them has the rank, and waits.
    let both = [0, 0].map(|rank| Box::pin(of(taken, 2).rank(rank, &device).connect()));
    let (refused, _, mut waits) = within(futures::future::select_all(both)).await;
    let error = refused.unwrap_err();
    assert!(matches!(error, Error::DuplicateRank { rank: 0 }), "{error}");
    let error = of(taken, 3).rank(1, &device).connect().await.unwrap_err();
    assert!(matches!(error, Error::WrongWorld { expected: 2, found: 3, .. }), "{error}");
    of(taken, 2).rank(1, &device).connect().await.expect("the one that is missing");
    within(waits.remove(0)).await.expect("connected");
}

/// Who made the id has to answer; strangers at its port are hung up on.
#[tokio::test]
async fn an_id_that_nobody_knows() {
    let device = Device::host();
    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    let mut bytes = id.to_bytes();
    // Another proof than the one that answers.
    bytes[32] ^= 1;
    let forged = Communicator::builder(UniqueId::from_bytes(bytes), 1).rank(0, &device);
    let error = within(forged.connect_limit(SOON).connect()).await.unwrap_err();
    assert!(matches!(error, Error::NoRoot { .. }), "{error}");
    let mut bytes = id.to_bytes();
    // Another tag than one of its own.
    bytes[16] ^= 1;
    let forged = Communicator::builder(UniqueId::from_bytes(bytes), 1).rank(0, &device);
    let error = within(forged.connect_limit(SOON).connect()).await.unwrap_err();
    assert!(matches!(error, Error::NoRoot { .. }), "{error}");
    let comm = Communicator::builder(id, 1).rank(0, &device).connect();
    within(within(comm).await.expect("the id").barrier()).await.expect("alone");
}

/// Where every two ranks are connected, a send does not wait for its receive.
#[tokio::test]
async fn pairs_that_are_connected() {
    let _turn = support::turn().await;
    let Some(devices) = two() else { return };
    let id = UniqueId::new(devices[0].kind()).expect("an id");
    let builder = Communicator::builder(id, 2).rank(0, &devices[0]).rank(1, &devices[1]);
    let comm = within(builder.connect_pairs().limit(LIMIT).connect()).await.expect("connected");
    let (x, mut y) = (ones(&devices[0]), devices[1].zeros::<f32>(LEN).queued().expect("memory"));
    let sent = comm.group(|g| g.rank(0)?.send(&x, 1));
    let received = comm.group(|g| g.rank(1)?.recv(&mut y, 0));
    within(futures::future::try_join(sent, received)).await.expect("both");
    assert_eq!(devices[1].download(&y).await.expect("ones"), [1.0; LEN]);
}

/// What is made is freed.
#[tokio::test]
async fn communicators_end() {
    let _turn = support::turn().await;
    let device = devices(1).remove(0);
    let comm = all(std::slice::from_ref(&device)).await;
    let mut x = ones(&device);
    within(comm.all_reduce_in_place(&mut x, Reduction::Sum)).await.expect("one rank");
    within(comm.barrier()).await.expect("one rank");
    assert!(stats().communicators > 0);
    drop(comm);
    drop(x);
    let end = Instant::now() + LIMIT;
    // Its memory goes when its thread is done.
    while device.stats().allocations > 0 {
        assert!(Instant::now() < end, "{:?}", device.stats());
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_device_that_is_lost() {
    let (faults, handle) = gpu_await::testing::faults();
    let devices = [gpu_await::testing::host_with(faults), Device::host()];
    let comm = all(&devices).await;
    let (mut x, mut y) = (ones(&devices[0]), ones(&devices[1]));
    // Rank 0 does not call, and its device is lost while it has something to do.
    let gate = gpu_await::testing::Gate::close(&devices[0].stream().expect("a stream"));
    let op = comm.group(|g| g.rank(1)?.all_reduce_in_place(&mut y, Reduction::Sum));
    handle.lose_device("a test");
    devices[0].fill(&mut x, 2.0).abandon();
    let error = within(op).await.unwrap_err();
    assert!(matches!(cause(&error), LostCause::DeviceLost { .. }), "{error}");
    drop(gate);
    // The other device works.
    devices[1].fill(&mut y, 1.0).queued().expect("healed");
    let alone = all(&devices[1..]).await;
    within(alone.all_reduce_in_place(&mut y, Reduction::Sum)).await.expect("it works");
}

/// Memory of calls that are not made counts as failed, also where the closure panics.
#[tokio::test]
async fn a_group_that_panics() {
    let _turn = support::turn().await;
    let devices = devices(1);
    let comm = all(&devices).await;
    let (x, mut y) = (ones(&devices[0]), ones(&devices[0]));
    let calls = std::panic::AssertUnwindSafe(|| {
        comm.group(|g| {
            g.rank(0)?.all_reduce(&x, &mut y, Reduction::Sum)?;
            panic!("a test")
        })
    });
    assert!(std::panic::catch_unwind(calls).is_err());
    let error = devices[0].download(&y).await.unwrap_err();
    assert!(matches!(Error::of(&error), Some(Error::NotCalled)), "{error}");
    within(comm.all_reduce(&x, &mut y, Reduction::Sum)).await.expect("it works");
}

/// It is known when the group is submitted.
#[tokio::test]
async fn a_group_with_memory_that_nobody_wrote() {
    let _turn = support::turn().await;
    let devices = devices(1);
    let comm = all(&devices).await;
    let (x, mut y, mut z) = (ones(&devices[0]), ones(&devices[0]), ones(&devices[0]));
    let nothing = devices[0].empty::<f32>(x.len()).queued().expect("memory");
    let group = comm.group(|g| {
        let rank = g.rank(0)?;
        rank.all_reduce(&x, &mut y, Reduction::Sum)?;
        rank.all_reduce(&nothing, &mut z, Reduction::Sum)
    });
    let error = group.submitted().unwrap_err();
    assert!(error.to_string().starts_with("group may read "), "{error}");
    for memory in [&y, &z] {
        let failed = devices[0].download(memory).await.unwrap_err();
        assert!(matches!(failed.detail(), ErrorDetail::Upstream { .. }), "{failed}");
    }
    assert!(comm.lost().is_none());
    within(comm.all_reduce(&x, &mut y, Reduction::Sum)).await.expect("it works");
    devices[0].download(&y).await.expect("healed");
}

#[test]
fn handles_go_anywhere() {
    fn goes<T: Send + Sync + 'static>() {}
    goes::<Communicator>();
    goes::<gpu_await_nccl::Group>();
    goes::<gpu_await_nccl::CommunicatorBuilder>();
    goes::<Error>();
}
