//! [`DevResource`]: multiprocessors, as the driver names them.
#![forbid(unsafe_code)]

/// `CUdevResource`: its kind, and for multiprocessors their number.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct DevResource {
    kind: u32,
    pad: [u8; 92],
    multiprocessors: u32,
    rest: [u8; 44],
}

const _: () = {
    assert!(size_of::<DevResource>() == 144);
    assert!(std::mem::offset_of!(DevResource, multiprocessors) == 96);
};

impl DevResource {
    /// `CU_DEV_RESOURCE_TYPE_SM`.
    pub(super) const MULTIPROCESSORS: u32 = 1;

    /// For the driver to write.
    pub(super) const fn unset() -> Self {
        DevResource { kind: 0, pad: [0; 92], multiprocessors: 0, rest: [0; 44] }
    }

    /// The number of multiprocessors; 0 for another kind.
    pub(super) fn multiprocessors(&self) -> u32 {
        if self.kind == Self::MULTIPROCESSORS { self.multiprocessors } else { 0 }
    }
}
