//! Reserved addresses, and driver memory that is mapped there step by step.
//!
//! Each step has its own handle: `cuMemUnmap` takes whole mappings only. The handle is released at once; the mapping keeps the memory.
//!
//! Source: "Virtual Memory Management" in the driver API's documentation.

use std::ffi::c_int;

use super::api::{AllocationProp, MemAccess};
use super::exclusive::Exclusive;
use super::{CudaBackend, NOT_SUPPORTED, newer};
use crate::backend::{DevicePtr, DriverResult, RangeCalls};
use crate::error::DriverCode;

impl CudaBackend {
    /// The granularity of such memory, if the device has the attribute.
    pub(super) fn granularity(
        &self,
        attribute: c_int,
        prop: impl Fn(c_int) -> AllocationProp,
    ) -> DriverResult<u64> {
        const MINIMUM: c_int = 0;
        let device = self.device()?;
        let call = "cuMemGetAllocationGranularity";
        if self.api.device_attribute(attribute, device)? == 0 {
            return Err(DriverCode { call, code: NOT_SUPPORTED });
        }
        let (prop, mut bytes) = (prop(device), 0);
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        newer!(self.cuMemGetAllocationGranularity(&raw mut bytes, &raw const prop, MINIMUM))?;
        if bytes.is_power_of_two() {
            return Ok(bytes as u64);
        }
        Err(DriverCode { call, code: NOT_SUPPORTED })
    }

    /// Lets this device use what is mapped there.
    pub(super) fn show(&self, ptr: u64, size: usize, writes: bool) -> DriverResult<()> {
        let access = MemAccess::of(self.device()?, writes);
        newer!(self.cuMemSetAccess(ptr, size, &raw const access, 1))
    }

    fn map_step(&self, at: u64, size: usize, prop: &AllocationProp) -> DriverResult<()> {
        let mut handle = 0;
        // Taken for each step: launches of other threads get through in between.
        let _exclusive = Exclusive::begin();
        newer!(self.cuMemCreate(&raw mut handle, size, &raw const *prop, 0))?;
        let mapped = newer!(self.cuMemMap(at, size, 0, handle, 0));
        // If this fails, the memory stays until the process ends.
        newer!(self.cuMemRelease(handle)).ok();
        mapped
    }
}

impl RangeCalls for CudaBackend {
    fn range_granularity(&self) -> DriverResult<u64> {
        // `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
        const MAPPINGS: c_int = 102;
        self.granularity(MAPPINGS, AllocationProp::of)
    }

    fn range_reserve(&self, bytes: u64) -> DriverResult<DevicePtr> {
        let mut ptr = 0;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        newer!(self.cuMemAddressReserve(&raw mut ptr, bytes as usize, 0, 0, 0))?;
        Ok(DevicePtr(ptr))
    }

    unsafe fn range_commit(&self, at: DevicePtr, step: u64, steps: u64) -> DriverResult<()> {
        let prop = AllocationProp::of(self.device()?);
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut mapped = 0;
        let made = (0..steps).try_for_each(|index| {
            self.map_step(at.0 + index * step, step as usize, &prop).inspect(|()| mapped += step)
        });
        let shown = made.and_then(|()| {
            let _exclusive = Exclusive::begin();
            self.show(at.0, mapped as usize, true)
        });
        shown.inspect_err(|_| {
            if mapped > 0 {
                newer!(self.cuMemUnmap(at.0, mapped as usize)).ok();
            }
        })
    }

    unsafe fn range_decommit(&self, at: DevicePtr, step: u64, steps: u64) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let _exclusive = Exclusive::begin();
        newer!(self.cuMemUnmap(at.0, (step * steps) as usize))
    }

    unsafe fn range_free(&self, at: DevicePtr, bytes: u64) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        newer!(self.cuMemAddressFree(at.0, bytes as usize))
    }
}
