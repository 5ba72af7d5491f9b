//! Driver calls for partitions: shares of a device's multiprocessors.

use gpu_await_protocol::grains::GrainSet;

use super::DriverResult;

/// A set of grains to which streams can be confined: the driver's green context, also as a plain context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawPartition {
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a host device has none"))]
    pub(crate) green: u64,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a host device has none"))]
    pub(crate) context: u64,
}

/// Part of [`Backend`](super::Backend), whose contract the unsafe functions share. The driver does not synchronize calls on a partition: a
/// thread that compiles a graph in it excludes others that do.
pub(crate) trait PartitionCalls {
    /// Divides the device into grains, once: the number of multiprocessors of each.
    fn grains(&self) -> DriverResult<Vec<u32>>;
    /// Joins grains into one partition. Blocks until the work in flight is complete. The driver never returns the memory that it takes.
    fn partition_create(&self, grains: GrainSet) -> DriverResult<RawPartition>;
    /// Requires that its streams and all graphs with nodes in it are destroyed.
    unsafe fn partition_destroy(&self, partition: RawPartition) -> DriverResult<()>;
}
