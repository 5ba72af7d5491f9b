//! Driver calls for memory that several processes map: on Linux. A descriptor is passed as its number.

#[cfg(target_os = "linux")]
use super::{DevicePtr, DriverResult};

/// A mapping of memory that other processes may map as well.
#[cfg(target_os = "linux")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedMapping {
    pub(crate) ptr: DevicePtr,
    /// A multiple of the granularity.
    pub(crate) bytes: u64,
}

#[cfg(not(target_os = "linux"))]
pub(crate) trait SharedCalls {}

#[cfg(not(target_os = "linux"))]
impl<B> SharedCalls for B {}

/// Part of [`Backend`](super::Backend), whose contract the unsafe functions share.
#[cfg(target_os = "linux")]
pub(crate) trait SharedCalls {
    /// The device's identity, the same in every process.
    fn uuid(&self) -> DriverResult<[u8; 16]>;
    /// The granularity of such memory, in bytes: a power of two. 801 where it is not supported.
    fn shared_granularity(&self) -> DriverResult<u64>;
    /// Makes memory that this process may write, and a descriptor of it, which the caller owns.
    fn shared_create(&self, bytes: u64) -> DriverResult<(SharedMapping, i32)>;
    /// Maps all of the memory behind a descriptor, which the caller keeps, for reading; with `writes` also for writing.
    fn shared_import(
        &self,
        descriptor: i32,
        bytes: u64,
        writes: bool,
    ) -> DriverResult<SharedMapping>;
    /// Makes a mapping and its descriptor read-only; requires that no command uses it.
    unsafe fn shared_protect(&self, mapping: &SharedMapping, descriptor: i32) -> DriverResult<()>;
    /// Ends a mapping that no command uses any more. The memory is freed once nobody maps it or has a descriptor of it.
    unsafe fn shared_unmap(&self, mapping: &SharedMapping) -> DriverResult<()>;
}
