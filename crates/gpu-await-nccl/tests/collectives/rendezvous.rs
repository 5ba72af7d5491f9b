//! How processes meet, and what is wrong when they do not; ranks are tasks here.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use gpu_await::Device;
use gpu_await_nccl::{Communicator, Error, Group, LostCause, Reduction};

use crate::support;
use crate::support::{LIMIT, address, groups, within};

/// Long enough for a busy machine to say who is missing.
const SOON: Duration = Duration::from_secs(1);

async fn join(address: &str, rank: usize, world: usize) -> Result<Group, Error> {
    within(Group::join_within(LIMIT, address, rank, world)).await
}

#[tokio::test]
async fn three_ranks_meet() {
    let groups = groups(3).await;
    let device = Device::host();
    let sums = groups.iter().enumerate().map(async |(rank, group)| {
        assert_eq!((group.rank(), group.world()), (rank, 3));
        let (first, second) = (group.connect(&device).await?, group.connect(&device).await?);
        let mut x = device.full(1000, rank as f32).queued()?;
        first.all_reduce_in_place(&mut x, Reduction::Sum).queued()?;
        second.all_reduce_in_place(&mut x, Reduction::Sum).await?;
        let mut y = device.empty::<f32>(1000).queued()?;
        first.send(&x, (rank + 1) % 3).queued()?;
        first.recv(&mut y, (rank + 2) % 3).await?;
        first.barrier().await?;
        Ok::<_, Error>(device.download(&y).await?)
    });
    for sums in within(futures::future::try_join_all(sums)).await.expect("they work") {
        assert_eq!(sums, [9.0; 1000]);
    }
}

#[tokio::test]
async fn a_world_of_one() {
    let group = join("127.0.0.1:0", 0, 1).await.expect("alone");
    let comm = group.connect(&Device::host()).await.expect("alone");
    within(comm.barrier()).await.expect("alone");
    let error = join("127.0.0.1", 0, 1).await.expect_err("it has no port");
    assert!(matches!(error, Error::Address { .. }), "{error}");
}

#[tokio::test]
async fn a_duplicate_and_a_stranger() {
    let address = address();
    let zero = tokio::spawn({
        let address = address.clone();
        async move { join(&address, 0, 3).await }
    });
    // Two say that they are rank 1; one of them is, and waits.
    let both = [1, 1].map(|rank| Box::pin(join(&address, rank, 3)));
    let (refused, _, mut waits) = futures::future::select_all(both).await;
    let error = refused.unwrap_err();
    assert!(matches!(error, Error::DuplicateRank { rank: 1 }), "{error}");
    let error = join(&address, 1, 4).await.unwrap_err();
    assert!(matches!(error, Error::WrongWorld { rank: 1, expected: 3, found: 4 }), "{error}");
    // Somebody else's client is disconnected.
    let mut stranger = TcpStream::connect(&address).expect("it listens");
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("sent");
    stranger.set_read_timeout(Some(LIMIT)).expect("an option");
    let hung_up = tokio::task::spawn_blocking(move || stranger.read(&mut [0; 1]));
    assert!(!matches!(within(hung_up).await.expect("a thread"), Ok(1)));
    let two = join(&address, 2, 3).await.expect("the one that is missing");
    assert_eq!(two.rank(), 2);
    waits.remove(0).await.expect("rank 1");
    zero.await.expect("a task").expect("rank 0");
}

#[tokio::test]
async fn a_peer_that_never_comes() {
    // Both must be there within it, however busy the machine is.
    const SHORT: Duration = Duration::from_secs(3);
    let address = address();
    let began = Instant::now();
    let join = |rank, limit| Group::join_within(limit, &address, rank, 4);
    // Rank 2 waits for longer: of equal limits its own may end first, and then it has left when rank 0 looks.
    let (zero, two) = within(futures::future::join(join(0, SHORT), join(2, 2 * SHORT))).await;
    for error in [zero.unwrap_err(), two.unwrap_err()] {
        let is_right = |missing: &[usize]| missing == [1, 3];
        assert!(
            matches!(&error, Error::MissingRanks { missing, world: 4, .. } if is_right(missing)),
            "{error}"
        );
    }
    assert!(began.elapsed() >= SHORT && began.elapsed() < LIMIT);
}

