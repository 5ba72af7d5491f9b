//! [`Occupancy`]: the resources that a launch takes, and how many blocks fit.
#![forbid(unsafe_code)]

use super::launch_config::{Dim3, LaunchConfig};
use super::signature::Signature;
use super::{Core, Kernel};
use crate::backend::KernelAttributes;
use crate::error::Result;
use crate::error::launch_limit::LaunchLimit;
use crate::runtime::stream_state::StreamState;
use crate::stream::Stream;
use crate::submit::wrong_device;
use crate::thread::role;

/// Blocks that a multiprocessor of any architecture can hold at once.
const MOST_BLOCKS: u32 = 32;

/// How many blocks of a kernel run at once, and which block size fills the device best.
///
/// A multiprocessor takes a block when it has room for all of it: its threads in whole warps, its registers
/// ([`registers`](KernelAttributes::registers) per thread), its static and dynamic shared memory. Room too small
/// for another block stays unused. Blocks of other kernels, on any stream, compete for the same room.
///
/// On a host device a kernel's twin is called once for the whole grid, so the answers are
/// conventions: one block per core, and a best block of one thread.
///
/// # Blocking
/// Each query is one driver call; [`best_block`](Self::best_block) makes one for each block size. None
/// waits for the device.
///
/// # Errors
/// Whatever a launch would be refused for; the loss of the device; a call on a thread that must not call the
/// driver, such as the one that runs host functions.
///
/// # Examples
/// ```
/// use gpu_await::{Device, LaunchConfig, kernels};
/// # futures::executor::block_on(async {
/// let device = Device::cuda_or_host()?;
/// let scale = kernels::scale::load(&device).await?;
/// let n = 10_000_000_usize;
/// let (min_grid, block) = scale.occupancy().best_block(|_| 0, None)?;
/// let config = LaunchConfig::new(n.div_ceil(block as usize) as u32, block);
/// println!("{config:?}; {min_grid} blocks fill the device");
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
///
/// # Source
/// `cuOccupancyMaxActiveBlocksPerMultiprocessor`, `cuOccupancyMaxActiveClusters`.
#[derive(Clone, Copy)]
pub struct Occupancy<'k> {
    core: &'k Core,
    /// The stream whose multiprocessors count; without one, all of the device's.
    stream: Option<&'k StreamState>,
}

impl<S: Signature> Kernel<S> {
    /// Returns what the compiler made of the kernel: registers, memory, versions.
    #[must_use]
    pub fn attributes(&self) -> KernelAttributes {
        self.core.attributes
    }

    /// How many blocks run at once, and which block size fills the device best.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy<'_> {
        Occupancy { core: &self.core, stream: None }
    }
}

