//! Ranks that are processes: this test again, as its own child. One is killed in the middle; the others find that, and go on.
//!
//! `cargo test -p gpu-await-nccl --test processes -- --ignored host` runs two of them in network namespaces of their own, with
//! nothing but a link between them: that needs root, and iproute2.

use std::process::Command;
use std::time::{Duration, Instant};

use gpu_await::{Device, DeviceKind, InOut};
use gpu_await_nccl::{Communicator, Error, Group, LostCause, Reduction, UniqueId};

use crate::support;
use crate::support::process::{self, Job, Rank};
use crate::support::{LIMIT, address, within};

const LEN: usize = 5000;

/// As many as there are devices for.
fn world_of(most: usize) -> usize {
    if support::on_gpus() { Device::count().min(most) } else { most }
}

fn all_work(world: usize) {
    let (address, world) = (address(), world_of(world));
    let ranks: Vec<_> =
        (0..world).map(|rank| Rank::here("work", &[rank], world, &address)).collect();
    ranks.into_iter().for_each(Rank::ends_well);
}

fn one_is_killed(world: usize, victim: usize) {
    let (address, world) = (address(), world_of(world));
    if victim >= world {
        return;
    }
    let mut ranks: Vec<_> =
        (0..world).map(|rank| Rank::here("survive", &[rank], world, &address)).collect();
    ranks.iter_mut().for_each(Rank::works);
    ranks[victim].child.kill().expect("SIGKILL");
    ranks.remove(victim);
    ranks.into_iter().for_each(Rank::ends_well);
}

#[test]
fn two_processes() {
    all_work(2);
}

#[test]
fn three_processes() {
    all_work(3);
}

/// Three ranks in the first process, two in the second; on GPUs as many of them as there are.
fn of_several_ranks(job: &str) -> Vec<Rank> {
    let (address, world) = (address(), world_of(5));
    let ranks: Vec<_> = (0..world).collect();
    let parties = ranks.chunks(3.min(world.div_ceil(2)));
    parties.map(|ranks| Rank::here(job, ranks, world, &address)).collect()
}

#[test]
fn processes_of_several_ranks() {
    of_several_ranks("work").into_iter().for_each(Rank::ends_well);
}

#[test]
fn a_process_of_several_ranks_is_killed() {
    let mut parties = of_several_ranks("survive");
    if parties.len() < 2 {
        return;
    }
    parties.iter_mut().for_each(Rank::works);
    parties.remove(1).child.kill().expect("SIGKILL");
    parties.into_iter().for_each(Rank::ends_well);
}

#[test]
fn one_of_two_is_killed() {
    one_is_killed(2, 1);
}

#[test]
fn one_of_three_is_killed() {
    one_is_killed(3, 1);
}

/// At whose address the others met.
#[test]
fn the_first_of_three_is_killed() {
    one_is_killed(3, 0);
}