#[tokio::test]
async fn a_closed_rendezvous() {
    let error = within(Group::join_within(SOON, &address(), 1, 2)).await.unwrap_err();
    assert!(matches!(error, Error::Closed { .. }), "{error}");
    assert!(error.to_string().contains(&format!("for {SOON:?}")), "{error}");
    // Rank 0 accepts, and ends.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let ended = std::thread::spawn(move || drop(listener.accept()));
    let error = join(&address, 1, 2).await.unwrap_err();
    assert!(matches!(error, Error::Closed { .. }), "{error}");
    ended.join().expect("a thread");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    for address in ["nowhere.invalid:1", "127.0.0.1", &address] {
        let error = join(address, 0, 2).await.unwrap_err();
        assert!(matches!(error, Error::Address { .. }), "{error}");
    }
    let error = join("127.0.0.1:1", 2, 2).await.unwrap_err();
    assert!(matches!(error, Error::BadRank { rank: 2, world: 2 }), "{error}");
}

#[tokio::test]
async fn a_rank_that_does_not_connect() {
    let groups = groups(2).await;
    let device = Device::host();
    let builder = groups[0].builder(&device).connect_limit(SOON);
    let error = within(builder.connect()).await.unwrap_err();
    assert!(matches!(&error, Error::MissingRanks { missing, .. } if *missing == [1]), "{error}");
}

/// The others go on without it, and it learns that, also when they have ended.
#[tokio::test]
async fn a_rank_that_does_not_recover() {
    let mut groups = groups(3).await;
    let (device, late) = (Device::host(), groups.remove(1));
    let recovered = groups.iter().map(|group| group.recover_within(SOON, &device));
    let recovered = within(futures::future::try_join_all(recovered)).await.expect("without it");
    assert!(recovered.iter().all(|(group, _)| group.original_ranks() == [0, 2]));
    assert_eq!(groups[1].gone(), [1]);
    drop((recovered, groups));
    let error = within(late.recover_within(SOON, &device)).await.unwrap_err();
    assert!(matches!(error, Error::Excluded { by: 0 | 2 }), "{error}");
    let alone = late.without(&[0, 2]).expect("itself");
    let (alone, _) = within(alone.recover_within(SOON, &device)).await.expect("alone");
    assert_eq!((alone.world(), alone.original_ranks()), (1, vec![1]));
}

/// The error has the limit that was given, and the ranks are not those of the group that was not connected, but of the one that recovers.
#[tokio::test]
async fn a_rank_that_does_not_connect_again() {
    let mut groups = groups(3).await;
    drop(groups.remove(0));
    let (device, other) = (Device::host(), groups[1].survivors());
    let (recovered, other) =
        within(futures::future::join(groups[0].recover_within(SOON, &device), other)).await;
    assert_eq!(other.expect("both").world(), 2);
    let error = recovered.unwrap_err();
    assert!(
        matches!(&error, Error::MissingRanks { missing, world: 3, limit: SOON, .. } if *missing == [2]),
        "{error}"
    );
}

/// Who leaves in an orderly way takes nothing back; those who are left go on without it.
#[tokio::test]
async fn the_others_go_on() {
    let mut groups = groups(3).await;
    let device = Device::host();
    let comms = groups.iter().map(|group| group.connect(&device));
    let mut comms = within(futures::future::try_join_all(comms)).await.expect("connected");
    let x = device.full(10, 7.0f32).queued().expect("memory");
    comms[1].send(&x, 0).await.expect("sent");
    drop((comms.remove(1), groups.remove(1)));
    let mut y = device.empty::<f32>(10).queued().expect("memory");
    within(comms[0].recv(&mut y, 1)).await.expect("it was sent before");
    let mut sums = [x, y];
    for (comm, x) in comms.iter().zip(&mut sums) {
        let error = within(comm.all_reduce_in_place(x, Reduction::Sum)).await.unwrap_err();
        let lost = Error::lost(&error).expect("lost");
        let is_right =
            matches!(lost.cause, LostCause::PeerLeft { rank: 1 } | LostCause::PeerAborted { .. });
        assert!(is_right, "{error}");
        assert!(comm.lost().is_some());
    }
    for group in &groups {
        while group.gone() != [1] {
            tokio::task::yield_now().await;
        }
    }
    let error = within(groups[0].connect(&device)).await.unwrap_err();
    let is_right = matches!(&error, Error::Lost(lost) if matches!(lost.cause, LostCause::PeerLeft { rank: 1 }));
    assert!(is_right, "{error}");
    let rest: Vec<_> = groups.iter().map(|group| group.without(&[1]).expect("rank 1")).collect();
    assert_eq!(rest.iter().map(Group::rank).collect::<Vec<_>>(), [0, 1]);
    assert!(rest.iter().all(|group| group.original_ranks() == [0, 2]));
    let comms = rest.iter().map(|group| group.connect(&device));
    let comms = within(futures::future::try_join_all(comms)).await.expect("connected");
    let ops: Vec<_> = comms
        .iter()
        .zip(&mut sums)
        .map(|(comm, x)| {
            device.fill(x, 2.0).queued().expect("a fill");
            comm.all_reduce_in_place(x, Reduction::Sum)
        })
        .collect();
    within(futures::future::try_join_all(ops)).await.expect("they work");
    assert_eq!(device.download(&sums[1]).await.expect("sums"), [4.0; 10]);
}

