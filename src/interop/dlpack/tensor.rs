//! A tensor in either layout, and the checks before it is adopted.

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use super::abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor, DlpackElement,
    READ_ONLY, VERSION,
};
use crate::backend::DeviceKind;
use crate::error::refused::Refused;
use crate::error::tensor::TensorProblem;
use crate::error::{Error, ErrorDetail, Result};
use crate::runtime::Engine;

/// A DLPack tensor in transit: memory of another library that is not yet adopted, or memory exported for one.
///
/// # Ownership
/// Dropping it calls its producer's deleter.
pub struct DlpackTensor {
    pub(super) managed: Managed,
}

/// The layout that the producer used.
#[derive(Clone, Copy)]
pub(super) enum Managed {
    Versioned(NonNull<DLManagedTensorVersioned>),
    Unversioned(NonNull<DLManagedTensor>),
}

// SAFETY: DLPack's deleters may be called on any thread, and they are the only code of the producer that is called.
unsafe impl Send for DlpackTensor {}
// SAFETY: a shared reference only reads the tensor's description, which never changes.
unsafe impl Sync for DlpackTensor {}

impl DlpackTensor {
    /// Takes over a tensor of version 1 or later (a Python capsule `dltensor_versioned`).
    ///
    /// # Errors
    /// [`TensorProblem::Version`]: its layout is newer. Its deleter has been called.
    ///
    /// # Safety
    /// `tensor` was made by a producer of DLPack, and nobody else calls its deleter, which may be called on any
    /// thread. Its shape and its strides stay those of the tensor until then.
    pub unsafe fn from_raw(tensor: NonNull<DLManagedTensorVersioned>) -> Result<DlpackTensor> {
        // SAFETY: the caller vouches for it; the version comes first in every layout.
        let version = unsafe { tensor.as_ref() }.version;
        // Its deleter is at the same offset in every version.
        let tensor = DlpackTensor { managed: Managed::Versioned(tensor) };
        if version.major != VERSION.major {
            let (major, minor) = (version.major, version.minor);
            return Err(bad(TensorProblem::Version { major, minor }));
        }
        Ok(tensor)
    }

    /// Takes over a tensor in the layout before version 1 (a Python capsule `dltensor`).
    ///
    /// # Safety
    /// As [`from_raw`](Self::from_raw).
    #[must_use]
    pub unsafe fn from_raw_unversioned(tensor: NonNull<DLManagedTensor>) -> DlpackTensor {
        DlpackTensor { managed: Managed::Unversioned(tensor) }
    }

    /// Hands the tensor to a consumer that knows version 1, which calls the deleter when it has finished.
    #[must_use]
    pub fn into_raw(self) -> NonNull<DLManagedTensorVersioned> {
        let is_versioned = match self.managed {
            Managed::Versioned(tensor) => Some(tensor),
            Managed::Unversioned(_) => None,
        };
        match is_versioned {
            Some(tensor) => {
                std::mem::forget(self);
                tensor
            }
            None => wrap(self, |dl_tensor, manager_ctx| DLManagedTensorVersioned {
                version: VERSION,
                manager_ctx,
                deleter: Some(unwrap_versioned),
                flags: 0,
                dl_tensor,
            }),
        }
    }

    /// Hands the tensor to a consumer that knows only the layout before version 1.
    ///
    /// # Errors
    /// [`TensorProblem::ReadOnly`]: that layout cannot express it. [`Refused`] has the tensor.
    pub fn into_raw_unversioned(self) -> Result<NonNull<DLManagedTensor>, Refused<DlpackTensor>> {
        if self.is_read_only() {
            return Err(Refused { error: bad(TensorProblem::ReadOnly), value: Some(self) });
        }
        Ok(wrap(self, |dl_tensor, manager_ctx| DLManagedTensor {
            dl_tensor,
            manager_ctx,
            deleter: Some(unwrap_unversioned),
        }))
    }

    /// Returns the type of its elements.
    #[must_use]
    pub fn data_type(&self) -> DLDataType {
        self.tensor().dtype
    }

