//! Tests of the pure modules: each beside a model that is slow and obvious.
//!
//! More than 500 lines: the models share no code with what they check, and little with one another.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Weak;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use crate::blame::{Blame, Blamed, Charge, Keys, MOST, MOST_KILLS, MOST_LOST, Standing};
use crate::calls::{Answered, CallId, Calls, Culprit, Died, Takes, Terms};
use crate::codec;
use crate::error::Guilt;
use crate::frame::{ToProcess, ToSupervisor};
use crate::heart::{Beat, EVERY, Heart, Pulse};
use crate::kept::{Asked, Kept, Key};
use crate::leases::{LeaseId, Leases, Part, Returned};
use crate::lender::Lender;
use crate::life::{Life, Limits, Phase, Role, Step};
use crate::log::Log;
use crate::mutable::{Given, Mutable};
use crate::restart::{Deaths, Next, Restart, Sign};
use crate::room::Room;

#[derive(Clone, Debug)]
enum Event {
    Insert { attempts: u32, deadline: Option<u64>, limit: Option<u64> },
    Send(u32, u8),
    Answer(usize, u32),
    Abandon(usize),
    Die(u32, usize),
    Pass(u64),
    Begin(usize),
    Reserve(bool),
    EndWaiting,
}

fn event() -> impl Strategy<Value = Event> {
    let time = || prop::option::of(1..20u64);
    prop_oneof![
        4 => (1..4u32, time(), time())
            .prop_map(|(attempts, deadline, limit)| Event::Insert { attempts, deadline, limit }),
        6 => (0..2u32, 0..3u8).prop_map(|(process, takes)| Event::Send(process, takes)),
        3 => (0..12usize, 0..2u32).prop_map(|(at, process)| Event::Answer(at, process)),
        1 => (0..12usize).prop_map(Event::Abandon),
        1 => (0..2u32, 0..5usize).prop_map(|(process, why)| Event::Die(process, why)),
        2 => prop_oneof![5 => 0..6u64, 1 => Just(600)].prop_map(Event::Pass),
        3 => (0..12usize).prop_map(Event::Begin),
        1 => any::<bool>().prop_map(Event::Reserve),
        1 => Just(Event::EndWaiting),
    ]
}

/// A process, as an outsider sees it.
struct Model {
    is_ready: bool,
    is_falling: bool,
}

/// A lender that lends nothing.
#[derive(Debug)]
struct Nobody;

impl Lender for Nobody {
    fn give_back(&self, _: LeaseId) {}
    fn release(&self, _: u32, _: LeaseId) {}
    fn give_back_room(&self) {}
}

/// Room that belongs to no worker.
fn nowhere() -> Room {
    let nobody: Weak<Nobody> = Weak::new();
    Room::of(&(nobody as Weak<dyn Lender>))
}

/// A value that panics if it ends twice.
#[derive(Debug, Default)]
struct Ended(BTreeSet<u32>);

