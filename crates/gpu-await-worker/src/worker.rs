//! [`Worker`]: the handle of the front, and its builder. More than 500 lines: mostly the docs of its options.
#![forbid(unsafe_code)]

use std::borrow::Borrow;
use std::ffi::OsString;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_await_protocol::lock::Mutex;

use crate::blame::{Blame, Blamed};
use crate::codec;
use crate::error::{Error, Result};
use crate::gpus;
use crate::health::WorkerHealth;
use crate::inside::{Handle, Inside};
use crate::options::{CALLS, Options, capped};
use crate::payload::Lease;
use crate::pending::{Call, To};
use crate::program::Program;
use crate::replace::Replace;
use crate::restart::Restart;
use crate::service::Service;
use crate::stats::Stats;
use crate::supervisor;
use crate::system;
use crate::ticket::Until;

/// A [`Service`] in a process of its own, which is started again when it dies. Cheap to clone, `Send + Sync`; used on any executor.
///
/// # Ownership
/// The process ends with the last handle: calls that are under way keep one. It ends with the front process as well, however that
/// ends, and so does what it started, unless that left its process group (`setsid`).
///
/// In a fork of the front every handle returns [`Error::Forked`], and dropping one does nothing: the workers are the parent's. Their shared
/// memory is not mapped there: reading a [`Lease`] or a [`Payload`](crate::Payload) panics.
pub struct Worker<S: Service> {
    pub(crate) handle: Arc<Handle>,
    service: PhantomData<fn() -> S>,
}

impl<S: Service> Clone for Worker<S> {
    fn clone(&self) -> Self {
        Worker::of(self.handle.clone())
    }
}

impl<S: Service> fmt::Debug for Worker<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let service = self.handle.inside.spec.service;
        f.debug_struct("Worker").field("service", &service).field("stats", &self.stats()).finish()
    }
}

impl<S: Service> Worker<S> {
    pub(crate) fn of(handle: Arc<Handle>) -> Self {
        Worker { handle, service: PhantomData }
    }

    /// Starts a builder with this configuration, which each process of the worker gets.
    pub fn builder(config: S::Config) -> WorkerBuilder<S> {
        WorkerBuilder { config, options: Options::default() }
    }

    /// Makes a call: the request is encoded now, and sent now if the process takes calls, else as soon as one does.
    ///
    /// Awaiting it sends it; ready proves that the process answered, or that no process ever will: each call ends exactly once. Options
    /// are set before: see [`Call`]; the payload of the answer comes by [`Call::send`] and [`Answer::with_payload`](crate::Answer::with_payload).
    ///
    /// # Blocking
    /// Wakers of calls run on the thread that looks after all workers: one that blocks, or takes a lock that is held for long, holds up all
    /// of them. Those of executors do not.
    pub fn call(&self, request: impl Borrow<S::Request>) -> Call<S> {
        Call::new(To::Worker(self.handle.clone()), request.borrow())
    }

    /// Takes shared memory for the payload of a request, of `bytes` zeros or an earlier payload, if there is room now. Leases are rounded up to
    /// multiples of 256 bytes, and one of 0 bytes takes 256 as well.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if there is none; [`Error::TooLarge`]; the worker has ended.
    pub fn try_lease(&self, bytes: usize) -> Result<Lease> {
        self.handle.inside.lease(bytes as u64)
    }

    /// [`try_lease`](Self::try_lease) once there is room, without a limit: a caller that has one drops the future (`tokio::time::timeout`).
    ///
    /// # Cancel safety
    /// If the future is dropped, nothing is taken.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; the worker has ended.
    pub async fn lease(&self, bytes: usize) -> Result<Lease> {
        loop {
            // Before the attempt, so that nothing is missed in between.
            let room = self.handle.inside.wait(Until::Room);
            match self.try_lease(bytes) {
                Err(Error::Overloaded { .. }) => {}
                lease => return lease,
            }
            room.await?;
        }
    }

    /// Waits until a process serves: at once, or after a restart.
    ///
    /// Ready proves that one served, as far as this process knew: one that was killed a moment ago serves until its death is seen.
    ///
    /// # Errors
    /// The worker has ended: [`Error::GivenUp`], [`Error::Closed`].
    pub async fn serving(&self) -> Result<()> {
        self.handle.inside.wait(Until::Serving).await
    }

