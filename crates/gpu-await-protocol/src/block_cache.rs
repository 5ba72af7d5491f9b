//! Device memory freed in stream order and cached for the stream's next allocations (pure).
//!
//! Later work on a stream runs behind every use of memory freed there before, so a stream can reuse that memory without a wait or a driver
//! call. This matters when threads allocate concurrently: the driver's allocator takes 0.6 µs for an allocation and its free from one
//! thread, and 27 µs from each of eight (`benches/results/decisions.txt`).
//!
//! | size | rounded up to | waste |
//! |---|---|---|
//! | to 2 KiB | a multiple of 512 bytes | the driver's own |
//! | to [`LARGEST`] | a quarter of the power of two below | 25 % at most |
//! | beyond | not cached: using it takes longer than the driver call | |
//!
//! # Invariants
//! 1. A block taken is at least as large as requested (`a_kept_block_is_large_enough_and_not_too_large`).
//! 2. A block put in comes out once (`what_is_kept_comes_out_once`).
//! 3. The cache never exceeds its limit (`what_is_kept_comes_out_once`).
//! 4. As much is removed as is requested, of the blocks that may be removed (`as_much_is_taken_out_as_is_asked_for`).
#![forbid(unsafe_code)]

/// The largest piece that is kept.
pub const LARGEST: u64 = 1 << 20;

const GRAIN: u64 = 512;

/// The allocation size for this many bytes; `None`: exactly that many, and the block is not cached.
pub fn rounded(bytes: u64) -> Option<u64> {
    if bytes == 0 || bytes > LARGEST {
        return None;
    }
    let step = (bytes.next_power_of_two() / 8).max(GRAIN);
    Some(bytes.next_multiple_of(step))
}

/// Pieces by their rounded size.
#[derive(Debug)]
pub struct BlockCache<T> {
    limit: u64,
    bytes: u64,
    /// A stream uses few sizes.
    sizes: Vec<(u64, Vec<T>)>,
}

impl<T> BlockCache<T> {
    /// Keeps `limit` bytes at most.
    pub fn new(limit: u64) -> Self {
        BlockCache { limit, bytes: 0, sizes: Vec::new() }
    }

    /// A piece of a rounded size.
    pub fn take(&mut self, size: u64) -> Option<T> {
        let (_, pieces) = self.sizes.iter_mut().find(|(known, _)| *known == size)?;
        let piece = pieces.pop()?;
        self.bytes -= size;
        Some(piece)
    }

    /// Keeps a piece of a rounded size, or hands it back if the cache is full.
    pub fn put(&mut self, size: u64, piece: T) -> Result<(), T> {
        if self.bytes + size > self.limit {
            return Err(piece);
        }
        self.bytes += size;
        match self.sizes.iter_mut().find(|(known, _)| *known == size) {
            Some((_, pieces)) => pieces.push(piece),
            None => self.sizes.push((size, vec![piece])),
        }
        Ok(())
    }

    /// Takes out pieces that `may_go`, the largest first, until they make up `least` bytes; each with
    /// its size.
    pub fn take_out(&mut self, least: u64, mut may_go: impl FnMut(&T) -> bool) -> Vec<(u64, T)> {
        let mut taken = Vec::new();
        let mut missing = least;
        self.sizes.sort_unstable_by_key(|(size, _)| std::cmp::Reverse(*size));
        for (size, pieces) in &mut self.sizes {
            let mut index = pieces.len();
            while index > 0 && missing > 0 {
                index -= 1;
                if may_go(&pieces[index]) {
                    taken.push((*size, pieces.swap_remove(index)));
                    self.bytes -= *size;
                    missing = missing.saturating_sub(*size);
                }
            }
        }
        taken
    }

    /// The pieces that are kept.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.sizes.iter().flat_map(|(_, pieces)| pieces)
    }
}
