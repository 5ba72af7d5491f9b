//! A look at a stream: when it is due, how far the stream is, and which waiters that wakes.
//!
//! Waiters and the poller may all look; one look serves all. The second half is the poller's: when it looks, which tasks it wakes ahead of
//! time, and its other duties.
//!
//! More than 500 lines: a look learns when the next one is due.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gpu_await_protocol::sync::Mutex;
use smallvec::SmallVec;

use super::StreamState;
use super::markers::Asking;
use crate::error::Result;
use crate::runtime::engine::Engine;
use crate::runtime::event_pool::Marker;
use crate::runtime::progress::StreamRef;
use crate::thread::contain::{wake, wake_by_ref};
use crate::thread::{contain, exit, role};
use gpu_await_protocol::cadence;
use gpu_await_protocol::cadence::{Age, Plan};
use gpu_await_protocol::estimator::Estimator;
use gpu_await_protocol::wait_queue::Notify;

impl StreamState {
    /// [`sweep`](Self::sweep), or by the poller where no driver call may be made.
    pub(crate) fn ask_here_or_there(self: &Arc<Self>) {
        if role::may_call_driver() {
            self.sweep();
        } else {
            self.activate_by(self.engine.pacing.now());
        }
    }

    /// Like [`ask_here_or_there`](Self::ask_here_or_there), for everything submitted, including work without
    /// a marker unless another thread is submitting right now.
    pub(crate) fn ask_after_all(self: &Arc<Self>) {
        let tail = self.progress.timeline.submitted();
        // A shared stream may be under capture by others, which a query would void; the whole device's stream has no work of its own.
        let is_ours = self.driver.is_owned() && !self.driver.sharing.is_shared();
        if is_ours && !self.progress.timeline.is_complete(tail) && role::may_call_driver() {
            // Under the lock: the driver does not answer about a stream on which it blocks a thread.
            self.try_with(|turn| {
                let stream = turn.stream;
                if stream.driver.is_through(&*stream.engine.backend) == Ok(true) {
                    stream.complete(stream.progress.timeline.submitted());
                }
            });
        }
        self.want(tail);
        self.ask_here_or_there();
    }

    /// Whether a thread is submitting to it.
    pub(crate) fn is_submitted_to(self: &Arc<Self>) -> bool {
        self.try_with(|_| ()).is_none()
    }

    /// Looks, and wakes the waiters of complete work. True if the stream was seen to have moved. Where no
    /// driver call may be made, nothing is done.
    pub(crate) fn sweep(&self) -> bool {
        if !role::may_call_driver() {
            return false;
        }
        let now = self.engine.pacing.now();
        let moved = self.look(now).is_some();
        if moved {
            self.trace_seen();
        }
        self.settle();
        moved
    }

    /// Asks the driver how far the stream is, where that is possible. Returns the last ticket that is complete, if it was seen to have
    /// moved.
    pub(super) fn look(&self, now: u64) -> Option<u64> {
        // A lost device would only say so again.
        if self.engine.state.lost().is_some() {
            self.engine.mourn();
            return None;
        }
        self.look_at_working(now)
    }

    /// [`look`](Self::look) at a stream of a device that was not lost a moment ago.
    pub(super) fn look_at_working(&self, now: u64) -> Option<u64> {
        if !self.markers.may_say_more(&self.progress.timeline) {
            self.pace.was_pending(now);
            return None;
        }
        let (mut moved, mut lost) = (None, false);
        self.markers.look(|asking| match self.ask(asking) {
            Ok(Some(completed)) => {
                moved = Some(completed);
                self.pace.moved(now, || self.waiters.is_waited_for());
            }
            answer => {
                lost |= answer.is_err();
                self.pace.was_pending(now);
            }
        });
        if lost {
            // Tells the waiters.
            self.engine.mourn();
        }
        moved
    }

    /// Raises `completed` as far as the markers allow, and leaves the consequences to the next look: for a
    /// submitter, under its lock.
    pub(super) fn ask_quietly(&self) {
        // The next look reports a loss.
        self.markers.look(|asking| drop(self.ask(asking)));
    }

    /// Raises `completed` as far as the markers allow; returns the new value, if that changed anything.
    fn ask(&self, asking: Asking<'_>) -> Result<Option<u64>> {
        let complete = |ticket| self.complete(ticket);
        let ask = || asking.ask(&self.progress.timeline, &*self.engine.backend, complete);
        ask().or_else(|code| self.judge(code, || ask().map(drop)).map(|()| None))
    }

