//! Driver memory with a file descriptor: made, mapped, and shared with other processes read-only, or writable by one process at a time.
//!
//! | what | keeps the memory |
//! |---|---|
//! | a handle, here until it is mapped | yes |
//! | a mapping, of any process | yes |
//! | a descriptor, of any process, even one without a driver | yes |
//!
//! Source: "Virtual Memory Management" in the driver API's documentation. A kernel that writes a read-only mapping faults, and the contents
//! stay (seen on an H200).

use std::ffi::{c_int, c_void};

use super::api::AllocationProp;
use super::exclusive::Exclusive;
use super::{CudaBackend, newer};
use crate::backend::{DevicePtr, DriverResult, SharedCalls, SharedMapping};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FILE_DESCRIPTOR: c_int = 1;

impl CudaBackend {
    /// Maps all of a handle's memory. A failure is undone; the caller releases the handle.
    fn map(&self, handle: u64, bytes: u64, writes: bool) -> DriverResult<SharedMapping> {
        let (size, mut ptr) = (bytes as usize, 0);
        newer!(self.cuMemAddressReserve(&raw mut ptr, size, 0, 0, 0))?;
        let mapped = newer!(self.cuMemMap(ptr, size, 0, handle, 0));
        let shown = mapped.and_then(|()| {
            self.show(ptr, size, writes).inspect_err(|_| {
                newer!(self.cuMemUnmap(ptr, size)).ok();
            })
        });
        shown.inspect_err(|_| {
            newer!(self.cuMemAddressFree(ptr, size)).ok();
        })?;
        Ok(SharedMapping { ptr: DevicePtr(ptr), bytes })
    }

    fn unmap(&self, mapping: &SharedMapping) -> DriverResult<()> {
        let (ptr, size) = (mapping.ptr.0, mapping.bytes as usize);
        newer!(self.cuMemUnmap(ptr, size))?;
        newer!(self.cuMemAddressFree(ptr, size))
    }
}

impl SharedCalls for CudaBackend {
    fn uuid(&self) -> DriverResult<[u8; 16]> {
        let (device, mut uuid) = (self.device()?, [0; 16]);
        newer!(self.cuDeviceGetUuid_v2(&raw mut uuid, device))?;
        Ok(uuid)
    }

    fn shared_granularity(&self) -> DriverResult<u64> {
        // `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`.
        const DESCRIPTORS: c_int = 103;
        self.granularity(DESCRIPTORS, AllocationProp::with_descriptor)
    }

    fn shared_create(&self, bytes: u64) -> DriverResult<(SharedMapping, i32)> {
        let (prop, mut handle) = (AllocationProp::with_descriptor(self.device()?), 0);
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let _exclusive = Exclusive::begin();
        newer!(self.cuMemCreate(&raw mut handle, bytes as usize, &raw const prop, 0))?;
        let made = self.map(handle, bytes, true).and_then(|mapping| {
            let mut descriptor: c_int = -1;
            let to = (&raw mut descriptor).cast::<c_void>();
            newer!(self.cuMemExportToShareableHandle(to, handle, POSIX_FILE_DESCRIPTOR, 0))
                .map(|()| (mapping, descriptor))
                .inspect_err(|_| {
                    self.unmap(&mapping).ok();
                })
        });
        // The mapping keeps the memory from here on. If the release fails, the memory stays until the process ends.
        newer!(self.cuMemRelease(handle)).ok();
        made
    }

    fn shared_import(
        &self,
        descriptor: i32,
        bytes: u64,
        writes: bool,
    ) -> DriverResult<SharedMapping> {
        let mut handle = 0;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let _exclusive = Exclusive::begin();
        // A descriptor is passed as the pointer's value.
        let number = descriptor as usize as *mut c_void;
        newer!(self.cuMemImportFromShareableHandle(
            &raw mut handle,
            number,
            POSIX_FILE_DESCRIPTOR
        ))?;
        let mapped = self.map(handle, bytes, writes);
        newer!(self.cuMemRelease(handle)).ok();
        mapped
    }

    unsafe fn shared_protect(&self, mapping: &SharedMapping, _: i32) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let _exclusive = Exclusive::begin();
        self.show(mapping.ptr.0, mapping.bytes as usize, false)
    }

    unsafe fn shared_unmap(&self, mapping: &SharedMapping) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let _exclusive = Exclusive::begin();
        self.unmap(mapping)
    }
}
