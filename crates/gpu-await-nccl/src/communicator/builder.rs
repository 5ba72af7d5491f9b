//! [`CommunicatorBuilder`]: the local ranks of a communicator, its options, and connecting it.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use gpu_await::{Device, DeviceBuffer, DeviceKind};

use super::meeting::{self, Met};
use super::shared::{Origin, Shared};
use super::shrink::Parent;
use super::{Communicator, context_of, warm_up};
use crate::error::{Error, Result};
use crate::mesh::{Channel, Mesh};
use crate::patience::Patience;
use crate::rendezvous::{Meeting, check_ranks};
use crate::stats;
use crate::transport::gpu::GpuTransport;
use crate::transport::host::HostTransport;
use crate::transport::{LocalRank, Transport};
use crate::unique_id::UniqueId;

/// Long enough for a process that loads a model first.
const CONNECT: Duration = Duration::from_secs(120);
/// Extra time for the end of a meeting, whose error says more than that of its thread.
const GRACE: Duration = Duration::from_secs(1);

/// The local ranks and the options of a communicator; see [`Communicator::builder`].
#[derive(Debug)]
#[must_use = "`connect` makes the communicator"]
pub struct CommunicatorBuilder {
    id: UniqueId,
    world: usize,
    ranks: Vec<(usize, Device)>,
    limit: Option<Duration>,
    connect_limit: Duration,
    connects_pairs: bool,
    /// For a group: how its other ranks are reached.
    channel: Option<Arc<Channel>>,
    /// For a group: the ranks of this process, and how many devices were given for them.
    joined: Option<(Vec<usize>, usize)>,
    /// The communicator that NCCL makes it from.
    parent: Option<Arc<Parent>>,
}

impl CommunicatorBuilder {
    pub(super) fn new(id: UniqueId, world: usize) -> Self {
        let (ranks, limit, connect_limit, channel) = (Vec::new(), None, CONNECT, None);
        let (connects_pairs, joined, parent) = (false, None, None);
        CommunicatorBuilder {
            id,
            world,
            ranks,
            limit,
            connect_limit,
            connects_pairs,
            channel,
            joined,
            parent,
        }
    }

    /// Of a world in which this process has these ranks, and a device for each.
    pub(crate) fn of(
        mut self,
        ranks: Vec<usize>,
        devices: &[Device],
        channel: Option<Arc<Channel>>,
    ) -> Self {
        self.channel = channel;
        self.ranks.extend(ranks.iter().copied().zip(devices.iter().cloned()));
        self.joined = Some((ranks, devices.len()));
        self
    }

    /// With the options of the communicator that it is made from.
    pub(super) fn like(mut self, shared: &Shared) -> Self {
        let Origin { channel: _, connect_limit, pairs } = shared.origin;
        (self.limit, self.connect_limit, self.connects_pairs) =
            (shared.limit(), connect_limit, pairs);
        self
    }

    pub(super) fn shrunk(mut self, parent: Option<Arc<Parent>>) -> Self {
        self.parent = parent;
        self
    }

    /// Adds a rank in this process. Each rank needs a GPU of its own; host devices can be shared. The ranks of a
    /// [group](crate::Group) are there from the start.
    pub fn rank(mut self, rank: usize, device: &Device) -> Self {
        self.ranks.push((rank, device.clone()));
        self
    }

    /// Sets how long an operation may be pending; see [`Communicator::set_limit`]. None by default.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Sets how long [`connect`](Self::connect) waits for the other ranks; two minutes by default.
    pub fn connect_limit(mut self, limit: Duration) -> Self {
        self.connect_limit = limit;
        self
    }

    /// Also connects every two ranks for [`send`](Communicator::send), [`recv`](Communicator::recv) and
    /// [`all_to_all`](Communicator::all_to_all), so that the first of them does not block. NCCL takes device memory for each
    /// pair. By default a pair is connected when it is first used.
    pub fn connect_pairs(mut self) -> Self {
        self.connects_pairs = true;
        self
    }

