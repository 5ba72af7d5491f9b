//! Streams and events shared with other users of the driver.
//!
//! A stream that somebody else also puts work on is *shared*: each operation of ours is followed by a
//! marker, so that awaiting it waits for nothing of theirs that came later. Their work is covered by
//! [`done`](Stream::done), [`record`](Stream::record) and [`wait`](Stream::wait), which stand for
//! everything that is on the stream when they are called, and by nothing else.
//!
//! | you have | and want | call |
//! |---|---|---|
//! | a `CUstream` of another library | to put work on it here | [`Stream::from_raw`] |
//! | a stream of this crate | to give it to another library | [`Stream::as_raw`] |
//! | cudarc's `CudaStream` | either | `Device::adopt`, `Stream::to_cudarc` |

mod enqueue;

use crate::backend::{RawStream, StreamOptions};
use crate::device::Device;
use crate::error::{ErrorDetail, Result};
use crate::event::Event;
use crate::event::interprocess::SharedEvent;
use crate::runtime::stream_state::{Owner, StreamState};
use crate::stream::Stream;
use crate::thread::role;

impl Stream {
    /// Adopts a stream of another library: a `CUstream` of this device's context, as a number. Zero
    /// is the legacy default stream.
    ///
    /// It is never destroyed by this crate. Two adoptions of one handle are two [`Stream`]s that know
    /// nothing of each other, as the driver reuses handles.
    ///
    /// # Ownership
    /// `owner` is kept until the last handle of the stream, and the last buffer that was made on it,
    /// are gone and what was put on the stream here is complete.
    ///
    /// # Errors
    /// [`ErrorDetail::BadStream`]: the per-thread handle (2), which means another stream on every
    /// thread; [`ErrorDetail::WrongDevice`]: a stream of another context; what the driver says of a
    /// handle that it does not know.
    ///
    /// # Safety
    /// The handle is that of a stream of the driver behind `device` (for a host device, of any host
    /// device), and the stream lives at least as long as `owner`. Nobody captures the stream into a
    /// graph while work is put on it here.
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
    /// `cuStreamGetCtx`, `cuStreamGetPriority`.
    pub unsafe fn from_raw(
        device: &Device,
        handle: u64,
        owner: impl Send + Sync + 'static,
    ) -> Result<Stream> {
        role::check("adopting a stream")?;
        let engine = device.engine();
        engine.check_open()?;
        let (raw, options) = match handle {
            0 | 1 => (RawStream::LEGACY, RawStream::LEGACY_OPTIONS),
            2 => {
                let reason = "the per-thread default stream is another one on every thread; use \
                              `Device::thread_stream`";
                return Err(ErrorDetail::BadStream { handle, reason }.into());
            }
            handle => {
                let raw = RawStream(handle);
                // SAFETY: the caller vouches that it is a stream's handle.
                let info = unsafe { engine.backend.stream_info(raw) };
                let info = info.map_err(|code| engine.refused(code))?;
                if info.context != engine.backend.context() {
                    let (what, expected) = ("the adopted stream", engine.label().to_owned());
                    let found = format!("the context {:#x}", info.context);
                    return Err(ErrorDetail::WrongDevice { what, expected, found }.into());
                }
                (raw, StreamOptions { priority: info.priority, blocking: info.blocking })
            }
        };
        let owner: Option<Owner> = Some(Box::new(owner));
        let stream =
            StreamState::open_foreign(engine, raw, options, Some("adopted".into()), owner)?;
        Ok(Stream::new(stream, device.default_stream().home().clone()))
    }

    /// Hands out the driver's handle, a `CUstream` as a number; from now on the stream is shared.
    ///
    /// On the host device it is a number that [`from_raw`](Self::from_raw) understands.
    ///
    /// # Ordering
    /// What others put on the stream is in order with what is put on it here. An operation of this crate
    /// awaits nothing of theirs that came behind it. Their work is covered by [`done`](Self::done),
    /// [`record`](Self::record) and [`wait`](Self::wait), which stand for everything that is on the stream
    /// when they are called, and by nothing else: memory that only they use is theirs to keep alive.
    ///
    /// # Safety
    /// The handle is used only while a handle of this stream, or a buffer made on it, lives. Nobody
    /// destroys the stream, and nobody captures it into a graph while work is put on it here.
    #[must_use]
    pub unsafe fn as_raw(&self) -> u64 {
        self.state().share();
        self.state().raw().0
    }
}

impl Device {
    /// Opens an event that another process of this machine [exported](Event::export).
    ///
    /// It is recorded, waited for and awaited like one of this process; it has no timing.
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`] on a device that has none, such as the host device; what the
    /// driver says of the handle. The process that exported it cannot import it.
    ///
    /// # Safety
    /// The bytes are from [`Event::export`] (or the driver), and the event that they came from lives
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

#[cfg(feature = "cuda")]
mod with_cudarc {
    use std::sync::Arc;

    use cudarc::driver::{CudaContext, CudaStream};

    use crate::device::Device;
    use crate::error::{ErrorDetail, Result};
    use crate::stream::Stream;

    impl Device {
        /// The context that the device is opened with, as cudarc's; its event tracking is as cudarc
        /// made it, and nothing here depends on it.
        ///
        /// # Errors
        /// [`ErrorDetail::Unsupported`]: not a CUDA device.
        pub fn cudarc_context(&self) -> Result<Arc<CudaContext>> {
            let engine = self.engine();
            let context = engine.backend.cudarc_context().and_then(|any| any.downcast().ok());
            let what = "a CUDA context";
            let device = engine.label().to_owned();
            context.ok_or_else(|| ErrorDetail::Unsupported { what, device }.into())
        }

        /// Adopts a stream of cudarc's, or of a crate that stands on it; see [`Stream::from_raw`].
        ///
        /// # Errors
        /// As [`Stream::from_raw`].
        ///
        /// # Safety
        /// Nobody captures the stream into a graph while work is put on it here.
        pub unsafe fn adopt(&self, stream: &Arc<CudaStream>) -> Result<Stream> {
            let handle = stream.cu_stream() as u64;
            // SAFETY: cudarc keeps the stream while the `Arc` lives; the caller vouches for the rest.
            unsafe { Stream::from_raw(self, handle, stream.clone()) }
        }
    }

    impl Stream {
        /// Shows the stream to cudarc; from now on it is shared, as after
        /// [`as_raw`](Self::as_raw).
        ///
        /// # Errors
        /// [`ErrorDetail::Unsupported`]: not a stream of a CUDA device.
        ///
        /// # Safety
        /// As [`as_raw`](Self::as_raw): what is returned, and what cudarc makes from it, is dropped
        /// before this stream's last handle.
        pub unsafe fn to_cudarc(&self) -> Result<Arc<CudaStream>> {
            let context = self.device().cudarc_context()?;
            // SAFETY: the caller promised what `as_raw` asks.
            let handle = unsafe { self.as_raw() };
            // SAFETY: the stream is of this context, and the caller keeps it for as long as cudarc
            // uses it.
            Ok(unsafe { context.wrap_borrowed_stream(handle as cudarc::driver::sys::CUstream) })
        }
    }
}
