//! The CPU as a device: one worker thread per stream, truly asynchronous.
//!
//! Work is ordered exactly as on a GPU: commands of a stream run one after another, streams run side by side, events order them. Mistakes
//! that would fail on CUDA fail here too:
//!
//! - memory exists from the moment its allocation *runs* to the moment its free runs; a command that touches any other memory loses the
//!   device, as an illegal address would;
//! - fresh memory is filled with `0xA5`, so that reads of uninitialized memory show;
//! - a stream takes [`QUEUE_LIMIT`] commands, then the next call blocks its thread; meanwhile no stream or event can be created or
//!   destroyed, no memory pinned, and no host function put on a stream. Unlike on a GPU, that call fails with 401 if the queue will
//!   never have room because the stream waits for another device that is lost;
//! - host functions run one after another;
//! - the legacy default stream waits for all streams that are not non-blocking, and they for it;
//! - inside a host function every call fails with 800;
//! - after a fault every call fails and no queued command runs.
//!
//! A kernel's host twin is called once per launch, with the whole grid; a twin that panics loses the device. The device without threads
//! (`testing::manual`) runs commands only when it is stepped.
//!
//! | file | decides |
//! |---|---|
//! | [`queue`] | when a command runs: streams, events, full queues |
//! | [`run`] | what a command does |
//! | [`graph`] | stored launches |
//! | [`memory`] | which memory a command may touch |
//! | `shared` | memory that several processes map |
//! | [`state`] | the state of streams and events |

mod graph;
mod memory;
mod partition;
mod queue;
mod range;
mod run;
#[cfg(target_os = "linux")]
mod shared;
mod state;

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use gpu_await_protocol::lock::{Condvar, Mutex, RwLock};

use self::memory::Memory;
use self::queue::HostStream;
use crate::backend::{Backend, DeviceKind, DriverResult, Limits, PeerMemory};
use crate::error::{DriverCode, LossCause};
use crate::system;
use crate::thread::role;

/// Commands that a stream takes before the next call blocks, as an H200's does.
pub(crate) const QUEUE_LIMIT: usize = 1021;

const ALIGNMENT: usize = 256;

/// The byte that fresh memory is filled with.
pub(crate) const POISON: u8 = 0xA5;

const INVALID_VALUE: i32 = 1;

const OUT_OF_MEMORY: i32 = 2;

#[cfg(target_os = "linux")]
const OPERATING_SYSTEM: i32 = 304;

const LAUNCH_FAILED: i32 = 719;

const NOT_SUPPORTED: i32 = 801;

/// The host device.
pub(crate) struct HostBackend {
    shared: Arc<HostCore>,
    ordinal: usize,
    name: String,
    limits: Limits,
    threads: bool,
}

struct HostCore {
    /// By handle. A handle is never reused, not even by another host device.
    streams: RwLock<BTreeMap<u64, Arc<HostStream>>>,
    /// Held while something is put on the legacy default stream or on one ordered with it.
    legacy_order: Mutex<()>,
    memory: Arc<Mutex<Memory>>,
    /// Other devices' memory that this one can access.
    reached: Mutex<Vec<Weak<dyn PeerMemory>>>,
    /// Values used by other libraries' work that may still run after the loss.
    buried: Mutex<Vec<Box<dyn Any + Send>>>,
    fault: OnceLock<String>,
    host_fn_turn: Mutex<()>,
    /// Threads that are blocked by a full queue.
    blocked: Mutex<usize>,
    unblocked: Condvar,
    /// Streams of other devices may read this one's memory.
    has_peers: AtomicBool,
}

