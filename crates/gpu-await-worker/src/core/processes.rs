//! From the start of a process to its burial, and what follows for its calls.
//!
//! # Invariants
//! 1. A process that was started is reaped, whether or not somebody waits for it any more (`a_slow_start_holds_up_nobody`).
#![forbid(unsafe_code)]

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Core;
use crate::after::After;
use crate::calls::{CallId, Culprit, Died};
use crate::error::{Cause, Error, Guilt, Result, WorkerLost};
use crate::frame::Ending;
use crate::keep;
use crate::life::{Phase, Role, Step};
use crate::process::{Process, Refusal};
use crate::replace::Used;
use crate::restart::Sign;
use crate::slab::Slab;
use crate::spec::Spec;
use crate::stats::Recovery;
use crate::supervisor;
use crate::system::{self, Exit};
use crate::ticket::Outcome;

/// How many causes of deaths are remembered.
const MOST_CAUSES: usize = 16;

/// How much of a log goes with each call that is lost.
const LAST_LINES: usize = 1 << 10;

impl Core {
    /// Why the service did not start in time.
    pub(super) fn no_start(&self, spec: &Spec, role: Role) -> Cause {
        let limit = self.limits.start;
        let waits = self.seats[role]
            .process
            .iter()
            .flat_map(|it| it.asked.iter().chain(&it.asked_mut))
            .find_map(|name| {
                let key = spec.key(name);
                let process = keep::filler(&key).or_else(|| keep::writer(&key))?;
                Some(Cause::KeptNotFilled { name: name.clone(), process, limit })
            });
        waits.unwrap_or(Cause::NoStart(limit))
    }

    /// Has a process started, on the thread for that.
    pub(super) fn start(&mut self, spec: &Spec, role: Role) {
        self.incarnations += 1;
        self.seats[role].starting = Some(self.incarnations);
        if let Some(worker) = spec.supervised.upgrade() {
            self.starts_under_way += 1;
            supervisor::start(worker, self.incarnations);
        }
    }

    /// The process was started, or not.
    pub(crate) fn started(
        &mut self,
        spec: &Spec,
        incarnation: u32,
        started: Result<Process, Refusal>,
        now: Instant,
        after: &mut After,
    ) {
        after.wake = true;
        self.starts_under_way -= 1;
        let is_it = |role: &Role| self.seats[*role].starting == Some(incarnation);
        let role = Role::ALL.into_iter().find(is_it);
        if let Some(role) = role {
            self.seats[role].starting = None;
        }
        match (started, role) {
            (Ok(process), Some(role)) => {
                self.stats.starts += 1;
                self.refusal = None;
                let (pid, service) = (process.number(), spec.service);
                let standby = role == Role::Standby;
                after.log(move || {
                    tracing::info!(service, pid, standby, "a worker's process started");
                });
                self.seats[role].process = Some(process);
                if self.life.is_closing() {
                    self.kill(spec, role, Cause::Closed, Culprit::Outside, now, after);
                }
            }
            (Ok(process), None) => {
                system::kill(process.ends.handle.as_fd(), process.pid);
                self.unwanted.push(process);
            }
            (Err(refusal), Some(role)) => {
                self.not_started(spec, Cause::NotStarted(refusal.to_string()), after);
                self.gone(spec, role, now, Sign::Refused, after);
            }
            (Err(_), None) => {}
        }
    }

    /// The system refused what a start needs, to the front or to the process: not a death.
    fn not_started(&mut self, spec: &Spec, cause: Cause, after: &mut After) {
        self.stats.refused_starts += 1;
        let (service, why) = (spec.service, cause.to_string());
        self.refusal = Some(cause);
        after.log(move || tracing::warn!(service, %why, "a worker's process was not started"));
    }

    /// It has not said hello in time.
    pub(super) fn no_hello(&mut self, spec: &Spec, role: Role, now: Instant, after: &mut After) {
        let cause = Cause::NoHello(self.limits.hello);
        if self.seats[role].process.is_some() {
            return self.kill(spec, role, cause, Culprit::Outside, now, after);
        }
        // It has not even executed its program: it is killed when it does.
        self.seats[role].starting = None;
        let (service, why) = (spec.service, cause.to_string());
        after.log(move || tracing::warn!(service, %why, "a worker's process was not started"));
        self.caused(role, cause);
        self.gone(spec, role, now, Sign::Early, after);
    }

