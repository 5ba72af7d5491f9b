//! A range of addresses that gets memory step by step, through the bare driver API, for a baseline in the same process and run. All calls are on
//! CUDA device 0, in its primary context.

use cudarc::driver::sys;

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Reserved addresses, of which the first `committed` bytes have memory. Left to the end of the process.
pub(crate) struct Range {
    start: sys::CUdeviceptr,
    step: usize,
    committed: usize,
    prop: sys::CUmemAllocationProp,
}

impl Range {
    /// For so many steps, on this thread.
    pub(crate) fn new(steps: usize) -> Range {
        let context = cudarc::driver::CudaContext::new(0).expect("a GPU");
        // The context lives as long as the process.
        std::mem::forget(context.clone());
        context.bind_to_thread().expect("a context");
        // SAFETY: plain data, whose enumerations have a variant for 0: device 0, and no handle for others.
        let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let (mut step, mut start) = (0, 0);
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the results are live, and so are the properties.
        ok(unsafe { sys::cuMemGetAllocationGranularity(&raw mut step, &raw const prop, least) });
        // SAFETY: the result is live.
        ok(unsafe { sys::cuMemAddressReserve(&raw mut start, steps * step, 0, 0, 0) });
        Range { start, step, committed: 0, prop }
    }

    /// Gives memory to the next step.
    pub(crate) fn grow(&mut self) {
        let (at, mut handle) = (self.start + self.committed as u64, 0);
        let access = sys::CUmemAccessDesc {
            location: self.prop.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the result and the properties are live.
        ok(unsafe { sys::cuMemCreate(&raw mut handle, self.step, &raw const self.prop, 0) });
        // SAFETY: the step is reserved and has no memory.
        ok(unsafe { sys::cuMemMap(at, self.step, 0, handle, 0) });
        // SAFETY: the handle is this call's; the mapping keeps the memory.
        ok(unsafe { sys::cuMemRelease(handle) });
        // SAFETY: it is mapped, and the description is live.
        ok(unsafe { sys::cuMemSetAccess(at, self.step, &raw const access, 1) });
        self.committed += self.step;
    }

    /// Takes the memory of the last step.
    pub(crate) fn shrink(&mut self) {
        self.committed -= self.step;
        // SAFETY: a whole mapping, which no work uses.
        ok(unsafe { sys::cuMemUnmap(self.start + self.committed as u64, self.step) });
    }
}