/// Two ranks with a device each, on GPUs if those are asked for; none where there is one.
async fn two() -> Option<(Vec<Device>, Vec<Group>, Vec<Communicator>)> {
    let devices = support::devices(2);
    if devices.len() < 2 {
        return None;
    }
    // As in a process of its own NCCL would have no need of it.
    devices[0].enable_peer(&devices[1]).await.expect("a driver");
    devices[1].enable_peer(&devices[0]).await.expect("a driver");
    let groups = groups(2).await;
    let comms = groups.iter().zip(&devices).map(|(group, device)| group.connect(device));
    let comms = within(futures::future::try_join_all(comms)).await.expect("connected");
    Some((devices, groups, comms))
}

#[tokio::test]
async fn an_abort_is_told() {
    let _turn = support::turn().await;
    let Some((devices, _groups, comms)) = two().await else { return };
    let mut x = devices[0].ones::<f32>(100).queued().expect("memory");
    let op = comms[0].all_reduce_in_place(&mut x, Reduction::Sum);
    within(comms[1].abort()).await.expect("aborted");
    let error = within(op).await.unwrap_err();
    let lost = Error::lost(&error).expect("lost");
    assert!(matches!(lost.cause, LostCause::PeerAborted { rank: 1 }), "{error}");
}

#[tokio::test]
async fn left_while_another_waits() {
    let _turn = support::turn().await;
    let Some((devices, mut groups, mut comms)) = two().await else { return };
    let mut x: Vec<_> =
        devices.iter().map(|device| device.ones::<f32>(100).queued().expect("memory")).collect();
    for _ in 0..20 {
        let ops: Vec<_> = (comms.iter().zip(&mut x))
            .map(|(comm, x)| comm.all_reduce_in_place(x, Reduction::Max))
            .collect();
        within(futures::future::try_join_all(ops)).await.expect("they work");
    }
    let op = comms[0].all_reduce_in_place(&mut x[0], Reduction::Sum);
    drop((comms.remove(1), groups.remove(1)));
    let error = within(op).await.unwrap_err();
    let lost = Error::lost(&error).expect("lost");
    assert!(matches!(lost.cause, LostCause::PeerLeft { rank: 1 }), "{error}");
    let rest = groups[0].without(&[1]).expect("rank 1");
    let alone = within(rest.connect(&devices[0])).await.expect("a world of one");
    devices[0].fill(&mut x[0], 3.0).queued().expect("a fill");
    within(alone.all_reduce_in_place(&mut x[0], Reduction::Sum)).await.expect("it works");
    assert_eq!(devices[0].download(&x[0]).await.expect("its own"), [3.0; 100]);
}

/// More than the connection takes at once, both ways.
#[tokio::test]
async fn large_messages() {
    const LEN: usize = 4 << 20;
    let groups = groups(2).await;
    let device = Device::host();
    let comms = groups.iter().map(|group| group.connect(&device));
    let comms = within(futures::future::try_join_all(comms)).await.expect("connected");
    let mut x = [1.0, 2.0].map(|value: f32| device.full(LEN, value).queued().expect("memory"));
    let ops: Vec<_> = comms
        .iter()
        .zip(&mut x)
        .map(|(comm, x)| comm.all_reduce_in_place(x, Reduction::Sum))
        .collect();
    within(futures::future::try_join_all(ops)).await.expect("they work");
    let sums = device.download(&x[1]).await.expect("sums");
    assert!(sums.iter().all(|sum| *sum == 3.0));
}

/// A sum over all ranks, of which this process has some.
async fn sum_of(group: &Group, devices: &[Device]) -> Result<Vec<f32>, Error> {
    let comm = within(group.connect(devices)).await?;
    comm.set_limit(Some(LIMIT));
    assert_eq!((comm.ranks(), comm.world()), (group.ranks(), group.world()));
    let ones = |(rank, device): (usize, &Device)| device.full(1000, rank as f32 + 1.0).queued();
    let mut x: Vec<_> =
        group.ranks().into_iter().zip(devices).map(ones).collect::<Result<_, _>>()?;
    let op = comm.group(|g| {
        let mut calls = group.ranks().into_iter().zip(&mut x);
        calls.try_for_each(|(rank, x)| g.rank(rank)?.all_reduce_in_place(x, Reduction::Sum))
    });
    within(op).await?;
    let mut sums = Vec::new();
    for (device, x) in devices.iter().zip(&x) {
        sums.push(device.download(x).await?[999]);
    }
    Ok(sums)
}

