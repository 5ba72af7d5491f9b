//! The account of a device's memory, against a model that knows every block.
//!
//! The module is pure: `main.rs` compiles its very source.

use proptest::prelude::*;

use crate::under_test::cases::{config, size};
use gpu_await_protocol::account::{self, Account, Figures, choose};

const LIMIT: u64 = 100 * 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Allocated,
    Pending,
    Kept,
    Leaked,
    Shared,
    Committed,
}

#[derive(Clone, Debug)]
enum Step {
    /// So many grains, and how many of the pending blocks are taken over for it.
    Claim(u64, usize),
    Keep(usize),
    Retire(usize),
    Abandon(usize),
    Reuse(usize),
    Uncache(usize),
    Release(usize),
    Leak(usize),
    FailToAllocate(u64, usize),
    Share(u64),
    Unshare(usize),
    Commit(u64),
    Uncommit(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..40_u64, 0..3_usize).prop_map(|(size, taken)| Step::Claim(size, taken)),
        2 => (0..9_usize).prop_map(Step::Keep),
        2 => (0..9_usize).prop_map(Step::Retire),
        1 => (0..9_usize).prop_map(Step::Abandon),
        2 => (0..9_usize).prop_map(Step::Reuse),
        1 => (0..9_usize).prop_map(Step::Uncache),
        2 => (0..9_usize).prop_map(Step::Release),
        1 => (0..9_usize).prop_map(Step::Leak),
        1 => (1..40_u64, 0..3_usize).prop_map(|(size, taken)| Step::FailToAllocate(size, taken)),
        1 => (0..60_u64).prop_map(Step::Share),
        1 => (0..9_usize).prop_map(Step::Unshare),
        1 => (0..60_u64).prop_map(Step::Commit),
        1 => (0..9_usize).prop_map(Step::Uncommit),
    ]
}

/// The account beside every block and where it is.
struct Twins {
    account: Account,
    blocks: Vec<(Place, u64)>,
    peak: u64,
}

impl Twins {
    fn sum(&self, place: Place) -> u64 {
        self.blocks.iter().filter(|block| block.0 == place).map(|block| block.1).sum()
    }

    /// Takes out the n-th block of a place, modulo their number.
    fn take(&mut self, place: Place, nth: usize) -> Option<u64> {
        let there: Vec<usize> =
            (0..self.blocks.len()).filter(|index| self.blocks[*index].0 == place).collect();
        let index = *there.get(nth % there.len().max(1))?;
        Some(self.blocks.swap_remove(index).1)
    }

    fn walk(&mut self, from: Place, nth: usize, to: Option<Place>, f: fn(&mut Account, u64)) {
        if let Some(size) = self.take(from, nth) {
            f(&mut self.account, size);
            self.blocks.extend(to.map(|to| (to, size)));
        }
    }

    /// Claims a block, and takes over so many of those that are pending; true if it was given.
    fn claim(&mut self, size: u64, blocks: usize) -> bool {
        let taken: Vec<u64> = (0..blocks).filter_map(|_| self.take(Place::Pending, 0)).collect();
        let bytes: u64 = taken.iter().sum();
        let held = self.blocks.iter().map(|block| block.1).sum::<u64>() + bytes;
        let fits = held + size.saturating_sub(bytes) <= LIMIT;
        assert_eq!(self.account.lacks(size, bytes, None) == 0, fits);
        assert_eq!(self.account.claim(size, bytes, None), fits);
        if fits {
            self.blocks.push((Place::Allocated, size));
            let rest = bytes.saturating_sub(size);
            self.blocks.extend((rest > 0).then_some((Place::Pending, rest)));
        } else {
            self.blocks.extend(taken.into_iter().map(|size| (Place::Pending, size)));
        }
        fits
    }

    fn go(&mut self, step: &Step) {
        let (before, room) = (self.account.version(), self.account.room(None));
        self.walk_on(step);
        // Who waits for memory hears of it.
        assert!(self.account.room(None) <= room || self.account.version() > before);
    }

