//! [`Group`]: a TCP rendezvous of processes, each with one rank or several.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::communicator::Communicator;
use crate::communicator::builder::CommunicatorBuilder;
use crate::error::{Error, Result};
use crate::local::LocalDevices;
use crate::mesh::Mesh;
use crate::patience::Patience;
use crate::rendezvous::{Meeting, check_ranks};
use crate::unique_id::UniqueId;

/// How long [`Group::join`] waits.
const LIMIT: Duration = Duration::from_secs(60);

/// Processes that have joined at one address, each with one or more ranks, on one or more hosts.
///
/// The group keeps a connection between every two processes. It carries NCCL's unique ids and, for host devices, the elements. It also
/// detects peers that die, which NCCL does not always do. Communicators with that rank are then lost with
/// [`PeerGone`](crate::LostCause::PeerGone), on every rank:
///
/// | a peer | is found |
/// |---|---|
/// | whose process ends | at once |
/// | whose host is down or cut off | when 15 s have passed without an acknowledgement, on Linux |
/// | that is alive and stopped (`SIGSTOP`, a debugger, a full host), or behind a proxy that stalls | never: its kernel answers for it. Set a [limit](Communicator::set_limit) |
///
/// [`recover`](Self::recover) continues with the ranks that are left. A process that restarts cannot enter the recovered group:
/// for that all of them [join](Self::join) again.
///
/// When the last handle is dropped, the connections end. A peer that is stopped keeps a thread and a descriptor until it continues or dies.
///
/// The processes trust one another, and anyone who can reach the address: use a private network.
///
/// # Examples
/// Two ranks, as tasks of one process:
/// ```
/// # futures::executor::block_on(async {
/// use gpu_await::Device;
/// use gpu_await_nccl::{Group, Reduction};
/// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
/// # let address = &format!("127.0.0.1:{port}");
/// let rank = async |rank| {
///     let group = Group::join(address, rank, 2).await?; // "10.0.0.1:29500"
///     let device = Device::host();
///     let comm = group.connect(&device).await?;
///     let mut x = device.full(4, rank as f32 + 1.0).queued()?;
///     comm.all_reduce_in_place(&mut x, Reduction::Sum).await?;
///     Ok::<_, gpu_await_nccl::Error>(device.download(&x).await?)
/// };
/// let (zero, one) = futures::try_join!(rank(0), rank(1))?;
/// assert_eq!((&zero[..], &one[..]), (&[3.0; 4][..], &[3.0; 4][..]));
/// # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
/// ```
/// A process that owns two devices joins with two ranks, and calls for each of them in a [group](Communicator::group):
/// ```
/// # futures::executor::block_on(async {
/// use gpu_await::Device;
/// use gpu_await_nccl::{Communicator, Group, Reduction};
/// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
/// # let address = &format!("127.0.0.1:{port}");
/// let process = async |first: usize| {
///     let group = Group::join_ranks(address, first..first + 2, 4).await?;
///     let devices = [Device::host(), Device::host()];
///     let comm = group.connect(&devices).await?;
///     let mut x = Vec::new();
///     for (rank, device) in group.ranks().into_iter().zip(&devices) {
///         x.push(device.full(4, rank as f32).queued()?);
///     }
///     comm.group(|g| {
///         let mut calls = group.ranks().into_iter().zip(&mut x);
///         calls.try_for_each(|(rank, x)| g.rank(rank)?.all_reduce_in_place(x, Reduction::Sum))
///     })
///     .await?;
///     Ok::<_, gpu_await_nccl::Error>(devices[1].download(&x[1]).await?)
/// };
/// let (first, second) = futures::try_join!(process(0), process(2))?;
/// assert_eq!((&first[..], &second[..]), (&[6.0; 4][..], &[6.0; 4][..]));
/// # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct Group {
    mesh: Arc<Mesh>,
    /// The agreement that the members come from; 0 is none.
    epoch: u64,
    /// Ranks of the mesh, indexed by the ranks here; in ascending order.
    members: Arc<[usize]>,
}

