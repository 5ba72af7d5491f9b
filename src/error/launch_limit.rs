//! [`LaunchLimit`]: the extent of a launch that a kernel or a device limits.
#![forbid(unsafe_code)]

use std::fmt;

/// An axis of a grid or block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the three axes of CUDA")]
pub enum Axis {
    X,
    Y,
    Z,
}

/// The extent of a launch that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LaunchLimit {
    /// Blocks along an axis of the grid.
    Grid(Axis),
    /// Threads along an axis of the block.
    Block(Axis),
    /// Threads in a block, all axes together.
    ThreadsPerBlock,
    /// Threads in a block that this kernel was compiled for.
    KernelThreadsPerBlock,
    /// Registers of a block: those of a thread times the threads.
    RegistersPerBlock,
    /// Dynamic shared memory of a block, in bytes; the kernel's static shared memory is subtracted from the
    /// limit.
    SharedMemBytes,
    /// Blocks along an axis of a cluster.
    Cluster(Axis),
    /// Blocks in a cluster, all axes together.
    BlocksPerCluster,
    /// Blocks that can be resident at once: all of a cooperative launch, or one cluster.
    ResidentBlocks,
}

impl fmt::Display for LaunchLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LaunchLimit::Grid(axis) => write!(f, "grid_dim.{axis}"),
            LaunchLimit::Block(axis) => write!(f, "block_dim.{axis}"),
            LaunchLimit::Cluster(axis) => write!(f, "cluster_dim.{axis}"),
            LaunchLimit::BlocksPerCluster => f.write_str("the number of blocks in a cluster"),
            LaunchLimit::RegistersPerBlock => f.write_str("the number of registers of a block"),
            LaunchLimit::ThreadsPerBlock => f.write_str("the number of threads in a block"),
            LaunchLimit::KernelThreadsPerBlock => {
                f.write_str("the number of threads in a block of this kernel")
            }
            LaunchLimit::SharedMemBytes => {
                f.write_str("shared_mem_bytes (beside the kernel's static shared memory)")
            }
            LaunchLimit::ResidentBlocks => f.write_str("the number of resident blocks"),
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Axis::X => "x",
            Axis::Y => "y",
            Axis::Z => "z",
        })
    }
}

/// The extents that are allowed, in words.
pub(super) fn allowed(what: LaunchLimit, limit: u64) -> String {
    match what {
        // Zero is allowed as well.
        LaunchLimit::SharedMemBytes => format!("at most {limit}"),
        _ if limit == 0 => "smaller: the device can hold none of that shape".to_owned(),
        _ => format!("1 to {limit}"),
    }
}
