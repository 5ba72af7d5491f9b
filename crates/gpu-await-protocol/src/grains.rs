//! Who owns which grains of a device's multiprocessors (pure).
//!
//! A device is divided once, into grains that the driver makes; a share of it is a set of grains. Shares are disjoint because each grain
//! has one owner.
//!
//! | a grain is | from | until |
//! |---|---|---|
//! | free | the beginning | it is taken |
//! | taken | [`Grains::take`] | [`Grains::give`] of the same set |
//!
//! The driver keeps memory for every set that it was ever given, even after the set is destroyed. So few sets are made: an earlier one is
//! taken again if it is free and fits as well, and new ones are runs of neighbours where there is room.
//!
//! # Invariants
//! 1. A grain is taken by one owner at a time (`shares_are_disjoint`).
//! 2. A share has at least as many multiprocessors as were asked for, and too few without its smallest grain
//!    (`a_share_is_large_enough_and_no_larger`).
//! 3. If enough multiprocessors are free, a share is found (`what_is_free_can_be_taken`).
#![forbid(unsafe_code)]

/// A set of grains, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GrainSet(u64);

impl GrainSet {
    /// The most grains that a device is divided into; multiprocessors beyond are left alone.
    pub const MOST: usize = u64::BITS as usize;

    fn run(first: usize, len: usize) -> Self {
        GrainSet((u64::MAX >> (Self::MOST - len)) << first)
    }

    /// The numbers of the grains, in order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..Self::MOST).filter(move |at| self.0 >> at & 1 == 1)
    }

    fn overlaps(self, other: GrainSet) -> bool {
        self.0 & other.0 != 0
    }
}

/// The grains of a device.
#[derive(Clone, Debug)]
pub struct Grains {
    /// How many multiprocessors each has.
    sizes: Box<[u32]>,
    taken: GrainSet,
    /// How many sets are taken.
    shares: u64,
    /// Every set that was ever taken.
    made: Vec<GrainSet>,
}

impl Grains {
    /// All are free. `sizes`: the multiprocessors of each.
    pub fn new(mut sizes: Vec<u32>) -> Self {
        sizes.truncate(GrainSet::MOST);
        Grains { sizes: sizes.into(), taken: GrainSet(0), shares: 0, made: Vec::new() }
    }

    /// Takes grains with at least this many multiprocessors, at least one grain; `None` if too few are free.
    pub fn take(&mut self, multiprocessors: u32) -> Option<GrainSet> {
        let least = multiprocessors.max(1);
        let set = self
            .made_before(least)
            .or_else(|| self.neighbours(least))
            .or_else(|| self.any(least))?;
        self.taken.0 |= set.0;
        self.shares += 1;
        if !self.made.contains(&set) {
            self.made.push(set);
        }
        Some(set)
    }

    /// Gives a set back that was taken.
    pub fn give(&mut self, set: GrainSet) {
        debug_assert_eq!(self.taken.0 & set.0, set.0, "it was taken");
        self.taken.0 &= !set.0;
        self.shares -= 1;
    }

    /// How many sets are taken.
    pub fn shares(&self) -> u64 {
        self.shares
    }

    /// The multiprocessors of a set.
    pub fn multiprocessors(&self, set: GrainSet) -> u32 {
        set.iter().filter_map(|at| self.sizes.get(at)).sum()
    }

    /// How many multiprocessors are free.
    pub fn free(&self) -> u32 {
        self.multiprocessors(GrainSet(!self.taken.0))
    }

    /// How many multiprocessors the grains have.
    pub fn all(&self) -> u32 {
        self.sizes.iter().sum()
    }

    /// The smallest possible share.
    pub fn smallest(&self) -> u32 {
        self.sizes.iter().copied().min().unwrap_or(0)
    }

    /// Whether it has enough, and no grain that it could do without.
    fn fits(&self, set: GrainSet, least: u32) -> bool {
        let all = self.multiprocessors(set);
        let smallest = set.iter().filter_map(|at| self.sizes.get(at)).min().copied().unwrap_or(0);
        all >= least && all - smallest < least
    }

    fn made_before(&self, least: u32) -> Option<GrainSet> {
        let free = |set: &&GrainSet| !set.overlaps(self.taken) && self.fits(**set, least);
        self.made.iter().find(free).copied()
    }

    /// The first run of free neighbours.
    fn neighbours(&self, least: u32) -> Option<GrainSet> {
        let count = self.sizes.len();
        let mut runs = (0..count)
            .flat_map(|first| (1..=count - first).map(move |len| GrainSet::run(first, len)));
        runs.find(|set| !set.overlaps(self.taken) && self.fits(*set, least))
    }

    /// The first free grains that suffice, without the first that are not needed.
    fn any(&self, least: u32) -> Option<GrainSet> {
        let free: Vec<usize> =
            (0..self.sizes.len()).filter(|at| self.taken.0 >> at & 1 == 0).collect();
        let (mut set, mut has) = (GrainSet(0), 0);
        for at in free {
            if has < least {
                set.0 |= 1 << at;
                has += self.sizes[at];
            }
        }
        if has < least {
            return None;
        }
        let grains: Vec<usize> = set.iter().collect();
        for at in grains {
            if has - self.sizes[at] >= least {
                set.0 &= !(1 << at);
                has -= self.sizes[at];
            }
        }
        Some(set)
    }
}
