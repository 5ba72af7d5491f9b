//! Where a device's memory is, in bytes (pure).
//!
//! There is one account per device. Each byte that the device gave out is in one place, counted in whole blocks, as they are really
//! held; what is left of the limit is free:
//!
//! | place | what |
//! |---|---|
//! | allocated | held by buffers |
//! | pending | freed, and waiting for device work: several streams used it, or its free is on a stream |
//! | kept | in a stream's block cache |
//! | leaked | the driver refused its free, or nobody knows when its use ends; permanent |
//! | shared | made with a descriptor, for other processes as well: beside the pool |
//!
//! | transition | from | to |
//! |---|---|---|
//! | [`claim`](Account::claim) | pending, as far as the caller took some over; otherwise fresh | allocated |
//! | [`unclaim`](Account::unclaim) | allocated | back |
//! | [`reuse`](Account::reuse) | kept | allocated |
//! | [`keep`](Account::keep) | allocated | kept |
//! | [`retire`](Account::retire) | allocated | pending |
//! | [`uncache`](Account::uncache) | kept | pending |
//! | [`release`](Account::release) | pending | nowhere: back in the pool |
//! | [`abandon`](Account::abandon) | allocated | nowhere: the device is gone |
//! | [`leak`](Account::leak) | pending | leaked |
//! | [`share`](Account::share) | fresh | shared |
//! | [`unshare`](Account::unshare) | shared | nowhere: unmapped here |
//!
//! # Invariants
//! 1. `allocated + pending + kept + leaked + shared` never exceeds the limit: only a claim and `share` raise it
//!    (`no_transition_exceeds_the_limit`).
//! 2. Nothing is counted twice or lost (`every_byte_is_in_one_place`).
#![forbid(unsafe_code)]

use smallvec::SmallVec;

/// The granularity to which every backend aligns and rounds.
const GRAIN: u64 = 512;

/// The size of a block for this many bytes, if it is never cached.
#[inline]
pub fn block(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(GRAIN).unwrap_or(bytes)
}

/// The figures; a snapshot of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Bytes of buffers that are alive.
    pub allocated: u64,
    /// Bytes that wait to be free.
    pub pending: u64,
    /// Bytes that streams keep.
    pub kept: u64,
    /// Bytes whose free was refused.
    pub leaked: u64,
    /// Bytes that were made here for other processes as well.
    pub shared: u64,
    /// Bytes of other processes that are mapped here: theirs, so no part of the limit.
    pub imported: u64,
    /// Buffers alive.
    pub buffers: u64,
    /// The most that `allocated + pending` ever was.
    pub used_peak: u64,
}

impl Figures {
    /// All memory that the pool gave out.
    #[inline]
    pub fn held(&self) -> u64 {
        self.allocated + self.pending + self.kept + self.leaked
    }
}

/// A device's account.
#[derive(Debug)]
pub struct Account {
    limit: u64,
    figures: Figures,
    /// Rises when memory is freed by a buffer, or comes free.
    version: u64,
    /// The version at which the driver refused a block that fits, and its size.
    refused: Option<(u64, u64)>,
}

impl Account {
    /// Nothing is in use yet.
    #[inline]
    pub fn new(limit: u64) -> Self {
        Account { limit, figures: Figures::default(), version: 0, refused: None }
    }

    /// The figures of this moment.
    #[inline]
    pub fn figures(&self) -> Figures {
        Figures { used_peak: self.used_peak(), ..self.figures }
    }

    /// A number that rises when memory is freed by a buffer, or comes free.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The driver refused a block that fits. The refusal holds until memory moves.
    #[inline]
    pub fn refuse(&mut self, block: u64) {
        let known = self.refused.filter(|(version, _)| *version == self.version);
        let least = known.map_or(block, |(_, known)| known.min(block));
        self.refused = Some((self.version, least));
    }

    /// Whether the driver refused such a block, or a smaller one, and no memory moved since.
    #[inline]
    pub fn is_refused(&self, block: u64) -> bool {
        self.refused.is_some_and(|(version, least)| version == self.version && least <= block)
    }

    /// How much more may be allocated.
    #[inline]
    pub fn room(&self) -> u64 {
        self.limit.saturating_sub(self.figures.held() + self.figures.shared)
    }

    /// The memory available to everything but buffers and leaks.
    #[inline]
    pub fn most(&self) -> u64 {
        let Figures { allocated, leaked, shared, .. } = self.figures;
        self.limit.saturating_sub(allocated + leaked + shared)
    }

