//! What happens when a process of a worker dies: a standby takes over, the process is buried or set aside, its last words are kept, its calls
//! end or run again, and the next process is due. How each of its calls ends is decided in [`calls`](crate::calls), and when the next process
//! starts, if any does, in [`restart`](crate::restart).
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use super::Core;
use crate::after::After;
use crate::calls::{CallId, Culprit, Died};
use crate::error::{Cause, Error, Guilt, WorkerLost};
use crate::frame::Ending;
use crate::keep;
use crate::life::{Phase, Role, Step};
use crate::process::Process;
use crate::replace::Used;
use crate::restart::Sign;
use crate::slab::Slab;
use crate::spec::Spec;
use crate::system::Exit;
use crate::ticket::Outcome;

/// How many causes of deaths are remembered.
const MOST_CAUSES: usize = 16;

/// How much of a log goes with each call that is lost.
const LAST_LINES: usize = 1 << 10;

impl Core {
    /// Has the standby take over if the main process takes no more calls.
    pub(super) fn fall(&mut self, spec: &Spec, now: Instant, after: &mut After) {
        if self.seats[Role::Main].process.as_ref().is_some_and(Process::is_falling) {
            self.take_over(spec, now, after);
        }
    }

    /// Has the standby take over from a process that is gone; returns that one's role from now on.
    pub(super) fn replaced(
        &mut self,
        spec: &Spec,
        role: Role,
        now: Instant,
        after: &mut After,
    ) -> Role {
        if role == Role::Main && self.take_over(spec, now, after) { Role::Standby } else { role }
    }

    /// Swaps the standby with the main process; returns whether there is a standby.
    fn take_over(&mut self, spec: &Spec, now: Instant, after: &mut After) -> bool {
        // A standby that does not run would hold up all calls until it does.
        let standby = self.seats[Role::Standby].process.as_ref();
        if self.life.can_take_over() && standby.is_some_and(Process::is_still) {
            self.kill(spec, Role::Standby, Cause::Stopped, Culprit::Outside, now, after);
        }
        if !self.life.take_over(now) {
            return false;
        }
        self.seats.0.reverse();
        self.stats.takeovers += 1;
        let main = self.seats[Role::Main].process.as_mut();
        let pid = main.map(|process| {
            process.used = Used::new(now);
            process.number()
        });
        let (service, ready) = (spec.service, self.life.is_serving());
        after.log(move || tracing::info!(service, pid, ready, "a standby takes over"));
        true
    }

    /// The process cannot be killed: its calls end, its memory is left alone, and another one may start.
    pub(super) fn set_aside(
        &mut self,
        spec: &Spec,
        role: Role,
        now: Instant,
        buffer: &mut [u8],
        after: &mut After,
    ) {
        self.hear(spec, role, now, usize::MAX, buffer, after);
        let Some(mut process) = self.seats[role].process.take() else { return };
        let owner = (spec.number(), process.incarnation);
        after.wake |= keep::gone(owner);
        keep::abandoned(owner);
        let (cause, culprit) = process.cause(Exit::Unknown);
        let (service, pid) = (spec.service, process.number());
        after.log(move || tracing::error!(service, pid, "a killed process does not go: set aside"));
        self.remember(&mut process, &cause);
        let of = (process.incarnation, process.responses.clone());
        self.stuck.push(process);
        let sign = self.sign(of.0);
        self.lose(spec, role, of, (cause, culprit), now, after);
        self.gone(spec, role, now, sign, after);
    }

    /// The process is gone: everything that it sent is handled, and then nothing of it counts any more.
    pub(super) fn bury(
        &mut self,
        spec: &Spec,
        role: Role,
        exit: Exit,
        now: Instant,
        buffer: &mut [u8],
        after: &mut After,
    ) {
        self.hear(spec, role, now, usize::MAX, buffer, after);
        let Some(mut process) = self.seats[role].process.take() else { return };
        let (cause, culprit) = process.cause(exit);
        let owner = (spec.number(), process.incarnation);
        let untrusted = matches!(cause, Cause::Protocol(_));
        after.wake |= keep::gone(owner) | keep::reaped(owner, untrusted, now, &process.ends);
        if matches!(process.told, Some((Ending::MemoryFault, ..))) {
            keep::forget_gpu(&spec.options.gpu);
        }
        self.remember(&mut process, &cause);
        let served = process.times.serving.map(|serving| now - serving);
        if served.is_some_and(|served| served >= spec.options.restart.settled) {
            self.probe.settled();
        }
        if role == Role::Main {
            self.reaped = Some((process.times.killed.unwrap_or(now), now));
        }
        let (service, pid, text) = (spec.service, process.number(), cause.to_string());
        let killed = process.times.killed.map(|killed| now - killed);
        let ends = self.life.is_closing() || self.life.is_drained(role);
        let is_wanted = ends && matches!(cause, Cause::Closed);
        let is_refused = cause.is_refused_start();
        match is_wanted {
            true => after.log(move || {
                tracing::info!(service, pid, "a worker's process ended, as it was asked to");
            }),
            false if is_refused => self.not_started(spec, cause.clone(), after),
            false => after.log(move || {
                tracing::warn!(service, pid, cause = %text, ?killed, "a worker's process died");
            }),
        }
        // The memory of a process that is not reaped yet is not free yet.
        let excused = matches!(cause, Cause::OutOfDeviceMemory(_)) && self.life.stuck() > 0;
        let of = (process.incarnation, process.responses.clone());
        let sign = match excused {
            true => Sign::None,
            false if is_refused => Sign::Refused,
            false => self.sign(of.0),
        };
        self.lose(spec, role, of, (cause, culprit), now, after);
        self.gone(spec, role, now, sign, after);
        after.gone.push(process);
    }