impl Ended {
    fn end(&mut self, value: u32) {
        assert!(self.0.insert(value), "call {value} ended twice");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn calls_end_once(events in prop::collection::vec(event(), 1..200)) {
        const CAPACITY: usize = 8;
        let start = Instant::now();
        let mut now = start;
        let mut calls = Calls::new(CAPACITY, 1000);
        let (mut made, mut ended, mut reserved) = (0u32, Ended::default(), 0);
        let mut ids: Vec<CallId> = Vec::new();
        // Rooms of calls that count elsewhere, held until a process is done with the call.
        let mut rooms: Vec<Room> = Vec::new();
        let guests = |calls: &mut Calls<u32>, rooms: &[Room]| {
            drop(calls.take_freed());
            rooms.iter().filter(|room| room.is_shared()).count()
        };
        // Which process has which call, and which are suspects: for invariants 2, 5 and 6.
        let mut running: BTreeMap<CallId, u32> = BTreeMap::new();
        let mut suspects: BTreeSet<CallId> = BTreeSet::new();
        let mut waits: BTreeSet<CallId> = BTreeSet::new();
        // Since when the process is at a call; the limits; which processes are to be killed.
        let mut begun: BTreeMap<CallId, Instant> = BTreeMap::new();
        let mut limits: BTreeMap<CallId, Duration> = BTreeMap::new();
        let mut killed: BTreeSet<u32> = BTreeSet::new();
        // How often each may be sent, and was; when it was sent last, and whether to run alone; when a process answered one that did not run alone.
        let mut tries: BTreeMap<CallId, u32> = BTreeMap::new();
        let mut sent: BTreeMap<CallId, (u32, Instant, bool)> = BTreeMap::new();
        let mut left: BTreeMap<u32, Instant> = BTreeMap::new();
        for event in events {
            match event {
                Event::Begin(at) => if let Some(id) = running.keys().nth(at) {
                    begun.entry(*id).or_insert(now);
                },
                Event::Reserve(true) => {
                    let has_room = calls.len() + reserved < CAPACITY + guests(&mut calls, &rooms);
                    prop_assert_eq!(calls.reserve(), has_room);
                    reserved += usize::from(has_room);
                }
                Event::Reserve(false) => if reserved > 0 {
                    calls.give_back_room();
                    reserved -= 1;
                },
                Event::Insert { attempts, deadline, limit } => {
                    let deadline = deadline.map(|ms| now + Duration::from_millis(ms));
                    let limit = limit.map(Duration::from_millis);
                    let is_groups = made % 7 == 6;
                    let (terms, watched) = (Terms { deadline, limit, attempts, is_groups, ..Terms::default() }, made % 5 == 4);
                    let room = (made % 6 == 5).then(nowhere);
                    rooms.extend(room.clone());
                    match calls.insert(made, terms, watched, room) {
                        Ok(id) => {
                            // One that waits for memory first.
                            if made % 5 == 3 {
                                calls.watch(id);
                                waits.insert(id);
                            }
                            prop_assert!(!ids.contains(&id), "a number is used twice");
                            suspects.extend(watched.then_some(id));
                            tries.insert(id, terms.attempts);
                            limits.extend(limit.map(|limit| (id, limit)));
                            ids.push(id);
                        }
                        Err(value) => {
                            prop_assert!(made % 6 != 5, "it has room");
                            prop_assert_eq!(calls.len() + reserved, CAPACITY + guests(&mut calls, &rooms));
                            ended.end(value);
                        }
                    }
                    made += 1;
                }
                Event::Send(process, takes) => {
                    let takes = [Takes::All, Takes::Fresh, Takes::Suspects][takes as usize];
                    if let Some(id) = calls.next(process, takes, true) {
                        prop_assert!(calls.value(id).is_some(), "a call to send has a caller");
                        let is_suspect = suspects.contains(&id);
                        prop_assert!(!is_suspect || takes != Takes::Fresh);
                        prop_assert!(is_suspect || takes != Takes::Suspects);
                        let becomes = calls.becomes_suspect(id);
                        prop_assert_eq!(becomes, waits.remove(&id));
                        if becomes {
                            suspects.insert(id);
                            continue;
                        }
                        for (other, in_process) in &running {
                            let alone = is_suspect || suspects.contains(other);
                            prop_assert!(!(alone && *in_process == process), "not alone");
                            prop_assert!(!(is_suspect && suspects.contains(other)), "two suspects");
                        }
                        prop_assert_eq!(calls.runs_alone(id), is_suspect);
                        calls.sent(id, process, now);
                        let before = sent.get(&id).map_or(0, |it| it.0);
                        sent.insert(id, (before + 1, now, is_suspect));
                        prop_assert_eq!(running.insert(id, process), None, "it runs twice at once");
                    }
                }
                Event::Answer(at, process) => if let Some(id) = ids.get(at).copied() {
                    let answered = calls.answered(id, process, now);
                    let runs = running.get(&id) == Some(&process);
                    prop_assert_eq!(answered == Answered::Stale, !runs);
                    if runs {
                        running.remove(&id);
                        suspects.remove(&id);
                        if !sent[&id].2 { left.insert(process, now); }
                    }
                    if let Answered::Ended(value) = answered {
                        ended.end(value);
                    }
                },
                Event::Abandon(at) => if let Some(id) = ids.get(at).copied() {
                    calls.abandon(id, now).into_iter().for_each(|value| ended.end(value));
                },
                Event::Die(process, why) => {
                    let has: Vec<_> =
                        running.iter().filter(|(_, it)| **it == process).map(|(id, _)| *id).collect();
                    let culprit = [Culprit::Running, Culprit::Begun, Culprit::Unclear, Culprit::Outside, Culprit::Killed][why];
                    // The calls that may be the reason.
                    let may: BTreeSet<_> = has.iter().copied().filter(|id| match culprit {
                        Culprit::Running | Culprit::Unclear | Culprit::Killed => true,
                        Culprit::Begun => begun.contains_key(id),
                        Culprit::Outside => false,
                    }).collect();
                    let unclear = matches!(culprit, Culprit::Unclear | Culprit::Killed);
                    // Alone, begun, and long after whatever others left behind.
                    let alone = may.first().filter(|_| may.len() == 1 && !unclear);
                    let guilty = alone.is_some_and(|id| begun.contains_key(id) && {
                        let (_, since, placed) = sent[id];
                        placed || left.get(&process).is_none_or(|at| since - *at >= Duration::from_secs(1))
                    });
                    let placed = has.iter().any(|id| sent[id].2);
                    let Died { lost, blamed } = calls.died(process, culprit, |id| begun.contains_key(&id));
                    prop_assert!(blamed.len() <= may.len());
                    prop_assert!(blamed.iter().all(|(_, it)| (*it == Charge::Guilty) == guilty));
                    prop_assert_eq!(blamed.iter().any(|(_, it)| *it == Charge::Killed), may.len() == 1 && unclear);
                    for lost in lost {
                        prop_assert!(lost.attempt > 0);
                        if lost.guilt != Guilt::Innocent {
                            prop_assert!(!may.is_empty());
                            prop_assert_eq!(lost.guilt == Guilt::Alone, guilty);
                        }
                        ended.end(lost.value);
                    }
                    for id in has {
                        running.remove(&id);
                        begun.remove(&id);
                        let beside = culprit == Culprit::Killed && !placed && sent[&id].0 == 1 && tries[&id] > 2;
                        if may.contains(&id) && !beside { suspects.insert(id) } else { suspects.remove(&id) };
                    }
                    left.remove(&process);
                    killed.remove(&process);
                }
                Event::Pass(ms) => {
                    now += Duration::from_millis(ms);
                    let expired = calls.expired(now, |id, _| begun.get(&id).copied());
                    expired.given_up.into_iter().for_each(|value| ended.end(value));
                    prop_assert!(calls.next_due().is_none_or(|due| due > now));
                    for (process, limit) in expired.over_limit {
                        let is_over = |(id, it): (&CallId, &u32)| {
                            *it == process && limits.get(id) == Some(&limit) && begun.get(id).is_some_and(|since| now - *since >= limit)
                        };
                        prop_assert!(running.iter().any(is_over), "a limit that is not over");
                        killed.insert(process);
                    }
                    for process in expired.forsaken {
                        let has = running.iter().filter(|(_, it)| **it == process);
                        let has: Vec<_> = has.map(|(id, _)| *id).collect();
                        prop_assert!(has.len() == 1 && suspects.contains(&has[0]), "not alone");
                        prop_assert!(calls.value(has[0]).is_none(), "its caller waits");
                    }
                    for (id, process) in &running {
                        let over = limits.get(id).zip(begun.get(id));
                        let over = over.is_some_and(|(limit, since)| now - *since >= *limit);
                        prop_assert!(!over || killed.contains(process), "{:?} is over its limit", id);
                    }
                }
                Event::EndWaiting => {
                    calls.end_waiting().into_iter().for_each(|value| ended.end(value));
                    prop_assert!(calls.next(0, Takes::All, true).is_none());
                }
            }
            prop_assert_eq!(calls.running(), running.len());
            let most = CAPACITY + guests(&mut calls, &rooms);
            prop_assert!(calls.len() >= running.len() && calls.len() + reserved <= most);
        }
        calls.end_all().into_iter().for_each(|value| ended.end(value));
        prop_assert_eq!(ended.0.len(), made as usize, "a call never ended");
        prop_assert_eq!((calls.len(), guests(&mut calls, &rooms)), (0, 0));
    }

    #[test]
    fn suspects_run_alone(count in 2..6usize, fresh in 0..4usize) {
        let now = Instant::now();
        let terms = Terms { attempts: 3, ..Terms::default() };
        let mut calls = Calls::new(16, 1000);
        for value in 0..count {
            let id = calls.insert(value, terms, false, None).unwrap();
            calls.sent(id, 1, now);
        }
        prop_assert!(calls.died(1, Culprit::Running, |_| true).lost.is_empty());
        for value in 0..fresh {
            calls.insert(100 + value, terms, false, None).unwrap();
        }
        for _ in 0..count {
            let id = calls.next(1, Takes::All, true).unwrap();
            prop_assert!(*calls.value(id).unwrap() < count, "suspects go first");
            calls.sent(id, 1, now);
            prop_assert_eq!(calls.next(1, Takes::All, true), None);
            prop_assert!(matches!(calls.answered(id, 1, now), Answered::Ended(_)));
        }
        prop_assert_eq!(calls.next(1, Takes::All, true).is_some(), fresh > 0);
        // One that dies alone, long after the others, is guilty, and not sent again.
        let later = now + Duration::from_secs(1);
        let id = calls.insert(7, terms, false, None).unwrap();
        while let Some(next) = calls.next(1, Takes::All, true) {
            calls.sent(next, 1, if next == id { later } else { now });
            if next == id { continue }
            let _ = calls.answered(next, 1, now);
        }
        let lost = calls.died(1, Culprit::Running, |_| true).lost;
        prop_assert_eq!(lost.len(), 1);
        prop_assert_eq!(lost[0].guilt, Guilt::Alone);
    }

    #[test]
    fn leases_never_overlap(steps in prop::collection::vec((0..3u8, 0..5000u64, 0..20usize), 1..200)) {
        const FIRST: u64 = 4096;
        const END: u64 = 20_000;
        let mut leases = Leases::new(3, FIRST, END);
        let mut held: Vec<(LeaseId, Part)> = Vec::new();
        let mut used: BTreeMap<u64, u64> = BTreeMap::new();
        let mut sent: BTreeSet<usize> = BTreeSet::new();
        for (what, bytes, at) in steps {
            match what {
                0 => if let Some((id, part)) = leases.take(bytes) {
                    prop_assert!(part.offset >= FIRST && part.offset + part.len <= END);
                    prop_assert_eq!(part.len, bytes);
                    let before = used.range(..=part.offset).next_back();
                    prop_assert!(before.is_none_or(|(at, len)| at + len <= part.offset));
                    let behind = used.range(part.offset..).next();
                    prop_assert!(behind.is_none_or(|(at, _)| part.offset + part.len <= *at));
                    used.insert(part.offset, part.len.max(1));
                    held.push((id, part));
                },
                1 => if let Some((id, part)) = held.get(at).copied().filter(|_| !sent.contains(&at)) {
                    prop_assert!(leases.give_back(id));
                    prop_assert!(!leases.give_back(id) && !leases.send(id, 1));
                    used.remove(&part.offset);
                    held.remove(at);
                    sent = sent.into_iter().map(|n| if n > at { n - 1 } else { n }).collect();
                },
                _ => if let Some((id, part)) = held.get(at).copied() {
                    if sent.insert(at) {
                        prop_assert!(leases.send(id, 1) && !leases.send(id, 1) && !leases.give_back(id));
                    } else {
                        prop_assert_eq!(leases.returned(id, 1), Returned::Free);
                        prop_assert_eq!(leases.returned(id, 1), Returned::Stale);
                        used.remove(&part.offset);
                        held.remove(at);
                        sent.remove(&at);
                        sent = sent.into_iter().map(|n| if n > at { n - 1 } else { n }).collect();
                    }
                },
            }
        }
        for (at, (id, _)) in held.iter().enumerate() {
            let was_sent = sent.contains(&at);
            let freed = match was_sent {
                true => leases.returned(*id, 1) == Returned::Free,
                false => leases.give_back(*id),
            };
            prop_assert!(freed);
        }
        let (_, all) = leases.take(leases.largest()).expect("all of it is free, in one part");
        prop_assert_eq!(all.len, leases.largest());
    }

    #[test]
    fn stale_leases_change_nothing(bytes in 1..3000u64) {
        let (mut leases, mut next) = (Leases::new(1, 0, 4096), Leases::new(2, 0, 4096));
        let (old, _) = leases.take(bytes).unwrap();
        prop_assert_eq!(leases.returned(old, 1), Returned::Stale, "it was never sent");
        prop_assert!(leases.send(old, 1));
        // Another process never had it.
        prop_assert!(!leases.process_gone(2));
        prop_assert_eq!(leases.returned(old, 2), Returned::Stale);
        prop_assert_eq!(leases.returned(old, 1), Returned::Kept);
        prop_assert_eq!(leases.returned(old, 1), Returned::Stale);
        prop_assert!(leases.give_back(old) && !leases.give_back(old));
        let (new, _) = leases.take(bytes).unwrap();
        prop_assert!(leases.send(new, 1));
        // The same slot: an earlier number, and another process's.
        prop_assert_eq!((leases.returned(old, 1), next.returned(new, 1)), (Returned::Stale, Returned::Stale));
        let (other, _) = next.take(bytes).unwrap();
        prop_assert!(next.send(other, 1) && !leases.give_back(new));
        prop_assert_eq!(next.returned(new, 1), Returned::Stale);
        prop_assert_eq!(leases.returned(new, 1), Returned::Free);
    }

    #[test]
    fn a_retried_call_keeps_its_bytes(
        steps in prop::collection::vec((0..7u8, 0..8usize, 1..3000u64, 1..4u32), 1..300),
    ) {
        const END: usize = 8192;
        let now = Instant::now();
        let (mut calls, mut leases) = (Calls::new(8, 1000), Leases::new(0, 0, END as u64));
        // Which call's bytes are where; the calls with their leases, as the front has them; what the process reads.
        let mut memory = vec![0u32; END];
        let mut read: BTreeMap<CallId, (LeaseId, Part, u32)> = BTreeMap::new();
        let mut ids: Vec<CallId> = Vec::new();
        let mut tag = 0u32;
        for (what, at, bytes, attempts) in steps {
            let dropped: Vec<(LeaseId, Part, u32)> = match what {
                0 | 1 => {
                    let Some((lease, part)) = leases.take(bytes) else { continue };
                    tag += 1;
                    memory[part.offset as usize..][..part.len as usize].fill(tag);
                    match calls.insert((lease, part, tag), Terms { attempts, ..Terms::default() }, false, None) {
                        Ok(id) => { ids.push(id); Vec::new() }
                        Err(ticket) => vec![ticket],
                    }
                }
                2 => {
                    let Some(id) = calls.next(1, Takes::All, true) else { continue };
                    let ticket = *calls.value(id).unwrap();
                    calls.sent(id, 1, now);
                    prop_assert!(leases.send(ticket.0, 1), "the lease of a call is its own");
                    if !calls.may_run_again(id) {
                        leases.give_back(ticket.0);
                    }
                    read.insert(id, ticket);
                    Vec::new()
                }
                // The process drops the payload, and goes on with the call.
                3 => {
                    let Some(id) = read.keys().nth(at).copied() else { continue };
                    let (lease, ..) = read.remove(&id).unwrap();
                    prop_assert_ne!(leases.returned(lease, 1), Returned::Stale);
                    Vec::new()
                }
                4 => {
                    let Some(id) = ids.get(at).copied() else { continue };
                    match calls.answered(id, 1, now) {
                        Answered::Ended(ticket) => vec![ticket],
                        Answered::Abandoned | Answered::Stale => Vec::new(),
                    }
                }
                5 => {
                    let Some(id) = ids.get(at).copied() else { continue };
                    calls.abandon(id, now).into_iter().collect()
                }
                _ => {
                    read.clear();
                    leases.process_gone(1);
                    let culprit = [Culprit::Running, Culprit::Outside, Culprit::Unclear][at % 3];
                    calls.died(1, culprit, |_| true).lost.into_iter().map(|lost| lost.value).collect()
                }
            };
            for (lease, ..) in dropped {
                leases.give_back(lease);
            }
            // What the process reads, and what a call may send, is as it was written.
            let waiting = ids.iter().filter_map(|id| {
                let again = calls.may_run_again(*id);
                calls.value(*id).filter(|_| again).copied()
            });
            for (_, part, tag) in waiting.chain(read.values().copied()) {
                let bytes = &memory[part.offset as usize..][..part.len as usize];
                prop_assert!(bytes.iter().all(|byte| *byte == tag), "bytes of another lease");
            }
        }
    }

    #[test]
    fn delays_grow_and_end(
        served in prop::collection::vec((prop::option::of(0..3u64), any::<bool>()), 1..60),
    ) {
        let policy = Restart { early_deaths: 5, ..Restart::default() };
        let (mut deaths, mut quick, mut early) = (Deaths::default(), 0, 0);
        let mut last = Duration::ZERO;
        for (served, calls) in served {
            let served = served.map(Duration::from_secs);
            let calls = calls && served.is_some();
            if served.is_some_and(|served| served >= policy.settled) {
                (quick, early, last) = (0, 0, Duration::ZERO);
            } else {
                (quick, early) = (quick + 1, early + u32::from(!calls));
            }
            let sign = if calls { Sign::InCalls } else { Sign::Early };
            let next = deaths.count(&policy, served, sign);
            prop_assert_eq!(deaths.early(), early);
            let Next::StartAfter(delay) = next else {
                // By the latest death, and never by one while calls ran.
                prop_assert!(early > policy.early_deaths && !calls);
                continue;
            };
            prop_assert!(early <= policy.early_deaths || calls);
            prop_assert!(delay <= policy.most_delay);
            prop_assert!(delay >= last || served.is_some(), "{:?} after {:?}", delay, last);
            prop_assert_eq!(delay.is_zero(), quick <= 1 && served.is_some());
            last = delay;
        }
    }

    #[test]
    fn a_worker_has_one_process(
        has_standby in any::<bool>(),
        steps in prop::collection::vec((0..13u8, 0..2usize), 1..400),
    ) {
        let limits = Limits {
            hello: Duration::from_secs(1),
            start: Duration::from_secs(5),
            kill_grace: Duration::from_secs(2),
            most_stuck: 1,
        };
        let policy = Restart { early_deaths: 8, ..Restart::default() };
        let mut now = Instant::now();
        let mut life = Life::new(now, has_standby);
        // Processes as an outsider counts them: what became of each, and which is where.
        let mut processes: Vec<Model> = Vec::new();
        let mut seats: [Option<usize>; 2] = [None; 2];
        let mut stuck = 0u32;
        // Whether another process is to take the main one's place.
        let mut wants = false;
        for (step, at) in steps {
            let role = Role::ALL[at];
            let was_serving = life.is_serving();
            let dies = |life: &mut Life, seats: &mut [Option<usize>; 2], now| {
                let replaced = role == Role::Main && life.take_over(now);
                if replaced { seats.swap(0, 1) }
                let role = if replaced { Role::Standby } else { role };
                seats[role as usize] = None;
                life.gone(role, now, Sign::Early, &policy, &limits)
            };
            let drains = life.is_drained(role);
            let is_main = role == Role::Main || life.is_replaced(role) && !drains;
            let mut done = Step::Nothing;
            // The process that could take over.
            let ready = seats[1].filter(|it| processes[*it].is_ready && !processes[*it].is_falling);
            match (step, seats[at]) {
                (0..=2, seat) => {
                    now += Duration::from_millis(700);
                    match (life.tick(role, now, &limits), seat) {
                        (Step::Start, _) => {
                            prop_assert!(seat.is_none());
                            prop_assert!(at == 0 || has_standby || wants, "nobody wants it");
                            seats[at] = Some(processes.len());
                            processes.push(Model { is_ready: false, is_falling: false });
                        }
                        (Step::NoHello | Step::NoStart | Step::NoEnd, Some(process)) => {
                            life.killed(role, now);
                            processes[process].is_falling = true;
                        }
                        (Step::SetAside, Some(_)) => {
                            stuck += 1;
                            // Whatever serves next is another process.
                            wants &= at == 1;
                            done = dies(&mut life, &mut seats, now);
                        }
                        (step, _) => prop_assert_eq!(step, Step::Nothing),
                    }
                }
                (3, Some(_)) => life.said_hello(role),
                (4 | 5, Some(process)) => {
                    if step == 5 { life.said_hello(role) }
                    processes[process].is_ready |= life.serves(role, now);
                }
                (6, Some(process)) => {
                    life.killed(role, now);
                    processes[process].is_falling = true;
                }
                (7, Some(_)) => {
                    wants &= at == 1;
                    done = dies(&mut life, &mut seats, now);
                }
                // The main one falls: it was killed, or says that it ends.
                (8, _) => if let Some(falls) = seats[0].filter(|it| processes[*it].is_falling || at == 0) {
                    let next = seats[1].filter(|it| !processes[*it].is_falling);
                    let takes_over = life.take_over(now);
                    prop_assert!(!takes_over || next.is_some(), "nobody takes over");
                    // A standby that is ready takes over.
                    let ready = next.is_some_and(|next| processes[next].is_ready);
                    prop_assert!(takes_over || !ready);
                    if takes_over {
                        wants = false;
                        processes[falls].is_falling = true;
                        seats.swap(0, 1);
                        prop_assert_eq!(life.is_serving(), ready);
                    }
                },
                (10, _) => {
                    let may = life.replace(now);
                    prop_assert_eq!(may, was_serving);
                    wants |= may;
                }
                (11 | 12, _) => {
                    let promoted = life.promote(now, now + Duration::from_secs(3));
                    prop_assert_eq!(promoted, wants && was_serving && ready.is_some());
                    if promoted {
                        processes[seats[0].unwrap()].is_falling = true;
                        seats.swap(0, 1);
                        wants = false;
                        prop_assert!(life.is_serving() && life.is_drained(Role::Standby));
                    }
                },
                (9, _) if stuck > 0 => {
                    stuck -= 1;
                    life.unstuck();
                }
                _ => {}
            }
            match done {
                Step::GiveUp => {
                    wants = false;
                    prop_assert!(is_main, "a standby ends the worker");
                    prop_assert!(!was_serving || ready.is_none(), "it is given up while another process is ready");
                    life.end();
                    seats = [None; 2];
                }
                Step::NoStandby | Step::NotReplaced => {
                    wants = false;
                    prop_assert!(!life.has_ended());
                }
                _ => {}
            }
            prop_assert_eq!(life.is_wanted(), wants);
            // A waiter for a replacement has one coming, or gets an error.
            prop_assert!(!life.is_wanted() || life.phase(Role::Standby) != Phase::Ended);
            // Those that nobody wants end.
            let is_second = matches!(
                life.phase(Role::Standby),
                Phase::Waiting(_) | Phase::Starting { .. } | Phase::Serving(_)
            );
            prop_assert!(has_standby || life.is_wanted() || !is_second);
            prop_assert_eq!(life.stuck(), stuck as usize);
            // Nothing but what happens to the main process interrupts the service.
            prop_assert!(life.is_serving() || !was_serving || is_main || step == 8);
            // With a ready standby not even the main process's death does, even one early death too many.
            prop_assert!(step != 7 || ready.is_none() || life.is_serving() || at == 1);
            for (role, seat) in Role::ALL.into_iter().zip(seats) {
                let phase = life.phase(role);
                let has_process = !matches!(phase, Phase::Waiting(_) | Phase::Ended);
                prop_assert_eq!(has_process, seat.is_some());
                // Those that fall take no calls.
                let model = seat.map(|seat| &processes[seat]);
                if let Phase::Serving(_) = phase {
                    prop_assert!(model.is_some_and(|model| model.is_ready && !model.is_falling));
                }
            }
            // Whatever it waits for, time or a death moves it on.
            let waits = life.has_ended() || life.is_serving();
            prop_assert!(waits || life.next_due(&limits).is_some());
        }
        for (role, kill) in Role::ALL.into_iter().zip(life.close(now)) {
            if kill {
                life.killed(role, now);
            }
        }
        for _ in 0..20 {
            now += Duration::from_secs(1);
            for role in Role::ALL {
                match life.tick(role, now, &limits) {
                    Step::NoEnd => life.killed(role, now),
                    Step::SetAside => drop(life.gone(role, now, Sign::Early, &policy, &limits)),
                    Step::Start => prop_assert!(false, "a closed worker starts a process"),
                    _ => {}
                }
            }
        }
        prop_assert!(life.has_ended());
    }

    #[test]
    fn a_log_keeps_the_end(writes in prop::collection::vec("[a-z]{0,40}", 0..30)) {
        let mut log = Log::new(64);
        writes.iter().for_each(|write| log.push(write.as_bytes()));
        let (all, text) = (writes.concat(), log.text());
        let kept = text.rsplit('\n').next().unwrap();
        prop_assert!(all.ends_with(kept));
        prop_assert_eq!(kept.len(), all.len().min(64));
        let dropped = all.len() - kept.len();
        prop_assert_eq!(text.contains(&format!("[{dropped} bytes")), dropped > 0);
    }

    #[test]
    fn any_packet_is_a_message_or_none(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = codec::header::<ToSupervisor<'_>>(&bytes);
        let _ = codec::header::<ToProcess<'_>>(&bytes);
    }
}

#[test]
fn only_who_had_begun_is_a_suspect() {
    let (now, limit) = (Instant::now(), Duration::from_secs(1));
    use Guilt::{Alone, Innocent, Suspect};
    // Any call that had begun may be guilty, whichever is over its limit; a single one that had begun is.
    for (begun, expected) in [
        (3, [Suspect, Suspect, Suspect, Innocent, Innocent]),
        (1, [Alone, Innocent, Innocent, Innocent, Innocent]),
        (0, [Innocent; 5]),
    ] {
        let mut calls = Calls::new(8, 1000);
        let mut ids = Vec::new();
        for value in 0..5u32 {
            // The first has more time than those that wait for it.
            let limit = Some(if value == 0 { 3 * limit } else { limit });
            let terms = Terms { limit, attempts: 1, ..Terms::default() };
            let id = calls.insert(value, terms, false, None).unwrap();
            calls.sent(id, 1, now);
            ids.push(id);
        }
        let begun = &ids[..begun];
        let since = |id: CallId, _| begun.contains(&id).then_some(now);
        let expired = calls.expired(now + 3 * limit, since);
        assert_eq!(expired.over_limit.is_empty(), begun.is_empty());
        let Died { mut lost, blamed } = calls.died(1, Culprit::Begun, |id| begun.contains(&id));
        lost.sort_by_key(|lost| lost.value);
        let guilt: Vec<_> = lost.iter().map(|lost| lost.guilt).collect();
        assert_eq!((&guilt[..], blamed.len()), (&expected[..], begun.len()));
    }
}

#[test]
fn what_others_left_is_nobodys_guilt() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    // Whether another call was answered, and how long before this one was sent; or after. Whether this one was to run alone, and had begun.
    for (left, after, alone, begun, expected) in [
        (None, false, false, true, Guilt::Alone),
        (Some(second), false, false, true, Guilt::Alone),
        (Some(second / 2), false, false, true, Guilt::Suspect),
        (None, true, false, true, Guilt::Suspect),
        (Some(second / 2), false, true, true, Guilt::Alone),
        (Some(second / 2), false, true, false, Guilt::Suspect),
        (None, false, false, false, Guilt::Suspect),
    ] {
        let mut calls = Calls::new(8, 1000);
        let mut now = start;
        let other = |calls: &mut Calls<u32>, now| {
            let id = calls.insert(1, Terms::default(), false, None).unwrap();
            assert_eq!(calls.next(1, Takes::All, true), Some(id));
            calls.sent(id, 1, now);
            id
        };
        if let Some(left) = left {
            let id = other(&mut calls, now);
            assert_eq!(calls.answered(id, 1, now), Answered::Ended(1));
            now += left;
        }
        let beside = after.then(|| other(&mut calls, now));
        let terms = Terms { attempts: 1, ..Terms::default() };
        let id = calls.insert(2, terms, alone, None).unwrap();
        assert_eq!((calls.next(1, Takes::All, true), calls.runs_alone(id)), (Some(id), alone));
        calls.sent(id, 1, now);
        if let Some(beside) = beside {
            assert_eq!(calls.answered(beside, 1, now + second), Answered::Ended(1));
        }
        let lost = calls.died(1, Culprit::Running, |_| begun).lost;
        assert_eq!((lost.len(), lost[0].guilt), (1, expected), "{left:?} {after} {alone} {begun}");
        // The next process has nothing of this one's.
        let id = other(&mut calls, now);
        assert_eq!(calls.died(1, Culprit::Running, |_| true).lost[0].guilt, Guilt::Alone, "{id:?}");
    }
}

