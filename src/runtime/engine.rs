//! One device's completion engine: the state that its streams share.
//!
//! | part | what for |
//! |---|---|
//! | `state` | whether the device is lost, and which tasks wait for a worker; outlives the device |
//! | `registry` | every stream, to report a loss and to wait for all |
//! | `attention` | wakes the poller |
//! | `checkers` | permits for tasks that check for themselves, or stay awake |
//! | `events`, `words`, `bells` | markers; private streams for doorbells |
//! | `clock` | its time, and the moments at which the poller wakes tasks |
//! | `account` | where the device's memory is, in bytes |
//! | `retired` | device memory to be freed when several streams have finished with it |
//! | `loans` | loans to other libraries, which `close` waits for |
//! | `reclaimers` | futures that wait for memory |
//! | `reaper` | drops users' values |
//! | `partitions` | which multiprocessors are whose |
//! | `tracer` | the log of operations, while it is on |
//! | `errands` | makes driver calls that may block, for the poller and for drops |
//!
//! # Invariants
//! 1. `lost` is set once, before any waiter is woken because of it (`a_loss_is_seen_by_who_registers_beside_it`).
//! 2. Nothing here makes a driver call after `main` returned (`nothing_calls_the_driver_after_main`).

mod anchors;
mod ending;
mod errands;
mod late_events;
mod loss;
mod retirement;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use crossbeam_utils::CachePadded;
use gpu_await_protocol::sync::Mutex;
use slab::Slab;

use super::attention::Attention;
use super::clock::Clock;
use super::device_state::DeviceState;
use super::doorbell::Bells;
use super::graph_budget::GraphBudget;
use super::graph_memory::GraphMemory;
use super::loans::Loans;
use super::partitions::{Partitions, Share};
use super::progress::{PointStream, Progress, StreamRef};
use super::registry::Registry;
use super::tracer::Tracer;
use super::words::Words;
use crate::backend::{
    Backend, DeviceKind, EventOptions, NOT_READY, RawEvent, RawStream, StreamOptions,
};
use crate::error::{DriverCode, Error, ErrorDetail, EventProblem, Result};
use crate::memory::reclaim::pressure::Pressure;
use crate::memory::reclaim::reclaimers::Reclaimers;
use crate::memory::reclaim::retired::{Block, Retired};
use crate::runtime::event_pool::{EventHandle, EventPool};
use crate::thread::exit::ExitGuard;
use crate::thread::reaper::Reaper;
use crate::thread::{locks, role, worker};
use gpu_await_protocol::account::{Account, block};
use gpu_await_protocol::block_cache;
use gpu_await_protocol::cadence;
use gpu_await_protocol::cadence::Completion;
use gpu_await_protocol::checkers::Checkers;

/// How a device's completions are learned; from the builder.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EngineOptions {
    pub(crate) completion: Completion,
    /// No poller: the device runs only when it is stepped.
    pub(crate) stepped: bool,
    /// Pinned memory is registered by the calls that need it alone, and not ahead of them.
    pub(crate) pins_on_demand: bool,
    /// How many bytes may be held at once.
    pub(crate) memory_limit: Option<u64>,
    /// What an allocation does that does not fit.
    pub(crate) on_pressure: Pressure,
    /// Each operation is waited for before its call returns.
    pub(crate) verify: bool,
    /// How much freed memory a stream keeps for itself.
    pub(crate) block_cache_bytes: u64,
    /// How many compiled graphs there may be.
    pub(crate) graph_limit: Option<usize>,
    /// The capacity of the log that starts with the device.
    pub(crate) timeline: Option<usize>,
    /// Kernels are those of a GPU without machine code of its own.
    pub(crate) general_images: bool,
    /// The most elements that a launch of a selection takes, if that is less than what its kernel can.
    pub(crate) part_of_selections: Option<u32>,
    /// How many multiprocessors all of it is confined to.
    pub(crate) multiprocessors: Option<u32>,
}