    /// Waits until the worker ends, and returns why: [`Error::GivenUp`], after which a program ends or [revives](Self::revive) it, or [`Error::Closed`].
    /// Returns at once if it has ended. Nothing runs while it waits.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the worker as it is.
    pub async fn ended(&self) -> Error {
        loop {
            if let Err(error) = self.handle.inside.wait(Until::End).await {
                return error;
            }
        }
    }

    /// Has a worker that was [given up](Error::GivenUp) begin anew, with its counts of deaths at zero, and waits until it serves; otherwise it
    /// only waits. Calls that ended meanwhile stay ended; handles, leases and figures carry on.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the worker as it is: starting, if the future was polled.
    ///
    /// # Errors
    /// As [`spawn`](WorkerBuilder::spawn): the worker is given up again if its first process dies before it serves. One that was closed stays
    /// [`Closed`](Error::Closed), and one that ended by a panic of this crate ([`Cause::Supervisor`](crate::Cause::Supervisor)) given up.
    pub async fn revive(&self) -> Result<()> {
        self.handle.inside.revive()?;
        self.serving().await
    }

    /// Replaces the serving process without losing a call: another one starts beside it and takes the calls once it is ready; then the
    /// old one answers its remaining calls, and ends. A [standby](WorkerBuilder::standby) that is ready takes over at once: it has started its service
    /// before this call, so what [`Service::start`] read then, such as a file of settings, may be old. The worker's configuration is the same for all
    /// its processes.
    ///
    /// Ready proves that the process that served at the call is gone, and that another one serves; if none served, that one does. Calls that
    /// the old one does not answer within [`Replace::drain`] are lost, or sent again; and so is a suspect that runs in the standby for as long.
    ///
    /// The new process runs the program that this one was started from: a new version of it on disk changes nothing. Messages have no
    /// schema, so two builds that differ in a request or response would silently misread each other. To deploy a new version, start it
    /// beside this program, and hand over its listening sockets.
    ///
    /// While both live, everything that a process takes is taken twice: see [`standby`](WorkerBuilder::standby).
    ///
    /// # Cancel safety
    /// Dropping the future once it was polled leaves the replacement under way.
    ///
    /// # Errors
    /// [`Error::NotReplaced`]: more processes than [`Restart::early_deaths`] died as they started, or the system refused as many starts in a row,
    /// and the old one goes on;
    /// [`Error::Excluded`] with `allow_mps`; the worker has ended.
    pub async fn replace(&self) -> Result<()> {
        self.handle.inside.replace()?.await
    }

    /// Ends the worker: calls that no process has fail with [`Error::Closed`], the process answers the others and ends, and is killed if that takes
    /// longer than `limit`. An [idempotent](Call::idempotent) call that it had then also fails with `Closed`, and may have run. Returns when the process is gone. A worker that was given up is closed as well, and can no longer be [revived](Self::revive).
    pub async fn close(self, limit: Duration) {
        self.handle.inside.close(capped(limit));
        self.ended().await;
    }

    /// Whether it serves, since when, and why not: for `/healthz`. [`WorkerHealth::is_serving`] says when to answer 200.
    #[must_use]
    pub fn health(&self) -> WorkerHealth {
        self.handle.inside.health()
    }

    /// Asks the process that takes calls for the [timeline](gpu_await::DeviceTimeline) of its device: its last operations and their times, as
    /// bytes of a Perfetto trace, for a file and <https://ui.perfetto.dev>. Waits for a process that serves. The log of a process that died
    /// is lost with it.
    ///
    /// The process copies and writes the trace on a thread beside its calls. It comes over its socket, in messages between answers, of at most 64 MiB
    /// in all, which the front holds. Callers that ask at the same time get the same one.
    ///
    /// # Cancel safety
    /// If the future is dropped, the process still sends it; nothing is kept.
    ///
    /// # Errors
    /// [`Error::Unfit`] without [`WorkerBuilder::timeline`]; [`Error::Service`], if the device cannot provide it, or it is longer; [`Error::Lost`],
    /// if the process dies meanwhile; the worker has ended.
    pub async fn timeline(&self) -> Result<Vec<u8>> {
        loop {
            match self.handle.inside.timeline().await? {
                Some(bytes) => return Ok(Arc::unwrap_or_clone(bytes)),
                None => self.serving().await?,
            }
        }
    }

    /// The figures of the worker: the source for metrics, which it does not export itself. Counts begin with the worker, and never
    /// fall.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.handle.inside.stats()
    }

    /// The last lines that the process wrote to its output and its errors, after those of the process that died last. They go nowhere else:
    /// a service that wants them on the front's output writes them there from here, or logs to a file.
    #[must_use]
    pub fn log(&self) -> String {
        self.handle.inside.log()
    }
}

