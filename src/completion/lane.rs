//! One stream, as the completion engine sees it.
//!
//! A lane ties the pure parts to a driver stream: the timeline, the submission lock, the markers
//! behind it, the waiters in front of it, and the host memory lent to it.
//!
//! | who | does | through |
//! |---|---|---|
//! | a submitter | takes the lock, issues a ticket, makes driver calls | [`Lane::with`] |
//! | a future | checks, yields, registers | [`Lane::poll_ticket`] |
//! | the poller | asks the driver, raises `completed`, wakes | [`Lane::sweep`] |
//! | a drop | frees in stream order, or leaves it | [`Lane::free_in_order`] |
//!
//! Locks, in the order in which they may be held together: submission lock, then one of
//! `markers`, `lent`, `deferred`. `waiters` is never held with another.
//!
//! More than 600 lines: these four share every field, and the order of their locks is read best in
//! one place.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::engine::Engine;
use super::events::EventHandle;
use super::policy;
use super::submission::{Locked, Markable, SubmissionLock};
use super::sweep::SweepGate;
use super::timeline::Timeline;
use super::waiters::{WaiterKey, Waiters};
use super::words::Word;
use crate::backend::{DevicePtr, Query, RawStream, StreamOptions};
use crate::error::{DriverCode, ErrorDetail, Result};
use crate::hazard::{Track, Use};
use crate::thread_role::{self, Role};

pub(crate) struct Lane {
    id: u64,
    engine: Arc<Engine>,
    stream: RawStream,
    priority: i32,
    timeline: Timeline,
    submission: SubmissionLock<Submitter>,
    markers: Mutex<VecDeque<Marker>>,
    gate: SweepGate,
    waiters: Mutex<Waiters<Waker>>,
    /// How many wait: lets a sweep skip the lock.
    waiting: AtomicU64,
    lent: Mutex<VecDeque<Lent>>,
    /// How much is lent: lets a sweep skip the lock.
    lending: AtomicU64,
    deferred: Mutex<Vec<DevicePtr>>,
    word: Option<Word>,
    /// The last value that the stream was told to write into `word`.
    told: AtomicU64,
    /// With the poller.
    active: AtomicBool,
    /// The highest ticket behind which a doorbell was armed.
    armed: AtomicU64,
    /// How long waits took lately, in nanoseconds.
    learned_ns: AtomicU64,
    /// Waits for streams of other devices, by the ticket that waits.
    foreign: Mutex<Vec<ForeignWait>>,
    has_foreign: AtomicBool,
}

/// Ticket `ticket` and all behind it wait for another device.
struct ForeignWait {
    ticket: u64,
    on: Use<Arc<Lane>>,
}

/// What the submission lock protects.
#[derive(Default)]
pub(crate) struct Submitter {
    /// Commands since the last marker.
    pub(crate) unmarked: u32,
    /// Whether an operation since the last event touched buffers.
    pub(crate) touched: bool,
    /// Up to which ticket this stream already waits for others.
    waited: Vec<(u64, u64)>,
}

/// A point behind which an event was recorded.
struct Marker {
    ticket: u64,
    event: EventHandle,
}

/// Host memory that the device may touch until `ticket` is complete.
struct Lent {
    ticket: u64,
    bytes: u64,
    payload: Payload,
}

/// What is lent.
pub(crate) enum Payload {
    /// Our own memory: dropping it is cheap and calls nobody.
    Memory(Arc<dyn Any + Send + Sync>),
    /// The user's: dropped by the reaper.
    Foreign(Box<dyn Any + Send>),
}

/// What a future remembers between polls.
#[derive(Debug, Default)]
pub(crate) struct WaitState {
    key: Option<WaiterKey>,
    checks: u32,
    checking: bool,
    since: Option<Instant>,
}

