//! Which parts of a slab are free: a buddy allocator over [`SLAB_BYTES`] (pure).
//!
//! Blocks are powers of two from [`LEAST_BYTES`] up to the whole slab, each aligned to its size within the slab. A block is halved as often
//! as a request needs; a block that is freed is merged with its buddy if that is free. Both take one step per order, 14 at most.
//!
//! A complete binary tree has a node for each possible block. A node holds the largest free block in its range: 0 for none, else the order
//! plus one. Nodes below a block in use, or below a block that is free in one piece, read as free.
//!
//! # Invariants
//! 1. No two blocks in use overlap, and each is aligned to its size (`blocks_never_overlap`).
//! 2. With nothing in use the slab is one block (`everything_merges_back`).
//! 3. A request is refused only if no free block is large enough (`blocks_never_overlap`).
#![forbid(unsafe_code)]

/// The unit from which blocks are cut: one huge page.
pub const SLAB_BYTES: usize = 2 << 20;
/// The smallest block.
pub const LEAST_BYTES: usize = 128;
/// The order of the whole slab; order 0 is the smallest block.
const WHOLE: u32 = (SLAB_BYTES / LEAST_BYTES).ilog2();
const ROOT: usize = 1;

/// The free space of one slab.
#[derive(Debug)]
pub struct Buddy {
    /// Node 1 is the slab, nodes `2n` and `2n + 1` are the halves of node `n`.
    largest: Box<[u8]>,
    /// The root's value: read more often than all others.
    top: u8,
    free_bytes: usize,
}

impl Buddy {
    /// A slab that is all free.
    pub fn new() -> Self {
        let mut largest = vec![0; 2 * SLAB_BYTES / LEAST_BYTES];
        for value in 1..=whole(ROOT) {
            let first = first_of(value);
            largest[first..2 * first].fill(value);
        }
        Buddy { largest: largest.into(), top: whole(ROOT), free_bytes: SLAB_BYTES }
    }

    /// How much is free, in pieces.
    pub fn free_bytes(&self) -> usize {
        self.free_bytes
    }

    /// Whether a block of `bytes`, a power of two, is free.
    pub fn has(&self, bytes: usize) -> bool {
        self.top >= value(bytes)
    }

    /// Takes a block of `bytes`, a power of two, where the least is split for it; returns its offset.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let wanted = value(bytes);
        if self.top < wanted {
            return None;
        }
        let mut node = ROOT;
        while whole(node) > wanted {
            let (left, right) = (2 * node, 2 * node + 1);
            let (in_left, in_right) = (self.largest[left], self.largest[right]);
            let fits_better = in_right >= wanted && in_right < in_left;
            node = if in_left < wanted || fits_better { right } else { left };
        }
        self.set(node, 0);
        self.free_bytes -= bytes;
        Some((node - first_of(wanted)) * bytes)
    }

    /// Gives back the block of `bytes` at `offset`.
    pub fn put(&mut self, offset: usize, bytes: usize) {
        let node = first_of(value(bytes)) + offset / bytes;
        debug_assert_eq!(self.largest[node], 0, "{bytes} bytes at {offset} are not in use");
        self.set(node, value(bytes));
        self.free_bytes += bytes;
    }

    /// How many blocks of `bytes` could be taken; does not count beyond `most`.
    pub fn count(&self, bytes: usize, most: usize) -> usize {
        self.count_below(ROOT, value(bytes), most)
    }

    fn count_below(&self, node: usize, wanted: u8, most: usize) -> usize {
        let largest = self.largest[node];
        if largest < wanted || most == 0 {
            return 0;
        }
        if largest == whole(node) {
            return most.min(1 << (largest - wanted));
        }
        let left = self.count_below(2 * node, wanted, most);
        left + self.count_below(2 * node + 1, wanted, most - left)
    }

    /// Sets a node's largest free block, and updates its ancestors.
    fn set(&mut self, node: usize, largest: u8) {
        self.largest[node] = largest;
        let mut node = node / 2;
        while node >= ROOT {
            let (left, right) = (self.largest[2 * node], self.largest[2 * node + 1]);
            let half = whole(node) - 1;
            let merged = left == half && right == half;
            self.largest[node] = if merged { half + 1 } else { left.max(right) };
            node /= 2;
        }
        self.top = self.largest[ROOT];
    }
}

/// A node's value if all of it is free: its order plus one.
fn whole(node: usize) -> u8 {
    (WHOLE + 1 - node.ilog2()) as u8
}

/// A node's value for a free block of this many bytes.
fn value(bytes: usize) -> u8 {
    ((bytes / LEAST_BYTES).ilog2() + 1) as u8
}

/// The first node for blocks of that size.
fn first_of(value: u8) -> usize {
    1 << (WHOLE + 1 - u32::from(value))
}