/// A worker of a group is out after this many failed starts in a row.
const MOST_FAILURES: u32 = 3;

/// The options of a [`Worker`].
#[must_use = "a builder does nothing until `spawn`"]
pub struct WorkerBuilder<S: Service> {
    config: S::Config,
    options: Options,
}

impl<S: Service> fmt::Debug for WorkerBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerBuilder").field("options", &self.options).finish_non_exhaustive()
    }
}

impl<S: Service> WorkerBuilder<S> {
    /// How many calls may be under way, including abandoned ones. 4,096; from 1 to 2²⁰. A worker of a
    /// [`Group`](crate::Group) may have more for a while: those that the group sends again count where they were admitted.
    pub fn most_calls(mut self, calls: usize) -> Self {
        self.options.most_calls = calls;
        self
    }

    /// The longest request or response, encoded, without payload. 64 KiB; from 64 bytes to 4 MiB, because the thread that hears all workers
    /// reads each message whole: large data goes as a [payload](Lease). The system's sockets may take less (twice `net.core.wmem_max`, some
    /// 400 KiB where that is not set): a longer message is refused then, with that limit.
    pub fn most_message_bytes(mut self, bytes: u32) -> Self {
        self.options.most_message_bytes = bytes;
        self
    }

    /// The shared memory for payloads of requests and of responses, in bytes. 64 MiB each, of which only what is used takes memory; from 4
    /// KiB to 1 TiB, rounded up to whole pages.
    ///
    /// A [`Lease`] and a [`Payload`](crate::Payload) count against it until they are dropped, and nobody but their holder can make room: calls whose
    /// answers are held until all of them are there (`join_all`) need memory for all of them. A response that waits for such room ends after
    /// [`held_payload_limit`](Self::held_payload_limit); a lease, and a call whose payload waits for leases that the program holds, wait until one
    /// is dropped, or for a [`deadline`](Call::deadline).
    pub fn payload_bytes(mut self, requests: u64, responses: u64) -> Self {
        self.options.request_slab_bytes = requests;
        self.options.response_slab_bytes = responses;
        self
    }

    /// How many bytes of payloads the front may hold for calls that wait for room in that memory; bytes that several calls share count for
    /// each. 256 MiB. A call that would have more wait is refused ([`Error::Overloaded`]); one that has a [`Lease`] never is.
    pub fn most_waiting_bytes(mut self, bytes: u64) -> Self {
        self.options.most_waiting_bytes = bytes;
        self
    }

    /// How long a response may wait for room while payloads that the program itself holds are all that fills the memory: then its call
    /// ends with [`Error::PayloadsHeld`]. 10 s.
    pub fn held_payload_limit(mut self, limit: Duration) -> Self {
        self.options.held = capped(limit);
        self
    }

    /// Places the worker on the GPU with this UUID, or a UUID that begins with this, out of [`gpus`](crate::gpus); or on a part of one,
    /// `MIG-..`. Its processes see that GPU alone, as number 0. Without it they open the host device.
    pub fn gpu(mut self, uuid: impl Into<String>) -> Self {
        self.options.gpu = Some(uuid.into());
        self
    }

    /// The limit of the device's account in the process, in bytes.
    pub fn device_memory_bytes(mut self, bytes: u64) -> Self {
        self.options.device_memory_bytes = Some(bytes);
        self
    }

    /// Kills the process when it uses more memory than this, in bytes, 1 MiB at least; checked twice a second. No limit. Used memory for payloads
    /// counts: the payload memory may not be larger than this.
    pub fn resident_bytes(mut self, bytes: u64) -> Self {
        self.options.resident_bytes = Some(bytes);
        self
    }

    /// Opens the device in verify mode: an answer leaves the process only once the device is known to be healthy after it, and a fault
    /// names exactly the operation that faulted. Each operation then takes a round trip.
    pub fn verify(mut self, verify: bool) -> Self {
        self.options.verify = verify;
        self
    }

    /// Holds each answer until everything that was on the device when the call ended is complete, including work of other calls, and the
    /// device is healthy. If it is lost by then the answer is withheld: the call ends with its process, or runs again. Off.
    ///
    /// A stray kernel may overwrite data of other calls for a while before it faults, or before the driver says so. Without this option, answers
    /// computed meanwhile leave the process. With it, no answer does whose data a faulting kernel could have changed, as long as that kernel was on
    /// the device before the call's last operation was complete. Not covered: a kernel that writes wrong memory and does not fault.
    ///
    /// It costs a wait for the other calls' work: nothing where a process has one call at a time, and as long as the longest operation of any
    /// neighbour otherwise, which [`within`](Call::within) counts. [`verify`](Self::verify) also finds which operation it was, at a round trip for each.
    pub fn hold_answers(mut self, hold: bool) -> Self {
        self.options.hold_answers = hold;
        self
    }