#[test]
fn who_was_killed_runs_beside_others_once() {
    let now = Instant::now();
    for (culprit, attempts, beside) in
        [(Culprit::Killed, 3, true), (Culprit::Killed, 2, false), (Culprit::Unclear, 3, false)]
    {
        let mut calls = Calls::new(64, 1000);
        let terms = Terms { attempts, ..Terms::default() };
        for value in 0..50u32 {
            let id = calls.insert(value, terms, false, None).unwrap();
            calls.sent(id, 1, now);
        }
        let send = |calls: &mut Calls<u32>, process| {
            let mut sent = Vec::new();
            while let Some(id) = calls.next(process, Takes::All, true) {
                calls.sent(id, process, now);
                sent.push(id);
            }
            sent
        };
        assert!(calls.died(1, culprit, |_| true).lost.is_empty());
        let second = send(&mut calls, 2);
        assert_eq!(second.len(), if beside { 50 } else { 1 });
        // In their order.
        assert_eq!(calls.value(second[0]), Some(&mut 0));
        // Killed again, they run one by one.
        let Died { lost, blamed } = calls.died(2, culprit, |_| true);
        assert_eq!(
            (lost.len(), blamed.len()),
            if attempts == 2 { (1, 1) } else { (0, usize::from(!beside)) }
        );
        assert_eq!(send(&mut calls, 3).len(), 1);
    }
}

