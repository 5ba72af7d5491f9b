//! Admission: which requests get a permit, on which slot, which wait, and which are refused (pure). The clock is the caller's: times are
//! nanoseconds since an epoch of its choice.
//!
//! A request weighs one permit or more, has a class (high priority or normal) and counts for one of the pool's shares. One limit bounds all
//! permits; a share may have a limit of its own. Requests beyond the limits wait. Each slot belongs to one of the two classes.
//!
//! | a waiter is | left by |
//! |---|---|
//! | waiting | a permit, a refusal, the end of all slots, the close, its drop |
//! | ended: it has a permit, or was refused as too late or past its deadline | learning of it; its drop, which passes a permit on |
//!
//! The outcome of a wait is in a cell shared with the request, so that it is learned without the lock around all of this, which every request takes
//! anyway when it enters and when its permit comes back.
//!
//! When permits are available, the next request is chosen by:
//!
//! 1. class: high priority, except for every ninth;
//! 2. share: the one that used the least, in permit time relative to its weight;
//! 3. age within the lane of that class and share: the oldest or, under overload, the newest with a deadline, if the oldest has one too.
//!
//! Overload is detected as in CoDel (Nichols and Jacobson, "Controlling queue delay", 2012): for a whole `INTERVAL_NS` each request with
//! a deadline waited longer than a target, half of its time. It ends when the queue is empty, or so short that a request at its end would
//! wait for less than a quarter of its time: closed-loop clients keep a queue that is never empty. (At x times the capacity, newest first,
//! the queue grows to (x - 1) / x of the time: overload persists from 4/3 times on.) Serving the newest first spends no permits on requests
//! that are about to expire: under overload some expire in any case, and the oldest have the least time left.
//!
//! A deadline is that of the answer: a request that gets a permit at t is answered at t plus the time that permits take. If the last
//! request of a lane cannot make its deadline (given the requests before it and recent permit times), it is refused: the newcomer while the
//! oldest go first, the oldest under overload. No permit, free or released, goes to a request that would be late, so fewer are taken where
//! all of them together would keep the device busy for longer than callers wait. A share that holds no permit is exempt: the estimate can
//! be wrong, and only permits correct it. How cautious the estimate is depends on how many requests are late: see [`service_times`](super::service_times).
//!
//! # Invariants
//! 1. At most `limit` permits are taken, and at most a share's own limit for that share (`never_more_than_the_limit`).
//! 2. A request waits only if it does not fit, or the next in line does not (`nobody_waits_beside_a_free_permit`).
//! 3. Within a lane requests are admitted in FIFO order while there is no overload (`first_come_first_served_within_a_class`).
//! 4. After [`OVERTAKES`] requests of high priority in a row, a waiting request of normal priority is admitted
//!    (`high_priority_does_not_starve_the_others`).
//! 5. A permit goes to the slot of its class that has the fewest permits (`the_least_loaded_slot_is_taken`).
//! 6. No request is granted a permit after its deadline, and none waits past it (`nobody_is_admitted_past_its_deadline`).
//! 7. At several times its capacity a pool answers in time about as much as it can (`overload_costs_no_goodput`), whatever permits took
//!    before (`a_slow_request_locks_nobody_out`).
//! 8. There is no overload without deadlines (`without_deadlines_there_is_no_overload`), and none where all can be answered in time,
//!    however many wait (`clients_in_a_loop_starve_nobody`).
//! 9. A share with little demand is served beside one with unlimited demand (`a_greedy_share_starves_nobody`), and shares with unlimited
//!    demand divide the time by their weights (`shares_divide_the_time`).
//! 10. No request is refused early as long as all are in time (`nobody_is_refused_who_can_be_in_time`).
//! 11. No permit goes to a request that would be late (`a_permit_goes_to_who_can_use_it`).
//!
//! More than 500 lines: one state, and the few decisions that change it.
#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, OnceLock};
use std::task::Waker;

use slab::Slab;
use smallvec::SmallVec;

use super::cancellable_queues::CancellableQueues;
use super::service_times::ServiceTimes;

/// Requests of high priority that overtake one of normal priority, in a row.
pub const OVERTAKES: u32 = 8;

/// How long every request must have waited too long before that counts as overload. CoDel's 100 ms: longer than a burst
/// that passes by itself, shorter than people's patience.
const INTERVAL_NS: u64 = 100_000_000;

