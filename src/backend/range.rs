//! Driver calls for addresses that are reserved first, and get their memory step by step.

use super::{DevicePtr, DriverResult};

/// Part of [`Backend`](super::Backend), whose contract the unsafe functions share. A step has the size of the granularity. Nobody may use a
/// step that has no memory, and the caller knows which have.
pub(crate) trait RangeCalls {
    /// The size of a step, in bytes: a power of two. 801 where there is no such memory.
    fn range_granularity(&self) -> DriverResult<u64>;
    /// Reserves addresses: a multiple of the granularity.
    fn range_reserve(&self, bytes: u64) -> DriverResult<DevicePtr>;
    /// Gives memory to steps that have none, beside the pool: to all of them or to none.
    unsafe fn range_commit(&self, at: DevicePtr, step: u64, steps: u64) -> DriverResult<()>;
    /// Takes the memory of steps that no command uses any more.
    unsafe fn range_decommit(&self, at: DevicePtr, step: u64, steps: u64) -> DriverResult<()>;
    /// Gives back the addresses, of which none has memory.
    unsafe fn range_free(&self, at: DevicePtr, bytes: u64) -> DriverResult<()>;
}
