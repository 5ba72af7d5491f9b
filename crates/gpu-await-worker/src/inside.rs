//! A worker, whatever process serves it: one lock around its calls, its life and its process.
//!
//! Callers enter and abandon calls on their own threads, and send calls there; only the supervisor's thread starts, kills and reaps
//! processes ([`crate::core`]). Foreign code (wakers, drops of payloads, subscribers) runs after the lock is released
//! ([`crate::after`]).
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
use gpu_await_protocol::lock::{Mutex, MutexGuard};

use crate::after::{After, Timeline};
use crate::calls::{CallId, Terms};
use crate::codec;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::frame::ToProcess;
use crate::health::WorkerHealth;
use crate::leases::LeaseId;
use crate::lender::Lender;
use crate::options::Options;
use crate::payload::{Input, Lease, Placed, Waiting};
use crate::process::{Process, Refusal};
use crate::program::Program;
use crate::room::Room;
#[cfg(feature = "tower")]
use crate::room::{Awaited, Place};
use crate::route::{Readiness, Seen};
use crate::slab::Slab;
use crate::spec::Spec;
use crate::stats::Stats;
use crate::supervisor::{self, Supervised};
use crate::ticket::{Outcome, Returned, Ticket, Until};
use crate::watch::{SOCKET, Watch};

/// Closes the worker when dropped.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) inside: Arc<Inside>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inside.close(Duration::ZERO);
    }
}

impl Handle {
    /// As [`Inside::submit`].
    pub(crate) fn submit(
        self: &Arc<Self>,
        request: Vec<u8>,
        payload: Option<Input>,
        terms: Terms,
        room: Option<Room>,
    ) -> Result<SentCall, Box<Returned>> {
        let (id, reply) = self.inside.submit(request, payload, terms, room)?;
        Ok(SentCall { handle: self.clone(), id, reply })
    }
}

/// A call that a worker has.
#[derive(Debug)]
pub(crate) struct SentCall {
    pub(crate) handle: Arc<Handle>,
    pub(crate) id: CallId,
    pub(crate) reply: oneshot::Receiver<Outcome>,
}

