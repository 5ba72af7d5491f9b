//! The driver's green contexts: contexts over the primary one, each with some of its multiprocessors.
//!
//! None is ever made current: its streams are used like any other with the primary context, and a graph's node names it. Source: "Green
//! Contexts" in the driver API's documentation, and tests on an H200 with driver 580:
//!
//! | what | seen |
//! |---|---|
//! | grains of one split joined in one descriptor, neighbours or not, with and without the remainder | work runs on those multiprocessors alone |
//! | a kernel node | belongs to the context that it names with a `CUkernel`; with a `CUfunction` to the whole GPU |
//! | work captured on such a stream with the primary context current | is confined |
//! | an event recorded for the whole primary context | covers these streams |
//! | 200 made and destroyed | 4 MiB of device memory each, never returned |

use gpu_await_protocol::grains::GrainSet;

use super::api::Handle;
use super::dev_resource::DevResource;
use super::exclusive::Exclusive;
use super::{CudaBackend, newer};
use crate::backend::{DriverResult, PartitionCalls, RawPartition};

impl CudaBackend {
    /// The device divided into grains of the smallest size, the remainder last.
    fn divide(&self) -> DriverResult<Vec<DevResource>> {
        let device = self.device()?;
        let mut all = DevResource::unset();
        let kind = DevResource::MULTIPROCESSORS as i32;
        newer!(self.cuDeviceGetDevResource(device, &raw mut all, kind))?;
        let (mut count, mut rest) = (0, DevResource::unset());
        let none = std::ptr::null_mut();
        newer!(self.cuDevSmResourceSplitByCount(none, &raw mut count, &raw const all, none, 0, 1))?;
        let mut grains = vec![DevResource::unset(); count as usize];
        newer!(self.cuDevSmResourceSplitByCount(
            grains.as_mut_ptr(),
            &raw mut count,
            &raw const all,
            &raw mut rest,
            0,
            1
        ))?;
        grains.truncate(count as usize);
        grains.extend(Some(rest).filter(|rest| rest.multiprocessors() > 0));
        Ok(grains)
    }

    /// The grains; divided once, since shares of two divisions overlap.
    fn divided(&self) -> DriverResult<&[DevResource]> {
        if let Some(grains) = self.grains.get() {
            return Ok(grains);
        }
        let _bound = self.bind()?;
        let grains = self.divide()?;
        Ok(self.grains.get_or_init(|| grains))
    }
}

impl PartitionCalls for CudaBackend {
    fn grains(&self) -> DriverResult<Vec<u32>> {
        Ok(self.divided()?.iter().map(DevResource::multiprocessors).collect())
    }

    fn partition_create(&self, grains: GrainSet) -> DriverResult<RawPartition> {
        const DEFAULT_STREAM: u32 = 1;
        let all = self.divided()?;
        let mut joined: Vec<DevResource> =
            grains.iter().filter_map(|at| all.get(at).copied()).collect();
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let _exclusive = Exclusive::begin();
        let (mut described, mut green, mut context): (Handle, Handle, Handle) =
            (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        let device = self.device()?;
        let count = joined.len() as u32;
        newer!(self.cuDevResourceGenerateDesc(&raw mut described, joined.as_mut_ptr(), count))?;
        newer!(self.cuGreenCtxCreate(&raw mut green, described, device, DEFAULT_STREAM))?;
        newer!(self.cuCtxFromGreenCtx(&raw mut context, green)).inspect_err(|_| {
            newer!(self.cuGreenCtxDestroy(green)).ok();
        })?;
        Ok(RawPartition { green: green as u64, context: context as u64 })
    }

    unsafe fn partition_destroy(&self, partition: RawPartition) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        newer!(self.cuGreenCtxDestroy(partition.green as Handle))
    }
}