fn hex(id: UniqueId) -> String {
    id.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn id_of(hex: &str) -> UniqueId {
    let byte = |at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("a byte");
    UniqueId::from_bytes(std::array::from_fn(byte))
}

/// The ranks share an id, and nothing else: rank 0 makes it, and somebody carries it.
fn by_an_id(start: impl Fn(usize, &str) -> Rank, world: usize) -> Vec<Rank> {
    let mut ranks = vec![start(0, "-")];
    let id = ranks[0].says("id ");
    ranks.extend((1..world).map(|rank| start(rank, &id)));
    ranks
}

#[test]
fn an_id_is_all_they_share() {
    let world = world_of(3);
    let start = |rank, id: &str| Rank::here("work", &[rank], world, id);
    by_an_id(start, world).into_iter().for_each(Rank::ends_well);
}

/// Who makes it need not be a rank. NCCL does not tell that a process is gone: a rank gives up waiting, and goes on without it.
#[test]
fn killed_where_an_id_is_all() {
    let world = if support::on_gpus() { world_of(2) } else { 3 };
    let kind = if support::on_gpus() { DeviceKind::Cuda } else { DeviceKind::Host };
    let id = hex(UniqueId::new(kind).expect("an id"));
    let mut ranks: Vec<_> =
        (0..world).map(|rank| Rank::here("give_up", &[rank], world, &id)).collect();
    if world < 2 {
        return;
    }
    ranks.iter_mut().for_each(Rank::works);
    ranks.pop().expect("the last").child.kill().expect("SIGKILL");
    ranks.into_iter().for_each(Rank::ends_well);
}

/// As the docs of `Group::recover` say, whoever dies, also two at a time or one after the other; `GPU_AWAIT_NCCL_TEST_KILLS` says how often.
#[test]
fn those_who_are_left_recover() {
    let world = world_of(4);
    if world < 3 {
        return;
    }
    let rounds =
        std::env::var("GPU_AWAIT_NCCL_TEST_KILLS").map_or(4, |n| n.parse().expect("how often"));
    let mut random = support::Random(std::process::id().into());
    for round in 0..rounds {
        let address = address();
        let mut ranks: Vec<_> = (0..world)
            .map(|rank| (rank, Rank::here("recover", &[rank], world, &address)))
            .collect();
        for (_, rank) in &mut ranks {
            rank.says("working");
        }
        for victim in 0..1 + round % 2 {
            let at = random.below(ranks.len());
            ranks.remove(at);
            if victim == 0 && round % 4 == 3 {
                std::thread::sleep(Duration::from_millis(random.below(20) as u64));
            }
        }
        let left: Vec<_> = ranks.iter().map(|(original, _)| *original).collect();
        for (_, mut rank) in ranks {
            rank.says(&format!("a world of {left:?}"));
            rank.ends_well();
        }
    }
}

/// One is alive and stopped, before it calls or in the middle of it, until the others have gone on without it and have ended. It does not
/// take that for their death, and its own limit for over.
#[cfg(target_os = "linux")]
#[test]
fn one_is_stopped() {
    let (address, world) = (address(), world_of(3));
    if world < 3 {
        return;
    }
    for is_calling in [false, true] {
        let start = |rank| Rank::here("stop", &[rank], world, &address);
        let mut ranks: Vec<_> = (0..world).map(start).collect();
        ranks.iter_mut().for_each(Rank::works);
        let mut stopped = ranks.remove(2);
        if is_calling {
            stopped.goes();
            stopped.says("calling");
        }
        stopped.stops();
        ranks.iter_mut().for_each(Rank::goes);
        for mut rank in ranks {
            rank.says("goes on in [0, 1]");
            rank.ends_well();
        }
        // It calls at once, where it has not yet.
        stopped.goes();
        stopped.signal("CONT");
        stopped.says("left out");
        stopped.ends_well();
    }
}

/// The graph drops its share of the communicator when its launches are complete: on a thread, while the process ends.
#[test]
fn they_end_behind_a_graph() {
    for _ in 0..5 {
        let (address, world) = (address(), world_of(2));
        let ranks: Vec<_> =
            (0..world).map(|rank| Rank::here("end", &[rank], world, &address)).collect();
        ranks.into_iter().for_each(Rank::ends_well);
    }
}

/// A network namespace, with one end of a link.
struct Host(String);

impl Host {
    /// Names that nobody else uses now.
    fn two(test: &str) -> [Host; 2] {
        let id = std::process::id();
        let hosts = ["a", "b"].map(|host| Host(format!("ga-{id}-{test}-{host}")));
        hosts.iter().for_each(|host| ip(&["netns", "add", &host.0]));
        let [a, b] = &hosts;
        ip(&["link", "add", "ga0", "netns", &a.0, "type", "veth", "peer", "ga0", "netns", &b.0]);
        for (host, address) in hosts.iter().zip(["10.77.0.1/24", "10.77.0.2/24"]) {
            ip(&["-n", &host.0, "addr", "add", address, "dev", "ga0"]);
            ip(&["-n", &host.0, "link", "set", "ga0", "up"]);
            // A host reaches itself by it, at each of its addresses.
            ip(&["-n", &host.0, "link", "set", "lo", "up"]);
        }
        hosts
    }

    fn rank(&self, job: &str, rank: usize) -> Rank {
        self.rank_at(job, rank, "10.77.0.1:29500")
    }

    fn rank_at(&self, job: &str, rank: usize, address: &str) -> Rank {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0]).arg(std::env::current_exe().expect("a path"));
        Rank::start(command, job, &[rank], 2, address)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        Command::new("ip").args(["netns", "del", &self.0]).status().ok();
    }
}

fn ip(args: &[&str]) {
    let status = Command::new("ip").args(args).status().expect("iproute2");
    assert!(status.success(), "ip {}", args.join(" "));
}

#[test]
#[ignore = "needs root and iproute2"]
fn two_hosts() {
    let hosts = Host::two("work");
    let ranks: Vec<_> = hosts.iter().zip(0..).map(|(host, rank)| host.rank("work", rank)).collect();
    ranks.into_iter().for_each(Rank::ends_well);
    let mut ranks: Vec<_> =
        hosts.iter().zip(0..).map(|(host, rank)| host.rank("survive", rank)).collect();
    ranks.iter_mut().for_each(Rank::works);
    ranks[1].child.kill().expect("SIGKILL");
    ranks.remove(0).ends_well();
    let ranks = by_an_id(|rank, id| hosts[rank].rank_at("work", rank, id), 2);
    ranks.into_iter().for_each(Rank::ends_well);
}