#[test]
fn what_serves_is_not_given_up() {
    let limits = Limits {
        hello: Duration::from_secs(1),
        start: Duration::from_secs(5),
        kill_grace: Duration::from_secs(2),
        most_stuck: 1,
    };
    let policy = Restart { early_deaths: 2, settled: Duration::MAX, ..Restart::default() };
    let (mut now, mut life) = (Instant::now(), Life::new(Instant::now(), true));
    let start = |life: &mut Life, role, now: &mut Instant| {
        *now += policy.most_delay;
        assert_eq!(life.tick(role, *now, &limits), Step::Start);
        life.said_hello(role);
        assert!(life.serves(role, *now));
    };
    start(&mut life, Role::Main, &mut now);
    for death in 1..=3 {
        start(&mut life, Role::Standby, &mut now);
        assert!(life.take_over(now));
        let step = life.gone(Role::Standby, now, Sign::Early, &policy, &limits);
        // One too many: what took over goes on, and nothing stands by.
        assert_eq!(step, if death > 2 { Step::NoStandby } else { Step::Nothing });
        assert!(life.is_serving() && life.expects_standby() == (death <= 2));
    }
    // Calls may kill it; then another one serves, and has a standby. Without one, one more early death is the end.
    assert_eq!(life.gone(Role::Main, now, Sign::InCalls, &policy, &limits), Step::Nothing);
    start(&mut life, Role::Main, &mut now);
    assert!(life.expects_standby());
    assert_eq!(life.gone(Role::Main, now, Sign::Early, &policy, &limits), Step::GiveUp);
}

