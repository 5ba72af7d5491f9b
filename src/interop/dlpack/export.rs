//! Our memory as a tensor: at the export, the consumer's stream is ordered after ours, and the memory is freed after the consumer's uses.
//!
//! | an exported tensor | its memory is held by |
//! |---|---|
//! | alive | the box that contains the tensor |
//! | its deleter was called | the reaper's queue |
//! | the reaper has run, and there is a consumer's stream | `retired`, behind everything on the device at that time |
//! | that point could not be marked | the reaper again, at the poller's next sweep |
//!
//! The consumer's stream is used before the tensor is handed out, and never again: the protocol does not keep it alive, and consumers
//! destroy their streams at any time.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use super::abi::{
    DLDataType, DLDevice, DLManagedTensorVersioned, DLTensor, DlpackElement, VERSION,
};
use super::tensor::{DlpackTensor, Managed, bad, device_of, elements, row_major};
use crate::backend::{DeviceKind, DevicePtr};
use crate::device::Device;
use crate::device::home::Home;
use crate::error::refused::Refused;
use crate::error::tensor::TensorProblem;
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::buffer::DeviceBuffer;
use crate::memory::pinned::PinnedBuffer;
use crate::memory::reclaim::retired::Remnant;
use crate::memory::view::Readable;
use crate::op::freeze::before_host;
use crate::op::{HostValue, Op};
use crate::runtime::Engine;
use crate::stream::Stream;
use crate::submit::{RawQueue, Uses, wrong_device};
use crate::thread::exit::ExitGuard;
use crate::thread::role;
use gpu_await_protocol::hazard::Mode;

/// How the consumer of an exported tensor is ordered.
#[derive(Clone, Debug)]
pub enum DlpackConsumer {
    /// The consumer uses the memory on this stream, which is either a stream of its own that was [adopted](Stream::from_raw) or a stream of this
    /// crate. It may also use the memory on other streams, ordered behind this one, and may call the deleter before its work is complete.
    Stream(Stream),
    /// The consumer does not know streams (NumPy): the export waits, on the host, until all uses of the memory are
    /// complete; the consumer's uses are complete when it calls the deleter.
    Synchronized,
    /// The consumer orders its uses itself, and they are complete when it calls the deleter (`stream=-1`).
    Unordered,
}

impl DlpackConsumer {
    /// Parses the `stream` argument of Python's `__dlpack__`: on a CUDA device, none or 1 is the legacy default
    /// stream, 2 the per-thread one, -1 no ordering at all, anything else a `CUstream`; a host device takes none.
    ///
    /// The per-thread default stream is a different stream on every thread. It is ordered through the legacy one,
    /// which the driver orders with it in both directions, on the device.
    ///
    /// # Errors
    /// [`ErrorDetail::BadStream`]: 0, which is ambiguous, a negative number, a stream for a host device; as
    /// [`Stream::from_raw`].
    ///
    /// # Safety
    /// The number is a stream of the device's context, as the protocol requires, that nobody captures, and the stream
    /// lives until the memory has been exported for it, or this value is dropped.
    pub unsafe fn from_argument(device: &Device, stream: Option<i64>) -> Result<DlpackConsumer> {
        role::check("adopting a consumer's stream")?;
        let refused = |stream: i64, reason| {
            let handle = stream as u64;
            Err(ErrorDetail::BadStream { handle, reason }.into())
        };
        let handle = match (device.kind(), stream) {
            (DeviceKind::Host, None) => return Ok(DlpackConsumer::Synchronized),
            (DeviceKind::Host, Some(stream)) => {
                return refused(stream, "a consumer on the CPU has no stream");
            }
            (_, Some(-1)) => return Ok(DlpackConsumer::Unordered),
            (_, None | Some(1 | 2)) => 1,
            (_, Some(0)) => return refused(0, "0 is ambiguous: 1 is the legacy default stream"),
            (_, Some(stream)) if stream < 0 => return refused(stream, "no stream"),
            (_, Some(stream)) => stream as u64,
        };
        // SAFETY: the caller's promise; the export marks its work at once, as on any shared stream, so the
        // stream is not needed afterwards.
        Ok(DlpackConsumer::Stream(unsafe { Stream::from_raw(device, handle, ()) }?))
    }
}