/// How many deadlines of requests that no longer wait are kept, beyond as many as do wait.
const STALE_DEADLINES: usize = 64;

/// What to wake when the lock is released.
pub type Wakers = SmallVec<[Waker; 2]>;

/// Which queue a request waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Behind the other class.
    Normal,
    /// Ahead of the other class.
    High,
}

/// A request for permits.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Its queue.
    pub class: Class,
    /// Which share it counts for.
    pub share: usize,
    /// How many permits it takes: at least 1, at most the number that exists.
    pub weight: u32,
    /// The deadline of its answer.
    pub deadline: Option<u64>,
    /// Whether it may wait.
    pub patience: Patience,
}

/// Whether a request may wait, given how many do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// It is refused unless a permit is free.
    Never,
    /// It waits unless the limit of waiting requests is reached.
    UpToTheLimit,
    /// It waits, however many do.
    Always,
}

/// The limits of a share.
#[derive(Clone, Copy, Debug)]
pub struct ShareLimits {
    /// Its weight in dividing permit time while other shares wait as well; at least 1.
    pub part: u32,
    /// Permits that it may have at once.
    pub limit: u64,
}

/// The outcome of asking for admission.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum Entered {
    /// It has a permit.
    In(Granted),
    /// Nothing is free.
    Waits(Waiting),
    /// It gets none.
    Refused(NoPermit),
}

/// The outcome of a wait.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum Waited {
    /// The wait continues.
    Wait,
    /// It has a permit.
    In(Granted),
    /// It gets none.
    Refused(NoPermit),
}

/// A permit, or several of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Identifies it.
    pub number: usize,
    /// The slot that it belongs to.
    pub slot: usize,
    /// How many permits it is.
    pub weight: u32,
}

/// A request that waits, or did.
#[derive(Debug, PartialEq, Eq)]
pub struct Waiting {
    key: Key,
    outcome: Arc<Outcome>,
}

/// The outcome of a wait, from its end on.
type Outcome = OnceLock<Result<Granted, NoPermit>>;

/// The remains of a dropped waiter, to be handled after the lock is released.
#[derive(Debug)]
#[must_use]
pub struct Left {
    /// To be woken.
    pub wakers: Wakers,
    /// A waker to be dropped.
    pub stale: Option<Waker>,
    /// Its refusal, if it had not learned of it yet.
    pub refusal: Option<NoPermit>,
}

/// Why there is no permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPermit {
    /// Too many wait already, or it was not to wait.
    Full,
    /// With `remaining_ns` left, it would have waited another `expected_ns` and been late: it is then likely to take
    /// `takes_ns`.
    Late {
        /// Time left until its deadline.
        remaining_ns: u64,
        /// Time that it would still have waited.
        expected_ns: u64,
        /// Likely time on the device.
        takes_ns: u64,
    },
    /// Its deadline passed, or is nearer than the time that it is likely to take.
    Expired {
        /// Time waited so far.
        waited_ns: u64,
        /// Time left until its deadline.
        remaining_ns: u64,
        /// Likely time on the device.
        takes_ns: u64,
    },
    /// No slot is left.
    Gone,
    /// The pool is closed.
    Closed,
}

/// Identifies a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    lane: usize,
    hurried: bool,
    came: u64,
    place: usize,
}

#[derive(Debug)]
struct Waiter {
    lane: usize,
    hurried: bool,
    came: u64,
    weight: u32,
    /// `u64::MAX` if there is none.
    deadline: u64,
    since: u64,
    waker: Option<Waker>,
    outcome: Arc<Outcome>,
}

/// The outcomes of requests so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// Permits given.
    pub granted: u64,
    /// Of those, the ones that gave their permit back after their deadline.
    pub late: u64,
    /// Refused, because too many waited, or because they could not be answered in time.
    pub refused: u64,
    /// Of those, the ones that could not be answered in time.
    pub refused_early: u64,
    /// Requests that waited until it was too late.
    pub expired: u64,
    /// Requests that were refused because there is no slot, or the pool is closed.
    pub closed: u64,
    /// Requests that were dropped while they waited.
    pub given_up: u64,
}

