//! Conversions from and to cudarc's types, without a copy.
//!
//! | cudarc's | from cudarc | to cudarc |
//! |---|---|---|
//! | `CudaContext` | [`Device::from_cudarc`] | [`Device::cudarc_context`] |
//! | `CudaStream` | [`Device::adopt`] | [`RawQueue::cudarc_stream`] inside `enqueue`, [`Stream::lend_cudarc`], [`Stream::to_cudarc`] |
//! | `CudaSlice` | [`Device::adopt_cudarc`] | [`Device::release_to_cudarc`] |
//! | arguments of its safe wrappers (`DevicePtr`, `DevicePtrMut`) | | [`RawSlice::cudarc`] inside `enqueue` |

use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice,
    SyncOnDrop, result,
};

use crate::backend::cuda::CudaBackend;
use crate::device::Device;
use crate::device::builder::DeviceBuilder;
use crate::error::refused::Refused;
use crate::error::{Error, ErrorDetail, Result};
use crate::interop::StreamLoan;
use crate::interop::memory::Adoptable;
use crate::memory::Element;
use crate::memory::allocation::Allocation;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::raw_slice::RawSlice;
use crate::stream::Stream;
use crate::submit::{RawQueue, Uses, wrong_device};
use crate::thread::{exit, role};

impl DeviceBuilder {
    /// See [`Device::from_cudarc`].
    ///
    /// # Errors
    /// As [`Device::from_cudarc`].
    pub fn from_cudarc(self, context: &Arc<CudaContext>) -> Result<Device> {
        role::check("opening a CUDA device")?;
        exit::check_running("opening a device")?;
        let backend = CudaBackend::over(context.clone(), self.release_threshold_bytes)?;
        Device::open(Arc::new(backend), self.options())
    }
}

impl Device {
    /// Opens the device of a context of cudarc, or of a crate built on it: objects made there and here
    /// work together. The context is kept; neither its event tracking nor its error state is touched.
    ///
    /// # Errors
    /// As [`Device::cuda`].
    pub fn from_cudarc(context: &Arc<CudaContext>) -> Result<Device> {
        Device::builder().from_cudarc(context)
    }

    /// Returns the device's context as cudarc's; its event tracking is left as cudarc set it, and
    /// nothing here depends on it.
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

    /// Adopts a stream of cudarc, or of a crate built on it; see [`Stream::from_raw`].
    ///
    /// # Errors
    /// As [`Stream::from_raw`].
    ///
    /// # Safety
    /// Nobody captures the stream into a graph while work is put on it here.
    pub unsafe fn adopt(&self, stream: &Arc<CudaStream>) -> Result<Stream> {
        let handle = stream.cu_stream() as u64;
        // The driver cannot report the owner of the default stream.
        let (engine, context) = (self.engine(), stream.context().cu_ctx() as u64);
        if context != engine.backend.context() {
            let (what, expected) = ("the adopted stream", engine.label().to_owned());
            let found = format!("the context {context:#x}");
            return Err(ErrorDetail::WrongDevice { what, expected, found }.into());
        }
        // SAFETY: cudarc keeps the stream while the `Arc` lives; the caller vouches for the rest.
        unsafe { Stream::from_raw(self, handle, stream.clone()) }
    }

    /// Adopts memory of cudarc: the slice becomes a buffer like any other, without a copy and without a host
    /// wait. Uses here are ordered after everything on the slice's stream, and after the uses on other streams that
    /// cudarc tracks. See [`Device::adopt_memory`] for figures and limits.
    ///
    /// # Ownership
    /// The slice is dropped when the buffer is dropped and every use of it is complete;
    /// [`release_to_cudarc`](Self::release_to_cudarc) gives it back.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongDevice`]: a slice of another context; [`ErrorDetail::BadStream`]: a slice of the per-thread
    /// default stream; a device that is lost or closed. [`Refused`] has the slice.
    ///
    /// # Safety
    /// The elements were written, and nobody captures the slice's stream into a graph meanwhile. Uses that cudarc does
    /// not track are on the slice's own stream, or complete: cudarc knows only the last of the streams that read it, and
    /// none if its event tracking is off.
    pub unsafe fn adopt_cudarc<T: Element>(
        &self,
        slice: CudaSlice<T>,
    ) -> Result<DeviceBuffer<T>, Refused<CudaSlice<T>>> {
        // SAFETY: the caller vouches that the stream is not being captured.
        let stream = match unsafe { self.adopt(slice.stream()) } {
            Ok(stream) => stream,
            Err(error) => return Err(Refused { error, value: Some(slice) }),
        };
        let mut slice = slice;
        let (ptr, len) = (wait_for_tracked(&mut slice), slice.len());
        // Its stream is ordered after the uses that cudarc knows, so later work there is as well.
        match Adoptable::<T>::behind(&stream, ptr, len) {
            Ok(adoptable) => Ok(adoptable.adopt(Box::new(Kept(ManuallyDrop::new(slice))))),
            Err(error) => Err(Refused { error, value: Some(slice) }),
        }
    }

