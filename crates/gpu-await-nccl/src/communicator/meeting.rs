//! How the ranks of a group's communicator come together: each tells every other one that it is there and what its device is, and
//! the rank 0 what NCCL's id is.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_await::DeviceKind;

use crate::call::Head;
use crate::error::{CollectiveLost, Error, Result};
use crate::exchange::{Message, Wire};
use crate::unique_id::UniqueId;

/// No verb has it.
const HELLO: u8 = 200;

/// Waits until every rank has come; returns the id of the rank 0.
pub(super) fn meet(
    wire: &dyn Wire,
    rank: usize,
    world: usize,
    is_gpu: bool,
    (end, limit): (Instant, Duration),
) -> Result<UniqueId> {
    let kind = if is_gpu { DeviceKind::Cuda } else { DeviceKind::Host };
    let own = if rank == 0 { UniqueId::new(kind)? } else { UniqueId::of_group() };
    let (reduction, root, count) = (u8::MAX, 0, world as u64);
    let head = Head { verb: HELLO, element: u8::from(is_gpu), reduction, root, count };
    let data: Arc<[u8]> = own.to_bytes().into();
    let others = || (0..world).filter(|peer| *peer != rank);
    let lost = |cause| Error::Lost(CollectiveLost { rank, cause });
    for peer in others() {
        wire.send(rank, peer, Message { head, data: data.clone() }).map_err(lost)?;
    }
    let (inbox, mut id, mut missing) = (wire.inbox(rank), own, Vec::new());
    for peer in others() {
        let message = match inbox.receive_until(peer, Some(end)) {
            Ok(message) => message,
            Err(Some(cause)) => return Err(lost(cause)),
            Err(None) => {
                missing.push(peer);
                continue;
            }
        };
        if message.head != head {
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
    if missing.is_empty() { Ok(id) } else { Err(Error::MissingRanks { missing, world, limit }) }
}
