//! Calls that are given up and made again, and ranks of which one recovers while others do something else.

use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::{Device, DeviceKind, testing};
use gpu_await_nccl::{Communicator, Error, Group, LostCause, UniqueId};

use crate::support::{LIMIT, Random, address, groups, within};

/// Recovers until a collective works.
async fn goes_on(mut group: Group, device: &Device) -> Result<(Group, Communicator), Error> {
    loop {
        let (next, comm) = match group.recover_within(LIMIT, device).await {
            Ok(recovered) => recovered,
            Err(Error::Lost(_)) => continue,
            Err(error) => return Err(error),
        };
        comm.set_limit(Some(LIMIT));
        if comm.barrier().await.is_ok() {
            return Ok((next, comm));
        }
        group = next;
    }
}

fn assert_all(recovered: &[(Group, Communicator)]) {
    for (group, _) in recovered {
        assert_eq!(group.original_ranks(), [0, 1, 2]);
    }
}

/// It does not connect any more: those who wait for it hear that, and recover with it.
#[tokio::test]
async fn one_recovers_while_others_connect() {
    let device = Device::host();
    let groups = groups(3).await;
    let ends = groups.into_iter().enumerate().map(async |(rank, group)| {
        if rank != 1 {
            match group.connect(&device).await {
                Err(Error::Lost(lost)) => {
                    assert!(matches!(lost.cause, LostCause::PeerRecovers { rank: 1 }), "{lost}");
                }
                other => panic!("{other:?}"),
            }
        }
        goes_on(group, &device).await
    });
    assert_all(&within(futures::future::try_join_all(ends)).await.expect("one group"));
}

/// What has connected is not taken back, also on ranks that learn of it later.
#[tokio::test]
async fn one_recovers_when_it_has_connected() {
    let device = Device::host();
    for _ in 0..30 {
        let ends = groups(3).await.into_iter().enumerate().map(async |(rank, group)| {
            let comm = group.connect(&device).await;
            let comm = comm.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
            let recovered = goes_on(group, &device).await;
            drop(comm);
            recovered
        });
        assert_all(&within(futures::future::try_join_all(ends)).await.expect("one group"));
    }
}

/// Nobody is left out, wherever it was given up.
#[tokio::test]
async fn a_recovery_that_is_given_up() {
    let device = Device::host();
    let mut random = Random(7);
    for _ in 0..40 {
        let after = Duration::from_micros(random.below(8000) as u64);
        let ends = groups(3).await.into_iter().enumerate().map(async |(rank, group)| {
            if rank == 2 {
                let first = group.recover_within(LIMIT, &device);
                drop(tokio::time::timeout(after, first).await);
            }
            goes_on(group, &device).await
        });
        assert_all(&within(futures::future::try_join_all(ends)).await.expect("one group"));
    }
}

/// The others would take a second call for the next agreement.
#[tokio::test]
async fn two_recoveries_at_once() {
    let device = Device::host();
    let mut groups = groups(2).await;
    let (one, zero) = (groups.pop().expect("1"), groups.pop().expect("0"));
    let mut first = Box::pin(zero.recover_within(LIMIT, &device));
    assert!(futures::poll!(first.as_mut()).is_pending());
    for second in [zero.clone(), zero.clone()] {
        let refused = second.recover_within(LIMIT, &device).now_or_never().expect("at once");
        assert!(matches!(refused, Err(Error::Recovering)));
        let refused = second.survivors().now_or_never().expect("at once");
        assert!(matches!(refused, Err(Error::Recovering)));
    }
    let other = one.recover_within(LIMIT, &device);
    let (recovered, other) = within(futures::future::join(first, other)).await;
    assert_eq!((recovered.expect("0").0.world(), other.expect("1").0.world()), (2, 2));
    let again = [&zero, &one].map(Group::survivors);
    within(futures::future::try_join_all(again)).await.expect("over is over");
}

