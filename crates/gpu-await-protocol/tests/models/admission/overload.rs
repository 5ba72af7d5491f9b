//! Admission under overload, in simulated time: a device that runs one kernel after the other, and callers that come
//! whether it can serve them or not and give up when they have waited for long enough.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};

use super::{MS, ONE, plain};
use gpu_await_protocol::admission::{
    Admission, Ask, Class, Entered, Granted, NoPermit, Patience, ShareLimits, Waited, Waiting,
};

const PERMITS: u64 = 8;
const PATIENCE: u64 = 250 * MS;

/// What callers say of their patience.
#[derive(Clone, Copy, PartialEq)]
enum Says {
    Nothing,
    ItsDeadline,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Comes { share: usize },
    Completes { permit: usize, caller: usize },
    GivesUp { caller: usize },
    Expires,
}

/// Who comes to a share: every so many nanoseconds, for kernels of that length.
#[derive(Clone, Copy)]
struct Load {
    every: u64,
    kernel: u64,
}

struct Caller {
    came: u64,
    share: usize,
    key: Option<Waiting>,
}

/// Tells which caller was woken.
struct Bell(usize, Arc<Mutex<Vec<usize>>>);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.1.lock().expect("no panic").push(self.0);
    }
}

/// What came of it, for each share.
#[derive(Clone, Debug, Default)]
struct Answers {
    /// Waits and runs of those that were answered in time, in nanoseconds.
    in_time: Vec<u64>,
    late: usize,
    refused_at_once: usize,
    told_later: usize,
    /// How long these waited at most.
    longest_wait: u64,
}

struct Simulation {
    admission: Admission,
    now: u64,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    device_free_at: u64,
    loads: Vec<Load>,
    says: Says,
    callers: BTreeMap<usize, Caller>,
    came: usize,
    woken: Arc<Mutex<Vec<usize>>>,
    answers: Vec<Answers>,
    /// What the first kernel takes on top.
    first_takes: u64,
    random: u64,
    shares: usize,
}

impl Simulation {
    fn new(loads: &[Load], shares: &[ShareLimits], says: Says) -> Self {
        let mut events = BinaryHeap::new();
        events.extend((0..loads.len()).map(|share| Reverse((0, Event::Comes { share }))));
        Simulation {
            admission: Admission::new(PERMITS, 10_000, [Class::Normal; 2], shares.to_vec()),
            now: 0,
            events,
            device_free_at: 0,
            loads: loads.to_vec(),
            says,
            callers: BTreeMap::new(),
            came: 0,
            woken: Arc::default(),
            answers: vec![Answers::default(); loads.len()],
            first_takes: 0,
            random: 1,
            shares: shares.len(),
        }
    }

    /// Half to one and a half of it, always the same sequence.
    fn about(&mut self, ns: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ns / 2 + (self.random >> 33) % ns
    }

    fn run(mut self, until: u64) -> Vec<Answers> {
        while let Some(Reverse((at, event))) = self.events.pop()
            && at <= until
        {
            self.now = at;
            match event {
                Event::Comes { share } => self.comes(share),
                Event::Completes { permit, caller } => {
                    let answers = &mut self.answers[self.callers[&caller].share];
                    match at - self.callers[&caller].came {
                        took if took <= PATIENCE => answers.in_time.push(took),
                        _ => answers.late += 1,
                    }
                    self.callers.remove(&caller);
                    self.admission.give_back(at, permit).into_iter().for_each(Waker::wake);
                }
                Event::GivesUp { caller } => {
                    if let Some(key) =
                        self.callers.get_mut(&caller).and_then(|caller| caller.key.take())
                    {
                        let left = self.admission.leave(at, &key);
                        left.wakers.into_iter().for_each(Waker::wake);
                        self.callers.remove(&caller);
                    }
                }
                Event::Expires => {
                    self.admission.expire(at).into_iter().for_each(Waker::wake);
                }
            }
            loop {
                let woken = std::mem::take(&mut *self.woken.lock().expect("no panic"));
                if woken.is_empty() {
                    break;
                }
                woken.into_iter().for_each(|caller| self.looks(caller));
            }
        }
        self.answers
    }

