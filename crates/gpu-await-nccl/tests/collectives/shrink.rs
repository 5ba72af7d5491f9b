//! Those who are left of a communicator go on in another one.

use std::time::Duration;

use gpu_await::testing::Gate;
use gpu_await::{Device, DeviceBuffer, DeviceKind};
use gpu_await_nccl::{
    Communicator, Error, Group, LostCause, Reduction, ShrinkRefusal, UniqueId, nccl_version,
};

use crate::support;
use crate::support::{LIMIT, all, connect, devices, groups, on_gpus, within};

const LEN: usize = 1000;
/// Long enough for a busy machine to say who is missing.
const SOON: Duration = Duration::from_secs(1);

/// As many devices as there are, or none where there is one GPU.
fn several(most: usize) -> Option<Vec<Device>> {
    let devices = devices(most);
    (devices.len() > 1).then_some(devices)
}

/// NCCL has `ncclCommShrink`.
fn can_shrink() -> bool {
    on_gpus() && nccl_version().expect("NCCL") >= 2_27_00
}

fn ones(device: &Device) -> DeviceBuffer<f32> {
    device.ones(LEN).queued().expect("memory")
}

/// All ranks of this process have the sum of ones over the whole world.
async fn works(comm: &Communicator) {
    let devices = comm.devices();
    let mut x: Vec<_> = devices.iter().map(ones).collect();
    let op = comm.group(|g| {
        let mut ranks = comm.ranks().into_iter().zip(&mut x);
        ranks.try_for_each(|(rank, x)| g.rank(rank)?.all_reduce_in_place(x, Reduction::Sum))
    });
    within(op).await.expect("it works");
    for (device, x) in devices.iter().zip(&x) {
        let sums = device.download(x).await.expect("sums");
        assert_eq!(sums, [comm.world() as f32; LEN]);
    }
}

#[tokio::test]
async fn one_that_works() {
    let _turn = support::turn().await;
    let Some(devices) = several(4) else { return };
    let (comm, world) = (all(&devices).await, devices.len());
    let smaller = within(comm.shrink(&[1])).await.expect("the others");
    assert_eq!((smaller.world(), smaller.ranks()), (world - 1, (0..world - 1).collect()));
    assert_eq!(smaller.devices()[0], devices[0]);
    assert_eq!(smaller.limit(), Some(LIMIT));
    works(&smaller).await;
    works(&comm).await;
    works(&smaller).await;
    // Again, and of what has shrunk.
    works(&within(comm.shrink(&[0, 0])).await.expect("the others")).await;
    if world > 2 {
        works(&within(smaller.shrink(&[0])).await.expect("the others")).await;
    }
    drop(comm);
    works(&smaller).await;
}

#[tokio::test]
async fn pending_work_is_waited_for() {
    let _turn = support::turn().await;
    let Some(devices) = several(2) else { return };
    let comm = all(&devices).await;
    let (mut x, mut y) = (ones(&devices[0]), ones(&devices[1]));
    let gated = devices[1].stream().expect("a stream");
    let gate = Gate::close(&gated).expect("a gate");
    gated.fill(&mut y, 3.0).queued().expect("behind the gate");
    let op = comm.group(|g| {
        g.rank(0)?.all_reduce_in_place(&mut x, Reduction::Sum)?;
        g.rank(1)?.all_reduce_in_place(&mut y, Reduction::Sum)
    });
    let mut shrinks = Box::pin(comm.shrink(&[1]));
    assert!(futures::poll!(&mut shrinks).is_pending());
    if !on_gpus() {
        // As long as another one takes to connect; NCCL's would wait for the gate.
        drop(all(&devices).await);
    }
    assert!(futures::poll!(&mut shrinks).is_pending() && !op.is_complete());
    gate.open();
    let smaller = within(shrinks).await.expect("the other");
    assert!(op.is_complete());
    within(op).await.expect("it goes on");
    works(&smaller).await;
    works(&comm).await;
}

