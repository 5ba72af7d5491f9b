//! Streams and events shared with other users of the driver.
//!
//! A stream on which another library also puts work is *shared*: a marker follows each operation of this crate, so that awaiting the
//! operation does not wait for foreign work behind it. Foreign work is covered only by [`done`](Stream::done), [`record`](Stream::record)
//! and [`wait`](Stream::wait), which cover everything on the stream at the time of the call.
//!
//! | you have | and want | call |
//! |---|---|---|
//! | a call of another library that takes a stream | it as an operation | [`Stream::enqueue`] |
//! | a `CUstream` of another library | to put operations on it | [`Stream::from_raw`] |
//! | memory of another library | it as a buffer | [`Device::adopt_memory`], [`Stream::adopt_memory`] |
//! | a buffer | another library to use it for a while | [`Stream::lend_memory`] |
//! | a stream of this crate | another library to use it for a while | [`Stream::lend_raw`] |
//! | | to give it to another library for good | [`Stream::as_raw`] |
//! | a DLPack tensor | it as a buffer | [`Stream::adopt_dlpack`] |
//! | a buffer | to export it as a DLPack tensor | [`DeviceBuffer::into_dlpack`](crate::DeviceBuffer::into_dlpack) |
//! | cudarc's `CudaContext`, `CudaStream`, `CudaSlice` | either | see [`cudarc`] |

#[cfg(feature = "cuda")]
pub(crate) mod cudarc;
pub(crate) mod dlpack;
mod enqueue;
pub(crate) mod library_device;
pub(crate) mod memory;

use crate::backend::{RawPartition, RawStream, StreamOptions};
use crate::device::Device;
use crate::error::{DriverCode, ErrorDetail, Result};
use crate::event::Event;
use crate::event::interprocess::SharedEvent;
use crate::runtime::stream_state::{Owner, StreamState};
use crate::stream::Stream;
use crate::thread::role;

impl Stream {
    /// Adopts a stream of another library: a `CUstream` of this device's context, as a number. Zero
    /// and 1 (`CU_STREAM_LEGACY`) mean the legacy default stream.
    ///
    /// This crate never destroys it. Adopting a handle twice makes two independent [`Stream`]s, because the driver
    /// reuses handles.
    ///
    /// # Ownership
    /// `owner` is kept until the last handle of the stream is dropped, and this crate's work on the
    /// stream is complete. Buffers made on it may outlive it.
    ///
    /// A stream of a green context is confined to that context's multiprocessors: one of a [`Partition`](crate::Partition) of this device is in
    /// that partition here as well. [`Stream::in_partition`] and [`Stream::multiprocessors`] do not know another library's; replayed batches
    /// and graphs are then launched operation by operation, and work that can only be captured is refused. If the owner destroys the context
    /// nonetheless, the stream's operations fail with [`ErrorDetail::StreamDetached`], pending ones too; the device goes on.
    ///
    /// # Errors
    /// [`ErrorDetail::BadStream`]: the per-thread handle (2), which is a different stream on every
    /// thread; [`ErrorDetail::WrongDevice`]: a stream of another context, or of a green one with a driver before CUDA 12.6; the driver's error for an
    /// unknown handle. A stream of another host device is a `BadStream`.
    ///
    /// # Safety
    /// The handle is that of a stream of the driver behind `device` (for a host device, of any host
    /// device), and the stream lives at least as long as `owner`. Nobody captures the stream into a
    /// graph while this crate puts work on it.
    ///
    /// # Examples
    /// ```
    /// # let device = gpu_await::Device::host();
    /// use gpu_await::Stream;
    /// let theirs = device.stream()?;
    /// // SAFETY: the owner keeps the stream, and nobody captures it.
    /// let adopted = unsafe { Stream::from_raw(&device, theirs.as_raw(), theirs.clone()) }?;
    /// assert_ne!(adopted, theirs);
    /// # Ok::<(), gpu_await::Error>(())
    /// ```
    ///
    /// # Source
    /// `cuStreamGetCtx_v2`, `cuStreamGetCtx`, `cuStreamGetPriority`.
    pub unsafe fn from_raw(
        device: &Device,
        handle: u64,
        owner: impl Send + Sync + 'static,
    ) -> Result<Stream> {
        role::check("adopting a stream")?;
        let engine = device.engine();
        engine.check_open()?;
        let mut partition = None;
        let (raw, options, name) = match handle {
            0 | 1 => (RawStream::LEGACY, RawStream::LEGACY_OPTIONS, "legacy default"),
            2 => {
                let reason = "the per-thread default stream is another one on every thread; use \
                              `Device::thread_stream`";
                return Err(ErrorDetail::BadStream { handle, reason }.into());
            }
            handle => {
                let raw = RawStream(handle);
                // SAFETY: the caller vouches that it is the handle of a stream.
                let info = unsafe { engine.backend.stream_info(raw) };
                let info = info.map_err(|code| match code.code {
                    DriverCode::INVALID_HANDLE => {
                        let reason = "the device has no stream of that handle";
                        ErrorDetail::BadStream { handle, reason }.into()
                    }
                    _ => engine.refused(code),
                })?;
                if info.context != engine.backend.context() {
                    let (what, expected) = ("the adopted stream", engine.label().to_owned());
                    let found = format!("the context {:#x}", info.context);
                    return Err(ErrorDetail::WrongDevice { what, expected, found }.into());
                }
                let options = StreamOptions {
                    priority: info.priority,
                    blocking: info.blocking,
                    partition: (info.green != 0)
                        .then_some(RawPartition { green: info.green, context: 0 }),
                };
                partition = engine.shares.partitions.share_of(info.green);
                (raw, options, "adopted")
            }
        };
        let owner: Option<Owner> = Some(Box::new(owner));
        let stream =
            StreamState::open_foreign(engine, partition, (raw, options), Some(name.into()), owner)?;
        Ok(Stream::new(stream, device.default_stream().home().clone()))
    }

