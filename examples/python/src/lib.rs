//! `gpu_await_py`: gpu-await in Python. `Device.axpy` runs a kernel on arrays of any library that speaks DLPack, in
//! place, and returns a future of asyncio; `Array` is memory of the device that any such library can look at.
//!
//! Everything of a `Device` is on one stream, so that two calls with the same array are in order.

mod capsule;
mod completions;

use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use completions::{Completions, Waiter};
use futures::executor::block_on;
use gpu_await::{
    DLDevice, DeviceBuffer, DeviceKind, DlpackConsumer, DlpackTensor, Error, ErrorDetail,
    ErrorKind, Frozen, Op, Result, Stream, kernels,
};
use pyo3::create_exception;
use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

create_exception!(gpu_await_py, GpuError, PyRuntimeError, "The device, or the driver, failed.");

fn exception(error: Error) -> PyErr {
    match error.kind() {
        ErrorKind::InvalidCall => PyValueError::new_err(error.to_string()),
        _ => GpuError::new_err(error.to_string()),
    }
}

/// What a device's handle, its arrays and the end of the process share.
struct Opened {
    device: gpu_await::Device,
    stream: Stream,
    axpy: kernels::axpy,
    completions: Completions,
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut left = lock(&LEFT);
        left.retain(|(_, thread)| !thread.is_finished());
        left.extend(self.completions.close().map(|thread| (self.device.clone(), thread)));
    }
}

/// Devices that the end of the interpreter closes.
static OPENED: Mutex<Vec<Weak<Opened>>> = Mutex::new(Vec::new());

/// Devices that nobody has any more, with a thread that may still have futures to resolve.
static LEFT: Mutex<Vec<(gpu_await::Device, JoinHandle<()>)>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// An argument of a kernel.
enum Argument {
    Ours(Arc<DeviceBuffer<f32>>),
    Theirs(DlpackTensor),
}

/// What a kernel reads.
enum Operand {
    Buffer(DeviceBuffer<f32>),
    Frozen(Frozen<f32>),
}

// Below, what takes a `Python` needs the GIL; all else may make driver calls, and is called without it.
impl Opened {
    fn place(&self) -> DLDevice {
        match self.device.kind() {
            DeviceKind::Host => DLDevice { device_type: DLDevice::CPU, device_id: 0 },
            _ => {
                let device_id = self.device.ordinal() as i32;
                DLDevice { device_type: DLDevice::CUDA, device_id }
            }
        }
    }

    fn argument(self: &Arc<Self>, from: &Bound<'_, PyAny>) -> PyResult<Argument> {
        if let Ok(array) = from.cast::<Array>()
            && Arc::ptr_eq(&array.get().opened, self)
        {
            // In order on the stream as it is.
            return Ok(Argument::Ours(array.get().buffer.clone()));
        }
        // SAFETY: the stream lives as long as this, and nobody captures it.
        let stream = || unsafe { self.stream.as_raw() };
        let stream = (self.device.kind() == DeviceKind::Cuda).then(stream);
        capsule::import(from, self.place(), stream).map(Argument::Theirs)
    }

    /// The same memory, behind everything on the stream.
    fn share(&self, buffer: Arc<DeviceBuffer<f32>>) -> Result<DeviceBuffer<f32>> {
        let (ptr, len) = (buffer.device_ptr(), buffer.len());
        // SAFETY: the owner keeps the memory, whose writers are on the stream; Python's rule orders the rest.
        unsafe { self.stream.adopt_memory(ptr, len, buffer) }
    }

    fn written(&self, argument: Argument) -> Result<DeviceBuffer<f32>> {
        match argument {
            Argument::Ours(buffer) => self.share(buffer),
            // SAFETY: Python's rule: who shares an array orders its uses; the producer was asked with the stream.
            Argument::Theirs(tensor) => Ok(unsafe { self.stream.adopt_dlpack(tensor) }?),
        }
    }

    /// Waits for a read-only array, as nothing but the host can tell that nobody writes it any more.
    fn read(&self, argument: Argument) -> Result<Operand> {
        match argument {
            Argument::Theirs(tensor) if tensor.is_read_only() => {
                // SAFETY: as above, and it is read-only.
                let frozen: Op<Frozen<f32>> = unsafe { self.stream.adopt_dlpack_frozen(tensor) };
                frozen.synchronize().map(Operand::Frozen)
            }
            argument => self.written(argument).map(Operand::Buffer),
        }
    }

    fn axpy(&self, a: f32, x: Argument, y: Argument) -> PyResult<Op<()>> {
        let mut y = self.written(y).map_err(exception)?;
        let x = self.read(x).map_err(exception)?;
        let (x_ptr, x_len) = match &x {
            Operand::Buffer(x) => (x.device_ptr(), x.len()),
            Operand::Frozen(x) => (x.device_ptr(), x.len()),
        };
        let (y_ptr, bytes) = (y.device_ptr(), |len: usize| 4 * len as u64);
        // Two adoptions know nothing of each other.
        if x_ptr < y_ptr + bytes(y.len()) && y_ptr < x_ptr + bytes(x_len) {
            return Err(PyValueError::new_err("x and y share memory"));
        }
        Ok(match &x {
            Operand::Buffer(x) => self.axpy.launch(&self.stream, a, x, &mut y),
            Operand::Frozen(x) => self.axpy.launch(&self.stream, a, x, &mut y),
        })
    }
}

