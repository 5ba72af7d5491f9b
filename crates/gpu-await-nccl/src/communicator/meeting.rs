//! How the ranks of a group's communicator come together: each tells every rank of another process that it is there and what its
//! device is, and the rank 0 what NCCL's id is. Of a communicator that shrinks, each says whether NCCL can do that for it.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_await::DeviceKind;

use crate::call::Head;
use crate::error::{CollectiveLost, Error, Result};
use crate::exchange::{Message, Wire};
use crate::unique_id::UniqueId;

/// No verb has it.
const HELLO: u8 = 200;

/// What the ranks have told.
pub(super) struct Met {
    /// Of rank 0; for GPUs.
    pub(super) id: UniqueId,
    /// All of them can have NCCL shrink a communicator.
    pub(super) shrink: bool,
}

/// Waits until every rank has come. `shrink`: this process can have NCCL shrink the communicator.
pub(super) fn meet(
    wire: &dyn Wire,
    ranks: &[usize],
    world: usize,
    (is_gpu, mut shrink): (bool, bool),
    (end, limit): (Instant, Duration),
) -> Result<Met> {
    let own = match is_gpu && ranks.contains(&0) {
        true => UniqueId::new(DeviceKind::Cuda)?,
        false => UniqueId::of_group(),
    };
    let (reduction, root, count) = (u8::from(shrink), 0, world as u64);
    let head = Head { verb: HELLO, element: u8::from(is_gpu), reduction, root, count };
    let data: Arc<[u8]> = own.to_bytes().into();
    // Each of this process with each of another one.
    let pairs = || {
        let others = (0..world).filter(|peer| !ranks.contains(peer));
        others.flat_map(|peer| ranks.iter().map(move |rank| (*rank, peer)))
    };
    let lost = |cause| Error::Lost(CollectiveLost { rank: ranks[0], cause });
    for (rank, peer) in pairs() {
        wire.send(rank, peer, Message { head, data: data.clone() }).map_err(lost)?;
    }
    let (mut id, mut missing) = (own, BTreeSet::new());
    for (rank, peer) in pairs() {
        let inbox = wire.inbox(rank);
        let message = match inbox.receive_until(peer, Some(end)) {
            Ok(message) => message,
            Err(Some(cause)) => return Err(lost(cause)),
            Err(None) => {
                missing.insert(peer);
                continue;
            }
        };
        shrink &= message.head.reduction == 1;
        if message.head.element != head.element {
            let name = |gpu: bool| if gpu { "a GPU" } else { "a host device" };
            let (first, second) = (name(is_gpu), name(message.head.element != 0));
            let (first, second) =
                (format!("{first} (rank {rank})"), format!("{second} (rank {peer})"));
            return Err(Error::MixedDevices { first, second });
        }
        if let (0, Ok(bytes)) = (peer, (*message.data).try_into()) {
            id = UniqueId::from_bytes(bytes);
        }
    }
    if missing.is_empty() {
        return Ok(Met { id, shrink });
    }
    Err(Error::MissingRanks { missing: missing.into_iter().collect(), world, limit })
}
