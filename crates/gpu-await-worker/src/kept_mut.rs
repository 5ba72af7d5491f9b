//! [`KeptMut`]: memory that outlives processes, and that one process at a time may write.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gpu_await::sibling::mutable;
use gpu_await::{Device, DeviceBuffer, Element, SharedBuffer, SharedDescriptors, ViewMut};
use tokio::sync::oneshot;

use crate::failure::Failure;
use crate::frame::ToSupervisor;
use crate::link::{Lent, Link};

/// The interval between two looks at memory that something might still write.
const APART: Duration = Duration::from_millis(20);

/// How many looks it takes for it to count as being written.
const LOOKS: u32 = 50;

/// What a process finds in [kept memory that it may write](crate::Host::keep_mut).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeptState {
    /// It is new, all zeros: nobody wrote it.
    Fresh,
    /// The process that had it before finished every write that it began.
    Clean,
    /// The process that had it as this [generation](KeptMut::generation) died while writing, or broke the protocol, so that nobody knows:
    /// any part of the memory may be old, new, or neither. Later processes find that as well, until a [`write`](KeptMut::write) succeeds in one.
    WriterDied {
        /// The generation of that process.
        generation: u64,
    },
}

enum Place<T> {
    Asked(oneshot::Receiver<Lent>),
    Given(Lent),
    Here(Here<T>),
}

struct Here<T> {
    memory: SharedBuffer<T>,
    state: KeptState,
    generation: u64,
    /// Descriptors of memory that was made here, until the supervisor has them.
    untold: Option<SharedDescriptors>,
}

/// Device memory that outlives this process, and that it alone may write: from [`Host::keep_mut`](crate::Host::keep_mut). A process has it until its
/// end, whether or not this handle is dropped before.
pub struct KeptMut<T> {
    device: Device,
    link: Arc<Link>,
    name: String,
    len: usize,
    place: Place<T>,
}

impl<T: Element> KeptMut<T> {
    pub(crate) fn new(device: &Device, link: &Arc<Link>, name: &str, len: usize) -> Option<Self> {
        let asked = link.ask_to_write(name)?;
        let (device, link, name) = (device.clone(), link.clone(), name.to_owned());
        Some(KeptMut { device, link, name, len, place: Place::Asked(asked) })
    }

    /// Returns what this process found in it, once it has it; its own writes do not change that.
    ///
    /// # Cancel safety
    /// Cancel safe, as are the other methods: the next call resumes what is under way.
    ///
    /// # Errors
    /// Memory of another type or length under that name; memory that is still being written by something that its last process left
    /// behind; whatever [`Device::shared`](gpu_await::Device::shared) fails with; the supervisor is gone.
    pub async fn state(&mut self) -> Result<KeptState, Failure> {
        Ok(self.here().await?.state)
    }

    /// Returns the number under which it was handed to this process; [`KeptState::WriterDied`] has an earlier one.
    ///
    /// # Errors
    /// As [`state`](Self::state).
    pub async fn generation(&mut self) -> Result<u64, Failure> {
        Ok(self.here().await?.generation)
    }

    /// Borrows it for reading, once this process has it.
    ///
    /// # Errors
    /// As [`state`](Self::state).
    pub async fn memory(&mut self) -> Result<&DeviceBuffer<T>, Failure> {
        Ok(&*self.here().await?.memory)
    }

    /// Writes to it: `write` gets it once this process has it, and puts work on streams or awaits it. Ready proves that all work that uses the
    /// memory is complete.
    ///
    /// If the process dies in between, the next one finds [`KeptState::WriterDied`]. Likewise if `write` fails, or the future is dropped, and no
    /// other `write` succeeds before the process ends: so the next `write` has to restore whatever the failed one left half written.
    ///
    /// It costs two messages to the supervisor, a few µs each, without waiting for a reply.
    ///
    /// # Errors
    /// As [`state`](Self::state); what `write` fails with; work on the memory that failed.
    pub async fn write<R>(
        &mut self,
        write: impl AsyncFnOnce(ViewMut<'_, T>) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let (link, name) = (self.link.clone(), self.name.clone());
        let here = self.here().await?;
        // The socket, which outlives the process, has the message before the first byte is written.
        link.writes(&name, true).await?;
        let written = write(here.memory.view_mut()).await?;
        mutable::settled(&here.memory)?.await?;
        link.writes(&name, false).await?;
        Ok(written)
    }

    async fn here(&mut self) -> Result<&mut Here<T>, Failure> {
        if let Place::Asked(asked) = &mut self.place {
            let given = asked.await.map_err(|_| Failure::new("the supervisor is gone"))?;
            self.place = Place::Given(given);
        }
        if let Place::Given(given) = &self.place {
            let here = match &given.memory {
                None => make(&self.device, self.len, given).await?,
                Some(memory) => take(&self.device, self.len, given, memory).await?,
            };
            self.place = Place::Here(here);
        }
        let Place::Here(here) = &mut self.place else {
            return Err(Failure::new(format!("no memory for `{}`", self.name)));
        };
        if let Some(untold) = &here.untold {
            self.link.made(&self.name, here.generation, untold).await?;
            here.untold = None;
        }
        Ok(here)
    }
}

async fn make<T: Element>(device: &Device, len: usize, given: &Lent) -> Result<Here<T>, Failure> {
    let mut memory = device.shared::<T>(len).await?;
    device.fill(&mut memory.view_mut().cast::<u8>()?, 0u8).await?;
    let untold = Some(mutable::hand_over(&memory, given.made)?);
    Ok(Here { memory, state: KeptState::Fresh, generation: given.generation, untold })
}

/// Maps memory that another process had. The supervisor knows that no process is left that could write it; work left in the
/// device is detected here.
async fn take<T: Element>(
    device: &Device,
    len: usize,
    given: &Lent,
    memory: &SharedDescriptors,
) -> Result<Here<T>, Failure> {
    // SAFETY: the supervisor hands it to this process alone, once the one before it was reaped and nothing that this one forked has it; a
    // process asks once, and imports once.
    let imported = unsafe { mutable::import::<T>(device, memory, len, given.made) };
    let memory = imported.await?;
    let mut before = mutable::digest(device, &memory).await?;
    let mut looks = 0;
    loop {
        tokio::time::sleep(APART).await;
        let now = mutable::digest(device, &memory).await?;
        if now == before {
            break;
        }
        (before, looks) = (now, looks + 1);
        if looks == LOOKS {
            return Err(Failure::new("something still writes kept memory whose process is gone"));
        }
    }
    let state = match given.died {
        Some(generation) => KeptState::WriterDied { generation },
        None => KeptState::Clean,
    };
    Ok(Here { memory, state, generation: given.generation, untold: None })
}

impl<T> fmt::Debug for KeptMut<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_here = matches!(self.place, Place::Here(_));
        let mut text = f.debug_struct("KeptMut");
        text.field("name", &self.name).field("is_here", &is_here).finish_non_exhaustive()
    }
}

impl Link {
    /// Says that this process begins to write what it was given, or ends.
    async fn writes(&self, name: &str, begins: bool) -> Result<(), Failure> {
        self.tell(&ToSupervisor::Writes { name, begins }, &[]).await
    }

    /// Sends memory that was made here to the supervisor, which keeps it.
    async fn made(
        &self,
        name: &str,
        generation: u64,
        memory: &SharedDescriptors,
    ) -> Result<(), Failure> {
        use std::os::fd::AsFd;
        let fds = [memory.memory.as_fd(), memory.header.as_fd()];
        self.tell(&ToSupervisor::Made { name, generation }, &fds).await
    }
}