impl<'k> Occupancy<'k> {
    /// Counts the multiprocessors of that stream, which are fewer than the device's if it is in a
    /// [partition](crate::Partition).
    ///
    /// # Examples
    /// ```
    /// # use gpu_await::{Device, LaunchConfig, kernels};
    /// # futures::executor::block_on(async {
    /// # let device = Device::host();
    /// # let scale = kernels::scale::load(&device).await?;
    /// let stream = device.reserve_partition(1).await?.stream()?;
    /// let blocks = scale.occupancy().on(&stream).resident_blocks(&LaunchConfig::new(1, 32))?;
    /// assert_eq!(blocks, stream.multiprocessors());       // on a host device a block each
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn on(self, stream: &'k Stream) -> Occupancy<'k> {
        Occupancy { stream: Some(stream.state()), ..self }
    }

    fn multiprocessors(&self) -> Result<u32> {
        let engine = &self.core.engine;
        match self.stream {
            Some(stream) if stream.engine.state.id != engine.state.id => {
                Err(wrong_device("the stream", engine, &stream.engine))
            }
            stream => Ok(self.core.multiprocessors(stream)),
        }
    }

    /// Returns how many blocks a multiprocessor holds at once; 1 on a host device.
    ///
    /// # Errors
    /// A block that a launch would be refused for; the loss of the device.
    pub fn active_blocks(&self, block_dim: impl Into<Dim3>, shared_mem_bytes: u32) -> Result<u32> {
        let block_dim = block_dim.into().0;
        let limits = &self.core.engine.limits;
        self.core.check_block(limits, block_dim, shared_mem_bytes)?;
        self.core.active_blocks(block_dim.iter().product(), shared_mem_bytes)
    }

    /// Returns how many blocks the whole device, or [the stream](Self::on), holds at once: the largest grid of a cooperative launch.
    /// The block, shared memory and cluster of `config` count, its grid does not. On a host device it is one
    /// block per core, and at least one cluster.
    ///
    /// # Errors
    /// A geometry that a launch would be refused for; a stream of another device; the loss of the device.
    pub fn resident_blocks(&self, config: &LaunchConfig) -> Result<u32> {
        // A grid of whole clusters, more than any device holds.
        let [x, y, z] = config.cluster_dim();
        let most = self.multiprocessors()? * MOST_BLOCKS;
        let config = config.with_grid_dim([x.saturating_mul(most), y, z]);
        self.core.check_limits(&config, config.is_simple())?;
        self.core.resident_blocks(&config.grid(), self.stream)
    }

    /// Returns the block size that keeps the most threads active and the smallest grid that fills the device, or
    /// [the stream](Self::on), with it: `(min_grid, block)`. `shared_mem_bytes` returns the dynamic shared memory of a block of a
    /// given number of threads; `limit` bounds the block size. `(1, 1)` on a host device.
    ///
    /// Tries every whole number of warps, from the largest block down, and keeps the first one with the most
    /// active threads.
    ///
    /// # Errors
    /// [`LaunchLimit::SharedMemBytes`] if no block can have that much shared memory; a limit of 0; a stream of another device; the
    /// loss of the device.
    pub fn best_block(
        &self,
        shared_mem_bytes: impl Fn(u32) -> u32,
        limit: Option<u32>,
    ) -> Result<(u32, u32)> {
        role::check("asking the driver about a kernel")?;
        let (core, multiprocessors) = (self.core, self.multiprocessors()?);
        let limits = &core.engine.limits;
        let most = core.attributes.max_threads_per_block;
        let most = match limit {
            None => most,
            Some(limit) => {
                core.within(LaunchLimit::ThreadsPerBlock, u64::from(limit), u32::MAX)?;
                most.min(limit)
            }
        };
        if core.module.is_none() {
            return Ok((1, 1));
        }
        let warp = limits.warp_size.max(1);
        let mut best = None;
        let mut least_shared = u32::MAX;
        for warps in (1..=most.div_ceil(warp)).rev() {
            let block = (warps * warp).min(most);
            let shared = shared_mem_bytes(block);
            least_shared = least_shared.min(shared);
            if shared > core.most_shared_mem() {
                continue;
            }
            let active = core.active_blocks(block, shared)?;
            let threads = active * block;
            if active > 0 && best.is_none_or(|(most, _, _)| threads > most) {
                best = Some((threads, active * multiprocessors, block));
            }
        }
        match best {
            Some((_, min_grid, block)) => Ok((min_grid, block)),
            None => {
                let (asked, limit) = (u64::from(least_shared), core.most_shared_mem());
                Err(core.over(LaunchLimit::SharedMemBytes, asked, limit))
            }
        }
    }

    /// Covers `n` elements with at least one thread each, in blocks of the best size; the kernel guards the
    /// tail. A launch for no elements does nothing.
    ///
    /// # Errors
    /// The loss of the device.
    pub fn config_for_elements(&self, n: usize) -> Result<LaunchConfig> {
        let (_, block) = self.best_block(|_| 0, None)?;
        // On a host device, any block size is as good as one thread, and there may be more elements than the grid may have blocks.
        let most_blocks = self.core.engine.limits.grid_dim[0] as usize;
        let least = u32::try_from(n.div_ceil(most_blocks)).unwrap_or(u32::MAX);
        Ok(LaunchConfig::for_elements_in_blocks(n, block.max(least)))
    }
}

impl std::fmt::Debug for Occupancy<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Occupancy({} on {})", self.core.name, self.core.engine.label())
    }
}