#[derive(Debug)]
struct Share {
    limits: ShareLimits,
    outcomes: Outcomes,
    taken: u64,
    took: ServiceTimes,
    /// The time that its permits were held, divided by its part; raised if it went without while others did not.
    used_ns: u64,
    /// Since when every admitted request had waited too long.
    standing: Option<u64>,
}

#[derive(Debug)]
struct PermitSlot {
    class: Class,
    taken: u64,
    usable: bool,
}

/// A permit that is taken.
#[derive(Debug)]
struct Grant {
    slot: usize,
    share: usize,
    weight: u32,
    since: u64,
    /// `u64::MAX` if there is none.
    deadline: u64,
    /// Permits that were taken at that time, its own included.
    in_flight: u64,
    /// The share's charge in advance.
    charged_ns: u64,
}

/// Who has a permit, and who waits for one.
#[derive(Debug)]
pub struct Admission {
    limit: u64,
    /// Per share.
    max_waiting: usize,
    slots: Vec<PermitSlot>,
    shares: Vec<Share>,
    /// Two lines for each lane: those without a deadline, and those with one. Two lanes for each share: normal, high.
    waiters: CancellableQueues<Waiter>,
    /// The weight of the waiting requests of each lane.
    weights: Vec<u64>,
    grants: Slab<Grant>,
    /// The weight of all grants: sums of `u32`s that are in memory do not overflow.
    taken: u64,
    waiting: usize,
    /// The waiters with a deadline, the earliest first, and some that no longer wait.
    deadlines: BinaryHeap<Reverse<(u64, Key)>>,
    /// The number of requests that ever waited: the next key.
    came: u64,
    /// High-priority requests admitted since the last normal one, while a normal one waited.
    overtaken: u32,
    /// The usage of the share admitted last: a share that returns from idling starts there.
    used_ns: u64,
    closed: bool,
}

impl Admission {
    /// Admission to slots of these classes, for these shares.
    pub fn new(
        limit: u64,
        max_waiting: usize,
        slots: impl IntoIterator<Item = Class>,
        shares: impl IntoIterator<Item = ShareLimits>,
    ) -> Self {
        let slot = |class| PermitSlot { class, taken: 0, usable: true };
        let share = |limits| Share {
            limits,
            outcomes: Outcomes::default(),
            taken: 0,
            took: ServiceTimes::default(),
            used_ns: 0,
            standing: None,
        };
        let shares: Vec<_> = shares.into_iter().map(share).collect();
        Admission {
            limit,
            max_waiting,
            slots: slots.into_iter().map(slot).collect(),
            waiters: CancellableQueues::new(4 * shares.len()),
            weights: vec![0; 2 * shares.len()],
            shares,
            grants: Slab::new(),
            taken: 0,
            waiting: 0,
            deadlines: BinaryHeap::new(),
            came: 0,
            overtaken: 0,
            used_ns: 0,
            closed: false,
        }
    }

    /// Asks for admission at `now`.
    pub fn enter(&mut self, now: u64, mut ask: Ask) -> (Entered, Wakers) {
        let mut wakers = Wakers::new();
        let ended = match (self.closed, self.is_gone()) {
            (true, _) => Some(NoPermit::Closed),
            (false, true) => Some(NoPermit::Gone),
            (false, false) => None,
        };
        if let Some(refusal) = ended {
            return (Entered::Refused(self.refuse(ask.share, refusal)), wakers);
        }
        if ask.deadline.is_some_and(|deadline| deadline <= now) {
            let takes_ns = self.shares[ask.share].took.likely_ns(self.taken);
            let expired = NoPermit::Expired { waited_ns: 0, remaining_ns: 0, takes_ns };
            return (Entered::Refused(self.refuse(ask.share, expired)), wakers);
        }
        let share = &mut self.shares[ask.share];
        let most = self.limit.min(share.limits.limit);
        ask.weight = ask.weight.clamp(1, u32::try_from(most).unwrap_or(u32::MAX));
        let lane = lane(ask.class, ask.share);
        if share.taken == 0 && self.waiting_of(ask.share) == 0 {
            // Time that a share did not use while idle is not made up for.
            let share = &mut self.shares[ask.share];
            share.used_ns = share.used_ns.max(self.used_ns);
        }
        if let Some(refusal) = self.is_hopeless(now, ask) {
            return (Entered::Refused(self.refuse(ask.share, refusal)), wakers);
        }
        if self.waiting == 0 && self.fits(ask.share, ask.weight) {
            let granted = self.grant(now, ask.class, ask.share, ask.weight, ask.deadline);
            return (Entered::In(granted), wakers);
        }
        // The requests that it would overtake wait for something that this one does not need.
        let waiting = self.push(now, lane, ask);
        self.admit(now, &mut wakers);
        if self.waiter(waiting.key).is_some() {
            self.bound(now, waiting.key, ask.patience, &mut wakers);
        }
        let entered = match waiting.outcome() {
            Some(Ok(granted)) => Entered::In(granted),
            Some(Err(refusal)) => Entered::Refused(refusal),
            None => Entered::Waits(waiting),
        };
        (entered, wakers)
    }

