//! Python's capsules of DLPack tensors, in and out.

use std::ffi::CStr;
use std::ptr::NonNull;

use gpu_await::{DLDevice, DlpackTensor, Error};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::exception;

const VERSIONED: &CStr = c"dltensor_versioned";
const UNVERSIONED: &CStr = c"dltensor";

/// A producer's tensor, ready behind `stream`.
pub(crate) fn import(
    from: &Bound<'_, PyAny>,
    place: DLDevice,
    stream: Option<u64>,
) -> PyResult<DlpackTensor> {
    let py = from.py();
    if !from.hasattr("__dlpack__")? || !from.hasattr("__dlpack_device__")? {
        let expected = "an array with `__dlpack__` and `__dlpack_device__` is expected";
        return Err(PyTypeError::new_err(expected));
    }
    // Asked first: a producer elsewhere would be given a stream that means nothing to it.
    let (device_type, device_id) = from.call_method0("__dlpack_device__")?.extract()?;
    let found = DLDevice { device_type, device_id };
    if found != place {
        return Err(PyValueError::new_err(format!("the array is on {found}, not on {place}")));
    }
    let arguments = PyDict::new(py);
    arguments.set_item("stream", stream)?;
    arguments.set_item("max_version", (1, 0))?;
    let capsule = match from.call_method("__dlpack__", (), Some(&arguments)) {
        // A producer from before version 1.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            arguments.del_item("max_version")?;
            from.call_method("__dlpack__", (), Some(&arguments))?
        }
        other => other?,
    };
    if let Some(tensor) = take(&capsule, VERSIONED, c"used_dltensor_versioned")? {
        // SAFETY: the capsule had a producer's tensor, and is renamed: nobody else has it.
        return unsafe { DlpackTensor::from_raw(tensor.cast()) }.map_err(exception);
    }
    match take(&capsule, UNVERSIONED, c"used_dltensor")? {
        // SAFETY: as above.
        Some(tensor) => Ok(unsafe { DlpackTensor::from_raw_unversioned(tensor.cast()) }),
        None => Err(PyBufferError::new_err("`__dlpack__` returned no capsule of a tensor")),
    }
}

/// What a capsule of that name has; from now on it is ours.
fn take(
    capsule: &Bound<'_, PyAny>,
    name: &'static CStr,
    used: &'static CStr,
) -> PyResult<Option<NonNull<std::ffi::c_void>>> {
    // SAFETY: any object may be asked, with the GIL.
    if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) } == 0 {
        return Ok(None);
    }
    // SAFETY: it is a valid capsule of that name.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) };
    // SAFETY: as above; the name lives for ever.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(capsule.py()));
    }
    Ok(NonNull::new(pointer))
}

/// A capsule with the tensor, which it deletes if nobody takes it.
pub(crate) fn export(py: Python<'_>, tensor: DlpackTensor, versioned: bool) -> PyResult<Py<PyAny>> {
    let (pointer, name) = match versioned {
        true => (tensor.into_raw().as_ptr().cast(), VERSIONED),
        false => {
            let tensor = tensor.into_raw_unversioned().map_err(|r| exception(Error::from(r)))?;
            (tensor.as_ptr().cast(), UNVERSIONED)
        }
    };
    // SAFETY: the pointer is not null, the name lives for ever, and the destructor takes such a capsule.
    let capsule = unsafe { ffi::PyCapsule_New(pointer, name.as_ptr(), Some(delete)) };
    // SAFETY: it is a new reference, or null with an exception set.
    unsafe { Py::from_owned_ptr_or_err(py, capsule) }
}

/// Nobody took it, if its name is as it was.
unsafe extern "C" fn delete(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule, and the GIL.
    if unsafe { ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) } != 0 {
        // SAFETY: it is a valid capsule of that name.
        let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()) };
        if let Some(tensor) = NonNull::new(tensor) {
            // SAFETY: `export` put it there, and nobody took it.
            drop(unsafe { DlpackTensor::from_raw(tensor.cast()) });
        }
    // SAFETY: as above.
    } else if unsafe { ffi::PyCapsule_IsValid(capsule, UNVERSIONED.as_ptr()) } != 0 {
        // SAFETY: as above.
        let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule, UNVERSIONED.as_ptr()) };
        if let Some(tensor) = NonNull::new(tensor) {
            // SAFETY: as above.
            drop(unsafe { DlpackTensor::from_raw_unversioned(tensor.cast()) });
        }
    }
}
