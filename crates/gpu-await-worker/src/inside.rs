//! A worker, whatever process serves it: one lock around its calls, its life and its process.
//!
//! More than 500 lines: many short ways through that lock, and what is done behind it.
//!
//! Callers enter and give up calls on their own threads, and send them there; the supervisor's thread alone starts, hears, kills and reaps
//! processes ([`crate::core`]). Whatever runs foreign code (wakers, drops of payloads, subscribers) runs after the lock is released
//! ([`After`]).
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::channel::oneshot;
use gpu_await::sibling::Process as Whose;
use parking_lot::{Mutex, MutexGuard};

use crate::calls::{CallId, Terms};
use crate::core::timeline::{Reader, Timeline};
use crate::core::{Core, SOCKET, Watch, packet_bytes};
use crate::error::{Error, Result};
use crate::frame::ToProcess;
use crate::health::WorkerHealth;
use crate::kept::Key;
use crate::leases::LeaseId;
use crate::options::Options;
use crate::payload::{Input, Lease, Payload, Placed, Waiting};
use crate::process::{Process, Refusal};
use crate::program::Program;
use crate::room::{Place, Room};
use crate::route::{Readiness, Seen, goes_on};
use crate::slab::Slab;
use crate::supervisor;
use crate::worker::Stats;

/// How a call ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Answered {
        response: Vec<u8>,
        payload: Option<Payload>,
    },
    Failed(Error),
    /// As `Failed`, of a call that its group may send elsewhere.
    Returned(Box<Returned>),
}

/// A call that a worker has done with, and why.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) error: Error,
    pub(crate) request: Vec<u8>,
    pub(crate) payload: Option<Input>,
    /// How often it was sent, to this worker's processes and before.
    pub(crate) sent: u32,
    /// Its place, wherever that is.
    pub(crate) room: Option<Room>,
}

/// A call that has not ended.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) request: Vec<u8>,
    pub(crate) payload: Option<Placed>,
    pub(crate) reply: oneshot::Sender<Outcome>,
    /// How often it was sent, to this worker's processes and before.
    pub(crate) sent: u32,
    pub(crate) terms: Terms,
    /// Its place, unless that is here.
    pub(crate) room: Option<Room>,
}

impl Ticket {
    fn returned(self, error: Error) -> Box<Returned> {
        let Ticket { request, payload, sent, room, .. } = self;
        let payload = payload.map(|payload| match payload {
            Placed::Lease(lease) => Input::Lease(lease),
            Placed::Waits { bytes, .. } => Input::Bytes(bytes),
        });
        Box::new(Returned { error, request, payload, sent, room })
    }

    /// Whether its group sends it elsewhere.
    pub(crate) fn goes_on(&self, error: &Error) -> bool {
        self.terms.is_groups && goes_on(self.terms, error, self.sent).is_some()
    }

    /// Has its group send it elsewhere. Until then it keeps its memory.
    fn send_back(mut self, error: Error) {
        let (closed, _) = oneshot::channel();
        let reply = std::mem::replace(&mut self.reply, closed);
        drop(reply.send(Outcome::Returned(self.returned(error))));
    }
}

/// Who waits for something other than a call.
pub(crate) type Waiter = oneshot::Sender<Result<()>>;

/// What a [`Waiter`] waits for. The end of the worker ends all of them, with its error.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    /// The worker serves.
    Serving,
    /// There may be more room for leases.
    Room,
    /// Nothing but its end.
    End,
}

/// What is done once the lock is released.
#[derive(Default)]
#[must_use]
pub(crate) struct After {
    pub(crate) ended: Vec<(Ticket, Outcome)>,
    pub(crate) waiters: Vec<(Waiter, Result<()>)>,
    pub(crate) places: Vec<(Place, Result<Room>)>,
    pub(crate) rooms: Vec<Room>,
    pub(crate) readers: Vec<(Reader, Result<Option<Timeline>>)>,
    pub(crate) payloads: Vec<Payload>,
    pub(crate) dropped: Vec<Ticket>,
    /// Processes that were reaped.
    pub(crate) gone: Vec<Process>,
    pub(crate) events: Vec<Box<dyn FnOnce() + Send>>,
    /// The supervisor has something to do that it does not know of.
    pub(crate) wake: bool,
}

impl After {
    /// Ends a call.
    pub(crate) fn end(&mut self, ticket: Ticket, outcome: Outcome) {
        self.ended.push((ticket, outcome));
    }

    /// Tells subscribers of `tracing`.
    pub(crate) fn log(&mut self, event: impl FnOnce() + Send + 'static) {
        self.events.push(Box::new(event));
    }

