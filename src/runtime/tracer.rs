//! [`Tracer`]: a bounded log of a device's operations and their times, while it is on.
//!
//! | an operation is | when |
//! |---|---|
//! | entered | it was submitted, between two timing events |
//! | seen | a look finds its ticket complete |
//! | resolved | its events were queried, by the errands thread or for a snapshot, and returned to their pool |
//! | dropped | it is the oldest, and the log is full |
//!
//! Submitters and futures only note times. The driver is queried for many operations at once, between two anchors of the device's clock.
//!
//! # Invariants
//! 1. Off, it costs an operation one load (`benches/instructions`).
//! 2. It never exceeds its capacity, however many operations come (`the_log_is_bounded`).
//! 3. A snapshot resolves the operations that were complete when it began, and none that complete later
//!    (`a_snapshot_of_a_busy_device_ends`).
//! 4. Nothing that is dropped here is foreign code, and events return to their pool outside of the lock.
//! 5. Events of an entry that is dropped before it was seen are not lent again: they may be pending
//!    (`events_that_are_pending_are_not_lent`).
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use gpu_await_protocol::sync::Mutex;

use super::traced_op::{TracedSubmission, TracedTimes};
use crate::runtime::event_pool::EventHandle;
use crate::thread::contain;
use gpu_await_protocol::device_clock::DeviceClock;

/// Operations whose events are queried in one batch.
const BATCH: usize = 1024;

/// How long events are kept if few arrive, in nanoseconds; also how long clock drift may go unnoticed.
const KEPT_NS: u64 = 250_000_000;

/// Operations that are resolved without the lock.
const CHUNK: usize = 64;

/// The log of a device's latest operations.
pub(crate) struct Tracer {
    /// One operation in this many is entered; 0: none.
    one_in: AtomicU32,
    log: Mutex<Option<Box<Log>>>,
    /// Serializes the queries of the driver.
    resolving: Mutex<()>,
    /// A resolve was requested.
    is_called: AtomicBool,
    /// How many logs were started.
    started: AtomicU64,
}

struct TracedEntry {
    submission: TracedSubmission,
    passed: TracedTimes,
    events: Option<Between>,
}

impl Drop for TracedEntry {
    fn drop(&mut self) {
        if let Some((start, end)) = self.events.as_ref().filter(|_| self.passed.seen_ns.is_none()) {
            start.spoil();
            end.spoil();
        }
    }
}

/// The events around an operation.
pub(crate) type Between = (EventHandle, EventHandle);

struct Log {
    /// Identifies the log: numbers of another log's entries mean nothing in it.
    generation: u64,
    capacity: usize,
    one_in: u32,
    entries: VecDeque<TracedEntry>,
    /// The number of the first entry.
    first: u64,
    lanes: HashMap<u64, StreamLog>,
    /// Entries that were seen and have events, by their numbers.
    unresolved: VecDeque<u64>,
    clock: DeviceClock,
    /// The last anchor, and its time on the device.
    anchor: Option<(EventHandle, f64)>,
    /// When events were last queried.
    resolved_ns: u64,
}

/// A stream's entries: tickets and numbers.
#[derive(Debug, Default)]
struct StreamLog {
    entries: VecDeque<(u64, u64)>,
    /// The index of the first operation not seen complete.
    unseen: usize,
}

/// The log, of one moment.
pub(crate) struct LogSnapshot {
    pub(crate) operations: Vec<(TracedSubmission, TracedTimes)>,
    pub(crate) dropped: u64,
    pub(crate) one_in: u32,
}

/// An anchor: its event, and the readings of the host's clock around it.
pub(crate) struct AnchorEvent {
    pub(crate) event: EventHandle,
    pub(crate) window: (u64, u64),
}

/// Reads events and the device's clock for a tracer; the engine implements it.
pub(crate) trait AskEvents {
    fn anchor(&self) -> Option<AnchorEvent>;
    /// Nanoseconds from one event to another one.
    fn elapsed_ns(&self, from: &EventHandle, to: &EventHandle) -> Option<f64>;
}

impl Tracer {
    pub(crate) fn new() -> Self {
        Tracer {
            one_in: AtomicU32::new(0),
            log: Mutex::default(),
            resolving: Mutex::default(),
            is_called: AtomicBool::new(false),
            started: AtomicU64::new(0),
        }
    }

