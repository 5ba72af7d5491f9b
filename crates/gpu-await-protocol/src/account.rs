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
//! | leaked | the driver refused its free, or the end of its use is unknown; permanent |
//! | shared | made with a descriptor, for other processes as well: beside the pool |
//! | committed | of buffers that grow in place: beside the pool |
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
//! | [`commit`](Account::commit) | fresh | committed |
//! | [`uncommit`](Account::uncommit) | committed | nowhere: unmapped |
//!
//! Budgets ([`reservations`](super::reservations)) are promises, not places: what is left of them is reserved for their allocations, which may also
//! use what is pending and kept, as far as the device may wait.
//!
//! | transition | changes |
//! |---|---|
//! | [`reserve`](Account::reserve) | makes a budget of what no other budget and no buffer has |
//! | `claim`, `reuse` and `commit` with a budget | draw from it |
//! | `unclaim`, `keep`, `retire`, `abandon` and `uncommit` with a budget | give back to it |
//! | [`shrink`](Account::shrink) | makes a budget smaller, down to nothing |
//!
//! # Invariants
//! 1. `allocated + pending + kept + leaked + shared + committed` never exceeds the limit: only a claim, `share` and `commit` raise it
//!    (`no_transition_exceeds_the_limit`).
//! 2. Nothing is counted twice or lost (`every_byte_is_in_one_place`).
//! 3. `allocated + leaked + shared + committed` and what is left of budgets never exceed the limit together, except by leaks: an allocation that
//!    draws fits once enough of what is pending and kept was taken over (`budgets_are_kept`).
#![forbid(unsafe_code)]

use smallvec::SmallVec;

use super::reservations::{Holder, Reservations};

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
    /// Bytes of buffers that grow in place.
    pub committed: u64,
    /// Bytes of other processes that are mapped here: not counted in the limit.
    pub imported: u64,
    /// Buffers alive.
    pub buffers: u64,
    /// What is left of budgets, some of it perhaps in memory that is pending or kept.
    pub budgeted: u64,
    /// What was drawn from open budgets, of what is allocated, committed and leaked.
    pub drawn: u64,
    /// The most that `allocated + committed + pending` ever was.
    pub used_peak: u64,
}

impl Figures {
    /// Memory of buffers, of both kinds.
    #[inline]
    pub fn of_buffers(&self) -> u64 {
        self.allocated + self.committed
    }

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
    /// Freed memory is available only when no work uses it: allocations do not wait on the device.
    is_strict: bool,
    figures: Figures,
    /// The budgets, and the requests that wait for one.
    pub reservations: Reservations,
    /// Rises when memory is freed by a buffer, or comes free.
    version: u64,
    /// The version at which the driver refused a block that fits, and its size.
    refused: Option<(u64, u64)>,
}

impl Account {
    /// An account with nothing in use. `is_strict`: allocations do not take over what other streams still use.
    #[inline]
    pub fn new(limit: u64, is_strict: bool) -> Self {
        let (figures, reservations) = (Figures::default(), Reservations::default());
        Account { limit, is_strict, figures, reservations, version: 0, refused: None }
    }

    /// The figures of this moment.
    #[inline]
    pub fn figures(&self) -> Figures {
        let (budgeted, drawn) = (self.reservations.left(), self.reservations.drawn());
        Figures { used_peak: self.used_peak(), budgeted, drawn, ..self.figures }
    }

    /// A number that rises when memory is freed by a buffer, or comes free.
    #[inline]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Records that the driver refused a block that fits. The refusal holds until memory moves.
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

    /// How much more may be allocated, without a budget or from one.
    #[inline]
    pub fn room(&self, budget: Option<usize>) -> u64 {
        self.fresh(budget).min(self.most(budget))
    }

    /// The limit, without buffers, leaks and, outside of budgets, what is left of those.
    #[inline]
    pub fn most(&self, budget: Option<usize>) -> u64 {
        let promised = if budget.is_none() { self.reservations.left() } else { 0 };
        self.limit.saturating_sub(self.taken() + promised)
    }

    /// What `most` would be if all budgets were closed and, outside of budgets, what was drawn from them were free.
    pub fn most_without_budgets(&self, budget: Option<usize>) -> u64 {
        let drawn = if budget.is_none() { self.reservations.drawn() } else { 0 };
        self.limit.saturating_sub(self.taken() - drawn)
    }

    /// The memory that no place has.
    fn fresh(&self, budget: Option<usize>) -> u64 {
        let Figures { pending, kept, .. } = self.figures;
        let promised = match budget {
            // What is pending cannot serve as the promised memory.
            None if self.is_strict => self.reservations.left(),
            _ => 0,
        };
        self.limit.saturating_sub(self.taken() + pending + kept + promised)
    }

    /// The memory that does not come back by itself.
    fn taken(&self) -> u64 {
        let Figures { allocated, leaked, shared, committed, .. } = self.figures;
        allocated + leaked + shared + committed
    }

    /// How much is missing for a block, after this much was taken over; all of it, if taking over does not help.
    #[inline]
    pub fn lacks(&self, block: u64, taken: u64, budget: Option<usize>) -> u64 {
        if block > self.most(budget) {
            return block;
        }
        block.saturating_sub(taken).saturating_sub(self.fresh(budget))
    }

