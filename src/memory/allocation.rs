//! One allocation: who used which part of it, and how it ends.
//!
//! | used by | freed |
//! |---|---|
//! | its home stream only (other uses complete) | in place: for the next allocation there, or a free behind everything on the home stream |
//! | nobody knows whom: it was frozen | retired behind all that is on any stream of the device |
//! | other streams as well | retired with their tickets; freed when all are complete, by the poller |
//! | launches of a graph alone, whose stream is gone | retired with their tickets |
//! | nobody any more, device lost or process exiting | not at all: the memory went with the device |
//!
//! Memory of somebody else's is not freed: what keeps it is retired with the tickets of all users, and dropped.
#![forbid(unsafe_code)]

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use sync_wrapper::SyncWrapper;

use crate::backend::DevicePtr;
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::hazard::{Content, Hazards};
use crate::memory::point::Track;
use crate::memory::reclaim::retired::Remnant;
use crate::runtime::stream_state::StreamHandle;
use crate::runtime::{Engine, Point, Progress};
use crate::thread::exit;

/// The id of no stream: whoever asks in its name waits for every stream.
pub(crate) const NOBODY: u64 = 0;

/// Every backend aligns allocations to at least so many bytes.
pub(crate) const ALIGNMENT: u64 = 256;

/// Why a range is not worth reading.
#[derive(Clone, Debug)]
pub(crate) struct Poison {
    pub(crate) producer: Arc<str>,
    pub(crate) cause: Error,
}

impl Poison {
    /// What an operation leaves that failed with `error`; one of earlier data is handed on as it is, however many
    /// operations it goes through.
    pub(crate) fn of(error: &Error, op: impl FnOnce() -> Arc<str>) -> Self {
        match error.detail() {
            ErrorDetail::Upstream { producer, cause, .. } => {
                Poison { producer: producer.clone(), cause: cause.clone() }
            }
            _ => Poison { producer: op(), cause: error.clone() },
        }
    }
}

impl PartialEq for Poison {
    fn eq(&self, other: &Self) -> bool {
        // One kernel's launches share its name.
        Arc::ptr_eq(&self.producer, &other.producer) && self.cause.is(&other.cause)
    }
}

/// Who used which part.
pub(crate) type AllocationHazards = Hazards<Arc<Progress>, Poison>;

/// Whose memory an allocation is.
enum Backing {
    /// Of the device's pool: a block of so many bytes, made on a stream.
    Pool { home: MadeOn, block: u64 },
    /// Somebody else's. The owner is there until the drop.
    Foreign { engine: Arc<Engine>, owner: Option<SyncWrapper<Box<dyn Any + Send>>> },
}

/// The stream that memory was made on.
enum MadeOn {
    /// It is kept open, so that the memory is freed there.
    Open(Arc<StreamHandle>),
    /// It may go: a graph has the memory, and nobody else.
    Left { engine: Arc<Engine>, stream: Weak<StreamHandle> },
}

/// Device memory and its hazards.
pub(crate) struct Allocation {
    backing: Backing,
    ptr: DevicePtr,
    bytes: u64,
    hazards: Mutex<AllocationHazards>,
    /// Nobody writes it any more, and its readers on this device are not entered.
    frozen: AtomicBool,
    /// How many lists of graphs will use it again, whoever has the buffer; changed under the lock of the hazards.
    graphs: AtomicU32,
}

/// A share of memory that launches of a graph use again and again: while it is there, nobody else gets the memory for uses that are
/// not entered.
pub(crate) struct KeptByGraph(Arc<Allocation>);

impl KeptByGraph {
    /// Keeps memory that the caller borrows.
    pub(crate) fn new(memory: &Arc<Allocation>) -> Self {
        // ORDERING: Relaxed, here and below: who looks at it has the lock as well.
        memory.with_hazards(|_| memory.graphs.fetch_add(1, Ordering::Relaxed));
        KeptByGraph(memory.clone())
    }

    pub(crate) fn memory(&self) -> &Arc<Allocation> {
        &self.0
    }

    /// Keeps the stream open no longer that the memory was made on, if nobody else has the memory.
    pub(crate) fn leave_stream(&mut self) {
        let Some(memory) = Arc::get_mut(&mut self.0) else { return };
        if let Backing::Pool { home, .. } = &mut memory.backing
            && let MadeOn::Open(stream) = home
        {
            let (engine, stream) = (stream.engine().clone(), Arc::downgrade(stream));
            *home = MadeOn::Left { engine, stream };
        }
    }
}

impl Drop for KeptByGraph {
    fn drop(&mut self) {
        self.0.with_hazards(|_| self.0.graphs.fetch_sub(1, Ordering::Relaxed));
    }
}

impl Allocation {
    /// Memory that ticket `ticket` of `home` made, and that the caller counted: a block of which the
    /// buffer has `bytes`.
    pub(crate) fn new(
        home: &Arc<StreamHandle>,
        (ptr, block): (DevicePtr, u64),
        bytes: u64,
        ticket: u64,
        written: bool,
    ) -> Self {
        let content = if written { Content::Valid } else { Content::Unwritten };
        let writer = (bytes > 0).then(|| home.point(ticket));
        let backing = Backing::Pool { home: MadeOn::Open(home.clone()), block };
        Allocation::over(backing, ptr, bytes, Hazards::new(bytes, writer, content))
    }

