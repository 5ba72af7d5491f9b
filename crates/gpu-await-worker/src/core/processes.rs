//! From the start of a process to its burial, and what follows for its calls.
//!
//! # Invariants
//! 1. A process that was started is reaped, whether or not somebody waits for it any more (`a_slow_start_holds_up_nobody`).
#![forbid(unsafe_code)]

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::Core;
use crate::calls::Culprit;
use crate::error::{Cause, Error, Result, WorkerLost};
use crate::frame::Ending;
use crate::group::{After, Group, Outcome};
use crate::keep;
use crate::life::{Phase, Step};
use crate::process::Process;
use crate::restart::Sign;
use crate::supervisor;
use crate::system::{self, Exit};
use crate::worker::Recovery;

/// How many causes of deaths are remembered.
const MOST_CAUSES: usize = 16;

/// How much of a log goes with each call that is lost.
const LAST_LINES: usize = 1 << 10;

impl Core {
    /// Why the service did not start in time.
    pub(super) fn no_start(&self, group: &Group) -> Cause {
        let limit = self.limits.start;
        let waits = self.process.iter().flat_map(|process| &process.asked).find_map(|name| {
            let process = keep::filler(&group.key(name))?;
            Some(Cause::KeptNotFilled { name: name.clone(), process, limit })
        });
        waits.unwrap_or(Cause::NoStart(limit))
    }

    /// Has one started, on the thread for that.
    pub(super) fn start(&mut self, group: &Group) {
        self.incarnations += 1;
        self.starting = Some(self.incarnations);
        if let Some(group) = group.this().upgrade() {
            self.starts_under_way += 1;
            supervisor::start(group, self.incarnations);
        }
    }

    /// It was started, or not.
    pub(crate) fn started(
        &mut self,
        group: &Group,
        incarnation: u32,
        started: std::io::Result<Process>,
        now: Instant,
        after: &mut After,
    ) {
        after.wake = true;
        self.starts_under_way -= 1;
        let is_wanted = self.starting == Some(incarnation);
        if is_wanted {
            self.starting = None;
        }
        match started {
            Ok(process) if is_wanted => {
                self.stats.starts += 1;
                let (pid, service) = (process.number(), group.service);
                after.log(move || tracing::info!(service, pid, "a worker's process started"));
                self.process = Some(process);
                if self.life.is_closing() {
                    self.kill(group, Cause::Closed, Culprit::Outside, now, after);
                }
            }
            Ok(process) => {
                system::kill(process.ends.handle.as_fd(), process.pid);
                self.unwanted.push(process);
            }
            Err(error) if is_wanted => {
                self.stats.refused_starts += 1;
                let (service, why) = (group.service, error.to_string());
                after.log(move || {
                    tracing::warn!(service, %why, "a worker's process was not started");
                });
                self.caused(Cause::NotStarted(error.to_string()));
                self.gone(group, now, Sign::Refused, after);
            }
            Err(_) => {}
        }
    }

    /// It has not said hello in time.
    pub(super) fn no_hello(&mut self, group: &Group, now: Instant, after: &mut After) {
        let cause = Cause::NoHello(self.limits.hello);
        if self.process.is_some() {
            return self.kill(group, cause, Culprit::Outside, now, after);
        }
        // It does not even execute its program: it is killed when it does.
        self.starting = None;
        let (service, why) = (group.service, cause.to_string());
        after.log(move || tracing::warn!(service, %why, "a worker's process was not started"));
        self.caused(cause);
        self.gone(group, now, Sign::Early, after);
    }

    /// The process serves: whoever waited for it goes on.
    pub(super) fn serves(&mut self, group: &Group, after: &mut After) {
        self.has_served = true;
        after.waiters.extend(self.serving.drain(..).map(|waiter| (waiter, Ok(()))));
        let Some(process) = &self.process else { return };
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
        let (service, pid) = (group.service, process.number());
        after.log(move || tracing::info!(service, pid, ?recovery, "a worker serves"));
    }

    /// The process cannot be killed: its calls end, its memory is left alone, and another one may start.
    pub(super) fn set_aside(
        &mut self,
        group: &Group,
        now: Instant,
        buffer: &mut [u8],
        after: &mut After,
    ) {
        self.hear(group, now, usize::MAX, buffer, after);
        let Some(mut process) = self.process.take() else { return };
        after.wake |= keep::gone((group.number(), process.incarnation));
        let (cause, culprit) = process.cause(Exit::Unknown);
        let (service, pid) = (group.service, process.number());
        after.log(move || tracing::error!(service, pid, "a killed process does not go: set aside"));
        self.remember(&mut process, &cause);
        self.stuck.push(process);
        let sign = self.sign();
        self.lose(group, cause, culprit, after);
        self.gone(group, now, sign, after);
    }

