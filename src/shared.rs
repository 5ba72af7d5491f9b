//! Device memory that several processes share: made, filled, sealed, and imported by others, read-only.
//!
//! | state | who writes | who reads | an import |
//! |---|---|---|---|
//! | a [`SharedBuffer`] | its owner, like any buffer | its owner | [`SharedProblem::NotSealed`] |
//! | sealed: [`Frozen`] memory and [`SharedDescriptors`] | nobody: every mapping is read-only | every process | maps it, and compares its digest |
//!
//! | handed over, by [`mutable`]: never sealed | one process after the other, as their supervisor says | that process | maps it for writing |
//!
//! No device orders work of two processes: ownership moves with a message.
//!
//! # Invariants
//! 1. Nobody reads memory of another process that is not sealed (`what_is_not_sealed_is_refused`).
//! 2. What is sealed is complete, and no command here writes it any more (`sealing_waits_for_every_use`).
//! 3. A header is checked before anything of it is used (`wrong_headers_are_refused`); it cannot change while it is read.

mod descriptors;
mod digest;
mod info;
pub mod mutable;

use std::fmt;
use std::ops::Deref;
use std::os::fd::AsFd;

pub use descriptors::SharedDescriptors;
pub use info::SharedInfo;

use crate::backend::SharedMapping;
use crate::device::Device;
use crate::error::shared::SharedProblem;
use crate::error::{DriverCode, Error, ErrorDetail, Result};
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::frozen::Frozen;
use crate::memory::shared_memory::{SharedMemory, protect};
use crate::memory::view::{Extent, Readable, Span, ViewMut, Writable, sealed};
use crate::op::freeze::before_host;
use crate::op::{HostValue, Op};
use crate::runtime::{Engine, coop};
use crate::thread::role;
use gpu_await_protocol::hazard::Mode;

/// `len` elements of type `T` in memory that other processes can map once it is [sealed](Self::seal).
///
/// Made by [`Device::shared`]. Until it is sealed it is passed to operations like a [`DeviceBuffer`], with the same rules of ordering, errors and
/// drops, and no other process can read it.
pub struct SharedBuffer<T> {
    buffer: DeviceBuffer<T>,
    mapping: SharedMapping,
    info: SharedInfo,
    descriptors: SharedDescriptors,
}

impl Device {
    /// Makes memory for `len` elements that other processes can map, off the executor. Its contents are unwritten, like those of
    /// [`empty`](Self::empty). Puts nothing on a stream. Linux only.
    ///
    /// Fill it (`upload_into`, `copy`, `fill`, kernels), [seal](SharedBuffer::seal) it, send its [descriptors](SharedDescriptors) to another process, and
    /// there [`import_shared`](Self::import_shared). For kept weights: they survive this process if another holds their descriptors.
    ///
    /// # Shapes and units
    /// It takes a multiple of what the GPU divides such memory into (2 MiB), beside the device's pool and within
    /// [`memory_limit_bytes`](crate::DeviceBuilder::memory_limit_bytes), as [`MemoryInfo::shared_bytes`](crate::MemoryInfo).
    ///
    /// # Ownership
    /// Dropped, it is unmapped when every use here is complete. It is free when no process maps it or has a descriptor of it.
    ///
    /// # Cancel safety
    /// Dropped, the future leaves nothing.
    ///
    /// # Errors
    /// Out of memory, when all that streams keep and the pool does not use was returned; [`ErrorDetail::Unsupported`]: a GPU without such memory;
    /// [`ErrorDetail::TooLarge`]; [`SharedProblem::System`]: no descriptor is left; a device that is lost or closed; inside a host
    /// function.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// let device = gpu_await::Device::host();
    /// let mut weights = device.shared::<f32>(1000).await?;
    /// device.fill(&mut weights, 0.5).queued()?;
    /// let (weights, descriptors) = weights.seal(&device, 1).await?;
    /// assert_eq!(device.download(&weights).await?[999], 0.5);
    ///
    /// // Another process, to which the descriptors were sent:
    /// let theirs = device.import_shared::<f32>(&descriptors, 1000, 1).await?;
    /// assert_eq!(device.download(&theirs).await?[999], 0.5);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`, `cuMemExportToShareableHandle`; `memfd_create(2)`.
    pub async fn shared<T: Element>(&self, len: usize) -> Result<SharedBuffer<T>> {
        coop::proceed().await;
        role::check_driver("making shared memory")?;
        let bytes = bytes_of::<T>(len)?;
        let stream = self.default_stream().state().clone();
        let made = move || {
            let engine = &stream.engine;
            engine.check_open()?;
            let granularity_bytes =
                engine.backend.shared_granularity().map_err(|code| refused(engine, code))?;
            let size_bytes = bytes.max(1).next_multiple_of(granularity_bytes);
            let (mapping, memory) = SharedMemory::create(&stream, size_bytes)?;
            let raw = mapping.raw();
            // From here on the memory is freed where memory is freed.
            let buffer = DeviceBuffer::new(mapping.into_allocation(bytes, false), len);
            let info = SharedInfo { size_bytes, granularity_bytes, ..expected::<T>(engine, len)? };
            Ok(SharedBuffer {
                buffer,
                mapping: raw,
                info,
                descriptors: SharedDescriptors::of(memory)?,
            })
        };
        self.home().crew.run_alone(made).await?
    }