    /// Begins a new log; one without capacity stays off. The caller then takes an anchor.
    pub(crate) fn start(&self, capacity: usize, one_in: u32, now: u64) {
        let fresh = Log {
            // ORDERING: Relaxed: only uniqueness matters.
            generation: self.started.fetch_add(1, Ordering::Relaxed),
            capacity,
            one_in: one_in.max(1),
            entries: VecDeque::new(),
            first: 0,
            lanes: HashMap::new(),
            unresolved: VecDeque::new(),
            clock: DeviceClock::default(),
            anchor: None,
            resolved_ns: now,
        };
        let one_in = if capacity == 0 { 0 } else { fresh.one_in };
        let before = self.log.lock().replace(Box::new(fresh));
        drop(before);
        // ORDERING: Relaxed, here and below: a switch; the entries are under the lock.
        self.one_in.store(one_in, Ordering::Relaxed);
    }

    /// Enters nothing more; existing entries stay.
    pub(crate) fn stop(&self) {
        self.one_in.store(0, Ordering::Relaxed);
    }

    /// Drops the log: its events go back to their pool.
    pub(crate) fn forget(&self) {
        self.stop();
        let log = self.log.lock().take();
        drop(log);
    }

    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.one_in.load(Ordering::Relaxed) != 0
    }

    /// Whether an operation with about that ticket is to be entered.
    pub(crate) fn takes(&self, ticket: u64) -> bool {
        let one_in = self.one_in.load(Ordering::Relaxed);
        one_in != 0 && ticket.is_multiple_of(u64::from(one_in))
    }

    pub(crate) fn enter(&self, submission: TracedSubmission, events: Option<Between>) {
        let mut log = self.log.lock();
        let dropped = log.as_mut().map(|log| log.enter(submission, events));
        drop(log);
        drop(dropped);
    }

    /// A look found a stream complete up to a ticket. True if the caller should have the log
    /// [resolved](Self::resolve).
    #[cold]
    pub(crate) fn seen(&self, stream: u64, completed: u64, now: u64) -> bool {
        let mut log = self.log.lock();
        let is_due = log.as_mut().is_some_and(|log| log.see(stream, completed, now));
        is_due && !self.is_called.swap(true, Ordering::Relaxed)
    }

    /// The task that waits for a ticket is woken, because it is complete.
    #[cold]
    pub(crate) fn woken(&self, stream: u64, ticket: u64, now: u64) {
        self.pass(stream, ticket, |passed| {
            // Its task already looked for itself: the wake-up is redundant.
            if passed.polled_ns.is_none() {
                passed.seen_ns.get_or_insert(now);
                passed.woken_ns.get_or_insert(now);
            }
        });
    }

    /// A future found a ticket complete.
    #[cold]
    pub(crate) fn polled(&self, stream: u64, ticket: u64, now: u64) {
        self.pass(stream, ticket, |passed| {
            passed.seen_ns.get_or_insert(now);
            passed.polled_ns.get_or_insert(now);
        });
    }

    fn pass(&self, stream: u64, ticket: u64, pass: impl FnOnce(&mut TracedTimes)) {
        let mut log = self.log.lock();
        if let Some(entry) = log.as_mut().and_then(|log| log.entry_of(stream, ticket)) {
            pass(&mut entry.passed);
        }
    }

    /// Queries the events of the operations that were seen complete by now, and of none that complete meanwhile. Only where driver calls
    /// may be made; it may take long.
    pub(crate) fn resolve(&self, ask: &impl AskEvents, now: u64) {
        // A subscriber may ask for a snapshot: not under the lock.
        let told = self.resolve_one_at_a_time(ask, now);
        told.iter().for_each(|(submission, passed)| contain::log(|| tell(submission, passed)));
    }

    /// Returns the operations to report to subscribers.
    fn resolve_one_at_a_time(
        &self,
        ask: &impl AskEvents,
        now: u64,
    ) -> Vec<(TracedSubmission, TracedTimes)> {
        let _one_at_a_time = self.resolving.lock();
        self.is_called.store(false, Ordering::Relaxed);
        let mut told = Vec::new();
        let anchor = ask.anchor();
        let begin = |log: &mut Log| {
            log.resolved_ns = now;
            (log.generation, log.anchor.clone(), log.unresolved.len())
        };
        let Some((generation, before, mut left)) = self.log.lock().as_deref_mut().map(begin) else {
            return told;
        };
        if let Some(AnchorEvent { event, window }) = anchor {
            let device_ns = match &before {
                None => Some(0.0),
                Some((last, at)) => ask.elapsed_ns(last, &event).map(|ns| at + ns),
            };
            self.within(generation, |log| {
                if let Some(device_ns) = device_ns {
                    log.clock.anchor(device_ns, window);
                    log.anchor = Some((event, device_ns));
                }
            });
        }
        // The time of the anchor in front of most of them.
        let Some((base, base_ns)) = before else { return told };
        let is_told = contain::catch(
            || tracing::enabled!(target: "gpu_await::timeline", tracing::Level::TRACE),
        );
        let is_told = is_told.unwrap_or(false);
        while left > 0 {
            let take = left.min(CHUNK);
            left -= take;
            let chunk = self.within(generation, |log| log.take_unresolved(take));
            let Some(chunk) = chunk else { break };
            let at = |event| ask.elapsed_ns(&base, event).map(|ns| base_ns + ns);
            let resolved =
                chunk.iter().map(|(number, (start, end))| (*number, at(start).zip(at(end))));
            let resolved: Vec<_> = resolved.collect();
            self.within(generation, |log| {
                for (number, at) in resolved {
                    let entry = log.resolved(number, at).filter(|_| is_told);
                    told.extend(entry.map(|entry| (entry.submission.clone(), entry.passed)));
                }
            });
            // Their events, outside of the log's lock.
            drop(chunk);
        }
        told
    }

    /// Finds how far each stream is by the events in the log, since no look may have happened yet, and when its next operation started.
    /// Only where driver calls may be made. `clock` is read after the events: operations may have been submitted and completed since the
    /// look began.
    pub(crate) fn look(&self, ask: &impl AskEvents, clock: impl Fn() -> u64) {
        // With the last ticket of each: more follow meanwhile.
        let streams = |log: &Log| {
            let last = |(stream, lane): (&u64, &StreamLog)| Some((*stream, lane.entries.back()?.0));
            (log.generation, log.lanes.iter().filter_map(last).collect::<Vec<_>>())
        };
        let Some((generation, streams)) = self.log.lock().as_deref().map(streams) else { return };
        for (stream, last) in streams {
            let mut is_more = true;
            while is_more {
                let next = |log: &mut Log| Some((log.anchor.clone()?, log.next_of((stream, last))));
                let Some(((base, base_ns), next)) = self.within(generation, next).flatten() else {
                    return;
                };
                let (mut complete, mut runs) = (None, None);
                for (number, ticket, (start, end)) in &next {
                    if ask.elapsed_ns(&base, end).is_none() {
                        runs = ask.elapsed_ns(&base, start).map(|since| (*number, base_ns + since));
                        break;
                    }
                    complete = Some(*ticket);
                }
                is_more = next.len() == CHUNK && runs.is_none() && complete.is_some();
                let now = clock();
                self.within(generation, |log| {
                    if let Some(ticket) = complete {
                        log.see(stream, ticket, now);
                    }
                    if let Some((number, since)) = runs {
                        log.runs_since(number, since);
                    }
                });
            }
        }
    }

    /// Calls `work` on the log, if it is still that generation.
    fn within<R>(&self, generation: u64, work: impl FnOnce(&mut Log) -> R) -> Option<R> {
        let mut log = self.log.lock();
        log.as_deref_mut().filter(|log| log.generation == generation).map(work)
    }

    /// Everything that is in the log.
    pub(crate) fn snapshot(&self) -> Option<LogSnapshot> {
        let log = self.log.lock();
        let log = log.as_ref()?;
        let entries = log.entries.iter();
        let operations = entries.map(|entry| (entry.submission.clone(), entry.passed)).collect();
        Some(LogSnapshot { operations, dropped: log.first, one_in: log.one_in })
    }
}

