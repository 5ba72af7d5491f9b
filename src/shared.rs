//! Device memory that several processes share: created, filled and sealed by one, and imported read-only by others.
//!
//! | state | who writes | who reads | an import |
//! |---|---|---|---|
//! | a [`SharedBuffer`] | its owner, like any buffer | its owner | [`SharedProblem::NotSealed`] |
//! | sealed: [`Frozen`] memory and [`SharedDescriptors`] | no process: every mapping is read-only | every process | maps it, and compares its digest |
//! | handed over, by [`mutable`]: never sealed | one process after another, as their supervisor decides | that process | maps it for writing |
//!
//! No device orders the work of two processes: ownership moves with a message.
//!
//! # Invariants
//! 1. No process reads another's unsealed memory (`what_is_not_sealed_is_refused`).
//! 2. Sealed memory is complete, and no command here writes it any more (`sealing_waits_for_every_use`).
//! 3. A header is checked before any of it is used (`wrong_headers_are_refused`); it cannot change while it is read.

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
/// Created by [`Device::shared`]. Until it is sealed, it is passed to operations like a [`DeviceBuffer`], with the same rules for ordering,
/// errors and drops, and no other process can read it.
pub struct SharedBuffer<T> {
    buffer: DeviceBuffer<T>,
    mapping: SharedMapping,
    info: SharedInfo,
    descriptors: SharedDescriptors,
}

impl Device {
    /// Allocates, off the executor, memory for `len` elements that other processes can map. It is unwritten, like that of
    /// [`empty`](Self::empty). Puts nothing on a stream. Linux only.
    ///
    /// Fill it (`upload_into`, `copy`, `fill`, kernels), [seal](SharedBuffer::seal) it, send its [descriptors](SharedDescriptors) to another process,
    /// and [`import_shared`](Self::import_shared) it there. This suits weights: they survive this process if another holds their descriptors.
    ///
    /// # Shapes and units
    /// It takes a multiple of the GPU's granularity for such memory (2 MiB), outside the device's pool and within
    /// [`memory_limit_bytes`](crate::DeviceBuilder::memory_limit_bytes), counted in [`MemoryInfo::shared_bytes`](crate::MemoryInfo).
    ///
    /// # Ownership
    /// After a drop it is unmapped when every use here is complete. It is freed when no process maps it or has a descriptor of it.
    ///
    /// # Cancel safety
    /// Dropping the future leaves nothing behind.
    ///
    /// # Errors
    /// Out of memory, even after everything that streams keep and the pool does not use was returned; [`ErrorDetail::Unsupported`]: a GPU without
    /// such memory; [`ErrorDetail::TooLarge`]; [`SharedProblem::System`]: no descriptor is left; a lost or closed device; inside a host function.
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
            // From here on the memory is freed like any other.
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

    /// Maps memory that another process, or this one, made with [`shared`](Self::shared) and sealed: read-only, for operations on any stream.
    /// The driver calls are made off the executor; then a kernel on the [current stream](Self::current_stream) computes the digest for
    /// comparison. Ready proves *visible to the host*: the contents are those that were sealed.
    ///
    /// `len` and `generation` come from the message that carried the descriptors; a program without such messages takes them from
    /// [`SharedDescriptors::info`].
    ///
    /// # Ownership
    /// The descriptors are only read, and may be closed afterwards. The memory stays mapped until its last handle is dropped and everything on
    /// the device at that moment is complete. It counts as [`MemoryInfo::imported_bytes`](crate::MemoryInfo), and no limit applies to it.
    ///
    /// # Blocking
    /// Blocks no executor thread. The digest takes as long as reading the memory: about 0.3 ms per GiB on an H200. Its kernel is loaded once
    /// per device, which waits for running kernels.
    ///
    /// # Cancel safety
    /// After the future is dropped, nothing stays mapped once any submitted kernels of the digest are complete.
    ///
    /// # Errors
    /// [`ErrorDetail::BadShared`], with the expected and the found value: memory that is not sealed, of another GPU, type, length or
    /// generation, or whose contents have changed; descriptors of something else. Out of memory for the digest; a lost or closed device; inside
    /// a host function.
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

    /// Returns duplicates of its descriptors, to let another process hold the memory before it is sealed.
    ///
    /// # Errors
    /// [`SharedProblem::System`]: no descriptor is left.
    pub fn descriptors(&self) -> Result<SharedDescriptors> {
        self.descriptors.try_clone()
    }

    /// Makes the memory read-only and lets other processes import it, as `generation`: a number chosen by the caller that identifies this
    /// memory. Waits for every use, makes this process's mapping read-only, computes the digest of the contents with a kernel on the
    /// device's [current stream](Device::current_stream), and seals the header. Ready proves that other processes can import it.
    ///
    /// # What a seal protects against
    /// | error | effect |
    /// |---|---|
    /// | a kernel, a copy or a fill writes there by mistake, here or in a process that imported it | refused by the device: that process's device is lost, and the contents stay |
    /// | such a write before the seal | not detected: the digest includes it |
    /// | a process deliberately maps the descriptor writable with its own driver calls | not prevented on a GPU, whose descriptors grant both kinds of access; an import detects changes by the digest. On a host device the system refuses the mapping, unless it was made before the seal |
    /// | an error of the memory itself (ECC; driver code 214, Xid 48, 63, 94, 95) | not detected by the seal: the device of each process that reads it is lost. Close the descriptors, and fill new memory |
    ///
    /// The digest detects mistakes, not attacks: it has 64 bits and no cryptographic strength.
    ///
    /// # Ownership
    /// The buffer moves in. If the future fails or is dropped, the memory is unmapped when every use is complete, and other holders
    /// of its descriptors cannot import it.
    ///
    /// # Blocking
    /// As [`Device::import_shared`].
    ///
    /// # Errors
    /// Part of the buffer was never written, or its producer failed ([`ErrorDetail::Upstream`]); a graph that uses it
    /// ([`ErrorDetail::KeptByGraph`]); a device other than the buffer's; out of memory for the digest; a lost or closed device.
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
            // SAFETY: `kept` keeps the memory, nothing writes frozen memory, and its uses were waited for, with no way to add one.
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

/// The expected header of such memory on this device.
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
