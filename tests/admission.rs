//! Who is let in and who waits; when a batch is ready.
//!
//! The modules are pure: this file compiles their very sources.
#![forbid(unsafe_code)]

#[expect(dead_code, reason = "the crate uses the rest")]
#[path = "../src/serve/admission.rs"]
mod admission;
#[path = "under_test/cases.rs"]
mod cases;
#[expect(dead_code, reason = "as above")]
#[path = "../src/serve/batching.rs"]
mod gather;

use std::task::Waker;

use admission::{Admission, Class, Entered, Key, OVERTAKES, Patience, Waited};
use cases::{config, size};
use gather::{BatchLimits, Gather, Next};
use proptest::prelude::*;

const LIMIT: usize = 3;
const MAX_WAITING: usize = 5;
const SLOTS: [Class; 3] = [Class::Normal, Class::Normal, Class::High];

/// Somebody who wants to get in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Guest {
    Waiting(Key, Class),
    In(usize),
}

#[derive(Clone, Debug)]
enum Step {
    Enter(Class, Patience),
    /// Somebody waiting looks.
    Poll(usize),
    /// Somebody goes, whether in or not.
    Go(usize),
    Lose(usize),
}

fn class() -> impl Strategy<Value = Class> {
    prop_oneof![3 => Just(Class::Normal), 1 => Just(Class::High)]
}

fn step() -> impl Strategy<Value = Step> {
    let patience = prop_oneof![
        1 => Just(Patience::Never),
        6 => Just(Patience::UpToTheLimit),
        1 => Just(Patience::Always),
    ];
    prop_oneof![
        8 => (class(), patience).prop_map(|(class, patience)| Step::Enter(class, patience)),
        6 => any::<usize>().prop_map(Step::Poll),
        6 => any::<usize>().prop_map(Step::Go),
    ]
}

fn with_losses() -> impl Strategy<Value = Step> {
    prop_oneof![20 => step(), 1 => (0..SLOTS.len()).prop_map(Step::Lose)]
}

/// The pool, with who is in it.
struct House {
    admission: Admission,
    guests: Vec<Guest>,
    lost: Vec<usize>,
}

impl House {
    fn new() -> Self {
        let admission = Admission::new(LIMIT, MAX_WAITING, SLOTS);
        House { admission, guests: Vec::new(), lost: Vec::new() }
    }