impl<T: DlpackElement> DeviceBuffer<T> {
    /// Exports the buffer as a row-major tensor of that shape, without a copy: on `cuda:N`, or on the CPU for a host
    /// device. The consumer's stream waits, on the device, for every use so far.
    ///
    /// # Ownership
    /// The buffer moves into the tensor. The deleter only posts a message, on any thread: the memory is freed
    /// after everything that is on the device when it is called, even after the device was closed. (A driver before
    /// CUDA 12.5 cannot report other libraries' non-blocking streams: the consumer's work on such a stream must be
    /// complete by then.)
    ///
    /// # Blocking
    /// With [`DlpackConsumer::Synchronized`], until the work that uses the memory is complete.
    ///
    /// # Errors
    /// [`TensorProblem::Shape`], [`TensorProblem::Extent`]: a shape with a different number of elements, or that no tensor can have;
    /// [`ErrorDetail::WrongDevice`]: a stream of another device; [`ErrorDetail::Unwritten`], [`ErrorDetail::Upstream`]: data that was never
    /// written, or whose producer failed; a device that is lost or closed. [`Refused`] has the buffer. A producer that fails when it runs
    /// ([`try_host`](crate::RawQueue::try_host)), after this call, is only reported with
    /// [`DlpackConsumer::Synchronized`]; otherwise only by its own future.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// use gpu_await::DlpackConsumer;
    /// let x = stream.upload(vec![1.0f32; 6]).queued()?;
    /// let tensor = x.into_dlpack(&[2, 3], DlpackConsumer::Synchronized)?;
    /// assert_eq!(tensor.shape(), [2, 3]);
    /// let raw = tensor.into_raw(); // for a capsule `dltensor_versioned`
    /// # drop(unsafe { gpu_await::DlpackTensor::from_raw(raw) }?);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn into_dlpack(
        self,
        shape: &[usize],
        consumer: DlpackConsumer,
    ) -> Result<DlpackTensor, Refused<Self>> {
        export(self, shape, consumer)
    }
}

impl<T: DlpackElement> PinnedBuffer<T> {
    /// Exports the memory as a row-major tensor of that shape, without a copy: pinned host memory of a CUDA device,
    /// or CPU memory for a host device.
    ///
    /// # Ownership
    /// As [`DeviceBuffer::into_dlpack`]; the memory returns to its pool.
    ///
    /// # Errors
    /// As [`DeviceBuffer::into_dlpack`], for the shape; [`ErrorDetail::WrongDevice`]: a stream of another device; a device
    /// that is lost or closed. [`Refused`] has the buffer.
    pub fn into_dlpack(
        self,
        shape: &[usize],
        consumer: DlpackConsumer,
    ) -> Result<DlpackTensor, Refused<Self>> {
        export(self, shape, consumer)
    }
}

/// Memory that a tensor can own.
trait Exportable: Sized + Send + 'static {
    const DATA_TYPE: DLDataType;

    fn len(&self) -> usize;
    fn address(&self) -> u64;
    fn engine(&self) -> &Arc<Engine>;
    fn device(&self) -> DLDevice;

    /// Makes the stream wait for every use so far.
    fn order(&mut self, stream: &Stream) -> Result<()>;
    /// Rejects memory that must not be read.
    fn check(&self) -> Result<()>;
    /// Blocks until every use so far is complete.
    fn synchronize(&self) -> Result<()>;
}

impl<T: DlpackElement> Exportable for DeviceBuffer<T> {
    const DATA_TYPE: DLDataType = T::DATA_TYPE;

    fn len(&self) -> usize {
        DeviceBuffer::len(self)
    }