/// Ranks of a process need not be consecutive, nor those of rank 0's come first.
#[tokio::test]
async fn processes_of_several_ranks() {
    let address = &address();
    let hosts = |count| (0..count).map(|_| Device::host()).collect::<Vec<_>>();
    let parties: [Vec<usize>; 4] = [vec![5], vec![4, 0], vec![1, 3], vec![2]];
    let groups = parties.clone().map(|ranks| Group::join_ranks_within(LIMIT, address, ranks, 6));
    let groups = within(futures::future::try_join_all(groups)).await.expect("they meet");
    for (group, ranks) in groups.iter().zip(&parties) {
        assert_eq!((group.ranks(), group.rank()), (ranks.clone(), ranks[0]));
    }
    let devices = parties.clone().map(|ranks| hosts(ranks.len()));
    let sums = groups.iter().zip(&devices).map(|(group, devices)| sum_of(group, devices));
    let sums = within(futures::future::try_join_all(sums)).await.expect("they work");
    assert_eq!(sums.concat(), [21.0; 6]);
    // A process goes on with one of its ranks, and others with none of theirs cannot.
    let gone = [0, 5];
    let error = groups[0].without(&gone).unwrap_err();
    assert!(matches!(error, Error::NoRanks { world: 4, local: 0 }), "{error}");
    let rest: Vec<_> =
        groups[1..].iter().map(|group| group.without(&gone).expect("ranks")).collect();
    assert_eq!(rest[0].ranks(), [3]);
    let devices = [hosts(1), hosts(2), hosts(1)];
    let sums = rest.iter().zip(&devices).map(|(group, devices)| sum_of(group, devices));
    let sums = within(futures::future::try_join_all(sums)).await.expect("they work");
    assert_eq!(sums.concat(), [10.0; 4]);
}

/// All ranks in one process meet nobody; on GPUs as many as there are.
#[tokio::test]
async fn a_process_of_all_ranks() {
    let _turn = support::turn().await;
    let devices = support::devices(3);
    let world = devices.len();
    let group = within(Group::join_ranks("127.0.0.1:0", 0..world, world)).await.expect("alone");
    let sum = (1..=world).sum::<usize>() as f32;
    assert_eq!(within(sum_of(&group, &devices)).await.expect("they work"), vec![sum; world]);
}

#[tokio::test]
async fn ranks_that_cannot_be() {
    let join = |ranks: &'static [usize], world| {
        let ranks = ranks.iter().copied();
        within(Group::join_ranks_within(SOON, "127.0.0.1:0", ranks, world))
    };
    let error = join(&[], 2).await.unwrap_err();
    assert!(matches!(error, Error::NoRanks { world: 2, local: 0 }), "{error}");
    let error = join(&[0, 2], 2).await.unwrap_err();
    assert!(matches!(error, Error::BadRank { rank: 2, world: 2 }), "{error}");
    let error = join(&[1, 0, 1], 2).await.unwrap_err();
    assert!(matches!(error, Error::DuplicateRank { rank: 1 }), "{error}");
    let error = join(&[0, 2], 4).await.unwrap_err();
    assert!(matches!(&error, Error::MissingRanks { missing, .. } if *missing == [1, 3]), "{error}");

    let address = &address();
    let zero = tokio::spawn({
        let address = address.clone();
        async move { Group::join_ranks_within(LIMIT, &address, 0..2, 5).await }
    });
    let error = within(Group::join_ranks_within(LIMIT, address, [4, 1], 5)).await.unwrap_err();
    assert!(matches!(error, Error::DuplicateRank { rank: 1 }), "{error}");
    let error = within(Group::join_ranks_within(LIMIT, address, 2..=3, 4)).await.unwrap_err();
    assert!(matches!(error, Error::WrongWorld { rank: 2, expected: 5, found: 4 }), "{error}");
    let rest =
        within(Group::join_ranks_within(LIMIT, address, 2..5, 5)).await.expect("the missing ones");
    let zero = within(zero).await.expect("a task").expect("rank 0");
    let device = Device::host();
    let error = rest.connect(&device).await.unwrap_err();
    let is_right = |ranks: &[usize]| ranks == [2, 3, 4];
    assert!(
        matches!(&error, Error::DeviceCount { ranks, devices: 1 } if is_right(ranks)),
        "{error}"
    );
    let builder = rest.builder(&[device.clone(), device.clone(), device.clone()]);
    let error = builder.rank(0, &device).connect().await.unwrap_err();
    assert!(matches!(error, Error::NotLocal { rank: 0, .. }), "{error}");
    drop(zero);
}