/// A GPU, or the host device: as the environment variable `GPU_AWAIT_DEVICE` says.
#[pyclass(frozen)]
struct Device {
    opened: Arc<Opened>,
}

#[pymethods]
impl Device {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Device> {
        let open = || -> Result<_> {
            let device = gpu_await::Device::from_env()?;
            let (stream, axpy) = (device.stream()?, kernels::axpy::load_blocking(&device)?);
            Ok((device, stream, axpy))
        };
        let (device, stream, axpy) = py.detach(open).map_err(exception)?;
        let completions = Completions::start()?;
        let opened = Arc::new(Opened { device, stream, axpy, completions });
        let mut all = lock(&OPENED);
        all.retain(|opened| opened.strong_count() > 0);
        all.push(Arc::downgrade(&opened));
        Ok(Device { opened })
    }

    fn __repr__(&self) -> String {
        format!("Device({})", self.opened.device)
    }

    /// Bytes that arrays hold or held until the device has finished with them.
    fn used_bytes(&self) -> PyResult<u64> {
        self.opened.device.memory().map(|memory| memory.used_bytes).map_err(exception)
    }

    /// An array of `len` times `value`, of 32-bit floats.
    fn full(&self, py: Python<'_>, len: usize, value: f32) -> PyResult<Array> {
        let buffer = py.detach(|| self.opened.stream.full(len, value).queued());
        let buffer = Arc::new(buffer.map_err(exception)?);
        Ok(Array { opened: self.opened.clone(), buffer })
    }

    /// `y += a * x`, in place; a future of the running event loop that resolves to `y`. The call waits for nothing,
    /// unless `x` is read-only.
    fn axpy(
        &self,
        py: Python<'_>,
        a: f32,
        x: &Bound<'_, PyAny>,
        y: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let opened = &self.opened;
        let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
        let (x_argument, y_argument) = (opened.argument(x)?, opened.argument(y)?);
        let op = py.detach(|| opened.axpy(a, x_argument, y_argument))?;
        let future = event_loop.call_method0("create_future")?;
        let waiter = Waiter {
            event_loop: event_loop.unbind(),
            future: future.clone().unbind(),
            value: y.clone().unbind(),
        };
        opened.completions.add(waiter, op);
        Ok(future.unbind())
    }
}

/// 32-bit floats in the memory of a device, for any library that speaks DLPack.
#[pyclass(frozen, weakref)]
struct Array {
    opened: Arc<Opened>,
    buffer: Arc<DeviceBuffer<f32>>,
}

#[pymethods]
impl Array {
    fn __len__(&self) -> usize {
        self.buffer.len()
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let DLDevice { device_type, device_id } = self.opened.place();
        (device_type, device_id)
    }

    /// On a GPU the consumer's stream waits, on the device; on the host device this call waits.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        if copy == Some(true) {
            return Err(PyBufferError::new_err("this array is exported without a copy"));
        }
        if let Some(device) = dl_device
            && device != self.__dlpack_device__()
        {
            return Err(PyBufferError::new_err("this array is exported on its own device"));
        }
        let (opened, len) = (&self.opened, self.buffer.len());
        let tensor = py.detach(|| {
            // SAFETY: the protocol's rule: it is the consumer's stream, which lives during the call.
            let consumer = unsafe { DlpackConsumer::from_argument(&opened.device, stream) }?;
            opened.share(self.buffer.clone())?.into_dlpack(&[len], consumer).map_err(Error::from)
        });
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        capsule::export(py, tensor.map_err(exception)?, versioned)
    }

    /// A NumPy array of the same memory; on the host device alone.
    fn numpy(this: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        let numpy = this.py().import("numpy")?;
        Ok(numpy.call_method1("from_dlpack", (this,))?.unbind())
    }
}

/// Producers' deleters and our own threads take the GIL, which ends a thread once the interpreter goes: none may be left.
#[pyfunction]
fn _finish(py: Python<'_>) {
    let opened = std::mem::take(&mut *lock(&OPENED));
    py.detach(|| {
        for opened in opened.iter().filter_map(Weak::upgrade) {
            end(&opened.device, opened.completions.close());
        }
        let left = std::mem::take(&mut *lock(&LEFT));
        left.into_iter().for_each(|(device, thread)| end(&device, Some(thread)));
    });
}

fn end(device: &gpu_await::Device, thread: Option<JoinHandle<()>>) {
    match block_on(device.close(Duration::from_secs(10))) {
        // A kernel that does not end: its futures stay pending, and the thread with them.
        Err(error) if matches!(error.detail(), ErrorDetail::TimedOut { .. }) => {}
        // It says itself what it panics with.
        _ => drop(thread.map(JoinHandle::join)),
    }
}

#[pymodule]
fn gpu_await_py(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Device>()?;
    module.add_class::<Array>()?;
    module.add("GpuError", module.py().get_type::<GpuError>())?;
    let finish = wrap_pyfunction!(_finish, module)?;
    module.py().import("atexit")?.call_method1("register", (finish,))?;
    Ok(())
}
