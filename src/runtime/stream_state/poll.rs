//! A future's wait for a ticket of a stream.
//!
//! | state | left by |
//! |---|---|
//! | not polled | its first poll |
//! | registered | completion: the thread that sees it takes the entry out and wakes the future |
//! | registered and put off | the same; or its next poll, one yield later, which looks |
//! | registered and checking: polled again after each yield | the same; or the end of its window, unless the next is open |
//! | registered and awake: polled again after each yield, without looking | the same; or waits that end less often |
//!
//! A future is put off while other tasks that were woken have not been polled yet. Extra polls only speed things up: a future that is
//! polled only when it is woken does get woken.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::task::{Context, Poll};

use super::StreamState;
use crate::backend::DeviceKind;
use crate::error::Result;
use crate::runtime::coop;
use crate::runtime::coop::Budget;
use crate::runtime::progress::DeviceState;
use crate::system;
use crate::thread::contain;
use crate::thread::relax::Relax;
use crate::thread::role;
use gpu_await_protocol::cadence;
use gpu_await_protocol::cadence::Plan;
use gpu_await_protocol::checkers::CheckPermit;
use gpu_await_protocol::timeline::Ended;
use gpu_await_protocol::wait_queue::{Entry, Registered};
use gpu_await_protocol::waiters::WaiterKey;

/// A future's state between polls.
#[derive(Debug, Default)]
pub(crate) struct WaitState {
    /// Its key, while the stream has it.
    key: Option<WaiterKey>,
    stage: Stage,
    /// It leaves all looks to others: it was asked to, tasks of the device do not check, or it was polled too late while it checked.
    never_checks: bool,
    /// Polled by a thread that has nothing else to do.
    blocking: bool,
    /// The task's budget, kept here because there is room.
    pub(crate) budget: Budget,
}

/// The states of the table.
#[derive(Clone, Copy, Debug, Default)]
enum Stage {
    /// It was not polled yet.
    #[default]
    New,
    /// An earlier point of its operation is complete: tasks that had to go first have run.
    Next,
    /// It waits to be woken.
    Waiting,
    /// It yielded to other tasks, and looks when it is polled again.
    PutOff,
    /// It is polled repeatedly, and looks each time.
    Checking { permit: CheckPermit, checked_at: u64 },
    /// It is polled repeatedly, without looking.
    Awake(CheckPermit),
}

impl WaitState {
    /// Whether the task is polled again without being woken.
    pub(crate) fn comes_again(&self) -> bool {
        matches!(self.stage, Stage::PutOff | Stage::Checking { .. } | Stage::Awake(_))
    }

    /// Whether the task looks for itself, each time that it is polled.
    pub(crate) fn is_checking(&self) -> bool {
        matches!(self.stage, Stage::Checking { .. })
    }

    /// Whether the stream or the device knows of it.
    pub(crate) fn is_waiting(&self) -> bool {
        self.key.is_some() || matches!(self.stage, Stage::Checking { .. } | Stage::Awake(_))
    }

    /// Whether no point of its operation was polled yet.
    pub(crate) fn is_new(&self) -> bool {
        matches!(self.stage, Stage::New)
    }

    /// Leaves the looking to the poller from the first poll on.
    pub(crate) fn never_check(&mut self) {
        self.never_checks = true;
    }

    /// The state for the future's next point, when this one is complete.
    pub(crate) fn next(&self) -> Self {
        let (never_checks, blocking) = (self.never_checks, self.blocking);
        WaitState { never_checks, blocking, stage: Stage::Next, ..WaitState::default() }
    }

    /// The stream is gone, which wakes its waiters.
    pub(crate) fn forget_gone(&mut self, device: &DeviceState) {
        self.stage = Stage::Waiting;
        if self.key.take().is_some() {
            device.ready_tasks.leave();
        }
    }

    /// Declares that a thread polls for this future alone: there is nothing to yield to in between.
    pub(crate) fn block(&mut self) {
        self.blocking = true;
    }
}

