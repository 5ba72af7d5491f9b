//! The poller's side of a stream: when it looks, which tasks it wakes ahead of time, and its other duties.
#![forbid(unsafe_code)]

use std::sync::Arc;

use smallvec::SmallVec;

use super::StreamState;
use crate::runtime::engine::Engine;
use crate::runtime::event_pool::Marker;
use crate::runtime::progress::StreamRef;
use crate::thread::contain;
use crate::thread::contain::wake_by_ref;
use gpu_await_protocol::cadence;
use gpu_await_protocol::wait_queue::Notify;

impl StreamState {
    // ---- the poller's side ----------------------------------------------------------------

    /// Hands the stream to the poller, which looks at it when it is due to.
    pub(crate) fn activate(self: &Arc<Self>) {
        let due = self.engine.now() + cadence::MARK_WITHIN_NS;
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

    /// Whether memory waits to be taken back or freed, or work that nothing else waits for to end.
    #[inline]
    pub(super) fn owes(&self) -> bool {
        !self.lent.is_empty()
            || self.memory.has_deferred()
            || (self.is_deserted() && self.in_flight() > 0)
    }

    /// Whether the poller has to come for that. Of a lost device nothing comes back; see `mourn`.
    pub(crate) fn has_dues(&self) -> bool {
        (self.owes() || self.owes_frees()) && self.engine.lost().is_none() && !self.is_stuck()
    }

    /// After a submission: leaves the owed work to the poller. Memory lent during a loss, unseen by `mourn`,
    /// has no other collector: either `mourn` sees it under the lock of `lent`, or the loss is seen here.
    pub(super) fn see_to_dues(self: &Arc<Self>) {
        if self.engine.lost().is_some() {
            self.mourn();
        } else if !self.is_stuck() {
            self.activate();
        }
    }

    /// A word that is still to be written keeps its line, and so the stream.
    pub(super) fn word_is_late(&self) -> bool {
        let has_work = || self.driver.is_through(&*self.engine.backend) == Ok(false);
        self.markers.word().is_some_and(|word| word.is_late(has_work))
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
        let moved = self.look(now);
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
            self.want(self.submitted());
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
        if self.is_complete(ticket) || self.pace.is_armed(ticket) {
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
            if stream.upgrade().is_none_or(|stream| stream.is_complete(ticket)) {
                bell.disarm();
            } else if let Err(code) = bell.arm(&*engine.backend) {
                no_doorbell(engine, code);
            }
        });
    }
}
