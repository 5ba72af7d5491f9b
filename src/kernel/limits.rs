//! The limits of a launch: checked here, so that an error names the real cause, before the driver sees the launch.
//!
//! | requested | limit | source |
//! |---|---|---|
//! | blocks of the grid, threads of the block, by axis | 1 to the device's | attributes 2 to 7 |
//! | threads of a block | the device's, then the kernel's (registers, launch bounds) | attributes 1 and 12, the function's |
//! | dynamic shared memory of a block | the opt-in limit less the kernel's static | attribute 97 |
//! | cluster | 8 blocks, and the grid is a whole number of clusters | the portable size |
//! | blocks of a cooperative grid; one cluster | what is resident at once | occupancy |
//!
//! The driver allows more shared memory than the device's default only to kernels that opted in. Each kernel opts in once, up to its limit,
//! so that launches of other sizes on other threads never lower it.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

use super::Core;
use super::launch_config::LaunchConfig;
use super::module::LoadedModule;
use crate::backend::{DriverResult, Function, Grid, Limits, RawFunction};
use crate::error::{Axis, ErrorDetail, LaunchLimit, Result};
use crate::runtime::stream_state::StreamState;
use crate::thread::role;

const AXES: [Axis; 3] = [Axis::X, Axis::Y, Axis::Z];

/// Blocks of a cluster that every device with clusters can hold.
const CLUSTER: u32 = 8;

impl Core {
    /// Checks everything about a launch's geometry that needs no driver call.
    #[inline]
    pub(super) fn check_limits(&self, config: &LaunchConfig) -> Result<()> {
        let limits = self.engine.backend.limits();
        // Of most launches all at once.
        let fits = |asked: [u32; 3], most: [u32; 3]| {
            (0..3).fold(true, |fits, axis| fits & (asked[axis].wrapping_sub(1) < most[axis]))
        };
        let block = config.block_dim();
        let most = limits.threads_per_block.min(self.attributes.max_threads_per_block);
        let is_plain = fits(config.grid_dim(), limits.grid_dim)
            & fits(block, limits.block_dim)
            & (threads_of(block) <= u64::from(most))
            & (config.shared_mem() == 0);
        if is_plain && !config.is_cooperative() && !config.has_clusters() {
            return Ok(());
        }
        self.check_each_limit(limits, config)
    }

    fn check_each_limit(&self, limits: &Limits, config: &LaunchConfig) -> Result<()> {
        if config.has_clusters() {
            self.check_cluster(config)?;
        }
        self.check_axes(LaunchLimit::Grid, config.grid_dim(), limits.grid_dim)?;
        self.check_block(limits, config.block_dim(), config.shared_mem())?;
        if config.is_cooperative() && !limits.cooperative {
            return Err(
                self.lacks("a cooperative launch", "CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH")
            );
        }
        Ok(())
    }

    /// Checks a block's resources.
    #[inline]
    pub(super) fn check_block(
        &self,
        limits: &Limits,
        block_dim: [u32; 3],
        shared_mem_bytes: u32,
    ) -> Result<()> {
        self.check_axes(LaunchLimit::Block, block_dim, limits.block_dim)?;
        let threads = threads_of(block_dim);
        self.within(LaunchLimit::ThreadsPerBlock, threads, limits.threads_per_block)?;
        let most = self.attributes.max_threads_per_block;
        if threads > u64::from(most) {
            let registers = threads * u64::from(self.attributes.registers);
            self.within(LaunchLimit::RegistersPerBlock, registers, limits.registers_per_block)?;
            self.within(LaunchLimit::KernelThreadsPerBlock, threads, most)?;
        }
        if shared_mem_bytes > 0 {
            let asked = u64::from(shared_mem_bytes);
            self.within(LaunchLimit::SharedMemBytes, asked, self.most_shared_mem())?;
        }
        Ok(())
    }

    #[cold]
    fn check_cluster(&self, config: &LaunchConfig) -> Result<()> {
        if !self.engine.backend.limits().clusters {
            return Err(self.lacks("a launch with clusters", "compute capability 9.0"));
        }
        let (grid, cluster) = (config.grid_dim(), config.cluster_dim());
        self.check_axes(LaunchLimit::Cluster, cluster, [CLUSTER; 3])?;
        self.within(LaunchLimit::BlocksPerCluster, blocks_of(cluster), CLUSTER)?;
        for (axis, (grid_dim, cluster_dim)) in AXES.into_iter().zip(grid.into_iter().zip(cluster)) {
            if !grid_dim.is_multiple_of(cluster_dim) {
                let kernel = self.name.to_string();
                return Err(
                    ErrorDetail::PartialCluster { kernel, axis, grid_dim, cluster_dim }.into()
                );
            }
        }
        Ok(())
    }

    /// Checks that everything that must be resident at once can be. Only then queries the driver.
    #[inline]
    pub(super) fn check_resident(&self, config: &LaunchConfig, stream: &StreamState) -> Result<()> {
        if config.is_cooperative() || config.has_clusters() {
            return self.check_at_once(config, stream);
        }
        Ok(())
    }

    #[cold]
    fn check_at_once(&self, config: &LaunchConfig, stream: &StreamState) -> Result<()> {
        let grid = config.grid();
        let at_once =
            if config.is_cooperative() { config.blocks() } else { blocks_of(grid.cluster_dim) };
        self.within(
            LaunchLimit::ResidentBlocks,
            at_once,
            self.resident_blocks(&grid, Some(stream))?,
        )
    }