    /// The process serves: wakes everything that waited for it.
    pub(super) fn serves(&mut self, spec: &Spec, role: Role, after: &mut After) {
        let Some(process) = &self.seats[role].process else { return };
        let (service, pid) = (spec.service, process.number());
        if role == Role::Standby {
            let is_standby = spec.options.standby;
            return after.log(move || match is_standby {
                true => tracing::info!(service, pid, "a standby is ready"),
                false => tracing::info!(service, pid, "a replacement is ready"),
            });
        }
        self.has_served = true;
        after.waiters.extend(self.serving.drain(..).map(|waiter| (waiter, Ok(()))));
        let times = process.times;
        let (Some(hello), Some(serving)) = (times.hello, times.serving) else { return };
        let reaped = self.reaped.take();
        let recovery = Recovery {
            killed_to_reaped: reaped.map_or(Duration::ZERO, |(killed, reaped)| reaped - killed),
            reaped_to_started: reaped.map_or(Duration::ZERO, |(_, reaped)| times.started - reaped),
            started_to_hello: hello - times.started,
            hello_to_serving: serving - hello,
        };
        self.stats.last_start = Some(recovery);
        after.log(move || tracing::info!(service, pid, ?recovery, "a worker serves"));
    }

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
    fn caused(&mut self, role: Role, cause: Cause) {
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
    fn gone(&mut self, spec: &Spec, role: Role, now: Instant, sign: Sign, after: &mut After) {
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

    /// Begins anew if the worker was given up; returns whether it was.
    pub(crate) fn revive(&mut self, spec: &Spec, now: Instant, after: &mut After) -> Result<bool> {
        match &self.ended {
            None => return Ok(false),
            // After a panic the state under the lock is lost, and with it which lease has which part of the slab.
            Some(Error::GivenUp { cause, .. }) if !matches!(cause, Cause::Supervisor(_)) => {}
            Some(error) => return Err(error.clone()),
        }
        self.life.revive(now);
        self.probe.stop();
        (self.ended, self.reaped, self.has_served) = (None, None, false);
        self.causes.clear();
        let service = spec.service;
        after.log(move || tracing::info!(service, "a worker that was given up begins anew"));
        Ok(true)
    }

    /// There will be no more processes.
    pub(super) fn end(&mut self, spec: &Spec, error: Error, after: &mut After) {
        tell_end(spec, &error, after);
        for seat in &mut self.seats.0 {
            seat.starting = None;
            if let Some(process) = seat.process.take() {
                system::kill(process.ends.handle.as_fd(), process.pid);
                let owner = (spec.number(), process.incarnation);
                after.wake |= keep::gone(owner);
                keep::abandoned(owner);
                // It may still read them, but its answers are not heard.
                self.leases.process_gone(process.incarnation);
                self.unwanted.push(process);
            }
        }
        after.wake |= keep::released(spec.number());
        for ticket in self.calls.end_all() {
            after.end(ticket, Outcome::Failed(error.clone()));
        }
        let replacing = self.replacing.drain(..).map(|(_, waiter)| waiter);
        let waiters = [&mut self.serving, &mut self.room, &mut self.end].into_iter();
        let waiters = waiters.flat_map(std::mem::take).chain(replacing);
        after.waiters.extend(waiters.map(|waiter| (waiter, Err(error.clone()))));
        self.end_timeline(after, |_| Err(error.clone()));
        self.ended.get_or_insert(error);
    }
}

/// Tells that there will be no more processes.
pub(super) fn tell_end(spec: &Spec, error: &Error, after: &mut After) {
    let (service, why) = (spec.service, error.report());
    match error {
        Error::Closed => after.log(move || tracing::info!(service, "a worker was closed")),
        _ => after.log(move || tracing::error!(service, %why, "a worker is given up")),
    }
}