    /// Maps memory that another process, or this one, made with [`shared`](Self::shared) and sealed: read-only, for operations on any
    /// stream. The driver's calls are made off the executor; then a kernel on the [current stream](Self::current_stream) computes the digest, to
    /// compare it. Ready proves *visible to the host*: the contents are those that were sealed.
    ///
    /// `len` and `generation` are what the message that came with the descriptors says; a program without such messages takes them from
    /// [`SharedDescriptors::info`].
    ///
    /// # Ownership
    /// The descriptors are only read, and may be closed afterwards. The memory stays mapped until the last handle of it is dropped and everything
    /// on the device at that moment is complete. It counts as [`MemoryInfo::imported_bytes`](crate::MemoryInfo), and no limit applies to it.
    ///
    /// # Blocking
    /// No executor thread. The digest takes as long as reading the memory does: on an H200 about 0.3 ms for each GiB. Its kernel is loaded once
    /// a device, which waits for running kernels.
    ///
    /// # Cancel safety
    /// Dropped, the future leaves nothing mapped once the kernels of the digest, if they were submitted, are complete.
    ///
    /// # Errors
    /// [`ErrorDetail::BadShared`], with the expected and the found value: memory that is not sealed, of another GPU, of another type, length or
    /// generation, or whose contents have changed; descriptors of something else. Out of memory, for the digest; a device that is lost
    /// or closed; inside a host function.
    ///
    /// # Source
    /// `cuMemImportFromShareableHandle`, `cuMemMap`, `cuMemSetAccess`.
    pub async fn import_shared<T: Element>(
        &self,
        from: &SharedDescriptors,
        len: usize,
        generation: u64,
    ) -> Result<Frozen<T>> {
        coop::proceed().await;
        role::check_driver("importing shared memory")?;
        let (bytes, engine) = (bytes_of::<T>(len)?, self.engine().clone());
        let (info, from) = (from.info()?, from.try_clone()?);
        let digest = info.digest;
        let imported = self.home().crew.run_alone(move || {
            engine.check_open()?;
            let expected = SharedInfo { generation, ..expected::<T>(&engine, len)? };
            info.check(&expected).map_err(bad)?;
            let mapping =
                SharedMemory::import(&engine, from.memory.as_fd(), info.size_bytes, false)?;
            let buffer = DeviceBuffer::<T>::new(mapping.into_allocation(bytes, true), len);
            Ok::<_, Error>(Frozen::new(buffer))
        });
        let imported = imported.await??;
        let found = digest::of(self, imported.view()).await?;
        if found != digest {
            return Err(bad(SharedProblem::Digest { expected: digest, found }));
        }
        Ok(imported)
    }
}

