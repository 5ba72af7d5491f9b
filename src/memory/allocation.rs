//! One allocation: which streams used which part of it, and how it is freed.
//!
//! | last used by | freed |
//! |---|---|
//! | only its home stream (other uses are complete), which has a handle | in place: for that stream's next allocation, or in stream order |
//! | untracked readers: a part was frozen | retired behind everything on any stream of the device |
//! | other streams as well, or its home stream has no handle | retired with their tickets; freed by the poller when all are complete |
//! | any stream, on a lost device or at process exit | not at all: the memory went with the device |
//! | a loan whose end is unknown | not at all: it counts as leaked |
//!
//! Adopted memory is not freed: its owner is retired with the tickets of all users, and dropped when they are complete.
//!
//! # Invariants
//! 1. Memory keeps no stream open (`buffers_keep_no_stream`): the drop of a buffer releases only the memory and, if the buffer was its
//!    last user, the device.
//! 2. The last share is not dropped under a lock of this crate (checked in builds that count [`locks`](crate::thread::locks)).
#![forbid(unsafe_code)]

mod hazards;
mod kept;

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use gpu_await_protocol::sync::Mutex;
use sync_wrapper::SyncWrapper;

pub(crate) use self::hazards::{
    AllocationHazards, AnyWork, BlockSet, LatePart, LateWork, NamedUses, Poison,
};
pub(crate) use self::kept::KeptByGraph;
use self::kept::KeptParts;
use crate::backend::{DevicePtr, HostPtr};
use crate::error::{ErrorDetail, Result};
use crate::memory::reclaim::allowance::Allowance;
use crate::memory::reclaim::retired::Remnant;
use crate::runtime::stream_state::StreamState;
use crate::runtime::{Engine, Point, Progress};
use crate::thread::{exit, locks};
use gpu_await_protocol::block_hazards::BlockHazards;
use gpu_await_protocol::hazard::{Content, Hazards};

/// The id of no stream: a use under this id waits for every stream.
pub(crate) const NOBODY: u64 = 0;

/// The alignment of allocations that every backend guarantees, in bytes.
pub(crate) const ALIGNMENT: u64 = 256;

/// Where an allocation's memory comes from.
enum Backing {
    /// From the device's pool: the stream that allocated it, the block's size, and the budget that it is drawn from.
    Pool { home: Weak<StreamState>, block: u64, drawn: Option<Arc<Allowance>> },
    /// Adopted memory. `owner` is `Some` until the drop.
    Foreign { owner: Option<SyncWrapper<Box<dyn Any + Send>>> },
}

/// Device memory and its hazards.
pub(crate) struct Allocation {
    pub(crate) engine: Arc<Engine>,
    backing: Backing,
    pub(crate) ptr: DevicePtr,
    /// The host address of pinned memory.
    host: Option<HostPtr>,
    /// The block size of a slab; 0 for other memory.
    block_bytes: u64,
    bytes: u64,
    hazards: Mutex<AllocationHazards>,
    /// The last answer of [`Hazards::only_user`]; [`NOBODY`] if there was none or while there is late work. Changed under the hazards' lock.
    only_user: AtomicU64,
    /// Whether a part of it was frozen, so that readers on this device may be unknown. Only the drop, which frees all parts, looks
    /// at this; for a single use, see its [`Tracking`](crate::memory::view::Tracking).
    frozen: AtomicBool,
    /// It is unknown when the work that uses it ends, so it is never freed.
    in_use_for_ever: AtomicBool,
    /// The parts that lists of graphs will use again, even after the buffer has moved on; one entry per list.
    kept_by_graphs: Mutex<KeptParts>,
    /// The work that can fail when it runs and that wrote the memory, directly or through a reader of its outputs.
    pub(crate) late: LateWork,
}

impl Allocation {
    /// Memory that `ticket` of `home` allocated and the caller counted: a block that holds `bytes` of the
    /// buffer.
    pub(crate) fn new(
        home: &Arc<StreamState>,
        (ptr, block): (DevicePtr, u64),
        bytes: u64,
        ticket: u64,
        written: bool,
        drawn: Option<Arc<Allowance>>,
    ) -> Self {
        let content = if written { Content::Valid } else { Content::Unwritten };
        let writer = (bytes > 0).then(|| home.point(ticket));
        let backing = Backing::Pool { home: Arc::downgrade(home), block, drawn };
        Allocation::over(&home.engine, backing, ptr, Hazards::new(bytes, writer, content), bytes)
    }

    /// Adopted memory, written by `writer`.
    pub(crate) fn foreign(
        engine: &Arc<Engine>,
        ptr: DevicePtr,
        bytes: u64,
        writer: Option<Point>,
        owner: Box<dyn Any + Send>,
    ) -> Self {
        let owner = Some(SyncWrapper::new(owner));
        let hazards = Hazards::new(bytes, writer, Content::Valid);
        Allocation::over(engine, Backing::Foreign { owner }, ptr, hazards, bytes)
    }

    /// Memory that its owner unmaps; `written` if others have written it.
    pub(crate) fn mapped(
        engine: &Arc<Engine>,
        ptr: DevicePtr,
        bytes: u64,
        written: bool,
        owner: Box<dyn Any + Send>,
    ) -> Self {
        let content = if written { Content::Valid } else { Content::Unwritten };
        let owner = Some(SyncWrapper::new(owner));
        let hazards = Hazards::new(bytes, None, content);
        Allocation::over(engine, Backing::Foreign { owner }, ptr, hazards, bytes)
    }

