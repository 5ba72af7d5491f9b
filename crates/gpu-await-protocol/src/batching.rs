//! When a batch is due, and which requests are in it (pure). The clock is the caller's, in nanoseconds.
//!
//! A batch is due before its requests are chosen: its runner first acquires what it needs (a permit and a stream), and then takes the
//! requests that are waiting. So batches grow while a permit is awaited, and contain no request that has been dropped.
//!
//! | waiting requests | and | then |
//! |---|---|---|
//! | as many as fill a batch, by count or weight | a batch may start | a batch is due |
//! | fewer | one has waited long enough (see below), or no further request can come | a batch is due |
//! | fewer | none of that | a batch is due later, or when more come |
//! | any | the limit on batches in flight is reached | they wait for one to end |
//! | none | none in flight, no further request can come | the batcher has finished |
//!
//! A request has waited long enough after `max_delay` (the oldest), after half of its time, or as long as its deadline allows. A deadline
//! is that of the answer, as in [`admission`](super::admission): a request that cannot be answered by then, judging by how long recent batches of
//! such a weight took, is refused when it arrives; one that waited too long is in no batch.
//!
//! # Invariants
//! 1. Within a priority requests are batched in FIFO order, and no batch exceeds `max_len`, or `max_weight` with more than one request
//!    (`batches_are_whole_and_in_order`), whatever requests weigh (`any_weight_is_summed`).
//! 2. While a batch may start, a request waits no longer than `max_delay` (`batches_are_whole_and_in_order`), and not until it is too late
//!    (`a_deadline_that_is_nearer_than_the_delay`).
//! 3. A request that left is in no later batch, and does not affect the others (`batches_are_whole_and_in_order`).
//! 4. No request is in a batch after its deadline or waits past it (`no_batch_has_the_late`), or is in a batch with too little time left
//!    (`the_late_are_told_when_a_batch_begins`). While none is in flight the estimate is put to the test by the next one
//!    (`requests_that_come_together_mend_an_estimate`).
//! 5. While both priorities wait, every ninth request is a normal one (`priority_in_batches`); whether a high-priority request is too late
//!    depends only on the requests in front of it (`high_priority_is_judged_by_what_is_in_front_of_it`).
//! 6. A light request is not refused because heavy ones take long (`light_requests_beside_a_heavy_one`), but because it waits behind them
//!    (`behind_a_heavy_batch_there_is_no_time`).
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use super::admission::OVERTAKES;
use super::service_times::ServiceTimes;

/// The limits of a batcher.
#[derive(Clone, Copy, Debug)]
pub struct BatchLimits {
    /// Requests of a batch.
    pub max_len: usize,
    /// Their total weight.
    pub max_weight: u64,
    /// How long the first of a batch waits for others.
    pub max_delay_ns: u64,
    /// Batches at once.
    pub max_in_flight: usize,
    /// How many requests may wait.
    pub max_waiting: usize,
}

/// The demands of a request.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Whether it goes ahead of the others.
    pub high_priority: bool,
    /// Its share of the weight of a batch.
    pub weight: u64,
    /// The deadline of its answer.
    pub deadline: Option<u64>,
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Next {
    /// Acquire what a batch needs, then [`Gather::take`] it.
    Due,
    /// Ask again at [`Gather::wakes_at`], or when something changes.
    Idle,
    /// Nothing is left and nothing can come.
    End,
}

/// Why a request does not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotGathered {
    /// Too many wait already.
    Full,
    /// Like [`NoPermit::Late`](super::admission::NoPermit::Late).
    Late {
        /// Time left until its deadline.
        remaining_ns: u64,
        /// Time that it would have waited.
        expected_ns: u64,
        /// Likely time on the device.
        takes_ns: u64,
    },
}

/// A request that waits, by priority and then by the order in which they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestKey {
    is_normal: bool,
    came: u64,
}

/// A request, and since when it waited.
#[derive(Debug, PartialEq, Eq)]
pub struct Gathered<T> {
    /// When it came.
    pub since: u64,
    /// Its share of the weight.
    pub weight: u64,
    /// The deadline of its answer; `u64::MAX` if there is none.
    pub deadline: u64,
    /// For a request that was too late for a batch, the time that it was likely to take in it; else 0.
    pub takes_ns: u64,
    /// The request itself.
    pub request: T,
}