    /// Returns the device that it is on.
    #[must_use]
    pub fn device(&self) -> DLDevice {
        self.tensor().device
    }

    /// Returns its extents, in elements.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        let tensor = self.tensor();
        // SAFETY: by the contract of `from_raw`, there are that many.
        unsafe { axes(tensor.shape, tensor.ndim) }
    }

    /// Returns its strides, in elements; `None` for row-major order.
    #[must_use]
    pub fn strides(&self) -> Option<&[i64]> {
        let tensor = self.tensor();
        // SAFETY: as above.
        (!tensor.strides.is_null()).then(|| unsafe { axes(tensor.strides, tensor.ndim) })
    }

    /// Returns the address of its first element.
    #[must_use]
    pub fn address(&self) -> u64 {
        let tensor = self.tensor();
        (tensor.data as u64).wrapping_add(tensor.byte_offset)
    }

    /// Returns whether it is read-only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        match self.managed {
            // SAFETY: by the contract of `from_raw`, it lives until its deleter is called.
            Managed::Versioned(tensor) => unsafe { tensor.as_ref() }.flags & READ_ONLY != 0,
            Managed::Unversioned(_) => false,
        }
    }

    fn tensor(&self) -> &DLTensor {
        match self.managed {
            // SAFETY: as above.
            Managed::Versioned(tensor) => &unsafe { tensor.as_ref() }.dl_tensor,
            // SAFETY: as above.
            Managed::Unversioned(tensor) => &unsafe { tensor.as_ref() }.dl_tensor,
        }
    }

    /// The number of elements, if they are of type `T`, row-major, and accessible to `engine`.
    pub(super) fn check<T: DlpackElement>(&self, engine: &Engine) -> Result<usize> {
        let found = self.data_type();
        if found != T::DATA_TYPE {
            let (expected, found) = (T::DATA_TYPE.to_string(), found.to_string());
            return Err(bad(TensorProblem::ElementType { expected, found }));
        }
        let (found, expected) = (self.device(), device_of(engine));
        let is_ours = match expected.device_type {
            DLDevice::CPU => found.device_type == DLDevice::CPU,
            _ => found == expected,
        };
        if !is_ours {
            let (expected, found) = (expected.to_string(), found.to_string());
            return Err(bad(TensorProblem::Device { expected, found }));
        }
        let shape = self.shape();
        let element_bytes = size_of::<T>();
        let Some(len) = elements(shape) else {
            if shape.iter().all(|extent| *extent >= 0) {
                return Err(ErrorDetail::TooLarge { len: usize::MAX, element_bytes }.into());
            }
            return Err(bad(TensorProblem::Shape { shape: shape.to_vec(), len: 0 }));
        };
        if let Some(strides) = self.strides().filter(|_| len > 0) {
            let too_large = ErrorDetail::TooLarge { len, element_bytes };
            let expected = row_major(shape).ok_or(too_large)?;
            let axes = shape.iter().zip(strides).zip(&expected);
            // The stride of an axis with one element does not matter.
            if axes.into_iter().any(|((extent, found), expected)| *extent > 1 && found != expected)
            {
                let (shape, strides) = (shape.to_vec(), strides.to_vec());
                return Err(bad(TensorProblem::NotContiguous { shape, strides }));
            }
        }
        if len > 0 && self.tensor().data.is_null() {
            return Err(bad(TensorProblem::NullData { len }));
        }
        Ok(len)
    }
}

impl Drop for DlpackTensor {
    fn drop(&mut self) {
        match self.managed {
            Managed::Versioned(tensor) => {
                // SAFETY: by the contract of `from_raw`, it lives until its deleter is called.
                if let Some(deleter) = unsafe { tensor.as_ref() }.deleter {
                    // SAFETY: this is the only call, and happens once: the tensor's holder drops once.
                    unsafe { deleter(tensor.as_ptr()) };
                }
            }
            Managed::Unversioned(tensor) => {
                // SAFETY: as above.
                if let Some(deleter) = unsafe { tensor.as_ref() }.deleter {
                    // SAFETY: as above.
                    unsafe { deleter(tensor.as_ptr()) };
                }
            }
        }
    }
}