    /// The multiprocessors of a stream; without one, those of the device's streams.
    pub(super) fn multiprocessors(&self, stream: Option<&StreamState>) -> u32 {
        let share = stream
            .map_or(self.engine.shares.partition.as_ref(), |stream| stream.driver.partition());
        let all = || self.engine.backend.limits().multiprocessors;
        share.map_or_else(all, |share| share.multiprocessors())
    }

    /// Blocks of such a launch that a stream holds at once; without one, the device.
    pub(super) fn resident_blocks(&self, grid: &Grid, stream: Option<&StreamState>) -> Result<u32> {
        let multiprocessors = self.multiprocessors(stream);
        if grid.has_clusters() {
            self.allow_shared_mem(grid.shared_mem_bytes)?;
            let of_cluster = blocks_of(grid.cluster_dim) as u32;
            let raw = stream.map(|stream| stream.driver.raw);
            let active =
                self.ask(|module, function| module.active_clusters(function, grid, raw))?;
            // On a host device a block a core, and one cluster at least.
            return Ok(active.unwrap_or((multiprocessors / of_cluster).max(1)) * of_cluster);
        }
        let threads = grid.block_dim.iter().product();
        Ok(self.active_blocks(threads, grid.shared_mem_bytes)? * multiprocessors)
    }

    /// The number of blocks of this many threads that a multiprocessor holds at once; 1 on a host device.
    pub(super) fn active_blocks(&self, threads: u32, shared_mem_bytes: u32) -> Result<u32> {
        self.allow_shared_mem(shared_mem_bytes)?;
        let active =
            self.ask(|module, function| module.active_blocks(function, threads, shared_mem_bytes))?;
        Ok(active.unwrap_or(1))
    }

    /// Lets the kernel use as much shared memory as the device has, if it needs more than the default.
    #[inline]
    pub(super) fn allow_shared_mem(&self, dynamic_bytes: u32) -> Result<()> {
        // Every device's default suffices for the kernel's static memory, which the compiler limits.
        if dynamic_bytes == 0 { Ok(()) } else { self.allow_dynamic_shared_mem(dynamic_bytes) }
    }

    fn allow_dynamic_shared_mem(&self, dynamic_bytes: u32) -> Result<()> {
        let default = self.engine.backend.limits().shared_mem_bytes;
        let asked = u64::from(dynamic_bytes) + u64::from(self.attributes.static_shared_mem_bytes);
        // ORDERING: Acquire: the driver's limit was raised before it says so.
        if asked <= u64::from(default) || self.shared_mem_allowed.load(Ordering::Acquire) {
            return Ok(());
        }
        let most = self.most_shared_mem();
        self.ask(|module, function| module.allow_shared_mem(function, most))?;
        // ORDERING: Release, see above. Two threads may both get here: they set the same limit.
        self.shared_mem_allowed.store(true, Ordering::Release);
        Ok(())
    }

    /// Makes a driver call about the kernel; `None` on a host device.
    fn ask<R>(
        &self,
        call: impl FnOnce(&LoadedModule, RawFunction) -> DriverResult<R>,
    ) -> Result<Option<R>> {
        role::check("asking the driver about a kernel")?;
        let (Some(module), Function::Device(function)) = (&self.module, &self.function) else {
            return Ok(None);
        };
        call(module, *function).map(Some).map_err(|code| self.engine.refused(code))
    }

    /// Dynamic shared memory that a block may have.
    pub(super) fn most_shared_mem(&self) -> u32 {
        let limits = self.engine.backend.limits();
        let most = limits.shared_mem_optin_bytes.max(limits.shared_mem_bytes);
        most.saturating_sub(self.attributes.static_shared_mem_bytes)
    }

    fn check_axes(
        &self,
        what: impl Fn(Axis) -> LaunchLimit,
        asked: [u32; 3],
        limits: [u32; 3],
    ) -> Result<()> {
        for (index, axis) in AXES.into_iter().enumerate() {
            self.within(what(axis), u64::from(asked[index]), limits[index])?;
        }
        Ok(())
    }

    #[inline]
    pub(super) fn within(&self, what: LaunchLimit, asked: u64, limit: u32) -> Result<()> {
        if (1..=u64::from(limit)).contains(&asked) {
            return Ok(());
        }
        Err(self.over(what, asked, limit))
    }

    #[cold]
    pub(super) fn over(&self, what: LaunchLimit, asked: u64, limit: u32) -> crate::Error {
        let (kernel, limit) = (self.name.to_string(), u64::from(limit));
        ErrorDetail::LaunchLimit { kernel, what, asked, limit }.into()
    }

    fn lacks(&self, what: &'static str, requirement: &'static str) -> crate::Error {
        let device = self.engine.label().to_owned();
        ErrorDetail::Requires { what, requirement, device }.into()
    }
}

/// Threads of a block.
#[inline]
fn threads_of(block_dim: [u32; 3]) -> u64 {
    block_dim.iter().map(|n| u64::from(*n)).product()
}

/// Blocks of a cluster; its axes were checked.
fn blocks_of(cluster_dim: [u32; 3]) -> u64 {
    cluster_dim.iter().map(|n| u64::from(*n)).product()
}
