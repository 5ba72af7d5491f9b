//! What happens to a worker on the supervisor's thread: messages, deaths, limits, starts.
//!
//! # Invariants
//! 1. When a process died, the answers that it had sent are delivered first; then its other calls end or are sent again
//!    (`answers_before_the_death_count`). So no call runs twice because its answer was late.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::Core;
use crate::after::After;
use crate::calls::{Answered, Culprit};
use crate::codec;
use crate::error::Cause;
use crate::frame::{Ending, MOST_NAME, ToProcess, ToSupervisor, VERSION, Verdict};
use crate::keep::{self, AskedMut};
use crate::leases::Returned;
use crate::life::Role;
use crate::payload::Payload;
use crate::process::{MOST_KEPT, Process};
use crate::replace::Used;
use crate::spec::Spec;
use crate::system::{self, Received};
use crate::ticket::Outcome;
use crate::watch::{SOCKET, Watch, Watched};

/// When to send a packet again that the kernel had no memory for.
const AGAIN: Duration = Duration::from_millis(10);

/// When to look again at memory that something a dead process left behind may have.
const SETTLES: Duration = Duration::from_millis(2);

/// A delay longer than this is a pause of this thread, or of the machine.
const PAUSE: Duration = Duration::from_secs(1);

/// How many messages of one worker are received before others get their turn.
const MOST_AT_ONCE: usize = 256;

/// A packet of a process.
struct Said<'m> {
    message: ToSupervisor<'m>,
    body: &'m [u8],
    fds: Vec<OwnedFd>,
}

impl Core {
    pub(crate) fn turn(
        &mut self,
        spec: &Spec,
        now: Instant,
        ready: &Watch,
        buffer: &mut [u8],
        after: &mut After,
    ) -> Watch {
        let late = now.saturating_duration_since(self.next_look);
        if late > PAUSE {
            self.life.held_up(late);
        }
        if self.probe.is_due(now) {
            // A worker that ended by a panic stays ended.
            drop(self.revive(spec, now, after));
        }
        for watched in &ready.processes {
            if let Some(role) = self.seats.role(watched.incarnation) {
                self.attend(spec, role, now, &watched.flags, buffer, after);
            }
        }
        self.fall(spec, now, after);
        let is_there =
            |process: &Process| system::reap(process.ends.handle.as_fd(), process.pid).is_none();
        after.gone.extend(self.unwanted.extract_if(.., |process| !is_there(process)));
        for process in self.stuck.extract_if(.., |process| !is_there(process)) {
            self.life.unstuck();
            let (service, pid) = (spec.service, process.number());
            after.log(move || {
                tracing::info!(service, pid, "a process that was set aside is gone");
            });
            after.gone.push(process);
        }
        #[cfg(test)]
        spec.trips.trip(crate::trips::Trip::Turn);
        for role in Role::ALL {
            self.hand_out(spec, role, now, after);
            self.look(spec, role, now, after);
        }
        self.tick(spec, now, buffer, after);
        self.fall(spec, now, after);
        self.renew(spec, now, after);
        self.pump(spec, now, after);
        self.watch(spec, now)
    }

    /// What to wait for.
    pub(crate) fn watch(&mut self, spec: &Spec, now: Instant) -> Watch {
        let processes = self.seats.processes().map(|process| {
            let mut socket =
                if process.deaf.is_some() { PollFlags::empty() } else { PollFlags::IN };
            socket.set(PollFlags::OUT, process.full);
            let pipe = |open| if open { PollFlags::IN } else { PollFlags::empty() };
            let [output, errors] = process.open_pipes.map(pipe);
            let flags = [socket, PollFlags::IN, output, errors];
            Watched { incarnation: process.incarnation, ends: process.ends.clone(), flags }
        });
        let processes: Vec<_> = processes.collect();
        let stuck = self.stuck.iter().chain(&self.unwanted).map(|process| {
            let none = PollFlags::empty();
            let flags = [none, PollFlags::IN, none, none];
            Watched { incarnation: process.incarnation, ends: process.ends.clone(), flags }
        });
        let stuck: Vec<_> = stuck.collect();
        let of_processes = self.seats.processes().flat_map(|process| {
            let again = process.starved.then(|| now + AGAIN);
            let settles = process.settles.then(|| now + SETTLES);
            [process.ends_until(), Some(process.next_look), again, settles].into_iter().flatten()
        });
        let main = self.seats[Role::Main].process.as_ref();
        let main = main.filter(|_| self.life.is_serving() && !self.life.is_wanted());
        let worn = main.and_then(|process| spec.options.replace.due(&process.used));
        let (life, calls) = (self.life.next_due(&self.limits), self.calls.next_due());
        let due = [life, calls, worn, self.held_until(spec), self.probe.due()];
        let due = due.into_iter().flatten().chain(of_processes).min();
        self.next_look = due.unwrap_or(now + Duration::from_secs(3600));
        let is_gone = processes.is_empty() && stuck.is_empty() && self.starts_under_way == 0;
        let ended = self.life.has_ended() && is_gone && self.probe.due().is_none();
        Watch { processes, stuck, due, ended }
    }