    /// Looks up the outcome of a wait, and leaves `waker` for it. The other returned values are to be dropped outside of the lock.
    pub fn poll(&mut self, waiting: &Waiting, waker: Waker) -> (Waited, Option<Waker>) {
        match waiting.outcome() {
            Some(Ok(granted)) => return (Waited::In(granted), Some(waker)),
            Some(Err(refusal)) => return (Waited::Refused(refusal), Some(waker)),
            None => {}
        }
        let key = waiting.key;
        let refusal = match (self.closed, self.is_gone()) {
            (true, _) => NoPermit::Closed,
            (false, true) => NoPermit::Gone,
            (false, false) => {
                let mut waker = Some(waker);
                self.leave_waker(waiting, &mut waker);
                return (Waited::Wait, waker);
            }
        };
        let stale = self.remove(key);
        let refusal = self.refuse(share_of(key.lane), refusal);
        (Waited::Refused(refusal), stale)
    }

    /// Leaves a waker with a waiter, and hands out the one that was there.
    pub fn leave_waker(&mut self, waiting: &Waiting, waker: &mut Option<Waker>) {
        if self.waiter(waiting.key).is_some()
            && let Some(waiter) = self.waiters.get_mut(waiting.key.place)
        {
            std::mem::swap(&mut waiter.waker, waker);
        }
    }

    /// Removes a waiter whose future is dropped. A permit already granted to it goes to the next waiter.
    pub fn leave(&mut self, now: u64, waiting: &Waiting) -> Left {
        let (refusal, stale) = match waiting.outcome() {
            Some(Ok(Granted { number, .. })) => {
                return Left { wakers: self.hand_back(now, number), stale: None, refusal: None };
            }
            Some(Err(refusal)) => (Some(refusal), None),
            None => {
                self.shares[share_of(waiting.key.lane)].outcomes.given_up += 1;
                (None, self.remove(waiting.key))
            }
        };
        let mut wakers = Wakers::new();
        // The removed waiter may have kept lighter ones waiting.
        self.admit(now, &mut wakers);
        Left { wakers, stale, refusal }
    }

    /// Takes back a permit on a slot that turned out to be gone, before the request learned of it: it asks again.
    pub fn revoke(&mut self, now: u64, permit: usize) -> Wakers {
        let share = self.grants[permit].share;
        self.shares[share].outcomes.granted -= 1;
        self.hand_back(now, permit)
    }

    /// [`give_back`](Self::give_back) of an unused permit: its holding time says nothing.
    pub fn hand_back(&mut self, now: u64, permit: usize) -> Wakers {
        let mut wakers = Wakers::new();
        let grant = self.release(permit);
        self.settle(&grant, 0);
        self.admit(now, &mut wakers);
        wakers
    }

    /// Takes a permit back; returns the wakers of the requests that have it now, or were refused as too late.
    pub fn give_back(&mut self, now: u64, permit: usize) -> Wakers {
        let mut wakers = Wakers::new();
        let grant = self.release(permit);
        let held_ns = now.saturating_sub(grant.since);
        let share = &mut self.shares[grant.share];
        share.took.add(grant.in_flight, held_ns);
        if grant.deadline < u64::MAX {
            let late = now > grant.deadline;
            share.outcomes.late += u64::from(late);
            share.took.judge(late);
        }
        self.settle(&grant, held_ns);
        self.admit(now, &mut wakers);
        wakers
    }