/// A host that is gone says nothing: the other one finds that by itself.
#[test]
#[ignore = "needs root and iproute2"]
fn a_host_is_cut_off() {
    let hosts = Host::two("cut");
    let mut ranks: Vec<_> =
        hosts.iter().zip(0..).map(|(host, rank)| host.rank("survive", rank)).collect();
    ranks.iter_mut().for_each(Rank::works);
    ip(&["-n", &hosts[1].0, "link", "set", "ga0", "down"]);
    // Each is alone now.
    ranks.into_iter().for_each(Rank::ends_well);
}

/// What a child does; by itself nothing.
#[test]
#[ignore = "a child of the others"]
fn child() {
    let Some(Job { name, ranks, world, address }) = Job::here() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let devices = process::devices(&ranks);
        if !address.contains(':') {
            let id = if address == "-" {
                let id = UniqueId::new(devices[0].kind()).expect("an id");
                println!("id {}", hex(id));
                id
            } else {
                id_of(&address)
            };
            let connect = Communicator::builder(id, world).rank(ranks[0], &devices[0]).connect();
            let comm = within(connect).await.expect("a communicator");
            match &*name {
                "work" => work(&devices, &comm).await,
                _ => give_up(&devices, comm).await,
            }
            return;
        }
        let join = Group::join_ranks_within(LIMIT, &address, ranks, world);
        let group = within(join).await.expect("a group");
        let comm = within(group.connect(&devices)).await.expect("a communicator");
        comm.set_limit(Some(LIMIT));
        match &*name {
            "work" => work(&devices, &comm).await,
            "recover" => recover(&devices, group, comm).await,
            "stop" => stop(&group).await,
            "end" => end_behind_a_graph(devices, group, comm).await,
            _ => survive(&devices, &group, comm).await,
        }
    });
    println!("done");
}

/// The sum over all ranks, of which those of this process have a value each.
async fn sum(
    devices: &[Device],
    comm: &Communicator,
    value: impl Fn(usize) -> f32,
) -> gpu_await::Result<f32> {
    let ranks = comm.ranks();
    let full = |(device, rank): (&Device, &usize)| device.full(LEN, value(*rank)).queued();
    let mut x: Vec<_> = devices.iter().zip(&ranks).map(full).collect::<Result<_, _>>()?;
    comm.group(|g| {
        let mut ranks = ranks.iter().zip(&mut x);
        ranks.try_for_each(|(rank, x)| g.rank(*rank)?.all_reduce_in_place(x, Reduction::Sum))
    })
    .await?;
    let sums = devices[0].download(&x[0]).await?;
    assert!(sums.iter().all(|sum| *sum == sums[0]));
    Ok(sums[0])
}

async fn work(devices: &[Device], comm: &Communicator) {
    let (ranks, world) = (comm.ranks(), comm.world());
    for round in 0..100 {
        let value = |rank| (rank + round) as f32;
        let expected = (0..world).map(value).sum::<f32>();
        assert_eq!(within(sum(devices, comm, value)).await.expect("a sum"), expected);
        let (mut x, mut y) = (Vec::new(), Vec::new());
        for (rank, device) in ranks.iter().zip(devices) {
            x.push(device.full(LEN, value(*rank)).queued().expect("memory"));
            y.push(device.empty::<f32>(LEN).queued().expect("memory"));
        }
        let op = comm.group(|g| {
            for (rank, (x, y)) in ranks.iter().zip(x.iter().zip(&mut y)) {
                g.rank(*rank)?.send(x, (rank + 1) % world)?;
                g.rank(*rank)?.recv(y, (rank + world - 1) % world)?;
            }
            Ok(())
        });
        within(op).await.expect("a ring");
        for (rank, (device, y)) in ranks.iter().zip(devices.iter().zip(&y)) {
            let y = device.download(y).await.expect("a neighbour's");
            assert_eq!(y[LEN - 1], value((rank + world - 1) % world));
        }
    }
    within(barrier(comm)).await.expect("a barrier");
}

async fn barrier(comm: &Communicator) -> gpu_await::Result<()> {
    comm.group(|g| comm.ranks().into_iter().try_for_each(|rank| g.rank(rank)?.barrier())).await
}