    /// Receives from the processes that have sent something.
    pub(crate) fn hear_ready(
        &mut self,
        spec: &Spec,
        now: Instant,
        ready: &Watch,
        buffer: &mut [u8],
        after: &mut After,
    ) {
        for watched in ready.processes.iter().filter(|it| !it.flags[SOCKET].is_empty()) {
            if let Some(role) = self.seats.role(watched.incarnation) {
                self.hear(spec, role, now, MOST_AT_ONCE, buffer, after);
            }
        }
    }

    /// Handles the other descriptors of the process that are ready.
    fn attend(
        &mut self,
        spec: &Spec,
        role: Role,
        now: Instant,
        flags: &[PollFlags; 4],
        buffer: &mut [u8],
        after: &mut After,
    ) {
        let [_heard, handle, output, errors] = *flags;
        for (pipe, flags) in [output, errors].into_iter().enumerate() {
            let process = self.seats[role].process.as_mut();
            if let Some(process) = process.filter(|_| !flags.is_empty()) {
                process.read_log(pipe);
            }
        }
        if handle.is_empty() {
            return;
        }
        let Some(process) = &self.seats[role].process else { return };
        if let Some(exit) = system::reap(process.ends.handle.as_fd(), process.pid) {
            let role = self.replaced(spec, role, now, after);
            self.bury(spec, role, exit, now, buffer, after);
        }
    }

    /// Receives what the process has sent.
    pub(super) fn hear(
        &mut self,
        spec: &Spec,
        role: Role,
        now: Instant,
        most: usize,
        buffer: &mut [u8],
        after: &mut After,
    ) {
        for _ in 0..most {
            let Some(process) = &mut self.seats[role].process else { return };
            let socket = process.ends.socket.as_fd();
            let (received, beside) = system::receive(socket, buffer);
            // Only the process that was started may use the socket.
            let is_packet = matches!(received, Received::Packet(_));
            let is_hello = process.times.hello.is_none();
            if is_packet && is_hello && beside.sender != Some(process.pid) {
                return self.broken(spec, role, "a message of another process", now, after);
            }
            match received {
                Received::Nothing => return,
                Received::End => {
                    process.deaf.get_or_insert(now);
                    process.full = false;
                    return;
                }
                Received::Packet(bytes) if bytes > buffer.len() => {
                    return self.broken(spec, role, "a message that is too long", now, after);
                }
                Received::Packet(bytes) => {
                    let Some((message, body)) = codec::header(&buffer[..bytes]) else {
                        return self.broken(spec, role, "an unknown message", now, after);
                    };
                    let said = Said { message, body, fds: beside.fds };
                    self.message(spec, role, said, now, after);
                    let swamped = |process: &Process| process.is_swamped(spec.options.most_slots());
                    if self.seats[role].process.as_ref().is_some_and(swamped) {
                        let how = "it does not read what it asks for";
                        return self.broken(spec, role, how, now, after);
                    }
                }
            }
        }
    }

    /// Receives a few messages for a caller that checks for its answer.
    pub(crate) fn hear_now(
        &mut self,
        spec: &Spec,
        now: Instant,
        buffer: &mut [u8],
        after: &mut After,
    ) {
        const A_FEW: usize = 8;
        self.hear(spec, Role::Main, now, A_FEW, buffer, after);
        // Handling its end is the supervisor's job.
        after.wake |= self.seats[Role::Main].process.as_ref().is_some_and(Process::is_falling);
    }

