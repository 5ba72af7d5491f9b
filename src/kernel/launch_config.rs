//! [`LaunchConfig`]: the geometry of a launch.
#![forbid(unsafe_code)]

use crate::backend::Grid;

/// Threads of a block where nobody says otherwise.
const BLOCK: u32 = 256;

/// Grid, block and dynamic shared memory of a launch.
///
/// # Examples
/// ```
/// use gpu_await::LaunchConfig;
/// assert_eq!(LaunchConfig::for_elements(1000).grid_dim(), [4, 1, 1]);
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

/// Extents along x, y and z; a missing one is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dim3(pub [u32; 3]);

impl From<u32> for Dim3 {
    fn from(x: u32) -> Self {
        Dim3([x, 1, 1])
    }
}

impl From<(u32, u32)> for Dim3 {
    fn from((x, y): (u32, u32)) -> Self {
        Dim3([x, y, 1])
    }
}

impl From<(u32, u32, u32)> for Dim3 {
    fn from((x, y, z): (u32, u32, u32)) -> Self {
        Dim3([x, y, z])
    }
}

impl From<[u32; 3]> for Dim3 {
    fn from(dim: [u32; 3]) -> Self {
        Dim3(dim)
    }
}

impl LaunchConfig {
    /// Blocks of the grid, threads of a block.
    pub fn new(grid_dim: impl Into<Dim3>, block_dim: impl Into<Dim3>) -> Self {
        let grid = Grid {
            grid_dim: grid_dim.into().0,
            block_dim: block_dim.into().0,
            shared_mem_bytes: 0,
        };
        LaunchConfig { grid, cooperative: false, nothing: false }
    }

    /// At least one thread for each of `n` elements, in blocks of 256: the kernel guards the tail.
    /// For no elements the launch is nothing.
    #[must_use]
    pub fn for_elements(n: usize) -> Self {
        let blocks = u32::try_from(n.div_ceil(BLOCK as usize)).unwrap_or(u32::MAX);
        LaunchConfig { nothing: n == 0, ..LaunchConfig::new(blocks, BLOCK) }
    }

    /// A launch of no elements: nothing reaches the device.
    #[must_use]
    pub fn nothing() -> Self {
        LaunchConfig::for_elements(0)
    }

    /// Gives each block dynamic shared memory. More than the device's default is asked for with the
    /// driver's opt-in.
    #[must_use]
    pub fn shared_mem_bytes(mut self, bytes: u32) -> Self {
        self.grid.shared_mem_bytes = bytes;
        self
    }

    /// All blocks of the grid are resident at once and may synchronize with each other.
    #[must_use]
    pub fn cooperative(mut self) -> Self {
        self.cooperative = true;
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

    /// Threads of the whole launch.
    #[must_use]
    pub fn threads(&self) -> u64 {
        self.grid.threads()
    }

    /// Dynamic shared memory of a block, in bytes.
    pub(crate) fn shared_mem(&self) -> u32 {
        self.grid.shared_mem_bytes
    }

    pub(crate) fn is_cooperative(&self) -> bool {
        self.cooperative
    }

    pub(crate) fn is_nothing(&self) -> bool {
        self.nothing
    }

    pub(crate) fn grid(&self) -> Grid {
        self.grid
    }
}