impl Log {
    /// Adds an entry; returns the one that it displaces.
    fn enter(
        &mut self,
        submission: TracedSubmission,
        events: Option<Between>,
    ) -> Option<TracedEntry> {
        let dropped = if self.entries.len() >= self.capacity { self.drop_first() } else { None };
        let number = self.first + self.entries.len() as u64;
        let lane = self.lanes.entry(submission.stream).or_default();
        lane.entries.push_back((submission.ticket, number));
        self.entries.push_back(TracedEntry { submission, passed: TracedTimes::default(), events });
        dropped
    }

    fn drop_first(&mut self) -> Option<TracedEntry> {
        let entry = self.entries.pop_front()?;
        self.first += 1;
        let stream = entry.submission.stream;
        if let Some(lane) = self.lanes.get_mut(&stream) {
            lane.entries.pop_front();
            lane.unseen = lane.unseen.saturating_sub(1);
            if lane.entries.is_empty() {
                self.lanes.remove(&stream);
            }
        }
        Some(entry)
    }

    fn see(&mut self, stream: u64, completed: u64, now: u64) -> bool {
        let Log { lanes, entries, first, unresolved, resolved_ns, .. } = self;
        let Some(lane) = lanes.get_mut(&stream) else { return false };
        while let Some((ticket, number)) = lane.entries.get(lane.unseen).copied()
            && ticket <= completed
        {
            lane.unseen += 1;
            let entry = &mut entries[(number - *first) as usize];
            // An earlier look may have set it.
            entry.passed.seen_ns.get_or_insert(now);
            if entry.events.is_some() {
                unresolved.push_back(number);
            }
        }
        unresolved.len() >= BATCH
            || (!unresolved.is_empty() && now.saturating_sub(*resolved_ns) > KEPT_NS)
    }