#[test]
fn a_pause_counts_in_no_limit() {
    let limits = Limits {
        hello: Duration::from_secs(1),
        start: Duration::from_secs(5),
        kill_grace: Duration::from_secs(2),
        most_stuck: 1,
    };
    let (mut now, pause) = (Instant::now(), Duration::from_secs(20));
    let mut life = Life::new(now, true);
    assert_eq!(life.tick(Role::Main, now, &limits), Step::Start);
    // Of the main process, and of a standby beside it.
    for role in Role::ALL {
        for (step, wanted) in [(0, Step::NoHello), (1, Step::NoStart), (2, Step::SetAside)] {
            match step {
                1 => life.said_hello(role),
                2 => life.killed(role, now),
                _ => {}
            }
            now += pause;
            life.held_up(pause);
            assert_eq!(life.tick(role, now, &limits), Step::Nothing);
            let later = life.tick(role, now + limits.start, &limits);
            assert_eq!(later, wanted);
        }
        life = Life::new(now, true);
        assert_eq!(life.tick(Role::Main, now, &limits), Step::Start);
        life.said_hello(Role::Main);
        assert!(life.serves(Role::Main, now));
        assert_eq!(life.tick(Role::Standby, now, &limits), Step::Start);
    }
}

#[test]
fn a_pause_of_the_supervisor_kills_nobody() {
    let (mut heart, mut now) = (Heart::default(), Instant::now());
    let still = Beat::default();
    for _ in 0..9 {
        assert_ne!(heart.look(now, still, false, None), Pulse::Dead);
        now += EVERY;
    }
    // The supervisor itself was held up.
    now += Duration::from_secs(60);
    for look in 0..10 {
        assert_ne!(heart.look(now, still, false, None), Pulse::Dead, "look {look}");
        now += EVERY;
    }
    assert_eq!(heart.look(now, still, false, None), Pulse::Dead);
}

