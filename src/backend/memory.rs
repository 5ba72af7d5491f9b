//! Driver calls for memory: device memory, pinned memory, and copies.

use std::any::Any;

use super::{DevicePtr, DriverResult, HostPtr, MemoryAt, Pattern, PoolInfo, RawStream, RowCopy};

/// Part of [`Backend`](super::Backend), whose contract the unsafe functions share.
pub(crate) trait MemoryCalls {
    unsafe fn alloc(&self, stream: RawStream, bytes: u64) -> DriverResult<DevicePtr>;
    unsafe fn free(&self, stream: RawStream, ptr: DevicePtr) -> DriverResult<()>;
    /// (free, total) bytes of device memory; memory that the pool holds is not free.
    fn memory_info(&self) -> DriverResult<(u64, u64)>;
    fn pool_info(&self) -> DriverResult<PoolInfo>;
    /// Returns unused memory of the pool, down to `keep_bytes`.
    fn pool_trim(&self, keep_bytes: u64) -> DriverResult<()>;
    /// The kind of memory at another library's address.
    fn memory_at(&self, ptr: DevicePtr) -> DriverResult<MemoryAt>;
    /// Allows commands to use another library's memory.
    unsafe fn adopt(&self, _ptr: DevicePtr, _bytes: u64) {}
    /// Revokes that.
    unsafe fn disown(&self, _ptr: DevicePtr, _bytes: u64) {}
    /// After the loss: keeps a value until no command runs any more, or returns it if none does.
    fn bury(&self, value: Box<dyn Any + Send>) -> Option<Box<dyn Any + Send>> {
        Some(value)
    }
    unsafe fn register(&self, ptr: HostPtr, bytes: usize) -> DriverResult<DevicePtr>;
    unsafe fn unregister(&self, ptr: HostPtr) -> DriverResult<()>;
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
    ) -> DriverResult<()>;
    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()>;
    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()>;
    unsafe fn copy_rows(&self, stream: RawStream, copy: &RowCopy) -> DriverResult<()>;
    unsafe fn copy_from_peer(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        src: DevicePtr,
        src_context: u64,
        bytes: u64,
    ) -> DriverResult<()>;
    unsafe fn fill(
        &self,
        stream: RawStream,
        dst: DevicePtr,
        pattern: Pattern,
        count: u64,
    ) -> DriverResult<()>;
}

/// A device's memory, for other devices that access it.
pub(crate) trait PeerMemory: Send + Sync {
    /// Whether the whole range is allocated.
    fn has(&self, ptr: DevicePtr, bytes: u64) -> bool;
}