    fn entry_of(&mut self, stream: u64, ticket: u64) -> Option<&mut TracedEntry> {
        let lane = self.lanes.get(&stream)?;
        let at = lane.entries.partition_point(|(known, _)| *known < ticket);
        let (_, number) = *lane.entries.get(at).filter(|(known, _)| *known == ticket)?;
        self.entry(number)
    }

    /// An entry by its number, unless it was dropped.
    fn entry(&mut self, number: u64) -> Option<&mut TracedEntry> {
        self.entries.get_mut(number.checked_sub(self.first)? as usize)
    }

    fn take_unresolved(&mut self, count: usize) -> Vec<(u64, Between)> {
        let mut chunk = Vec::new();
        for _ in 0..count {
            let Some(number) = self.unresolved.pop_front() else { break };
            let events = self.entry(number).and_then(|entry| entry.events.take());
            chunk.extend(events.map(|events| (number, events)));
        }
        chunk
    }

    /// A stream's next operations not seen complete, up to a ticket: numbers, tickets and events.
    fn next_of(&self, (stream, last): (u64, u64)) -> Vec<(u64, u64, Between)> {
        let Some(lane) = self.lanes.get(&stream) else { return Vec::new() };
        let next = lane.entries.iter().skip(lane.unseen).take(CHUNK);
        let next = next.take_while(|(ticket, _)| *ticket <= last);
        let next = next.map_while(|(ticket, number)| {
            let entry = self.entries.get((number - self.first) as usize)?;
            Some((*number, *ticket, entry.events.clone()?))
        });
        next.collect()
    }

    fn runs_since(&mut self, number: u64, since: f64) {
        let since = self.clock.host_time(since);
        if let (Some(entry), Some(since)) = (self.entry(number), since) {
            entry.passed.since_ns = Some(since.ns);
            entry.passed.clock_error_ns = since.error_ns;
        }
    }

    fn resolved(&mut self, number: u64, device: Option<(f64, f64)>) -> Option<&TracedEntry> {
        let (start, end) = device?;
        let (start, end) = (self.clock.host_time(start)?, self.clock.host_time(end)?);
        let entry = self.entry(number)?;
        // Clamped for a subscriber as for a trace: anything outside is the error of the device's clock.
        let submitted_ns = entry.submission.submitted_ns as f64;
        let seen_ns = entry.passed.seen_ns.map_or(f64::MAX, |ns| ns as f64);
        let start_ns = start.ns.max(submitted_ns).min(seen_ns);
        entry.passed.device_ns = Some((start_ns, end.ns.min(seen_ns).max(start_ns)));
        entry.passed.clock_error_ns = start.error_ns.max(end.error_ns);
        Some(entry)
    }
}

/// Reports to the subscriber an operation whose times are known.
fn tell(submission: &TracedSubmission, passed: &TracedTimes) {
    let TracedSubmission { name: op, stream, ticket, span, submitted_ns, .. } = submission;
    let Some((start, end)) = passed.device_ns else { return };
    let us = |ns: f64| ns / 1e3;
    let (wait_us, device_us) = (us(start - *submitted_ns as f64), us(end - start));
    tracing::trace!(target: "gpu_await::timeline", %op, stream, ticket, span, wait_us, device_us);
}

#[cfg(test)]
mod tests;
