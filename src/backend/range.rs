//! Driver calls for addresses that are reserved first and get memory step by step.

use super::{DevicePtr, DriverResult};

/// Part of [`Backend`](super::Backend), whose contract the unsafe functions share. A step has the size of the granularity. Commands must not use a
/// step without memory; the caller knows which have memory.
pub(crate) trait RangeCalls {
    /// The size of a step, in bytes: a power of two. 801 where such memory is not supported.
    fn range_granularity(&self) -> DriverResult<u64>;
    /// Reserves addresses: a multiple of the granularity.
    fn range_reserve(&self, bytes: u64) -> DriverResult<DevicePtr>;
    /// Gives memory outside the pool to steps that have none: to all of them or to none.
    unsafe fn range_commit(&self, at: DevicePtr, step: u64, steps: u64) -> DriverResult<()>;
    /// Takes the memory of steps that no command uses any more.
    unsafe fn range_decommit(&self, at: DevicePtr, step: u64, steps: u64) -> DriverResult<()>;
    /// Frees the addresses, none of which has memory.
    unsafe fn range_free(&self, at: DevicePtr, bytes: u64) -> DriverResult<()>;
}