impl Group {
    /// Joins the other processes at `address` (`host:port`), where rank 0 listens. Resolves when all ranks are connected; gives up
    /// after a minute.
    ///
    /// # Cancel safety If the future is dropped, this process gives up, and rank 0 waits for its next attempt; but if all have come already
    /// and are connecting, which takes milliseconds, all of them end with [`Error::Closed`], or with a group from which this process is
    /// [gone](Self::gone). If rank 0 gives up, so do the others.
    ///
    /// # Errors
    /// - [`Error::NoRanks`], [`Error::BadRank`]: a world without ranks, or a rank outside of it.
    /// - [`Error::Address`]: the address does not resolve, or rank 0 cannot listen there.
    /// - [`Error::Closed`]: nothing listened at the address until the limit, or rank 0 disconnected, as it does when this process has not
    ///   identified itself within two seconds.
    /// - [`Error::MissingRanks`]: some ranks did not join in time; it names them.
    /// - [`Error::DuplicateRank`], [`Error::WrongWorld`]: this process joined with a rank that is taken, or a different world size.
    pub async fn join(address: &str, rank: usize, world: usize) -> Result<Group> {
        Group::join_within(LIMIT, address, rank, world).await
    }

    /// [`join`](Self::join) with another limit.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub async fn join_within(
        limit: Duration,
        address: &str,
        rank: usize,
        world: usize,
    ) -> Result<Group> {
        Group::join_ranks_within(limit, address, [rank], world).await
    }

    /// [`join`](Self::join) for a process that has several ranks, one for each of its devices: `4..8`, `[1, 5]`. The process
    /// with rank 0 listens; other processes may have any number of ranks.
    ///
    /// # Errors
    /// As [`join`](Self::join). [`Error::NoRanks`], [`Error::DuplicateRank`]: no ranks, or one of them twice.
    pub async fn join_ranks(
        address: &str,
        ranks: impl IntoIterator<Item = usize>,
        world: usize,
    ) -> Result<Group> {
        Group::join_ranks_within(LIMIT, address, ranks, world).await
    }

    /// [`join_ranks`](Self::join_ranks) with another limit.
    ///
    /// # Errors
    /// As [`join_ranks`](Self::join_ranks).
    pub async fn join_ranks_within(
        limit: Duration,
        address: &str,
        ranks: impl IntoIterator<Item = usize>,
        world: usize,
    ) -> Result<Group> {
        // One rank too many is enough to detect an excess.
        let ranks: Vec<usize> = ranks.into_iter().take(world.saturating_add(1)).collect();
        check_ranks(&ranks, world)?;
        let address = address.to_owned();
        let meet = move |patience: &Patience| {
            let meeting = Meeting::at(address, ranks.clone(), world, patience.clone());
            Mesh::new(ranks, meeting.meet()?)
        };
        let mesh = Patience::of(limit).on_thread("rendezvous", meet).await?;
        Ok(Group { mesh, epoch: 0, members: (0..world).collect() })
    }

    /// Returns the rank of this process: the first one if there are several.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.ranks().first().copied().unwrap_or_default()
    }

    /// Returns the ranks of this process, in the order in which they joined.
    #[must_use]
    pub fn ranks(&self) -> Vec<usize> {
        let rank_of = |own| self.members.binary_search(own).ok();
        self.mesh.own().iter().filter_map(rank_of).collect()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.members.len()
    }

    /// Returns the rank that each rank joined with, by its rank now: `original_ranks()[rank]`, in ascending order. A group that has just joined
    /// has `0..world`. A rank keeps its original number however often others are left out ([`recover`](Self::recover),
    /// [`survivors`](Self::survivors), [`without`](Self::without)), so it tells whose data is still there when a program redistributes data.
    ///
    /// # Examples
    /// Rank 1 of three has left, and others take over its data:
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::Device;
    /// use gpu_await_nccl::Group;
    /// # let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    /// # let address = &format!("127.0.0.1:{port}");
    /// let join = |rank| Group::join(address, rank, 3);
    /// let (zero, one, two) = futures::try_join!(join(0), join(1), join(2))?;
    /// drop(one);
    /// let device = Device::host();
    /// let ((group, _comm), _) = futures::try_join!(zero.recover(&device), two.recover(&device))?;
    /// assert_eq!(group.original_ranks(), [0, 2]);
    /// let is_gone = |rank: &usize| !group.original_ranks().contains(rank);
    /// assert_eq!((0..3).filter(is_gone).collect::<Vec<_>>(), [1]);
    /// # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn original_ranks(&self) -> Vec<usize> {
        self.members.to_vec()
    }

    /// Returns the ranks whose processes have died, are unreachable, have left the group, or were left out when the others
    /// [recovered](Self::recover), as far as this process knows. A rank that a lost communicator names as
    /// [gone](crate::LostCause::PeerGone) is among them when its operations fail. Other processes may know of more, or not yet of
    /// these: [`recover`](Self::recover) reaches agreement.
    #[must_use]
    pub fn gone(&self) -> Vec<usize> {
        let ended = self.mesh.ended();
        let is_gone = |rank: &usize| ended.binary_search(&self.members[*rank]).is_ok();
        (0..self.world()).filter(is_gone).collect()
    }

    /// Connects a communicator of all ranks, in which this process has `&device`, or `&devices` in the order of its
    /// [ranks](Self::ranks); see [`builder`](Self::builder).
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::connect`].
    pub async fn connect<'d>(&self, devices: impl LocalDevices<'d>) -> Result<Communicator> {
        self.builder(devices).connect().await
    }

    /// Starts building a communicator of all ranks, in which this process has `&device`, or `&devices` in the order of its
    /// [ranks](Self::ranks). A group can have any number of communicators; every process makes them in the same order.
    /// [`connect`](CommunicatorBuilder::connect) reports too few or too many devices.
    pub fn builder<'d>(&self, devices: impl LocalDevices<'d>) -> CommunicatorBuilder {
        let channel = self.mesh.open_next(self.epoch, &self.members);
        let builder = Communicator::builder(UniqueId::of_group(), self.world());
        builder.of(self.ranks(), devices.into_devices(), Some(channel))
    }

    /// Agrees with the other processes on the ranks that are left, and connects a communicator of them; this process has `&device`, or
    /// `&devices`, as in [`connect`](Self::connect). For when a communicator was lost: every remaining process calls it, on a group of
    /// the same ranks. Processes that die meanwhile are left out as well.
    ///
    /// Returns the group of the ranks that are left, too. They keep their order and are renumbered from 0, also in the errors of the new
    /// communicator; [`original_ranks`](Self::original_ranks) says who they were.
    /// The communicator is new: it has no [limit](Communicator::set_limit) until it gets one, and no
    /// [connected pairs](CommunicatorBuilder::connect_pairs). For one with options of its own call [`survivors`](Self::survivors), and
    /// then [`builder`](Self::builder) of the group that it returns.
    ///
    /// # Ranks that do not call
    /// Ranks that are alive but do not call within a minute, because their process is stopped for example, are left out, and told so: when they
    /// call, they get [`Error::Excluded`]. The others go on when those know it, or have been stopped for three seconds more. So every process that
    /// calls ends in the same group, or with that error. Only processes that can no longer reach one another end in two groups: a program that
    /// needs a quorum checks [`world`](Self::world).
    ///
    /// # Cancel safety
    /// If the future is dropped, this process gives up. The others wait for its next call, and leave it out at their limit. If they have
    /// connected already, their communicator is lost by [`PeerLeft`](crate::LostCause::PeerLeft), and they recover again.
    ///
    /// # Errors
    /// As [`survivors`](Self::survivors) and [`connect`](Self::connect); errors of the devices are found before anything is done.
    /// [`Error::MissingRanks`]: a rank agreed, and did not connect. Call again on the same group, as the others do too: a rank that does
    /// not is left out.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await::Device;
    /// # use gpu_await_nccl::{Error, Group};
    /// # let device = Device::host();
    /// # let group = Group::join("127.0.0.1:0", 0, 1).await?;
    /// # let comm = group.connect(&device).await?;
    /// # let gradients_are_reduced = comm.barrier();
    /// let (group, comm) = match gradients_are_reduced.await {
    ///     Err(_) if comm.lost().is_some() => group.recover(&device).await?,
    ///     _ => (group, comm),
    /// };
    /// # Ok::<(), Error>(()) }).unwrap();
    /// ```
    pub async fn recover<'d>(
        &self,
        devices: impl LocalDevices<'d>,
    ) -> Result<(Group, Communicator)> {
        self.recover_within(LIMIT, devices).await
    }

    /// [`recover`](Self::recover) with another limit: how long it waits for the others to call, then for those to agree, and then to
    /// connect. A process that dies in between restarts it.
    ///
    /// # Errors
    /// As [`recover`](Self::recover).
    pub async fn recover_within<'d>(
        &self,
        limit: Duration,
        devices: impl LocalDevices<'d>,
    ) -> Result<(Group, Communicator)> {
        let devices = devices.into_devices();
        // Otherwise others would wait for a communicator that this process cannot connect.
        let (ranks, count) = (self.ranks(), devices.len());
        if ranks.len() != count {
            return Err(Error::DeviceCount { ranks, devices: count });
        }
        devices.iter().try_for_each(|device| device.stream().map(drop))?;
        let _one = self.mesh.call()?;
        let recover_once = async || {
            let group = self.agree_within(limit).await?;
            let comm = group.builder(devices).connect_limit(limit).connect().await;
            let rank_of =
                |rank: usize| self.members.partition_point(|own| *own < group.members[rank]);
            let comm = comm.map_err(|error| error.of_call(limit, self.world(), rank_of))?;
            Ok((group, comm))
        };
        for _ in 1..self.world() {
            match recover_once().await {
                // Another process has died since: all of them begin again.
                Err(Error::Lost(_)) => {}
                recovered => return recovered,
            }
        }
        recover_once().await
    }

    /// Agrees with the other processes on the ranks that are left, and returns their group ([who they were](Self::original_ranks)). Every
    /// remaining process calls it, on a group of the same ranks. A rank that one of them considers gone is gone for all, and so is one
    /// that [does not call](Self#ranks-that-do-not-call) within a minute. A process that dies after the agreement is in the group:
    /// [`recover`](Self::recover) also connects, and then begins again.
    ///
    /// # Cancel safety
    /// If the future is dropped, this process gives up. The others wait for its next call, and leave it out at their limit.
    ///
    /// # Errors
    /// [`Error::Excluded`]: the others go on without this process. One of them cannot reach it, or it did not call in time.
    /// [`Error::Recovering`]: this process has made such a call already, which is still running.
    pub async fn survivors(&self) -> Result<Group> {
        self.survivors_within(LIMIT).await
    }

    /// [`survivors`](Self::survivors) with another limit: how long it waits for the others to call, and then again for those that have
    /// called to agree. If the limit is shorter than the time between two processes' calls, the first caller leaves the other out.
    ///
    /// # Errors
    /// As [`survivors`](Self::survivors).
    pub async fn survivors_within(&self, limit: Duration) -> Result<Group> {
        let _one = self.mesh.call()?;
        self.agree_within(limit).await
    }

    async fn agree_within(&self, limit: Duration) -> Result<Group> {
        let (mesh, members) = (self.mesh.clone(), self.members.clone());
        let agree = move |patience: &Patience| mesh.agree(&members, patience);
        let (members, epoch) = Patience::of(limit).on_thread("survivors", agree).await?;
        Ok(Group { mesh: self.mesh.clone(), epoch, members: members.into() })
    }

    /// Returns the group without some ranks, so that the others can continue together: to release the devices of these ranks, or
    /// because they are [gone](Self::gone). Each of them calls it with the same ranks; [`recover`](Self::recover) agrees on them
    /// first. The remaining ranks keep their order and are renumbered from 0.
    ///
    /// A rank that is left out is not told, and the others are not asked. Do not leave out ranks only because this process has waited for them in
    /// vain: others may have waited for different ones. [`recover`](Self::recover) handles that, and tells them.
    ///
    /// # Errors
    /// [`Error::BadRank`]: a rank that does not exist. [`Error::NoRanks`]: none of this process's own ranks remains.
    pub fn without(&self, ranks: &[usize]) -> Result<Group> {
        let world = self.world();
        if let Some(rank) = ranks.iter().copied().find(|rank| *rank >= world) {
            return Err(Error::BadRank { rank, world });
        }
        if self.ranks().iter().all(|own| ranks.contains(own)) {
            let left = (0..world).filter(|rank| !ranks.contains(rank)).count();
            return Err(Error::NoRanks { world: left, local: 0 });
        }
        let is_left = |(rank, member): (usize, &usize)| (!ranks.contains(&rank)).then_some(*member);
        let members = self.members.iter().enumerate().filter_map(is_left).collect();
        Ok(Group { mesh: self.mesh.clone(), epoch: self.epoch, members })
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, original) = (self.ranks(), &self.members);
        f.debug_struct("Group").field("ranks", &ranks).field("original_ranks", original).finish()
    }
}