    /// Connects the communicator. Resolves when every rank is connected. On GPUs a few small and large collectives have run by
    /// then, so that the first ones of the program do not have to wait for connections.
    ///
    /// On GPUs it [enables peer access](Device::enable_peer) between the devices of the builder. Buffers that are
    /// [adopted](Device::adopt_memory), and devices of the same process in another builder, must be accessible to the peers already.
    ///
    /// All ranks must connect concurrently: local ranks in one builder, or from concurrent tasks. Processes that share several
    /// communicators make them in the same order.
    ///
    /// # Blocking
    /// None: threads of the crate wait. NCCL allocates device memory, which waits for running kernels.
    ///
    /// # Cancel safety
    /// If the future is dropped while ranks are missing, this process gives up: the others wait for its next `connect`. Later,
    /// the communicator is still connected, for the sake of the other ranks, and then ended.
    ///
    /// # Errors
    /// Before anything is done: [`Error::NoRanks`], [`Error::WorldTooLarge`], [`Error::BadRank`], [`Error::DuplicateRank`],
    /// [`Error::DuplicateDevice`], [`Error::DeviceCount`], [`Error::NotLocal`], [`Error::MixedDevices`], [`Error::VerifyMode`], [`Error::BadId`],
    /// [`Error::NoLibrary`], [`Error::OldLibrary`]. Then [`Error::Nccl`], [`Error::NotConnected`]; for the host twin and for a group
    /// [`Error::MissingRanks`], [`Error::WrongWorld`], [`Error::DuplicateRank`]; [`Error::Lost`]: a rank of a group has ended.
    pub async fn connect(self) -> Result<Communicator> {
        let kind = self.check()?;
        let CommunicatorBuilder {
            id,
            world,
            ranks,
            limit,
            connect_limit,
            connects_pairs,
            channel,
            parent,
            ..
        } = self;
        let (mut locals, mut contexts) = (Vec::new(), Vec::new());
        let (mut scratch, mut order) = (Vec::new(), Vec::new());
        for (rank, device) in ranks {
            let stream = device.stream()?;
            scratch.push(stream.zeros::<f32>(1).queued()?);
            order.push(stream.zeros::<u8>(1).queued()?);
            if kind == DeviceKind::Cuda {
                contexts.push(context_of(&stream)?);
            }
            locals.push(LocalRank { rank, device, stream });
        }
        if kind == DeviceKind::Cuda {
            let devices: Vec<_> = locals.iter().map(|local| local.device.clone()).collect();
            enable_peers(&devices).await?;
        }
        let (pairs, scratch) = (connects_pairs, (scratch, order));
        let make = move |patience: &Patience| {
            let patience = patience.clone();
            let made =
                Making { id, world, locals, scratch, contexts, channel, patience, pairs, parent };
            made.within(connect_limit)
        };
        let comm = Patience::of(connect_limit).on_thread("connect", make).await?;
        comm.set_limit(limit);
        Ok(comm)
    }

    fn check(&self) -> Result<DeviceKind> {
        let CommunicatorBuilder { world, ref ranks, .. } = *self;
        if let Some((local, devices)) = &self.joined {
            if local.len() != *devices {
                return Err(Error::DeviceCount { ranks: local.clone(), devices: *devices });
            }
            if let Some((rank, _)) = ranks.iter().find(|(rank, _)| !local.contains(rank)) {
                return Err(Error::NotLocal { rank: *rank, local: local.clone() });
            }
        }
        let local: Vec<usize> = ranks.iter().map(|(rank, _)| *rank).collect();
        check_ranks(&local, world)?;
        if ranks.len() > 1 && ranks.iter().any(|(_, device)| device.verifies()) {
            return Err(Error::VerifyMode { ranks: local });
        }
        let ((_, first), mut gpus) = (&ranks[0], HashMap::new());
        for (rank, device) in ranks {
            if device.kind() != first.kind() {
                let (first, second) = (first.to_string(), device.to_string());
                return Err(Error::MixedDevices { first, second });
            }
            if device.kind() == DeviceKind::Cuda
                && let Some(first) = gpus.insert(device.ordinal(), *rank)
            {
                let (second, device) = (*rank, device.to_string());
                return Err(Error::DuplicateDevice { first, second, device });
            }
        }
        match first.kind() {
            // Its ranks know one another, or have a channel.
            _ if self.channel.is_some() || self.parent.is_some() => {}
            DeviceKind::Cuda => self.id.for_gpus().map(drop)?,
            _ => self.id.place().map(drop)?,
        }
        Ok(first.kind())
    }
}

