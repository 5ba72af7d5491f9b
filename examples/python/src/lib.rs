//! `gpu_await_py`: gpu-await in Python. `Device.axpy` runs a kernel on arrays of any library that speaks DLPack, in
//! place, and returns a future of asyncio; `Array` is memory of the device that any such library can look at.
//!
//! Everything of a `Device` is on one stream, so that two calls with the same array are in order.

mod capsule;
mod completions;

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use completions::{Completions, Waiter};
use futures::executor::block_on;
use gpu_await::{
    DeviceBuffer, DeviceKind, DlpackConsumer, DlpackTensor, Error, ErrorKind, Frozen, Op, Stream,
    kernels,
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

/// Devices that the end of the interpreter waits for.
static OPENED: Mutex<Vec<Weak<Opened>>> = Mutex::new(Vec::new());

/// What a kernel reads.
enum Operand {
    Buffer(DeviceBuffer<f32>),
    Frozen(Frozen<f32>),
}

impl Opened {
    /// The stream that producers are asked with.
    fn raw_stream(&self) -> Option<u64> {
        // SAFETY: the stream lives as long as this, and nobody captures it.
        (self.device.kind() == DeviceKind::Cuda).then(|| unsafe { self.stream.as_raw() })
    }

    fn import(self: &Arc<Self>, from: &Bound<'_, PyAny>) -> PyResult<DlpackTensor> {
        if let Ok(array) = from.cast::<Array>() {
            let array = array.borrow();
            if Arc::ptr_eq(&array.opened, self) {
                // Our own is in order on the stream as it is.
                let tensor = array.share()?.into_dlpack(&[array.len], DlpackConsumer::Unordered);
                return tensor.map_err(|refused| exception(refused.error));
            }
        }
        capsule::import(from, self.raw_stream())
    }

    fn written(&self, tensor: DlpackTensor) -> PyResult<DeviceBuffer<f32>> {
        // SAFETY: Python's rule: who shares an array orders its uses; the producer was asked with the stream.
        unsafe { self.stream.adopt_dlpack(tensor) }.map_err(|refused| exception(refused.error))
    }

    fn read(&self, py: Python<'_>, tensor: DlpackTensor) -> PyResult<Operand> {
        if !tensor.is_read_only() {
            return self.written(tensor).map(Operand::Buffer);
        }
        // SAFETY: as above, and it is read-only.
        let frozen: Op<Frozen<f32>> = unsafe { self.stream.adopt_dlpack_frozen(tensor) };
        py.detach(|| frozen.synchronize()).map(Operand::Frozen).map_err(exception)
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
        let open = || -> gpu_await::Result<_> {
            let device = gpu_await::Device::from_env()?;
            let (stream, axpy) = (device.stream()?, kernels::axpy::load_blocking(&device)?);
            Ok((device, stream, axpy))
        };
        let (device, stream, axpy) = py.detach(open).map_err(exception)?;
        let completions = Completions::start()?;
        let opened = Arc::new(Opened { device, stream, axpy, completions });
        let mut all = OPENED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
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
    fn full(&self, len: usize, value: f32) -> PyResult<Array> {
        let buffer = self.opened.stream.full(len, value).queued().map_err(exception)?;
        Ok(Array { opened: self.opened.clone(), buffer: Arc::new(buffer), len })
    }

    /// `y += a * x`, in place; a future of the running event loop that resolves to `y`.
    fn axpy(
        &self,
        py: Python<'_>,
        a: f32,
        x: &Bound<'_, PyAny>,
        y: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let opened = &self.opened;
        let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
        let (x_tensor, y_tensor) = (opened.import(x)?, opened.import(y)?);
        let ends = |tensor: &DlpackTensor| {
            let len: i64 = tensor.shape().iter().product();
            tensor.address() + 4 * len as u64
        };
        // Two adoptions know nothing of each other.
        if x_tensor.address() < ends(&y_tensor) && y_tensor.address() < ends(&x_tensor) {
            return Err(PyValueError::new_err("x and y share memory"));
        }
        let (mut buffer, operand) = (opened.written(y_tensor)?, opened.read(py, x_tensor)?);
        let op = py.detach(|| match &operand {
            Operand::Buffer(x) => opened.axpy.launch(&opened.stream, a, x, &mut buffer),
            Operand::Frozen(x) => opened.axpy.launch(&opened.stream, a, x, &mut buffer),
        });
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
    len: usize,
}

impl Array {
    /// The same memory, behind everything on the stream.
    fn share(&self) -> PyResult<DeviceBuffer<f32>> {
        let (ptr, owner) = (self.buffer.device_ptr(), self.buffer.clone());
        // SAFETY: the owner keeps the memory, whose writers are on the stream; Python's rule orders the rest.
        unsafe { self.opened.stream.adopt_memory(ptr, self.len, owner) }.map_err(exception)
    }
}

#[pymethods]
impl Array {
    fn __len__(&self) -> usize {
        self.len
    }

    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        let device = DlpackConsumer::Unordered;
        let tensor = self.share()?.into_dlpack(&[self.len], device);
        let device = tensor.map_err(|refused| exception(refused.error))?.device();
        Ok((device.device_type, device.device_id))
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
            && device != self.__dlpack_device__()?
        {
            return Err(PyBufferError::new_err("this array is exported on its own device"));
        }
        let buffer = self.share()?;
        let tensor = py.detach(|| {
            // SAFETY: the protocol's rule: it is the consumer's stream, which lives during the call.
            let consumer =
                unsafe { DlpackConsumer::from_argument(&self.opened.device, stream) }?;
            buffer.into_dlpack(&[self.len], consumer).map_err(Error::from)
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

/// Producers' deleters and our own thread take the GIL, which ends a thread once the interpreter goes: none may be left.
#[pyfunction]
fn _finish(py: Python<'_>) {
    let all = std::mem::take(&mut *OPENED.lock().unwrap_or_else(|poison| poison.into_inner()));
    py.detach(|| {
        for opened in all.iter().filter_map(Weak::upgrade) {
            block_on(opened.device.close(Duration::from_secs(10))).ok();
            opened.completions.finish();
        }
    });
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