impl fmt::Debug for DlpackTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (element, device) = (self.data_type(), self.device());
        write!(f, "DlpackTensor<{element}>({:?} on {device})", self.shape())
    }
}

/// A tensor in the other layout.
struct Wrapped<L> {
    layout: L,
    tensor: ManuallyDrop<DlpackTensor>,
}

fn wrap<L>(tensor: DlpackTensor, layout: impl FnOnce(DLTensor, *mut c_void) -> L) -> NonNull<L> {
    let DLTensor { data, device, ndim, dtype, shape, strides, byte_offset } = *tensor.tensor();
    let dl_tensor = DLTensor { data, device, ndim, dtype, shape, strides, byte_offset };
    let whole = Box::into_raw(Box::<Wrapped<L>>::new_uninit()).cast::<Wrapped<L>>();
    let layout = layout(dl_tensor, whole.cast());
    // SAFETY: the memory is a box of that type with no other user.
    unsafe { whole.write(Wrapped { layout, tensor: ManuallyDrop::new(tensor) }) };
    // SAFETY: as above, and initialized.
    NonNull::from(unsafe { &mut (*whole).layout })
}

/// # Safety
/// `context` is that of a tensor made by `wrap`, and not used later.
unsafe fn unwrap<L>(context: *mut c_void) {
    // SAFETY: `wrap` leaked the box, and the consumer calls the deleter once.
    let whole = unsafe { Box::from_raw(context.cast::<Wrapped<L>>()) };
    drop(ManuallyDrop::into_inner(whole.tensor));
}

unsafe extern "C" fn unwrap_versioned(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: the consumer passes the tensor that has this deleter.
    let context = unsafe { (*tensor).manager_ctx };
    // SAFETY: only `wrap` installs that deleter.
    unsafe { unwrap::<DLManagedTensorVersioned>(context) };
}

unsafe extern "C" fn unwrap_unversioned(tensor: *mut DLManagedTensor) {
    // SAFETY: the consumer passes the tensor that has this deleter.
    let context = unsafe { (*tensor).manager_ctx };
    // SAFETY: only `wrap` installs that deleter.
    unsafe { unwrap::<DLManagedTensor>(context) };
}

/// The DLPack device of an engine's memory.
pub(super) fn device_of(engine: &Engine) -> DLDevice {
    match engine.backend.kind() {
        DeviceKind::Host => DLDevice { device_type: DLDevice::CPU, device_id: 0 },
        DeviceKind::Cuda => {
            let device_id = engine.backend.ordinal() as i32;
            DLDevice { device_type: DLDevice::CUDA, device_id }
        }
    }
}

/// The number of elements of a shape; `None` if an extent is negative or the product overflows.
pub(super) fn elements(shape: &[i64]) -> Option<usize> {
    let extents = shape.iter().map(|extent| usize::try_from(*extent).ok());
    let extents: Vec<usize> = extents.collect::<Option<_>>()?;
    if extents.contains(&0) {
        return Some(0);
    }
    extents.into_iter().try_fold(1, usize::checked_mul)
}

/// The strides of a row-major tensor, in elements; `None` if one does not fit an `i64`.
pub(super) fn row_major(shape: &[i64]) -> Option<Vec<i64>> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = i64::checked_mul(strides[axis], shape[axis])?;
    }
    Some(strides)
}

/// # Safety
/// `first` points to `ndim` integers.
unsafe fn axes<'a>(first: *mut i64, ndim: i32) -> &'a [i64] {
    match usize::try_from(ndim) {
        Ok(ndim) if ndim > 0 && !first.is_null() => {
            // SAFETY: the caller vouches for it.
            unsafe { std::slice::from_raw_parts(first, ndim) }
        }
        _ => &[],
    }
}

pub(super) fn bad(problem: TensorProblem) -> Error {
    ErrorDetail::BadTensor { problem }.into()
}
