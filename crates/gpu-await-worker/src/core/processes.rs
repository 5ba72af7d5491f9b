//! The starts of a worker's processes, until they serve, and the end of the worker, after which there are no more. What happens when
//! a process dies is in [`deaths`](super::deaths).
//!
//! # Invariants
//! 1. A process that was started is reaped, whether or not somebody waits for it any more (`a_slow_start_holds_up_nobody`).
#![forbid(unsafe_code)]

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::Core;
use crate::after::After;
use crate::calls::Culprit;
use crate::error::{Cause, Error, Result};
use crate::keep;
use crate::life::Role;
use crate::process::{Process, Refusal};
use crate::restart::Sign;
use crate::spec::Spec;
use crate::stats::Recovery;
use crate::supervisor;
use crate::system;
use crate::ticket::Outcome;

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
    pub(super) fn not_started(&mut self, spec: &Spec, cause: Cause, after: &mut After) {
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