    /// Memory of somebody else's that the backend adopted, behind `writer`.
    pub(crate) fn foreign(
        engine: &Arc<Engine>,
        ptr: DevicePtr,
        bytes: u64,
        writer: Option<Point>,
        owner: Box<dyn Any + Send>,
    ) -> Self {
        let owner = Some(SyncWrapper::new(owner));
        let backing = Backing::Foreign { engine: engine.clone(), owner };
        Allocation::over(backing, ptr, bytes, Hazards::new(bytes, writer, Content::Valid))
    }

    fn over(backing: Backing, ptr: DevicePtr, bytes: u64, hazards: AllocationHazards) -> Self {
        let (hazards, frozen) = (Mutex::new(hazards), AtomicBool::new(false));
        Allocation { backing, ptr, bytes, hazards, frozen, graphs: AtomicU32::new(0) }
    }

    /// What keeps memory of somebody else's.
    pub(crate) fn owner(&mut self) -> Option<&mut (dyn Any + Send)> {
        match &mut self.backing {
            Backing::Pool { .. } => None,
            Backing::Foreign { owner, .. } => owner.as_mut().map(|owner| &mut **owner.get_mut()),
        }
    }

    /// Gives the memory up to the caller, with its owner if it is somebody else's: nobody frees it here. The caller
    /// orders that behind every use.
    pub(crate) fn release(&mut self) -> Option<Box<dyn Any + Send>> {
        let engine = self.engine().clone();
        let released = Backing::Foreign { engine: engine.clone(), owner: None };
        match std::mem::replace(&mut self.backing, released) {
            Backing::Pool { block, .. } => {
                engine.account.lock().abandon(block);
                None
            }
            Backing::Foreign { owner, .. } => owner.map(SyncWrapper::into_inner),
        }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        match &self.backing {
            Backing::Pool { home: MadeOn::Open(stream), .. } => stream.engine(),
            Backing::Pool { home: MadeOn::Left { engine, .. }, .. }
            | Backing::Foreign { engine, .. } => engine,
        }
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn freeze(&self) {
        // ORDERING: Relaxed, here and below: whoever has a share got it from who froze it.
        self.frozen.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
    }

    /// Refuses uses that are not entered, of memory that a graph will use.
    pub(crate) fn check_is_in_no_graph(&self, op: &'static str) -> Result<()> {
        let graphs = self.with_hazards(|_| self.graphs.load(Ordering::Relaxed));
        if graphs == 0 { Ok(()) } else { Err(ErrorDetail::KeptByGraph { op }.into()) }
    }

    pub(crate) fn with_hazards<R>(&self, f: impl FnOnce(&mut AllocationHazards) -> R) -> R {
        f(&mut self.hazards.lock())
    }

    /// Whether the first part of the range that cannot be read is one whose producer failed.
    pub(crate) fn is_poisoned(&self, range: &Range<u64>) -> bool {
        matches!(self.hazards.lock().unreadable(range), Some((_, Content::Poisoned(_))))
    }

    pub(crate) fn poison(&self, range: &Range<u64>, poison: &Poison) {
        self.hazards.lock().poison(range, poison);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let engine = self.engine().clone();
        let users = self.hazards.get_mut().users();
        let is_frozen = *self.frozen.get_mut();
        let (ptr, bytes) = (self.ptr, self.bytes);
        let what = match &mut self.backing {
            Backing::Pool { block, .. }
                if bytes == 0 || engine.lost().is_some() || exit::begun() =>
            {
                return engine.account.lock().abandon(*block);
            }
            Backing::Pool { home, block } => {
                let found;
                let home = match home {
                    MadeOn::Open(stream) => Some(&*stream),
                    MadeOn::Left { stream, .. } => {
                        found = stream.upgrade();
                        found.as_ref()
                    }
                };
                if let Some(home) = home.filter(|_| !is_frozen) {
                    let mine = |used: &Point| used.stream.id() == home.id() || used.is_complete();
                    if users.iter().all(mine) {
                        return home.free_in_order(ptr, *block);
                    }
                }
                engine.account.lock().retire(*block);
                Remnant::Memory { ptr, bytes: *block }
            }
            Backing::Foreign { owner, .. } => {
                let Some(owner) = owner.take().map(SyncWrapper::into_inner) else { return };
                if exit::begun() {
                    // Its drop may call the driver.
                    return std::mem::forget(owner);
                }
                Remnant::Foreign { ptr, bytes, owner }
            }
        };
        if is_frozen {
            return engine.retire_behind_all(what, users);
        }
        // A home stream's uses are among them: the free is on none of the users' streams.
        engine.retire(what, users);
        engine.memory_moved();
    }
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes on {}", self.bytes, self.engine().label())
    }
}