    /// How much is missing for a block, after this much was taken over.
    #[inline]
    pub fn lacks(&self, block: u64, taken: u64) -> u64 {
        block.saturating_sub(taken).saturating_sub(self.room())
    }

    /// A buffer gets a block: of `taken` pending bytes, as far as they go, and of fresh memory. False,
    /// and nothing happens, if that would exceed the limit.
    #[must_use]
    #[inline]
    pub fn claim(&mut self, block: u64, taken: u64) -> bool {
        if self.lacks(block, taken) > 0 {
            return false;
        }
        self.figures.pending -= taken.min(block);
        self.figures.allocated += block;
        self.figures.buffers += 1;
        true
    }

    /// Undoes a claim, which does not count in the peak.
    #[inline]
    pub fn unclaim(&mut self, block: u64, taken: u64) {
        self.figures.allocated -= block;
        self.figures.pending += taken.min(block);
        self.figures.buffers -= 1;
        self.version += 1;
    }

    /// A buffer gets a block of the stream's cache.
    #[inline]
    pub fn reuse(&mut self, block: u64) {
        self.figures.kept -= block;
        self.figures.allocated += block;
        self.figures.buffers += 1;
    }

    /// A stream's cache gets a buffer's block.
    #[inline]
    pub fn keep(&mut self, block: u64) {
        self.peak();
        self.figures.allocated -= block;
        self.figures.kept += block;
        self.figures.buffers -= 1;
        self.version += 1;
    }

    /// A buffer's block waits for device work.
    #[inline]
    pub fn retire(&mut self, block: u64) {
        self.figures.allocated -= block;
        self.figures.pending += block;
        self.figures.buffers -= 1;
        self.version += 1;
    }

    /// A block of a cache waits for device work.
    #[inline]
    pub fn uncache(&mut self, block: u64) {
        self.figures.kept -= block;
        self.figures.pending += block;
    }

    /// Pending bytes are the pool's again.
    #[inline]
    pub fn release(&mut self, bytes: u64) {
        self.peak();
        self.figures.pending -= bytes;
        self.version += 1;
    }

    /// A buffer's block went with its device.
    #[inline]
    pub fn abandon(&mut self, block: u64) {
        self.peak();
        self.figures.allocated -= block;
        self.figures.buffers -= 1;
        self.version += 1;
    }

    /// Pending bytes will not come free: the driver refused, or the end of their use will never be known.
    #[inline]
    pub fn leak(&mut self, bytes: u64) {
        self.peak();
        self.figures.pending -= bytes;
        self.figures.leaked += bytes;
        self.version += 1;
    }

    /// Counts memory beside the pool. False, and nothing happens, if that would exceed the limit.
    #[must_use]
    pub fn share(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.room();
        self.figures.shared += if fits { bytes } else { 0 };
        fits
    }

    /// That memory is not mapped here any more.
    pub fn unshare(&mut self, bytes: u64) {
        self.figures.shared -= bytes;
        self.version += 1;
    }

    /// Counts memory of another process.
    pub fn import(&mut self, bytes: u64) {
        self.figures.imported += bytes;
    }

    /// That memory is not mapped here any more.
    pub fn unimport(&mut self, bytes: u64) {
        self.figures.imported -= bytes;
    }

    /// Records the peak, before a decrease.
    fn peak(&mut self) {
        self.figures.used_peak = self.used_peak();
    }

    fn used_peak(&self) -> u64 {
        self.figures.used_peak.max(self.figures.allocated + self.figures.pending)
    }
}

/// Which of these sizes to take so that they make up `needed`, if they can: the smallest that is enough
/// alone, or else the largest ones. All of them where even those are not enough.
#[inline]
pub fn choose(sizes: &[u64], needed: u64) -> SmallVec<[usize; 4]> {
    if needed == 0 {
        return SmallVec::new();
    }
    let alone = (0..sizes.len()).filter(|index| sizes[*index] >= needed);
    if let Some(index) = alone.min_by_key(|index| sizes[*index]) {
        return SmallVec::from_iter([index]);
    }
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(sizes[*index]));
    let mut sum = 0_u64;
    let enough = order.into_iter().take_while(|index| {
        let before = sum;
        sum = sum.saturating_add(sizes[*index]);
        before < needed
    });
    enough.collect()
}
