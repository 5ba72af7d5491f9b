//! `CUlaunchConfig` and its attributes, the parameters of [`cuLaunchKernelEx`](super).
//!
//! These are our own copies of the C structs: `cudarc` has them only for some of the CUDA versions that it supports. Source: `cuda.h`; the
//! layout has not changed since 11.8, which introduced them.
#![forbid(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::mem::{align_of, offset_of, size_of};

use smallvec::SmallVec;

use crate::backend::{Grid, KernelCall, LaunchShape};

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct RawConfig {
    grid_dim: [u32; 3],
    block_dim: [u32; 3],
    shared_mem_bytes: u32,
    stream: *mut c_void,
    attributes: *const Attribute,
    attribute_count: u32,
}

/// `CUlaunchAttribute`: its id, and 64 bytes, the size of the largest value.
#[repr(C, align(8))]
pub(super) struct Attribute {
    id: c_int,
    pad: [u8; 4],
    value: [u32; 16],
}

const _: () = {
    assert!(size_of::<RawConfig>() == 56);
    assert!(offset_of!(RawConfig, stream) == 32);
    assert!(offset_of!(RawConfig, attributes) == 40);
    assert!(offset_of!(RawConfig, attribute_count) == 48);
    assert!(size_of::<Attribute>() == 72 && align_of::<Attribute>() == 8);
    assert!(offset_of!(Attribute, value) == 8);
};

impl Attribute {
    /// The attributes of a launch.
    pub(super) fn of(shape: &LaunchShape) -> SmallVec<[Attribute; 3]> {
        const COOPERATIVE: c_int = 2;
        const CLUSTER_DIMENSION: c_int = 4;
        const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;
        let (set, cluster) = ([1, 0, 0], shape.grid.cluster_dim);
        let attributes = [
            shape.grid.has_clusters().then(|| Attribute::new(CLUSTER_DIMENSION, cluster)),
            shape.cooperative.then(|| Attribute::new(COOPERATIVE, set)),
            shape.overlaps.then(|| Attribute::new(PROGRAMMATIC_STREAM_SERIALIZATION, set)),
        ];
        attributes.into_iter().flatten().collect()
    }

    fn new(id: c_int, head: [u32; 3]) -> Self {
        let mut value = [0; 16];
        value[..3].copy_from_slice(&head);
        Attribute { id, pad: [0; 4], value }
    }
}

impl RawConfig {
    /// Points to `attributes`, which must outlive the call that it is passed to.
    pub(super) fn new(grid: &Grid, stream: *mut c_void, attributes: &[Attribute]) -> Self {
        RawConfig::with(grid, stream, (attributes.as_ptr(), attributes.len() as u32))
    }

    /// For a captured call, with the attributes that the driver returned. It points to them as well.
    pub(super) fn of(call: &KernelCall, stream: *mut c_void) -> Self {
        let attributes = &call.attributes;
        RawConfig::with(&call.grid, stream, (attributes.as_ptr().cast(), attributes.len() as u32))
    }

    fn with(
        grid: &Grid,
        stream: *mut c_void,
        (attributes, attribute_count): (*const Attribute, u32),
    ) -> Self {
        RawConfig {
            grid_dim: grid.grid_dim,
            block_dim: grid.block_dim,
            shared_mem_bytes: grid.shared_mem_bytes,
            stream,
            attributes,
            attribute_count,
        }
    }
}
