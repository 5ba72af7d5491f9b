//! [`Host`]: a service's view of its process.
#![forbid(unsafe_code)]

use std::os::fd::AsFd;
use std::sync::Arc;

use gpu_await::{Device, Element, ErrorDetail, ErrorKind, Frozen, SharedBuffer, sibling};

use crate::failure::Failure;
use crate::frame::{ChildTerms, Ending, MOST_NAME, ToSupervisor, Tried};
use crate::kept_mut::KeptMut;
use crate::link::Link;
use crate::system::{self, Executable};

/// A [`Service`](crate::Service)'s view of its process: its device, and memory that outlives the process.
#[derive(Clone, Debug)]
pub struct Host {
    device: Device,
    link: Arc<Link>,
    /// Other processes' work may share a context with this one's.
    is_under_mps: bool,
}

impl Host {
    /// The device that the process was started for.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Device memory of `len` elements that outlives this process: filled by the first process that asks for it, and mapped read-only by all others
    /// that ask for the same name. Weights that are loaded once stay on the GPU whatever happens to the process.
    ///
    /// `fill` gets the memory, unwritten, and writes all of it; then it is sealed with its digest. Other processes that ask meanwhile
    /// wait, and if that takes longer than the start may, the error says for which process ([`Cause::KeptNotFilled`](crate::Cause)): a `fill` that does
    /// not end, or whose future is forgotten, holds its name for as long as its process lives. If this process dies first, the memory is gone and the next process
    /// that asks fills it. The front keeps it for each GPU, without CUDA calls: see [`kept`](crate::kept), [`forget_kept`](crate::forget_kept). An error of the
    /// GPU's memory (ECC) drops it.
    ///
    /// Ready proves that the contents are those that were sealed: each process computes their digest.
    ///
    /// # Ownership
    /// The memory is freed once the front no longer keeps it and no process maps it.
    ///
    /// # Cancel safety
    /// If the future is dropped, the memory is not kept.
    ///
    /// # Errors
    /// What `fill` fails with; a `fill` that swaps the memory it was given, or asks for the same name; memory of another type or length under
    /// that name; a name of more than 256 bytes; whatever [`Device::shared`](gpu_await::Device::shared), `seal` and `import_shared` fail with.
    ///
    /// # Examples
    /// ```
    /// # use gpu_await_worker::{Failure, Host};
    /// async fn weights(host: &Host) -> Result<gpu_await::Frozen<f32>, Failure> {
    ///     host.keep("weights", 1 << 20, async |weights| {
    ///         let loaded = vec![0.5f32; 1 << 20];
    ///         let device = weights.device().clone();
    ///         let loaded = device.upload(loaded).queued()?;
    ///         device.copy(&loaded, weights.memory()).await?;
    ///         Ok(())
    ///     })
    ///     .await
    /// }
    /// ```
    pub async fn keep<T: Element>(
        &self,
        name: &str,
        len: usize,
        fill: impl AsyncFnOnce(&mut Filling<T>) -> Result<(), Failure>,
    ) -> Result<Frozen<T>, Failure> {
        if name.len() > MOST_NAME {
            return Err(Failure::new(format!("a name of more than {MOST_NAME} bytes")));
        }
        let outer: Arc<[String]> = FILLING.try_with(Arc::clone).unwrap_or_default();
        if outer.iter().any(|outer| outer == name) {
            return Err(Failure::new(format!(
                "`keep` of `{name}` within the `fill` of `{name}`: it would wait for itself"
            )));
        }
        let reply = self.link.keep(name).await;
        let (generation, kept) = reply.ok_or_else(|| Failure::new("the supervisor is gone"))?;
        if let Some(kept) = kept {
            return Ok(self.device.import_shared(&kept, len, generation).await?);
        }
        let unfilled = Unfilled { link: &self.link, name };
        let memory = self.device.shared::<T>(len).await?;
        let mut filling = Filling { device: self.device.clone(), memory };
        let file = filling.file()?;
        let names: Arc<[String]> = outer.iter().cloned().chain([name.to_owned()]).collect();
        FILLING.scope(names, fill(&mut filling)).await?;
        // `fill` could have swapped it, for memory of another length, or memory that somebody may still write.
        if filling.file()? != file {
            return Err(Failure::new(format!(
                "`fill` of `{name}` put other memory, of {} elements, in the place of what is kept, of {len}",
                filling.memory.len()
            )));
        }
        let (frozen, descriptors) = filling.memory.seal(&self.device, generation).await?;
        std::mem::forget(unfilled);
        self.link.sealed(name, generation, &descriptors).await;
        Ok(frozen)
    }