    /// Whether a shared stream is idle, other libraries' work included; `None` if its tickets answer that, once
    /// the work that a loan left has a ticket. On a lost device nothing more will happen. Where no driver call may
    /// be made, it is not known to be idle.
    pub(crate) fn is_idle_shared(self: &Arc<Self>) -> Option<bool> {
        let is_shared = self.driver.sharing.is_shared();
        if !is_shared && !self.driver.sharing.is_owed() {
            return None;
        }
        let lost = self.engine.state.lost().is_some();
        if lost || !role::may_call_driver() {
            return Some(lost);
        }
        if !is_shared {
            // The lock's holder is submitting something.
            return self.try_with(|turn| turn.cover_loans()).is_none().then_some(false);
        }
        match self.driver.is_through(&*self.engine.backend) {
            Ok(is_through) => Some(is_through),
            Err(code) => {
                self.refused(code);
                // Nothing more will happen.
                Some(self.engine.state.lost().is_some() || self.foreign.is_detached())
            }
        }
    }

    /// Wakes the waiters of complete work, and takes back memory lent to it.
    pub(super) fn settle(&self) {
        self.wake_settled();
        self.lent.take_back(&self.engine, &self.progress.timeline);
        self.foreign.forget();
    }

    /// Takes back the events of complete work, on a stream that is never awaited and so looked at by nothing
    /// else. Wakes nobody, unless it finds the device lost: the caller may be a drop.
    #[cold]
    pub(super) fn tidy(self: &Arc<Self>) {
        // Otherwise the poller looks.
        if !self.waiters.is_waited_for() {
            self.look(self.engine.pacing.now());
            self.foreign.forget();
            // A future that began to wait during the look.
            if self.waiters.is_waited_for() {
                self.activate_by(self.engine.pacing.now());
            }
        }
        self.markers.tidied();
    }

    /// Reports to the tracer that the stream was seen to have moved.
    #[inline]
    pub(super) fn trace_seen(&self) {
        if self.engine.tracer.is_on() {
            self.note_seen();
        }
    }

    #[cold]
    #[inline(never)]
    fn note_seen(&self) {
        // The time after the look: it may have been complete since the look began.
        if self.engine.tracer.seen(
            self.progress.id,
            self.progress.timeline.completed(),
            self.engine.pacing.now(),
        ) {
            self.engine.call_to_resolve();
        }
    }

    /// The plan for the wait for the work at the head, and when that began; `ahead_ns` more is allowed for.
    #[inline(always)]
    pub(super) fn plan(&self, now: u64, ahead_ns: u64) -> (u64, Plan) {
        let (pace, Engine { pacing, options, .. }) = (&self.pace, &*self.engine);
        let since = pace.head_since();
        let age = Age {
            age_ns: now.saturating_sub(since),
            lag_ns: pacing.lag_ns() + ahead_ns,
            rest_ns: pacing.rest_ns(),
            is_armed: options.completion.rings()
                && pace.is_armed(self.progress.timeline.completed() + 1),
        };
        (since, cadence::plan(options.completion, age, &pace.estimator.lock()))
    }

    fn wake_settled(&self) {
        let upto = || {
            let lost = self.engine.state.lost().is_some()
                || self.foreign.dependency_lost(u64::MAX).is_some();
            if lost { u64::MAX } else { self.progress.timeline.completed() }
        };
        self.waiters.settle(upto, |ticket, waker| {
            if self.engine.tracer.is_on() && self.progress.timeline.is_complete(ticket) {
                self.engine.tracer.woken(self.progress.id, ticket, self.engine.pacing.now());
            }
            // ORDERING: Relaxed: a statistic.
            self.engine.state.counters.wake_ups.fetch_add(1, Ordering::Relaxed);
            self.engine.state.ready_tasks.enter();
            wake(waker);
        });
    }

    /// Takes back everything that the device has finished with; true if all is back, and no other thread is still taking something.
    pub(crate) fn take_all_back(&self) -> bool {
        self.lent.take_back(&self.engine, &self.progress.timeline);
        !self.lent.has_takers()
    }

    /// After the loss: wakes all waiters and quarantines memory that is still lent, because the copy engines
    /// may not have stopped. At the end of the process the work goes on, and what is lent stays where it is.
    pub(crate) fn mourn(&self) {
        if !exit::begun() {
            self.lent.take_back(&self.engine, &self.progress.timeline);
            self.lent.give_up(&self.engine);
        }
        self.wake_settled();
        self.foreign.forget();
    }
}

impl StreamState {
    /// Hands the stream to the poller, which looks at it when it is due to.
    pub(crate) fn activate(self: &Arc<Self>) {
        let due = self.engine.pacing.now() + cadence::MARK_WITHIN_NS;
        self.call(if self.waiters.hand_over() { Notify::HandOver } else { Notify::Before(due) });
    }

    /// Has the poller look at `due`, at the latest.
    pub(super) fn activate_by(self: &Arc<Self>, due: u64) {
        self.call(self.waiters.look_by(due));
    }

    /// Notifies the poller.
    pub(super) fn call(self: &Arc<Self>, call: Notify) {
        match call {
            Notify::HandOver => self.engine.hand_over(self.clone()),
            Notify::Before(due) => self.engine.pacing.attention.call_before(due),
        }
    }

