//! The structures of DLPack's C interface, version 1, and its element types.
//!
//! # Source
//! The header `dlpack.h` of DLPack 1.0.
#![forbid(unsafe_code)]

use std::ffi::c_void;
use std::fmt;

use crate::memory::Element;

/// The version that exported tensors carry.
pub(super) const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 0 };

/// The flag of a read-only tensor.
pub(super) const READ_ONLY: u64 = 1;

/// A version of the interface: another `major` means another layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Changes with the layout.
    pub major: u32,
    /// Changes with the values that the layout may hold.
    pub minor: u32,
}

/// The device of a tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// The kind: [`CPU`](Self::CPU), [`CUDA`](Self::CUDA), [`CUDA_HOST`](Self::CUDA_HOST) or one that this crate does not know.
    pub device_type: i32,
    /// The ordinal among devices of the kind.
    pub device_id: i32,
}

impl DLDevice {
    /// The kind of ordinary host memory.
    pub const CPU: i32 = 1;
    /// The kind of a CUDA device's memory.
    pub const CUDA: i32 = 2;
    /// The kind of pinned host memory.
    pub const CUDA_HOST: i32 = 3;
}

impl fmt::Display for DLDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device_type {
            DLDevice::CPU => f.write_str("the CPU"),
            DLDevice::CUDA => write!(f, "cuda:{}", self.device_id),
            DLDevice::CUDA_HOST => f.write_str("pinned host memory"),
            other => write!(f, "device {} of kind {other}", self.device_id),
        }
    }
}

/// The type of a tensor's elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// 0: signed integers, 1: unsigned integers, 2: floating point, 4: `bfloat16`; others are not adopted.
    pub code: u8,
    /// The size of a lane.
    pub bits: u8,
    /// The number of lanes of an element: 1 except for vectors.
    pub lanes: u16,
}

impl fmt::Display for DLDataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DLDataType { code, bits, lanes } = *self;
        match code {
            0 => write!(f, "int{bits}"),
            1 => write!(f, "uint{bits}"),
            2 => write!(f, "float{bits}"),
            4 => write!(f, "bfloat{bits}"),
            5 => write!(f, "complex{bits}"),
            6 => f.write_str("bool"),
            _ => write!(f, "type {code} of {bits} bits"),
        }?;
        if lanes == 1 { Ok(()) } else { write!(f, "x{lanes}") }
    }
}

/// A tensor without an owner.
#[repr(C)]
#[derive(Debug)]
pub struct DLTensor {
    /// The start of its allocation.
    pub data: *mut c_void,
    /// The device that it is on.
    pub device: DLDevice,
    /// The number of axes.
    pub ndim: i32,
    /// The type of its elements.
    pub dtype: DLDataType,
    /// `ndim` extents, in elements.
    pub shape: *mut i64,
    /// `ndim` strides, in elements; null for row-major order.
    pub strides: *mut i64,
    /// The offset of the first element from `data`, in bytes.
    pub byte_offset: u64,
}

/// A tensor and its owner, in the layout before version 1.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's context.
    pub manager_ctx: *mut c_void,
    /// Ends the consumer's use of it; may be null.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// A tensor, its owner, and the version of its layout.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// The version of the following fields.
    pub version: DLPackVersion,
    /// The producer's context.
    pub manager_ctx: *mut c_void,
    /// Ends the consumer's use of it; may be null.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// Bit 0: it is read-only. Bit 1: it is a copy.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// Elements that a DLPack tensor can have: integers of 8 to 64 bits, `f16`, `bf16`, `f32`, `f64`. Sealed.
pub trait DlpackElement: Element + sealed::Sealed {
    /// How DLPack names the type.
    const DATA_TYPE: DLDataType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty = $code:expr, $bits:expr;)+) => {$(
        impl sealed::Sealed for $type {}
        impl DlpackElement for $type {
            const DATA_TYPE: DLDataType = DLDataType { code: $code, bits: $bits, lanes: 1 };
        }
    )+};
}
elements! {
    i8 = 0, 8; i16 = 0, 16; i32 = 0, 32; i64 = 0, 64;
    u8 = 1, 8; u16 = 1, 16; u32 = 1, 32; u64 = 1, 64;
    half::f16 = 2, 16; f32 = 2, 32; f64 = 2, 64;
    half::bf16 = 4, 16;
}