    /// Does the step; the class of who came in by it.
    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Enter(class, patience) => {
                let (waiting, taken) = (self.admission.waiting(), self.admission.taken());
                match self.admission.enter(class, patience) {
                    Entered::In(slot) => {
                        prop_assert!(taken < LIMIT && waiting == 0);
                        self.check_slot(slot, class)?;
                        self.guests.push(Guest::In(slot));
                    }
                    Entered::Waits(key) => {
                        prop_assert_eq!(taken, LIMIT);
                        prop_assert_ne!(patience, Patience::Never);
                        let bounded = patience == Patience::UpToTheLimit;
                        prop_assert!(!bounded || waiting < MAX_WAITING);
                        self.guests.push(Guest::Waiting(key, class));
                    }
                    Entered::Full => {
                        prop_assert_eq!(taken, LIMIT);
                        prop_assert_ne!(patience, Patience::Always);
                        prop_assert!(patience == Patience::Never || waiting >= MAX_WAITING);
                    }
                    Entered::Gone => prop_assert_eq!(self.lost.len(), SLOTS.len()),
                    Entered::Closed => prop_assert!(false, "nobody closed it"),
                }
            }
            Step::Poll(which) => {
                let waiting = |guest: &Guest| matches!(guest, Guest::Waiting(..));
                let permits: Vec<_> =
                    (0..self.guests.len()).filter(|at| waiting(&self.guests[*at])).collect();
                if permits.is_empty() {
                    return Ok(());
                }
                let at = permits[which % permits.len()];
                let Guest::Waiting(key, class) = self.guests[at] else { return Ok(()) };
                match self.admission.poll(key, Waker::noop().clone()).0 {
                    Waited::Wait => {}
                    Waited::In(slot) => {
                        self.guests[at] = Guest::In(slot);
                        self.check_class(slot, class)?;
                    }
                    Waited::Gone => {
                        prop_assert_eq!(self.lost.len(), SLOTS.len());
                        self.guests.remove(at);
                    }
                    Waited::Closed => prop_assert!(false, "nobody closed it"),
                }
            }
            Step::Go(which) => {
                if self.guests.is_empty() {
                    return Ok(());
                }
                match self.guests.remove(which % self.guests.len()) {
                    Guest::Waiting(key, _) => drop(self.admission.leave(key)),
                    Guest::In(slot) => drop(self.admission.give_back(slot)),
                }
            }
            Step::Lose(slot) => {
                drop(self.admission.lose(slot));
                self.lost.push(slot);
                self.lost.sort_unstable();
                self.lost.dedup();
            }
        }
        Ok(())
    }

    /// A slot that was just given: of its class, and none has fewer.
    fn check_slot(&self, slot: usize, class: Class) -> Result<(), TestCaseError> {
        self.check_class(slot, class)?;
        let before = self.admission.taken_on(slot) - 1;
        for other in (0..SLOTS.len()).filter(|other| SLOTS[*other] == SLOTS[slot] && *other != slot)
        {
            prop_assert!(self.lost.contains(&other) || before <= self.admission.taken_on(other));
        }
        Ok(())
    }

    fn check_class(&self, slot: usize, class: Class) -> Result<(), TestCaseError> {
        let has_class = (0..SLOTS.len()).any(|s| SLOTS[s] == class && !self.lost.contains(&s));
        prop_assert!(SLOTS[slot] == class || !has_class || !self.lost.is_empty());
        Ok(())
    }
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn never_more_than_the_limit(steps in prop::collection::vec(with_losses(), 1..size(80))) {
        let mut house = House::new();
        for step in &steps {
            house.step(step)?;
            let admission = &house.admission;
            prop_assert!(admission.taken() <= LIMIT);
            let slots: usize = (0..SLOTS.len()).map(|slot| admission.taken_on(slot)).sum();
            prop_assert_eq!(slots, admission.taken());
        }
        for guest in std::mem::take(&mut house.guests) {
            match guest {
                Guest::Waiting(key, _) => drop(house.admission.leave(key)),
                Guest::In(slot) => drop(house.admission.give_back(slot)),
            }
        }
        prop_assert_eq!((house.admission.taken(), house.admission.waiting()), (0, 0));
    }

    #[test]
    fn nobody_waits_beside_a_free_permit(steps in prop::collection::vec(step(), 1..size(80))) {
        let mut house = House::new();
        for step in &steps {
            house.step(step)?;
            let admission = &house.admission;
            prop_assert!(admission.waiting() == 0 || admission.taken() == LIMIT);
        }
    }

    #[test]
    fn the_least_loaded_slot_is_taken(steps in prop::collection::vec(step(), 1..size(80))) {
        let mut house = House::new();
        steps.iter().try_for_each(|step| house.step(step))?;
    }

    /// Whoever is called is the first of the class that waits.
    #[test]
    fn first_come_first_served_within_a_class(
        classes in prop::collection::vec(class(), 1..size(30)),
        leavers in prop::collection::vec(any::<bool>(), 30),
    ) {
        let mut admission = Admission::new(1, usize::MAX, SLOTS);
        prop_assert!(matches!(admission.enter(Class::Normal, Patience::Never), Entered::In(_)));
        let mut waiting = Vec::new();
        for class in classes {
            let Entered::Waits(key) = admission.enter(class, Patience::UpToTheLimit) else {
                return Err(TestCaseError::fail("the permit is taken"));
            };
            waiting.push((key, class));
        }
        let mut leavers = leavers.into_iter();
        waiting.retain(|(key, _)| {
            let leaves = leavers.next() == Some(true);
            if leaves {
                drop(admission.leave(*key));
            }
            !leaves
        });
        let mut slot = 0;
        while !waiting.is_empty() {
            drop(admission.give_back(slot));
            let called: Vec<_> = waiting
                .iter()
                .enumerate()
                .filter_map(|(at, (key, _))| match admission.poll(*key, Waker::noop().clone()).0 {
                    Waited::In(slot) => Some((at, slot)),
                    _ => None,
                })
                .collect();
            prop_assert_eq!(called.len(), 1);
            let (at, given) = called[0];
            let class = waiting[at].1;
            prop_assert!(!waiting[..at].iter().any(|(_, earlier)| *earlier == class));
            waiting.remove(at);
            slot = given;
        }
    }
}

#[test]
fn high_priority_does_not_starve_the_others() {
    let mut admission = Admission::new(1, usize::MAX, SLOTS);
    let Entered::In(mut slot) = admission.enter(Class::High, Patience::Never) else {
        panic!("it is empty");
    };
    let mut wait = |class| match admission.enter(class, Patience::UpToTheLimit) {
        Entered::Waits(key) => (key, class),
        other => panic!("{other:?}"),
    };
    let mut waiting: Vec<_> = (0..3).map(|_| wait(Class::Normal)).collect();
    waiting.extend((0..40).map(|_| wait(Class::High)));
    let mut order = Vec::new();
    while !waiting.is_empty() {
        drop(admission.give_back(slot));
        waiting.retain(|(key, class)| match admission.poll(*key, Waker::noop().clone()).0 {
            Waited::In(given) => {
                slot = given;
                order.push(*class);
                false
            }
            _ => true,
        });
    }
    let normal: Vec<_> = (0..order.len()).filter(|at| order[*at] == Class::Normal).collect();
    let every = OVERTAKES as usize + 1;
    assert_eq!(normal, [every - 1, 2 * every - 1, 3 * every - 1]);
}