    /// Takes the stream from the poller; false if there is work after all.
    pub(crate) fn deactivate(&self) -> bool {
        self.waiters.give_up(|| self.has_dues() || (self.word_is_late() && !self.is_stuck()))
    }

    /// Whether the poller must look again for that. Nothing comes back from a lost device; see `mourn`.
    pub(crate) fn has_dues(&self) -> bool {
        (self.owes() || self.owes_frees()) && self.engine.state.lost().is_none() && !self.is_stuck()
    }

    /// A word that is still to be written keeps its line, and so the stream.
    pub(super) fn word_is_late(&self) -> bool {
        let has_work = || self.driver.is_through(&*self.engine.backend) == Ok(false);
        self.markers.word.as_ref().is_some_and(|word| word.is_late(has_work))
    }

    /// The poller's look: wakes the waiters of complete work, and decides when to look again. True if the
    /// stream was seen to have moved.
    pub(crate) fn visit(self: &Arc<Self>, now: u64) -> bool {
        self.waiters.begin_look();
        // Requests of host functions, which place no markers.
        self.submission.serve(self);
        if self.pace.is_checked(now) {
            // A task looks for itself, and for the others, until it stops.
            self.waiters.look_again(now + cadence::CHECK_AGAIN_NS);
            return false;
        }
        let (since, waited_for) = (self.pace.head_since(), self.waiters.is_waited_for());
        let moved = self.look(now).is_some();
        if moved {
            self.trace_seen();
        }
        if moved && waited_for {
            self.engine.pacing.checkers.woke(now);
            self.pace.woke(now, since);
        }
        self.settle();
        let Some(ticket) = self.waiters.first() else { return moved };
        self.want(ticket);
        self.ask_after_others();
        if self.engine.options.completion.rings() {
            self.arm(ticket);
        }
        let (since, plan) = self.plan(now, 0);
        if let Some(until_ns) = plan.check_until_ns
            && self.is_worth_a_check(&plan, now)
        {
            self.alert(now, since, since + until_ns);
        }
        self.waiters.look_again((since + plan.look_ns).max(now + 1));
        moved
    }

    /// Wakes the first waiter, so that it checks for itself until `until`, if tasks may check and none was
    /// woken for that before. Until it does, which may take as long as a sleeping worker takes to wake up,
    /// the poller keeps looking.
    pub(super) fn alert(&self, now: u64, since: u64, until: u64) {
        let engine = &self.engine;
        if !engine.options.completion.checks()
            || self.pace.is_alerted_until(until)
            || !engine.pacing.checkers.may_yield(now)
            || engine.pacing.checkers.held(now) > 0
        {
            return;
        }
        self.pace.alert(now, since, until);
        self.waiters.wake_first(wake_by_ref);
    }

    /// Ensures that awaited work has a marker, and that owed work is done.
    pub(crate) fn press(self: &Arc<Self>) {
        if let Some(ticket) = self.waiters.first() {
            self.want(ticket);
        }
        if self.has_dues() {
            self.want(self.progress.timeline.submitted());
            self.try_with(|turn| turn.free_deferred());
        }
    }

    /// Asks about the other devices that this stream waits for: their own pollers have no reason to look if
    /// nothing of theirs is awaited.
    pub(super) fn ask_after_others(&self) {
        let mut others: SmallVec<[StreamRef<StreamState>; 2]> = SmallVec::new();
        self.foreign.visit(u64::MAX, |on| {
            others.extend(on.stream.stream());
            None::<()>
        });
        for other in others {
            other.sweep();
            other.engine.check_health().ok();
            other.engine.mourn();
        }
    }

    /// Has a doorbell armed behind the marker of `ticket`, which is awaited.
    pub(super) fn arm(self: &Arc<Self>, ticket: u64) {
        if self.progress.timeline.is_complete(ticket) || self.pace.is_armed(ticket) {
            return;
        }
        let mut marker = self.markers.behind(ticket);
        if marker.is_none() {
            // Words have no event to wait for: place one.
            self.try_with(|turn| turn.place_event().ok());
            marker = self.markers.behind(ticket);
        }
        let Some(Marker { event, .. }) = marker else { return };
        let engine = &self.engine;
        let Some(bell) = engine.pools.bells.take() else { return };
        let no_doorbell = |engine: &Engine<StreamState>, code| {
            let error = engine.refused(code);
            contain::log(|| tracing::debug!(device = engine.label(), %error, "no doorbell"));
        };
        if let Err(code) = bell.place(&*engine.backend, &event, self.waiters.next_look_cell()) {
            return no_doorbell(engine, code);
        }
        self.pace.arm(ticket);
        let stream = Arc::downgrade(self);
        engine.errand(move |engine| {
            // The work may have been complete long before.
            if stream.upgrade().is_none_or(|stream| stream.progress.timeline.is_complete(ticket)) {
                bell.disarm();
            } else if let Err(code) = bell.arm(&*engine.backend) {
                no_doorbell(engine, code);
            }
        });
    }
}