pub(crate) struct Engine<S: DeviceStream> {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) options: EngineOptions,
    /// Process-unique and never reused.
    pub(crate) id: u64,
    pub(crate) state: Arc<DeviceState>,
    events: Arc<EventPool>,
    timed_events: Arc<EventPool>,
    pub(crate) words: Words,
    pub(crate) bells: Bells,
    reaper: Reaper,
    errands: Reaper,
    pub(crate) attention: Arc<Attention>,
    /// Our own stream for frees of retired memory and for asking how the device is: never full.
    pub(crate) private: RawStream,
    /// A stream on which others' work is captured, once there was one. Held while that is done.
    pub(crate) captures: Mutex<Option<RawStream>>,
    pub(crate) partitions: Arc<Partitions>,
    /// The share that streams are in which name no other, our own too.
    pub(crate) partition: Option<Arc<Share>>,
    pub(crate) graphs: GraphBudget,
    pub(crate) graph_memory: GraphMemory,
    pub(crate) loans: Arc<Loans>,
    /// Values of the program's that the reaper has not dropped.
    pub(crate) to_drop: Arc<AtomicU64>,
    pub(crate) tracer: Tracer,
    registry: Registry<S>,
    retired: Mutex<Vec<Retired<S>>>,
    /// How often something was retired.
    retirements: AtomicU64,
    /// Frees of retired memory, each with an event behind it; used with a memory limit.
    freeing: Mutex<VecDeque<(EventHandle, u64)>>,
    pub(crate) account: CachePadded<Mutex<Account>>,
    /// Held while memory is taken over from others, and while pending memory moves from one place to
    /// another. Its holder waits for no stream's lock.
    pub(crate) pressing: Mutex<()>,
    pub(crate) reclaimers: Reclaimers,
    closed: AtomicBool,
    /// Set once a stream went whose work will never be complete.
    gave_up: AtomicBool,
    /// Set once a buffer was used by two streams: from then on dependencies are exact, where streams depend on one another.
    crossed: AtomicBool,
    pub(crate) checkers: CachePadded<Checkers>,
    /// How long the poller rests between two rounds, at least.
    rest_ns: AtomicU64,
    /// How long a task took lately from being woken to check to being polled.
    pub(crate) lag_ns: AtomicU64,
    pub(crate) clock: Arc<Clock>,
    /// Wakers of futures and pools that wait for the loss of the device; `None` from the close, which takes
    /// the waker, until the next poll.
    mourners: Mutex<Slab<Option<Waker>>>,
    pub(crate) counters: CachePadded<Counters>,
    /// `Some` once the last handle is gone; dropped last.
    leaving: Mutex<Option<ExitGuard>>,
}

/// The figures of [`Device::stats`](crate::Device::stats).
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) lent_bytes: AtomicU64,
    pub(crate) quarantined_bytes: AtomicU64,
    pub(crate) wake_ups: AtomicU64,
    pub(crate) unreturned: AtomicU64,
}

/// The interface that an engine needs of its streams.
pub(crate) trait DeviceStream: PointStream + Send + Sync + 'static {
    fn progress(&self) -> &Arc<Progress<Self>>;

    /// Asks the device how far the stream is and wakes the waiters; true if it moved.
    fn sweep(&self) -> bool;

    /// Wakes every waiter, and quarantines lent memory: the device is lost.
    fn mourn(&self);

    /// Moves memory whose free on the stream is known to have run back to the device's account. If `mark`,
    /// the rest is marked so that it will be known in time.
    fn collect_freed(&self, mark: bool);

    /// Takes the memory that the stream keeps for itself.
    fn take_all_kept(&self) -> Vec<Block>;

    /// Whether a thread that submits to the stream may be blocked in the driver by a full queue.
    fn may_sit_in_driver(self: &Arc<Self>) -> bool;
}