/// It is found before the others agree with this process.
#[tokio::test]
async fn a_recovery_with_devices_that_are_wrong() {
    let (faults, handle) = testing::faults();
    let (lost, device) = (testing::host_with(faults), Device::host());
    handle.lose_device("a test");
    lost.done().await.expect_err("it is lost");
    let ends = groups(3).await.into_iter().enumerate().map(async |(rank, group)| {
        if rank == 1 {
            let refused = group.recover_within(LIMIT, &lost).now_or_never().expect("at once");
            let error = refused.expect_err("lost");
            assert!(matches!(error, Error::Runtime(_)), "{error}");
            let both = [device.clone(), device.clone()];
            let refused = group.recover_within(LIMIT, &both).now_or_never().expect("at once");
            let error = refused.expect_err("one too many");
            assert!(matches!(error, Error::DeviceCount { devices: 2, .. }), "{error}");
        }
        goes_on(group, &device).await
    });
    assert_all(&within(futures::future::try_join_all(ends)).await.expect("one group"));
}

/// At once, so that the first attempt is still ending; then the others come.
#[tokio::test]
async fn a_join_that_is_given_up() {
    for rank in [0, 1] {
        for _ in 0..10 {
            let address = address();
            let join = |rank| Group::join_within(LIMIT, &address, rank, 3);
            let at = address.clone();
            let zero = async move { Group::join_within(LIMIT, &at, 0, 3).await };
            let zero = (rank != 0).then(|| tokio::spawn(zero));
            for _ in 0..3 {
                drop(tokio::time::timeout(Duration::from_millis(5), join(rank)).await);
            }
            let rest = (0..3).filter(|other| *other != 0 || rank == 0);
            within(futures::future::try_join_all(rest.map(join))).await.expect("they meet");
            if let Some(zero) = zero {
                within(zero).await.expect("a task").expect("they meet");
            }
        }
    }
}

/// As a join: the ranks of the first attempt are not taken when the next one begins.
#[tokio::test]
async fn a_connect_by_an_id_that_is_given_up() {
    let device = Device::host();
    for _ in 0..20 {
        let id = UniqueId::new(DeviceKind::Host).expect("an id");
        let connect =
            |rank| Communicator::builder(id, 2).rank(rank, &device).connect_limit(LIMIT).connect();
        for _ in 0..3 {
            drop(tokio::time::timeout(Duration::from_millis(5), connect(0)).await);
        }
        let both = futures::future::try_join(connect(0), connect(1));
        within(both).await.expect("they meet");
    }
}

/// Also while all connect with one another: nobody waits for who has gone, where others have ended.
#[tokio::test]
async fn a_join_that_ends_while_others_connect() {
    const LIMIT: Duration = Duration::from_secs(8);
    let mut random = Random(11);
    let all = (0..40).map(|_| {
        let (address, who) = (address(), 1 + random.below(3));
        let after = Duration::from_micros(random.below(12_000) as u64);
        async move {
            let ends = (0..4).map(async |rank| {
                let join = Group::join_within(LIMIT, &address, rank, 4);
                let end = match rank == who {
                    true => tokio::time::timeout(after, join).await.ok(),
                    false => Some(join.await),
                };
                (rank != who).then(|| (Instant::now(), end.map(|end| end.map(drop))))
            });
            let ends: Vec<_> =
                futures::future::join_all(ends).await.into_iter().flatten().collect();
            let first = ends.iter().map(|(at, _)| *at).min().expect("three");
            for (at, _) in &ends {
                assert!(*at - first < LIMIT / 2, "{who} after {after:?}: {ends:?}");
            }
        }
    });
    within(futures::future::join_all(all)).await;
}

/// Nobody is missing then but rank 0.
#[tokio::test]
async fn rank_0_gives_its_join_up() {
    let address = address();
    let mut zero = Box::pin(Group::join_within(LIMIT, &address, 0, 3));
    let mut one = Box::pin(Group::join_within(LIMIT, &address, 1, 3));
    let both = futures::future::join(zero.as_mut(), one.as_mut());
    drop(tokio::time::timeout(Duration::from_millis(100), both).await);
    drop(zero);
    let error = within(one).await.expect_err("nobody listens");
    assert!(matches!(error, Error::Closed { .. }), "{error}");
}

#[tokio::test]
async fn ranks_that_would_wait_for_one_another() {
    let device = || Device::builder().verify(true).host();
    let refused = Communicator::all(&[device(), device()]).await;
    assert!(matches!(refused, Err(Error::VerifyMode { ranks }) if ranks == [0, 1]));
    let alone = within(Communicator::all(&[device()])).await.expect("no other waits");
    within(alone.barrier()).await.expect("alone");
    assert_eq!(alone.devices()[0].kind(), DeviceKind::Host);
}
