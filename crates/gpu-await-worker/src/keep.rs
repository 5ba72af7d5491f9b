//! Memory that this process keeps for its workers' processes: descriptors only, without a single CUDA call.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_await::{SharedDescriptors, SharedInfo};
use gpu_await_protocol::lock::Mutex;

use crate::kept::{Asked, Kept, Key, Owner};
use crate::mutable::{Given, Mutable};
use crate::program;
use crate::system;
use crate::watch::Ends;

static KEPT: Mutex<Kept<SharedDescriptors>> = Mutex::new(Kept::new());

/// Memory that processes may write; for a process that is gone, also the socket it shared with its forks.
static MUTABLE: Mutex<Mutable<SharedDescriptors, Arc<Ends>>> = Mutex::new(Mutable::new());

/// How long something that a process left behind may hold its memory before that is given up.
const SETTLES: Duration = Duration::from_secs(5);

/// Memory that is kept: see [`Host::keep`](crate::Host::keep) and [`Host::keep_mut`](crate::Host::keep_mut).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeptMemory {
    /// The UUID of the GPU; `None` for the host device.
    pub gpu: Option<String>,
    /// The name that it was kept under.
    pub name: String,
    /// Its description.
    pub info: SharedInfo,
}

/// Returns what this process keeps for the processes of its workers; nothing in a fork, whose parent keeps it.
#[must_use]
pub fn kept() -> Vec<KeptMemory> {
    if program::is_fork() {
        return Vec::new();
    }
    let (kept, mutable) = (KEPT.lock(), MUTABLE.lock());
    let all = kept.sealed_entries().chain(mutable.entries());
    let complete = all.filter_map(|((gpu, name), memory)| {
        let info = memory.info().ok()?;
        Some(KeptMemory { gpu: gpu.clone(), name: name.clone(), info })
    });
    complete.collect()
}

/// Stops keeping it: the memory is freed when no process maps it, and the next process that asks for it fills it. Returns whether there
/// was such memory. Memory that a process may [write](crate::Host::keep_mut) belongs to that process until it is gone, and is not forgotten before.
pub fn forget_kept(gpu: Option<&str>, name: &str) -> bool {
    !program::is_fork() && forget(|(of, named)| of.as_deref() == gpu && named == name)
}

/// After an error of the GPU's memory: what is kept there may be wrong.
pub(crate) fn forget_gpu(gpu: &Option<String>) {
    forget(|(of, _)| of == gpu);
}

fn forget(chosen: impl Fn(&Key) -> bool) -> bool {
    let gone = KEPT.lock().forget(&chosen);
    let writable = MUTABLE.lock().forget(chosen);
    !gone.is_empty() || !writable.is_empty()
}

/// The reply to a process that asks: a number, with descriptors if the memory is complete, without if it is to be filled. `None`: it waits.
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

/// A process sealed it; false if it was not told to, or the memory is not what it says.
pub(crate) fn sealed(key: &Key, by: Owner, generation: u64, fds: Vec<OwnedFd>) -> bool {
    let Ok([memory, header]) = <[OwnedFd; 2]>::try_from(fds) else { return false };
    let descriptors = SharedDescriptors { memory, header };
    let is_sealed = descriptors.info().is_ok_and(|info| info.generation == generation);
    // Memory that is not taken is closed outside the lock.
    let taken = is_sealed.then(|| KEPT.lock().sealed(key, by, generation, descriptors));
    taken.is_some_and(|taken| taken.is_ok())
}

/// A process could not fill it.
pub(crate) fn not_filled(key: &Key, owner: Owner) -> bool {
    KEPT.lock().gone(owner, Some(key))
}

/// A process is gone, with whatever it was filling.
pub(crate) fn gone(owner: Owner) -> bool {
    KEPT.lock().gone(owner, None)
}

/// The reply to a process that asks for memory to write.
#[derive(Debug)]
pub(crate) enum AskedMut {
    /// It is this process's: with its descriptors, or to be made.
    Given { made: u64, generation: u64, died: Option<u64>, fds: Vec<OwnedFd> },
    /// Another process has it; or, with `settles`, something that it left behind may have it, which only looking tells.
    Wait { settles: bool },
    /// The process has it already.
    Twice,
}