    /// Refuses the requests whose deadline is not after `now`; returns their wakers.
    pub fn expire(&mut self, now: u64) -> Wakers {
        let mut wakers = Wakers::new();
        while let Some(&Reverse((deadline, key))) = self.deadlines.peek()
            && (deadline <= now || self.waiter(key).is_none())
        {
            self.deadlines.pop();
            let takes_ns = self.shares[share_of(key.lane)].took.likely_ns(self.taken);
            self.expire_one(now, key, takes_ns, &mut wakers);
        }
        // An expired request may have kept lighter ones waiting.
        self.admit(now, &mut wakers);
        wakers
    }

    /// When to [`expire`](Self::expire): no later than the next deadline of a waiter.
    pub fn next_deadline(&self) -> Option<u64> {
        self.deadlines.peek().map(|Reverse((deadline, _))| *deadline)
    }

    /// Removes a slot permanently. Returns the wakers to wake: all of them if it was the last slot.
    pub fn lose(&mut self, slot: usize) -> Wakers {
        self.slots[slot].usable = false;
        if self.is_gone() { self.wake_all() } else { Wakers::new() }
    }

    /// Closes admission. Returns the wakers to wake.
    pub fn close(&mut self) -> Wakers {
        self.closed = true;
        self.wake_all()
    }

    /// How many permits there are.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// How many may wait.
    pub fn max_waiting(&self) -> usize {
        self.max_waiting
    }

    /// Permits taken.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Permits taken on a slot.
    pub fn taken_on(&self, slot: usize) -> u64 {
        self.slots[slot].taken
    }

    /// Permits taken by a share.
    pub fn taken_by(&self, share: usize) -> u64 {
        self.shares[share].taken
    }

    /// How many wait for a permit.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// How many of a share wait.
    pub fn waiting_of(&self, share: usize) -> usize {
        [Class::Normal, Class::High].map(|class| self.len_of(lane(class, share))).iter().sum()
    }

    /// The outcomes of a share's requests.
    pub fn outcomes_of(&self, share: usize) -> Outcomes {
        self.shares[share].outcomes
    }

    /// How long permits of a share took lately; `None` before the first came back.
    pub fn took_ns(&self, share: usize) -> Option<u64> {
        self.shares[share].took.mean_ns()
    }

    /// Whether the newest requests of this share go first.
    pub fn is_overloaded(&self, now: u64, share: usize) -> bool {
        let standing = self.shares[share].standing;
        standing.is_some_and(|since| now.saturating_sub(since) >= INTERVAL_NS)
    }

    /// Whether the slot has not been removed.
    pub fn is_usable(&self, slot: usize) -> bool {
        self.slots[slot].usable
    }

    fn is_gone(&self) -> bool {
        !self.slots.iter().any(|slot| slot.usable)
    }

    fn wake_all(&mut self) -> Wakers {
        self.waiters.iter_mut().filter_map(|waiter| waiter.waker.take()).collect()
    }

    /// Whether a request would be late if it were admitted now, judging by the share's recent permit times at this number
    /// in flight. Not asked while the share has no permit: see the module.
    fn is_hopeless(&self, now: u64, ask: Ask) -> Option<NoPermit> {
        let remaining_ns = ask.deadline?.saturating_sub(now);
        let share = &self.shares[ask.share];
        let takes_ns = share.took.likely_ns(self.taken + u64::from(ask.weight));
        let late = share.taken > 0 && takes_ns > remaining_ns;
        late.then_some(NoPermit::Late { remaining_ns, expected_ns: 0, takes_ns })
    }

    /// Counts a refusal.
    fn refuse(&mut self, share: usize, refusal: NoPermit) -> NoPermit {
        let outcomes = &mut self.shares[share].outcomes;
        match refusal {
            NoPermit::Full => outcomes.refused += 1,
            NoPermit::Late { .. } => {
                outcomes.refused += 1;
                outcomes.refused_early += 1;
            }
            NoPermit::Expired { .. } => outcomes.expired += 1,
            NoPermit::Gone | NoPermit::Closed => outcomes.closed += 1,
        }
        refusal
    }

    fn fits(&self, share: usize, weight: u32) -> bool {
        let (share, weight) = (&self.shares[share], u64::from(weight));
        self.taken + weight <= self.limit && share.taken + weight <= share.limits.limit
    }

    // ---- waiting requests -----------------------------------------------------------------------