    /// Starts even where MPS is on, and the fault of one client ends all of them: then there is no [`standby`](Self::standby)
    /// ([`Error::Excluded`]), which would end with the process that it is to replace, and no [`replace`](Self::replace).
    pub fn allow_mps(mut self, allow: bool) -> Self {
        self.options.allow_mps = allow;
        self
    }

    /// The threads of the process's runtime, up to 1,024. 1: it polls everything on the thread that reads the calls, which saves a call two wake-ups; code that
    /// blocks it delays other calls. With more, on a multi-threaded runtime, calls may compute on the CPU beside each other.
    pub fn threads(mut self, threads: u32) -> Self {
        self.options.threads = threads;
        self
    }

    /// How long both sides spin for the next message before they sleep, up to 1 s: a call or an answer that arrives within this time costs
    /// no wake-up, and each side may keep a core busy for as long after each message. Zero: both sleep at once.
    ///
    /// In the front, the task that awaits the answer spins, and yields to other tasks in between.
    pub fn hot(mut self, time: Duration) -> Self {
        self.options.hot = capped(time);
        self
    }

    /// How long [`Service::start`] may take, in each process. 120 s; more than zero.
    pub fn start_limit(mut self, limit: Duration) -> Self {
        self.options.start = capped(limit);
        self
    }

    /// How long the process's executor may go unpolled, once the service has started, before the process counts as hung and is killed:
    /// because a call of the driver, or blocking code of the service, does not return on all of its threads. A kernel that runs long does
    /// not block it. No limit; 500 ms at least, which is how often it is looked at.
    pub fn executor_limit(mut self, limit: Duration) -> Self {
        self.options.executor = Some(capped(limit));
        self
    }

    /// How long a killed process may take to go before it is set aside as stuck, and how many of these there may be before the worker is
    /// given up. 5 s and 1.
    pub fn stuck(mut self, grace: Duration, most: usize) -> Self {
        self.options.kill_grace = capped(grace);
        self.options.most_stuck = most;
        self
    }

    /// When a process is started again.
    pub fn restart(mut self, restart: Restart) -> Self {
        let most_delay = capped(restart.most_delay);
        self.options.restart = Restart { most_delay, ..restart };
        self
    }

    /// Keeps a second process on standby: its service has started, and it takes over at once when the first one falls, without the time
    /// of a start. Another standby is started once the process that fell is gone, after the delay of [`Restart`]. Off.
    ///
    /// Calls that were running end when their process is gone, with an answer or with its death; those that may run again do so then. Suspects
    /// ([`Call::idempotent`]) run in the standby, alone, and hold up no other call.
    ///
    /// It costs what a process costs, for as long as the worker lives: a context of the device and its modules, which `nvidia-smi` shows for each process,
    /// and whatever the service takes as it starts ([`Stats::standby_device_bytes`]), up to [`device_memory_bytes`](Self::device_memory_bytes) again.
    /// [Kept](crate::Host::keep) memory is shared by both. [`Service::start`] runs while another process serves: it must not need anything exclusive. A standby
    /// that dies interrupts nothing, and another one is tried; after [`Restart::early_deaths`] of them in a row none is, until another process
    /// serves ([`WorkerHealth::no_standby`], [`Stats::last_standby_cause`]). If it has taken over from one early death too many, it serves on, also
    /// without another standby. A standby that is stopped while it has a suspect is killed after a second.
    pub fn standby(mut self, standby: bool) -> Self {
        self.options.standby = standby;
        self
    }

    /// Replaces the process, as [`Worker::replace`] does, once it has done this much. Never. If no other process can be started, the serving
    /// one goes on for as much again.
    pub fn replace(mut self, replace: Replace) -> Self {
        let (time, drain) = (replace.time.map(capped), capped(replace.drain));
        self.options.replace = Replace { time, drain, ..replace };
        self
    }