#[test]
fn a_stopped_process_is_reported() {
    let (mut heart, mut now) = (Heart::default(), Instant::now());
    let still = Beat::default();
    for _ in 0..100 {
        let limit = Some(Duration::from_secs(60));
        assert_eq!(heart.look(now, still, true, limit), Pulse::Stopped);
        now += EVERY;
    }
    assert_eq!(heart.look(now, still, false, None), Pulse::Well);
}

#[test]
fn a_blocked_executor_is_seen() {
    let (mut heart, mut now) = (Heart::default(), Instant::now());
    for look in 0..20u32 {
        let beat = Beat { process: look.into(), executor: 1 };
        let (limit, blocked) = (Duration::from_secs(6), EVERY * look);
        let pulse = heart.look(now, beat, false, Some(limit));
        match blocked > limit {
            true => assert_eq!(pulse, Pulse::Hung(blocked)),
            false => assert_eq!(pulse, if look < 10 { Pulse::Well } else { Pulse::Busy }),
        }
        now += EVERY;
    }
}

proptest! {
    #[test]
    fn only_what_is_complete_is_kept(steps in prop::collection::vec((0..5u8, 0..4usize), 1..200)) {
        let mut kept = Kept::new();
        let key: Key = (None, "weights".to_owned());
        // Which process fills, under which number; what is complete.
        let (mut filler, mut complete): (Option<(usize, u64)>, Option<u64>) = (None, None);
        for (what, asker) in steps {
            let owner = (asker, 1);
            match what {
                0 | 1 => match kept.ask(&key, owner, 7) {
                    Asked::Fill(generation) => {
                        prop_assert_eq!((filler, complete), (None, None));
                        filler = Some((asker, generation));
                    }
                    Asked::Sealed(generation, memory) => {
                        prop_assert_eq!((Some(generation), *memory), (complete, generation));
                    }
                    Asked::Wait => prop_assert!(filler.is_some() && complete.is_none()),
                },
                2 => {
                    let generation = filler.map_or(7, |(_, generation)| generation);
                    let may = filler == Some((asker, generation));
                    prop_assert_eq!(kept.sealed(&key, owner, generation, generation).is_ok(), may);
                    if may {
                        (filler, complete) = (None, Some(generation));
                    }
                }
                3 => {
                    let changed = filler.is_some_and(|(by, _)| by == asker);
                    prop_assert_eq!(kept.gone(owner, None), changed);
                    if changed {
                        filler = None;
                    }
                }
                _ => {
                    let gone = kept.forget(|(gpu, _)| gpu.is_none());
                    prop_assert_eq!(gone.first().copied(), complete.take());
                }
            }
        }
    }
}