#[tokio::test]
async fn abort_and_shrink() {
    let _turn = support::turn().await;
    let Some(devices) = several(3) else { return };
    let comm = all(&devices).await;
    let mut x = ones(&devices[0]);
    let op = comm.group(|g| g.rank(0)?.all_reduce_in_place(&mut x, Reduction::Sum));
    assert!(!op.is_complete());
    let smaller = within(comm.abort_and_shrink(&[1])).await.expect("the others");
    let error = within(op).await.unwrap_err();
    let lost = Error::lost(&error).expect("lost");
    assert!(matches!(lost.cause, LostCause::Aborted), "{error}");
    assert!(matches!(comm.lost().expect("lost").cause, LostCause::Aborted));
    works(&smaller).await;
    works(&all(&devices).await).await;
}

/// All ranks are here: they can always begin again, also with everybody.
#[tokio::test]
async fn one_that_is_lost() {
    let _turn = support::turn().await;
    let Some(devices) = several(3) else { return };
    let comm = all(&devices).await;
    within(comm.abort()).await.expect("aborted");
    let smaller = within(comm.shrink(&[0])).await.expect("the others");
    assert_eq!(smaller.devices()[0], devices[1]);
    works(&smaller).await;
    let again = within(comm.abort_and_shrink(&[])).await.expect("all of them");
    assert_eq!(again.world(), devices.len());
    works(&again).await;
}

/// Ranks that know one another by an id alone, and are in communicators of their own.
async fn by_id(devices: &[Device]) -> Vec<Communicator> {
    for from in devices {
        for to in devices.iter().filter(|to| on_gpus() && *to != from) {
            from.enable_peer(to).await.expect("a driver");
        }
    }
    let id = UniqueId::new(devices[0].kind()).expect("an id");
    let connect = |(rank, device)| {
        Communicator::builder(id, devices.len()).rank(rank, device).limit(LIMIT).connect()
    };
    let comms = devices.iter().enumerate().map(connect);
    within(futures::future::try_join_all(comms)).await.expect("connected")
}

async fn all_work(comms: &[Communicator]) {
    futures::future::join_all(comms.iter().map(works)).await;
}

#[tokio::test]
async fn by_an_id_alone() {
    let _turn = support::turn().await;
    let Some(devices) = several(3) else { return };
    let comms = by_id(&devices).await;
    all_work(&comms).await;
    let last = devices.len() - 1;
    let shrink = comms[..last].iter().map(|comm| comm.shrink(std::slice::from_ref(&last)));
    let smaller = within(futures::future::try_join_all(shrink)).await;
    if on_gpus() && !can_shrink() && last > 1 {
        let error = smaller.unwrap_err();
        let is_old = |reason: &_| matches!(reason, ShrinkRefusal::OldLibrary { .. });
        assert!(matches!(&error, Error::CannotShrink { reason } if is_old(reason)), "{error}");
        return;
    }
    let smaller = smaller.expect("the others");
    all_work(&smaller).await;
    all_work(&comms).await;
    // One waits for a rank that does not call.
    let mut x = ones(&devices[0]);
    let op = comms[0].all_reduce_in_place(&mut x, Reduction::Sum);
    let shrink =
        comms[..last].iter().map(|comm| comm.abort_and_shrink(std::slice::from_ref(&last)));
    let smaller = within(futures::future::try_join_all(shrink)).await.expect("the others");
    let error = within(op).await.unwrap_err();
    let lost = Error::lost(&error).expect("lost");
    let is_right = matches!(lost.cause, LostCause::Aborted | LostCause::PeerAborted { .. });
    assert!(is_right, "{error}");
    all_work(&smaller).await;
}

/// NCCL cannot shrink what it has aborted, and an id is good for one communicator. Alone a rank needs nobody.
#[tokio::test]
async fn lost_with_an_id_alone() {
    let _turn = support::turn().await;
    let Some(devices) = several(3) else { return };
    let comms = by_id(&devices).await;
    within(comms[0].abort()).await.expect("aborted");
    let others: Vec<usize> = (1..devices.len()).collect();
    works(&within(comms[0].shrink(&others)).await.expect("itself")).await;
    if devices.len() == 2 {
        return;
    }
    let shrink = comms[..2].iter().map(|comm| comm.shrink(&[2]));
    let shrunk = match on_gpus() {
        false => within(futures::future::try_join_all(shrink)).await,
        true => within(comms[0].shrink(&[2])).await.map(|one| vec![one]),
    };
    if !on_gpus() {
        all_work(&shrunk.expect("the twin finds its ranks")).await;
        return;
    }
    let error = shrunk.unwrap_err();
    let is_lost = |reason: &_| matches!(reason, ShrinkRefusal::Lost { cause: LostCause::Aborted });
    assert!(matches!(&error, Error::CannotShrink { reason } if is_lost(reason)), "{error}");
}