    /// Refuses what killed processes, with [`Error::Refused`]: for a while, a request that did so while it ran alone, or then took longer than its
    /// [limit](Call::within), and a client that sent several such. So a client that sends the same request again and again costs the others one
    /// restart a minute, and not one for each. Off.
    ///
    /// Requests are told apart by [`Call::key`]; without one by a digest, which is computed for each call, on its caller's thread, of the
    /// request and its payload; with a payload of more than 1 MiB a request without a key is never refused. Clients are what [`Call::client`]
    /// says. Calls that were lost beside others, or by the fault of another, are not guilty. Those that may not run again leave their requests
    /// watched: the next call of that request runs alone, as suspects do. A client that loses calls this way in two deaths, with none of its
    /// calls answered in between, is watched likewise, whatever it sends: that catches a different poison request each time.
    ///
    /// Not caught: a client that sends a different poison request each time, none of which may run again, with good calls answered in between; one
    /// that names a different client each time; and what a call leaves on the host that kills its process later: see [`Guilt`](crate::Guilt).
    ///
    /// A watched call that does not end holds up others as any suspect does: give it a [limit](Call::within).
    ///
    /// A kill from outside (`SIGKILL` by the operator or the OOM killer, an end by `SIGTERM`) says little about the one call that ran: its request is
    /// watched as well, and guilty after three of these, over all its calls and attempts, without an answer in between: see
    /// [`Blame::refused_for`].
    pub fn blame(mut self, blame: Blame) -> Self {
        let refused_for = capped(blame.refused_for);
        let client_refused_for = capped(blame.client_refused_for);
        self.options.blame = Some(Blame { refused_for, client_refused_for, ..blame });
        self
    }

    /// Has each process log the last `operations` of its device, for [`Worker::timeline`]: up to 65,536. 0, which is off. It costs each
    /// operation what [`DeviceTimeline`](gpu_await::DeviceTimeline) says.
    pub fn timeline(mut self, operations: u32) -> Self {
        self.options.timeline = operations;
        self
    }

    /// How much of what the process writes is kept, in bytes. 64 KiB; up to 64 MiB.
    pub fn log_bytes(mut self, bytes: usize) -> Self {
        self.options.log_bytes = bytes;
        self
    }

    /// Sets a variable of the process's environment, which is the front's otherwise. Up to 128 KiB with its name, and 1 MiB in all.
    ///
    /// With `RUST_BACKTRACE=1` in the front, a panic of a kernel's twin on the host device, which stands for a fault, may take several hundred ms,
    /// for the names in its backtrace: `.env("RUST_BACKTRACE", "0")` where that matters.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.options.environment.push((name.into(), value.into()));
        self
    }

    /// How many calls it admits, once begun.
    pub(crate) fn places(&self) -> usize {
        self.options.most_calls.min(*CALLS.end() as usize)
    }

    /// Makes it part of a group that admits so many calls.
    pub(crate) fn in_group(mut self, blamed: &Arc<Mutex<Blamed>>, places: usize) -> Self {
        let options = &mut self.options;
        options.most_group_calls = places;
        options.restart.early_deaths = options.restart.early_deaths.min(MOST_FAILURES - 1);
        (options.blamed, options.probes) = (blamed.clone(), true);
        self
    }

    /// Starts the worker; ready proves that its service has started.
    ///
    /// # Cancel safety
    /// If the future is dropped, the process ends.
    ///
    /// # Errors
    /// Nothing is started without [`init`](crate::init), inside of a worker, for a service that `init` does not name, or with an option
    /// outside of its limits ([`Error::Unfit`]) or that another one makes useless ([`Error::Excluded`]). If the first
    /// process dies before it serves the worker is [given up](Error::GivenUp), with the cause and its log.
    pub async fn spawn(self) -> Result<Worker<S>> {
        let worker = self.begin()?;
        worker.serving().await?;
        Ok(worker)
    }

    /// Starts the worker, and waits for nothing: calls wait until it serves.
    ///
    /// # Errors
    /// As [`spawn`](Self::spawn), except for failures of the process: these fail the calls, and [`Worker::serving`]. As there, a first process
    /// that dies before it serves ends the worker, whatever [`Restart::early_deaths`] says.
    pub fn begin(self) -> Result<Worker<S>> {
        let (service, program) = (S::name(), Program::get::<S>()?);
        let mut options = self.options.checked(system::file_limit())?;
        if let Some(wanted) = &options.gpu {
            options.gpu = Some(gpus::find(wanted)?);
        }
        let config =
            codec::encode(&self.config).map_err(|why| Error::encode("configuration", why))?;
        let inside = Inside::new(options, service, config, program, Instant::now())?;
        supervisor::supervise(inside.clone())?;
        Ok(Worker::of(Arc::new(Handle { inside })))
    }
}
