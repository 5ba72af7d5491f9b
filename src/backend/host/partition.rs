//! Shares of the cores, in name alone: a kernel's twin runs on its stream's thread, wherever the system puts that.

use gpu_await_protocol::grains::GrainSet;

use super::HostBackend;
use crate::backend::{Backend, DriverResult, PartitionCalls, RawPartition};

impl PartitionCalls for HostBackend {
    /// A grain a core.
    fn grains(&self) -> DriverResult<Vec<u32>> {
        self.shared.healthy("grains")?;
        let cores = (self.limits().multiprocessors as usize).min(GrainSet::MOST);
        Ok(vec![1; cores])
    }

    fn partition_create(&self, _grains: GrainSet) -> DriverResult<RawPartition> {
        self.shared.healthy("partition_create")?;
        Ok(RawPartition { green: 0, context: 0 })
    }

    unsafe fn partition_destroy(&self, _partition: RawPartition) -> DriverResult<()> {
        Ok(())
    }
}