    /// The process is gone: everything that it said counts, and then nothing of it does any more.
    pub(super) fn bury(
        &mut self,
        group: &Group,
        exit: Exit,
        now: Instant,
        buffer: &mut [u8],
        after: &mut After,
    ) {
        self.hear(group, now, usize::MAX, buffer, after);
        let Some(mut process) = self.process.take() else { return };
        let (cause, culprit) = process.cause(exit);
        after.wake |= keep::gone((group.number(), process.incarnation));
        if matches!(process.told, Some((Ending::MemoryFault, ..))) {
            keep::forget_gpu(&group.options.gpu);
        }
        self.remember(&mut process, &cause);
        self.reaped = Some((process.times.killed.unwrap_or(now), now));
        let (service, pid, text) = (group.service, process.number(), cause.to_string());
        let killed = process.times.killed.map(|killed| now - killed);
        let is_wanted = self.life.is_closing() && matches!(cause, Cause::Closed);
        after.log(move || match is_wanted {
            true => tracing::info!(service, pid, "a worker's process ended, as it was asked to"),
            false => {
                tracing::warn!(service, pid, cause = %text, ?killed, "a worker's process died")
            }
        });
        // The memory of a process that is not reaped yet is not free yet.
        let excused = matches!(cause, Cause::OutOfDeviceMemory(_)) && self.life.stuck() > 0;
        let sign = if excused { Sign::None } else { self.sign() };
        self.lose(group, cause, culprit, after);
        self.gone(group, now, sign, after);
    }

    /// Keeps what a process wrote, to its end.
    fn remember(&mut self, process: &mut Process, cause: &Cause) {
        process.read_log(0);
        process.read_log(1);
        self.last_log = process.log.text().into();
        self.last_lines = process.log.last_lines(LAST_LINES).into();
        self.last_death = Some((process.number(), cause.to_string()));
    }

    /// What the death of the process says, before its calls are lost.
    fn sign(&self) -> Sign {
        if self.calls.running() > 0 { Sign::InCalls } else { Sign::Early }
    }

    /// Ends the calls that died with the process.
    #[cfg_attr(not(test), expect(unused_variables, reason = "tests panic here"))]
    fn lose(&mut self, group: &Group, cause: Cause, culprit: Culprit, after: &mut After) {
        self.stats.deaths += 1;
        // They are the next process's from now on.
        (self.stats.is_stopped, self.stats.is_busy) = (false, false);
        if self.leases.other_side_gone() {
            after.waiters.extend(self.room.drain(..).map(|waiter| (waiter, Ok(()))));
        }
        for lost in self.calls.died(culprit) {
            #[cfg(test)]
            group.trips.trip(crate::supervisor::tests::Trip::Lose);
            self.stats.lost_calls += 1;
            let error = WorkerLost {
                cause: cause.clone(),
                guilt: lost.guilt,
                attempt: lost.attempt,
                log: self.last_lines.clone(),
            };
            after.end(lost.value, Outcome::Failed(Error::Lost(error)));
        }
        self.caused(cause);
    }

    /// Notes why a process died.
    fn caused(&mut self, cause: Cause) {
        if self.causes.len() == MOST_CAUSES {
            self.causes.pop_front();
        }
        self.causes.push_back(cause.clone());
        self.last_cause = Some(cause);
    }

    /// There is no process: when the next one starts, or that none does.
    fn gone(&mut self, group: &Group, now: Instant, sign: Sign, after: &mut After) {
        // A worker that never served is not tried again: whoever spawns it wants to know.
        let hopeless = !self.has_served && sign != Sign::None;
        match self.life.gone(now, sign, &group.options.restart, &self.limits) {
            Step::End => self.end(group, Error::Closed, after),
            step if hopeless || step == Step::GiveUp => {
                self.life.end();
                let cause = self.last_cause.clone().unwrap_or(Cause::Unknown);
                let error = self.given_up(cause);
                self.end(group, error, after);
            }
            _ => {}
        }
        let Phase::Waiting(until) = self.life.phase() else { return };
        let (service, delay) = (group.service, until - now);
        if !delay.is_zero() {
            after.log(move || tracing::info!(service, ?delay, "a worker's next process waits"));
        }
    }

    /// Begins anew if the worker was given up; returns whether it was.
    pub(crate) fn revive(
        &mut self,
        group: &Group,
        now: Instant,
        after: &mut After,
    ) -> Result<bool> {
        match &self.ended {
            None => return Ok(false),
            // What was under the lock is lost, and with it who has which part of the slab.
            Some(Error::GivenUp { cause, .. }) if !matches!(cause, Cause::Supervisor(_)) => {}
            Some(error) => return Err(error.clone()),
        }
        self.life.revive(now);
        (self.ended, self.reaped, self.has_served) = (None, None, false);
        self.causes.clear();
        let service = group.service;
        after.log(move || tracing::info!(service, "a worker that was given up begins anew"));
        Ok(true)
    }

    /// There will be no process any more.
    pub(super) fn end(&mut self, group: &Group, error: Error, after: &mut After) {
        tell_end(group, &error, after);
        for ticket in self.calls.end_all() {
            after.end(ticket, Outcome::Failed(error.clone()));
        }
        let waiters = self.serving.drain(..).chain(self.room.drain(..));
        after.waiters.extend(waiters.map(|waiter| (waiter, Err(error.clone()))));
        self.ended.get_or_insert(error);
    }
}

/// Tells that there will be no process any more.
pub(super) fn tell_end(group: &Group, error: &Error, after: &mut After) {
    let (service, why) = (group.service, error.to_string());
    match error {
        Error::Closed => after.log(move || tracing::info!(service, "a worker was closed")),
        _ => after.log(move || tracing::error!(service, %why, "a worker is given up")),
    }
}