    fn push(&mut self, now: u64, lane: usize, ask: Ask) -> Waiting {
        let (hurried, came) = (ask.deadline.is_some(), self.came);
        self.came += 1;
        let deadline = ask.deadline.unwrap_or(u64::MAX);
        let (weight, since, waker) = (ask.weight, now, None);
        let outcome = Arc::new(Outcome::new());
        let of_waiter = outcome.clone();
        let waiter =
            Waiter { lane, hurried, came, weight, deadline, since, waker, outcome: of_waiter };
        let place = self.waiters.push(line(lane, hurried), waiter);
        let key = Key { lane, hurried, came, place };
        self.weights[lane] += u64::from(weight);
        self.waiting += 1;
        if hurried {
            self.note_deadline(deadline, key);
        }
        Waiting { key, outcome }
    }

    /// Enters a deadline. It stays when the wait ends earlier, which is cheaper than searching for it: once most are stale, all stale ones are
    /// removed.
    fn note_deadline(&mut self, deadline: u64, key: Key) {
        if self.deadlines.len() > 2 * self.waiting + STALE_DEADLINES {
            let mut deadlines = std::mem::take(&mut self.deadlines);
            deadlines.retain(|Reverse((_, key))| self.waiter(*key).is_some());
            self.deadlines = deadlines;
        }
        self.deadlines.push(Reverse((deadline, key)));
    }

    /// The request of a key, while it waits.
    fn waiter(&self, key: Key) -> Option<&Waiter> {
        self.waiters.get(key.place).filter(|waiter| waiter.came == key.came)
    }

    /// Removes a request that waits; returns its waker.
    fn remove(&mut self, key: Key) -> Option<Waker> {
        self.end_wait(key).and_then(|waiter| waiter.waker)
    }

    fn end_wait(&mut self, key: Key) -> Option<Waiter> {
        self.waiter(key)?;
        let waiter = self.waiters.remove(key.place);
        let weight = waiter.weight;
        self.weights[key.lane] -= u64::from(weight);
        self.waiting -= 1;
        if self.waiting == 0 {
            self.deadlines.clear();
        }
        if self.waiting_of(share_of(key.lane)) == 0 {
            self.shares[share_of(key.lane)].standing = None;
        }
        Some(waiter)
    }

    fn end(&mut self, key: Key, outcome: Result<Granted, NoPermit>, wakers: &mut Wakers) {
        let Some(waiter) = self.end_wait(key) else { return };
        let told = waiter.outcome.set(outcome);
        debug_assert!(told.is_ok(), "a wait ends once");
        wakers.extend(waiter.waker);
    }

    fn len_of(&self, lane: usize) -> usize {
        self.waiters.len(line(lane, false)) + self.waiters.len(line(lane, true))
    }

    fn expire_one(&mut self, now: u64, key: Key, takes_ns: u64, wakers: &mut Wakers) {
        let Some(&Waiter { since, deadline, .. }) = self.waiter(key) else { return };
        let (waited_ns, remaining_ns) = (now.saturating_sub(since), deadline.saturating_sub(now));
        let expired = NoPermit::Expired { waited_ns, remaining_ns, takes_ns };
        let expired = self.refuse(share_of(key.lane), expired);
        self.end(key, Err(expired), wakers);
    }

    /// Refuses requests that exceed the limit, or cannot be answered in time, now that `key` waits as well.
    fn bound(&mut self, now: u64, key: Key, patience: Patience, wakers: &mut Wakers) {
        let share = share_of(key.lane);
        let newest_first = key.hurried && self.is_overloaded(now, share);
        // The request that is admitted last.
        let last = |admission: &Self| {
            let oldest = admission.waiters.first(line(key.lane, true)).filter(|_| newest_first);
            oldest.map_or(key, |(place, waiter)| waiter.key(place))
        };
        let refused = match patience {
            Patience::Never => Some(key),
            Patience::UpToTheLimit if self.waiting_of(share) > self.max_waiting => Some(last(self)),
            Patience::UpToTheLimit | Patience::Always => None,
        };
        if let Some(refused) = refused {
            let full = self.refuse(share, NoPermit::Full);
            self.end(refused, Err(full), wakers);
        }
        if !key.hurried || self.shares[share].took.mean_ns().is_none() {
            return;
        }
        let likely_ns = self.shares[share].took.likely_ns(self.taken);
        // Under overload the newcomer is first in line, so it is looked at first.
        let mut own = newest_first;
        loop {
            let last = if own { key } else { last(self) };
            let in_front = match (own, key.lane % 2) {
                (true, _) => 0,
                // High priority goes first.
                (false, 0) => self.weights[key.lane] + self.weights[key.lane + 1],
                (false, _) => self.weights[key.lane],
            };
            let Some(&Waiter { weight, deadline, .. }) = self.waiter(last) else { return };
            // Its own weight counts too: the sums above include it.
            let expected_ns = self.until_free_ns(share, in_front.max(u64::from(weight)));
            let remaining_ns = deadline.saturating_sub(now);
            if expected_ns.saturating_add(likely_ns) > remaining_ns {
                let late = NoPermit::Late { remaining_ns, expected_ns, takes_ns: likely_ns };
                let late = self.refuse(share, late);
                self.end(last, Err(late), wakers);
            } else if !own {
                return;
            }
            own = false;
        }
    }