    fn message(
        &mut self,
        spec: &Spec,
        role: Role,
        said: Said<'_>,
        now: Instant,
        after: &mut After,
    ) {
        let Said { message, body, fds } = said;
        let Some(process) = &mut self.seats[role].process else { return };
        let brings = matches!(message, ToSupervisor::Sealed { .. } | ToSupervisor::Made { .. });
        if !fds.is_empty() && !brings {
            return self.broken(spec, role, "descriptors that nobody asked for", now, after);
        }
        let owner = (spec.number(), process.incarnation);
        match message {
            ToSupervisor::Hello { .. } if process.times.hello.is_some() => {
                self.broken(spec, role, "a second hello", now, after);
            }
            ToSupervisor::Hello { version, executable } => {
                if (version, executable) != (VERSION, spec.program.executable) {
                    let text = "its file is not the one that was started".to_owned();
                    process.told = Some((Ending::WrongProgram, text, now));
                    return;
                }
                process.times.hello = Some(now);
                let (service, pid) = (spec.service, process.number());
                let started = now - process.times.started;
                after.log(move || {
                    tracing::debug!(service, pid, ?started, "a worker's process said hello");
                });
                // Later packets come from this process, or from one that inherited the socket, which none does.
                drop(system::name_senders(process.ends.socket.as_fd(), false));
                self.life.said_hello(role);
            }
            ToSupervisor::Serving { device_bytes } => {
                if !self.life.serves(role, now) {
                    return self.broken(spec, role, "a service that starts twice", now, after);
                }
                process.times.serving = Some(now);
                process.used = Used::new(now);
                process.device_bytes = device_bytes;
                self.serves(spec, role, after);
                self.has_room(spec, now, after);
            }
            ToSupervisor::Answer { id, verdict, payload } => {
                let payload = match payload
                    .map(|(id, part)| (id, part, part.is_within(process.responses.bytes())))
                {
                    Some((_, _, false)) => {
                        let how = "a payload outside of its slab";
                        return self.broken(spec, role, how, now, after);
                    }
                    payload => payload.map(|(id, part, _)| Payload {
                        lender: spec.lender.clone(),
                        slab: process.responses.clone(),
                        id,
                        part,
                        incarnation: process.incarnation,
                    }),
                };
                process.used.payload_bytes += payload.as_ref().map_or(0, |it| it.part.len);
                let keys = self.calls.keys(id);
                let answered = self.calls.answered(id, process.incarnation, now);
                if !matches!(answered, Answered::Stale) {
                    self.blamed.lock().answered(keys);
                }
                match answered {
                    Answered::Ended(ticket) => {
                        let count = match verdict {
                            Verdict::Answered => &mut self.stats.answered,
                            Verdict::Panicked => &mut self.stats.panics,
                            _ => &mut self.stats.failed,
                        };
                        *count += 1;
                        let text = || String::from_utf8_lossy(body).into_owned();
                        let outcome = match verdict {
                            Verdict::Answered => {
                                Outcome::Answered { response: body.to_vec(), payload }
                            }
                            verdict => {
                                after.payloads.extend(payload);
                                Outcome::Failed(verdict.error(text()))
                            }
                        };
                        after.end(ticket, outcome);
                    }
                    Answered::Abandoned => after.payloads.extend(payload),
                    Answered::Stale => {
                        self.stats.stale_messages += 1;
                        after.payloads.extend(payload);
                    }
                }
            }
            ToSupervisor::Returned(lease) => match self.leases.returned(lease, process.incarnation)
            {
                Returned::Free => self.has_room(spec, now, after),
                Returned::Kept => {}
                Returned::Stale => self.stats.stale_messages += 1,
            },
            ToSupervisor::Keep { name }
            | ToSupervisor::NotFilled { name }
            | ToSupervisor::KeepMut { name }
                if name.len() > MOST_NAME =>
            {
                self.broken(spec, role, "a name that is too long", now, after);
            }
            ToSupervisor::Keep { name } | ToSupervisor::KeepMut { name } => {
                process.requests_to_keep += 1;
                if process.requests_to_keep > MOST_KEPT {
                    let how = "it asks for kept memory without end";
                    return self.broken(spec, role, how, now, after);
                }
                match message {
                    ToSupervisor::Keep { .. } => process.asked.push(name.to_owned()),
                    _ => process.asked_mut.push(name.to_owned()),
                }
                self.hand_out(spec, role, now, after);
                // A standby asks early, and waits for its turn.
                let main = self.seats[Role::Main].process.as_ref().filter(|_| role == Role::Main);
                let waits = |it: &&Process| it.asked_mut.iter().any(|asked| asked == name);
                if let Some(process) = main.filter(waits)
                    && let Some(writer) = keep::writer(&spec.key(name))
                {
                    let (service, pid, name) = (spec.service, process.number(), name.to_owned());
                    after.log(move || {
                        let what =
                            "a worker's process waits for kept memory that another one may write";
                        tracing::warn!(service, pid, name, writer, "{what}");
                    });
                }
            }
            ToSupervisor::Sealed { name, generation } => {
                if !keep::sealed(&spec.key(name), owner, generation, fds) {
                    let how = "sealed memory that it was not told to fill";
                    return self.broken(spec, role, how, now, after);
                }
                after.wake = true;
            }
            ToSupervisor::Timeline(part) => {
                let from = process.incarnation;
                if let Err(how) = self.hear_timeline(from, part, body, after) {
                    self.broken(spec, role, how, now, after);
                }
            }
            ToSupervisor::Made { name, generation } => {
                if !keep::made(&spec.key(name), owner, generation, fds) {
                    let how = "memory that it was not told to make";
                    self.broken(spec, role, how, now, after);
                }
            }
            ToSupervisor::Writes { name, begins } => {
                if !keep::writes(&spec.key(name), owner, begins) {
                    let how = "a write to memory that it does not have";
                    self.broken(spec, role, how, now, after);
                }
            }
            ToSupervisor::NotFilled { name } => {
                after.wake |= keep::not_filled(&spec.key(name), owner);
            }
            ToSupervisor::Ending(ending) => {
                let serves = process.times.serving.is_some();
                let is_its = match ending {
                    Ending::Done => self.life.is_closing() || self.life.is_drained(role),
                    Ending::Fault | Ending::MemoryFault => true,
                    Ending::StartFailed
                    | Ending::StartPanicked
                    | Ending::OutOfMemory
                    | Ending::NoConfiguration
                    | Ending::NoDevice
                    | Ending::InsideRuntime
                    | Ending::NotStarted { .. }
                    | Ending::WrongProgram
                    | Ending::UnderMps => !serves,
                };
                if !is_its {
                    let how = "an end that it has no reason for";
                    return self.broken(spec, role, how, now, after);
                }
                let text = String::from_utf8_lossy(body).into_owned();
                process.told.get_or_insert((ending, text, now));
            }
        }
    }