impl StreamState {
    /// Whether `ticket` is complete; if not, ensures that the task is polled again.
    pub(crate) fn poll_ticket(
        self: &Arc<Self>,
        ticket: u64,
        wait: &mut WaitState,
        cx: &mut Context<'_>,
    ) -> Poll<Result<()>> {
        let was_entered = wait.key.is_some();
        if was_entered && let Some(woken_at) = self.pace.take_woken() {
            self.engine.pacing.learn_lag(self.engine.pacing.now().saturating_sub(woken_at));
        }
        if let Some(outcome) = self.outcome(ticket) {
            self.forget(wait);
            return self.ready(ticket, outcome);
        }
        let now = self.engine.pacing.now();
        // In a host function it only registers: the poller asks, places the marker, and wakes.
        let may_ask = role::may_call_driver();
        let stage = wait.stage;
        match stage {
            Stage::Awake(permit) if self.stays_awake(permit, wait, cx, (now, may_ask)) => {
                return Poll::Pending;
            }
            // Woken for nothing, or ahead of time, to check.
            Stage::Waiting
                if was_entered && self.is_entered(wait, cx) && !self.pace.is_alerted(now) =>
            {
                return Poll::Pending;
            }
            Stage::Checking { .. } => {}
            _ => wait.stage = Stage::Waiting,
        }
        self.want_pending(ticket, may_ask);
        if !may_ask {
            self.stop_checking(wait);
        }
        let others_wait = self.waiters.is_waited_for();
        if matches!(stage, Stage::New | Stage::Next) && !others_wait {
            self.pace.waited_for(now);
        }
        let put_off = matches!(stage, Stage::New) && may_ask && self.lets_others_go(wait);
        if put_off {
            wait.stage = Stage::PutOff;
        }
        if matches!(stage, Stage::New) {
            let options = &self.engine.options;
            wait.never_checks |= options.stepped || !options.completion.checks();
        }
        let may_look = may_ask && !put_off;
        let checking = may_look && self.may_check(wait, now);
        // If others wait, another task looks for them.
        let looks = checking || (may_look && (matches!(stage, Stage::PutOff) || !others_wait));
        if looks && let Some(completed) = self.look_at_working(now) {
            let is_complete = completed >= ticket;
            if is_complete {
                // Before `settle`, which would wake it.
                self.forget(wait);
            }
            self.settle();
            if is_complete {
                return self.ready(ticket, Ok(()));
            }
        }
        let comes_again = checking || put_off;
        let due = if comes_again {
            now + cadence::CHECK_AGAIN_NS
        } else if may_ask {
            self.due(now)
        } else {
            now
        };
        if !self.is_entered(wait, cx) {
            let outcome = || self.outcome(ticket);
            match self.waiters.register(&mut wait.key, ticket, cx.waker(), due, outcome) {
                Registered::Waiting(call) => self.call(call),
                Registered::Settled(outcome) => {
                    self.forget(wait);
                    return self.ready(ticket, outcome);
                }
            }
        } else if !comes_again {
            self.call(self.waiters.look_by(due));
        }
        let may_stay = may_ask && !wait.never_checks;
        let is_polled_again =
            !wait.blocking && (comes_again || (may_stay && self.begins_to_stay_awake(wait, now)));
        if is_polled_again {
            self.yield_now(wait, cx);
        }
        Poll::Pending
    }

    #[inline]
    fn ready(&self, ticket: u64, outcome: Result<()>) -> Poll<Result<()>> {
        if self.engine.tracer.is_on() {
            self.trace_polled(ticket);
        }
        Poll::Ready(outcome)
    }

    #[cold]
    #[inline(never)]
    fn trace_polled(&self, ticket: u64) {
        // A loss has no completion to trace.
        if !self.progress.timeline.is_complete(ticket) {
            return;
        }
        // While it checked, nothing else looked.
        self.trace_seen();
        self.engine.tracer.polled(self.progress.id, ticket, self.engine.pacing.now());
    }

    /// Has the task polled again once other tasks had their turn. Other threads run first if this one would keep the core
    /// from the thread it waits for: the poller, while this task does not look itself, and on a host device the streams,
    /// which are threads.
    fn yield_now(&self, wait: &WaitState, cx: &mut Context<'_>) {
        let is_awake = matches!(wait.stage, Stage::Awake(_));
        if is_awake || matches!(self.engine.state.kind, DeviceKind::Host) {
            self.yield_thread();
        }
        coop::yield_now(cx);
    }

    /// Lets another thread have the core, unless that was costly lately.
    pub(crate) fn yield_thread(&self) {
        let (checkers, before) = (&self.engine.pacing.checkers, self.engine.pacing.now());
        if checkers.may_yield(before) {
            std::thread::yield_now();
            let now = self.engine.pacing.now();
            checkers.was_away(now.saturating_sub(before), now);
        }
    }

    /// Whether the task stays awake from now on, so that a worker of the executor does.
    fn begins_to_stay_awake(&self, wait: &mut WaitState, now: u64) -> bool {
        let permit = self.engine.pacing.checkers.stay_awake(now);
        permit.map(|permit| wait.stage = Stage::Awake(permit)).is_some()
    }

    /// Whether the task continues to stay awake, and is polled again.
    #[cold]
    fn stays_awake(
        &self,
        permit: CheckPermit,
        wait: &mut WaitState,
        cx: &mut Context<'_>,
        (now, may_ask): (u64, bool),
    ) -> bool {
        if !may_ask || self.pace.is_alerted(now) || !self.is_entered(wait, cx) {
            self.engine.pacing.checkers.leave(permit);
            return false;
        }
        let Some(permit) = self.engine.pacing.checkers.keep_awake(permit, now) else {
            return false;
        };
        wait.stage = Stage::Awake(permit);
        self.yield_now(wait, cx);
        true
    }