/// A batch.
#[derive(Debug)]
pub struct TakenBatch<T> {
    /// May be empty: then the batch is not in flight.
    pub requests: Vec<Gathered<T>>,
    /// Requests that were too late for it.
    pub late: Vec<Gathered<T>>,
    /// When it began.
    pub begun: Begun,
}

/// When a batch began, for [`Gather::finished`].
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    /// When its permit was requested.
    pub asked_ns: u64,
    /// When it had its permit.
    pub at_ns: u64,
    in_flight: u64,
    weight: u64,
    /// When it is likely to end.
    ends_ns: u64,
    /// The earliest of its requests' deadlines; `u64::MAX` if there is none.
    deadline: u64,
}

/// How many requests, and how heavy they are.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    len: usize,
    /// Wide enough for any number of the heaviest.
    weight: u128,
}

impl Load {
    fn add(&mut self, weight: u64) {
        self.len += 1;
        self.weight += u128::from(weight);
    }

    fn remove(&mut self, weight: u64) {
        self.len -= 1;
        self.weight -= u128::from(weight);
    }
}

/// The requests that wait, and the batches in flight.
#[derive(Debug)]
pub struct Gather<T> {
    limits: BatchLimits,
    waiting: BTreeMap<RequestKey, Gathered<T>>,
    /// The waiters with a deadline, ordered by it.
    deadlines: BTreeSet<(u64, RequestKey)>,
    /// The same, ordered by when half of their time has passed.
    half_times: BTreeSet<(u64, RequestKey)>,
    /// The load of all waiting requests, and of the high-priority ones.
    all: Load,
    high: Load,
    came: u64,
    in_flight: usize,
    /// When the batches in flight are likely to end.
    ends: BTreeMap<u64, usize>,
    /// Since when the next batch's needs are asked for.
    asked_ns: Option<u64>,
    /// Durations of batches: from the request for a permit to the end, and from the taking to the end.
    turns: ServiceTimes,
    runs: ServiceTimes,
    /// High-priority requests in a row, while a normal one waited.
    overtaken: u32,
    ended: bool,
}

impl<T> Gather<T> {
    /// Without requests.
    pub fn new(limits: BatchLimits) -> Self {
        Gather {
            limits,
            waiting: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            half_times: BTreeSet::new(),
            all: Load::default(),
            high: Load::default(),
            came: 0,
            in_flight: 0,
            ends: BTreeMap::new(),
            asked_ns: None,
            turns: ServiceTimes::default(),
            runs: ServiceTimes::default(),
            overtaken: 0,
            ended: false,
        }
    }

    /// Enters a request. The key is for [`leave`](Self::leave); true: [`next`](Self::next) or
    /// [`wakes_at`](Self::wakes_at) has something new to say. A refused request comes back.
    pub fn add(
        &mut self,
        now: u64,
        demand: Demand,
        request: T,
    ) -> Result<(RequestKey, bool), (NotGathered, T)> {
        if self.waiting.len() >= self.limits.max_waiting {
            return Err((NotGathered::Full, request));
        }
        let deadline = demand.deadline.unwrap_or(u64::MAX);
        if let Some(unwanted) = self.too_late(now, &demand) {
            return Err((unwanted, request));
        }
        let key = RequestKey { is_normal: !demand.high_priority, came: self.came };
        self.came += 1;
        self.all.add(demand.weight);
        if demand.high_priority {
            self.high.add(demand.weight);
        }
        let is_first =
            |of: &BTreeSet<(u64, RequestKey)>| of.first().is_some_and(|(_, first)| *first == key);
        if demand.deadline.is_some() {
            self.deadlines.insert((deadline, key));
            self.half_times.insert((half_time(now, deadline), key));
        }
        let is_next = is_first(&self.deadlines) || is_first(&self.half_times);
        let gathered =
            Gathered { since: now, weight: demand.weight, deadline, takes_ns: 0, request };
        self.waiting.insert(key, gathered);
        let is_due = self.may_start() && (self.waiting.len() == 1 || self.is_whole());
        Ok((key, is_due || is_next))
    }

    /// Takes a request out that is not in a batch yet.
    pub fn leave(&mut self, key: RequestKey) -> Option<Gathered<T>> {
        self.remove(key)
    }

