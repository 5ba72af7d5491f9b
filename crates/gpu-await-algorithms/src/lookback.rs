//! [`Lookback`]: kernels whose tiles look back at earlier tiles, and the state that tiles publish for that.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::code::LoadedImage;
use super::launch::AlgorithmLaunch;
use gpu_await::sibling::{Span, UntypedKernel, VerbParts};
use gpu_await::{DeviceBuffer, Queue, Result};

/// Threads of a block that initialises the state.
const INIT_THREADS: u32 = 128;

/// The facts that a launch of such a kernel needs.
pub(super) struct Lookback {
    init: Arc<UntypedKernel>,
    pub(super) threads: u32,
    pub(super) tile: u32,
    padding_tiles: u32,
    state_bytes: u32,
}

impl Lookback {
    /// For the kernel named `kernel` in the image's facts.
    pub(super) fn of(image: &LoadedImage, init: &str, kernel: &str) -> Result<Self> {
        Ok(Lookback {
            init: image.kernel(init)?,
            threads: image.fact(&format!("{kernel}_threads")),
            tile: image.fact(&format!("{kernel}_tile")),
            padding_tiles: image.fact("padding_tiles"),
            state_bytes: image.fact("tile_state_bytes"),
        })
    }

    /// How many tiles hold this many elements, at least one. The driver refuses more than a grid can have.
    pub(super) fn tiles_of(&self, elements: u64) -> u32 {
        let tiles = elements.div_ceil(u64::from(self.tile)).max(1);
        u32::try_from(tiles).unwrap_or(u32::MAX - self.padding_tiles)
    }

    /// Memory for the state of this many tiles.
    pub(super) fn state(
        &self,
        queue: &Queue<'_>,
        op: &'static str,
        tiles: u32,
    ) -> Result<DeviceBuffer<u8>> {
        queue.scratch(op, (tiles + self.padding_tiles) as usize * self.state_bytes as usize)
    }

    /// Initialises the state for this many tiles.
    pub(super) fn begin(
        &self,
        queue: &Queue<'_>,
        op: &'static str,
        state: &Span<'_>,
        tiles: u32,
    ) -> Result<()> {
        let blocks = (tiles + self.padding_tiles).div_ceil(INIT_THREADS);
        let launch = AlgorithmLaunch::new(op).overwrites(state).value(tiles);
        launch.run(queue, &self.init, (blocks, INIT_THREADS))
    }
}