    /// Lends the driver's handle to another library until the loan is dropped. While it lasts, the stream is shared, as
    /// after [`as_raw`](Self::as_raw).
    ///
    /// For one call that takes a stream, prefer [`enqueue`](Self::enqueue), which turns it into an operation with
    /// declared memory.
    ///
    /// # Ordering
    /// As [`as_raw`](Self::as_raw). Work that the other library put on the stream before the loan ended is covered by
    /// [`done`](Self::done), [`record`](Self::record) and [`wait`](Self::wait), and by every operation that is
    /// submitted later.
    ///
    /// # Safety
    /// As [`as_raw`](Self::as_raw); the handle is not used after the loan is dropped.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// // SAFETY: nobody captures the stream, and the handle is not kept.
    /// let loan = unsafe { stream.lend_raw() };
    /// their_library::run(loan.handle());
    /// drop(loan);
    /// stream.done().await?; // their work is complete
    /// # mod their_library { pub fn run(_: u64) {} }
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub unsafe fn lend_raw(&self) -> StreamLoan {
        self.state().driver.sharing.begin();
        StreamLoan { stream: self.clone() }
    }

    /// Returns the driver's handle, a `CUstream` as a number. From then on the stream is shared.
    ///
    /// On the host device it is a number that [`from_raw`](Self::from_raw) understands.
    ///
    /// # Ordering
    /// Foreign work and operations run in the order in which they were put on the stream. Awaiting an operation does not
    /// wait for foreign work behind it. Foreign work is covered only by [`done`](Self::done),
    /// [`record`](Self::record) and [`wait`](Self::wait), which cover everything on the stream at the time of the
    /// call. The owner of memory used only by foreign work must keep it alive.
    ///
    /// # Safety
    /// The handle is used only while a handle of this stream lives: a buffer made on it does not keep it. Nobody
    /// destroys the stream, and nobody captures it into a graph while this crate puts work on it. Kernels that others launch with
    /// programmatic stream serialization execute `griddepcontrol.wait`, since a launch just being submitted by another thread
    /// may be such a launch too.
    #[must_use]
    pub unsafe fn as_raw(&self) -> u64 {
        self.state().driver.sharing.for_good();
        self.state().driver.raw.0
    }
}

/// A stream's driver handle, lent to another library by [`Stream::lend_raw`]. The loan ends when it is dropped,
/// which never blocks.
#[derive(Debug)]
pub struct StreamLoan {
    stream: Stream,
}

impl StreamLoan {
    /// Returns the handle, a `CUstream` as a number.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.stream.state().driver.raw.0
    }
}

impl Drop for StreamLoan {
    fn drop(&mut self) {
        self.stream.state().driver.sharing.end();
    }
}

impl Device {
    /// Opens an event that another process of this machine [exported](Event::export).
    ///
    /// It is recorded, waited for and awaited like one of this process; it has no timing.
    ///
    /// # Blocking
    /// For a driver call.
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`] on a device without such events, such as the host device; the driver's error
    /// for an unknown handle. The exporting process cannot import its own event.
    ///
    /// # Safety
    /// The bytes are from [`Event::export`] (or the driver), and the exported event lives
    /// while this one is used.
    ///
    /// # Source
    /// `cuIpcOpenEventHandle`.
    pub unsafe fn import_event(&self, handle: &[u8; 64]) -> Result<Event> {
        let engine = self.engine();
        // SAFETY: the caller vouches for the other process.
        let event = unsafe { SharedEvent::import(engine, handle) }?;
        Ok(Event::imported(engine, event))
    }
}