    fn comes(&mut self, share: usize) {
        let next = self.now + self.about(self.loads[share].every);
        self.events.push(Reverse((next, Event::Comes { share })));
        let caller = self.came;
        self.came += 1;
        let deadline = (self.says == Says::ItsDeadline).then_some(self.now + PATIENCE);
        let patience = Patience::UpToTheLimit;
        let share_of = share.min(self.shares - 1);
        let ask = Ask { class: Class::Normal, share: share_of, weight: 1, deadline, patience };
        let (entered, wakers) = self.admission.enter(self.now, ask);
        wakers.into_iter().for_each(Waker::wake);
        self.callers.insert(caller, Caller { came: self.now, share, key: None });
        match entered {
            Entered::In(Granted { number: permit, .. }) => self.runs(permit, caller),
            Entered::Waits(key) => {
                self.callers.get_mut(&caller).expect("it came").key = Some(key);
                let gives_up = self.now + PATIENCE;
                let event = match self.says {
                    Says::Nothing => Event::GivesUp { caller },
                    Says::ItsDeadline => Event::Expires,
                };
                self.events.push(Reverse((gives_up, event)));
                self.looks(caller);
            }
            Entered::Refused(refusal) => {
                assert!(matches!(refusal, NoPermit::Late { .. }), "{refusal:?}");
                self.answers[share].refused_at_once += 1;
                self.callers.remove(&caller);
            }
        }
    }

    fn looks(&mut self, caller: usize) {
        let Some(Caller { came, share, key: Some(key) }) = self.callers.get_mut(&caller) else {
            return;
        };
        let (came, share) = (*came, *share);
        let waker = Waker::from(Arc::new(Bell(caller, self.woken.clone())));
        match self.admission.poll(key, waker).0 {
            Waited::Wait => {}
            Waited::In(Granted { number: permit, .. }) => {
                self.callers.get_mut(&caller).expect("it came").key = None;
                self.runs(permit, caller);
            }
            Waited::Refused(_) => {
                let answers = &mut self.answers[share];
                answers.told_later += 1;
                answers.longest_wait = answers.longest_wait.max(self.now - came);
                self.callers.remove(&caller);
            }
        }
    }

    /// Puts its kernel behind the others.
    fn runs(&mut self, permit: usize, caller: usize) {
        let kernel = self.loads[self.callers[&caller].share].kernel;
        let takes = self.about(kernel) + std::mem::take(&mut self.first_takes);
        self.device_free_at = self.device_free_at.max(self.now) + takes;
        self.events.push(Reverse((self.device_free_at, Event::Completes { permit, caller })));
    }
}

/// What part of its time the device worked for answers that came in time: 100 in a second are all that 10 ms each allow.
fn goodput(kernel: u64, over: u64, says: Says) -> (f64, Answers) {
    const SECONDS: u64 = 10;
    let loads = [Load { every: kernel / over, kernel }];
    let answers = Simulation::new(&loads, &ONE, says).run(SECONDS * 1000 * MS);
    let capacity = SECONDS * 1000 * MS / kernel;
    (answers[0].in_time.len() as f64 / capacity as f64, answers[0].clone())
}

/// Without deadlines the queue is as long as callers are patient, and permits go to those that are about to give up.
#[test]
fn overload_costs_no_goodput() {
    for over in [2, 5, 25, 50] {
        let (fifo, _) = goodput(10 * MS, over, Says::Nothing);
        assert!(fifo < 0.3, "{over}x, deadlines unknown: {fifo}");
        let (known, answers) = goodput(10 * MS, over, Says::ItsDeadline);
        assert!(known >= 0.95, "{over}x, deadlines known: {known}");
        let done = answers.in_time.len() + answers.late;
        assert!(answers.late * 50 <= done, "{over}x: {} of {done} late", answers.late);
    }
}

/// All permits together hold kernels for longer than callers are patient: fewer are taken.
#[test]
fn too_many_permits_cost_little_goodput() {
    for over in [1, 5, 25] {
        let (known, _) = goodput(100 * MS, over, Says::ItsDeadline);
        assert!(known >= 0.75, "{over}x: {known}");
    }
}