impl<S: DeviceStream> Engine<S> {
    /// Opens the engine of a device. Its poller is to be started, unless it is stepped.
    pub(crate) fn open(backend: Arc<dyn Backend>, options: EngineOptions) -> Result<Arc<Self>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut limit = options.memory_limit.unwrap_or(u64::MAX);
        if backend.kind() == DeviceKind::Host {
            // Nothing else holds any of it.
            limit = limit.min(backend.memory_info()?.1);
        }
        let kind = match backend.kind() {
            DeviceKind::Cuda => "cuda",
            DeviceKind::Host => "host",
        };
        let is_strict = options.on_pressure == Pressure::Fail;
        // ORDERING: Relaxed: only uniqueness matters.
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let label = format!("{kind}:{}", backend.ordinal());
        let partitions = Partitions::new(backend.clone());
        let partition = partitions.of_device(options.multiprocessors, &label)?;
        let confined = partition.as_ref().map(|share| share.raw());
        let private = StreamOptions { partition: confined, ..StreamOptions::default() };
        let private = backend.stream_create(private).inspect_err(|_| partitions.give_up())?;
        let state = Arc::new(DeviceState::new(id, backend.kind(), label));
        let attention = Arc::new(Attention::new(&state, options.stepped));
        let engine = Arc::new(Engine {
            id,
            clock: match options.stepped {
                true => Clock::of_steps(),
                false => Clock::of_poller(&attention),
            },
            attention,
            state,
            events: Arc::default(),
            timed_events: Arc::default(),
            words: Words::default(),
            bells: Bells::default(),
            reaper: Reaper::new("gpu-await-reaper"),
            errands: Reaper::new("gpu-await-errand"),
            private,
            captures: Mutex::default(),
            partitions,
            partition,
            graphs: GraphBudget::new(options.graph_limit),
            graph_memory: GraphMemory::default(),
            loans: Arc::default(),
            to_drop: Arc::default(),
            tracer: Tracer::new(),
            registry: Registry::new(),
            retired: Mutex::default(),
            retirements: AtomicU64::new(0),
            freeing: Mutex::default(),
            account: CachePadded::new(Mutex::new(Account::new(limit, is_strict))),
            pressing: Mutex::default(),
            reclaimers: Reclaimers::default(),
            closed: AtomicBool::new(false),
            gave_up: AtomicBool::new(false),
            crossed: AtomicBool::new(false),
            checkers: CachePadded::new(Checkers::new()),
            lag_ns: AtomicU64::new(0),
            rest_ns: AtomicU64::new(cadence::REST_LEAST_NS),
            mourners: Mutex::default(),
            counters: CachePadded::default(),
            leaving: Mutex::default(),
            options,
            backend,
        });
        super::exit::watch(&engine.attention).map(|()| engine)
    }

    /// The device's last handle is gone. The poller keeps streams for a while, and with them this: no
    /// longer.
    pub(crate) fn leave_soon(&self) {
        if !self.options.stepped {
            *self.leaving.lock() = Some(ExitGuard::leaving());
        }
        self.attention.hurry();
    }

    /// `cuda:0`, `host:3`: for messages.
    pub(crate) fn label(&self) -> &str {
        &self.state.label
    }

    pub(crate) fn add_stream(&self, stream: &Arc<S>) {
        self.registry.insert(stream.progress().id, Arc::downgrade(stream));
    }

    /// Removes a stream whose drop has let go of all that it had.
    pub(crate) fn remove_stream(&self, id: u64) {
        self.registry.remove(id);
    }

    /// Hands a stream to the poller, unless that has ended.
    pub(crate) fn hand_over(&self, stream: Arc<S>) {
        if self.registry.hand_over(stream) {
            self.attention.call();
        }
    }

    /// Takes the streams that were handed over; true if there were any.
    pub(crate) fn take_handed_over(&self, into: &mut Vec<Arc<S>>) -> bool {
        self.registry.take_handed_over(into)
    }

    /// The poller has ended: releases the streams that it was handed, and those that it will be.
    pub(crate) fn let_go_of_all(&self) {
        self.registry.let_go_of_all();
    }

    pub(crate) fn streams(&self) -> Vec<StreamRef<S>> {
        self.registry.streams()
    }

    /// The streams. The caller must hold no lock: dropping this list may end one of them.
    pub(crate) fn streams_unlocked(&self) -> Vec<Arc<S>> {
        self.streams().into_iter().map(StreamRef::unlocked).collect()
    }

    /// How long the poller rests between two rounds, at least, in nanoseconds.
    pub(crate) fn rest(&self) -> u64 {
        // ORDERING: Relaxed: a guess.
        self.rest_ns.load(Ordering::Relaxed)
    }

    /// Records how long a round of the poller took.
    pub(crate) fn spent(&self, ns: u64) {
        // ORDERING: Relaxed, as above; only the poller writes.
        self.rest_ns.store(cadence::rest(ns), Ordering::Relaxed);
    }

    /// Called when a stream goes whose work will never be complete.
    pub(crate) fn give_up_stream(&self) {
        // ORDERING: Release pairs with `has_given_up_streams`: a thread that no longer finds the stream reads
        // this.
        self.gave_up.store(true, Ordering::Release);
    }

    pub(crate) fn has_given_up_streams(&self) -> bool {
        // ORDERING: Acquire, see above.
        self.gave_up.load(Ordering::Acquire)
    }

    pub(crate) fn is_closed(&self) -> bool {
        // ORDERING: Relaxed: a submission that races with `close` may be on either side of it; one that takes its
        // stream's lock after the closing thread sees it.
        self.closed.load(Ordering::Relaxed)
    }

    /// Whether dependencies between streams are exact, so that operations are followed by events as long as these are used.
    pub(crate) fn is_exact(&self) -> bool {
        // ORDERING: Relaxed: a submitter that misses the switch by one operation makes a later
        // dependency wait longer, never shorter.
        self.crossed.load(Ordering::Relaxed)
    }

    pub(crate) fn set_exact(&self) {
        // ORDERING: Relaxed, as above.
        self.crossed.store(true, Ordering::Relaxed);
    }

    /// Borrows an event for a marker.
    pub(crate) fn event(&self) -> std::result::Result<EventHandle, DriverCode> {
        self.events.get(|spoiled| self.make_event(EventOptions::default(), spoiled))
    }

    /// Borrows an event for a marker, if the pool has one.
    pub(crate) fn idle_event(&self) -> Option<EventHandle> {
        self.events.get_idle()
    }

    /// Ensures that some events, plain and timed, are ready to be borrowed.
    pub(crate) fn stock_events(&self) -> std::result::Result<(), DriverCode> {
        const STOCK: usize = 32;
        const TIMED: usize = 8;
        // All borrowed at once, and returned.
        type Handles = std::result::Result<Vec<EventHandle>, DriverCode>;
        if self.events.idle() < STOCK {
            (0..STOCK).map(|_| self.event()).collect::<Handles>()?;
        }
        if self.timed_events.idle() < TIMED {
            (0..TIMED).map(|_| self.timed_event()).collect::<Handles>()?;
        }
        Ok(())
    }

    /// Borrows an event that measures time.
    pub(crate) fn timed_event(&self) -> std::result::Result<EventHandle, DriverCode> {
        let options = EventOptions { timing: true, ..EventOptions::default() };
        self.timed_events.get(|spoiled| self.make_event(options, spoiled))
    }

    fn make_event(
        &self,
        options: EventOptions,
        spoiled: Vec<RawEvent>,
    ) -> std::result::Result<RawEvent, DriverCode> {
        for event in spoiled {
            // SAFETY: its last handle is gone, and the driver allows that it is still pending.
            if unsafe { self.backend.event_destroy(event) }.is_err() {
                self.count_unreturned();
            }
        }
        self.backend.event_create(options)
    }

    /// The time between two timed events of this device, both complete.
    pub(crate) fn elapsed(&self, start: &EventHandle, end: &EventHandle) -> Result<Duration> {
        role::check_driver("asking for the time between events")?;
        // SAFETY: the handles keep the events.
        let elapsed = unsafe { self.backend.event_elapsed_ms(start.raw(), end.raw()) };
        let ms = elapsed.map_err(|code| match code.code {
            NOT_READY => {
                let (which, problem) = ("one of the events", EventProblem::Incomplete);
                ErrorDetail::Event { which, problem }.into()
            }
            _ => self.refused(code),
        })?;
        Duration::try_from_secs_f64(f64::from(ms) / 1e3).map_err(|_| {
            let (which, problem) = ("the start event", EventProblem::BehindEnd);
            ErrorDetail::Event { which, problem }.into()
        })
    }

    /// The engine's clock, in nanoseconds.
    pub(crate) fn now(&self) -> u64 {
        self.clock.now()
    }

    /// The size of the block for a buffer of this many bytes.
    pub(crate) fn block_bytes(&self, bytes: u64) -> u64 {
        let cached = block_cache::rounded(bytes).filter(|_| self.options.block_cache_bytes > 0);
        cached.unwrap_or_else(|| block(bytes))
    }

    /// Counts a refused free of memory. Logs nothing, like [`refused`](Self::refused).
    pub(crate) fn leaked(&self, bytes: u64, code: DriverCode) -> Error {
        let error = self.refused(code);
        self.give_up(bytes);
        error
    }

    /// Counts memory that is never freed here.
    pub(crate) fn give_up(&self, bytes: u64) {
        if self.lost().is_some() {
            // It was freed with the device.
            self.account.lock().release(bytes);
        } else {
            self.leak(bytes);
        }
    }

    /// Counts pending memory, or a module, that is never freed.
    pub(crate) fn leak(&self, bytes: u64) {
        if bytes > 0 {
            self.account.lock().leak(bytes);
        }
        self.count_unreturned();
        self.memory_moved();
    }

    /// Called when memory was freed or came free: a future may be waiting for it.
    pub(crate) fn memory_moved(&self) {
        if self.reclaimers.are_there() {
            self.attention.call();
        }
    }

    /// Wakes the futures that wait for memory, if any was freed or came free.
    pub(crate) fn wake_reclaimers(&self) {
        if self.reclaimers.are_there() {
            let version = self.account.lock().version();
            self.reclaimers.take_older(version).into_iter().for_each(crate::thread::contain::wake);
        }
    }
}

