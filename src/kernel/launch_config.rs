//! [`LaunchConfig`]: the geometry of a launch.
#![forbid(unsafe_code)]

use super::integers::Integer;
use crate::backend::Grid;

/// The default block size.
const BLOCK: u32 = 256;

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
    /// Made for no elements: the launch is nothing.
    nothing: bool,
}

/// Extents along x, y and z, from integers of any type; a missing one is 1. A negative extent, or one beyond `u32`, becomes `u32::MAX`:
/// no device takes it, and the launch is refused.
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

/// What is no extent, also below 0, is one that is beyond every limit: its launch is refused.
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
    /// launch for no elements does nothing, and one for a negative number is refused.
    #[must_use]
    pub fn for_elements(n: impl Integer) -> Self {
        LaunchConfig::for_elements_in_blocks(n, BLOCK)
    }

    /// [`for_elements`](Self::for_elements) with another block.
    pub(crate) fn for_elements_in_blocks(n: impl Integer, block: u32) -> Self {
        let n = n.wide();
        // In 64 bits where that is enough: divisions of 128 bits are slow.
        let blocks = match u64::try_from(n) {
            Ok(n) => i128::from(n.div_ceil(u64::from(block))),
            Err(_) => n,
        };
        LaunchConfig { nothing: n == 0, ..LaunchConfig::new(blocks, block) }
    }

    /// Covers each point of a 1-, 2- or 3-dimensional extent with at least one thread, in blocks of
    /// `block_dim`; the kernel guards the edges. A launch for an empty extent does nothing; one for a negative extent, or for 2^32 - 1 and more
    /// along an axis, is refused.
    #[must_use]
    pub fn for_extent(extent: impl Into<Dim3>, block_dim: impl Into<Dim3>) -> Self {
        let (extent, block) = (extent.into().0, block_dim.into().0);
        // A block without threads is refused by the launch, whatever the grid.
        let blocks = |axis: usize| match extent[axis] {
            // It was none, or more than there can be.
            u32::MAX => u32::MAX,
            extent => extent.div_ceil(block[axis].max(1)),
        };
        let nothing = extent.contains(&0);
        LaunchConfig { nothing, ..LaunchConfig::new([blocks(0), blocks(1), blocks(2)], block) }
    }

    /// Makes a launch of no elements: nothing reaches the device.
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

    /// Whether it is blocks of threads and nothing else: no dynamic shared memory, no clusters, not cooperative.
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