    fn address(&self) -> u64 {
        self.device_ptr()
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.memory().engine
    }

    fn device(&self) -> DLDevice {
        device_of(Exportable::engine(self))
    }

    fn order(&mut self, stream: &Stream) -> Result<()> {
        self.memory().check_is_in_no_graph(&self.span().range, "dlpack")?;
        let uses = Uses::new("dlpack").updates(self).commands(0);
        // SAFETY: nothing but waits is put on the stream.
        unsafe { stream.enqueue(uses, |_: &RawQueue<'_>, _| Ok::<_, Error>(())) }.queued()
    }

    fn check(&self) -> Result<()> {
        before_host("dlpack", &self.span(), Mode::ReadWrite).map(drop)
    }

    fn synchronize(&self) -> Result<()> {
        let (uses, on) = before_host("dlpack", &self.span(), Mode::ReadWrite)?;
        Op::behind_uses(uses, HostValue::Here((), on)).synchronize()?;
        // Checked again: the driver may have refused a list that was not on its stream yet.
        self.check()
    }
}

impl<T: DlpackElement> Exportable for PinnedBuffer<T> {
    const DATA_TYPE: DLDataType = T::DATA_TYPE;

    fn len(&self) -> usize {
        PinnedBuffer::len(self)
    }

    fn address(&self) -> u64 {
        self.host().0 as u64
    }

    fn engine(&self) -> &Arc<Engine> {
        self.block().engine()
    }

    fn device(&self) -> DLDevice {
        match device_of(Exportable::engine(self)) {
            device if device.device_type == DLDevice::CPU => device,
            device => DLDevice { device_type: DLDevice::CUDA_HOST, ..device },
        }
    }

    fn order(&mut self, _stream: &Stream) -> Result<()> {
        // No device work uses memory that the user holds.
        Ok(())
    }

    fn check(&self) -> Result<()> {
        Exportable::engine(self).check_open()
    }

    fn synchronize(&self) -> Result<()> {
        // No device work uses memory that the user holds.
        self.check()
    }
}

/// The resources of an exported tensor until its deleter is called.
struct Exported<M: Exportable> {
    /// `Some` until the drop.
    memory: Option<M>,
    /// The device, if the consumer's work may still be running when it calls the deleter.
    under_way_on: Option<Arc<Home>>,
}

impl<M: Exportable> Drop for Exported<M> {
    /// Runs on the reaper's thread, or where the device is gone.
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        let Some(home) = self.under_way_on.take() else { return };
        let engine = &home.engine;
        if engine.state.lost().is_some() {
            return;
        }
        let marked = match ExitGuard::in_driver() {
            Some(_in_driver) => home.mark_all(),
            // The memory goes with the process.
            None => return std::mem::forget(memory),
        };
        match marked {
            Ok(points) => {
                let (ptr, bytes, owner) = (DevicePtr::NULL, 0, Box::new(memory));
                let users = points.into_iter().collect();
                engine.retire(Remnant::Foreign { ptr, bytes, owner }, users);
            }
            Err(_) if engine.state.lost().is_some() => {}
            // It is unknown when the consumer's work is complete: a later mark is after it as well.
            Err(_) => {
                let again = Exported { memory: Some(memory), under_way_on: Some(home.clone()) };
                engine.background.drop_again(Box::new(again));
            }
        }
    }
}

/// An exported tensor, in one allocation with everything it points to.
struct ExportedTensor<M: Exportable> {
    managed: DLManagedTensorVersioned,
    axes: Box<[i64]>,
    exported: Exported<M>,
}

fn export<M: Exportable>(
    memory: M,
    shape: &[usize],
    consumer: DlpackConsumer,
) -> Result<DlpackTensor, Refused<M>> {
    let mut memory = memory;
    let handed_over = role::check("exporting a tensor")
        .and_then(|()| axes_of(shape, memory.len(), M::DATA_TYPE))
        .and_then(|axes| Ok((axes, hand_over(&mut memory, consumer)?)));
    let ((ndim, axes), under_way_on) = match handed_over {
        Ok(handed_over) => handed_over,
        Err(error) => return Err(Refused { error, value: Some(memory) }),
    };
    let dl_tensor = DLTensor {
        data: memory.address() as *mut c_void,
        device: memory.device(),
        ndim,
        dtype: M::DATA_TYPE,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = DLManagedTensorVersioned {
        version: VERSION,
        manager_ctx: std::ptr::null_mut(),
        deleter: Some(delete::<M>),
        flags: 0,
        dl_tensor,
    };
    let exported = Exported { memory: Some(memory), under_way_on };
    let tensor = Box::leak(Box::new(ExportedTensor { managed, axes, exported }));
    let (shape, strides) = tensor.axes.split_at_mut(shape.len());
    tensor.managed.dl_tensor.shape = shape.as_mut_ptr();
    tensor.managed.dl_tensor.strides = strides.as_mut_ptr();
    let whole: *mut ExportedTensor<M> = tensor;
    // SAFETY: it was leaked just above, and nothing else refers to it.
    let managed = unsafe { &mut (*whole).managed };
    managed.manager_ctx = whole.cast();
    Ok(DlpackTensor { managed: Managed::Versioned(NonNull::from(managed)) })
}

/// The number of axes of a row-major tensor of `len` elements, then their extents and their strides.
fn axes_of(shape: &[usize], len: usize, data_type: DLDataType) -> Result<(i32, Box<[i64]>)> {
    let mut extents = Vec::with_capacity(2 * shape.len());
    for (axis, &extent) in shape.iter().enumerate() {
        match i64::try_from(extent) {
            Ok(extent) => extents.push(extent),
            Err(_) => return Err(bad(TensorProblem::Extent { axis, extent })),
        }
    }
    let (Ok(ndim), true) = (i32::try_from(shape.len()), elements(&extents) == Some(len)) else {
        return Err(bad(TensorProblem::Shape { shape: extents, len }));
    };
    // Without elements, the extents are not bounded by the memory.
    let Some(strides) = row_major(&extents) else {
        let element_bytes = usize::from(data_type.bits / 8);
        return Err(ErrorDetail::TooLarge { len: usize::MAX, element_bytes }.into());
    };
    extents.extend(strides);
    Ok((ndim, extents.into()))
}

/// Orders the consumer after all uses of the memory. Returns the device, unless the consumer's uses are
/// complete when it calls the deleter.
fn hand_over<M: Exportable>(memory: &mut M, consumer: DlpackConsumer) -> Result<Option<Arc<Home>>> {
    match consumer {
        DlpackConsumer::Unordered => memory.check().map(|()| None),
        DlpackConsumer::Synchronized => memory.synchronize().map(|()| None),
        DlpackConsumer::Stream(stream) => {
            // Before `order`, which would poison the outputs of a refused operation.
            memory.check()?;
            let (ours, theirs) = (memory.engine(), stream.engine());
            if ours.state.id != theirs.state.id {
                return Err(wrong_device("the consumer's stream", ours, theirs));
            }
            let home = stream.home();
            // For the deleter, which may be called after the close.
            home.whole_device()?;
            memory.order(&stream)?;
            Ok(Some(home.clone()))
        }
    }
}

/// The deleter of an exported tensor.
unsafe extern "C" fn delete<M: Exportable>(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: the consumer passes the tensor that has this deleter.
    let whole = unsafe { (*tensor).manager_ctx }.cast::<ExportedTensor<M>>();
    // SAFETY: `export` leaked the box, and the consumer calls this once.
    let whole = unsafe { Box::from_raw(whole) };
    let exported = whole.exported;
    let Some(engine) = exported.memory.as_ref().map(|memory| memory.engine().clone()) else {
        return;
    };
    engine.background.drop_later(Box::new(exported));
}
