//! [`LaunchConfig`]: the geometry of a launch, and its limits.
//!
//! The limits are checked here, so that an error names the real cause, before the driver sees the launch:
//!
//! | requested | limit | source |
//! |---|---|---|
//! | blocks of the grid, threads of the block, by axis | 1 to the device's | attributes 2 to 7 |
//! | threads of a block | the device's, then the kernel's (registers, launch bounds) | attributes 1 and 12, the function's |
//! | dynamic shared memory of a block | the opt-in limit less the kernel's static | attribute 97 |
//! | cluster | 8 blocks, and the grid is a whole number of clusters | the portable size |
//! | blocks of a cooperative grid; one cluster | what can be resident at once | occupancy |
//!
//! The driver allows more shared memory than the device's default only to kernels that opted in. Each kernel opts in once, up to its limit,
//! so that launches of other sizes on other threads never lower it.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

use super::Core;
use super::integers::Integer;
use super::module::LoadedModule;
use crate::backend::{DriverResult, Function, Grid, Limits, RawFunction};
use crate::error::launch_limit::{Axis, LaunchLimit};
use crate::error::{ErrorDetail, Result};
use crate::runtime::stream_state::StreamState;
use crate::thread::role;

/// The default block size.
const BLOCK: u32 = 256;

const AXES: [Axis; 3] = [Axis::X, Axis::Y, Axis::Z];

/// Blocks of a cluster that every device with clusters supports.
const CLUSTER: u32 = 8;

/// The geometry of a launch: grid, block, dynamic shared memory and cluster.
///
/// It is checked at the launch, before the driver sees it: see [`Stream::launch`](crate::Stream::launch).
///
/// # Examples
/// ```
/// use gpu_await::LaunchConfig;
/// assert_eq!(LaunchConfig::for_elements(1000).grid_dim(), [4, 1, 1]);
/// let image = LaunchConfig::for_extent((1920, 1080), (32, 8));
/// assert_eq!(image.grid_dim(), [60, 135, 1]);
/// let tiles = LaunchConfig::new((8, 4), (16, 16)).shared_mem_bytes(2048);
/// assert_eq!(tiles.block_dim(), [16, 16, 1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchConfig {
    grid: Grid,
    cooperative: bool,
    /// Made for zero elements: the launch does nothing.
    nothing: bool,
}

/// Extents along x, y and z, from integers of any type; a missing one is 1. A negative extent, or one beyond `u32`, becomes `u32::MAX`:
/// no device supports it, and the launch is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dim3(pub [u32; 3]);

impl<X: Integer> From<X> for Dim3 {
    fn from(x: X) -> Self {
        Dim3([extent(x), 1, 1])
    }
}

impl<X: Integer, Y: Integer> From<(X, Y)> for Dim3 {
    fn from((x, y): (X, Y)) -> Self {
        Dim3([extent(x), extent(y), 1])
    }
}

impl<X: Integer, Y: Integer, Z: Integer> From<(X, Y, Z)> for Dim3 {
    fn from((x, y, z): (X, Y, Z)) -> Self {
        Dim3([extent(x), extent(y), extent(z)])
    }
}

impl<D: Integer> From<[D; 3]> for Dim3 {
    fn from(dim: [D; 3]) -> Self {
        Dim3(dim.map(extent))
    }
}

/// A value that is not an extent becomes one beyond every limit, even if it is negative: the launch is refused.
fn extent(value: impl Integer) -> u32 {
    u32::try_from(value.wide()).unwrap_or(u32::MAX)
}

impl LaunchConfig {
    /// Sets the blocks of the grid and the threads of a block.
    pub fn new(grid_dim: impl Into<Dim3>, block_dim: impl Into<Dim3>) -> Self {
        let grid = Grid {
            grid_dim: grid_dim.into().0,
            block_dim: block_dim.into().0,
            cluster_dim: [1; 3],
            shared_mem_bytes: 0,
        };
        LaunchConfig { grid, cooperative: false, nothing: false }
    }