impl<T: Element> SharedBuffer<T> {
    /// Borrows all of it for writing.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        self.buffer.view_mut()
    }

    /// Returns its descriptors, duplicated: to let another process hold the memory before it is sealed.
    ///
    /// # Errors
    /// [`SharedProblem::System`]: no descriptor is left.
    pub fn descriptors(&self) -> Result<SharedDescriptors> {
        self.descriptors.try_clone()
    }

    /// Makes the memory read-only and lets other processes import it, as `generation`: a number of the caller's that tells this memory from
    /// others. Waits for every use, makes this process's mapping read-only, computes the digest of the contents by a kernel on the
    /// device's [current stream](Device::current_stream), and seals the header. Ready proves that an import elsewhere finds it.
    ///
    /// # What a seal protects from
    /// | what | is |
    /// |---|---|
    /// | a kernel, a copy or a fill, here or in a process that imported it, that writes there by mistake | refused by the device: that process's device is lost, and the contents stay |
    /// | such a write before the seal | not found: it is in the digest |
    /// | a process that maps the descriptor writable on purpose, by calls of its own | not kept from it on a GPU, whose descriptors grant both; an import finds by the digest what it changed. On a host device the system refuses it, unless the mapping was made before the seal |
    /// | an error of the memory itself (ECC; driver code 214, Xid 48, 63, 94, 95) | not found by the seal: the device of each process that reads it is lost. Whoever keeps the descriptors closes them, and fills anew |
    ///
    /// The digest tells mistakes from what was sealed. It is 64 bits of no cryptographic strength.
    ///
    /// # Ownership
    /// The buffer moves in. If the future fails or is dropped, the memory is unmapped when every use is complete, and whoever has its
    /// descriptors cannot import it.
    ///
    /// # Blocking
    /// As [`Device::import_shared`].
    ///
    /// # Errors
    /// Part of the buffer was never written, or what should have written it failed ([`ErrorDetail::Upstream`]); a graph that uses it
    /// ([`ErrorDetail::KeptByGraph`]); another device than the buffer's; out of memory, for the digest; a device that is lost or closed.
    ///
    /// # Source
    /// `cuMemSetAccess`; `fcntl(2)`, `F_ADD_SEALS`.
    pub async fn seal(
        self,
        device: &Device,
        generation: u64,
    ) -> Result<(Frozen<T>, SharedDescriptors)> {
        coop::proceed().await;
        role::check_driver("sealing shared memory")?;
        let SharedBuffer { buffer, mapping, info, descriptors } = self;
        let engine = device.engine().clone();
        if buffer.memory().engine.state.id != engine.state.id {
            let (expected, found) =
                (engine.label().to_owned(), buffer.memory().engine.label().to_owned());
            return Err(
                ErrorDetail::WrongDevice { what: "the shared buffer", expected, found }.into()
            );
        }
        let (uses, on) = before_host("seal", &buffer.span(), Mode::ReadWrite)?;
        Op::behind_uses(uses, HostValue::Here((), on)).await?;
        let sealed = buffer.freeze().await?;
        let (kept, duplicate) = (sealed.clone(), descriptors.try_clone()?);
        let protected = move || {
            // SAFETY: `kept` keeps the memory, nothing writes frozen memory, and its uses were waited for: nobody could add one.
            let protected = unsafe { protect(&engine, &mapping, duplicate.memory.as_fd()) };
            drop(kept);
            protected
        };
        device.home().crew.run_alone(protected).await??;
        let digest = digest::of(device, sealed.view()).await?;
        descriptors.seal(&SharedInfo { generation, digest, ..info })?;
        Ok((sealed, descriptors))
    }
}

fn bytes_of<T>(len: usize) -> Result<u64> {
    let element_bytes = size_of::<T>();
    let bytes = len.checked_mul(element_bytes).filter(|bytes| isize::try_from(*bytes).is_ok());
    bytes
        .map(|bytes| bytes as u64)
        .ok_or_else(|| ErrorDetail::TooLarge { len, element_bytes }.into())
}

/// What the header of such memory of this device says.
fn expected<T: Element>(engine: &Engine, len: usize) -> Result<SharedInfo> {
    let uuid = engine.backend.uuid().map_err(|code| refused(engine, code))?;
    Ok(SharedInfo::of::<T>(engine.backend.kind(), uuid, len as u64))
}

fn refused(engine: &Engine, code: DriverCode) -> Error {
    const NOT_SUPPORTED: i32 = 801;
    if code.code != NOT_SUPPORTED {
        return engine.refused(code);
    }
    let (what, device) = ("memory that several processes share", engine.label().to_owned());
    ErrorDetail::Unsupported { what, device }.into()
}

fn bad(problem: SharedProblem) -> Error {
    ErrorDetail::BadShared { problem }.into()
}

/// Reads and borrows go to the device memory.
impl<T> Deref for SharedBuffer<T> {
    type Target = DeviceBuffer<T>;

    fn deref(&self) -> &DeviceBuffer<T> {
        &self.buffer
    }
}

impl<T> sealed::Sealed for SharedBuffer<T> {}

impl<T: Element> Extent for SharedBuffer<T> {
    fn len(&self) -> usize {
        self.buffer.len()
    }
}

impl<T: Element> Readable<T> for SharedBuffer<T> {
    fn span(&self) -> Span<'_> {
        self.buffer.span()
    }
}

impl<T: Element> Writable<T> for SharedBuffer<T> {
    fn span_mut(&mut self) -> Span<'_> {
        self.buffer.span_mut()
    }
}

impl<T> fmt::Debug for SharedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBuffer({:?})", self.buffer)
    }
}