impl ForeignWait {
    /// The error of who waits for this, if its device is lost.
    fn lost(&self) -> Option<crate::Error> {
        let engine = &self.on.lane.engine;
        let cause = engine.lost().filter(|_| !self.on.lane.is_complete(self.on.ticket))?;
        let device = engine.label().to_owned();
        Some(ErrorDetail::DependencyLost { device, cause: cause.clone() }.into())
    }
}

impl WaitState {
    /// Whether the task looks for itself: it was woken already.
    pub(crate) fn is_checking(&self) -> bool {
        self.checking
    }
}

impl Lane {
    pub(crate) fn open(engine: &Arc<Engine>, options: StreamOptions) -> Result<Arc<Lane>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        engine.check_open()?;
        let backend = &*engine.backend;
        let stream = backend.stream_create(options).map_err(|code| engine.refused(code))?;
        let word = if engine.options.completion.uses_words() && backend.limits().words {
            let word = engine.words.get(backend).map_err(|code| {
                // SAFETY: the stream was made just now, and nobody else has it.
                let _ = unsafe { backend.stream_destroy(stream) };
                engine.refused(code)
            });
            Some(word?)
        } else {
            None
        };
        let lane = Arc::new(Lane {
            // ORDERING: Relaxed: only uniqueness matters.
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            engine: engine.clone(),
            stream,
            priority: options.priority,
            timeline: Timeline::new(),
            submission: SubmissionLock::new(Submitter::default()),
            markers: Mutex::default(),
            gate: SweepGate::new(),
            waiters: Mutex::new(Waiters::new()),
            waiting: AtomicU64::new(0),
            lent: Mutex::default(),
            lending: AtomicU64::new(0),
            deferred: Mutex::default(),
            word,
            told: AtomicU64::new(0),
            active: AtomicBool::new(false),
            armed: AtomicU64::new(0),
            learned_ns: AtomicU64::new(0),
            foreign: Mutex::default(),
            has_foreign: AtomicBool::new(false),
        });
        engine.enlist(&lane);
        Ok(lane)
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.stream
    }

    pub(crate) fn priority(&self) -> i32 {
        self.priority
    }

    pub(crate) fn submitted(&self) -> u64 {
        self.timeline.submitted()
    }

    pub(crate) fn completed(&self) -> u64 {
        self.timeline.completed()
    }

    pub(crate) fn is_complete(&self, ticket: u64) -> bool {
        self.timeline.is_complete(ticket)
    }

    /// The tail, with a marker behind it: what is submitted later does not delay who waits for it.
    pub(crate) fn tail(&self) -> u64 {
        let tail = self.submitted();
        self.want(tail);
        tail
    }

    /// Gives up a future's interest in a marker of its own.
    pub(crate) fn release(&self, ticket: u64) {
        self.timeline.release(ticket);
    }

    // ---- submitting -----------------------------------------------------------------------

    /// Runs `f` as the stream's only submitter. Blocks while another one is in the driver.
    pub(crate) fn with<R>(self: &Arc<Self>, f: impl FnOnce(&mut Turn<'_, '_>) -> R) -> R {
        let result = self.submission.with(self, |locked| {
            let mut turn = Turn { lane: self, locked };
            turn.free_deferred();
            f(&mut turn)
        });
        if self.needs_attention() {
            self.activate();
        }
        result
    }

    /// Like [`with`](Self::with), unless somebody else submits.
    fn try_with<R>(self: &Arc<Self>, f: impl FnOnce(&mut Turn<'_, '_>) -> R) -> Option<R> {
        self.submission.try_with(self, |locked| f(&mut Turn { lane: self, locked }))
    }

    /// Asks for a marker at or behind `ticket`; never blocks.
    pub(crate) fn want(&self, ticket: u64) {
        if !self.is_complete(ticket) {
            self.submission.want(self, ticket);
        }
    }

    /// An event at or behind `ticket`, as close behind as there is; places one at the tail if there
    /// is none. `None` if the ticket is complete. Takes the submission lock: not while holding
    /// another stream's.
    pub(crate) fn event_behind(self: &Arc<Self>, ticket: u64) -> Result<Option<EventHandle>> {
        if self.is_complete(ticket) {
            return Ok(None);
        }
        if let Some(event) = self.marker_behind(ticket) {
            return Ok(Some(event));
        }
        self.with(|turn| turn.place_event()).map_err(|code| self.engine.refused(code))?;
        Ok(self.marker_behind(ticket))
    }

    fn marker_behind(&self, ticket: u64) -> Option<EventHandle> {
        let markers = self.markers.lock();
        let index = markers.partition_point(|marker| marker.ticket < ticket);
        markers.get(index).map(|marker| marker.event.clone())
    }

    // ---- waiting --------------------------------------------------------------------------

    /// Whether `ticket` is complete; if not, sees to it that the task is polled again.
    pub(crate) fn poll_ticket(
        self: &Arc<Self>,
        ticket: u64,
        wait: &mut WaitState,
        cx: &Context<'_>,
    ) -> Poll<Result<()>> {
        if let Some(outcome) = self.outcome(ticket) {
            if let Some(since) = wait.since {
                self.learn(since);
            }
            self.forget(wait);
            return Poll::Ready(outcome);
        }
        self.want(ticket);
        let since = *wait.since.get_or_insert_with(Instant::now);
        if self.may_check(wait, since) {
            self.sweep();
            if let Some(outcome) = self.outcome(ticket) {
                self.learn(since);
                self.forget(wait);
                return Poll::Ready(outcome);
            }
            wait.checks += 1;
            // A yield: the executor runs others before it polls this task again.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.stop_checking(wait);
        self.register(ticket, wait, cx.waker());
        // The store of the waker before these loads, against `sweep` and `lose`.
        fence(Ordering::SeqCst);
        if let Some(outcome) = self.outcome(ticket) {
            self.forget(wait);
            return Poll::Ready(outcome);
        }
        self.activate();
        Poll::Pending
    }

    /// Drops a future's registration.
    pub(crate) fn forget(&self, wait: &mut WaitState) {
        self.stop_checking(wait);
        if let Some(key) = wait.key.take() {
            let waker = {
                let mut waiters = self.waiters.lock();
                let waker = waiters.remove(key);
                // ORDERING: SeqCst: pairs with the fence in `poll_ticket`.
                self.waiting.store(waiters.len() as u64, Ordering::SeqCst);
                waker
            };
            drop(waker);
        }
    }

    /// Whether `ticket` is complete or never will be.
    pub(crate) fn is_settled(&self, ticket: u64) -> bool {
        self.outcome(ticket).is_some()
    }

    fn outcome(&self, ticket: u64) -> Option<Result<()>> {
        if self.is_complete(ticket) {
            return Some(Ok(()));
        }
        let lost = match self.engine.lost() {
            Some(lost) => lost.clone(),
            None => self.dependency_lost(ticket)?,
        };
        // What completed before the loss completed.
        Some(if self.is_complete(ticket) { Ok(()) } else { Err(lost) })
    }

    /// The loss of another device that `ticket` waits for, if there is one.
    fn dependency_lost(&self, ticket: u64) -> Option<crate::Error> {
        // ORDERING: Relaxed: set by the submitter of this or an earlier ticket.
        if !self.has_foreign.load(Ordering::Relaxed) {
            return None;
        }
        // What is through is dropped after the lock: it may be the last of a stream.
        let (through, lost) = {
            let mut foreign = self.foreign.lock();
            let through: Vec<_> =
                foreign.extract_if(.., |wait| self.is_complete(wait.ticket)).collect();
            // ORDERING: Relaxed: under the lock that guards what it hints at.
            self.has_foreign.store(!foreign.is_empty(), Ordering::Relaxed);
            let mut reached = foreign.iter().filter(|wait| wait.ticket <= ticket);
            (through, reached.find_map(ForeignWait::lost))
        };
        drop(through);
        lost
    }

    fn may_check(&self, wait: &mut WaitState, since: Instant) -> bool {
        let options = self.engine.options;
        // ORDERING: Relaxed: a guess.
        let learned = Duration::from_nanos(self.learned_ns.load(Ordering::Relaxed));
        if options.stepped
            || wait.key.is_some()
            || wait.checks >= policy::CHECKS
            || !options.completion.checks(learned)
            || (wait.checks > 0 && since.elapsed() >= policy::CHECK_FOR)
        {
            return false;
        }
        wait.checking = wait.checking || self.engine.enter_check(policy::CHECKERS);
        wait.checking
    }

    fn stop_checking(&self, wait: &mut WaitState) {
        if std::mem::take(&mut wait.checking) {
            self.engine.leave_check();
        }
    }

    /// Remembers how long a wait took: an average over about eight.
    fn learn(&self, since: Instant) {
        let took = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // ORDERING: Relaxed: a guess that may lose an update.
        let old = self.learned_ns.load(Ordering::Relaxed);
        let new = if old == 0 { took } else { old - old / 8 + took / 8 };
        // ORDERING: Relaxed, as above.
        self.learned_ns.store(new, Ordering::Relaxed);
    }

    fn register(&self, ticket: u64, wait: &mut WaitState, waker: &Waker) {
        // Cloning and dropping a waker is foreign code: both outside the lock.
        let fresh = waker.clone();
        let stale = {
            let mut waiters = self.waiters.lock();
            let stale = match wait.key.and_then(|key| waiters.get_mut(key)) {
                Some(known) => Some(std::mem::replace(known, fresh)),
                None => {
                    wait.key = Some(waiters.insert(ticket, fresh));
                    None
                }
            };
            // ORDERING: SeqCst: pairs with the fence in `poll_ticket`.
            self.waiting.store(waiters.len() as u64, Ordering::SeqCst);
            stale
        };
        drop(stale);
    }

    // ---- sweeping -------------------------------------------------------------------------

    /// Asks the driver how far the stream is and wakes whoever waited for that. True if the
    /// stream was seen to have moved.
    pub(crate) fn sweep(&self) -> bool {
        let before = self.timeline.completed();
        let mut failed = None;
        // A lost device would only say so again.
        if self.engine.lost().is_none() {
            self.gate.run(|| failed = self.ask().err());
        }
        if let Some(code) = failed {
            self.engine.lose(code);
        }
        self.engine.mourn();
        let moved = self.timeline.completed() != before;
        // The store of `completed` before the load of `waiting`, against `poll_ticket`.
        fence(Ordering::SeqCst);
        self.wake_due();
        self.take_back();
        moved
    }

    /// Raises `completed` as far as the markers allow. Only one thread at a time.
    fn ask(&self) -> std::result::Result<(), DriverCode> {
        if let Some(word) = &self.word {
            self.timeline.complete(word.read());
        }
        // Ever further ahead while markers are complete, so that a long queue takes few queries.
        let mut ahead = 0;
        loop {
            let next = {
                let markers = self.markers.lock();
                let index = ahead.min(markers.len().saturating_sub(1));
                markers.get(index).map(|marker| (marker.ticket, marker.event.raw()))
            };
            let Some((ticket, event)) = next else {
                return Ok(());
            };
            if !self.is_complete(ticket) {
                // SAFETY: the marker keeps its event, and only this function, one thread at a
                // time, removes markers.
                match unsafe { self.engine.backend.event_query(event) }? {
                    Query::Complete => {
                        self.timeline.complete(ticket);
                    }
                    Query::Pending if ahead == 0 => return Ok(()),
                    Query::Pending => {
                        ahead = 0;
                        continue;
                    }
                }
            }
            self.drop_markers(ticket);
            ahead = 2 * ahead + 1;
        }
    }

    /// Gives the events up to `ticket`, which is complete, back to the pool.
    fn drop_markers(&self, ticket: u64) {
        loop {
            let mut batch: SmallVec<[Marker; 16]> = SmallVec::new();
            {
                let mut markers = self.markers.lock();
                while batch.len() < 16 && markers.front().is_some_and(|m| m.ticket <= ticket) {
                    batch.extend(markers.pop_front());
                }
            }
            if batch.is_empty() {
                return;
            }
        }
    }

    fn wake_due(&self) {
        // ORDERING: SeqCst: pairs with the fence in `poll_ticket`.
        while self.waiting.load(Ordering::SeqCst) > 0 {
            let mut batch: SmallVec<[Waker; 16]> = SmallVec::new();
            let lost = self.engine.lost().is_some() || self.dependency_lost(u64::MAX).is_some();
            {
                let mut waiters = self.waiters.lock();
                let completed = if lost { u64::MAX } else { self.timeline.completed() };
                while batch.len() < 16 {
                    let Some(waker) = waiters.pop_due(completed) else { break };
                    batch.push(waker);
                }
                // ORDERING: SeqCst, as above.
                self.waiting.store(waiters.len() as u64, Ordering::SeqCst);
            }
            if batch.is_empty() {
                return;
            }
            batch.into_iter().for_each(wake);
        }
    }

    /// Takes lent memory back that the device is through with.
    fn take_back(&self) {
        // ORDERING: Relaxed: what a submitter adds meanwhile is not complete yet.
        while self.lending.load(Ordering::Relaxed) > 0 {
            let mut batch: SmallVec<[Lent; 8]> = SmallVec::new();
            {
                let mut lent = self.lent.lock();
                let completed = self.timeline.completed();
                while batch.len() < 8 && lent.front().is_some_and(|l| l.ticket <= completed) {
                    batch.extend(lent.pop_front());
                }
                // ORDERING: Relaxed, as above.
                self.lending.store(lent.len() as u64, Ordering::Relaxed);
            }
            if batch.is_empty() {
                return;
            }
            for lent in batch {
                // ORDERING: Relaxed: a statistic.
                self.engine.counters.lent_bytes.fetch_sub(lent.bytes, Ordering::Relaxed);
                match lent.payload {
                    Payload::Memory(memory) => drop(memory),
                    Payload::Foreign(value) => self.engine.reaper.drop_later(value),
                }
            }
        }
    }

    /// After the loss: wakes everybody and quarantines what is still lent, because nobody promises
    /// that the copy engines have stopped.
    pub(crate) fn mourn(&self) {
        self.take_back();
        let lent = std::mem::take(&mut *self.lent.lock());
        for lent in lent {
            let counters = &self.engine.counters;
            // ORDERING: Relaxed: statistics.
            counters.lent_bytes.fetch_sub(lent.bytes, Ordering::Relaxed);
            counters.quarantined_bytes.fetch_add(lent.bytes, Ordering::Relaxed);
            std::mem::forget(lent.payload);
        }
        self.wake_due();
    }

    // ---- the poller's side ----------------------------------------------------------------

    /// Hands the lane to the poller unless it has it.
    pub(crate) fn activate(self: &Arc<Self>) {
        // ORDERING: SeqCst: against `deactivate`, which stores false and then looks for work.
        if !self.active.swap(true, Ordering::SeqCst) {
            self.engine.attention.add(self.clone());
        } else if self.has_waiters() {
            self.engine.attention.call();
        }
    }

    /// Takes the lane from the poller; false if there is work after all.
    pub(crate) fn deactivate(&self) -> bool {
        self.active.store(false, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // ORDERING: SeqCst, see `activate`: whoever swaps first takes care of the work.
        !self.needs_attention() || self.active.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn has_waiters(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Whether the poller must look at this lane from time to time.
    pub(crate) fn needs_attention(&self) -> bool {
        self.has_waiters() || self.has_dues()
    }

    /// Whether memory waits to be taken back or freed.
    pub(crate) fn has_dues(&self) -> bool {
        // Of a lost device nothing comes back; see `mourn`.
        if self.engine.lost().is_some() {
            return false;
        }
        // ORDERING: Relaxed: both are written by the calling thread or under the lock it held.
        self.lending.load(Ordering::Relaxed) > 0
            || !self.deferred.lock().is_empty()
            // A word that is still to be written keeps its line, and so the lane.
            || (self.word.is_some() && !self.is_complete(self.submitted()))
    }

    /// Sees to it that what is waited for has a marker, and that what is due gets done.
    pub(crate) fn press(self: &Arc<Self>, dues: bool) {
        let due = self.waiters.lock().next_due();
        if let Some(ticket) = due {
            self.want(ticket);
            self.ask_after_others();
        }
        if dues && self.has_dues() {
            self.want(self.submitted());
            if !self.is_crowded() {
                self.try_with(|turn| turn.free_deferred());
            }
        }
    }

    /// Asks after the other devices that this stream waits for: their own pollers have no reason to,
    /// if nobody awaits anything of theirs.
    fn ask_after_others(&self) {
        // ORDERING: Relaxed: a hint; the poller comes back.
        if !self.has_foreign.load(Ordering::Relaxed) {
            return;
        }
        let others: SmallVec<[Arc<Lane>; 2]> =
            self.foreign.lock().iter().map(|wait| wait.on.lane.clone()).collect();
        for other in others {
            other.sweep();
            other.engine.check_health().ok();
            other.engine.mourn();
        }
    }

    /// Arms a doorbell behind the first marker that somebody waits for.
    pub(crate) fn arm(self: &Arc<Self>) {
        let due = self.waiters.lock().next_due();
        let Some(ticket) = due.filter(|ticket| !self.is_complete(*ticket)) else {
            return;
        };
        // ORDERING: Relaxed: only the poller arms.
        if self.armed.load(Ordering::Relaxed) >= ticket {
            return;
        }
        let mut event = self.marker_behind(ticket);
        if event.is_none() {
            // Words have no event to wait for: place one.
            self.try_with(|turn| turn.place_event().ok());
            event = self.marker_behind(ticket);
        }
        let Some(event) = event else { return };
        let engine = &self.engine;
        match engine.bells.arm(&*engine.backend, &engine.attention, &event) {
            // ORDERING: Relaxed, as above.
            Ok(true) => self.armed.store(ticket, Ordering::Relaxed),
            Ok(false) => {}
            Err(code) => {
                let error = engine.refused(code);
                tracing::debug!(device = engine.label(), %error, "no doorbell");
            }
        }
    }

    // ---- drops ----------------------------------------------------------------------------

    /// Frees memory behind everything submitted so far; never blocks.
    pub(crate) fn free_in_order(self: &Arc<Self>, ptr: DevicePtr) {
        let free_now = thread_role::current() == Role::Free && !self.is_crowded();
        let freed = free_now && self.try_with(|turn| turn.free(ptr)).is_some();
        if !freed {
            self.deferred.lock().push(ptr);
            self.activate();
        }
    }

    /// So much is in flight that one more command might block the thread.
    fn is_crowded(&self) -> bool {
        self.submitted() - self.completed() > policy::BUSY_QUEUE
    }
}

impl Markable for Submitter {
    type Context = Lane;

    fn mark_tail(&mut self, lane: &Lane) -> Option<u64> {
        let tail = lane.timeline.submitted();
        if lane.is_complete(tail) {
            return Some(tail);
        }
        let placed = match &lane.word {
            Some(word) => {
                // ORDERING: Relaxed: read by `Lane::drop`, which nobody is beside. Before the call,
                // because one that failed may have been made all the same.
                lane.told.store(tail, Ordering::Relaxed);
                // SAFETY: the stream is this lane's, the word is its own until the lane is gone
                // and the last value was seen.
                unsafe { lane.engine.backend.write_word(lane.stream, word.device_ptr(), tail) }
            }
            None => self.record_event(lane, tail),
        };
        match placed {
            Ok(()) => {
                self.unmarked = 0;
                Some(tail)
            }
            Err(code) => {
                let error = lane.engine.refused(code);
                tracing::debug!(device = lane.engine.label(), %error, "no marker");
                None
            }
        }
    }
}

impl Submitter {
    /// Records an event behind ticket `tail` and enters it as a marker.
    fn record_event(&mut self, lane: &Lane, tail: u64) -> std::result::Result<(), DriverCode> {
        let event = lane.engine.event()?;
        // SAFETY: the stream is this lane's; the event is pooled, so nothing is pending on it.
        let recorded = unsafe { lane.engine.backend.event_record(event.raw(), lane.stream) };
        if let Err(code) = recorded {
            // It may have been recorded all the same: never to be lent again.
            event.spoil();
            return Err(code);
        }
        self.enter(lane, tail, event);
        Ok(())
    }

    fn enter(&mut self, lane: &Lane, ticket: u64, event: EventHandle) {
        self.touched = false;
        lane.markers.lock().push_back(Marker { ticket, event });
    }
}

/// A stream's submission lock, held: what a submitter may do.
pub(crate) struct Turn<'t, 'l> {
    pub(crate) lane: &'t Arc<Lane>,
    locked: &'t mut Locked<'l, Submitter>,
}

impl Turn<'_, '_> {
    /// The ticket of the operation about to be submitted. If an `Op` still observes the tail, its
    /// marker goes in front of this one.
    pub(crate) fn next_ticket(&mut self) -> u64 {
        let tail = self.lane.submitted();
        if self.lane.timeline.held() == Some(tail) {
            self.mark_tail();
        }
        tail + 1
    }

    /// Publishes `ticket` after its driver calls; `touched` says that it used buffers.
    pub(crate) fn publish(&mut self, ticket: u64, commands: u32, touched: bool) {
        self.lane.timeline.publish(ticket);
        self.locked.state.unmarked += commands;
        self.locked.state.touched |= touched;
        if touched && self.lane.engine.is_exact() {
            // A later dependency on this operation then waits for nothing behind it.
            if let Err(code) = self.place_event() {
                self.lane.engine.refused(code);
            }
        } else if self.locked.state.unmarked >= policy::MARK_EVERY {
            self.mark_tail();
        }
    }

    /// Before an operation that may be held up by something other than this stream's own work:
    /// puts an event behind what touched buffers, so that nobody who depends on that waits for the
    /// hold-up.
    pub(crate) fn fence_off(&mut self) {
        if self.locked.state.touched && self.place_event().is_err() {
            tracing::debug!("no event in front of a hold-up");
        }
    }

    /// Places a marker at the tail unless one is there.
    pub(crate) fn mark_tail(&mut self) {
        if !self.locked.is_marked(self.lane.submitted()) {
            self.locked.mark_tail(self.lane);
        }
    }

    /// Places an event at the tail that other streams can wait for.
    pub(crate) fn place_event(&mut self) -> std::result::Result<(), DriverCode> {
        let tail = self.lane.submitted();
        if self.lane.marker_behind(tail).is_none() && !self.lane.is_complete(tail) {
            self.locked.state.record_event(self.lane, tail)?;
            self.locked.state.unmarked = 0;
            self.locked.publish_mark(tail);
        }
        Ok(())
    }

    /// Enters an event that the caller recorded behind `ticket`, which it published.
    pub(crate) fn enter_event(&mut self, ticket: u64, event: EventHandle) {
        self.locked.state.enter(self.lane, ticket, event);
        self.locked.state.unmarked = 0;
        self.locked.publish_mark(ticket);
    }

    /// Up to which ticket of another stream this one already waits.
    pub(crate) fn waited_for(&self, other: u64) -> u64 {
        let waited = &self.locked.state.waited;
        waited.iter().find(|(lane, _)| *lane == other).map_or(0, |(_, ticket)| *ticket)
    }

    /// Makes this stream wait, on the device, for `ticket` of `other`.
    pub(crate) fn wait_for(
        &mut self,
        other: &Arc<Lane>,
        ticket: u64,
        event: &EventHandle,
    ) -> std::result::Result<(), DriverCode> {
        let backend = &self.lane.engine.backend;
        // SAFETY: the stream is this lane's and the handle keeps the event.
        unsafe { backend.stream_wait_event(self.lane.stream, event.raw()) }?;
        if other.engine.id != self.lane.engine.id {
            let ticket_here = self.lane.submitted() + 1;
            let on = Use { lane: other.clone(), ticket };
            self.lane.foreign.lock().push(ForeignWait { ticket: ticket_here, on });
            // ORDERING: Relaxed: read by futures of this or a later ticket.
            self.lane.has_foreign.store(true, Ordering::Relaxed);
        }
        let waited = &mut self.locked.state.waited;
        match waited.iter_mut().find(|(lane, _)| *lane == other.id) {
            Some((_, known)) => *known = ticket.max(*known),
            None => waited.push((other.id, ticket)),
        }
        Ok(())
    }

    /// Lends host memory to the device until `ticket` is complete.
    pub(crate) fn lend(&mut self, ticket: u64, bytes: u64, payload: Payload) {
        let mut lent = self.lane.lent.lock();
        lent.push_back(Lent { ticket, bytes, payload });
        // ORDERING: Relaxed: statistics, and a hint that is written under the lock.
        self.lane.lending.store(lent.len() as u64, Ordering::Relaxed);
        self.lane.engine.counters.lent_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Frees memory behind everything submitted so far.
    fn free(&mut self, ptr: DevicePtr) {
        let engine = &self.lane.engine;
        if engine.lost().is_some() {
            return;
        }
        // SAFETY: the owner gave the memory up; every use of it is on this stream, in front of
        // here, or complete.
        // STREAM: the free runs behind them.
        if let Err(code) = unsafe { engine.backend.free(self.lane.stream, ptr) } {
            let error = engine.refused(code);
            tracing::warn!(device = engine.label(), %error, "a free was refused");
        }
        self.locked.state.unmarked += 1;
    }

    fn free_deferred(&mut self) {
        let deferred = std::mem::take(&mut *self.lane.deferred.lock());
        for ptr in deferred {
            self.free(ptr);
        }
    }
}

/// Wakes a task; a waker that panics harms nobody else.
pub(crate) fn wake(waker: Waker) {
    if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
        tracing::error!("a waker panicked");
    }
}

impl Track for Arc<Lane> {
    fn id(&self) -> u64 {
        self.id
    }
}

impl PartialEq for Lane {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "stream {} of {}", self.id, self.engine.label())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let engine = &self.engine;
        // Not `completed`: an event in front of the word's last value may have raised that, and the
        // late write would complete the tickets of the line's next stream.
        // ORDERING: Relaxed, see `mark_tail`.
        let told = self.told.load(Ordering::Relaxed);
        if let Some(word) = self.word.take().filter(|word| word.read() >= told) {
            engine.words.put(word);
        }
        for marker in self.markers.get_mut().drain(..) {
            if marker.ticket > self.timeline.completed() {
                // It is still pending: never to be lent again.
                marker.event.spoil();
            }
        }
        if engine.lost().is_some() {
            // Lent beside the loss: nobody promises that the device has stopped.
            std::mem::forget(std::mem::take(self.lent.get_mut()));
            return;
        }
        if crate::at_exit::begun() {
            return;
        }
        let (backend, stream) = (engine.backend.clone(), self.stream);
        engine.act(move || {
            // SAFETY: the lane made the stream, nobody else has it, and the driver lets work that
            // is still on it finish.
            if let Err(error) = unsafe { backend.stream_destroy(stream) } {
                tracing::warn!(%error, "a stream was not destroyed");
            }
        });
    }
}
