//! The shares of a device's multiprocessors to which streams are confined.
//!
//! | what | from | until |
//! |---|---|---|
//! | the grains of a share | [`Partitions::take`] | its drop: no handle, stream or compiled graph has it any more, and their work is complete |
//! | the driver object for a set of grains | the first share of that set | the end of the device: the driver never returns its memory, so later shares of that set reuse it |
//!
//! # Invariants
//! 1. Shares are disjoint: the device is divided once, and a grain has one owner (`gpu_await_protocol::grains`).
//! 2. A driver object outlives every stream and graph in it: those hold the engine, which holds it.
//! 3. One thread at a time takes shares (`reservations_have_one_thread`), and waits for ending streams and graphs (`what_was_given_up_is_free`).
//! 4. Graphs are compiled in a share by one thread at a time: the driver does not synchronize calls on it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::thread::Thread;
use std::time::{Duration, Instant};

use gpu_await_protocol::grains::{GrainSet, Grains};
use gpu_await_protocol::sync::{Mutex, MutexGuard};

use crate::backend::{Backend, RawPartition, RawStream};
use crate::error::{DriverCode, Error, ErrorDetail};
use crate::thread::contain;
use crate::thread::locks;

/// The shares of one device.
pub(crate) struct Partitions {
    backend: Arc<dyn Backend>,
    /// `None` until the device is divided.
    grains: Mutex<Option<Grains>>,
    /// Locked while one is made, which takes milliseconds; no drop takes this lock.
    made: Mutex<Vec<(GrainSet, Arc<Made>)>>,
    /// The memory that the driver took to make them.
    bytes: AtomicU64,
    queues: usize,
    queues_told: AtomicBool,
    /// How many [`EndingShare`]s there are.
    ending: AtomicU64,
    /// The thread that waits for a share to end.
    waiter: Mutex<Option<Thread>>,
    /// Held by the caller that takes a share, which may use a thread for that.
    turn: Arc<futures::lock::Mutex<()>>,
}

/// The turn to take a share.
pub(crate) type Turn = futures::lock::OwnedMutexGuard<()>;

/// How long to wait for an ending share: enough for the poller to get a core when all are busy.
const ENDS_WITHIN: Duration = Duration::from_millis(100);

/// The driver's part of a share.
struct Made {
    raw: RawPartition,
    /// A stream in it for capturing others' work, once there is one.
    captures: Mutex<Option<RawStream>>,
    compiling: Mutex<()>,
    /// The share that has it, if any.
    share: Mutex<Weak<Share>>,
}

/// Some of a device's multiprocessors.
pub(crate) struct Share {
    partitions: Arc<Partitions>,
    set: GrainSet,
    made: Arc<Made>,
    multiprocessors: u32,
}

/// The share of a stream or graph that was dropped and has not ended: a caller that takes a share waits for it.
pub(crate) struct EndingShare(Option<Arc<Share>>);

/// Why there is no share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoShare {
    Refused(DriverCode),
    /// Only `free` of `all` multiprocessors are free.
    Taken {
        free: u32,
        all: u32,
    },
}

impl NoShare {
    /// The error for a caller that `asked` for this many multiprocessors of a device.
    pub(crate) fn explain(
        self,
        device: &str,
        asked: u32,
        refused: impl FnOnce(DriverCode) -> Error,
    ) -> Error {
        const NOT_SUPPORTED: i32 = 801;
        let device = device.to_owned();
        match self {
            NoShare::Taken { free, all } => {
                ErrorDetail::NoPartition { device, asked, free, all }.into()
            }
            NoShare::Refused(code) if code.code == NOT_SUPPORTED => {
                let (what, requirement) =
                    ("a partition", "a driver of CUDA 12.5 and a GPU that it divides");
                ErrorDetail::Requires { what, requirement, device }.into()
            }
            NoShare::Refused(code) => refused(code),
        }
    }
}

impl From<DriverCode> for NoShare {
    fn from(code: DriverCode) -> Self {
        NoShare::Refused(code)
    }
}

