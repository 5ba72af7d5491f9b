//! What happens to a worker because time passed: looks at its processes, limits, starts.
#![forbid(unsafe_code)]

use std::time::Instant;

use super::Core;
use crate::after::After;
use crate::calls::Culprit;
use crate::error::{Cause, Error};
use crate::heart::{self, Pulse};
use crate::life::{Role, Step};
use crate::process::Process;
use crate::spec::Spec;
use crate::system;
use crate::ticket::Outcome;

impl Core {
    /// Looks at the process from outside.
    pub(super) fn look(&mut self, spec: &Spec, role: Role, now: Instant, after: &mut After) {
        let process = self.seats[role].process.as_mut();
        let Some(process) = process.filter(|process| process.next_look <= now) else { return };
        process.next_look = now + heart::EVERY;
        if process.times.killed.is_some() {
            return;
        }
        // Before its hello it has published nothing.
        if process.times.hello.is_none() {
            return;
        }
        let limit = spec.options.executor.filter(|_| process.times.serving.is_some());
        let beat = process.responses.status().read();
        let stopped = system::is_stopped(process.pid);
        let pulse = process.heart.look(now, beat, stopped, limit);
        let (stopped, busy) = (pulse == Pulse::Stopped, pulse == Pulse::Busy);
        let was_stopped = std::mem::replace(&mut process.is_stopped, stopped);
        let was_busy = std::mem::replace(&mut process.is_busy, busy);
        let (service, pid) = (spec.service, process.pid);
        let (number, standby) = (process.number(), role == Role::Standby);
        match pulse {
            Pulse::Dead => {
                // Perhaps somebody froze it.
                return self.kill(spec, role, Cause::Dead, Culprit::Killed, now, after);
            }
            Pulse::Hung(time) => {
                return self.kill(spec, role, Cause::Hung(time), Culprit::Begun, now, after);
            }
            // All other suspects wait for the one that runs in it, for an unknown time. A debugger may hold it for a moment.
            Pulse::Stopped if was_stopped && self.holds_up_suspects(role) => {
                return self.kill(spec, role, Cause::Stopped, Culprit::Unclear, now, after);
            }
            Pulse::Stopped if !was_stopped => after.log(move || {
                tracing::warn!(
                    service,
                    pid = number,
                    standby,
                    "a worker's process is stopped or traced"
                );
            }),
            Pulse::Well | Pulse::Busy if was_stopped => after.log(move || {
                tracing::info!(service, pid = number, standby, "a worker's process runs again");
            }),
            Pulse::Busy if !was_busy => after.log(move || {
                tracing::warn!(
                    service,
                    pid = number,
                    "the executor of a worker's process is blocked"
                );
            }),
            Pulse::Well | Pulse::Stopped | Pulse::Busy => {}
        }
        let Some(limit) = spec.options.resident_bytes else { return };
        if let Some(resident) = system::resident_bytes(pid).filter(|bytes| *bytes > limit) {
            // Nobody knows whose memory it is: perhaps that of calls long ago.
            self.kill(
                spec,
                role,
                Cause::MemoryLimit { resident, limit },
                Culprit::Unclear,
                now,
                after,
            );
        }
    }

    /// Whether a standby has a suspect.
    fn holds_up_suspects(&self, role: Role) -> bool {
        let standby = self.seats[Role::Standby].process.as_ref();
        let has_one = |process: &Process| self.calls.running_in(process.incarnation) > 0;
        role == Role::Standby && !self.life.is_replaced(role) && standby.is_some_and(has_one)
    }

    /// Does what is due.
    pub(super) fn tick(&mut self, spec: &Spec, now: Instant, buffer: &mut [u8], after: &mut After) {
        for role in Role::ALL {
            let until = self.seats[role].process.as_ref().and_then(Process::ends_until);
            if until.is_some_and(|until| until <= now) {
                let cause = Cause::Protocol("it closed its socket");
                self.kill(spec, role, cause, Culprit::Running, now, after);
            }
        }
        let seats = &self.seats;
        let expired = self.calls.expired(now, |id, process| {
            let responses = &seats.process(process)?.responses;
            let age = responses.begun(id.slot()).age(id.generation())?;
            Some(now.checked_sub(age).unwrap_or(now))
        });
        for ticket in expired.given_up {
            self.stats.deadlines += 1;
            after.end(ticket, Outcome::Failed(Error::Deadline));
        }
        for (process, limit) in expired.over_limit {
            if let Some(role) = self.seats.role(process) {
                let process = self.seats[role].process.as_ref();
                // Nothing ran, whatever its calls would have done.
                let is_stopped = process.is_some_and(|process| system::is_stopped(process.pid));
                let culprit = if is_stopped { Culprit::Unclear } else { Culprit::Begun };
                self.kill(spec, role, Cause::CallLimit(limit), culprit, now, after);
            }
        }
        for process in expired.forsaken {
            if let Some(role) = self.seats.role(process) {
                self.kill(spec, role, Cause::Abandoned, Culprit::Outside, now, after);
            }
        }
        for role in Role::ALL {
            let cause = match self.life.tick(role, now, &self.limits) {
                Step::NoStart => self.no_start(spec, role),
                Step::NoEnd => Cause::NoEnd,
                Step::Start => {
                    self.start(spec, role);
                    continue;
                }
                Step::NoHello => {
                    self.no_hello(spec, role, now, after);
                    continue;
                }
                Step::SetAside => {
                    let role = self.replaced(spec, role, now, after);
                    self.set_aside(spec, role, now, buffer, after);
                    continue;
                }
                Step::Nothing | Step::GiveUp | Step::NoStandby | Step::NotReplaced | Step::End => {
                    continue;
                }
            };
            self.kill(spec, role, cause, Culprit::Outside, now, after);
        }
    }
}
