//! Who is let in and who waits; when a batch is ready.
//!
//! The modules are pure: `main.rs` compiles their very sources.
#![forbid(unsafe_code)]

mod overload;

use std::task::Waker;

use proptest::prelude::*;

use crate::under_test::cases::{config, size};
use gpu_await_protocol::admission::{
    Admission, Ask, Class, Entered, Granted, NoPermit, OVERTAKES, Patience, ShareLimits, Waited,
    Waiting,
};
use gpu_await_protocol::batching::{self, BatchLimits, Demand, Gather, Next, RequestKey};
use gpu_await_protocol::cancellable_queues::CancellableQueues;
use gpu_await_protocol::service_times;

const LIMIT: u64 = 4;
const MAX_WAITING: usize = 5;
const HEAVIEST: u32 = 3;
const MS: u64 = 1_000_000;
const SLOTS: [Class; 3] = [Class::Normal, Class::Normal, Class::High];

/// The second may not have everything.
const SHARES: [ShareLimits; 2] =
    [ShareLimits { part: 2, limit: u64::MAX }, ShareLimits { part: 1, limit: 3 }];
const ONE: [ShareLimits; 1] = [ShareLimits { part: 1, limit: u64::MAX }];

/// A request of weight 1 without a deadline.
fn plain(class: Class, patience: Patience) -> Ask {
    Ask { class, share: 0, weight: 1, deadline: None, patience }
}

/// Somebody who wants to get in.
#[derive(Debug)]
enum Guest {
    Waiting(Waiting, Ask),
    In(usize),
}