    /// The permits that a share can count on beside the other shares with demand; at least 1.
    fn permits_of(&self, share: usize) -> u64 {
        let wants =
            |at: &usize| *at == share || self.shares[*at].taken > 0 || self.waiting_of(*at) > 0;
        let parts: u64 = (0..self.shares.len())
            .filter(wants)
            .map(|at| u64::from(self.shares[at].limits.part))
            .sum();
        let limits = self.shares[share].limits;
        // The limit is the user's, and may be the largest number.
        let of_all = self.limit as f64 * f64::from(limits.part) / parts as f64;
        (of_all as u64).min(limits.limit).max(1)
    }

    // ---- the order of admission -----------------------------------------------------------------

    /// Admits the next requests, as long as there are permits.
    fn admit(&mut self, now: u64, wakers: &mut Wakers) {
        if self.closed || self.is_gone() {
            return;
        }
        while self.waiting > 0
            && self.taken < self.limit
            && let Some(key) = self.next(now)
        {
            let share = share_of(key.lane);
            let Some(waiter) = self.waiter(key) else { return };
            let (weight, since, deadline) = (waiter.weight, waiter.since, waiter.deadline);
            let in_flight = self.taken + u64::from(weight);
            let likely_ns = self.shares[share].took.likely_ns(in_flight);
            if key.hurried && now.saturating_add(likely_ns) >= deadline {
                self.expire_one(now, key, likely_ns, wakers);
                continue;
            }
            if !self.fits(share, weight) {
                return;
            }
            self.overtakes(key);
            if key.hurried {
                self.waited(now, key, now.saturating_sub(since), deadline.saturating_sub(now));
            }
            let by = key.hurried.then_some(deadline);
            let granted = self.grant(now, class_of(key.lane), share, weight, by);
            self.end(key, Ok(granted), wakers);
        }
    }

    /// The next request, whether it fits or not; but never one of a share at its limit.
    fn next(&self, now: u64) -> Option<Key> {
        let of_class = |class| {
            let may = |share: &usize| self.next_in(now, lane(class, *share)).is_some();
            (0..self.shares.len()).filter(may).min_by_key(|share| self.shares[*share].used_ns)
        };
        let (high, normal) = (of_class(Class::High), of_class(Class::Normal));
        let (class, share) = match (high, normal) {
            (Some(_), Some(normal)) if self.overtaken == OVERTAKES => (Class::Normal, normal),
            (Some(high), _) => (Class::High, high),
            (None, normal) => (Class::Normal, normal?),
        };
        self.next_in(now, lane(class, share))
    }

    fn next_in(&self, now: u64, lane: usize) -> Option<Key> {
        let share = &self.shares[share_of(lane)];
        let patient = self.waiters.first(line(lane, false));
        let hurried = self.waiters.first(line(lane, true));
        let is_hurried = match (patient, hurried) {
            (Some((_, patient)), Some((_, hurried))) => hurried.came < patient.came,
            (patient, _) => patient.is_none(),
        };
        let (place, waiter) = if !is_hurried {
            patient?
        } else if self.is_overloaded(now, share_of(lane)) {
            self.waiters.last(line(lane, true))?
        } else {
            hurried?
        };
        let may = share.taken + u64::from(waiter.weight) <= share.limits.limit;
        may.then_some(waiter.key(place))
    }

    fn overtakes(&mut self, key: Key) {
        let is_waited_in = |lane: usize| self.len_of(lane) > 0;
        if class_of(key.lane) == Class::Normal {
            self.overtaken = 0;
        } else if (0..self.weights.len()).step_by(2).any(is_waited_in) && self.overtaken < OVERTAKES
        {
            self.overtaken += 1;
        }
    }