    /// Covers `n` elements with at least one thread each, in blocks of 256; the kernel guards the tail. A
    /// launch for no elements checks the kernel's conditions and does nothing else, so that an [`Out`](crate::Out) keeps what it had; one for a
    /// negative number is refused.
    #[must_use]
    pub fn for_elements(n: impl Integer) -> Self {
        LaunchConfig::for_elements_in_blocks(n, BLOCK)
    }

    /// [`for_elements`](Self::for_elements) with another block.
    pub(crate) fn for_elements_in_blocks(n: impl Integer, block: u32) -> Self {
        let n = n.wide();
        // In 64 bits where possible: 128-bit divisions are slow.
        let blocks = match u64::try_from(n) {
            Ok(n) => i128::from(n.div_ceil(u64::from(block))),
            Err(_) => n,
        };
        LaunchConfig { nothing: n == 0, ..LaunchConfig::new(blocks, block) }
    }

    /// Covers each point of a 1-, 2- or 3-dimensional extent with at least one thread, in blocks of
    /// `block_dim`; the kernel guards the edges. A launch for an empty extent does nothing; one for a negative extent, or for 2^32 - 1 or more
    /// along an axis, is refused.
    #[must_use]
    pub fn for_extent(extent: impl Into<Dim3>, block_dim: impl Into<Dim3>) -> Self {
        let (extent, block) = (extent.into().0, block_dim.into().0);
        // A block without threads is refused by the launch, whatever the grid.
        let blocks = |axis: usize| match extent[axis] {
            // Not an extent, or too large.
            u32::MAX => u32::MAX,
            extent => extent.div_ceil(block[axis].max(1)),
        };
        let nothing = extent.contains(&0) && !extent.contains(&u32::MAX);
        LaunchConfig { nothing, ..LaunchConfig::new([blocks(0), blocks(1), blocks(2)], block) }
    }

    /// Makes a launch of zero elements: nothing reaches the device.
    #[must_use]
    pub fn nothing() -> Self {
        LaunchConfig::for_elements(0)
    }

    /// Gives each block dynamic shared memory. If that exceeds the device's default, the launch uses the
    /// driver's opt-in.
    #[must_use]
    pub fn shared_mem_bytes(mut self, bytes: impl Integer) -> Self {
        self.grid.shared_mem_bytes = extent(bytes);
        self
    }

    /// Makes the launch cooperative: all blocks of the grid are resident at once and may synchronize with
    /// each other. A grid of more blocks than the device can hold
    /// ([`Occupancy::resident_blocks`](crate::Occupancy::resident_blocks)) is refused.
    #[must_use]
    pub fn cooperative(mut self) -> Self {
        self.cooperative = true;
        self
    }

    /// Groups the blocks of the grid into clusters of `cluster_dim` blocks along each axis. The blocks of a
    /// cluster run at once, close to each other, and may read each other's shared memory.
    ///
    /// A cluster has at most eight blocks, and the grid must be a whole number of clusters. Needs compute
    /// capability 9.0; on a host device the twin sees the cluster in [`Grid::cluster_dim`].
    #[must_use]
    pub fn cluster(mut self, cluster_dim: impl Into<Dim3>) -> Self {
        self.grid.cluster_dim = cluster_dim.into().0;
        self
    }

    /// Blocks along x, y and z.
    #[must_use]
    pub fn grid_dim(&self) -> [u32; 3] {
        self.grid.grid_dim
    }

    /// Threads of a block along x, y and z.
    #[must_use]
    pub fn block_dim(&self) -> [u32; 3] {
        self.grid.block_dim
    }

    /// Blocks of a cluster along x, y and z; (1, 1, 1) without clusters.
    #[must_use]
    pub fn cluster_dim(&self) -> [u32; 3] {
        self.grid.cluster_dim
    }

    /// Whether all blocks must be resident at once.
    #[must_use]
    pub fn is_cooperative(&self) -> bool {
        self.cooperative
    }

