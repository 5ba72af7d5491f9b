//! The memory that this process keeps for the processes of its workers: descriptors, and not one call of CUDA.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;

use gpu_await::{SharedDescriptors, SharedInfo};
use parking_lot::Mutex;

use crate::kept::{Asked, Kept, Key, Owner};
use crate::program;

static KEPT: Mutex<Kept<SharedDescriptors>> = Mutex::new(Kept::new());

/// Memory that is kept: see [`Host::keep`](crate::Host::keep).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeptMemory {
    /// The UUID of the GPU; `None` for the host device.
    pub gpu: Option<String>,
    /// The name that it was kept under.
    pub name: String,
    /// What it is.
    pub info: SharedInfo,
}

/// Returns what this process keeps for the processes of its workers; nothing in a fork, whose parent keeps it.
#[must_use]
pub fn kept() -> Vec<KeptMemory> {
    if program::is_fork() {
        return Vec::new();
    }
    let kept = KEPT.lock();
    let complete = kept.sealed_entries().filter_map(|((gpu, name), memory)| {
        let info = memory.info().ok()?;
        Some(KeptMemory { gpu: gpu.clone(), name: name.clone(), info })
    });
    complete.collect()
}

/// Keeps it no longer: the memory is free when no process maps it, and the next process that asks for it fills it. Returns whether there
/// was such memory.
pub fn forget_kept(gpu: Option<&str>, name: &str) -> bool {
    !program::is_fork() && forget(|(of, named)| of.as_deref() == gpu && named == name)
}

/// An error of the GPU's memory: what is kept there may be wrong.
pub(crate) fn forget_gpu(gpu: &Option<String>) {
    forget(|(of, _)| of == gpu);
}

fn forget(chosen: impl Fn(&Key) -> bool) -> bool {
    let gone = KEPT.lock().forget(chosen);
    !gone.is_empty()
}

/// What a process that asks gets: a number, and the descriptors of complete memory; none of memory to fill. `None`: it waits.
pub(crate) fn ask(key: &Key, asker: Owner, process: u32) -> Option<(u64, Vec<OwnedFd>)> {
    match KEPT.lock().ask(key, asker, process) {
        Asked::Fill(generation) => Some((generation, Vec::new())),
        // Without descriptors to spare it waits until there are.
        Asked::Sealed(generation, memory) => {
            let SharedDescriptors { memory, header } = memory.try_clone().ok()?;
            Some((generation, vec![memory, header]))
        }
        Asked::Wait => None,
    }
}

/// The number of the process that fills it.
pub(crate) fn filler(key: &Key) -> Option<u32> {
    KEPT.lock().filler(key)
}

/// A process sealed it; false if it was not to, or this is not what it says.
pub(crate) fn sealed(key: &Key, by: Owner, generation: u64, fds: Vec<OwnedFd>) -> bool {
    let Ok([memory, header]) = <[OwnedFd; 2]>::try_from(fds) else { return false };
    let descriptors = SharedDescriptors { memory, header };
    let is_sealed = descriptors.info().is_ok_and(|info| info.generation == generation);
    // What is not taken is closed outside of the lock.
    let taken = is_sealed.then(|| KEPT.lock().sealed(key, by, generation, descriptors));
    taken.is_some_and(|taken| taken.is_ok())
}

/// A process could not fill it.
pub(crate) fn not_filled(key: &Key, owner: Owner) -> bool {
    KEPT.lock().gone(owner, Some(key))
}

/// A process is gone, and with it what it filled.
pub(crate) fn gone(owner: Owner) -> bool {
    KEPT.lock().gone(owner, None)
}
