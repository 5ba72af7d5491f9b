//! Replacing a process without a death: when, and what follows for its calls and for waiters.
//!
//! # Invariants
//! 1. Each call has one process: those that the old one had are answered there, and all others go to the new one
//!    (`a_hundred_replacements_lose_no_call`).
//! 2. A suspect that the next process has holds up a replacement for [`Replace::drain`](crate::Replace::drain) at most
//!    (`a_suspect_without_an_end_is_replaced`).
#![forbid(unsafe_code)]

use std::time::Instant;

use super::Core;
use crate::after::After;
use crate::calls::Culprit;
use crate::error::{Cause, Error, Result};
use crate::frame::ToProcess;
use crate::life::Role;
use crate::process::Process;
use crate::replace::Used;
use crate::restart::Sign;
use crate::spec::Spec;
use crate::ticket::Waiter;

impl Core {
    /// Does what is due: has another process started, has it take over, and answers those that wait for that.
    pub(super) fn renew(&mut self, spec: &Spec, now: Instant, after: &mut After) {
        if let Some(why) = self.wear(spec, now) {
            self.want(spec, why, now, after);
        }
        self.promote(spec, now, after);
        let (seats, is_serving) = (&self.seats, self.life.is_serving());
        let is_over = |it: &mut (u32, Waiter)| is_serving && seats.process(it.0).is_none();
        after.waiters.extend(self.replacing.extract_if(.., is_over).map(|(_, it)| (it, Ok(()))));
    }

    /// Why the main process is to be replaced, if it is, and is not already about to be.
    pub(super) fn wear(&self, spec: &Spec, now: Instant) -> Option<&'static str> {
        let process = self.seats[Role::Main].process.as_ref()?;
        let is_idle = self.life.is_serving() && !self.life.is_closing() && !self.life.is_wanted();
        spec.options.replace.why(&process.used, now).filter(|_| is_idle)
    }

    fn want(&mut self, spec: &Spec, why: &'static str, now: Instant, after: &mut After) {
        let Some(process) = &self.seats[Role::Main].process else { return };
        let (service, pid) = (spec.service, process.number());
        if !self.life.is_wanted() && self.life.replace(now) {
            after.log(move || {
                tracing::info!(service, pid, why, "a worker's process is to be replaced");
            });
            after.wake = true;
        }
    }

    /// Replaces the serving process. The waiter is woken when it is gone; if none serves, when one does.
    pub(crate) fn replace(
        &mut self,
        spec: &Spec,
        waiter: Waiter,
        now: Instant,
        after: &mut After,
    ) -> Result<()> {
        if let Some(error) = self.ended.clone().or(self.life.is_closing().then_some(Error::Closed))
        {
            return Err(error);
        }
        self.replacing.retain(|(_, waiter)| !waiter.is_canceled());
        let main = self.seats[Role::Main].process.as_ref().filter(|_| self.life.is_serving());
        match main.map(|process| process.incarnation) {
            Some(incarnation) => {
                self.want(spec, "demand", now, after);
                self.replacing.push((incarnation, waiter));
            }
            None => self.serving.push(waiter),
        }
        Ok(())
    }

    /// Has the standby take the calls, if a replacement is wanted; the old process answers its remaining ones.
    fn promote(&mut self, spec: &Spec, now: Instant, after: &mut After) {
        if !self.life.can_promote() || self.seats.processes().any(Process::is_falling) {
            return;
        }
        let Some(next) = &mut self.seats[Role::Standby].process else { return };
        if next.is_still() {
            // Seen twice: a debugger may hold it for a moment.
            if next.is_stopped || next.heart.is_silent() {
                self.kill(spec, Role::Standby, Cause::Stopped, Culprit::Outside, now, after);
            }
            return;
        }
        // A suspect that it has runs alone: all others would wait for it. It gets no other one meanwhile.
        if self.calls.running_in(next.incarnation) > 0 {
            if self.held_until(spec).is_some_and(|until| until <= now) {
                self.kill(spec, Role::Standby, Cause::NoEnd, Culprit::Outside, now, after);
            }
            return;
        }
        next.used = Used::new(now);
        let (service, pid) = (spec.service, next.number());
        if !self.life.promote(now, now + spec.options.replace.drain) {
            return;
        }
        self.seats.0.reverse();
        self.stats.replacements += 1;
        if let Some(process) = &mut self.seats[Role::Standby].process {
            process.tell(&ToProcess::End, Vec::new());
        }
        after.log(move || tracing::info!(service, pid, "a replacement takes over"));
    }

    /// When a suspect that holds up a replacement has used as much time as draining calls get.
    pub(super) fn held_until(&self, spec: &Spec) -> Option<Instant> {
        let next = self.seats[Role::Standby].process.as_ref()?;
        let since = self.life.held_since()?;
        let is_held = self.calls.running_in(next.incarnation) > 0;
        is_held.then(|| since + spec.options.replace.drain)
    }

    /// No other process could be started. The serving one goes on, with its use counted from zero.
    pub(super) fn not_replaced(&mut self, sign: Sign, now: Instant, after: &mut After) {
        let Some(process) = &mut self.seats[Role::Main].process else { return };
        process.used = Used::new(now);
        let refusal = self.refusal.clone().filter(|_| sign == Sign::Refused);
        // Nobody tries again.
        self.refusal = self.refusal.take().filter(|_| self.life.expects_standby());
        let cause = refusal.or_else(|| self.stats.last_standby_cause.clone());
        let cause = cause.unwrap_or(Cause::Unknown);
        let its = process.incarnation;
        let failed = self.replacing.extract_if(.., |(incarnation, _)| *incarnation == its);
        let error = Error::NotReplaced { cause };
        after.waiters.extend(failed.map(|(_, waiter)| (waiter, Err(error.clone()))));
    }
}