    fn run(self) {
        // Each may panic, and none may keep the others from running.
        for (ticket, outcome) in self.ended {
            let outcome = match outcome {
                Outcome::Failed(error) if ticket.goes_on(&error) => {
                    contain(|| ticket.send_back(error));
                    continue;
                }
                outcome => outcome,
            };
            let Ticket { request, payload, reply, room, .. } = ticket;
            // The payload first: whoever waits for the answer may count on its memory, and on its room.
            contain(|| drop((request, payload, room)));
            contain(|| drop(reply.send(outcome)));
        }
        for (waiter, result) in self.waiters {
            contain(|| drop(waiter.send(result)));
        }
        for (reader, timeline) in self.readers {
            contain(|| drop(reader.send(timeline)));
        }
        for (place, room) in self.places {
            contain(|| drop(place.send(room)));
        }
        self.rooms.into_iter().for_each(|room| contain(|| drop(room)));
        self.payloads.into_iter().for_each(|payload| contain(|| drop(payload)));
        self.dropped.into_iter().for_each(|ticket| contain(|| drop(ticket)));
        supervisor::free(self.gone);
        self.events.into_iter().for_each(contain);
        if self.wake {
            supervisor::wake();
        }
    }
}

/// Runs foreign code; a panic of it goes no further.
fn contain(code: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(code)) {
        drop(crate::codec::panic_text(panic));
    }
}

/// What is inside of a worker, behind its handles. The public handle is [`Worker`](crate::Worker).
#[derive(Debug)]
pub(crate) struct Inside {
    pub(crate) options: Options,
    pub(crate) service: &'static str,
    pub(crate) config: Vec<u8>,
    pub(crate) program: &'static Program,
    /// The memory for payloads of requests. Its processes can only read it, so it serves one after the other.
    pub(crate) requests: Arc<Slab>,
    /// Bytes of payloads that there is no room for in it.
    waiting: Arc<AtomicU64>,
    this: Weak<Inside>,
    /// Whose it is. A fork has no thread that would answer, and its copy of the lock may be locked for good.
    process: Whose,
    core: Mutex<Core>,
    #[cfg(test)]
    pub(crate) trips: supervisor::tests::Trips,
}

impl Inside {
    pub(crate) fn new(
        options: Options,
        service: &'static str,
        config: Vec<u8>,
        program: &'static Program,
        now: Instant,
    ) -> Result<Arc<Inside>> {
        let requests = Slab::new("requests", options.request_slab_bytes, true);
        let requests = Arc::new(requests.map_err(|error| Error::system("shared memory", error))?);
        Ok(Arc::new_cyclic(|this| Inside {
            core: Mutex::new(Core::new(&options, now)),
            options,
            service,
            config,
            program,
            requests,
            waiting: Arc::default(),
            this: this.clone(),
            process: Whose::remembered(),
            #[cfg(test)]
            trips: Default::default(),
        }))
    }

    pub(crate) fn this(&self) -> Weak<Inside> {
        self.this.clone()
    }

    /// Tells it from other workers, for as long as it lives.
    pub(crate) fn number(&self) -> usize {
        self.this.as_ptr().addr()
    }

    /// Under which memory of that name is kept.
    pub(crate) fn key(&self, name: &str) -> Key {
        (self.options.gpu.clone(), name.to_owned())
    }

    /// Refused in a fork of the process that it belongs to.
    pub(crate) fn check_here(&self) -> Result<()> {
        if self.process.is_here() { Ok(()) } else { Err(Error::Forked) }
    }

    /// For drops, which do nothing in a fork.
    pub(crate) fn if_here(&self, act: impl FnOnce(&mut Core, &mut After)) {
        if self.process.is_here() {
            self.with(act);
        }
    }

    fn with<R>(&self, act: impl FnOnce(&mut Core, &mut After) -> R) -> R {
        self.guarded(self.core.lock(), act)
    }