/// How many hardware queues the driver has for the streams of a process.
fn queues() -> usize {
    let given = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
    given.and_then(|queues| queues.parse().ok()).unwrap_or(8)
}

impl Partitions {
    pub(super) fn new(backend: Arc<dyn Backend>) -> Arc<Self> {
        let (grains, made) = (Mutex::default(), Mutex::default());
        let (bytes, ending) = (AtomicU64::new(0), AtomicU64::new(0));
        let (queues, queues_told) = (queues(), AtomicBool::new(false));
        let (waiter, turn) = (Mutex::default(), Arc::default());
        Arc::new(Partitions {
            backend,
            grains,
            made,
            bytes,
            queues,
            queues_told,
            ending,
            waiter,
            turn,
        })
    }

    /// Waits until nobody else takes a share.
    pub(crate) async fn turn(&self) -> Turn {
        self.turn.clone().lock_owned().await
    }

    /// Like [`take`](Self::take), but if too little is free, waits briefly for ending streams and graphs. `look` has them looked at.
    pub(crate) fn take_soon(
        self: &Arc<Self>,
        multiprocessors: u32,
        look: impl Fn(),
    ) -> Result<Arc<Share>, NoShare> {
        let end = Instant::now() + ENDS_WITHIN;
        loop {
            // Before looking: a share that ends later wakes this thread, and one that ended earlier is free.
            *self.waiter.lock() = Some(thread::current());
            let all_ended = self.ending.load(Ordering::SeqCst) == 0;
            let taken = self.take(multiprocessors);
            let left = end.saturating_duration_since(Instant::now());
            let is_refused = matches!(taken, Err(NoShare::Taken { .. }));
            if !is_refused || left.is_zero() || all_ended {
                self.waiter.lock().take();
                return taken;
            }
            look();
            thread::park_timeout(left);
        }
    }

    /// Takes a share of at least this many multiprocessors. Blocks for milliseconds if the driver has to make it.
    pub(crate) fn take(self: &Arc<Self>, multiprocessors: u32) -> Result<Arc<Share>, NoShare> {
        // Outside the lock, which drops take; the backend divides the device once.
        let sizes = self.backend.grains()?;
        let (set, has) = {
            let mut grains = self.grains.lock();
            let grains = grains.get_or_insert_with(|| Grains::new(sizes));
            match grains.take(multiprocessors) {
                Some(set) => (set, grains.multiprocessors(set)),
                None => return Err(NoShare::Taken { free: grains.free(), all: grains.all() }),
            }
        };
        let made = self.made(set).inspect_err(|_| self.give(set))?;
        let partitions = self.clone();
        let share = Arc::new(Share { partitions, set, made, multiprocessors: has });
        *share.made.share.lock() = Arc::downgrade(&share);
        Ok(share)
    }

    fn wake_waiter(&self) {
        let waiter = self.waiter.lock().take();
        waiter.inspect(Thread::unpark);
    }

    /// The share for a device that is being opened, if it is to be confined to one.
    pub(super) fn of_device(
        self: &Arc<Self>,
        multiprocessors: Option<u32>,
        device: &str,
    ) -> Result<Option<Arc<Share>>, Error> {
        let Some(asked) = multiprocessors else { return Ok(None) };
        let share = self.take(asked);
        share.map(Some).map_err(|why| why.explain(device, asked, DriverCode::into))
    }

    /// Destroys the driver objects of a device that is not opened after all.
    #[cold]
    pub(super) fn give_up(&self) {
        for partition in self.end().1 {
            // SAFETY: no stream was made, and no graph.
            let _ = unsafe { self.backend.partition_destroy(partition) };
        }
    }