#[tokio::test]
async fn ranks_that_are_wrong() {
    let _turn = support::turn().await;
    let devices = devices(2);
    let (comm, world) = (all(&devices).await, devices.len());
    let error = within(comm.shrink(&[0, world])).await.unwrap_err();
    assert!(matches!(error, Error::BadRank { rank, .. } if rank == world), "{error}");
    let everybody: Vec<usize> = (0..world).collect();
    let error = within(comm.abort_and_shrink(&everybody)).await.unwrap_err();
    assert!(matches!(error, Error::NoRanks { world: 0, local: 0 }), "{error}");
    assert!(comm.lost().is_none());
    works(&comm).await;
}

/// On host devices, where the ranks that are left tell who is missing.
#[tokio::test]
async fn a_rank_that_does_not_shrink() {
    let devices: Vec<_> = (0..3).map(|_| Device::host()).collect();
    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    let connect = |(rank, device)| {
        Communicator::builder(id, 3).rank(rank, device).connect_limit(SOON).connect()
    };
    let comms = devices.iter().enumerate().map(connect);
    let comms = within(futures::future::try_join_all(comms)).await.expect("connected");
    let error = within(comms[2].shrink(&[0])).await.unwrap_err();
    assert!(
        matches!(&error, Error::MissingRanks { missing, world: 3, .. } if *missing == [1]),
        "{error}"
    );
    all_work(&comms).await;
}

/// As the communicator that shrinks numbers them.
#[tokio::test]
async fn a_rank_that_leaves_a_shrink() {
    let mut groups = groups(3).await;
    let mut comms = connect(&groups, &Device::host()).await;
    drop((comms.pop(), groups.pop()));
    let shrinks = comms[1].shrink(&[0]);
    let Err(Error::Lost(lost)) = within(shrinks).await else { panic!("one has left") };
    assert_eq!((lost.rank, lost.origin()), (1, 2), "{lost}");
}

/// The group tells who is gone, and carries what the others need.
#[tokio::test]
async fn in_a_group() {
    let _turn = support::turn().await;
    let Some(devices) = several(3) else { return };
    for from in &devices {
        for to in devices.iter().filter(|to| on_gpus() && *to != from) {
            from.enable_peer(to).await.expect("a driver");
        }
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = &listener.local_addr().expect("an address").to_string();
    drop(listener);
    let world = devices.len();
    let join = |rank| Group::join_within(LIMIT, address, rank, world);
    let groups = within(futures::future::try_join_all((0..world).map(join))).await;
    let mut groups = groups.expect("they meet");
    let comms = groups.iter().zip(&devices).map(|(group, device)| group.connect(device));
    let mut comms = within(futures::future::try_join_all(comms)).await.expect("connected");
    all_work(&comms).await;
    // It works: nobody is gone, and one is not wanted.
    let last = world - 1;
    let shrink = comms[..last].iter().map(|comm| comm.shrink(std::slice::from_ref(&last)));
    let smaller = within(futures::future::try_join_all(shrink)).await.expect("the others");
    all_work(&smaller).await;
    all_work(&comms).await;
    // The others wait for one that leaves.
    let mut x: Vec<_> = devices.iter().map(ones).collect();
    let ops = (comms[..last].iter().zip(&mut x))
        .map(|(comm, x)| comm.all_reduce_in_place(x, Reduction::Sum));
    let ops: Vec<_> = ops.collect();
    drop((comms.pop(), groups.pop()));
    for op in ops {
        let error = within(op).await.unwrap_err();
        assert!(Error::lost(&error).is_some(), "{error}");
    }
    for group in &groups {
        while group.gone() != [last] {
            tokio::task::yield_now().await;
        }
    }
    let gone = groups[0].gone();
    let shrink = comms.iter().map(|comm| comm.shrink(&gone));
    let smaller = within(futures::future::try_join_all(shrink)).await.expect("the others");
    all_work(&smaller).await;
}