    /// Device memory of `len` elements that outlives this process, and that it may write: a cache of keys and values, say. It starts as zeros, and
    /// later holds what earlier processes left in it; [`KeptState`](crate::KeptState) says whether one of them died while writing. Asks for it without waiting:
    /// each method of the handle waits until this process has the memory.
    ///
    /// One process has it at a time, and until its end, whatever it does with the handle. The next one gets it once the previous one was killed with
    /// its group and reaped, nothing that it forked has it, and two looks at the memory found it unchanged. Until then no call is sent to a process that asked,
    /// so [`Service::start`](crate::Service::start) asks for what calls need. A [standby](crate::WorkerBuilder::standby) gets it once it has taken over, and a
    /// [replacement](crate::Worker::replace) when the other process has answered its calls: a start that awaits it in either never ends. With such memory
    /// suspects run in the main process, and a takeover takes until that process is reaped.
    ///
    /// A name is one worker's on each GPU: until that worker is closed or given up, only its own next process gets the memory, and other workers that
    /// asked for it [wait](crate::WorkerHealth::waits_for), as do their calls, unless these have a deadline. So two workers of a [`Group`](crate::Group) on one GPU need two
    /// names; with one name, the group calls the worker that has the memory.
    ///
    /// Memory that something still has (a fork in its own process group), or whose process does not end, is given up after 5 s: the next process makes
    /// new memory. Kept for each GPU, by the front, like [`keep`](Self::keep), with names of its own; an error of the GPU's memory (ECC) drops it.
    ///
    /// # Errors
    /// This process has asked for that name before; a name of more than 256 bytes; on a GPU with
    /// [`allow_mps`](crate::WorkerBuilder::allow_mps), where work of a process may go on after its end.
    ///
    /// # Examples
    /// ```
    /// # use gpu_await::Device;
    /// # use gpu_await_worker::{Failure, Host, KeptMut, KeptState};
    /// /// For the service's `start`, which must not wait for it.
    /// fn ask(host: &Host) -> Result<KeptMut<f32>, Failure> {
    ///     host.keep_mut::<f32>("cache", 1 << 20)
    /// }
    ///
    /// /// For the first call that uses it.
    /// async fn begin(device: &Device, cache: &mut KeptMut<f32>) -> Result<(), Failure> {
    ///     if let KeptState::WriterDied { .. } = cache.state().await? {
    ///         cache.write(async |mut cache| Ok(device.fill(&mut cache, 0.0).await?)).await?;
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub fn keep_mut<T: Element>(&self, name: &str, len: usize) -> Result<KeptMut<T>, Failure> {
        if name.len() > MOST_NAME {
            return Err(Failure::new(format!("a name of more than {MOST_NAME} bytes")));
        }
        if self.is_under_mps {
            return Err(Failure::new(
                "`keep_mut` with `allow_mps`: under MPS the work of a process may go on after its end",
            ));
        }
        let twice = || Failure::new(format!("this process has asked for `{name}` before"));
        KeptMut::new(&self.device, &self.link, name, len).ok_or_else(twice)
    }

    pub(crate) async fn open(
        terms: &ChildTerms,
        link: &Arc<Link>,
    ) -> Result<Host, (Ending, String)> {
        let mut builder = Device::builder().verify(terms.verify);
        if let Some(bytes) = terms.device_memory_bytes {
            builder = builder.memory_limit_bytes(bytes);
        }
        let device = match terms.gpu {
            None => sibling::open_host(builder).map_err(not_opened)?,
            Some(_) if is_under_mps() && !terms.allow_mps => {
                return Err((Ending::UnderMps, String::new()));
            }
            Some(gpu) => builder.cuda(gpu as usize).map_err(not_opened)?,
        };
        let is_under_mps = terms.gpu.is_some() && terms.allow_mps;
        Ok(Host { device, link: link.clone(), is_under_mps })
    }
}

fn not_opened(error: gpu_await::Error) -> (Ending, String) {
    let ending = match error.detail() {
        // There may be more threads soon.
        ErrorDetail::NoThread { .. } => {
            Ending::NotStarted { tried: Tried::Device, errno: libc::EAGAIN }
        }
        _ if error.kind() == ErrorKind::OutOfMemory => Ending::OutOfMemory,
        _ => Ending::NoDevice,
    };
    (ending, error.to_string())
}

/// Memory to be kept, while it is filled: see [`Host::keep`].
#[derive(Debug)]
pub struct Filling<T> {
    device: Device,
    memory: SharedBuffer<T>,
}

tokio::task_local! {
    /// The names of the memory that the task is filling.
    static FILLING: Arc<[String]>;
}

impl<T: Element> Filling<T> {
    /// Identifies the memory by its file, which has no name.
    fn file(&self) -> Result<(u64, u64), Failure> {
        let header = self.memory.descriptors()?.header;
        let Executable(device, number) = system::identity(header.as_fd())?;
        Ok((device, number))
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The memory, to be written like any buffer.
    pub fn memory(&mut self) -> &mut SharedBuffer<T> {
        &mut self.memory
    }
}

/// Reports that nothing was filled, unless forgotten.
struct Unfilled<'k> {
    link: &'k Arc<Link>,
    name: &'k str,
}

impl Drop for Unfilled<'_> {
    fn drop(&mut self) {
        self.link.post(&ToSupervisor::NotFilled { name: self.name });
    }
}

/// Whether an MPS daemon takes clients with this process's environment.
fn is_under_mps() -> bool {
    use rustix::fs::{Mode, OFlags};
    let folder = std::env::var("CUDA_MPS_PIPE_DIRECTORY");
    let control = format!("{}/control", folder.unwrap_or_else(|_| "/tmp/nvidia-mps".to_owned()));
    // Its pipe can be opened for writing while somebody reads it.
    rustix::fs::open(control, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
        .is_ok()
}