    /// Keeps what a process wrote, to its end.
    fn remember(&mut self, process: &mut Process, cause: &Cause) {
        process.read_log(0);
        process.read_log(1);
        self.last_log = process.log.text().into();
        self.last_lines = process.log.last_lines(LAST_LINES).into();
        self.last_death = Some((process.number(), cause.to_string()));
    }

    /// What the process's death says about the service, before its calls are lost.
    fn sign(&self, process: u32) -> Sign {
        if self.calls.running_in(process) > 0 { Sign::InCalls } else { Sign::Early }
    }

    /// Ends the calls that died with the process.
    fn lose(
        &mut self,
        spec: &Spec,
        role: Role,
        (process, responses): (u32, Arc<Slab>),
        (cause, culprit): (Cause, Culprit),
        now: Instant,
        after: &mut After,
    ) {
        let begun = |id: CallId| responses.begun(id.slot()).age(id.generation()).is_some();
        // Neither a process that was replaced and has answered everything, nor one that ends with the worker or was never started, has died.
        let ends = self.life.is_closing() || self.life.is_drained(role);
        let is_over = ends && cause == Cause::Closed || cause.is_refused_start();
        self.stats.deaths += u64::from(!is_over);
        let is_standby = role == Role::Standby && !self.life.is_replaced(role);
        self.stats.standby_deaths += u64::from(is_standby && !is_over);
        if self.leases.process_gone(process) {
            after.waiters.extend(self.room.drain(..).map(|waiter| (waiter, Ok(()))));
        }
        let Died { lost, blamed } = self.calls.died(process, culprit, begun);
        self.blame(spec, blamed, now, after);
        let lines = self.last_lines.clone();
        let died = || {
            let (cause, log, guilt) = (cause.clone(), lines.clone(), Guilt::Innocent);
            Error::Lost(WorkerLost { cause, guilt, attempt: 1, idempotent: false, log })
        };
        self.lose_timeline(process, died, after);
        for lost in lost {
            #[cfg(test)]
            spec.trips.trip(crate::trips::Trip::Lose);
            self.stats.lost_calls += 1;
            let error = WorkerLost {
                cause: cause.clone(),
                guilt: lost.guilt,
                attempt: lost.attempt,
                idempotent: lost.value.terms.attempts > 1,
                log: self.last_lines.clone(),
            };
            after.end(lost.value, Outcome::Failed(Error::Lost(error)));
        }
        if !is_over {
            self.caused(role, cause);
        }
    }

    /// Notes why a process died. That of a standby is no reason to give the worker up.
    pub(super) fn caused(&mut self, role: Role, cause: Cause) {
        self.died_of = Some(cause.clone());
        if role == Role::Standby && !self.life.is_replaced(role) {
            self.stats.last_standby_cause = Some(cause);
            return;
        }
        if self.causes.len() == MOST_CAUSES {
            self.causes.pop_front();
        }
        self.causes.push_back(cause.clone());
        self.last_cause = Some(cause);
    }

    /// There is no process: decides when the next one starts, if any does.
    pub(super) fn gone(
        &mut self,
        spec: &Spec,
        role: Role,
        now: Instant,
        sign: Sign,
        after: &mut After,
    ) {
        // A worker that never served is not tried again: whoever spawns it wants to know.
        let hopeless = !self.has_served && sign != Sign::None;
        match self.life.gone(role, now, sign, &spec.options.restart, &self.limits) {
            Step::End => self.end(spec, Error::Closed, after),
            step if hopeless || step == Step::GiveUp => {
                self.life.end();
                let refusal = self.refusal.clone().filter(|_| sign == Sign::Refused);
                let cause = refusal.or_else(|| self.last_cause.clone()).unwrap_or(Cause::Unknown);
                let error = self.given_up(cause);
                if spec.options.probes {
                    self.probe.given_up(now, &spec.options.restart);
                }
                self.end(spec, error, after);
            }
            Step::NoStandby => {
                // Either a standby's cause, or that of a main process whose standby took over.
                let refusal = self.refusal.clone().filter(|_| sign == Sign::Refused);
                let cause = refusal.or_else(|| self.died_of.clone()).unwrap_or(Cause::Unknown);
                let (service, text) = (spec.service, cause.to_string());
                after.log(move || {
                    tracing::error!(service, cause = %text, "no standby is started any more");
                });
                self.no_standby = Some(cause);
                self.not_replaced(sign, now, after);
            }
            Step::NotReplaced => self.not_replaced(sign, now, after),
            _ => {}
        }
        let Phase::Waiting(until) = self.life.phase(role) else { return };
        let (service, delay) = (spec.service, until - now);
        if !delay.is_zero() {
            after.log(move || tracing::info!(service, ?delay, "a worker's next process waits"));
        }
    }
}
