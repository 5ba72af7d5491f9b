//! A kernel's *twin*: a Rust function that computes the same on the CPU. It is called once per launch, with the whole grid and the
//! launch's [arguments](super::arguments).
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::arguments::ArgBlock;

/// The extent of a launch, as a kernel's host twin sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Blocks along x, y and z.
    pub grid_dim: [u32; 3],
    /// Threads of a block along x, y and z.
    pub block_dim: [u32; 3],
    /// Blocks of a cluster along x, y and z; (1, 1, 1) without clusters.
    pub cluster_dim: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_mem_bytes: u32,
}

impl Grid {
    /// The number of blocks of the whole launch.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.grid_dim.iter().fold(1, |blocks: u64, n| blocks.saturating_mul(u64::from(*n)))
    }

    /// The number of threads of the whole launch.
    #[must_use]
    pub fn threads(&self) -> u64 {
        let extents = self.grid_dim.iter().chain(&self.block_dim);
        extents.fold(1, |threads: u64, n| threads.saturating_mul(u64::from(*n)))
    }

    /// Whether blocks are grouped into clusters.
    pub(crate) fn has_clusters(&self) -> bool {
        self.cluster_dim != [1, 1, 1]
    }
}

/// A kernel's host implementation, unpacking its own arguments.
pub type HostTwin = Arc<dyn Fn(&Grid, &ArgBlock) + Send + Sync>;