/// The reply to a process that asks for memory to write; and whether memory was set aside for it because something still has that.
pub(crate) fn ask_mut(key: &Key, asker: Owner, process: u32, now: Instant) -> (AskedMut, bool) {
    let mut kept = MUTABLE.lock();
    if kept.is_of_another(key, asker.0) {
        return (AskedMut::Wait { settles: false }, false);
    }
    let mut aside = Vec::new();
    if let Some((since, memory, remains)) = kept.settling(key) {
        if is_left(key, memory, remains) {
            kept.settled(key);
        } else if now.saturating_duration_since(since) > SETTLES {
            aside = kept.set_aside(key);
        } else {
            return (AskedMut::Wait { settles: true }, false);
        }
    }
    // Without descriptors to spare it waits until there are.
    let Ok(fds) = kept.free(key).map(|memory| lend(key, memory)).transpose() else {
        return (AskedMut::Wait { settles: true }, !aside.is_empty());
    };
    let asked = match kept.ask(key, asker, process) {
        Given::Make(generation) => {
            AskedMut::Given { made: generation, generation, died: None, fds: Vec::new() }
        }
        Given::Take { generation, made, died, .. } => {
            AskedMut::Given { made, generation, died, fds: fds.unwrap_or_default() }
        }
        Given::Wait => AskedMut::Wait { settles: false },
        Given::Twice => AskedMut::Twice,
    };
    (asked, !aside.is_empty())
}

/// Whether nothing has the memory of a process that was reaped. Forks of it have its end of the socket; on a host device, the memory's file
/// also tells. Whether the GPU itself still writes, the next process finds out.
fn is_left(key: &Key, memory: &SharedDescriptors, remains: &Ends) -> bool {
    let is_host = key.0.is_none();
    system::has_ended(remains.socket.as_fd())
        && (!is_host || system::is_alone(memory.memory.as_fd()))
}

/// Descriptors for a process: on a host device, with a file description of their own.
fn lend(key: &Key, memory: &SharedDescriptors) -> std::io::Result<Vec<OwnedFd>> {
    let file = match key.0 {
        None => system::opened_again(memory.memory.as_fd())?,
        Some(_) => memory.memory.try_clone()?,
    };
    Ok(vec![file, memory.header.try_clone()?])
}

/// A process made it; false if it was not told to, or the memory is not what it says.
pub(crate) fn made(key: &Key, by: Owner, generation: u64, fds: Vec<OwnedFd>) -> bool {
    let Ok([memory, header]) = <[OwnedFd; 2]>::try_from(fds) else { return false };
    let own = match key.0 {
        None => system::opened_again(memory.as_fd()),
        Some(_) => Ok(memory),
    };
    let Ok(memory) = own else { return false };
    let descriptors = SharedDescriptors { memory, header };
    let is_it =
        descriptors.info().is_ok_and(|info| info.is_mutable && info.generation == generation);
    let taken = is_it.then(|| MUTABLE.lock().made(key, by, generation, descriptors));
    taken.is_some_and(|taken| taken.is_ok())
}

/// Whether memory to write is for the processes of another worker than this one.
pub(crate) fn is_of_another(key: &Key, worker: usize) -> bool {
    MUTABLE.lock().is_of_another(key, worker)
}

/// A worker has ended: its memory is for whichever asks next. Returns whether there was any.
pub(crate) fn released(worker: usize) -> bool {
    MUTABLE.lock().released(worker)
}

/// A process begins to write, or ends; false if it is not to.
pub(crate) fn writes(key: &Key, by: Owner, begins: bool) -> bool {
    MUTABLE.lock().writes(key, by, begins)
}

/// A process was reaped. One that is `untrusted` may have been writing, whatever it said.
pub(crate) fn reaped(owner: Owner, untrusted: bool, now: Instant, remains: &Arc<Ends>) -> bool {
    MUTABLE.lock().gone(owner, untrusted, now, remains)
}

/// A process is given up on: its memory stays its own.
pub(crate) fn abandoned(owner: Owner) {
    let abandoned = MUTABLE.lock().abandon(owner);
    drop(abandoned);
}

/// The number of the process that may write it.
pub(crate) fn writer(key: &Key) -> Option<u32> {
    MUTABLE.lock().holder(key)
}