/// Clients that ask again as soon as they are answered, and a while after a refusal.
struct Loops {
    clients: usize,
    permits: u64,
    weight: u32,
    /// How many the device runs at once.
    at_once: usize,
    /// What each takes there.
    takes: std::ops::Range<u64>,
    patience: u64,
    again_after: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LoopEvent {
    Completes { permit: usize },
    Asks,
    Expires,
}

impl Loops {
    /// What comes of it in so many seconds.
    fn run(&self, seconds: u64, mut random: u64) -> LoopAnswers {
        let mut admission = Admission::new(self.permits, 10_000, [Class::Normal], ONE);
        let mut free_at = vec![0; self.at_once];
        let mut events = BinaryHeap::new();
        events.extend((0..self.clients).map(|client| Reverse((0, LoopEvent::Asks, client))));
        let mut waiting: Vec<Option<Waiting>> = (0..self.clients).map(|_| None).collect();
        let mut came = vec![0; self.clients];
        let mut answers = LoopAnswers::default();
        while let Some(Reverse((now, event, client))) = events.pop()
            && now < seconds * 1000 * MS
        {
            let mut ended = Vec::new();
            match event {
                LoopEvent::Completes { permit } => {
                    let took = now - came[client];
                    match took <= self.patience {
                        true => answers.in_time += 1,
                        false => answers.late += 1,
                    }
                    answers.slowest = answers.slowest.max(took);
                    drop(admission.give_back(now, permit));
                    events.push(Reverse((now, LoopEvent::Asks, client)));
                }
                LoopEvent::Asks => {
                    came[client] = now;
                    let deadline = Some(now + self.patience);
                    let ask = plain(Class::Normal, Patience::UpToTheLimit);
                    match admission.enter(now, Ask { deadline, weight: self.weight, ..ask }).0 {
                        Entered::In(Granted { number: permit, .. }) => {
                            ended.push((client, Some(permit)))
                        }
                        Entered::Refused(_) => ended.push((client, None)),
                        Entered::Waits(key) => waiting[client] = Some(key),
                    }
                    events.push(Reverse((now + self.patience, LoopEvent::Expires, client)));
                }
                LoopEvent::Expires => drop(admission.expire(now)),
            }
            for (client, waits) in waiting.iter_mut().enumerate() {
                let Some(key) = &*waits else { continue };
                match admission.poll(key, Waker::noop().clone()).0 {
                    Waited::Wait => continue,
                    Waited::In(Granted { number: permit, .. }) => {
                        ended.push((client, Some(permit)))
                    }
                    Waited::Refused(_) => ended.push((client, None)),
                }
                *waits = None;
            }
            for (client, permit) in ended {
                let Some(permit) = permit else {
                    answers.refused += 1;
                    let again_at = now + self.again_after;
                    events.push(Reverse((again_at, LoopEvent::Asks, client)));
                    continue;
                };
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let takes = self.takes.start + (random >> 33) % (self.takes.end - self.takes.start);
                let free_at = free_at.iter_mut().min().expect("one at least");
                *free_at = now.max(*free_at) + takes;
                events.push(Reverse((*free_at, LoopEvent::Completes { permit }, client)));
            }
        }
        answers
    }
}

#[derive(Default)]
struct LoopAnswers {
    in_time: u64,
    late: u64,
    refused: u64,
    slowest: u64,
}

/// What is refused while all can be in time is answers that are missing: whether the device runs one after the other or
/// both at once, and whether one waits for the other's permits or not.
#[test]
fn nobody_is_refused_who_can_be_in_time() {
    for (at_once, weight, again_ms, random) in [1, 2].into_iter().flat_map(|at_once| {
        let with = move |weight| [1, 125, 1000].map(|again| (at_once, weight, again, again + 7));
        [1, 2].into_iter().flat_map(with)
    }) {
        let takes = 300 * MS..500 * MS;
        let (patience, again_after) = (1000 * MS, again_ms * MS);
        let loops = Loops { clients: 2, permits: 2, weight, at_once, takes, patience, again_after };
        let LoopAnswers { in_time, late, refused, .. } = loops.run(100, random);
        let capacity = if weight == 1 { 250 * at_once as u64 } else { 250 };
        assert_eq!((late, refused), (0, 0), "{at_once} at once, weight {weight}");
        assert!(in_time * 20 >= capacity * 19, "{in_time} of {capacity}");
    }
}

/// Below its capacity it refuses next to nobody.
#[test]
fn nobody_is_refused_without_overload() {
    let kernel = 10 * MS;
    let loads = [Load { every: kernel * 5 / 4, kernel }];
    let answers = &Simulation::new(&loads, &ONE, Says::ItsDeadline).run(20_000 * MS)[0];
    assert_eq!((answers.refused_at_once, answers.told_later, answers.late), (0, 0, 0));
}

/// Whoever cannot be answered learns so long before its patience ends.
#[test]
fn refusals_come_early() {
    let (_, answers) = goodput(10 * MS, 25, Says::ItsDeadline);
    assert!(answers.longest_wait < PATIENCE, "{}", answers.longest_wait);
    let told = answers.refused_at_once + answers.told_later;
    assert!(told > 10_000, "{told}");
    let mut in_time = answers.in_time;
    in_time.sort_unstable();
    // Newest first: those that are answered did not wait in vain.
    let p50 = in_time[in_time.len() / 2];
    assert!(p50 < PATIENCE / 2, "{p50}");
}

/// One that takes 40 times as long as any patience: the estimate is wrong afterwards, and mends.
#[test]
fn a_slow_request_locks_nobody_out() {
    for over in [1, 5, 25] {
        let kernel = 10 * MS;
        let loads = [Load { every: kernel / over, kernel }];
        let mut simulation = Simulation::new(&loads, &ONE, Says::ItsDeadline);
        simulation.first_takes = 10_000 * MS;
        let answers = &simulation.run(20_000 * MS)[0];
        // Ten seconds are left, and a while to learn.
        assert!(answers.in_time.len() >= 900, "{over}x: {}", answers.in_time.len());
    }
}

/// A first request that loads and compiles, and then bursts with pauses, which have all the permits that they need.
#[test]
fn a_slow_first_request_is_soon_forgotten() {
    let mut admission = Admission::new(4, 10_000, [Class::Normal], ONE);
    let ask = plain(Class::Normal, Patience::UpToTheLimit);
    let Entered::In(Granted { number: first, .. }) = admission.enter(0, ask).0 else {
        panic!("it is free")
    };
    let mut now = 2000 * MS;
    drop(admission.give_back(now, first));
    let (mut served, mut refused) = (0, 0);
    for _ in 0..50 {
        let mut held = Vec::new();
        for _ in 0..4 {
            let deadline = Some(now + 200 * MS);
            match admission.enter(now, Ask { deadline, ..ask }).0 {
                Entered::In(Granted { number: permit, .. }) => held.push(permit),
                Entered::Refused(_) => refused += 1,
                Entered::Waits(_) => panic!("there are permits"),
            }
        }
        for (at, permit) in held.into_iter().enumerate() {
            served += 1;
            drop(admission.give_back(now + (at as u64 + 1) * 5 * MS, permit));
        }
        now += 100 * MS;
    }
    assert!(refused <= 12, "{refused} refused, {served} served");
}

/// One that asks for three times what the device can do, beside one that asks for a twentieth of it.
#[test]
fn a_greedy_share_starves_nobody() {
    const SECONDS: u64 = 60;
    let small_every = 20 * MS;
    let loads =
        [Load { every: 100 * MS / 3, kernel: 100 * MS }, Load { every: small_every, kernel: MS }];
    // What part of the small ones is answered in time, in percent, and by when 99 of 100 of these are.
    let small = |shares: &[ShareLimits]| {
        let simulation = Simulation::new(&loads, shares, Says::ItsDeadline);
        let mut in_time = simulation.run(SECONDS * 1000 * MS).remove(1).in_time;
        in_time.sort_unstable();
        let came = SECONDS * 1000 * MS / small_every;
        (in_time.len() as u64 * 100 / came, in_time[in_time.len() * 99 / 100])
    };
    let half = ShareLimits { part: 1, limit: u64::MAX };
    let (together, _) = small(&ONE);
    let (halves, _) = small(&[half, half]);
    // One of the big ones is on the device: half as long again as on average at most.
    let (bounded, p99) = small(&[ShareLimits { part: 1, limit: 1 }, half]);
    assert!(together < 50, "{together} %");
    assert!(halves > 2 * together, "{halves} %");
    assert!(bounded >= 99 && p99 < 200 * MS, "{bounded} %, {p99} ns");
}

/// Its time was enough when it came, and is not when the permit does: that goes to the next.
#[test]
fn a_permit_goes_to_who_can_use_it() {
    let mut admission = Admission::new(1, usize::MAX, [Class::Normal], ONE);
    let ask = |deadline| Ask { deadline, ..plain(Class::Normal, Patience::UpToTheLimit) };
    let (Entered::In(Granted { number: first, .. }), _) = admission.enter(0, ask(None)) else {
        panic!("empty")
    };
    drop(admission.give_back(100 * MS, first));
    let (Entered::In(Granted { number: second, .. }), _) = admission.enter(100 * MS, ask(None))
    else {
        panic!("free")
    };
    let deadline = Some(450 * MS);
    let (Entered::Waits(late), _) = admission.enter(100 * MS, ask(deadline)) else {
        panic!("it has time for three")
    };
    let (Entered::Waits(next), _) = admission.enter(100 * MS, ask(None)) else { panic!("taken") };
    drop(admission.give_back(400 * MS, second));
    let look = |admission: &mut Admission, key: &_| admission.poll(key, Waker::noop().clone()).0;
    let Waited::Refused(NoPermit::Expired { waited_ns, remaining_ns, takes_ns }) =
        look(&mut admission, &late)
    else {
        panic!("it would be late")
    };
    assert_eq!((waited_ns, remaining_ns), (300 * MS, 50 * MS));
    assert!(takes_ns > remaining_ns);
    assert!(matches!(look(&mut admission, &next), Waited::In(_)));
}

/// Two that always want more: one whose permits are held three times as long gets a third as many, and
/// twice that with twice the part.
#[test]
fn shares_divide_the_time() {
    for (part, expected) in [(1, 3.0), (2, 1.5)] {
        let of = |part| ShareLimits { part, limit: u64::MAX };
        let mut admission = Admission::new(1, usize::MAX, [Class::Normal], [of(part), of(1)]);
        let held = [30 * MS, 10 * MS];
        let mut now = 0;
        let mut waiting = Vec::new();
        let wait = |admission: &mut Admission, now, share| {
            let ask = Ask { share, ..plain(Class::Normal, Patience::UpToTheLimit) };
            match admission.enter(now, ask).0 {
                Entered::In(Granted { number: permit, .. }) => Ok(permit),
                Entered::Waits(key) => Err(key),
                Entered::Refused(refusal) => panic!("{refusal:?}"),
            }
        };
        let Ok(mut permit) = wait(&mut admission, 0, 0) else { panic!("empty") };
        let (mut share, mut granted) = (0, [0u32; 2]);
        for other in [0, 0, 1, 1] {
            waiting.push((other, wait(&mut admission, 0, other).expect_err("taken")));
        }
        for _ in 0..400 {
            now += held[share];
            granted[share] += 1;
            // Another one of it waits before the permit is released.
            waiting.push((share, wait(&mut admission, now, share).expect_err("taken")));
            drop(admission.give_back(now, permit));
            let next = waiting.iter().position(|(_, key)| {
                match admission.poll(key, Waker::noop().clone()).0 {
                    Waited::In(Granted { number: given, .. }) => {
                        permit = given;
                        true
                    }
                    _ => false,
                }
            });
            share = waiting.remove(next.expect("somebody has it")).0;
        }
        let ratio = f64::from(granted[1]) / f64::from(granted[0]);
        assert!((ratio / expected - 1.0).abs() < 0.1, "{granted:?}");
    }
}

/// The queue of those who wait as long as it takes is FIFO, however long it stands.
#[test]
fn without_deadlines_there_is_no_overload() {
    let mut admission = Admission::new(1, usize::MAX, [Class::Normal], ONE);
    let ask = |deadline| Ask { deadline, ..plain(Class::Normal, Patience::UpToTheLimit) };
    let (Entered::In(Granted { number: mut permit, .. }), _) = admission.enter(0, ask(None)) else {
        panic!("empty")
    };
    let mut now = 0;
    let mut keys = std::collections::VecDeque::new();
    for _ in 0..60 {
        let (Entered::Waits(key), _) = admission.enter(now, ask(None)) else { panic!("taken") };
        keys.push_back(key);
    }
    for round in 0..50 {
        now += 10 * MS;
        drop(admission.give_back(now, permit));
        let oldest = keys.pop_front().expect("they wait");
        let Waited::In(Granted { number: next, .. }) =
            admission.poll(&oldest, Waker::noop().clone()).0
        else {
            panic!("{round}: another one was admitted")
        };
        permit = next;
    }
    assert!(!admission.is_overloaded(now, 0));
    // One with a deadline that comes now is behind all of them.
    let (Entered::Waits(hurried), _) = admission.enter(now, ask(Some(now + 10_000 * MS))) else {
        panic!("taken")
    };
    now += 10 * MS;
    drop(admission.give_back(now, permit));
    assert_eq!(admission.poll(&hurried, Waker::noop().clone()).0, Waited::Wait);
    let oldest = keys.pop_front().expect("they wait");
    assert!(matches!(admission.poll(&oldest, Waker::noop().clone()).0, Waited::In(_)));
}

/// Twice as many come as can be answered, each with a second of patience.
#[test]
fn under_overload_the_newest_goes_first() {
    let mut admission = Admission::new(1, usize::MAX, [Class::Normal], ONE);
    let mut now = 0;
    let ask = |admission: &mut Admission, now| {
        let deadline = Some(now + 1000 * MS);
        admission.enter(now, Ask { deadline, ..plain(Class::Normal, Patience::UpToTheLimit) }).0
    };
    let Entered::In(Granted { number: mut permit, .. }) = ask(&mut admission, now) else {
        panic!("empty")
    };
    let mut keys = Vec::new();
    let mut order = Vec::new();
    for _ in 0..300 {
        for _ in 0..2 {
            if let Entered::Waits(key) = ask(&mut admission, now) {
                keys.push(key);
            }
        }
        now += 10 * MS;
        drop(admission.give_back(now, permit));
        let mut called = None;
        let mut waiting = Vec::new();
        for key in keys.drain(..) {
            match admission.poll(&key, Waker::noop().clone()).0 {
                Waited::Wait => waiting.push(key),
                Waited::In(Granted { number: next, .. }) => {
                    permit = next;
                    called = Some(waiting.len());
                }
                Waited::Refused(_) => {}
            }
        }
        keys = waiting;
        order.push((called.expect("one is called"), keys.len()));
    }
    let turned = order.iter().position(|(called, _)| *called > 0).expect("it is overload");
    // Who is admitted after n times 10 ms came after half of that. Oldest first until that is half a second, and for an interval.
    assert!((108..=114).contains(&turned), "{turned}");
    assert!(order[turned..].iter().all(|(called, last)| called == last), "{order:?}");
    // As many are left as can be answered in a quarter of a second: over.
    while admission.is_overloaded(now, 0) {
        assert!(keys.len() > 20, "{}", keys.len());
        now += 10 * MS;
        drop(admission.give_back(now, permit));
        let mut waiting = Vec::new();
        for key in keys.drain(..) {
            match admission.poll(&key, Waker::noop().clone()).0 {
                Waited::Wait => waiting.push(key),
                Waited::In(Granted { number: next, .. }) => permit = next,
                Waited::Refused(_) => {}
            }
        }
        keys = waiting;
    }
}

/// 256 clients, each with a second of patience, that are all answered in less than a tenth of one. The queue is never empty.
#[test]
fn clients_in_a_loop_starve_nobody() {
    let takes = MS / 10..MS / 2;
    let (patience, again_after) = (1000 * MS, MS / 10);
    let (clients, permits, weight, at_once) = (256, 16, 1, 1);
    let loops = Loops { clients, permits, weight, at_once, takes, patience, again_after };
    let answers = loops.run(2, 7);
    assert_eq!((answers.late, answers.refused), (0, 0));
    assert!(answers.in_time > 6_000, "{}", answers.in_time);
    assert!(answers.slowest < 200 * MS, "{}", answers.slowest);
}
