//! The state behind a worker's lock: its calls, its life, its process, and what each event does to them.
//!
//! More than 500 lines: the parts that stand alone are the modules below.
//!
//! # Invariants
//! 1. Nothing of this module runs foreign code or drops a lease: both go to [`After`].
#![forbid(unsafe_code)]

mod charges;
mod deaths;
mod due;
mod events;
mod processes;
mod replacing;
pub(crate) mod timeline;

use self::timeline::Fetch;
use std::collections::VecDeque;
use std::ops::{Index, IndexMut};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use gpu_await_protocol::lock::Mutex;

use crate::after::After;
use crate::blame::{Blamed, Keys};
use crate::calls::{CallId, Calls, Culprit, Runs, Takes, Terms};
use crate::codec;
use crate::error::{Cause, Error, Result};
use crate::frame::ToProcess;
use crate::health::{Health, WorkerHealth};
use crate::keep;
use crate::leases::{LeaseId, Leases, Part};
use crate::life::{Life, Limits, Phase, Role};
use crate::options::Options;
use crate::payload::{Lease, Placed};
use crate::probe::Probe;
use crate::process::Process;
use crate::room::{Place, Room};
use crate::route::{Readiness, Seen};
use crate::spec::Spec;
use crate::stats::Stats;
use crate::system::{self, Sent};
use crate::ticket::{Outcome, Ticket, Until, Waiter};

/// The place of a process.
#[derive(Debug, Default)]
struct Seat {
    process: Option<Process>,
    /// The number of the process that is being started.
    starting: Option<u32>,
}

/// One seat for each role.
#[derive(Debug, Default)]
struct Seats([Seat; 2]);

impl Index<Role> for Seats {
    type Output = Seat;

    fn index(&self, role: Role) -> &Seat {
        &self.0[role as usize]
    }
}

impl IndexMut<Role> for Seats {
    fn index_mut(&mut self, role: Role) -> &mut Seat {
        &mut self.0[role as usize]
    }
}

impl Seats {
    fn processes(&self) -> impl Iterator<Item = &Process> {
        self.0.iter().filter_map(|seat| seat.process.as_ref())
    }

    /// The process with this number.
    fn process(&self, incarnation: u32) -> Option<&Process> {
        self.processes().find(|process| process.incarnation == incarnation)
    }

    /// The role of the process with this number.
    fn role(&self, incarnation: u32) -> Option<Role> {
        let is_it = |role: &Role| {
            self[*role].process.as_ref().is_some_and(|process| process.incarnation == incarnation)
        };
        Role::ALL.into_iter().find(is_it)
    }
}

/// The state of a worker.
#[derive(Debug)]
pub(crate) struct Core {
    calls: Calls<Ticket>,
    /// Shared by all workers of a group.
    blamed: Arc<Mutex<Blamed>>,
    life: Life,
    probe: Probe,
    limits: Limits,
    seats: Seats,
    /// Leases of the slab of requests.
    leases: Leases,
    /// How many starts are under way, wanted or not.
    starts_under_way: u32,
    /// Killed processes that have taken too long to be reaped.
    stuck: Vec<Process>,
    /// Killed processes that nobody wanted any more by the time they had started.
    unwanted: Vec<Process>,
    incarnations: u32,
    has_served: bool,
    /// Why there will be no more processes.
    ended: Option<Error>,
    serving: Vec<Waiter>,
    room: Vec<Waiter>,
    end: Vec<Waiter>,
    /// Callers that wait for room for a call, in order.
    places: VecDeque<Place>,
    /// Callers that wait for the process with that number to be replaced.
    replacing: Vec<(u32, Waiter)>,
    /// The log of the process that died last.
    last_log: Arc<str>,
    /// The end of that log.
    last_lines: Arc<str>,
    /// The number of that process, and why it died.
    last_death: Option<(u32, String)>,
    last_cause: Option<Cause>,
    /// Why the system refused the last start that was tried: not a death.
    refusal: Option<Cause>,
    /// Why a process last died, whatever its role.
    died_of: Option<Cause>,
    /// Why standbys were last given up.
    no_standby: Option<Cause>,
    /// The last few.
    causes: VecDeque<Cause>,
    /// When the supervisor looks next, unless it is woken.
    next_look: Instant,
    stats: Stats,
    health_since: (Health, Instant),
    /// A timeline that is being fetched.
    fetch: Option<Fetch>,
    reaped: Option<(Instant, Instant)>,
}