/// A process with memory that it may write, as an outsider sees it.
#[derive(Clone, Copy, Debug, Default)]
struct Writer {
    /// The memory that it has mapped, and writes to.
    maps: Option<u64>,
    /// What it forked has, whatever becomes of it.
    forked: Option<u64>,
    writes: bool,
    is_dead: bool,
    is_reaped: bool,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn never_two_writers(steps in prop::collection::vec((0..14u8, 0..4usize), 1..300)) {
        let (key, now): (Key, _) = ((None, "cache".to_owned()), Instant::now());
        let mut kept: Mutable<u64, usize> = Mutable::new();
        let mut writers = [Writer::default(); 4];
        // Which memory there is, under which number each process has it, and whose write did not end.
        let (mut makes, mut numbers, mut incarnations) = (None, [0u64; 4], [0u32; 4]);
        let (mut memory, mut died) = (None, None);
        // Whose it is; each writer is a worker.
        let mut worker = None;
        for (what, at) in steps {
            let by = (at, incarnations[at]);
            match what {
                0..=2 if !writers[at].is_dead => match kept.ask(&key, by, at as u32) {
                    Given::Make(number) => {
                        prop_assert!(makes.is_none() && memory.is_none());
                        (makes, numbers[at], died, worker) = (Some((at, number)), number, None, Some(at));
                    }
                    Given::Take { generation, made, died: told, memory: given } => {
                        prop_assert_eq!((Some(*given), told), (memory, died));
                        prop_assert_eq!(made, *given);
                        prop_assert!(writers.iter().all(|it| it.maps != Some(made) && it.forked != Some(made)));
                        prop_assert!(worker.is_none_or(|it| it == at), "another worker's");
                        (writers[at].maps, numbers[at], worker) = (Some(made), generation, Some(at));
                    }
                    Given::Twice => prop_assert!(writers[at].maps.is_some() || makes.is_some_and(|it| it.0 == at)),
                    Given::Wait => {}
                },
                3 => {
                    let number = makes.map_or(7, |(_, number)| number);
                    let may = makes.is_some_and(|(maker, _)| maker == at) && !writers[at].is_dead;
                    if !writers[at].is_dead {
                        prop_assert_eq!(kept.made(&key, by, number, number).is_ok(), may);
                    }
                    if may {
                        (makes, memory, writers[at].maps) = (None, Some(number), Some(number));
                    }
                }
                4 | 5 if !writers[at].is_dead => {
                    let has = writers[at].maps.is_some();
                    prop_assert_eq!(kept.writes(&key, by, what == 4), has);
                    if has {
                        writers[at].writes = what == 4;
                        if what == 5 { died = None }
                    }
                }
                6 if !writers[at].is_dead => writers[at].forked = writers[at].maps,
                7 => writers[at].is_dead = true,
                // It is reaped: what it said was heard, or it is not to be trusted.
                8 | 9 if writers[at].is_dead && !writers[at].is_reaped => {
                    let untrusted = what == 9;
                    let _ = kept.gone(by, untrusted, now, &at);
                    let has = writers[at].maps.is_some() && writers[at].maps == memory;
                    if has && (writers[at].writes || untrusted) {
                        died = Some(numbers[at]);
                    }
                    makes = makes.filter(|(maker, _)| *maker != at);
                    (writers[at].maps, writers[at].is_reaped) = (None, true);
                }
                // The worker ends.
                13 => {
                    let is_its = worker == Some(at) && (memory.is_some() || makes.is_some());
                    prop_assert!(!is_its || kept.released(at));
                    worker = worker.filter(|it| *it != at);
                }
                // What it forked ends.
                10 => writers[at].forked = None,
                11 => {
                    // The supervisor asks what remains, which knows.
                    if let Some((_, made, remains)) = kept.settling(&key) {
                        if writers[*remains].forked != Some(*made) {
                            kept.settled(&key);
                        } else if at == 0 {
                            prop_assert_eq!(kept.set_aside(&key), [*memory.as_ref().unwrap()]);
                            memory = None;
                        }
                    }
                }
                12 if writers[at].is_reaped && writers[at].forked.is_none() => {
                    writers[at] = Writer::default();
                    incarnations[at] += 1;
                }
                12 if writers[at].is_dead && !writers[at].is_reaped => {
                    // It does not go: what it has is lost, and is never another one's.
                    if let Some(lost) = kept.abandon(by).pop() {
                        prop_assert_eq!((Some(lost), writers[at].maps), (memory.take(), Some(lost)));
                    }
                    makes = makes.filter(|(maker, _)| *maker != at);
                }
                _ => {}
            }
            let has = writers.iter().filter(|it| it.maps.is_some() && it.maps == memory).count();
            prop_assert!(has <= 1, "two writers");
            let is_left = writers.iter().any(|it| it.is_reaped && it.forked == memory);
            let is_lent = kept.holder(&key).is_some() && memory.is_some();
            prop_assert!(!is_lent || has == 1 && !is_left, "it is lent while something has it");
        }
    }
}