    fn made(&self, set: GrainSet) -> Result<Arc<Made>, DriverCode> {
        let mut made = self.made.lock();
        if let Some((_, known)) = made.iter().find(|(known, _)| *known == set) {
            return Ok(known.clone());
        }
        let free = || self.backend.memory_info().map_or(0, |(free, _)| free);
        let before = free();
        let raw = self.backend.partition_create(set)?;
        // ORDERING: Relaxed: a statistic.
        self.bytes.fetch_add(before.saturating_sub(free()), Ordering::Relaxed);
        let (captures, compiling, share) = (Mutex::default(), Mutex::default(), Mutex::default());
        let fresh = Arc::new(Made { raw, captures, compiling, share });
        made.push((set, fresh.clone()));
        Ok(fresh)
    }

    fn give(&self, set: GrainSet) {
        if let Some(grains) = &mut *self.grains.lock() {
            grains.give(set);
        }
    }

    /// The share that has the driver's green context, if it is one of this device's.
    pub(crate) fn share_of(&self, green: u64) -> Option<Arc<Share>> {
        let made = self.made.lock();
        let (_, found) = made.iter().find(|(_, made)| green != 0 && made.raw.green == green)?;
        found.share.lock().upgrade()
    }

    /// The number of shares, and of multiprocessors in none: `all` until the device is divided.
    pub(crate) fn figures(&self, all: u32) -> (u64, u32) {
        self.grains.lock().as_ref().map_or((0, all), |grains| (grains.shares(), grains.free()))
    }

    /// Warns once if there are more streams than hardware queues: streams of different shares may then share a queue.
    pub(crate) fn tell_of_queues(&self, device: &str, streams: usize) {
        let queues = self.queues;
        // ORDERING: Relaxed: two threads may both warn.
        if streams > queues && !self.queues_told.swap(true, Ordering::Relaxed) {
            let advice = "streams of several partitions may wait for each other in the driver's hardware queues: use fewer streams, or set \
                          CUDA_DEVICE_MAX_CONNECTIONS=32 before the process starts";
            contain::log(|| {
                tracing::warn!(device, streams, queues, advice, "more streams than hardware queues")
            });
        }
    }

    /// How much free memory shrank while they were made.
    pub(crate) fn bytes(&self) -> u64 {
        // ORDERING: Relaxed: a statistic.
        self.bytes.load(Ordering::Relaxed)
    }

    /// The driver's objects, to be destroyed at the end of the device, and their streams, which go first.
    pub(super) fn end(&self) -> (Vec<RawStream>, Vec<RawPartition>) {
        let made = std::mem::take(&mut *self.made.lock());
        let streams = made.iter().filter_map(|(_, made)| made.captures.lock().take()).collect();
        (streams, made.iter().map(|(_, made)| made.raw).collect())
    }
}

impl Share {
    pub(crate) fn raw(&self) -> RawPartition {
        self.made.raw
    }

    pub(crate) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// For a stream or graph without a handle, which ends when its work is complete.
    pub(crate) fn ending(self: Arc<Self>) -> EndingShare {
        self.partitions.ending.fetch_add(1, Ordering::SeqCst);
        EndingShare(Some(self))
    }

    /// Excludes others that compile in it.
    pub(crate) fn compile(&self) -> MutexGuard<'_, ()> {
        self.made.compiling.lock()
    }

    /// The stream for capturing work for it; locked while that is done.
    pub(crate) fn captures(&self) -> &Mutex<Option<RawStream>> {
        &self.made.captures
    }

    /// Tells the sets of a device apart, while it lives.
    pub(crate) fn id(&self) -> u64 {
        Arc::as_ptr(&self.made) as u64
    }
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Share({} multiprocessors)", self.multiprocessors)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        locks::assert_none("a partition");
        self.partitions.give(self.set);
        self.partitions.wake_waiter();
    }
}

impl Drop for EndingShare {
    fn drop(&mut self) {
        let Some(share) = self.0.take() else { return };
        let partitions = share.partitions.clone();
        // In this order: a share that no longer counts as ending is free.
        drop(share);
        partitions.ending.fetch_sub(1, Ordering::SeqCst);
        partitions.wake_waiter();
    }
}