impl<S: DeviceStream> Drop for Engine<S> {
    fn drop(&mut self) {
        locks::assert_none("a device");
        self.attention.stop();
        if !self.is_usable() {
            // The device may still write there.
            self.words.leak();
            return;
        }
        // Before the pool that they come from.
        self.freeing.get_mut().clear();
        self.tracer.forget();
        let backend = self.backend.clone();
        let destroy = late_events::destroy_later(&backend);
        let mut events: Vec<RawEvent> = self.events.close(destroy.clone());
        events.extend(self.timed_events.close(destroy));
        let mut streams = self.bells.drain();
        streams.push(self.private);
        streams.extend(self.captures.lock().take());
        let (captures, partitions) = self.partitions.end();
        streams.extend(captures);
        let words = std::mem::take(&mut self.words);
        let last_act = move || {
            for event in events.drain(..) {
                // SAFETY: the event was pooled: it has no other holder.
                let _ = unsafe { backend.event_destroy(event) };
            }
            for stream in streams {
                // SAFETY: these streams are the engine's own, and the engine is gone.
                let _ = unsafe { backend.stream_destroy(stream) };
            }
            for partition in partitions {
                // SAFETY: streams and graphs of it held the engine, which is gone.
                let _ = unsafe { backend.partition_destroy(partition) };
            }
            words.close(&*backend);
        };
        worker::last_act(last_act);
    }
}