impl Core {
    pub(crate) fn new(options: &Options, now: Instant) -> Core {
        Core {
            calls: Calls::new(options.most_calls, options.most_slots()),
            blamed: options.blamed.clone(),
            life: Life::new(now, options.standby),
            probe: Probe::default(),
            limits: Limits {
                hello: options.hello,
                start: options.start,
                kill_grace: options.kill_grace,
                most_stuck: options.most_stuck,
            },
            seats: Seats::default(),
            leases: Leases::new(0, 0, options.request_slab_bytes),
            starts_under_way: 0,
            stuck: Vec::new(),
            unwanted: Vec::new(),
            incarnations: 0,
            has_served: false,
            ended: None,
            serving: Vec::new(),
            room: Vec::new(),
            end: Vec::new(),
            places: VecDeque::new(),
            replacing: Vec::new(),
            last_log: "".into(),
            last_lines: "".into(),
            last_death: None,
            last_cause: None,
            refusal: None,
            died_of: None,
            no_standby: None,
            causes: VecDeque::new(),
            next_look: now,
            stats: Stats::default(),
            health_since: (Health::Starting, now),
            fetch: None,
            reaped: None,
        }
    }

    /// A panic left the state half updated: ends all calls and kills the processes. Trusts nothing but the lists of them.
    pub(crate) fn give_up(&mut self, spec: &Spec, why: &str, after: &mut After) {
        if self.ended.is_some() && self.seats.processes().next().is_none() {
            return;
        }
        let cause = Cause::Supervisor(why.to_owned());
        let error = self.given_up(cause.clone());
        let mut old = std::mem::replace(self, Core::new(&spec.options, Instant::now()));
        after.rooms.extend(old.calls.take_rooms());
        (self.unwanted, self.incarnations) = (old.unwanted, old.incarnations);
        self.starts_under_way = old.starts_under_way;
        let error = old.ended.unwrap_or(error);
        let processes = old.seats.0.into_iter().filter_map(|seat| seat.process);
        for process in processes.chain(old.stuck) {
            system::kill(process.ends.handle.as_fd(), process.pid);
            let owner = (spec.number(), process.incarnation);
            after.wake |= keep::gone(owner);
            keep::abandoned(owner);
            self.stuck.push(process);
        }
        keep::released(spec.number());
        self.life = Life::over(Instant::now(), self.stuck.len());
        (self.stats, self.last_cause) = (old.stats, Some(cause));
        processes::tell_end(spec, &error, after);
        self.ended = Some(error.clone());
        for ticket in old.calls.into_values() {
            after.end(ticket, Outcome::Failed(error.clone()));
        }
        self.places = old.places;
        self.fetch = old.fetch;
        self.end_timeline(after, |_| Err(error.clone()));
        let replacing = old.replacing.into_iter().map(|(_, waiter)| waiter);
        let waiters = old.serving.into_iter().chain(old.room).chain(old.end).chain(replacing);
        after.waiters.extend(waiters.map(|waiter| (waiter, Err(error.clone()))));
        after.wake = true;
    }

    /// Why a call or a waiter ended without a result: a panic dropped it.
    pub(crate) fn why_forgotten(&self) -> Error {
        let cause = || Cause::Supervisor("it was forgotten".to_owned());
        self.ended.clone().unwrap_or_else(|| self.given_up(cause()))
    }

    fn given_up(&self, cause: Cause) -> Error {
        let early_deaths = self.life.early_deaths();
        let before = (early_deaths as usize).min(self.causes.len());
        Error::GivenUp {
            early_deaths,
            cause,
            causes: self.causes.range(self.causes.len() - before..).cloned().collect(),
            log: self.last_log.clone(),
        }
    }