#[test]
fn closed_it_admits_nobody_and_ends_the_waits() {
    let mut admission = Admission::new(1, 9, [Class::Normal]);
    assert_eq!(admission.enter(Class::Normal, Patience::Never), Entered::In(0));
    let Entered::Waits(key) = admission.enter(Class::Normal, Patience::UpToTheLimit) else {
        panic!("the permit is taken");
    };
    assert_eq!(admission.poll(key, Waker::noop().clone()).0, Waited::Wait);
    assert_eq!(admission.close().len(), 1);
    assert_eq!(admission.poll(key, Waker::noop().clone()).0, Waited::Closed);
    assert!(admission.give_back(0).is_none());
    assert_eq!(admission.enter(Class::Normal, Patience::UpToTheLimit), Entered::Closed);
}

// ---- batches --------------------------------------------------------------------------------

const DELAY: u64 = 100;

#[derive(Clone, Debug)]
enum Move {
    Add,
    Leave(usize),
    Pass(u64),
    Finish,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        6 => Just(Move::Add),
        2 => any::<usize>().prop_map(Move::Leave),
        3 => (1..DELAY).prop_map(Move::Pass),
        2 => Just(Move::Finish),
    ];
    prop::collection::vec(one, 1..size(100))
}

proptest! {
    #![proptest_config(config(256))]

    /// Nobody waits longer than the delay, and who left is in no batch: both are in the model.
    #[test]
    fn batches_are_whole_and_in_order(moves in moves(), max_len in 1..5usize, slots in 1..3usize) {
        let limits = BatchLimits { max_len, max_delay_ns: DELAY, max_in_flight: slots };
        let mut gather = Gather::new(limits);
        // Key and time of who should be there.
        let mut waiting: Vec<(u64, u64)> = Vec::new();
        let (mut now, mut in_flight) = (0, 0);
        for step in moves {
            match step {
                Move::Add => {
                    let (key, _) = gather.add(now, now);
                    prop_assert!(waiting.last().is_none_or(|(last, _)| *last < key));
                    waiting.push((key, now));
                }
                Move::Leave(which) if !waiting.is_empty() => {
                    let (key, came) = waiting.remove(which % waiting.len());
                    prop_assert_eq!(gather.leave(key), Some(came));
                    prop_assert_eq!(gather.leave(key), None);
                }
                Move::Leave(_) => {}
                Move::Pass(time) => now += time,
                Move::Finish if in_flight > 0 => {
                    in_flight -= 1;
                    gather.finished();
                }
                Move::Finish => {}
            }
            loop {
                let due = waiting.first().map(|(_, came)| came + DELAY);
                let may_start = in_flight < slots;
                match gather.next(now) {
                    Next::Run(batch) => {
                        let len = waiting.len().min(max_len);
                        prop_assert!(may_start && len > 0);
                        prop_assert!(len == max_len || due <= Some(now));
                        let expected: Vec<u64> = waiting.drain(..len).map(|(_, came)| came).collect();
                        prop_assert_eq!(batch, expected);
                        in_flight += 1;
                    }
                    Next::At(at) => {
                        prop_assert!(may_start && waiting.len() < max_len && at > now);
                        prop_assert_eq!(Some(at), due);
                        break;
                    }
                    Next::Idle => {
                        prop_assert!(waiting.is_empty() || !may_start);
                        break;
                    }
                    Next::End => return Err(TestCaseError::fail("nobody ended it")),
                }
            }
        }
        gather.end();
        while in_flight > 0 || !waiting.is_empty() {
            match gather.next(now) {
                Next::Run(batch) => {
                    drop(waiting.drain(..batch.len()));
                    in_flight += 1;
                }
                Next::Idle if in_flight > 0 => {
                    in_flight -= 1;
                    gather.finished();
                }
                other => return Err(TestCaseError::fail(format!("{other:?}"))),
            }
        }
        prop_assert_eq!(gather.next(now), Next::End);
    }

    /// Who adds is told when the worker has something to do.
    #[test]
    fn whoever_changes_what_is_next_is_told(moves in moves(), max_len in 1..5usize) {
        let limits = BatchLimits { max_len, max_delay_ns: DELAY, max_in_flight: 1 };
        let mut gather = Gather::new(limits);
        let mut known = Next::Idle;
        let mut in_flight = false;
        let mut now = 0;
        for step in moves {
            match step {
                Move::Add => {
                    let (_, told) = gather.add(now, ());
                    // What the worker was told last still holds, unless it is told anew.
                    if !told && !in_flight {
                        prop_assert!(matches!(known, Next::At(_)));
                        prop_assert!(gather.waiting() < max_len);
                    }
                    if !told {
                        continue;
                    }
                }
                Move::Pass(time) => now += time,
                Move::Finish if in_flight => {
                    in_flight = false;
                    gather.finished();
                }
                Move::Finish | Move::Leave(_) => continue,
            }
            known = gather.next(now);
            if let Next::Run(_) = known {
                in_flight = true;
                known = gather.next(now);
                prop_assert_eq!(&known, &Next::Idle);
            }
        }
    }
}