    /// Records that a request is admitted after this wait, with this much time left.
    fn waited(&mut self, now: u64, key: Key, waited_ns: u64, remaining_ns: u64) {
        let share = share_of(key.lane);
        let time_ns = waited_ns.saturating_add(remaining_ns);
        let is_late = if self.is_overloaded(now, share) {
            // Newest first, its own wait says nothing.
            self.until_free_ns(share, self.weights[key.lane]) > time_ns / 4
        } else {
            waited_ns > time_ns / 2
        };
        let standing = &mut self.shares[share].standing;
        if is_late {
            standing.get_or_insert(now);
        } else {
            *standing = None;
        }
    }

    /// How long until permits of this weight are free for a share, judging by its recent permit times.
    fn until_free_ns(&self, share: usize, weight: u64) -> u64 {
        let mean_ns = self.shares[share].took.mean_ns().unwrap_or(0);
        // A float that is too large for the integer becomes the largest.
        (weight as f64 * mean_ns as f64 / self.permits_of(share) as f64) as u64
    }

    /// Takes permits on the slot of the class with the fewest permits, the first of several: a stream that was used lately has memory to reuse, and
    /// is known. If the class has no slot, any other will do.
    fn grant(
        &mut self,
        now: u64,
        class: Class,
        share: usize,
        weight: u32,
        deadline: Option<u64>,
    ) -> Granted {
        let slots = || self.slots.iter().enumerate().filter(|(_, slot)| slot.usable);
        let has_class = slots().any(|(_, slot)| slot.class == class);
        let slot = slots()
            .filter(|(_, slot)| slot.class == class || !has_class)
            .min_by_key(|(_, slot)| slot.taken)
            .map_or(0, |(slot, _)| slot);
        self.taken += u64::from(weight);
        self.slots[slot].taken += u64::from(weight);
        let of = &mut self.shares[share];
        self.used_ns = self.used_ns.max(of.used_ns);
        // A minimum, so that shares alternate before the first permit came back.
        let charged_ns = of.charge(weight, of.took.mean_ns().unwrap_or(0)).max(1);
        of.outcomes.granted += 1;
        of.taken += u64::from(weight);
        of.used_ns = of.used_ns.saturating_add(charged_ns);
        let (in_flight, deadline) = (self.taken, deadline.unwrap_or(u64::MAX));
        let since = now;
        let grant = Grant { slot, share, weight, since, deadline, in_flight, charged_ns };
        Granted { number: self.grants.insert(grant), slot, weight }
    }

    fn release(&mut self, permit: usize) -> Grant {
        let grant = self.grants.remove(permit);
        let weight = u64::from(grant.weight);
        self.taken -= weight;
        self.slots[grant.slot].taken -= weight;
        self.shares[grant.share].taken -= weight;
        grant
    }

    /// Charges a share the actual time of its permit, instead of the expected one.
    fn settle(&mut self, grant: &Grant, held_ns: u64) {
        let share = &mut self.shares[grant.share];
        let owed_ns = share.charge(grant.weight, held_ns);
        share.used_ns = share.used_ns.saturating_add(owed_ns).saturating_sub(grant.charged_ns);
    }
}

impl Share {
    fn charge(&self, weight: u32, held_ns: u64) -> u64 {
        held_ns.saturating_mul(u64::from(weight)) / u64::from(self.limits.part)
    }
}

impl Waiting {
    /// The outcome of the wait; `None`: it continues.
    pub fn outcome(&self) -> Option<Result<Granted, NoPermit>> {
        self.outcome.get().copied()
    }
}

impl Waiter {
    fn key(&self, place: usize) -> Key {
        let &Waiter { lane, hurried, came, .. } = self;
        Key { lane, hurried, came, place }
    }
}

fn lane(class: Class, share: usize) -> usize {
    2 * share + usize::from(class == Class::High)
}

fn line(lane: usize, hurried: bool) -> usize {
    2 * lane + usize::from(hurried)
}

fn share_of(lane: usize) -> usize {
    lane / 2
}

fn class_of(lane: usize) -> Class {
    if lane.is_multiple_of(2) { Class::Normal } else { Class::High }
}
