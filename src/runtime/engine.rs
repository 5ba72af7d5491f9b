//! One device's completion engine: the state that its streams share.
//!
//! | part | what for | in |
//! |---|---|---|
//! | `state` | whether the device is lost, which tasks wait for a worker, its figures; outlives the device | [`progress`](super::progress) |
//! | `memory` | where the device's memory is; what is to be freed when several streams have finished with it | [`memory`] |
//! | `pools` | what markers are made of | [`pools`] |
//! | `background` | drops users' values, and makes driver calls that may block | [`errands`] |
//! | `pacing` | wakes the poller; its time; which tasks check for themselves | [`clock`](super::clock) |
//! | `registry` | every stream, to report a loss and to wait for all | [`registry`](super::registry) |
//! | `shares` | the multiprocessors of each partition, and the engine's own driver streams | [`shares`] |
//! | `graphs` | the number of compiled graphs | [`graph_budget`](super::graph_budget) |
//! | `tracer` | the log of operations, while it is on | [`tracer`](super::tracer) |
//! | `ending` | whether the device is closed, and the tasks that wait to hear of its loss | [`loss`] |
//!
//! Each part has its own state and methods. Operations that span several are the engine's: the meaning of a driver error, close and loss
//! ([`loss`]), the return of retired memory ([`retirement`]), anchors of the device's clock ([`anchors`]).
//!
//! # Invariants
//! 1. `lost` is set once, before any waiter is woken because of it (`a_loss_is_seen_by_who_registers_beside_it`).
//! 2. Nothing here makes a driver call after `main` returned (`nothing_calls_the_driver_after_main`).

mod anchors;
mod errands;
mod loss;
mod memory;
mod pools;
mod retirement;
mod shares;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use self::errands::Background;
use self::loss::DeviceEnd;
use self::memory::DeviceMemory;
use self::pools::MarkerPools;
use self::shares::Shares;
use super::clock::Pacing;
use super::graph_budget::GraphBudget;
use super::progress::{DeviceState, Overlap, PointStream, Progress};
use super::registry::Registry;
use super::tracer::Tracer;
use crate::backend::{Backend, DeviceKind, Limits};
use crate::error::{DriverCode, Error, Result};
use crate::memory::reclaim::pressure::Pressure;
use crate::memory::reclaim::retired::Block;
use crate::thread::{locks, worker};
use gpu_await_protocol::account::Account;
use gpu_await_protocol::cadence::Completion;

/// A device's options, from the builder.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EngineOptions {
    pub(crate) completion: Completion,
    /// No poller: the device runs only when it is stepped.
    pub(crate) stepped: bool,
    /// Pinned memory is registered only by the calls that need it, never ahead of time.
    pub(crate) pins_on_demand: bool,
    /// How many bytes may be held at once.
    pub(crate) memory_limit: Option<u64>,
    /// What happens to an allocation that does not fit.
    pub(crate) on_pressure: Pressure,
    /// Each call waits for its operation before it returns.
    pub(crate) verify: bool,
    /// How much freed memory a stream keeps for itself.
    pub(crate) block_cache_bytes: u64,
    /// The limit on compiled graphs.
    pub(crate) graph_limit: Option<usize>,
    /// The capacity of the log that starts with the device.
    pub(crate) timeline: Option<usize>,
    /// Uses the kernels of a GPU that has no machine code of its own.
    pub(crate) general_images: bool,
    /// Where kernels may start before the preceding launch has ended.
    pub(crate) overlap: Overlap,
    /// The most elements per launch of a selection, if less than its kernel's limit.
    pub(crate) part_of_selections: Option<u32>,
    /// How many multiprocessors the device is confined to.
    pub(crate) multiprocessors: Option<u32>,
}

pub(crate) struct Engine<S: DeviceStream> {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) limits: Limits,
    pub(crate) options: EngineOptions,
    pub(crate) state: Arc<DeviceState>,
    pub(crate) memory: DeviceMemory<S>,
    pub(crate) pools: MarkerPools,
    pub(crate) background: Background,
    pub(crate) pacing: Pacing,
    pub(crate) registry: Registry<S>,
    pub(crate) shares: Shares,
    pub(crate) graphs: GraphBudget,
    pub(crate) tracer: Tracer,
    /// Dropped last.
    pub(crate) ending: DeviceEnd,
}

/// The interface that an engine needs of its streams.
pub(crate) trait DeviceStream: PointStream + Send + Sync + 'static {
    fn progress(&self) -> &Arc<Progress<Self>>;

    /// Asks the device how far the stream is and wakes the waiters; true if it moved.
    fn sweep(&self) -> bool;

    /// Wakes every waiter, and quarantines lent memory: the device is lost.
    fn mourn(&self);

    /// Moves memory whose free on the stream is known to have run back to the device's account. If `mark`,
    /// the rest is marked so that it will be known in time. If a future waits for memory, the poller asks about the rest.
    fn collect_freed(self: &Arc<Self>, mark: bool);

    /// Takes the memory that the stream keeps for itself.
    fn take_all_kept(&self) -> Vec<Block>;

    /// Whether a thread that submits to the stream may be blocked in the driver by a full queue.
    fn may_sit_in_driver(self: &Arc<Self>) -> bool;
}

impl<S: DeviceStream> Engine<S> {
    /// Opens the engine of a device. The caller starts its poller, unless it is stepped.
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
        let account = Account::new(limit, options.on_pressure == Pressure::Fail);
        // ORDERING: Relaxed: only uniqueness matters.
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let label = format!("{kind}:{}", backend.ordinal());
        let shares = Shares::open(&backend, &options, &label)?;
        let state = Arc::new(DeviceState::new(id, backend.kind(), label));
        let pacing = Pacing::new(&state, options.stepped);
        let attention = &pacing.attention;
        let engine = Arc::new(Engine {
            memory: DeviceMemory::new(account, &state, attention),
            pools: MarkerPools::new(&backend, &state),
            background: Background::new(&backend, &state, attention, options.stepped),
            ending: DeviceEnd::new(&state, attention),
            registry: Registry::new(),
            shares,
            graphs: GraphBudget::new(options.graph_limit),
            tracer: Tracer::new(),
            pacing,
            state,
            options,
            limits: *backend.limits(),
            backend,
        });
        super::exit::watch(&engine.pacing.attention).map(|()| engine)
    }

    /// `cuda:0`, `host:3`: for messages.
    pub(crate) fn label(&self) -> &str {
        &self.state.label
    }

    /// Hands a stream to the poller, unless that has ended.
    pub(crate) fn hand_over(&self, stream: Arc<S>) {
        if self.registry.hand_over(stream) {
            self.pacing.attention.call();
        }
    }

    /// Counts a refused free of memory. Logs nothing, like [`refused`](Self::refused).
    pub(crate) fn leaked(&self, bytes: u64, code: DriverCode) -> Error {
        let error = self.refused(code);
        self.memory.give_up(bytes);
        error
    }
}

impl<S: DeviceStream> Drop for Engine<S> {
    fn drop(&mut self) {
        locks::assert_none("a device");
        self.pacing.attention.stop();
        if !self.is_usable() {
            // The device may still write there.
            self.pools.words.leak();
            return;
        }
        // Before the pool that they come from.
        self.memory.clear();
        self.tracer.forget();
        let backend = self.backend.clone();
        let (mut events, mut streams) = self.pools.close();
        let (own, partitions) = self.shares.close();
        streams.extend(own);
        let words = std::mem::take(&mut self.pools.words);
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