    /// Gives a buffer a block: of `taken` pending bytes, as far as they go, and of fresh memory. False, and nothing happens, if that would exceed the
    /// limit, or what is left of the budget.
    #[must_use]
    #[inline]
    pub fn claim(&mut self, block: u64, taken: u64, budget: Option<usize>) -> bool {
        if self.lacks(block, taken, budget) > 0 || !self.draw(block, budget) {
            return false;
        }
        self.figures.pending -= taken.min(block);
        self.figures.allocated += block;
        self.figures.buffers += 1;
        true
    }

    fn draw(&mut self, block: u64, budget: Option<usize>) -> bool {
        budget.is_none_or(|budget| self.reservations.draw(budget, block))
    }

    fn undraw(&mut self, block: u64, budget: Option<usize>) {
        if let Some(budget) = budget {
            self.reservations.undraw(budget, block);
        }
    }

    /// Makes a budget of memory that no other budget and no buffer has. `within_reach` is all that the device can give, whatever
    /// the limit is; `holder` the task that awaited it.
    pub fn reserve(
        &mut self,
        bytes: u64,
        within_reach: u64,
        holder: Option<Holder>,
    ) -> Result<usize, Option<Holder>> {
        if bytes > self.unreserved(within_reach) {
            return Err(holder);
        }
        Ok(self.reservations.open(bytes, holder))
    }

    /// How much [`reserve`](Self::reserve) can have now.
    pub fn unreserved(&self, within_reach: u64) -> u64 {
        let beyond = self.limit.saturating_sub(within_reach);
        let most = self.most(None).saturating_sub(beyond);
        if self.is_strict { most.min(self.fresh(None).saturating_sub(beyond)) } else { most }
    }

    /// How much [`reserve`](Self::reserve) could ever get on a device with this much memory.
    pub fn reservable(&self, total: u64) -> u64 {
        self.limit.min(total).saturating_sub(self.figures.leaked)
    }

    /// Makes a budget smaller.
    pub fn shrink(&mut self, budget: usize, bytes: u64) {
        self.reservations.shrink(budget, bytes);
        self.version += 1;
    }

    /// Undoes a claim, which does not count in the peak.
    #[inline]
    pub fn unclaim(&mut self, block: u64, taken: u64, budget: Option<usize>) {
        self.undraw(block, budget);
        self.figures.allocated -= block;
        self.figures.pending += taken.min(block);
        self.figures.buffers -= 1;
        self.version += 1;
    }

    /// Gives a buffer a block of the stream's cache. False, and nothing happens, if that is another budget's memory, or more than what is left of
    /// this one.
    #[must_use]
    #[inline]
    pub fn reuse(&mut self, block: u64, budget: Option<usize>) -> bool {
        // In the cache it was within the limit: only budgets make it too much.
        let is_promised = self.reservations.left() > 0 && block > self.most(budget);
        if is_promised || !self.draw(block, budget) {
            return false;
        }
        self.figures.kept -= block;
        self.figures.allocated += block;
        self.figures.buffers += 1;
        true
    }

    /// Moves a buffer's block to a stream's cache.
    #[inline]
    pub fn keep(&mut self, block: u64, budget: Option<usize>) {
        self.undraw(block, budget);
        self.peak();
        self.figures.allocated -= block;
        self.figures.kept += block;
        self.figures.buffers -= 1;
        self.version += 1;
    }

    /// A buffer's block waits for device work.
    #[inline]
    pub fn retire(&mut self, block: u64, budget: Option<usize>) {
        self.undraw(block, budget);
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

    /// Returns pending bytes to the pool.
    #[inline]
    pub fn release(&mut self, bytes: u64) {
        self.peak();
        self.figures.pending -= bytes;
        self.version += 1;
    }

    /// A buffer's block went with its device.
    #[inline]
    pub fn abandon(&mut self, block: u64, budget: Option<usize>) {
        self.undraw(block, budget);
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
        let fits = bytes <= self.room(None);
        self.figures.shared += if fits { bytes } else { 0 };
        fits
    }

    /// That memory is not mapped here any more.
    pub fn unshare(&mut self, bytes: u64) {
        self.figures.shared -= bytes;
        self.version += 1;
    }

    /// Counts memory beside the pool for a buffer that grows. False, and nothing happens, if that would exceed the limit, or what is left of
    /// the budget.
    #[must_use]
    pub fn commit(&mut self, bytes: u64, budget: Option<usize>) -> bool {
        let fits = bytes <= self.room(budget) && self.draw(bytes, budget);
        self.figures.committed += if fits { bytes } else { 0 };
        fits
    }

    /// That memory was unmapped.
    pub fn uncommit(&mut self, bytes: u64, budget: Option<usize>) {
        self.undraw(bytes, budget);
        self.peak();
        self.figures.committed -= bytes;
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
        let Figures { allocated, committed, pending, used_peak, .. } = self.figures;
        used_peak.max(allocated + committed + pending)
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
