//! What the ranks of a communicator say when they come together, and what follows from it: the kind of their devices, NCCL's id, and for
//! a shrink, whether NCCL can do it for each of them.
#![forbid(unsafe_code)]

use gpu_await::DeviceKind;

use crate::error::{Error, Result};
use crate::mesh::Arrival;
use crate::unique_id::UniqueId;

/// What the ranks have said.
pub(super) struct Met {
    /// From rank 0; for GPUs.
    pub(super) id: UniqueId,
    /// NCCL can shrink the communicator for all of them.
    pub(super) shrink: bool,
}

/// What this process says. `shrink`: NCCL can shrink the communicator here.
pub(super) fn hello(ranks: &[usize], is_gpu: bool, shrink: bool) -> Result<Arrival> {
    let id = match is_gpu && ranks.contains(&0) {
        true => UniqueId::new(DeviceKind::Cuda)?,
        false => UniqueId::of_group(),
    };
    Ok(Arrival { ranks: ranks.to_vec(), is_gpu, shrink, id })
}

/// What follows from what all ranks have said.
pub(super) fn met(own: &Arrival, hellos: &[Arrival]) -> Result<Met> {
    if let Some(other) = hellos.iter().find(|other| other.is_gpu != own.is_gpu) {
        let name = |hello: &Arrival| {
            let kind = if hello.is_gpu { "a GPU" } else { "a host device" };
            format!("{kind} (rank {})", hello.ranks[0])
        };
        return Err(Error::MixedDevices { first: name(own), second: name(other) });
    }
    let zero = hellos.iter().find(|hello| hello.ranks.contains(&0));
    let id = zero.map_or(own.id, |zero| zero.id);
    Ok(Met { id, shrink: hellos.iter().all(|hello| hello.shrink) })
}