    /// Blocks of the whole launch.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.grid.blocks()
    }

    /// Threads of the whole launch.
    #[must_use]
    pub fn threads(&self) -> u64 {
        self.grid.threads()
    }

    /// Dynamic shared memory of a block, in bytes.
    pub(crate) fn shared_mem(&self) -> u32 {
        self.grid.shared_mem_bytes
    }

    pub(crate) fn has_clusters(&self) -> bool {
        self.grid.has_clusters()
    }

    /// Whether it is plain blocks of threads: no dynamic shared memory, no clusters, not cooperative.
    #[inline]
    pub(crate) fn is_simple(&self) -> bool {
        (self.grid.shared_mem_bytes == 0) & !self.cooperative & !self.has_clusters()
    }

    pub(crate) fn is_nothing(&self) -> bool {
        self.nothing
    }

    pub(crate) fn with_grid_dim(mut self, grid_dim: [u32; 3]) -> Self {
        self.grid.grid_dim = grid_dim;
        self
    }

    pub(crate) fn grid(&self) -> Grid {
        self.grid
    }
}

impl Core {
    /// Checks everything about a launch's geometry that needs no driver call.
    #[inline]
    pub(super) fn check_limits(&self, config: &LaunchConfig, is_simple: bool) -> Result<()> {
        let limits = &self.engine.limits;
        // Most launches pass this in one test.
        let fits = |asked: [u32; 3], most: [u32; 3]| {
            (0..3).fold(true, |fits, axis| fits & (asked[axis].wrapping_sub(1) < most[axis]))
        };
        let block = config.block_dim();
        let most = limits.threads_per_block.min(self.attributes.max_threads_per_block);
        let is_plain = fits(config.grid_dim(), limits.grid_dim)
            & fits(block, limits.block_dim)
            & (threads_of(block) <= u64::from(most));
        if is_plain && is_simple {
            return Ok(());
        }
        self.check_each_limit(limits, config)
    }

    #[inline(never)]
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
        if !self.engine.limits.clusters {
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

    /// Opts in to the launch's shared memory, and checks that everything that must be resident at once fits. Calls the driver only for
    /// these.
    #[inline]
    pub(super) fn admit(&self, config: &LaunchConfig, stream: &StreamState) -> Result<()> {
        self.allow_shared_mem(config.shared_mem())?;
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

    /// The number of multiprocessors of a stream; without a stream, of the device's streams.
    pub(super) fn multiprocessors(&self, stream: Option<&StreamState>) -> u32 {
        let share = stream
            .map_or(self.engine.shares.partition.as_ref(), |stream| stream.driver.partition());
        let all = || self.engine.limits.multiprocessors;
        share.map_or_else(all, |share| share.multiprocessors())
    }

    /// Blocks of such a launch that a stream, or without one the device, holds at once.
    pub(super) fn resident_blocks(&self, grid: &Grid, stream: Option<&StreamState>) -> Result<u32> {
        let multiprocessors = self.multiprocessors(stream);
        if grid.has_clusters() {
            self.allow_shared_mem(grid.shared_mem_bytes)?;
            let of_cluster = blocks_of(grid.cluster_dim) as u32;
            let raw = stream.map(|stream| stream.driver.raw);
            let active =
                self.ask(|module, function| module.active_clusters(function, grid, raw))?;
            // A host device holds one block per core, and at least one cluster.
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

    /// Raises the kernel's shared memory limit to the device's maximum, if it needs more than the default.
    #[inline]
    fn allow_shared_mem(&self, dynamic_bytes: u32) -> Result<()> {
        // Every device's default is enough for the kernel's static memory, which the compiler limits.
        if dynamic_bytes == 0 { Ok(()) } else { self.allow_dynamic_shared_mem(dynamic_bytes) }
    }

    fn allow_dynamic_shared_mem(&self, dynamic_bytes: u32) -> Result<()> {
        let default = self.engine.limits.shared_mem_bytes;
        let asked = u64::from(dynamic_bytes) + u64::from(self.attributes.static_shared_mem_bytes);
        // ORDERING: Acquire: the driver's limit was raised before the flag was set.
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
        let limits = &self.engine.limits;
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
    block_dim.iter().fold(1, |threads: u64, n| threads.saturating_mul(u64::from(*n)))
}

/// Blocks of a cluster; its axes were checked.
fn blocks_of(cluster_dim: [u32; 3]) -> u64 {
    cluster_dim.iter().map(|n| u64::from(*n)).product()
}