    /// Hands kept memory to the process that asked for it, where it is complete or to be filled.
    fn hand_out(&mut self, spec: &Spec, role: Role, now: Instant, after: &mut After) {
        let Some(process) = &mut self.seats[role].process else { return };
        let owner = (spec.number(), process.incarnation);
        process.settles = false;
        // A standby has nothing to write before it has taken over.
        let may_write = role == Role::Main || self.life.is_replaced(role);
        let wants = if may_write { std::mem::take(&mut process.asked_mut) } else { Vec::new() };
        for name in wants {
            let (asked, aside) = keep::ask_mut(&spec.key(&name), owner, process.number(), now);
            if aside {
                let (service, name) = (spec.service, name.clone());
                after.log(move || {
                    tracing::error!(
                        service,
                        name,
                        "kept memory is set aside: something that a process left behind has it"
                    );
                });
            }
            match asked {
                AskedMut::Wait { settles } => {
                    process.settles |= settles;
                    process.asked_mut.push(name);
                }
                AskedMut::Given { made, generation, died, fds } => {
                    let name = name.as_str();
                    process.tell(&ToProcess::KeptMut { name, made, generation, died }, fds);
                }
                AskedMut::Twice => {
                    let how = "it asks for memory that it has";
                    return self.broken(spec, role, how, now, after);
                }
            }
        }
        for name in std::mem::take(&mut process.asked) {
            match keep::ask(&spec.key(&name), owner, process.number()) {
                None => process.asked.push(name),
                Some((generation, fds)) => {
                    let (name, fill) = (name.as_str(), fds.is_empty());
                    process.tell(&ToProcess::Kept { name, generation, fill }, fds);
                }
            }
        }
    }

    /// The process broke the protocol.
    fn broken(
        &mut self,
        spec: &Spec,
        role: Role,
        how: &'static str,
        now: Instant,
        after: &mut After,
    ) {
        self.kill(spec, role, Cause::Protocol(how), Culprit::Running, now, after);
    }

    pub(super) fn kill(
        &mut self,
        spec: &Spec,
        role: Role,
        cause: Cause,
        culprit: Culprit,
        now: Instant,
        after: &mut After,
    ) {
        let Some(process) = &mut self.seats[role].process else { return };
        if process.times.killed.is_none() {
            let (service, pid, cause) = (spec.service, process.number(), cause.to_string());
            after.log(move || tracing::info!(service, pid, %cause, "a worker's process is killed"));
        }
        process.kill(cause, culprit, now);
        self.life.killed(role, now);
    }
}