    /// The next step at `now`. Requests whose deadline has passed are to be [taken out](Self::expire) first.
    pub fn next(&mut self, now: u64) -> Next {
        let next = match self.due_at() {
            None if self.waiting.is_empty() && self.ended && self.in_flight == 0 => Next::End,
            Some(due) if due <= now => Next::Due,
            _ => Next::Idle,
        };
        if next != Next::Due {
            self.asked_ns = None;
        }
        next
    }

    /// When [`next`](Self::next) may change its answer, or a deadline passes.
    pub fn wakes_at(&self, now: u64) -> Option<u64> {
        let due = self.due_at().filter(|due| *due > now);
        let deadline = self.deadlines.first().map(|(deadline, _)| *deadline);
        due.into_iter().chain(deadline).min()
    }

    /// The next batch's permit is being requested.
    pub fn asks(&mut self, now: u64) {
        self.asked_ns.get_or_insert(now);
    }

    /// Takes out the requests whose deadline is not after `now`.
    pub fn expire(&mut self, now: u64) -> Vec<Gathered<T>> {
        let mut expired = Vec::new();
        while let Some(&(_, key)) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now)
        {
            expired.extend(self.remove(key));
        }
        expired
    }

    /// Takes a batch; call [`finished`](Self::finished) afterwards, unless it is empty.
    pub fn take(&mut self, now: u64) -> TakenBatch<T> {
        let (mut requests, mut late, mut weight) = (Vec::new(), Vec::new(), 0u128);
        let mut begun = Begun {
            asked_ns: self.asked_ns.take().unwrap_or(now),
            at_ns: now,
            in_flight: self.in_flight as u64 + 1,
            weight: 0,
            ends_ns: now,
            deadline: u64::MAX,
        };
        while requests.len() < self.limits.max_len
            && let Some((key, gathered)) = self.first()
        {
            let with_it = weight + u128::from(gathered.weight);
            let fits = with_it <= u128::from(self.limits.max_weight) || requests.is_empty();
            // With none in flight, a batch may be late by an estimate that is wrong: that corrects the estimate.
            let likely_ns = match self.in_flight {
                0 => 0,
                _ => self.runs.likely_ns_of(begun.in_flight, saturated(with_it)),
            };
            let is_late =
                now.saturating_add(likely_ns) >= gathered.deadline && gathered.deadline != u64::MAX;
            if !is_late && !fits {
                break;
            }
            if !is_late {
                weight = with_it;
                self.overtakes(key);
            }
            let Some(mut gathered) = self.remove(key) else { break };
            if is_late {
                gathered.takes_ns = likely_ns;
                late.push(gathered);
            } else {
                begun.deadline = begun.deadline.min(gathered.deadline);
                requests.push(gathered);
            }
        }
        if !requests.is_empty() {
            begun.weight = saturated(weight);
            let likely_ns = self.runs.likely_ns_of(begun.in_flight, begun.weight);
            begun.ends_ns = now.saturating_add(likely_ns);
            self.in_flight += 1;
            *self.ends.entry(begun.ends_ns).or_default() += 1;
        }
        TakenBatch { requests, late, begun }
    }

    /// A batch has ended.
    pub fn finished(&mut self, now: u64, begun: Begun) {
        self.in_flight -= 1;
        if let Some(count) = self.ends.get_mut(&begun.ends_ns) {
            *count -= 1;
            if *count == 0 {
                self.ends.remove(&begun.ends_ns);
            }
        }
        let Begun { in_flight, weight, asked_ns, at_ns, .. } = begun;
        self.turns.add_of(in_flight, weight, now.saturating_sub(asked_ns));
        self.runs.add_of(in_flight, weight, now.saturating_sub(at_ns));
        if begun.deadline < u64::MAX {
            let late = now > begun.deadline;
            self.turns.judge(late);
            self.runs.judge(late);
        }
    }

    /// No further request will come.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// Takes out all waiting requests.
    pub fn clear(&mut self) -> Vec<T> {
        (self.all, self.high) = (Load::default(), Load::default());
        self.deadlines.clear();
        self.half_times.clear();
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_values().map(|gathered| gathered.request).collect()
    }

    /// Batches in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Requests that wait for a batch.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How long batches took lately, including the wait for what they need; `None` before the first ended.
    pub fn took_ns(&self) -> Option<u64> {
        self.turns.mean_ns()
    }

    /// How long a batch that begins now is likely to take, with one more in flight.
    fn takes_ns(&self) -> u64 {
        self.runs.likely_ns(self.in_flight as u64 + 1)
    }

    fn may_start(&self) -> bool {
        self.in_flight < self.limits.max_in_flight
    }

    fn is_whole(&self) -> bool {
        self.waiting.len() >= self.limits.max_len
            || self.all.weight >= u128::from(self.limits.max_weight)
    }

    /// When a batch is due; `None` while none may start, or no request waits.
    fn due_at(&self) -> Option<u64> {
        let oldest = |is_normal| {
            let from = RequestKey { is_normal, came: 0 };
            let until = RequestKey { is_normal, came: u64::MAX };
            self.waiting.range(from..until).next().map(|(_, gathered)| gathered.since)
        };
        let oldest = [true, false].into_iter().filter_map(oldest).min()?;
        if !self.may_start() {
            return None;
        }
        if self.is_whole() || self.ended {
            return Some(0);
        }
        let first = |of: &BTreeSet<(u64, RequestKey)>| of.first().map_or(u64::MAX, |(at, _)| *at);
        let in_time = first(&self.deadlines).saturating_sub(self.takes_ns());
        let delayed = oldest.saturating_add(self.limits.max_delay_ns);
        Some(delayed.min(in_time).min(first(&self.half_times)))
    }

    /// Whether a request that comes now cannot be answered by its deadline.
    fn too_late(&self, now: u64, demand: &Demand) -> Option<NotGathered> {
        let remaining_ns = demand.deadline?.saturating_sub(now);
        // The batches in front of it, which run this many at a time. (That includes one in nine of the other
        // priority.)
        let Load { len, weight } = if demand.high_priority { self.high } else { self.all };
        let in_front = (len / self.limits.max_len) as u128;
        let in_front = in_front.max(weight / u128::from(self.limits.max_weight));
        // The rest of what is in front of it is in its own batch.
        let whole = weight.saturating_mul(self.limits.max_len as u128).checked_div(len as u128);
        let whole = whole.unwrap_or(0).min(self.limits.max_weight.into());
        let own = weight - in_front * whole + u128::from(demand.weight);
        // As in `take`.
        let is_first = self.in_flight == 0 && in_front == 0;
        let in_flight = self.limits.max_in_flight as u64;
        let likely_ns =
            if is_first { 0 } else { self.turns.likely_ns_of(in_flight, saturated(own)) };
        // None of them begins before a batch in flight ends.
        let first_end = self.ends.keys().next().filter(|_| !self.may_start());
        let behind_ns = first_end.map_or(0, |ends| ends.saturating_sub(now));
        let mean_ns = self.turns.mean_ns_of(saturated(whole));
        let expected_ns = mean_ns.saturating_mul(saturated(in_front)) / in_flight;
        let expected_ns = expected_ns.saturating_add(behind_ns);
        let is_late = remaining_ns == 0 || expected_ns.saturating_add(likely_ns) > remaining_ns;
        is_late.then_some(NotGathered::Late { remaining_ns, expected_ns, takes_ns: likely_ns })
    }

    fn first(&self) -> Option<(RequestKey, &Gathered<T>)> {
        let (first, gathered) = self.waiting.first_key_value()?;
        if first.is_normal || self.overtaken < OVERTAKES {
            return Some((*first, gathered));
        }
        let normal = self.waiting.range(RequestKey { is_normal: true, came: 0 }..).next();
        normal.or(Some((first, gathered))).map(|(key, gathered)| (*key, gathered))
    }

    fn overtakes(&mut self, key: RequestKey) {
        let waits = self.waiting.last_key_value().is_some_and(|(last, _)| last.is_normal);
        self.overtaken = if key.is_normal || !waits { 0 } else { self.overtaken + 1 };
    }

    fn remove(&mut self, key: RequestKey) -> Option<Gathered<T>> {
        let gathered = self.waiting.remove(&key)?;
        self.all.remove(gathered.weight);
        if !key.is_normal {
            self.high.remove(gathered.weight);
        }
        self.deadlines.remove(&(gathered.deadline, key));
        self.half_times.remove(&(half_time(gathered.since, gathered.deadline), key));
        Some(gathered)
    }
}

fn saturated(weight: u128) -> u64 {
    u64::try_from(weight).unwrap_or(u64::MAX)
}

/// The midpoint between a request's arrival and its deadline.
fn half_time(since: u64, deadline: u64) -> u64 {
    since.midpoint(deadline)
}