/// When a stream's work was waited for and looked at, and how long it took. All times are of the engine's clock, in nanoseconds.
///
/// ORDERING: Relaxed throughout: times, for guesses.
#[derive(Default)]
pub(super) struct Pace {
    /// When the work at the head was first waited for, or the work in front of it was complete.
    head_since: AtomicU64,
    /// When the stream was last seen not to have moved.
    pending_at: AtomicU64,
    /// When a task last looked for itself.
    checked_at: AtomicU64,
    /// The end of the last window for which a task was woken to check.
    alerted: AtomicU64,
    /// When the poller last woke a task, until that is polled; 0: it did not.
    woken_at: AtomicU64,
    /// The highest ticket behind which a doorbell was armed. Only the poller arms.
    armed: AtomicU64,
    estimator: Mutex<Estimator>,
    /// Whether all work that it remembers is short.
    is_short: AtomicBool,
}

impl Pace {
    /// Records that the work at the head is waited for.
    #[inline]
    pub(super) fn waited_for(&self, now: u64) {
        self.head_since.store(now, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn head_since(&self) -> u64 {
        self.head_since.load(Ordering::Relaxed)
    }

    /// Records that a look saw nothing new.
    #[inline]
    pub(super) fn was_pending(&self, now: u64) {
        self.pending_at.store(now, Ordering::Relaxed);
    }

    /// Records that a look saw the stream move, and how long the work at the head took, if it was waited for: a future that
    /// checks is not entered yet.
    #[inline]
    pub(super) fn moved(&self, now: u64, has_waiters: impl FnOnce() -> bool) {
        let since = self.head_since.swap(now, Ordering::Relaxed);
        if has_waiters() || self.is_checked(now) {
            let pending_at = self.pending_at.load(Ordering::Relaxed);
            let mut estimator = self.estimator.lock();
            estimator.learn(pending_at.saturating_sub(since), now.saturating_sub(since));
            self.is_short.store(estimator.is_short(cadence::WORD_MOST_NS), Ordering::Relaxed);
        }
    }

    /// The time of the last look.
    #[inline]
    pub(super) fn looked_at(&self) -> u64 {
        self.pending_at.load(Ordering::Relaxed).max(self.head_since())
    }

    /// Whether all work that it remembers is short.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        self.is_short.load(Ordering::Relaxed)
    }

    /// Whether a task looks for itself, and was polled lately.
    #[inline]
    pub(super) fn is_checked(&self, now: u64) -> bool {
        let checked_at = self.checked_at.load(Ordering::Relaxed);
        checked_at + cadence::CHECK_AGAIN_NS > now && checked_at != 0
    }

    /// Records that a task looks for itself at `now`; 0: it stops.
    #[inline]
    pub(super) fn check(&self, now: u64) {
        self.checked_at.store(now, Ordering::Relaxed);
    }

    /// Whether a window is open for which a task was woken to check.
    #[inline]
    pub(super) fn is_alerted(&self, now: u64) -> bool {
        self.alerted.load(Ordering::Relaxed) > now
    }

    /// Whether a task was woken to check until `until`. Only the poller alerts.
    pub(super) fn is_alerted_until(&self, until: u64) -> bool {
        self.alerted.load(Ordering::Relaxed) == until
    }

    /// Records that a task is woken now, to check until `until`.
    pub(super) fn alert(&self, now: u64, since: u64, until: u64) {
        self.alerted.store(until, Ordering::Relaxed);
        self.woke(now, since);
    }

    /// Records that a task is woken that waited since then: its poll shows how long that takes.
    pub(super) fn woke(&self, now: u64, since: u64) {
        if now.saturating_sub(since) >= cadence::LAG_FROM_NS {
            self.woken_at.store(now, Ordering::Relaxed);
        }
    }

    /// When the poller woke the task that is polled now, if it did.
    #[inline]
    pub(super) fn take_woken(&self) -> Option<u64> {
        if self.woken_at.load(Ordering::Relaxed) == 0 {
            return None;
        }
        Some(self.woken_at.swap(0, Ordering::Relaxed)).filter(|woken_at| *woken_at != 0)
    }

    /// Whether a doorbell was armed at or behind `ticket`.
    #[inline]
    pub(super) fn is_armed(&self, ticket: u64) -> bool {
        self.armed.load(Ordering::Relaxed) >= ticket
    }

    /// Records that a doorbell is armed behind `ticket`.
    pub(super) fn arm(&self, ticket: u64) {
        self.armed.store(ticket, Ordering::Relaxed);
    }
}
