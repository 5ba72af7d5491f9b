//! The launch that copies many pieces of device memory, pinned memory, or memory of other GPUs that this one can access.
//!
//! | pieces | the kernel reads them from |
//! |---|---|
//! | up to [`FEW`] | its own arguments |
//! | more | pinned memory that the operation is lent |

use super::{ArgBlock, Grid, MemoryKernels, MemoryLaunch, THREADS};
use crate::backend::DevicePtr;
use crate::runtime::traced_op::TracedWork;

/// The most pieces that fit in a kernel's parameters, which are 4,096 bytes on every GPU.
pub(crate) const FEW: usize = 170;
/// The bytes that a block copies at a time; as in the kernel.
const PART_BYTES: u64 = 16 << 10;
/// The blocks that a multiprocessor holds at once: 2,048 threads.
const BLOCKS_A_MULTIPROCESSOR: u64 = 8;

/// One piece as the kernel reads it: destination, source, and number of bytes.
pub(crate) type PieceWords = [u64; 3];

impl MemoryKernels {
    /// Whether the kernel that copies pieces was loaded.
    pub(crate) fn copies_pieces(&self) -> bool {
        self.pieces.is_some()
    }

    /// The launch that copies these pieces with no more blocks than `multiprocessors` can hold. The kernel reads the pieces from
    /// `table`; without one, there are at most [`FEW`].
    pub(crate) fn copy_pieces(
        &self,
        pieces: &[PieceWords],
        table: Option<DevicePtr>,
        multiprocessors: u32,
    ) -> Option<MemoryLaunch<'_>> {
        let kernel = self.pieces.as_ref()?;
        let (longest, bytes) = pieces
            .iter()
            .fold((0, 0), |(longest, all), &[_, _, bytes]| (bytes.max(longest), all + bytes));
        let parts = u32::try_from(longest.div_ceil(PART_BYTES)).ok()?.max(1);
        let mut few = [[0; 3]; FEW];
        if table.is_none() {
            few.get_mut(..pieces.len())?.copy_from_slice(pieces);
        }
        let mut args = ArgBlock::default();
        args.push_value(&table.map_or(0, |table| table.0).to_ne_bytes());
        args.push_value(&u32::try_from(pieces.len()).ok()?.to_ne_bytes());
        args.push_value(&parts.to_ne_bytes());
        args.push_value(bytemuck::cast_slice(&few));
        let items = pieces.len() as u64 * u64::from(parts);
        let blocks = items.min(u64::from(multiprocessors) * BLOCKS_A_MULTIPROCESSOR).max(1);
        Some(kernel.with([blocks, 1], [THREADS.into(), 1], args, (TracedWork::Copy, bytes)))
    }
}

/// The kernel on the CPU.
pub(super) fn twin(_: &Grid, args: &ArgBlock) {
    let word: &[u64] = bytemuck::cast_slice(args.value(0, 8));
    let count = super::twin::small(args, 1);
    let few: &[PieceWords];
    let pieces = match word[0] {
        0 => {
            few = bytemuck::cast_slice(args.value(3, count * size_of::<PieceWords>()));
            few
        }
        // SAFETY: the launch was lent the table, with so many entries, and nothing writes it before the launch is complete.
        table => unsafe { std::slice::from_raw_parts(table as *const PieceWords, count) },
    };
    for [to, from, bytes] in pieces {
        // SAFETY: the operation names both ranges, which are live and its own when the stream gets there; overlapping pieces were
        // refused.
        unsafe {
            std::ptr::copy_nonoverlapping(*from as *const u8, *to as *mut u8, *bytes as usize);
        }
    }
}