impl HostBackend {
    /// A device with `memory_limit` bytes of memory; without threads it must be stepped.
    pub(crate) fn new(memory_limit: Option<u64>, threads: bool) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        // ORDERING: Relaxed: only uniqueness matters.
        let ordinal = NEXT.fetch_add(1, Ordering::Relaxed);
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        HostBackend {
            shared: Arc::new(HostCore {
                streams: RwLock::default(),
                legacy_order: Mutex::default(),
                memory: Arc::new(Mutex::new(Memory {
                    limit: memory_limit.unwrap_or_else(system::physical_memory),
                    ..Memory::default()
                })),
                reached: Mutex::default(),
                buried: Mutex::default(),
                fault: OnceLock::new(),
                host_fn_turn: Mutex::new(()),
                blocked: Mutex::new(0),
                unblocked: Condvar::new(),
                has_peers: AtomicBool::new(false),
            }),
            ordinal,
            name: format!("host CPU, {cores} cores"),
            limits: Limits {
                threads_per_block: 1024,
                registers_per_block: 65_536,
                block_dim: [1024, 1024, 64],
                grid_dim: [i32::MAX as u32, 65_535, 65_535],
                shared_mem_bytes: 48 << 10,
                shared_mem_optin_bytes: 227 << 10,
                multiprocessors: cores,
                warp_size: 32,
                compute_capability: (0, 0),
                priorities: (0, 0),
                words: true,
                // A twin is called with the whole grid, so it can do what needs all blocks at once.
                cooperative: true,
                clusters: true,
                interprocess_events: false,
            },
            threads,
        }
    }
}

impl Drop for HostBackend {
    fn drop(&mut self) {
        // Each worker has a share of all this: without their handles, the workers end.
        let streams = std::mem::take(&mut *self.shared.streams.write());
        drop(streams);
    }
}

impl HostCore {
    fn healthy(&self, call: &'static str) -> DriverResult<()> {
        permitted(call)?;
        match self.fault.get() {
            None => Ok(()),
            Some(_) => Err(DriverCode { call, code: LAUNCH_FAILED }),
        }
    }

    fn fail(&self, what: String) {
        // The first fault is the cause; later ones follow from it.
        if self.fault.set(what).is_ok() {
            for stream in self.streams.read().values() {
                let _depth = stream.books.depth.lock();
                stream.books.room.notify_all();
            }
        }
    }
}

impl Backend for HostBackend {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    fn ordinal(&self) -> usize {
        self.ordinal
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn loss_cause(&self, code: DriverCode) -> LossCause {
        match self.shared.fault.get() {
            Some(what) => LossCause::Host(what.clone()),
            None => LossCause::Driver(code),
        }
    }

    fn step(&self, choose: usize) -> bool {
        let streams: Vec<_> = self.shared.streams.read().values().cloned().collect();
        let ready: Vec<_> = streams
            .iter()
            .filter_map(|stream| Some((stream, stream.stepped.as_ref()?)))
            .filter(|(_, stepped)| stepped.lock().is_ready(&self.shared))
            .collect();
        if ready.is_empty() {
            return false;
        }
        let (stream, stepped) = ready[choose % ready.len()];
        let Some(command) = stepped.lock().take(&self.shared) else { return false };
        self.shared.execute(&stream.books, command);
        stepped.lock().running = false;
        true
    }

    /// Host devices use the host's memory.
    fn abandon(&self) {
        // Releases threads blocked by a full queue: no command runs any more.
        self.shared.fail("the device is lost".to_owned());
    }

    fn enable_peer(&self, other: &dyn Backend) -> DriverResult<bool> {
        self.shared.healthy("enable_peer")?;
        let memory = other.begin_peer_access();
        let is_host = memory.is_some();
        self.shared.reached.lock().extend(memory);
        Ok(is_host)
    }

    fn begin_peer_access(&self) -> Option<Weak<dyn PeerMemory>> {
        // ORDERING: Relaxed: set before the first copy, and read when nothing refers to this device any more.
        self.shared.has_peers.store(true, Ordering::Relaxed);
        let memory: Weak<dyn PeerMemory> = Arc::<Mutex<Memory>>::downgrade(&self.shared.memory);
        Some(memory)
    }
}

/// Refuses calls from inside a host function, as the driver does.
fn permitted(call: &'static str) -> DriverResult<()> {
    match role::driver_takes_calls() {
        true => Ok(()),
        false => Err(DriverCode { call, code: DriverCode::NOT_PERMITTED }),
    }
}