#[derive(Clone, Debug)]
enum Step {
    /// The deadline counts from then.
    Enter(Ask),
    /// Time passes, and whose deadline passed is told.
    Pass(u64),
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
    let deadline = prop::option::of(0..400 * MS);
    let ask = (class(), patience, deadline, 0..SHARES.len(), 1..=HEAVIEST);
    prop_oneof![
        8 => ask.prop_map(|(class, patience, deadline, share, weight)| {
            Step::Enter(Ask { class, share, weight, deadline, patience })
        }),
        4 => (0..100 * MS).prop_map(Step::Pass),
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
    now: u64,
    guests: Vec<Guest>,
    lost: Vec<usize>,
    /// Everybody looks after each step.
    polls_all: bool,
}

impl House {
    fn new() -> Self {
        let admission = Admission::new(LIMIT, MAX_WAITING, SLOTS, SHARES);
        House { admission, now: 0, guests: Vec::new(), lost: Vec::new(), polls_all: false }
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Enter(mut ask) => {
                ask.deadline = ask.deadline.map(|patience| self.now + patience);
                let waiting = self.admission.waiting_of(ask.share);
                match self.admission.enter(self.now, ask).0 {
                    Entered::In(granted) => self.admitted(granted, ask)?,
                    Entered::Waits(key) => {
                        prop_assert_ne!(ask.patience, Patience::Never);
                        let bounded = ask.patience == Patience::UpToTheLimit;
                        let most = waiting.max(MAX_WAITING);
                        prop_assert!(!bounded || self.admission.waiting_of(ask.share) <= most);
                        self.guests.push(Guest::Waiting(key, ask));
                    }
                    Entered::Refused(NoPermit::Full) => {
                        prop_assert_ne!(ask.patience, Patience::Always);
                        prop_assert!(ask.patience == Patience::Never || waiting >= MAX_WAITING);
                    }
                    Entered::Refused(NoPermit::Late { .. } | NoPermit::Expired { .. }) => {
                        prop_assert!(ask.deadline.is_some());
                    }
                    Entered::Refused(NoPermit::Gone) => {
                        prop_assert_eq!(self.lost.len(), SLOTS.len());
                    }
                    Entered::Refused(NoPermit::Closed) => prop_assert!(false, "nobody closed it"),
                }
            }
            Step::Pass(time) => {
                self.now += time;
                drop(self.admission.expire(self.now));
                prop_assert!(self.admission.next_deadline().is_none_or(|next| next > self.now));
            }
            Step::Poll(which) => {
                let waiting = |guest: &Guest| matches!(guest, Guest::Waiting(..));
                let waiters: Vec<_> =
                    (0..self.guests.len()).filter(|at| waiting(&self.guests[*at])).collect();
                if !waiters.is_empty() {
                    self.poll(waiters[which % waiters.len()])?;
                }
            }
            Step::Go(which) => {
                if self.guests.is_empty() {
                    return Ok(());
                }
                match self.guests.remove(which % self.guests.len()) {
                    Guest::Waiting(key, _) => drop(self.admission.leave(self.now, &key)),
                    Guest::In(permit) => drop(self.admission.give_back(self.now, permit)),
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

    /// A guest looks what became of it.
    fn poll(&mut self, at: usize) -> Result<(), TestCaseError> {
        let Guest::Waiting(waiting, ask) = &self.guests[at] else { return Ok(()) };
        let class = ask.class;
        let is_early = ask.deadline.is_none_or(|deadline| deadline > self.now);
        match self.admission.poll(waiting, Waker::noop().clone()).0 {
            Waited::Wait => {
                prop_assert!(is_early || !self.polls_all);
                return Ok(());
            }
            Waited::In(granted) => {
                prop_assert!(is_early || !self.polls_all);
                self.guests[at] = Guest::In(granted.number);
                return self.check_class(granted.slot, class);
            }
            Waited::Refused(NoPermit::Full) => prop_assert!(ask.deadline.is_some()),
            Waited::Refused(NoPermit::Late { .. } | NoPermit::Expired { .. }) => {
                prop_assert!(ask.deadline.is_some());
            }
            Waited::Refused(NoPermit::Gone) => prop_assert_eq!(self.lost.len(), SLOTS.len()),
            Waited::Refused(NoPermit::Closed) => prop_assert!(false, "nobody closed it"),
        }
        self.guests.remove(at);
        Ok(())
    }

    /// A permit that was just given: on a slot of its class, and none has fewer.
    fn admitted(
        &mut self,
        Granted { number, slot, .. }: Granted,
        ask: Ask,
    ) -> Result<(), TestCaseError> {
        self.check_class(slot, ask.class)?;
        let most = SHARES[ask.share].limit.min(LIMIT);
        let before = self.admission.taken_on(slot) - u64::from(ask.weight).min(most);
        for other in (0..SLOTS.len()).filter(|other| SLOTS[*other] == SLOTS[slot] && *other != slot)
        {
            prop_assert!(self.lost.contains(&other) || before <= self.admission.taken_on(other));
        }
        self.guests.push(Guest::In(number));
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

    /// Entries come to one of three lines, and are removed from anywhere.
    #[test]
    fn a_line_is_a_queue(
        steps in prop::collection::vec((0..3_usize, any::<bool>(), any::<prop::sample::Index>()), 0..size(200)),
    ) {
        let (mut lines, mut model) = (CancellableQueues::new(3), vec![Vec::new(); 3]);
        // Places, with the numbers that are there.
        let mut known: Vec<(usize, usize)> = Vec::new();
        for (number, (line, comes, at)) in steps.into_iter().enumerate() {
            if comes || known.is_empty() {
                known.push((lines.push(line, number), number));
                model[line].push(number);
            } else {
                let at = at.index(known.len());
                let (place, gone) = known[at];
                model.iter_mut().for_each(|line| line.retain(|number| *number != gone));
                prop_assert_eq!(lines.remove(place), gone);
                known.swap_remove(at);
            }
            for (line, model) in model.iter().enumerate() {
                prop_assert_eq!(lines.len(line), model.len());
                prop_assert_eq!(lines.first(line).map(|(_, number)| number), model.first());
                prop_assert_eq!(lines.last(line).map(|(_, number)| number), model.last());
            }
            for (place, number) in &known {
                prop_assert_eq!(lines.get(*place), Some(number));
            }
        }
    }

    #[test]
    fn never_more_than_the_limit(steps in prop::collection::vec(with_losses(), 1..size(80))) {
        let mut house = House::new();
        for step in &steps {
            house.step(step)?;
            let admission = &house.admission;
            prop_assert!(admission.taken() <= LIMIT);
            prop_assert!(admission.taken_by(1) <= SHARES[1].limit);
            let slots: u64 = (0..SLOTS.len()).map(|slot| admission.taken_on(slot)).sum();
            prop_assert_eq!(slots, admission.taken());
            prop_assert_eq!(admission.taken_by(0) + admission.taken_by(1), slots);
        }
        for guest in std::mem::take(&mut house.guests) {
            match guest {
                Guest::Waiting(key, _) => drop(house.admission.leave(house.now, &key)),
                Guest::In(permit) => drop(house.admission.give_back(house.now, permit)),
            }
        }
        prop_assert_eq!((house.admission.taken(), house.admission.waiting()), (0, 0));
        prop_assert_eq!(house.admission.next_deadline(), None);
    }

    #[test]
    fn nobody_waits_beside_a_free_permit(steps in prop::collection::vec(step(), 1..size(80))) {
        let mut house = House::new();
        let heaviest = u64::from(HEAVIEST);
        for step in &steps {
            house.step(step)?;
            let admission = &house.admission;
            // Whoever is in front may be the heaviest.
            let is_full = admission.taken() + heaviest > LIMIT;
            prop_assert!(admission.waiting_of(0) == 0 || is_full);
            let has_its_share = admission.taken_by(1) + heaviest > SHARES[1].limit;
            prop_assert!(admission.waiting_of(1) == 0 || is_full || has_its_share);
        }
    }

    #[test]
    fn the_least_loaded_slot_is_taken(steps in prop::collection::vec(step(), 1..size(80))) {
        let mut house = House::new();
        steps.iter().try_for_each(|step| house.step(step))?;
    }

    #[test]
    fn nobody_is_admitted_past_its_deadline(steps in prop::collection::vec(step(), 1..size(80))) {
        let mut house = House::new();
        for step in &steps {
            house.step(step)?;
            // Whoever is in now and was not before was admitted now.
            house.polls_all = true;
            (0..house.guests.len()).rev().try_for_each(|at| house.poll(at))?;
            house.polls_all = false;
        }
    }

    /// Whoever is called is the first of the class that waits.
    #[test]
    fn first_come_first_served_within_a_class(
        classes in prop::collection::vec(class(), 1..size(30)),
        leavers in prop::collection::vec(any::<bool>(), 30),
    ) {
        let mut admission = Admission::new(1, usize::MAX, SLOTS, ONE);
        let first = admission.enter(0, plain(Class::Normal, Patience::Never)).0;
        let Entered::In(Granted { number: mut permit, .. }) = first else {
            return Err(TestCaseError::fail("it is empty"));
        };
        let mut waiting = Vec::new();
        for class in classes {
            let asked = admission.enter(0, plain(class, Patience::UpToTheLimit)).0;
            let Entered::Waits(key) = asked else {
                return Err(TestCaseError::fail("the permit is taken"));
            };
            waiting.push((key, class));
        }
        let mut leavers = leavers.into_iter();
        waiting.retain(|(key, _)| {
            let leaves = leavers.next() == Some(true);
            if leaves {
                drop(admission.leave(0, key));
            }
            !leaves
        });
        while !waiting.is_empty() {
            drop(admission.give_back(0, permit));
            let called: Vec<_> = waiting
                .iter()
                .enumerate()
                .filter_map(|(at, (key, _))| match admission.poll(key, Waker::noop().clone()).0 {
                    Waited::In(Granted { number: permit, .. }) => Some((at, permit)),
                    _ => None,
                })
                .collect();
            prop_assert_eq!(called.len(), 1);
            let (at, given) = called[0];
            let class = waiting[at].1;
            prop_assert!(!waiting[..at].iter().any(|(_, earlier)| *earlier == class));
            waiting.remove(at);
            permit = given;
        }
    }

    #[test]
    fn an_estimate_stays_within_its_samples(
        samples in prop::collection::vec((1..9u64, 0..1_000_000u64), 1..size(60)),
    ) {
        let mut took = service_times::ServiceTimes::default();
        let (mut least, mut most) = (u64::MAX, 0);
        for (in_flight, sample) in samples {
            took.add(in_flight, sample);
            (least, most) = (least.min(sample), most.max(sample));
            let mean = took.mean_ns().unwrap_or(0);
            prop_assert!((least.saturating_sub(1)..=most).contains(&mean));
            // At most in proportion to the number, and two deviations.
            let steepest = 9 * most;
            prop_assert!((1..9).all(|n| took.likely_ns(n) <= steepest + 2 * steepest));
        }
    }
}

/// A device that runs one after the other, and one that runs all at once.
#[test]
fn a_line_is_learned() {
    let (mut serial, mut parallel) =
        (service_times::ServiceTimes::default(), service_times::ServiceTimes::default());
    for n in (0..100).map(|at| 1 + at % 4) {
        serial.add(n, n * 10 * MS);
        parallel.add(n, 10 * MS);
    }
    for n in [1, 4, 8] {
        let (one, all) = (serial.likely_ns(n), parallel.likely_ns(n));
        let off = one.abs_diff(n * 10 * MS);
        assert!(off <= n.max(4) * 3 * MS, "{n}: {one}");
        assert!((10 * MS..11 * MS).contains(&all), "{n}: {all}");
    }
}

/// Times follow the weight where it says something, and light ones that differ by chance say nothing of heavy ones.
#[test]
fn weights_are_told_apart() {
    let mut mixed = service_times::ServiceTimes::default();
    for at in 0..100 {
        let (weight, ns) = if at % 9 == 0 { (8000, 100 * MS) } else { (10, MS) };
        mixed.add_of(1, weight, ns);
    }
    let (light, heavy) = (mixed.likely_ns_of(1, 10), mixed.likely_ns_of(1, 8000));
    assert!((MS / 2..4 * MS).contains(&light), "{light}");
    assert!((80 * MS..=120 * MS).contains(&heavy), "{heavy}");

    let (mut light, mut random) = (service_times::ServiceTimes::default(), 1u64);
    for _ in 0..1000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        light.add_of(1, 10 + (random >> 33) % 5, MS + (random >> 40) % MS);
        let heavy = light.likely_ns_of(1, 8000);
        assert!(heavy < 8 * MS, "{heavy}");
    }
}

#[test]
fn high_priority_does_not_starve_the_others() {
    let mut admission = Admission::new(1, usize::MAX, SLOTS, ONE);
    let (Entered::In(Granted { number: mut permit, .. }), _) =
        admission.enter(0, plain(Class::High, Patience::Never))
    else {
        panic!("it is empty");
    };
    let mut wait = |class| match admission.enter(0, plain(class, Patience::UpToTheLimit)).0 {
        Entered::Waits(key) => (key, class),
        other => panic!("{other:?}"),
    };
    let mut waiting: Vec<_> = (0..3).map(|_| wait(Class::Normal)).collect();
    waiting.extend((0..40).map(|_| wait(Class::High)));
    let mut order = Vec::new();
    while !waiting.is_empty() {
        drop(admission.give_back(0, permit));
        waiting.retain(|(key, class)| match admission.poll(key, Waker::noop().clone()).0 {
            Waited::In(Granted { number: given, .. }) => {
                permit = given;
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
    let mut admission = Admission::new(1, 9, [Class::Normal], ONE);
    let ask = plain(Class::Normal, Patience::UpToTheLimit);
    let (Entered::In(Granted { number: permit, .. }), _) = admission.enter(0, ask) else {
        panic!("it is empty")
    };
    let (Entered::Waits(key), _) = admission.enter(0, ask) else { panic!("the permit is taken") };
    assert_eq!(admission.poll(&key, Waker::noop().clone()).0, Waited::Wait);
    assert_eq!(admission.close().len(), 1);
    assert_eq!(admission.poll(&key, Waker::noop().clone()).0, Waited::Refused(NoPermit::Closed));
    assert!(admission.give_back(0, permit).is_empty());
    assert_eq!(admission.enter(0, ask).0, Entered::Refused(NoPermit::Closed));
}

// ---- batches --------------------------------------------------------------------------------

const DELAY: u64 = 100;

#[derive(Clone, Debug)]
enum Move {
    /// With that weight, and a deadline so much later.
    Add(u64, Option<u64>),
    Leave(usize),
    Pass(u64),
    Finish,
}

fn moves(patience: impl Strategy<Value = Option<u64>>) -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        6 => (1..4u64, patience).prop_map(|(weight, patience)| Move::Add(weight, patience)),
        2 => any::<usize>().prop_map(Move::Leave),
        3 => (1..DELAY).prop_map(Move::Pass),
        2 => Just(Move::Finish),
    ];
    prop::collection::vec(one, 1..size(100))
}

/// Light, or so heavy that two are more than a `u64`.
fn weight() -> impl Strategy<Value = u64> {
    prop_oneof![1..100u64, u64::MAX - 100..=u64::MAX, any::<u64>().prop_map(|weight| weight.max(1))]
}

fn limits(max_len: usize, max_weight: u64, max_in_flight: usize) -> BatchLimits {
    let (max_delay_ns, max_waiting) = (DELAY, usize::MAX);
    BatchLimits { max_len, max_weight, max_delay_ns, max_in_flight, max_waiting }
}

fn demand(weight: u64, deadline: Option<u64>) -> Demand {
    Demand { high_priority: false, weight, deadline }
}

proptest! {
    #![proptest_config(config(256))]

    /// Nobody waits longer than the delay, and who left is in no batch: both are in the model.
    #[test]
    fn batches_are_whole_and_in_order(
        moves in moves(Just(None)),
        max_len in 1..5usize,
        max_weight in 1..9u64,
        slots in 1..3usize,
    ) {
        let mut gather = Gather::new(limits(max_len, max_weight, slots));
        // Key, time and weight of who should be there.
        let mut waiting: Vec<(RequestKey, u64, u64)> = Vec::new();
        let mut in_flight = Vec::new();
        let mut now = 0;
        for step in moves {
            match step {
                Move::Add(weight, _) => {
                    let Ok((key, _)) = gather.add(now, demand(weight, None), now) else {
                        return Err(TestCaseError::fail("it is not full"));
                    };
                    prop_assert!(waiting.last().is_none_or(|(last, ..)| *last < key));
                    waiting.push((key, now, weight));
                }
                Move::Leave(which) if !waiting.is_empty() => {
                    let (key, came, _) = waiting.remove(which % waiting.len());
                    prop_assert_eq!(gather.leave(key).map(|left| left.request), Some(came));
                    prop_assert_eq!(gather.leave(key), None);
                }
                Move::Leave(_) => {}
                Move::Pass(time) => now += time,
                Move::Finish => {
                    if let Some(begun) = in_flight.pop() {
                        gather.finished(now, begun);
                    }
                }
            }
            loop {
                let due = waiting.first().map(|(_, came, _)| came + DELAY);
                let may_start = in_flight.len() < slots;
                let weight: u64 = waiting.iter().map(|(.., weight)| weight).sum();
                let is_whole = waiting.len() >= max_len || weight >= max_weight;
                match gather.next(now) {
                    Next::Due => {
                        prop_assert!(may_start && (is_whole || due <= Some(now)));
                        let taken = gather.take(now);
                        let mut len = waiting.len().min(max_len);
                        while len > 1
                            && waiting[..len].iter().map(|(.., weight)| weight).sum::<u64>() > max_weight
                        {
                            len -= 1;
                        }
                        let expected: Vec<u64> = waiting.drain(..len).map(|(_, came, _)| came).collect();
                        let batch: Vec<u64> = taken.requests.iter().map(|one| one.request).collect();
                        prop_assert!(!batch.is_empty() && taken.late.is_empty());
                        prop_assert_eq!(batch, expected);
                        in_flight.push(taken.begun);
                    }
                    Next::Idle => {
                        prop_assert!(waiting.is_empty() || !may_start || !is_whole);
                        let wakes_at = gather.wakes_at(now);
                        prop_assert_eq!(wakes_at, due.filter(|_| may_start));
                        prop_assert!(wakes_at.is_none_or(|at| at > now));
                        break;
                    }
                    Next::End => return Err(TestCaseError::fail("nobody ended it")),
                }
            }
        }
        gather.end();
        while !in_flight.is_empty() || !waiting.is_empty() {
            match gather.next(now) {
                Next::Due => {
                    let taken = gather.take(now);
                    drop(waiting.drain(..taken.requests.len()));
                    in_flight.push(taken.begun);
                }
                Next::Idle if !in_flight.is_empty() => {
                    in_flight.pop().into_iter().for_each(|begun| gather.finished(now, begun));
                }
                other => return Err(TestCaseError::fail(format!("{other:?}"))),
            }
        }
        prop_assert_eq!(gather.next(now), Next::End);
    }

    /// A batch has as many as fit, and no more, also where a sum of weights is more than a `u64`.
    #[test]
    fn any_weight_is_summed(
        weights in prop::collection::vec((weight(), any::<bool>()), 1..size(40)),
        max_weight in weight(),
    ) {
        const MAX_LEN: usize = 8;
        let mut gather = Gather::new(limits(MAX_LEN, max_weight, usize::MAX));
        let mut waiting = Vec::new();
        for (weight, leaves) in weights {
            // The deadline has the weight in front of it looked at.
            let (key, _) = gather.add(0, demand(weight, Some(u64::MAX)), weight).expect("it waits");
            if leaves {
                prop_assert_eq!(gather.leave(key).map(|left| left.request), Some(weight));
            } else {
                waiting.push(weight);
            }
        }
        while gather.next(DELAY) == Next::Due {
            let taken: Vec<u64> =
                gather.take(DELAY).requests.into_iter().map(|one| one.request).collect();
            let sum = |weights: &[u64]| weights.iter().map(|one| u128::from(*one)).sum::<u128>();
            let fits = |len: usize| {
                len <= MAX_LEN && (len == 1 || sum(&waiting[..len]) <= u128::from(max_weight))
            };
            let most = (1..=waiting.len()).take_while(|len| fits(*len)).last();
            prop_assert_eq!(Some(taken.len()), most);
            prop_assert_eq!(taken, waiting.drain(..most.unwrap_or(0)).collect::<Vec<_>>());
        }
        prop_assert!(waiting.is_empty());
    }

    /// Who adds is told when the worker has something to do.
    #[test]
    fn whoever_changes_what_is_next_is_told(
        moves in moves(prop::option::of(0..4 * DELAY)),
        max_len in 1..5usize,
    ) {
        let mut gather = Gather::new(limits(max_len, u64::MAX, 1));
        // When the worker looks again by itself.
        let mut known = None;
        let mut in_flight = None;
        let mut now = 0;
        for step in moves {
            match step {
                Move::Add(weight, patience) => {
                    let deadline = patience.map(|patience| now + patience);
                    let Ok((_, told)) = gather.add(now, demand(weight, deadline), ()) else {
                        continue;
                    };
                    // What the worker was told last still holds, unless it is told anew.
                    if !told {
                        let looks_at = known.filter(|at| *at > now);
                        prop_assert!(gather.next(now) == Next::Idle || looks_at.is_none());
                        prop_assert!(gather.wakes_at(now).is_none_or(|at| known <= Some(at)));
                        continue;
                    }
                }
                Move::Pass(time) => now += time,
                Move::Finish => match in_flight.take() {
                    Some(begun) => gather.finished(now, begun),
                    None => continue,
                },
                Move::Leave(_) => continue,
            }
            drop(gather.expire(now));
            if gather.next(now) == Next::Due {
                let taken = gather.take(now);
                in_flight = (!taken.requests.is_empty()).then_some(taken.begun);
            }
            known = gather.wakes_at(now);
        }
    }

    #[test]
    fn no_batch_has_the_late(moves in moves(prop::option::of(0..4 * DELAY)), max_len in 1..5usize) {
        let mut gather = Gather::new(limits(max_len, u64::MAX, 2));
        let mut in_flight = Vec::new();
        let (mut now, mut added, mut answered) = (0, 0, 0);
        for step in moves {
            match step {
                Move::Add(weight, patience) => {
                    let deadline = patience.map(|patience| now + patience);
                    let is_late = gather.add(now, demand(weight, deadline), deadline).is_err();
                    prop_assert!(!is_late || deadline.is_some());
                    added += usize::from(!is_late);
                }
                Move::Pass(time) => now += time,
                Move::Finish => {
                    if let Some(begun) = in_flight.pop() {
                        gather.finished(now, begun);
                    }
                }
                Move::Leave(_) => {}
            }
            answered += gather.expire(now).len();
            let next = gather.wakes_at(now);
            prop_assert!(next.is_none_or(|at| at > now));
            while gather.next(now) == Next::Due {
                let taken = gather.take(now);
                let mut batch = taken.requests.iter().map(|one| one.request);
                prop_assert!(batch.all(|deadline| deadline.is_none_or(|deadline| deadline > now)));
                answered += taken.requests.len() + taken.late.len();
                if !taken.requests.is_empty() {
                    in_flight.push(taken.begun);
                }
            }
        }
        prop_assert_eq!(answered + gather.waiting(), added);
    }
}

/// Parts of the largest limit are smaller than it.
#[test]
fn the_largest_limit_is_divided() {
    let share = ShareLimits { part: 2, limit: 1 };
    let mut admission = Admission::new(u64::MAX, MAX_WAITING, SLOTS, [share; 2]);
    let ask = Ask { deadline: Some(1000 * MS), ..plain(Class::Normal, Patience::UpToTheLimit) };
    let Entered::In(Granted { number: first, .. }) = admission.enter(0, ask).0 else {
        panic!("it is free")
    };
    drop(admission.give_back(MS, first));
    assert!(matches!(admission.enter(MS, ask).0, Entered::In(_)));
    // Its permit is expected in time.
    assert!(matches!(admission.enter(MS, ask).0, Entered::Waits(_)));
}

#[test]
fn priority_in_batches() {
    let mut gather = Gather::new(limits(10, u64::MAX, 100));
    let mut add = |high_priority| {
        let demand = Demand { high_priority, weight: 1, deadline: None };
        gather.add(0, demand, high_priority).expect("it is not full")
    };
    for at in 0..60 {
        let _ = add(at >= 20);
    }
    let mut order = Vec::new();
    while gather.next(DELAY) == Next::Due {
        order.extend(gather.take(DELAY).requests.into_iter().map(|one| one.request));
    }
    let every = OVERTAKES as usize + 1;
    assert!((0..40).all(|at| order[at] == ((at + 1) % every != 0)), "{order:?}");
}

/// Two clients that ask again when they are answered, and two batches that the device runs one after the other: 0.6 to 1 s each.
#[test]
fn no_request_is_refused_that_can_be_in_a_batch_in_time() {
    let mut gather = Gather::new(limits(1, u64::MAX, 2));
    let (mut now, mut random, mut device) = (0, 3u64, std::collections::VecDeque::new());
    let mut free_at = 0;
    for _ in 0..200 {
        // Each asks, unless the device has its request.
        for _ in device.len()..2 {
            let patience = Some(now + 1000 * MS);
            let added = gather.add(now, demand(1, patience), ());
            assert!(added.is_ok(), "at {now}: {added:?}");
            let taken = gather.take(now);
            assert_eq!((taken.requests.len(), taken.late.len()), (1, 0), "at {now}");
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            free_at = now.max(free_at) + 300 * MS + (random >> 33) % (200 * MS);
            device.push_back((free_at, taken.begun));
        }
        let (done, begun) = device.pop_front().expect("two");
        now = done;
        gather.finished(now, begun);
    }
}

/// It waits with time enough, until another batch left it too little.
#[test]
fn the_late_are_told_when_a_batch_begins() {
    let mut gather = Gather::new(limits(1, u64::MAX, 2));
    let add = |gather: &mut Gather<u32>, now, deadline, request| {
        let _ = gather.add(now, demand(1, deadline), request).expect("it waits");
    };
    add(&mut gather, 0, None, 0);
    let first = gather.take(0);
    gather.finished(100, first.begun);
    add(&mut gather, 100, None, 1);
    let second = gather.take(100);
    assert_eq!((second.requests.len(), gather.in_flight()), (1, 1));
    add(&mut gather, 100, Some(350), 2);
    add(&mut gather, 100, None, 3);
    let third = gather.take(300);
    let of = |gathered: &[batching::Gathered<u32>]| -> Vec<u32> {
        gathered.iter().map(|one| one.request).collect()
    };
    assert_eq!((of(&third.requests), of(&third.late)), (vec![3], vec![2]));
    // More than it has.
    assert!(third.late[0].takes_ns >= 50, "{:?}", third.late);
}

/// Heavy requests of 100 ms, and beside each fourth of them eight light ones of 1 ms, with time for themselves and not for a heavy one. How many of
/// these are refused, of how many.
fn refused_beside_heavy_ones(max_in_flight: usize) -> (usize, usize) {
    let mut gather = Gather::new(limits(64, 8192, max_in_flight));
    let (mut now, mut refused, mut count) = (0, 0, 0);
    for round in 0..160 {
        let _ = gather.add(now, demand(8192, None), ()).expect("it has no deadline");
        let heavy = gather.take(now);
        if round % 4 == 3 {
            let deadline = Some(now + 20 * MS);
            for _ in 0..8 {
                // The first are what it learns from.
                count += usize::from(round > 20);
                let is_refused = gather.add(now, demand(12, deadline), ()).is_err();
                refused += usize::from(is_refused && round > 20);
            }
            if gather.waiting() > 0 && gather.in_flight() < max_in_flight {
                let light = gather.take(now);
                gather.finished(now + MS, light.begun);
            }
        }
        now += 100 * MS;
        drop(gather.expire(now));
        gather.finished(now, heavy.begun);
        // Alone, none is refused.
        if round % 4 == 0 {
            let _ = gather.add(now, demand(12, Some(now + 20 * MS)), ()).expect("it is alone");
            let alone = gather.take(now);
            now += MS;
            gather.finished(now, alone.begun);
        }
    }
    (refused, count)
}

#[test]
fn light_requests_beside_a_heavy_one() {
    let (refused, of) = refused_beside_heavy_ones(2);
    assert_eq!(refused, 0, "of {of}");
}

#[test]
fn behind_a_heavy_batch_there_is_no_time() {
    let (refused, of) = refused_beside_heavy_ones(1);
    assert_eq!(refused, of);
}

/// What waits with normal priority is behind it, but for one in nine.
#[test]
fn high_priority_is_judged_by_what_is_in_front_of_it() {
    let mut gather = Gather::new(limits(1, u64::MAX, 1));
    for at in 0..10 {
        let _ = gather.add(at * 20 * MS, demand(1, None), ()).expect("it waits");
        let taken = gather.take(at * 20 * MS);
        gather.finished((at + 1) * 20 * MS, taken.begun);
    }
    let now = 200 * MS;
    for _ in 0..21 {
        let _ = gather.add(now, demand(1, None), ()).expect("it waits");
    }
    let _running = gather.take(now);
    let deadline = Some(now + 200 * MS);
    let refused = gather.add(now, demand(1, deadline), ());
    assert!(refused.is_err(), "behind twenty of 20 ms: {refused:?}");
    let high = Demand { high_priority: true, ..demand(1, deadline) };
    for _ in 0..6 {
        let _ = gather.add(now, high, ()).expect("behind those of its priority alone");
    }
    for _ in 0..4 {
        let _ = gather.add(now, high, ()).ok();
    }
    assert!(gather.add(now, high, ()).is_err(), "behind ten of its own");
}

/// While no batch is in flight, the next one is gathered whatever the estimate says, however many its requests are: of two that come together,
/// and go together if one is refused, none would ever mend it.
#[test]
fn requests_that_come_together_mend_an_estimate() {
    let mut gather = Gather::new(limits(4, u64::MAX, 1));
    let _ = gather.add(0, demand(1, None), ()).expect("it waits");
    let stalled = gather.take(0);
    let mut now = 10_000 * MS;
    gather.finished(now, stalled.begun);
    let hurried = demand(1, Some(now + 1000 * MS));
    for _ in 0..4 {
        let _ = gather.add(now, hurried, ()).expect("it is in the next batch");
    }
    assert!(gather.add(now, hurried, ()).is_err(), "behind one that takes so long");
    let taken = gather.take(now);
    assert_eq!(taken.requests.len(), 4);
    assert!(gather.add(now, hurried, ()).is_err(), "the same");
    now += MS;
    gather.finished(now, taken.begun);
    assert_eq!(gather.waiting(), 0);
}

/// Who cannot wait for others as long as the batch may is not kept until it is too late.
#[test]
fn a_deadline_that_is_nearer_than_the_delay() {
    let mut gather = Gather::new(limits(4, u64::MAX, 1));
    let mut now = 0;
    for took in [0, DELAY / 8, DELAY / 4, DELAY / 4] {
        let deadline = now + DELAY / 2;
        let (_, news) = gather.add(now, demand(1, Some(deadline)), ()).expect("it waits");
        assert!(news && gather.next(now) == Next::Idle, "others may come");
        now = gather.wakes_at(now).expect("it does not wait for ever");
        assert!(now + took <= deadline && gather.next(now) == Next::Due, "{now} of {deadline}");
        let taken = gather.take(now);
        assert_eq!((taken.requests.len(), taken.late.len()), (1, 0));
        now += took;
        gather.finished(now, taken.begun);
    }
    // One that comes later may be in more of a hurry.
    let _ = gather.add(now, demand(1, None), ()).expect("it waits");
    let far = gather.wakes_at(now).expect("the delay");
    let (_, news) = gather.add(now, demand(1, Some(now + DELAY / 2)), ()).expect("it waits");
    assert!(news && gather.wakes_at(now).expect("its time") < far);
}

/// Three batches had to wait for what they need; what comes then does not.
#[test]
fn a_slow_batch_is_soon_forgotten() {
    let mut gather = Gather::new(limits(4, u64::MAX, 1));
    let mut now = 0;
    for _ in 0..3 {
        let _ = gather.add(now, demand(1, None), ()).expect("it waits");
        gather.asks(now);
        now += 300 * MS;
        let taken = gather.take(now);
        now += 2 * MS;
        gather.finished(now, taken.begun);
    }
    let mut refused = 0;
    for _ in 0..12 {
        let add = |gather: &mut Gather<()>| gather.add(now, demand(1, Some(now + 200 * MS)), ());
        refused += (0..12).filter(|_| add(&mut gather).is_err()).count();
        while gather.waiting() > 0 {
            gather.asks(now);
            let taken = gather.take(now);
            now += 2 * MS;
            gather.finished(now, taken.begun);
        }
        now += 100 * MS;
    }
    // Those behind the first of a burst, of two bursts.
    assert!(refused <= 24, "{refused} of 144");
}