    pub(crate) fn wait(&mut self, until: Until, waiter: Waiter, after: &mut After) {
        let waiters = match until {
            Until::Serving if self.life.is_serving() && self.ended.is_none() => {
                return after.waiters.push((waiter, Ok(())));
            }
            Until::Serving => &mut self.serving,
            Until::Room => &mut self.room,
            Until::End => &mut self.end,
        };
        match &self.ended {
            Some(error) => after.waiters.push((waiter, Err(error.clone()))),
            None => {
                waiters.retain(|waiter| !waiter.is_canceled());
                waiters.push(waiter);
            }
        }
    }

    pub(crate) fn enter(
        &mut self,
        spec: &Spec,
        mut ticket: Ticket,
        terms: Terms,
        after: &mut After,
    ) -> Result<CallId, Box<(Error, Ticket)>> {
        let now = Instant::now();
        let ended = self.ended.clone().or(self.life.is_closing().then_some(Error::Closed));
        if let Some(error) = ended.or_else(|| self.refused(terms.keys, now)) {
            return Err(Box::new((error, ticket)));
        }
        // If its room is here, that is used. Otherwise it counts here if it can, and else where its room is.
        if ticket.room.as_ref().is_some_and(|room| room.take_at(&spec.lender)) {
            ticket.room = None;
            self.calls.give_back_room();
        } else if !self.calls.is_full() {
            after.rooms.extend(ticket.room.take());
        }
        let room = ticket.room.clone();
        let has_room = !matches!(ticket.payload, Some(Placed::Waits { .. }));
        let is_watched = terms.runs == Runs::Alone || self.blamed.lock().watches(terms.keys, now);
        let entered = self.calls.insert(ticket, terms, is_watched && has_room, room);
        let id = entered.map_err(|ticket| {
            self.overloaded();
            let (found, limit) = (self.calls.taken() as u64, self.calls.capacity() as u64);
            let is_reserved = self.calls.taken() > self.calls.len();
            let what = if is_reserved { "calls and reservations" } else { "calls" };
            Box::new((Error::Overloaded { what, found, limit }, ticket))
        })?;
        if is_watched && !has_room {
            self.calls.watch(id);
        }
        self.pump(spec, now, after);
        let due = self.calls.next_due().is_some_and(|due| due < self.next_look);
        after.wake |= due || self.seats.processes().any(Process::has_to_send);
        Ok(id)
    }

    /// Reserves room for a call, at once or as soon as there is some.
    #[cfg(feature = "tower")]
    pub(crate) fn reserve(&mut self, place: Place) {
        self.places.push_back(place);
        // Waiters that gave up behind one that did not; not on every call.
        if self.places.len().is_power_of_two() {
            self.places.retain(|place| !place.is_canceled());
        }
    }

    pub(crate) fn give_back_room(&mut self) {
        self.calls.give_back_room();
    }

    /// Calls that go back to their group keep their room before anybody else gets it.
    pub(crate) fn keep_rooms(&mut self, spec: &Spec, after: &mut After) {
        after.rooms.extend(self.calls.take_freed());
        for (ticket, outcome) in &mut after.ended {
            let Outcome::Failed(error) = outcome else { continue };
            if ticket.room.is_none() && ticket.goes_on(error) {
                self.calls.keep_room();
                ticket.room = Some(Room::of(&spec.lender));
            }
        }
    }

    /// Hands room to waiters, after any event.
    pub(crate) fn hand_out_room(&mut self, spec: &Spec, after: &mut After) {
        if self.places.is_empty() {
            return;
        }
        let ended = self.ended.clone().or(self.life.is_closing().then_some(Error::Closed));
        while let Some(place) = self.places.pop_front() {
            if place.is_canceled() {
                continue;
            }
            let room = match &ended {
                Some(error) => Err(error.clone()),
                None if self.calls.reserve() => Ok(Room::of(&spec.lender)),
                None => return self.places.push_front(place),
            };
            match place.give(room) {
                Ok(given) => after.given.push(given),
                // The waiter has just gone.
                Err(Ok(room)) if room.take_at(&spec.lender) => self.calls.give_back_room(),
                Err(_) => {}
            }
        }
    }