    /// Whether the stream has the future, with this waker. If it was taken out, it was woken, and is
    /// polled now.
    fn is_entered(&self, wait: &mut WaitState, cx: &Context<'_>) -> bool {
        if wait.key.is_none() {
            return false;
        }
        let entry = self.waiters.entry(wait.key, cx.waker());
        if entry == Entry::Taken {
            wait.key = None;
            self.engine.state.ready_tasks.leave();
        }
        entry == Entry::Current
    }

    /// Whether tasks that were woken wait for a worker: a new wait lets them go first.
    fn lets_others_go(&self, wait: &WaitState) -> bool {
        !self.engine.state.ready_tasks.is_empty()
            && !wait.blocking
            && !wait.never_checks
            && self.engine.options.completion.checks()
    }

    /// Drops a future's registration.
    pub(crate) fn forget(&self, wait: &mut WaitState) {
        self.stop_checking(wait);
        if !self.waiters.leave(&mut wait.key, contain::let_go) {
            self.engine.state.ready_tasks.leave();
        }
    }

    /// Blocks the calling thread until `ticket` is complete.
    pub(crate) fn block_until(&self, ticket: u64) -> Result<()> {
        let mut relax = Relax::default();
        loop {
            self.want(ticket);
            self.sweep();
            if let Some(outcome) = self.outcome(ticket) {
                return outcome;
            }
            relax.pause();
        }
    }

    pub(super) fn outcome(&self, ticket: u64) -> Option<Result<()>> {
        let (timeline, device) = (&self.progress.timeline, &self.engine.state);
        let lost = match timeline.ended(ticket, &device.loss) {
            Some(Ended::Complete) => return Some(Ok(())),
            Some(Ended::Lost) => return device.lost().map(|lost| Err(lost.clone())),
            None => self.foreign.dependency_lost(ticket)?,
        };
        // Work that completed before the loss is complete. Once this reports a failure, the ticket must never become complete.
        Some(if timeline.give_up(ticket) { Err(lost) } else { Ok(()) })
    }

    /// Whether the task checks now: it continues a check, or begins one; at the end of a window it may do both.
    fn may_check(&self, wait: &mut WaitState, now: u64) -> bool {
        if let Stage::Checking { permit, checked_at } = wait.stage {
            let away_ns = now.saturating_sub(checked_at);
            if away_ns > cadence::SLICE_NS && system::was_preempted() {
                self.engine.pacing.checkers.was_away(away_ns, now);
            }
            // The executor has other things to do: by this time the poller looks.
            let is_late = away_ns > cadence::CHECK_AGAIN_NS;
            if now < permit.until() && !is_late && self.engine.pacing.checkers.may_yield(now) {
                wait.stage = Stage::Checking { permit, checked_at: now };
                self.pace.check(now);
                return true;
            }
            // Another window may be open already.
            self.stop_checking(wait);
            wait.never_checks |= is_late;
        }
        // One task per stream: its look serves the others.
        if wait.never_checks || self.pace.is_checked(now) {
            return false;
        }
        // A task that was woken to check may come sooner than most.
        let (since, plan) = self.plan(now, cadence::NAP_LEAST_NS);
        let Some(until_ns) = plan.check_until_ns else { return false };
        if !self.is_worth_a_check(&plan, now) {
            return false;
        }
        let permit = self.engine.pacing.checkers.enter(now, since + until_ns);
        let Some(permit) = permit else { return false };
        wait.stage = Stage::Checking { permit, checked_at: now };
        self.pace.check(now);
        true
    }

    /// Whether a check pays off. A length that does not repeat is checked only to have one task awake.
    pub(super) fn is_worth_a_check(&self, plan: &Plan, now: u64) -> bool {
        plan.repeats || self.engine.pacing.checkers.all_sleep(now)
    }

    fn stop_checking(&self, wait: &mut WaitState) {
        if let Stage::Checking { permit, .. } | Stage::Awake(permit) = wait.stage {
            wait.stage = Stage::Waiting;
            self.engine.pacing.checkers.leave(permit);
            self.pace.check(0);
        }
    }

    /// When the poller must look for a future that was polled at `now` and does not check.
    fn due(&self, now: u64) -> u64 {
        // Another task may check: the poller need not come before that stops.
        if self.pace.is_checked(now) {
            return now + cadence::CHECK_AGAIN_NS;
        }
        let (since, plan) = self.plan(now, 0);
        since + plan.look_ns
    }
}