/// Ends the process as soon as everything is dropped.
async fn end_behind_a_graph(devices: Vec<Device>, group: Group, comm: Communicator) {
    let device = &devices[0];
    let stream = device.stream().expect("a stream");
    let mut x = stream.full(LEN, 1.0f32).queued().expect("memory");
    let step = device.graph::<(InOut<f32>,), _, _>(comm, |q, comm, (mut x,)| {
        comm.in_graph(q)?.all_reduce_in_place(&mut x, Reduction::Average)
    });
    within(step.launch(&stream, (&mut x,))).await.expect("it runs");
    drop((step, x, stream, group, devices));
    println!("done");
    std::process::exit(0);
}

/// Works until the last rank, which is killed, does not come for a while.
async fn give_up(devices: &[Device], comm: Communicator) {
    let mut rounds = 0;
    while let Ok(Ok(sum)) =
        tokio::time::timeout(Duration::from_secs(5), sum(devices, &comm, |_| 1.0)).await
    {
        assert_eq!(sum, comm.world() as f32);
        rounds += 1;
        if rounds == 20 {
            println!("working");
        }
    }
    let rest = comm.world() - 1;
    let comm = within(comm.abort_and_shrink(&[rest])).await.expect("those who are left");
    comm.set_limit(Some(LIMIT));
    let sums = within(sum(devices, &comm, |_| 2.0)).await.expect("a sum");
    assert_eq!(sums, 2.0 * rest as f32);
    within(barrier(&comm)).await.expect("a barrier");
}

/// Works until processes are killed, and goes on with those that are left, until that has worked for a while.
async fn recover(devices: &[Device], group: Group, comm: Communicator) {
    let (all, mut rounds) = (comm.world(), 0);
    let (mut group, mut comm) = (group, comm);
    while rounds < 100 || comm.world() == all {
        (group, comm) = match within(sum(devices, &comm, |_| 1.0)).await {
            Ok(sum) => {
                assert_eq!(sum, comm.world() as f32);
                (group, comm)
            }
            Err(error) if Error::lost(&error).is_some() => {
                let lost = Error::lost(&error).expect("lost");
                assert!(matches!(lost.cause, LostCause::PeerGone { .. }), "{error}");
                assert!(group.gone().contains(&lost.origin()), "{error}, {:?}", group.gone());
                rounds = 20;
                within(group.recover(devices)).await.expect("those who are left")
            }
            Err(error) => panic!("{error}"),
        };
        rounds += 1;
        if rounds == 20 {
            println!("working");
        }
    }
    println!("a world of {:?}", group.original_ranks());
    within(barrier(&comm)).await.expect("a barrier");
    // Nobody leaves before all are done.
    within(barrier(&comm)).await.expect("a barrier");
}

/// Waits for a word, and goes on with those who call as well.
async fn stop(group: &Group) {
    println!("working");
    process::go();
    println!("calling");
    match within(group.survivors_within(Duration::from_secs(2))).await {
        Ok(rest) => println!("goes on in {:?}", rest.original_ranks()),
        Err(Error::Excluded { .. }) => println!("left out"),
        Err(error) => panic!("{error}"),
    }
}

/// Works until a process is killed, and then with those that are left.
async fn survive(devices: &[Device], group: &Group, comm: Communicator) {
    let mut rounds = 0;
    let error = loop {
        match within(sum(devices, &comm, |_| 1.0)).await {
            Ok(sum) => assert_eq!(sum, comm.world() as f32),
            Err(error) => break error,
        }
        rounds += 1;
        if rounds == 20 {
            println!("working");
        }
    };
    let cause = &Error::lost(&error).expect("the communicator is lost").cause;
    assert!(matches!(cause, LostCause::PeerGone { .. } | LostCause::PeerAborted { .. }), "{error}");
    let end = Instant::now() + LIMIT;
    while group.gone().is_empty() {
        assert!(Instant::now() < end, "its end is seen");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (rest, lost) = (group.without(&group.gone()).expect("others"), comm);
    let comm = within(rest.connect(devices)).await.expect("those who are left");
    comm.set_limit(Some(LIMIT));
    let expected = 2.0 * rest.world() as f32;
    assert_eq!(within(sum(devices, &comm, |_| 2.0)).await.expect("a sum"), expected);
    // And so does the communicator itself.
    let comm = within(lost.shrink(&group.gone())).await.expect("those who are left");
    assert_eq!(within(sum(devices, &comm, |_| 2.0)).await.expect("a sum"), expected);
    within(barrier(&comm)).await.expect("a barrier");
}