    /// Why a call is refused because of earlier ones.
    fn refused(&mut self, keys: Keys, now: Instant) -> Option<Error> {
        let (what, until) = self.blamed.lock().refuses(keys, now)?;
        self.stats.refused += 1;
        Some(Error::Refused { what, until })
    }

    pub(crate) fn lease(&mut self, spec: &Spec, bytes: u64) -> Result<Lease> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        let limit = spec.options.request_slab_bytes;
        let full = || Error::Overloaded { what: "bytes of payloads", found: limit, limit };
        let (id, part) = self.leases.take(bytes).ok_or_else(full)?;
        Ok(Lease { lender: spec.lender.clone(), slab: spec.requests.clone(), id, part })
    }

    /// A call is refused, since too much is under way.
    pub(crate) fn overloaded(&mut self) {
        self.stats.overloads += 1;
    }

    /// Whether a call waits for memory.
    pub(crate) fn has_roomless(&self) -> bool {
        self.calls.has_roomless()
    }

    pub(crate) fn abandon(&mut self, spec: &Spec, id: CallId, after: &mut After) {
        let now = Instant::now();
        after.dropped.extend(self.calls.abandon(id, now));
        // Others may have waited for this suspect; or it runs alone, and has only a grace period left.
        self.pump(spec, now, after);
        after.wake |= self.calls.next_due().is_some_and(|due| due < self.next_look);
    }

    pub(crate) fn give_back(&mut self, spec: &Spec, id: LeaseId, after: &mut After) {
        if self.leases.give_back(id) {
            self.has_room(spec, Instant::now(), after);
        }
    }

    pub(crate) fn process(&mut self, incarnation: u32) -> Option<&mut Process> {
        let role = self.seats.role(incarnation)?;
        self.seats[role].process.as_mut()
    }

    pub(crate) fn close(&mut self, spec: &Spec, until: Instant, after: &mut After) {
        let now = Instant::now();
        self.probe.stop();
        // A worker that was given up could begin anew while callers wait for its end.
        if matches!(self.ended, Some(Error::GivenUp { .. })) {
            processes::tell_end(spec, &Error::Closed, after);
            self.ended = Some(Error::Closed);
        }
        if !self.life.is_closing() && self.ended.is_none() {
            let service = spec.service;
            after.log(move || tracing::info!(service, "a worker is closing"));
        }
        let kill = self.life.close(until);
        for role in Role::ALL {
            if kill[role as usize] || until <= now {
                self.kill(spec, role, Cause::Closed, Culprit::Outside, now, after);
            } else if let Some(process) = &mut self.seats[role].process {
                process.tell(&ToProcess::End, Vec::new());
            }
        }
        if self.life.has_ended() && self.ended.is_none() {
            self.end(spec, Error::Closed, after);
        }
        for ticket in self.calls.end_waiting() {
            after.end(ticket, Outcome::Failed(Error::Closed));
        }
        after.wake = true;
    }

    /// The state that its group sees.
    pub(crate) fn seen(&self, spec: &Spec) -> Seen {
        let main = self.seats[Role::Main].process.as_ref();
        let takes = |it: &Process| {
            !it.is_falling() && !it.is_stopped && !it.is_busy && it.asked_mut.is_empty()
        };
        let is_blocked = |it: &Process| {
            it.asked_mut.iter().any(|name| keep::is_of_another(&spec.key(name), spec.number()))
        };
        let ready = match main {
            _ if self.ended.is_some() || self.life.is_closing() => Readiness::Never,
            Some(main) if self.life.is_serving() && takes(main) => Readiness::Now,
            Some(main) if is_blocked(main) => Readiness::Blocked,
            _ => Readiness::Later,
        };
        let load = self.calls.len();
        Seen { ready, load, is_full: self.calls.is_full() }
    }

    fn health_now(&self) -> Health {
        match self.life.phase(Role::Main) {
            Phase::Starting { .. } | Phase::Waiting(_) if !self.has_served => Health::Starting,
            Phase::Starting { .. } | Phase::Waiting(_) | Phase::Killing { .. } => {
                Health::Restarting
            }
            Phase::Serving(_) => Health::Serving,
            Phase::Draining { .. } => Health::Closing,
            Phase::Ended if matches!(self.ended, Some(Error::GivenUp { .. })) => Health::GivenUp,
            Phase::Ended => Health::Closed,
        }
    }

    /// Notes the health, and since when, after any event.
    pub(crate) fn note_health(&mut self) {
        let health = self.health_now();
        if self.health_since.0 != health {
            self.health_since = (health, Instant::now());
        }
    }

    pub(crate) fn health(&self) -> WorkerHealth {
        let main = self.seats[Role::Main].process.as_ref();
        let (health, since) = self.health_since;
        let killed = || main?.killed_for.as_ref().map(|(cause, _)| cause.clone());
        let cause = match health {
            Health::Starting | Health::Restarting => {
                killed().or_else(|| self.last_cause.clone()).or_else(|| self.refusal.clone())
            }
            Health::GivenUp => match &self.ended {
                Some(Error::GivenUp { cause, .. }) => Some(cause.clone()),
                _ => self.last_cause.clone(),
            },
            Health::Serving | Health::Closing | Health::Closed => None,
        };
        WorkerHealth {
            health: Some(health),
            since,
            cause,
            is_stopped: main.is_some_and(|process| process.is_stopped),
            is_busy: main.is_some_and(|process| process.is_busy),
            waits_for: main.and_then(|process| process.asked_mut.first().cloned()),
            refusal: self
                .refusal
                .clone()
                .filter(|_| self.ended.is_none() && !self.life.is_closing()),
            no_standby: self.no_standby.clone().filter(|_| self.life.lacks_standby()),
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let main = self.seats[Role::Main].process.as_ref();
        let standby = self.seats[Role::Standby].process.as_ref();
        Stats {
            health: Some(self.health_now()),
            process: main.map(Process::number),
            standby: standby
                .filter(|it| self.life.is_standby_ready() && !it.is_stopped)
                .map(Process::number),
            stopped_standby: standby
                .filter(|it| it.is_stopped && !self.life.is_replaced(Role::Standby))
                .map(Process::number),
            draining: standby.filter(|_| self.life.is_drained(Role::Standby)).map(Process::number),
            is_stopped: main.is_some_and(|process| process.is_stopped),
            is_busy: main.is_some_and(|process| process.is_busy),
            device_bytes: main.map_or(0, |process| process.device_bytes),
            standby_device_bytes: standby.map_or(0, |process| process.device_bytes),
            calls: self.calls.len(),
            running: self.calls.running(),
            suspects: self.calls.suspects(),
            stuck: self.life.stuck(),
            early_deaths: self.life.early_deaths(),
            last_cause: self.last_cause.clone(),
            ..self.stats.clone()
        }
    }

    pub(crate) fn log(&self) -> String {
        let mut log = self.last_log.to_string();
        if let Some((process, cause)) = &self.last_death {
            let end = if log.is_empty() || log.ends_with('\n') { "" } else { "\n" };
            log += &format!("{end}[process {process} died: {cause}]\n");
        }
        let main = self.seats[Role::Main].process.as_ref();
        log + &main.map_or_else(String::new, |process| process.log.text())
    }

    /// Some of the slab became free.
    fn has_room(&mut self, spec: &Spec, now: Instant, after: &mut After) {
        after.waiters.extend(self.room.drain(..).map(|waiter| (waiter, Ok(()))));
        self.pump(spec, now, after);
    }

    /// Sends what can be sent.
    fn pump(&mut self, spec: &Spec, now: Instant, after: &mut After) {
        // Suspects wait for a standby, and hold up nobody meanwhile. A standby that waits for memory, or is stopped, takes none.
        let standby = self.seats[Role::Standby].process.as_ref();
        let waits = standby.is_some_and(|it| !it.asked_mut.is_empty() || it.is_stopped);
        let expects = self.life.expects_standby() && !waits;
        let takes = if expects { Takes::Fresh } else { Takes::All };
        self.pump_to(spec, Role::Main, takes, now, after);
        self.pump_to(spec, Role::Standby, Takes::Suspects, now, after);
    }

    fn pump_to(&mut self, spec: &Spec, role: Role, takes: Takes, now: Instant, after: &mut After) {
        let Some(process) = &mut self.seats[role].process else { return };
        let is_clear = process.send_control();
        let serves = matches!(self.life.phase(role), Phase::Serving(_));
        // A replacement is to take over as soon as it has no suspect.
        let serves = serves && (role == Role::Main || !self.life.is_wanted());
        let is_stopped = role == Role::Standby && process.is_stopped;
        let waits = is_stopped || !process.asked_mut.is_empty();
        if !is_clear || !serves || process.is_falling() || waits {
            return;
        }
        let to = process.incarnation;
        let mut room = true;
        while let Some(id) = self.calls.next(to, takes, room) {
            room &= !self.calls.is_behind_roomless(id);
            // Found guilty since it was entered, or sent.
            if !self.blamed.lock().is_empty() {
                let keys = self.calls.keys(id);
                if let Some(error) = self.refused(keys, now) {
                    let ticket = self.calls.abandon(id, now);
                    ticket.into_iter().for_each(|it| after.end(it, Outcome::Failed(error.clone())));
                    continue;
                }
            }
            let Some(process) = &mut self.seats[role].process else { return };
            let Some(ticket) = self.calls.value(id) else { return };
            let payload = match place(spec, &mut self.leases, ticket, room) {
                Ok(payload) => payload,
                // Until memory is returned, perhaps by a later call that has its own.
                Err(NoRoom) => {
                    room = false;
                    self.calls.wait_for_room(id);
                    continue;
                }
            };
            if self.calls.becomes_suspect(id) {
                continue;
            }
            let alone = self.calls.runs_alone(id);
            let Some(ticket) = self.calls.value(id) else { return };
            let call = ToProcess::Call { id, payload, alone };
            let Ok(header) = codec::encode(&call) else { return };
            match process.send(&[&header, &ticket.request]) {
                Sent::Yes => {
                    ticket.sent += 1;
                    process.used.calls += 1;
                    process.used.payload_bytes += payload.map_or(0, |(_, part)| part.len);
                    after.wake |= role == Role::Main && self.wear(spec, now).is_some();
                    self.calls.sent(id, to, now);
                    self.stats.retries += u64::from(self.calls.attempt(id) > 1);
                    if let Some((lease, _)) = payload {
                        self.leases.send(lease, to);
                        // Otherwise the payload must stay for the next process, whatever this one says.
                        if !self.calls.may_run_again(id) {
                            self.leases.give_back(lease);
                        }
                    }
                }
                Sent::Full | Sent::NoMemory => return,
                Sent::TooLong => {
                    let bytes = ticket.request.len() as u64;
                    let limit = process.most_packet().saturating_sub(header.len()) as u64;
                    let error = Error::TooLarge { what: "a request", bytes, limit };
                    if let Some(ticket) = self.calls.abandon(id, now) {
                        after.end(ticket, Outcome::Failed(error));
                    }
                }
                // Its handle will show its death.
                Sent::Gone => return,
            }
        }
    }
}

/// The slab is full.
struct NoRoom;

/// Puts a call's payload into the slab, if it may take room there.
fn place(
    spec: &Spec,
    leases: &mut Leases,
    ticket: &mut Ticket,
    room: bool,
) -> Result<Option<(LeaseId, Part)>, NoRoom> {
    let bytes = match &ticket.payload {
        None => return Ok(None),
        Some(Placed::Lease(lease)) => return Ok(Some((lease.id, lease.part))),
        Some(Placed::Waits { bytes, .. }) => bytes,
    };
    let taken = if room { leases.take(bytes.len() as u64) } else { None };
    let (id, part) = taken.ok_or(NoRoom)?;
    let mut lease = Lease { lender: spec.lender.clone(), slab: spec.requests.clone(), id, part };
    lease.copy_from_slice(bytes);
    ticket.payload = Some(Placed::Lease(lease));
    Ok(Some((id, part)))
}