/// Lets the GPUs of a process reach each other's memory: within a process NCCL's kernels access the buffers of other ranks
/// directly, and a pool's memory is not accessible to other GPUs at first.
async fn enable_peers(devices: &[Device]) -> Result<()> {
    for from in devices {
        for to in devices.iter().filter(|to| to.ordinal() != from.ordinal()) {
            // Where they cannot, NCCL goes through the host.
            let _reaches = from.enable_peer(to).await?;
        }
    }
    Ok(())
}

/// A communicator that is being made.
struct Making {
    id: UniqueId,
    world: usize,
    locals: Vec<LocalRank>,
    scratch: (Vec<DeviceBuffer<f32>>, Vec<DeviceBuffer<u8>>),
    /// The devices' contexts; for GPUs.
    contexts: Vec<u64>,
    channel: Option<Arc<Channel>>,
    patience: Patience,
    pairs: bool,
    parent: Option<Arc<Parent>>,
}

impl Making {
    /// Makes it on a thread of its own, which is lost if NCCL waits forever.
    fn within(self, limit: Duration) -> Result<Communicator> {
        if self.contexts.is_empty() {
            return self.make();
        }
        let (send, receive) = sync_channel(1);
        let parent = self.parent.clone();
        // The group itself reports its missing ranks.
        let wait = limit.saturating_add(self.channel.as_ref().map_or(Duration::ZERO, |_| GRACE));
        stats::on_thread_that_may_be_lost("init", move || {
            // If the caller has given up, the communicator is dropped, and ended.
            drop(send.send(self.make()));
        });
        match receive.recv_timeout(wait) {
            Ok(made) => made,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                if let Some(parent) = parent {
                    parent.is_stuck(limit);
                }
                Err(Error::NotConnected { limit })
            }
        }
    }

    fn make(self) -> Result<Communicator> {
        let Making { id, world, locals, scratch, contexts, channel, patience, pairs, parent } =
            self;
        let ranks: Vec<usize> = locals.iter().map(|local| local.rank).collect();
        let (is_gpu, end, shrink) = (!contexts.is_empty(), patience.end, parent.is_some());
        let channel = match channel {
            None if !is_gpu => Some(meet(id, &ranks, world, &patience)?),
            channel => channel,
        };
        let (Met { id, shrink }, channel) = match channel {
            None => (Met { id, shrink }, None),
            Some(channel) => {
                let own = meeting::hello(&ranks, is_gpu, shrink)?;
                let (hellos, channel) = channel.gather(&own, &patience)?;
                (meeting::met(&own, &hellos)?, Some(channel))
            }
        };
        let connect_limit = patience.limit;
        let origin = Origin { channel: channel.clone(), connect_limit, pairs };
        let transport: Box<dyn Transport> = match (channel, parent.filter(|_| shrink)) {
            (channel, Some(parent)) => parent.shrink(&locals, (world, contexts), channel, end)?,
            (Some(channel), None) if !is_gpu => Box::new(HostTransport::new(channel, world, ranks)),
            (channel, None) => {
                Box::new(GpuTransport::connect(id.for_gpus()?, world, &locals, contexts, channel)?)
            }
        };
        let shared: Arc<Shared> = Shared::new(world, locals, (transport, origin), scratch);
        let comm = Communicator::of(shared);
        if is_gpu {
            comm.set_limit(Some(patience.rest()));
            warm_up::connect_all(&comm, pairs)?;
        }
        Ok(comm)
    }
}

/// Blocks until the processes with the ranks of an id are connected with one another.
fn meet(id: UniqueId, ranks: &[usize], world: usize, patience: &Patience) -> Result<Arc<Channel>> {
    let meeting = Meeting::of_id(id.place()?, ranks.to_vec(), world, patience.clone());
    let mesh = Mesh::new(ranks.to_vec(), meeting.meet()?)?;
    Ok(mesh.open_next(0, &(0..world).collect()))
}