    /// A panic under the lock leaves nothing half done: it ends the worker, and goes on. The lock is held until then: callers that the
    /// panic forgot ask why.
    fn guarded<R>(
        &self,
        mut core: MutexGuard<'_, Core>,
        act: impl FnOnce(&mut Core, &mut After) -> R,
    ) -> R {
        let mut after = After::default();
        let acted = catch_unwind(AssertUnwindSafe(|| act(&mut core, &mut after)));
        if let Err(panic) = &acted {
            let why = crate::codec::text_of(&**panic);
            core.give_up(self, &why, &mut after);
        }
        core.keep_rooms(self, &mut after);
        core.hand_out_room(self, &mut after);
        core.note_health();
        drop(core);
        after.run();
        acted.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Ends the worker because of a panic.
    pub(crate) fn give_up(&self, why: &str) {
        self.with(|core, after| core.give_up(self, why, after));
    }

    /// Why a call or a waiter was forgotten.
    pub(crate) fn why_forgotten(&self) -> Error {
        self.with(|core, _| core.why_forgotten())
    }

    /// Begins anew if it was given up.
    pub(crate) fn revive(&self) -> Result<()> {
        self.check_here()?;
        let revived = self.with(|core, after| core.revive(self, Instant::now(), after))?;
        match self.this.upgrade().filter(|_| revived) {
            Some(inside) => supervisor::supervise(inside),
            None => Ok(()),
        }
    }

    /// Has the process that serves replaced; resolves when it is gone.
    pub(crate) fn replace(&self) -> Result<impl Future<Output = Result<()>>> {
        self.check_here()?;
        self.options.check_alone("replace")?;
        let (waiter, receiver) = oneshot::channel();
        self.with(|core, after| core.replace(self, waiter, Instant::now(), after))?;
        Ok(self.told(receiver))
    }

    /// Begins to wait at the call.
    pub(crate) fn wait(&self, until: Until) -> impl Future<Output = Result<()>> {
        let (waiter, receiver) = oneshot::channel();
        self.if_here(|core, after| core.wait(until, waiter, after));
        self.told(receiver)
    }

    async fn told<T>(&self, mut told: oneshot::Receiver<Result<T>>) -> Result<T> {
        poll_fn(|cx| {
            self.check_here()?;
            told.poll_unpin(cx).map(|told| told.unwrap_or_else(|_| Err(self.why_forgotten())))
        })
        .await
    }

    /// Enters a call, and sends it if it can be sent now.
    pub(crate) fn submit(
        &self,
        request: Vec<u8>,
        payload: Option<Input>,
        terms: Terms,
        room: Option<Room>,
    ) -> Result<(CallId, oneshot::Receiver<Outcome>), Box<Returned>> {
        let sent = terms.sent_before;
        let payload = match self.prepared(&request, payload, terms) {
            Ok(payload) => payload,
            Err(error) => {
                return Err(Box::new(Returned { error, request, payload: None, sent, room }));
            }
        };
        let (reply, receiver) = oneshot::channel();
        let ticket = Ticket { request, payload, reply, sent, terms, room };
        let entered = self.with(|core, after| core.enter(self, ticket, terms, after));
        entered.map(|id| (id, receiver)).map_err(|refused| {
            let (error, ticket) = *refused;
            ticket.returned(error)
        })
    }

    /// Refuses what no process takes, and places the payload.
    fn prepared(
        &self,
        request: &[u8],
        payload: Option<Input>,
        terms: Terms,
    ) -> Result<Option<Placed>> {
        self.check_here()?;
        let limit = u64::from(self.options.most_message_bytes);
        if request.len() as u64 > limit {
            let bytes = request.len() as u64;
            return Err(Error::TooLarge { what: "a request", bytes, limit });
        }
        let limit = self.options.request_slab_bytes;
        if let Some(bytes) = payload.as_ref().map(Input::len).filter(|bytes| *bytes > limit) {
            return Err(Error::TooLarge { what: "a payload", bytes, limit });
        }
        payload.map(|payload| self.placed(payload, terms)).transpose()
    }

    /// What its group sees of it.
    pub(crate) fn seen(&self) -> Seen {
        match self.process.is_here() {
            true => self.with(|core, _| core.seen()),
            false => Seen { ready: Readiness::Never, load: 0, is_full: true },
        }
    }

    /// Copies bytes into the slab while no lock is held, if there is room now and nobody waits for it.
    fn placed(&self, payload: Input, terms: Terms) -> Result<Placed> {
        let payload = match payload {
            Input::Lease(lease) if Arc::ptr_eq(&lease.slab, &self.requests) => {
                return Ok(Placed::Lease(lease));
            }
            payload => payload,
        };
        let len = payload.len();
        let lease = self.with(|core, _| match core.has_roomless() {
            true => None,
            false => core.lease(self, len).ok(),
        });
        match lease {
            Some(mut lease) => {
                lease.copy_from_slice(payload.bytes());
                Ok(Placed::Lease(lease))
            }
            None => {
                let limit = self.options.most_waiting_bytes;
                let limit = if terms.was_admitted { u64::MAX } else { limit };
                let waiting = Waiting::count(len, &self.waiting, limit).map_err(|found| {
                    self.with(|core, _| core.overloaded());
                    Error::Overloaded { what: "bytes of payloads without room", found, limit }
                })?;
                let bytes = match payload {
                    Input::Bytes(bytes) => bytes,
                    // Of another worker.
                    Input::Lease(lease) => (*lease).into(),
                };
                Ok(Placed::Waits { bytes, _counted: waiting })
            }
        }
    }

    /// Resolves when there is room for a call, which it keeps, or the worker has ended.
    #[cfg(feature = "tower")]
    pub(crate) fn reserve(&self) -> oneshot::Receiver<Result<Room>> {
        let (place, receiver) = oneshot::channel();
        match self.check_here() {
            Ok(()) => self.with(|core, _| core.reserve(place)),
            Err(error) => drop(place.send(Err(error))),
        }
        receiver
    }

    /// A part of the slab, if there is room now.
    pub(crate) fn lease(&self, bytes: u64) -> Result<Lease> {
        self.check_here()?;
        let limit = self.options.request_slab_bytes;
        if bytes > limit {
            return Err(Error::TooLarge { what: "a payload", bytes, limit });
        }
        self.with(|core, _| core.lease(self, bytes))
    }

    /// Nobody waits for the call any more.
    pub(crate) fn abandon(&self, id: CallId) {
        self.if_here(|core, after| core.abandon(self, id, after));
    }

    pub(crate) fn give_back(&self, id: LeaseId) {
        self.if_here(|core, after| core.give_back(self, id, after));
    }

    pub(crate) fn release(&self, incarnation: u32, id: LeaseId) {
        self.if_here(|core, after| {
            if let Some(process) = core.process(incarnation) {
                process.tell(&ToProcess::Release(id), Vec::new());
                after.wake |= process.has_to_send();
            }
        });
    }

    /// Hears what the process says now, on the caller's thread, unless another one is at it.
    pub(crate) fn hear_now(&self, now: Instant) {
        thread_local! {
            static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let heard = BUFFER.try_with(|buffer| {
            let Some(core) = self.core.try_lock() else { return };
            // Taken: wakers that run at the end may come here again.
            let (mut taken, bytes) = (buffer.take(), packet_bytes(&self.options));
            // It never shrinks: what grows is written.
            taken.resize(taken.len().max(bytes), 0);
            self.guarded(core, |core, after| {
                core.hear_now(self, now, &mut taken[..bytes], after);
            });
            buffer.replace(taken);
        });
        // At the end of a thread its locals are gone: then the supervisor hears it.
        if heard.is_err() {
            supervisor::wake();
        }
    }

    /// Ends the worker, by force after `limit`.
    pub(crate) fn close(&self, limit: Duration) {
        self.if_here(|core, after| core.close(self, Instant::now() + limit, after));
    }

    pub(crate) fn stats(&self) -> Stats {
        match self.process.is_here() {
            // ORDERING: Relaxed: a count that orders nothing.
            true => Stats {
                waiting_bytes: self.waiting.load(Ordering::Relaxed),
                ..self.with(|core, _| core.stats())
            },
            false => Stats::default(),
        }
    }

    /// The timeline of the process that serves; `None` if none does.
    pub(crate) async fn timeline(&self) -> Result<Option<Timeline>> {
        self.check_here()?;
        let found = u64::from(self.options.timeline);
        if found == 0 {
            let what = "operations of the timeline (`WorkerBuilder::timeline`)";
            return Err(Error::Unfit { what, found, limit: 1 });
        }
        let (reader, told) = oneshot::channel();
        self.with(|core, after| core.ask_timeline(reader, after));
        self.told(told).await
    }

    pub(crate) fn health(&self) -> WorkerHealth {
        match self.process.is_here() {
            true => self.with(|core, _| core.health()),
            false => WorkerHealth {
                health: None,
                since: Instant::now(),
                cause: None,
                is_stopped: false,
                is_busy: false,
                waits_for: None,
                refusal: None,
                no_standby: None,
            },
        }
    }

    /// The last lines of the process that is there, or of the last one.
    pub(crate) fn log(&self) -> String {
        match self.process.is_here() {
            true => self.with(|core, _| core.log()),
            false => String::new(),
        }
    }

    /// A process was started, or not.
    pub(crate) fn started(&self, incarnation: u32, started: Result<Process, Refusal>) {
        self.with(|core, after| core.started(self, incarnation, started, Instant::now(), after));
    }

    /// Hears what its processes say, if they do, and delivers it.
    pub(crate) fn hear(&self, now: Instant, ready: &Watch, buffer: &mut [u8]) {
        if ready.processes.iter().all(|watched| watched.flags[SOCKET].is_empty()) {
            return;
        }
        let hear = || self.with(|core, after| core.hear_ready(self, now, ready, buffer, after));
        if let Err(panic) = catch_unwind(AssertUnwindSafe(hear)) {
            drop(crate::codec::panic_text(panic));
        }
    }

    /// What else the supervisor does when something of this worker is ready or due.
    pub(crate) fn turn(&self, now: Instant, ready: &Watch, buffer: &mut [u8]) -> Watch {
        let turn = || self.with(|core, after| core.turn(self, now, ready, buffer, after));
        catch_unwind(AssertUnwindSafe(turn)).unwrap_or_else(|panic| {
            drop(crate::codec::panic_text(panic));
            self.with(|core, _| core.watch(self, now))
        })
    }
}