proptest! {
    #[test]
    fn only_the_guilty_are_refused(
        steps in prop::collection::vec((0..6u8, 0..6u64, 0..3u64, 1..40u64), 1..200),
    ) {
        let policy = Blame {
            refused_for: Duration::from_secs(10),
            client_guilty: 2,
            client_refused_for: Duration::from_secs(30),
        };
        let mut now = Instant::now();
        let mut blamed = Blamed::default();
        // When each was guilty; since when a request is suspected.
        let mut requests: BTreeMap<u64, Instant> = BTreeMap::new();
        let mut clients: BTreeMap<u64, Vec<Instant>> = BTreeMap::new();
        let mut watched: BTreeMap<u64, Instant> = BTreeMap::new();
        // How often in a row each was killed alone.
        let mut kills: BTreeMap<u64, u32> = BTreeMap::new();
        // When calls of each client were lost beside others, since one was answered.
        let mut losses: BTreeMap<u64, Vec<Instant>> = BTreeMap::new();
        let is_watched = |losses: &BTreeMap<u64, Vec<Instant>>, client: u64, now: Instant| {
            // In a row, each death within the time of the one before.
            let (mut deaths, mut next) = (0, now);
            for at in losses.get(&client).into_iter().flatten().rev() {
                if next >= *at + policy.client_refused_for {
                    break;
                }
                deaths += u32::from(deaths == 0 || next != *at);
                next = *at;
            }
            deaths >= MOST_LOST
        };
        for (what, request, client, pass) in steps {
            let keys = Keys { request: Some(request), client: Some(client) };
            let refused_at = |requests: &BTreeMap<u64, Instant>, now| {
                requests.get(&request).is_some_and(|at| now < *at + policy.refused_for)
            };
            match what {
                0..=2 => {
                    let charge = [Charge::Guilty, Charge::Killed, Charge::Suspected][what as usize];
                    let was_refused = refused_at(&requests, now);
                    let is_known = |at: &Instant| now < *at + policy.refused_for;
                    let was_watched = watched.get(&request).is_some_and(is_known);
                    if was_refused || !was_watched {
                        kills.remove(&request);
                    }
                    let killed = kills.entry(request).or_default();
                    *killed += u32::from(charge == Charge::Killed);
                    let is_guilty = charge == Charge::Guilty || *killed >= MOST_KILLS;
                    let was_lost = is_watched(&losses, client, now);
                    let follows = blamed.charge(keys, charge, now, &policy);
                    if charge == Charge::Suspected {
                        losses.entry(client).or_default().push(now);
                        let is_new = !was_lost && is_watched(&losses, client, now);
                        prop_assert_eq!(follows.client == Some(Standing::Watched), is_new);
                    }
                    if is_guilty {
                        requests.insert(request, now);
                        clients.entry(client).or_default().push(now);
                        watched.remove(&request);
                    } else if !was_refused {
                        watched.insert(request, now);
                    }
                    let expected = match (was_refused, is_guilty) {
                        (false, true) => Some(Standing::Refused),
                        (false, false) if !was_watched => Some(Standing::Watched),
                        _ => None,
                    };
                    prop_assert_eq!(follows.request, expected);
                    prop_assert!(is_guilty || follows.client != Some(Standing::Refused));
                }
                3 => {
                    blamed.answered(keys);
                    watched.remove(&request);
                    losses.remove(&client);
                }
                _ => now += Duration::from_secs(pass),
            }
            // In a row, each within the time of the one before.
            let (mut counted, mut next) = (0, now);
            for at in clients.get(&client).into_iter().flatten().rev() {
                if next >= *at + policy.client_refused_for {
                    break;
                }
                (counted, next) = (counted + 1, *at);
            }
            let wanted = match (refused_at(&requests, now), counted >= 2) {
                (true, _) => Some(("request", requests[&request] + policy.refused_for)),
                (_, true) => {
                    Some(("client", *clients[&client].last().unwrap() + policy.client_refused_for))
                }
                _ => None,
            };
            prop_assert_eq!(blamed.refuses(keys, now), wanted);
            let watches = watched.get(&request).is_some_and(|at| now < *at + policy.refused_for);
            let is_lost = is_watched(&losses, client, now);
            prop_assert_eq!(blamed.watches(keys, now), watches || refused_at(&requests, now) || is_lost);
            prop_assert_eq!(blamed.watches(Keys { request: None, ..keys }, now), is_lost);
            prop_assert_eq!(blamed.refuses(Keys::default(), now), None);
        }
    }
}

#[test]
fn what_is_blamed_is_bounded() {
    let (now, policy, mut blamed) = (Instant::now(), Blame::default(), Blamed::default());
    for key in 0..MOST as u64 + 100 {
        let keys = Keys { request: Some(key), client: None };
        let now = now + Duration::from_nanos(key);
        let follows = blamed.charge(keys, Charge::Guilty, now, &policy);
        assert_eq!(follows.request, Some(Standing::Refused));
        assert!(blamed.len() <= MOST && blamed.refuses(keys, now).is_some());
    }
    // The oldest went first.
    let refuses = |key| blamed.refuses(Keys { request: Some(key), client: None }, now).is_some();
    assert!(!refuses(99) && refuses(100));
}