    fn over(
        engine: &Arc<Engine>,
        backing: Backing,
        ptr: DevicePtr,
        hazards: Hazards<Arc<Progress>, Poison>,
        bytes: u64,
    ) -> Self {
        let only_user = AtomicU64::new(hazards.only_user().unwrap_or(NOBODY));
        let hazards = Mutex::new(AllocationHazards::Ranges(hazards));
        let kept_by_graphs = Mutex::default();
        let (frozen, in_use_for_ever) = (AtomicBool::new(false), AtomicBool::new(false));
        Allocation {
            engine: engine.clone(),
            backing,
            ptr,
            host: None,
            block_bytes: 0,
            bytes,
            hazards,
            only_user,
            frozen,
            in_use_for_ever,
            kept_by_graphs,
            late: LateWork::default(),
        }
    }

    /// Sets its host address.
    pub(crate) fn on_host(mut self, at: HostPtr) -> Self {
        self.host = Some(at);
        self
    }

    /// Switches to tracking by block, for memory that was written as a whole and has at most one use.
    pub(crate) fn divide(&mut self, block_bytes: u64) {
        debug_assert!(self.bytes.is_multiple_of(block_bytes));
        let writer = self.hazards.get_mut().users().pop();
        let slab = BlockHazards::new((self.bytes / block_bytes) as usize, block_bytes, writer);
        *self.hazards.get_mut() = AllocationHazards::Slab(Box::new(slab));
        self.block_bytes = block_bytes;
    }

    /// The size of a slab's blocks; 0 for other memory.
    pub(crate) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    pub(crate) fn host(&self) -> Option<HostPtr> {
        self.host
    }

    /// The owner of adopted memory.
    pub(crate) fn owner(&mut self) -> Option<&mut (dyn Any + Send)> {
        match &mut self.backing {
            Backing::Pool { .. } => None,
            Backing::Foreign { owner, .. } => owner.as_mut().map(|owner| &mut **owner.get_mut()),
        }
    }

    /// Releases the memory to the caller, which must free it behind every use; returns the owner of adopted memory.
    pub(crate) fn release(&mut self) -> Option<Box<dyn Any + Send>> {
        match std::mem::replace(&mut self.backing, Backing::Foreign { owner: None }) {
            Backing::Pool { block, drawn, .. } => {
                self.engine.memory.account.lock().abandon(block, number(&drawn));
                self.engine.memory.moved();
                None
            }
            Backing::Foreign { owner, .. } => owner.map(SyncWrapper::into_inner),
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Marks a part of it as having untracked readers from now on.
    pub(crate) fn freeze(&self) {
        // ORDERING: Relaxed: the drop of this share orders it before the drop of the last, which reads it.
        self.frozen.store(true, Ordering::Relaxed);
    }

    /// Has the memory leaked when its last share is dropped.
    pub(crate) fn never_free(&self) {
        // ORDERING: Relaxed, here and below: the caller has a share, whose drop orders this before the drop of the last.
        self.in_use_for_ever.store(true, Ordering::Relaxed);
        self.engine.state.count_unreturned();
    }

    /// Whether it is known when the work that uses it ends.
    pub(crate) fn can_be_freed(&self) -> bool {
        !self.in_use_for_ever.load(Ordering::Relaxed)
    }

    /// Refuses an untracked use of a part that a graph will use.
    pub(crate) fn check_is_in_no_graph(&self, part: &Range<u64>, op: &'static str) -> Result<()> {
        let overlaps = |kept: &Range<u64>| kept.start < part.end && part.start < kept.end;
        if self.kept_by_graphs.lock().parts.iter().any(overlaps) {
            return Err(ErrorDetail::KeptByGraph { op }.into());
        }
        Ok(())
    }

    /// Leaks the memory along with its device, whose end would free it.
    #[cold]
    fn leak(&mut self) {
        let engine = self.engine.clone();
        match &mut self.backing {
            Backing::Pool { block, drawn, .. } if engine.state.lost().is_some() => {
                engine.memory.account.lock().abandon(*block, number(drawn));
            }
            Backing::Pool { block, .. } => {
                let mut account = engine.memory.account.lock();
                // The budget does not get it back either.
                account.retire(*block, None);
                account.leak(*block);
            }
            Backing::Foreign { owner, .. } => std::mem::forget(owner.take()),
        }
        std::mem::forget(engine);
    }
}

/// The budget's number.
fn number(drawn: &Option<Arc<Allowance>>) -> Option<usize> {
    drawn.as_ref().map(|drawn| drawn.number())
}

impl Drop for Allocation {
    fn drop(&mut self) {
        locks::assert_none("an allocation");
        let users = self.hazards.get_mut().users();
        if !self.can_be_freed() {
            return self.leak();
        }
        let engine = &self.engine;
        let is_frozen = *self.frozen.get_mut();
        let (ptr, bytes) = (self.ptr, self.bytes);
        let what = match &mut self.backing {
            Backing::Pool { block, drawn, .. } if bytes == 0 || !engine.is_usable() => {
                return engine.memory.account.lock().abandon(*block, number(drawn));
            }
            Backing::Pool { home, block, drawn } => {
                let home = if is_frozen { None } else { home.upgrade() };
                if let Some(home) = home.filter(|home| !home.is_deserted()) {
                    let mine =
                        |used: &Point| used.stream.id == home.progress.id || used.is_complete();
                    if users.iter().all(mine) {
                        return home.free_in_order(ptr, *block, number(drawn));
                    }
                }
                engine.memory.account.lock().retire(*block, number(drawn));
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
        // The users include the home stream: the free is put on none of their streams.
        engine.retire(what, users);
        engine.memory.moved();
    }
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes on {}", self.bytes, self.engine.label())
    }
}
