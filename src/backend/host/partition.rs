//! Shares of the cores, in name only: a kernel's twin runs on its stream's thread, wherever the system schedules it.

use gpu_await_protocol::grains::GrainSet;

use super::HostBackend;
use crate::backend::{Backend, DriverResult, PartitionCalls, RawPartition};

impl PartitionCalls for HostBackend {
    /// One core per grain, or several if there are more cores than a device can have grains.
    fn grains(&self) -> DriverResult<Vec<u32>> {
        self.shared.healthy("grains")?;
        let cores = self.limits().multiprocessors;
        let each = cores.div_ceil(GrainSet::MOST as u32).max(1);
        let mut grains = vec![each; (cores / each) as usize];
        grains.extend(Some(cores % each).filter(|rest| *rest > 0));
        Ok(grains)
    }

    fn partition_create(&self, _grains: GrainSet) -> DriverResult<RawPartition> {
        self.shared.healthy("partition_create")?;
        Ok(RawPartition { green: 0, context: 0 })
    }

    unsafe fn partition_destroy(&self, _partition: RawPartition) -> DriverResult<()> {
        Ok(())
    }
}