/// The inside of a worker, behind its handles. The public handle is [`Worker`](crate::Worker).
#[derive(Debug)]
pub(crate) struct Inside {
    pub(crate) spec: Spec,
    /// Bytes of payloads that have no room in the slab.
    waiting: Arc<AtomicU64>,
    /// The process that owns it. A fork has no thread that would answer, and its copy of the lock may stay locked forever.
    process: Whose,
    core: Mutex<Core>,
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
        Ok(Arc::new_cyclic(|this: &Weak<Inside>| Inside {
            core: Mutex::new(Core::new(&options, now)),
            spec: Spec {
                options,
                service,
                config,
                program,
                requests,
                lender: this.clone(),
                supervised: this.clone(),
                #[cfg(test)]
                trips: Default::default(),
            },
            waiting: Arc::default(),
            process: Whose::remembered(),
        }))
    }

    /// Fails in a fork of the owning process.
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

    /// A panic under the lock leaves nothing half done: it ends the worker and is resumed. The lock is held until then: callers that the
    /// panic dropped ask why.
    fn guarded<R>(
        &self,
        mut core: MutexGuard<'_, Core>,
        act: impl FnOnce(&mut Core, &mut After) -> R,
    ) -> R {
        let mut after = After::default();
        let acted = catch_unwind(AssertUnwindSafe(|| act(&mut core, &mut after)));
        if let Err(panic) = &acted {
            let why = codec::text_of(&**panic);
            core.give_up(&self.spec, &why, &mut after);
        }
        core.keep_rooms(&self.spec, &mut after);
        core.hand_out_room(&self.spec, &mut after);
        core.note_health();
        drop(core);
        after.run();
        acted.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Why a call or a waiter was dropped without a result.
    pub(crate) fn why_forgotten(&self) -> Error {
        self.with(|core, _| core.why_forgotten())
    }

    /// Begins anew if it was given up.
    pub(crate) fn revive(&self) -> Result<()> {
        self.check_here()?;
        let revived = self.with(|core, after| core.revive(&self.spec, Instant::now(), after))?;
        match self.spec.supervised.upgrade().filter(|_| revived) {
            Some(worker) => supervisor::supervise(worker),
            None => Ok(()),
        }
    }

    /// Has the serving process replaced; resolves when it is gone.
    pub(crate) fn replace(&self) -> Result<impl Future<Output = Result<()>>> {
        self.check_here()?;
        self.spec.options.check_alone("replace")?;
        let (waiter, receiver) = oneshot::channel();
        self.with(|core, after| core.replace(&self.spec, waiter, Instant::now(), after))?;
        Ok(self.told(receiver))
    }

    /// Starts to wait when called, not when polled.
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
    fn submit(
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
        let entered = self.with(|core, after| core.enter(&self.spec, ticket, terms, after));
        entered.map(|id| (id, receiver)).map_err(|refused| {
            let (error, ticket) = *refused;
            ticket.returned(error)
        })
    }

    /// Refuses calls that no process takes, and places the payload.
    fn prepared(
        &self,
        request: &[u8],
        payload: Option<Input>,
        terms: Terms,
    ) -> Result<Option<Placed>> {
        self.check_here()?;
        let limit = u64::from(self.spec.options.most_message_bytes);
        if request.len() as u64 > limit {
            let bytes = request.len() as u64;
            return Err(Error::TooLarge { what: "a request", bytes, limit });
        }
        let limit = self.spec.options.request_slab_bytes;
        if let Some(bytes) = payload.as_ref().map(Input::len).filter(|bytes| *bytes > limit) {
            return Err(Error::TooLarge { what: "a payload", bytes, limit });
        }
        payload.map(|payload| self.placed(payload, terms)).transpose()
    }

    /// The state that its group sees.
    pub(crate) fn seen(&self) -> Seen {
        match self.process.is_here() {
            true => self.with(|core, _| core.seen(&self.spec)),
            false => Seen { ready: Readiness::Never, load: 0, is_full: true },
        }
    }

    /// Copies bytes into the slab while no lock is held, if there is room now and nobody waits for it.
    fn placed(&self, payload: Input, terms: Terms) -> Result<Placed> {
        let payload = match payload {
            Input::Lease(lease) if Arc::ptr_eq(&lease.slab, &self.spec.requests) => {
                return Ok(Placed::Lease(lease));
            }
            payload => payload,
        };
        let len = payload.len();
        let lease = self.with(|core, _| match core.has_roomless() {
            true => None,
            false => core.lease(&self.spec, len).ok(),
        });
        match lease {
            Some(mut lease) => {
                lease.copy_from_slice(payload.bytes());
                Ok(Placed::Lease(lease))
            }
            None => {
                let limit = self.spec.options.most_waiting_bytes;
                let limit = if terms.was_admitted { u64::MAX } else { limit };
                let waiting = Waiting::count(len, &self.waiting, limit).map_err(|found| {
                    self.with(|core, _| core.overloaded());
                    Error::Overloaded { what: "bytes of payloads without room", found, limit }
                })?;
                let bytes = match payload {
                    Input::Bytes(bytes) => bytes,
                    // A lease of another worker.
                    Input::Lease(lease) => (*lease).into(),
                };
                Ok(Placed::Waits { bytes, _counted: waiting })
            }
        }
    }

    /// Resolves once room is reserved for a call, or the worker has ended.
    #[cfg(feature = "tower")]
    pub(crate) fn reserve(&self) -> Awaited {
        let (place, awaited) = Place::new();
        match self.check_here() {
            Ok(()) => self.with(|core, _| core.reserve(place)),
            Err(error) => drop(place.give(Err(error))),
        }
        awaited
    }

    /// A part of the slab, if there is room now.
    pub(crate) fn lease(&self, bytes: u64) -> Result<Lease> {
        self.check_here()?;
        let limit = self.spec.options.request_slab_bytes;
        if bytes > limit {
            return Err(Error::TooLarge { what: "a payload", bytes, limit });
        }
        self.with(|core, _| core.lease(&self.spec, bytes))
    }

    /// Nobody waits for the call any more.
    pub(crate) fn abandon(&self, id: CallId) {
        self.if_here(|core, after| core.abandon(&self.spec, id, after));
    }

    /// Receives what the process has sent, on the caller's thread, unless another thread holds the lock.
    pub(crate) fn hear_now(&self, now: Instant) {
        thread_local! {
            static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        let heard = BUFFER.try_with(|buffer| {
            let Some(core) = self.core.try_lock() else { return };
            // Taken, because wakers that run at the end may re-enter this function.
            let (mut taken, bytes) = (buffer.take(), self.spec.packet_bytes());
            // It never shrinks: growing it writes to it.
            taken.resize(taken.len().max(bytes), 0);
            self.guarded(core, |core, after| {
                core.hear_now(&self.spec, now, &mut taken[..bytes], after);
            });
            buffer.replace(taken);
        });
        // A thread that is ending has no locals left: then the supervisor receives it.
        if heard.is_err() {
            supervisor::wake();
        }
    }

    /// Ends the worker, by force after `limit`.
    pub(crate) fn close(&self, limit: Duration) {
        self.if_here(|core, after| core.close(&self.spec, Instant::now() + limit, after));
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
        let found = u64::from(self.spec.options.timeline);
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

    /// The last lines of the current process, or of the last one.
    pub(crate) fn log(&self) -> String {
        match self.process.is_here() {
            true => self.with(|core, _| core.log()),
            false => String::new(),
        }
    }
}

impl Lender for Inside {
    fn give_back(&self, id: LeaseId) {
        self.if_here(|core, after| core.give_back(&self.spec, id, after));
    }

    fn release(&self, incarnation: u32, id: LeaseId) {
        self.if_here(|core, after| {
            if let Some(process) = core.process(incarnation) {
                process.tell(&ToProcess::Release(id), Vec::new());
                after.wake |= process.has_to_send();
            }
        });
    }

    fn give_back_room(&self) {
        self.if_here(|core, _| core.give_back_room());
    }
}

impl Supervised for Inside {
    fn start(&self, incarnation: u32) {
        let start = || {
            #[cfg(test)]
            self.spec.trips.slow();
            Process::start(&self.spec, incarnation, Instant::now())
        };
        let started = catch_unwind(AssertUnwindSafe(start)).unwrap_or_else(|panic| {
            let error = std::io::Error::other(codec::panic_text(panic));
            Err(Refusal { tried: "a panic, which is a bug of this crate", error })
        });
        self.with(|core, after| {
            core.started(&self.spec, incarnation, started, Instant::now(), after);
        });
    }

    fn give_up(&self, why: &str) {
        self.with(|core, after| core.give_up(&self.spec, why, after));
    }

    fn packet_bytes(&self) -> usize {
        self.spec.packet_bytes()
    }

    fn hear(&self, now: Instant, ready: &Watch, buffer: &mut [u8]) {
        if ready.processes.iter().all(|watched| watched.flags[SOCKET].is_empty()) {
            return;
        }
        let hear =
            || self.with(|core, after| core.hear_ready(&self.spec, now, ready, buffer, after));
        if let Err(panic) = catch_unwind(AssertUnwindSafe(hear)) {
            drop(codec::panic_text(panic));
        }
    }

    fn turn(&self, now: Instant, ready: &Watch, buffer: &mut [u8]) -> Watch {
        let turn = || self.with(|core, after| core.turn(&self.spec, now, ready, buffer, after));
        catch_unwind(AssertUnwindSafe(turn)).unwrap_or_else(|panic| {
            drop(codec::panic_text(panic));
            self.with(|core, _| core.watch(&self.spec, now))
        })
    }
}