    fn walk_on(&mut self, step: &Step) {
        match *step {
            Step::Claim(size, taken) => drop(self.claim(512 * size, taken)),
            Step::FailToAllocate(size, taken) => {
                let pending = self.sum(Place::Pending);
                if self.claim(512 * size, taken) {
                    let after = self.sum(Place::Pending);
                    self.account.unclaim(512 * size, pending - after, None);
                    let last = self.blocks.iter().rposition(|block| block.0 == Place::Allocated);
                    self.blocks.remove(last.expect("just claimed"));
                    self.blocks.push((Place::Pending, pending - after));
                }
            }
            Step::Share(size) => {
                let held = self.blocks.iter().map(|block| block.1).sum::<u64>();
                let fits = held + 512 * size <= LIMIT;
                assert_eq!(self.account.share(512 * size), fits);
                self.blocks.extend(fits.then_some((Place::Shared, 512 * size)));
            }
            Step::Unshare(nth) => self.walk(Place::Shared, nth, None, Account::unshare),
            Step::Commit(size) => {
                let held = self.blocks.iter().map(|block| block.1).sum::<u64>();
                let fits = held + 512 * size <= LIMIT;
                assert_eq!(self.account.commit(512 * size, None), fits);
                self.blocks.extend(fits.then_some((Place::Committed, 512 * size)));
            }
            Step::Uncommit(nth) => {
                let uncommit = |account: &mut Account, bytes| account.uncommit(bytes, None);
                self.walk(Place::Committed, nth, None, uncommit);
            }
            Step::Keep(nth) => {
                self.walk(Place::Allocated, nth, Some(Place::Kept), |account, size| {
                    account.keep(size, None)
                })
            }
            Step::Retire(nth) => {
                self.walk(Place::Allocated, nth, Some(Place::Pending), |account, size| {
                    account.retire(size, None);
                });
            }
            Step::Abandon(nth) => {
                self.walk(Place::Allocated, nth, None, |account, size| account.abandon(size, None))
            }
            Step::Reuse(nth) => {
                self.walk(Place::Kept, nth, Some(Place::Allocated), |account, size| {
                    assert!(account.reuse(size, None));
                });
            }
            Step::Uncache(nth) => {
                self.walk(Place::Kept, nth, Some(Place::Pending), Account::uncache);
            }
            Step::Release(nth) => self.walk(Place::Pending, nth, None, Account::release),
            Step::Leak(nth) => {
                self.walk(Place::Pending, nth, Some(Place::Leaked), Account::leak);
            }
        }
        self.look_at_the_peak();
    }

    fn look_at_the_peak(&mut self) {
        self.peak = self.peak.max(
            self.sum(Place::Allocated) + self.sum(Place::Committed) + self.sum(Place::Pending),
        );
    }
}

fn each_step(steps: &[Step], mut check: impl FnMut(&Twins)) {
    let mut twins = Twins { account: Account::new(LIMIT, false), blocks: Vec::new(), peak: 0 };
    for step in steps {
        twins.go(step);
        check(&twins);
    }
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn no_transition_exceeds_the_limit(steps in prop::collection::vec(step(), 1..size(80))) {
        each_step(&steps, |twins| {
            let figures = twins.account.figures();
            let held = figures.held() + figures.shared + figures.committed;
            assert!(held <= LIMIT, "{figures:?}");
            assert_eq!(twins.account.room(None), LIMIT - held);
        });
    }

    #[test]
    fn every_byte_is_in_one_place(steps in prop::collection::vec(step(), 1..size(80))) {
        each_step(&steps, |twins| {
            let figures = twins.account.figures();
            let Figures { allocated, pending, kept, leaked, shared, committed, .. } = figures;
            let ours = [allocated, pending, kept, leaked, shared, committed];
            use Place::{Allocated, Committed, Kept, Leaked, Pending, Shared};
            let places = [Allocated, Pending, Kept, Leaked, Shared, Committed];
            assert_eq!(ours, places.map(|place| twins.sum(place)));
            let buffers = twins.blocks.iter().filter(|block| block.0 == Place::Allocated).count();
            assert_eq!(figures.buffers, buffers as u64);
            assert_eq!(figures.used_peak, twins.peak);
            assert_eq!(twins.account.most(None), LIMIT - allocated - leaked - shared - committed);
        });
    }

    /// One block where one is enough, and that the smallest such; else no more than it takes.
    #[test]
    fn what_is_chosen_is_enough_and_not_more(
        sizes in prop::collection::vec(1..50_u64, 0..12),
        needed in 0..200_u64,
    ) {
        let chosen = choose(&sizes, needed);
        let mut distinct = chosen.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        prop_assert_eq!(distinct.len(), chosen.len());
        let sum: u64 = chosen.iter().map(|index| sizes[*index]).sum();
        if sizes.iter().sum::<u64>() < needed {
            prop_assert_eq!(chosen.len(), sizes.len());
        } else {
            prop_assert!(sum >= needed);
            let last = chosen.last().map_or(0, |index| sizes[*index]);
            prop_assert!(sum - last < needed || needed == 0);
        }
        if let Some(least) = sizes.iter().filter(|size| **size >= needed).min().filter(|_| needed > 0) {
            prop_assert_eq!((chosen.len(), sum), (1, *least));
        }
    }
}

#[test]
fn a_block_is_whole_grains() {
    assert_eq!([1, 512, 513].map(account::block), [512, 512, 1024]);
    assert_eq!(account::block(u64::MAX), u64::MAX);
}

/// What the driver refused is refused again, and whatever is larger, until memory moves.
#[test]
fn a_refusal_stands_until_memory_moves() {
    let mut account = Account::new(10_240, false);
    assert!(!account.is_refused(1024));
    account.refuse(2048);
    account.refuse(4096);
    let seen = [1024, 2048, 8192].map(|block| account.is_refused(block));
    assert_eq!(seen, [false, true, true]);
    assert!(account.claim(512, 0, None));
    assert!(account.is_refused(2048));
    account.retire(512, None);
    assert!(!account.is_refused(8192));
    account.refuse(8192);
    assert!(!account.is_refused(2048) && account.is_refused(8192));
}