    /// Hands memory to cudarc, without a copy and without a host wait: `stream` waits, on the device, for every use
    /// here, and the slice belongs to it.
    ///
    /// Memory that came from a `CudaSlice` becomes that slice again, on its own stream. Other memory no longer counts in the
    /// figures and the limit of [`memory`](Self::memory), and cudarc frees it.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongDevice`]: a buffer of another device, a stream of another context;
    /// [`ErrorDetail::Unwritten`], [`ErrorDetail::Upstream`]: data that was never written, or whose producer failed;
    /// [`ErrorDetail::Unsupported`]: memory of a third library, an empty buffer, a
    /// [part](DeviceBuffer::split_off) of one; a device that is lost or closed.
    /// [`Refused`] has the buffer.
    ///
    /// # Safety
    /// Nobody captures the stream into a graph meanwhile.
    pub unsafe fn release_to_cudarc<T: Element + DeviceRepr>(
        &self,
        mut buffer: DeviceBuffer<T>,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaSlice<T>, Refused<DeviceBuffer<T>>> {
        // SAFETY: the caller's promise is the same.
        match unsafe { self.release(&mut buffer, stream) } {
            Ok(slice) => Ok(slice),
            Err(error) => Err(Refused { error, value: Some(buffer) }),
        }
    }

    unsafe fn release<T: Element + DeviceRepr>(
        &self,
        buffer: &mut DeviceBuffer<T>,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaSlice<T>> {
        let engine = self.engine();
        if buffer.memory().engine.state.id != engine.state.id {
            return Err(wrong_device("the buffer", engine, &buffer.memory().engine));
        }
        let unsupported = |what| -> Error {
            ErrorDetail::Unsupported { what, device: engine.label().to_owned() }.into()
        };
        if buffer.is_empty() {
            return Err(unsupported("an empty slice of cudarc's"));
        }
        let Some(memory) = buffer.memory_mut() else {
            return Err(unsupported(
                "a part of a buffer, or what a leaked loan holds, as cudarc's",
            ));
        };
        let target = match memory.owner() {
            Some(owner) => match owner.downcast_ref::<Kept<T>>() {
                Some(kept) => kept.0.stream().clone(),
                None => return Err(unsupported("memory of a third library as cudarc's")),
            },
            None => stream.clone(),
        };
        // SAFETY: the caller vouches that the stream is not being captured.
        let theirs = unsafe { self.adopt(&target) }?;
        let nothing = |_: &RawQueue<'_>, _: (RawSlice<T>,)| Ok::<_, Error>(());
        let uses = Uses::new("release_to_cudarc").updates(buffer);
        // SAFETY: the call puts nothing on the stream except waits for every use so far.
        unsafe { theirs.enqueue(uses, nothing) }.queued()?;
        let (ptr, len) = (buffer.device_ptr(), buffer.len());
        let owner = buffer.memory_mut().and_then(Allocation::release);
        match owner.and_then(|owner| owner.downcast::<Kept<T>>().ok()) {
            Some(kept) => {
                let mut slice = kept.into_slice();
                // From here on, its events are ordered after the uses here.
                wait_for_tracked(&mut slice);
                Ok(slice)
            }
            // SAFETY: the allocation is the slice's now; the stream is behind every use of it.
            None => Ok(unsafe { target.upgrade_device_ptr::<T>(ptr, len) }),
        }
    }
}

impl Stream {
    /// Exposes the stream to cudarc for good; from now on it is shared, as after [`as_raw`](Self::as_raw).
    /// [`lend_cudarc`](Self::lend_cudarc) exposes it for a while.
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`]: not a stream of a CUDA device.
    ///
    /// # Safety
    /// As [`as_raw`](Self::as_raw): the result, and everything that cudarc makes from it, is dropped
    /// before this stream's last handle.
    pub unsafe fn to_cudarc(&self) -> Result<Arc<CudaStream>> {
        let context = self.device().cudarc_context()?;
        // SAFETY: the caller promised what `as_raw` requires.
        let handle = unsafe { self.as_raw() };
        // SAFETY: the stream is of this context, and the caller keeps it for as long as cudarc uses it.
        Ok(unsafe { context.wrap_borrowed_stream(handle as CUstream) })
    }

    /// Lends the stream to cudarc until the loan is dropped; see [`lend_raw`](Self::lend_raw).
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`]: not a stream of a CUDA device.
    ///
    /// # Safety
    /// As [`lend_raw`](Self::lend_raw), for the stream and everything that cudarc makes from it.
    pub unsafe fn lend_cudarc(&self) -> Result<(Arc<CudaStream>, StreamLoan)> {
        let context = self.device().cudarc_context()?;
        // SAFETY: the caller promised what `lend_raw` requires.
        let loan = unsafe { self.lend_raw() };
        // SAFETY: the stream is of this context, and the loan keeps it.
        let stream = unsafe { context.wrap_borrowed_stream(loan.handle() as CUstream) };
        Ok((stream, loan))
    }
}

impl RawQueue<'_> {
    /// Returns the stream as cudarc's. It must be dropped before `enqueue` returns, unless the value that holds it is
    /// [kept](Uses::keeps) and not used.
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`]: not a CUDA device.
    pub fn cudarc_stream(&self) -> Result<Arc<CudaStream>> {
        let context = self.engine().backend.cudarc_context().and_then(|any| any.downcast().ok());
        let context: Arc<CudaContext> = context.ok_or_else(|| {
            let device = self.engine().label().to_owned();
            ErrorDetail::Unsupported { what: "a CUDA stream", device }
        })?;
        // SAFETY: the stream is of this context; the closure that has `self` is in an unsafe call, which vouches that
        // the handle is not used later.
        Ok(unsafe { context.wrap_borrowed_stream(self.stream() as CUstream) })
    }
}

impl<T> RawSlice<T> {
    /// Returns the range as an argument for cudarc's safe wrappers (cuBLAS, cuBLASLt, cuFFT, cuRAND), inside
    /// [`enqueue`](Stream::enqueue) on that stream. The operation orders it: cudarc tracks nothing.
    #[must_use]
    pub fn cudarc(self, stream: &Arc<CudaStream>) -> CudarcSlice<T> {
        CudarcSlice { slice: self, stream: stream.clone() }
    }
}

/// A declared range inside [`enqueue`](Stream::enqueue), as cudarc's `DevicePtr` and `DevicePtrMut`; made by
/// [`RawSlice::cudarc`].
#[derive(Debug)]
pub struct CudarcSlice<T> {
    slice: RawSlice<T>,
    stream: Arc<CudaStream>,
}

impl<T> DeviceSlice<T> for CudarcSlice<T> {
    fn len(&self) -> usize {
        self.slice.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<T> DevicePtr<T> for CudarcSlice<T> {
    fn device_ptr<'a>(&'a self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.slice.address(), SyncOnDrop::Record(None))
    }
}

impl<T> DevicePtrMut<T> for CudarcSlice<T> {
    fn device_ptr_mut<'a>(&'a mut self, _stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.slice.address(), SyncOnDrop::Record(None))
    }
}

/// A slice that is dropped with its context current, on any thread.
struct Kept<T>(ManuallyDrop<CudaSlice<T>>);

impl<T> Kept<T> {
    fn into_slice(self) -> CudaSlice<T> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: taken once: the drop does not run.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }
}

impl<T> Drop for Kept<T> {
    fn drop(&mut self) {
        let ours = self.0.context().cu_ctx();
        let before = result::ctx::get_current().ok().flatten().unwrap_or(std::ptr::null_mut());
        // SAFETY: the slice keeps its context.
        unsafe { result::ctx::set_current(ours) }.ok();
        // SAFETY: dropped once, here.
        unsafe { ManuallyDrop::drop(&mut self.0) };
        // SAFETY: this was the current context a moment ago, or null.
        unsafe { result::ctx::set_current(before) }.ok();
    }
}

/// Makes the slice's own stream wait for the uses that cudarc tracks, and records it as the last user. Returns the
/// address.
fn wait_for_tracked<T>(slice: &mut CudaSlice<T>) -> u64 {
    let stream = slice.stream().clone();
    let (ptr, recorded) = slice.device_ptr_mut(&stream);
    drop(recorded);
    ptr
}
