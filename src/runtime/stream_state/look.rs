//! A look at a stream: how far it is, and which waiters that wakes.
//!
//! Waiters and the poller may all look; one look serves all.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::StreamState;
use super::markers::Asking;
use crate::error::Result;
use crate::thread::contain::wake;
use crate::thread::{exit, role};
use gpu_await_protocol::cadence::Plan;

impl StreamState {
    /// [`sweep`](Self::sweep), or by the poller where no driver call may be made.
    pub(crate) fn ask_here_or_there(self: &Arc<Self>) {
        if role::may_call_driver() {
            self.sweep();
        } else {
            self.activate_by(self.engine.now());
        }
    }

    /// Like [`ask_here_or_there`](Self::ask_here_or_there), for everything submitted, including work without
    /// a marker unless another thread is submitting right now.
    pub(crate) fn ask_after_all(self: &Arc<Self>) {
        let tail = self.submitted();
        // A stream that is shared may be captured by others, which a query would void; the whole device's has no
        // work of its own.
        let is_ours = self.driver.is_owned() && !self.driver.sharing().is_shared();
        if is_ours && !self.is_complete(tail) && role::may_call_driver() {
            // Under the lock: the driver does not answer about a stream on which it holds a thread.
            self.try_with(|turn| {
                if turn.stream.driver.is_through(&*turn.stream.engine.backend) == Ok(true) {
                    turn.stream.progress.timeline.complete(turn.stream.submitted());
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
        let now = self.engine.now();
        let moved = self.look(now);
        if moved {
            self.trace_seen();
        }
        self.settle();
        moved
    }

    /// Asks the driver how far the stream is, where that is possible. True if it was seen to have moved.
    pub(super) fn look(&self, now: u64) -> bool {
        let mut moved = false;
        // A lost device would only say so again.
        if self.engine.lost().is_none() {
            if !self.markers.may_say_more(self.completed()) {
                self.pace.was_pending(now);
                return false;
            }
            self.markers.look(|asking| {
                let before = self.completed();
                // Waiters learn of a loss from `mourn`, below.
                self.ask(asking).ok();
                if self.completed() > before {
                    moved = true;
                    self.pace.moved(now, || self.waiters.is_waited_for());
                } else {
                    self.pace.was_pending(now);
                }
            });
        }
        self.engine.mourn();
        moved
    }

    /// Raises `completed` as far as the markers allow, and leaves the consequences to the next look: for a
    /// submitter, under its lock.
    pub(super) fn ask_quietly(&self) {
        // The next look reports a loss.
        self.markers.look(|asking| drop(self.ask(asking)));
    }

    /// Raises `completed` as far as the markers allow.
    fn ask(&self, asking: Asking<'_>) -> Result<()> {
        let ask = || asking.ask(&self.progress.timeline, &*self.engine.backend);
        ask().or_else(|code| self.judge(code, ask))
    }

    /// Whether a shared stream is idle, other libraries' work included; `None` if its tickets answer that, once
    /// the work that a loan left has a ticket. On a lost device nothing more will happen. Where no driver call may
    /// be made, it is not known to be idle.
    pub(crate) fn is_idle_shared(self: &Arc<Self>) -> Option<bool> {
        let is_shared = self.driver.sharing().is_shared();
        if !is_shared && !self.driver.sharing().is_owed() {
            return None;
        }
        let lost = self.engine.lost().is_some();
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
                Some(self.engine.lost().is_some() || self.foreign.is_detached())
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
            self.look(self.engine.now());
            self.foreign.forget();
            // A future that began to wait during the look.
            if self.waiters.is_waited_for() {
                self.activate_by(self.engine.now());
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
        if self.engine.tracer.seen(self.id(), self.completed(), self.engine.now()) {
            self.engine.call_to_resolve();
        }
    }

    /// The plan for the wait for the work at the head, and when that began; `ahead_ns` more is allowed for.
    #[inline(always)]
    pub(super) fn plan(&self, now: u64, ahead_ns: u64) -> (u64, Plan) {
        let engine = &self.engine;
        let lag_ns = engine.pacing.lag_ns() + ahead_ns;
        let completion = engine.options.completion;
        self.pace.plan(completion, self.completed(), now, lag_ns, engine.pacing.rest_ns())
    }

    fn wake_settled(&self) {
        let upto = || {
            let lost =
                self.engine.lost().is_some() || self.foreign.dependency_lost(u64::MAX).is_some();
            if lost { u64::MAX } else { self.completed() }
        };
        self.waiters.settle(upto, |ticket, waker| {
            if self.engine.tracer.is_on() && self.is_complete(ticket) {
                self.engine.tracer.woken(self.id(), ticket, self.engine.now());
            }
            // ORDERING: Relaxed: a statistic.
            self.engine.state.counters.wake_ups.fetch_add(1, Ordering::Relaxed);
            self.engine.state.ready_tasks.enter();
            wake(waker);
        });
    }

    /// Takes back everything that the device has finished with, including what another thread is taking back.
    pub(crate) fn take_all_back(&self) {
        self.lent.take_back(&self.engine, &self.progress.timeline);
        self.lent.wait_for_takers();
    }

    /// After the loss: wakes all waiters and quarantines memory that is still lent, because the copy engines
    /// may not have stopped. At the end of the process the work goes on, and what is lent stays where it is.
    pub(crate) fn mourn(&self) {
        if !exit::begun() {
            self.lent.take_back(&self.engine, &self.progress.timeline);
            self.lent.quarantine(&self.engine);
        }
        self.wake_settled();
        self.foreign.forget();
    }
}
