//! One allocation: which streams used which part of it, and how it is freed.
//!
//! | used by | freed |
//! |---|---|
//! | its home stream only (other uses complete), which has a handle | in place: for that stream's next allocation, or in stream order |
//! | readers that are not tracked: a part was frozen | retired behind everything on any stream of the device |
//! | other streams as well, or its home stream has no handle | retired with their tickets; freed by the poller when all are complete |
//! | any, on a lost device or at process exit | not at all: the memory went with the device |
//! | a loan whose end is unknown | not at all: it counts as leaked |
//!
//! Adopted memory is not freed: its owner is retired with the tickets of all users, and dropped when they are complete.
//!
//! # Invariants
//! 1. Memory keeps no stream open (`buffers_keep_no_stream`): the drop of a buffer ends nothing but the memory, and, as its last user, the
//!    device.
//! 2. The last share is dropped under no lock of this crate's (checked where [`locks`](crate::thread::locks) are counted).
#![forbid(unsafe_code)]

mod hazards;
mod kept;

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use gpu_await_protocol::sync::Mutex;
use sync_wrapper::SyncWrapper;

pub(crate) use self::hazards::{AllocationHazards, BlockSet, NamedUses};
pub(crate) use self::kept::KeptByGraph;
use self::kept::KeptParts;
use crate::backend::{DevicePtr, HostPtr};
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::reclaim::allowance::Allowance;
use crate::memory::reclaim::retired::Remnant;
use crate::runtime::late_work::{AnyWork, LateWork};
use crate::runtime::stream_state::StreamState;
use crate::runtime::{Engine, Point, Progress};
use crate::thread::{exit, locks};
use gpu_await_protocol::block_hazards::{BlockHazards, Blocks};
use gpu_await_protocol::hazard::{Content, Hazards, Mode};
use gpu_await_protocol::point::Track;

/// The id of no stream: a use under this id waits for every stream.
pub(crate) const NOBODY: u64 = 0;

/// The alignment of allocations that every backend guarantees, in bytes.
pub(crate) const ALIGNMENT: u64 = 256;

/// Why a range is not worth reading.
#[derive(Clone, Debug)]
pub(crate) struct Poison {
    pub(crate) producer: Arc<str>,
    pub(crate) cause: Error,
}

impl Poison {
    /// The poison left by an operation that failed with `error`; an upstream failure is passed on unchanged,
    /// however many operations it goes through.
    pub(crate) fn of(error: &Error, op: impl FnOnce() -> Arc<str>) -> Self {
        match error.detail() {
            ErrorDetail::Upstream { producer, cause, .. } => {
                Poison { producer: producer.clone(), cause: cause.clone() }
            }
            _ => Poison { producer: op(), cause: error.clone() },
        }
    }

    /// The error of an operation that reads it.
    pub(crate) fn upstream(&self, op: Arc<str>) -> Error {
        let Poison { producer, cause } = self.clone();
        ErrorDetail::Upstream { op, producer, cause }.into()
    }
}

impl PartialEq for Poison {
    fn eq(&self, other: &Self) -> bool {
        // Launches of one kernel share its name.
        Arc::ptr_eq(&self.producer, &other.producer) && self.cause.is(&other.cause)
    }
}

/// Refuses contents that are not worth reading.
pub(crate) fn check_content(
    hazards: &AllocationHazards,
    part: &Blocks<'_>,
    op: impl FnOnce() -> Arc<str>,
) -> Result<()> {
    match hazards.unreadable(part) {
        None => Ok(()),
        Some((_, Content::Poisoned { by, .. })) => Err(by.upstream(op())),
        Some((part, _)) => {
            Err(ErrorDetail::Unwritten { op: op(), start: part.start, end: part.end }.into())
        }
    }
}

/// Whose memory an allocation is.
enum Backing {
    /// From the device's pool: a block of this size, the stream that allocated it, and the budget that it is drawn from.
    Pool { home: Weak<StreamState>, block: u64, drawn: Option<Arc<Allowance>> },
    /// Adopted memory. The owner exists until the drop.
    Foreign { owner: Option<SyncWrapper<Box<dyn Any + Send>>> },
}

/// Device memory and its hazards.
pub(crate) struct Allocation {
    engine: Arc<Engine>,
    backing: Backing,
    ptr: DevicePtr,
    /// Of pinned memory: where the host finds it.
    host: Option<HostPtr>,
    /// Of a slab.
    block_bytes: u64,
    bytes: u64,
    hazards: Mutex<AllocationHazards>,
    /// The last answer of [`Hazards::only_user`], or [`NOBODY`], also while there is late work; changed under their lock.
    only_user: AtomicU64,
    /// A part of it was frozen: readers on this device may be unknown. For the drop alone, which is that of all parts; how a part is
    /// used says its [`Tracking`](crate::memory::view::Tracking).
    frozen: AtomicBool,
    /// It is not known when the work that uses it ends: it is never freed.
    in_use_for_ever: AtomicBool,
    /// The parts that lists of graphs will use again, even after the buffer has moved on; one entry per list.
    kept_by_graphs: Mutex<KeptParts>,
    late: LateWork,
}

impl Allocation {
    /// Memory that ticket `ticket` of `home` allocated, and that the caller counted: a block that holds
    /// `bytes` of the buffer.
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
        Allocation::over(home.engine(), backing, ptr, Hazards::new(bytes, writer, content), bytes)
    }

    /// Adopted memory, behind `writer`.
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

    /// Memory that its owner unmaps, and that only others may have `written`.
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

    /// The same, which the host finds there.
    pub(crate) fn on_host(mut self, at: HostPtr) -> Self {
        self.host = Some(at);
        self
    }

    /// Tracks the uses by block, of memory that was written as a whole. There is one use at most.
    pub(crate) fn divide(&mut self, block_bytes: u64) {
        debug_assert!(self.bytes.is_multiple_of(block_bytes));
        let writer = self.hazards.get_mut().users().pop();
        let slab = BlockHazards::new((self.bytes / block_bytes) as usize, block_bytes, writer);
        *self.hazards.get_mut() = AllocationHazards::Slab(Box::new(slab));
        self.block_bytes = block_bytes;
    }

    /// The size of a slab's blocks; 0 of other memory.
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

    /// Releases the memory to the caller, with its owner if it is adopted: nothing here frees it. The caller orders
    /// that behind every use.
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

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The work that wrote it, or a reader of such work's outputs did, and that can fail when it runs.
    pub(crate) fn late(&self) -> &LateWork {
        &self.late
    }

    /// A part of it has readers that are not tracked from now on.
    pub(crate) fn freeze(&self) {
        // ORDERING: Relaxed: the drop of this share orders it before the drop of the last, which reads it.
        self.frozen.store(true, Ordering::Relaxed);
    }

    /// Leaks the memory when the last share of it goes.
    pub(crate) fn never_free(&self) {
        // ORDERING: Relaxed, here and below: the caller has a share, whose drop orders this before the drop of the last.
        self.in_use_for_ever.store(true, Ordering::Relaxed);
        self.engine().state.count_unreturned();
    }

    /// Whether it is known when the work that uses it ends.
    pub(crate) fn can_be_freed(&self) -> bool {
        !self.in_use_for_ever.load(Ordering::Relaxed)
    }

    /// Refuses uses that are not entered, of a part that a graph will use.
    pub(crate) fn check_is_in_no_graph(&self, part: &Range<u64>, op: &'static str) -> Result<()> {
        let overlaps = |kept: &Range<u64>| kept.start < part.end && part.start < kept.end;
        if self.kept_by_graphs.lock().parts.iter().any(overlaps) {
            return Err(ErrorDetail::KeptByGraph { op }.into());
        }
        Ok(())
    }

    pub(crate) fn with_hazards<R>(&self, f: impl FnOnce(&AllocationHazards) -> R) -> R {
        f(&self.hazards.lock())
    }

    /// Whether no other stream's use of the memory is pending, all of it is worth reading, and nothing that wrote it can fail any more:
    /// a use there waits for nothing and fails by nothing.
    #[inline]
    pub(crate) fn is_only_used_by(&self, stream: u64) -> bool {
        // ORDERING: Relaxed: the caller holds a borrow of the range that it will use. A conflicting use on another stream was entered
        // before the caller got that borrow, and handing over the borrow orders the two. A use that does not conflict adds no wait.
        self.only_user.load(Ordering::Relaxed) == stream
    }

    /// Enters a use of a range by `ticket` of `stream`.
    #[inline]
    pub(crate) fn enter(
        &self,
        range: &Range<u64>,
        mode: Mode,
        stream: &Arc<Progress>,
        ticket: u64,
    ) {
        let mut hazards = self.hazards.lock();
        let has_replaced = match &mut *hazards {
            AllocationHazards::Ranges(ranges) => {
                ranges.keeps_writers = self.late.is_used();
                ranges.record(range, mode, stream, ticket);
                !ranges.replaced.is_empty()
            }
            AllocationHazards::Slab(slab) => {
                self.record(slab, &Blocks::Range(range), mode, (stream, ticket))
            }
        };
        // ORDERING: Relaxed: under the lock.
        if self.only_user.load(Ordering::Relaxed) != stream.id() {
            self.note_only_user(&hazards);
        }
        if has_replaced {
            self.let_go(&mut hazards);
        }
    }

    /// Returns whether poison was replaced.
    #[inline(never)]
    fn record(
        &self,
        slab: &mut BlockHazards<Arc<Progress>, Poison>,
        blocks: &Blocks<'_>,
        mode: Mode,
        (stream, ticket): (&Arc<Progress>, u64),
    ) -> bool {
        slab.keeps_writers = self.late.is_used();
        slab.record(blocks, mode, stream, ticket);
        !slab.replaced.is_empty()
    }

    /// Drops poison that was replaced, on the reaper's thread if that may run code of a user's: the caller holds locks, and a drop
    /// may submit.
    #[cold]
    #[inline(never)]
    fn let_go(&self, hazards: &mut AllocationHazards) {
        let replaced = std::mem::take(hazards.replaced());
        if replaced.iter().any(|poison| poison.cause.is_foreign()) {
            self.engine().background.drop_later(Box::new(replaced));
        }
    }

    /// Poisons the ranges whose last writer is a ticket of a stream.
    pub(crate) fn poison_written(&self, range: &Range<u64>, by: (u64, u64), poison: &Poison) {
        let mut hazards = self.hazards.lock();
        hazards.poison_written(&Blocks::Range(range), by, poison);
        self.note_only_user(&hazards);
        self.let_go(&mut hazards);
    }

    fn note_only_user(&self, hazards: &AllocationHazards) {
        let user = hazards.only_user().filter(|_| !self.late.is_used());
        // ORDERING: Relaxed: see `is_only_used_by`.
        self.only_user.store(user.unwrap_or(NOBODY), Ordering::Relaxed);
    }

    /// The range was written by an operation of that work, which can still fail.
    pub(crate) fn enter_late(
        &self,
        range: &Range<u64>,
        by: (u64, u64),
        work: impl Iterator<Item = Weak<AnyWork>>,
    ) {
        self.late.enter(range, by, work);
        self.note_only_user(&self.hazards.lock());
    }

    /// Nobody may read what is behind `from` until it is written again. Returns where the last part there ends that anybody uses or may use again: work
    /// that is not complete, a list of a graph, or a share that is neither the caller's nor a list's, whose parts are not known.
    pub(crate) fn cut_off(self: &Arc<Self>, from: u64) -> u64 {
        // Not under the lock: whoever learns of a completion is woken.
        let users = self.hazards.lock().users();
        users.iter().for_each(|used| used.stream.ask(used.ticket));
        let mut hazards = self.hazards.lock();
        let in_use = hazards.cut_off(from);
        self.note_only_user(&hazards);
        self.let_go(&mut hazards);
        drop(hazards);
        let kept = self.kept_by_graphs.lock();
        if Arc::strong_count(self) > 1 + kept.shares {
            return self.bytes;
        }
        kept.parts.iter().map(|part| part.end).fold(in_use, u64::max).min(self.bytes)
    }

    /// Whether the first part of the range that cannot be read is one whose producer failed.
    pub(crate) fn is_poisoned(&self, range: &Range<u64>) -> bool {
        let hazards = self.hazards.lock();
        matches!(hazards.unreadable(&Blocks::Range(range)), Some((_, Content::Poisoned { .. })))
    }

    /// Poisons the outputs of a failed operation. `leaves_data`: it was never entered, and would have updated the range.
    pub(crate) fn poison(&self, part: &Blocks<'_>, leaves_data: bool, poison: &Poison) {
        let mut hazards = self.hazards.lock();
        hazards.poison(part, leaves_data, poison);
        self.note_only_user(&hazards);
        self.let_go(&mut hazards);
    }

    /// Makes a part readable again that operations which failed would have updated; an error in the name of `op` if it is not.
    pub(crate) fn clear_poison(&self, range: &Range<u64>, op: &'static str) -> Result<()> {
        let mut hazards = self.hazards.lock();
        let part = Blocks::Range(range);
        hazards.clear_poison(&part);
        self.note_only_user(&hazards);
        self.let_go(&mut hazards);
        check_content(&hazards, &part, || op.into())
    }

    /// Leaks the memory with its device, which would free it at its end.
    #[cold]
    fn leak(&mut self) {
        let engine = self.engine.clone();
        match &mut self.backing {
            Backing::Pool { block, drawn, .. } if engine.state.lost().is_some() => {
                engine.memory.account.lock().abandon(*block, number(drawn));
            }
            Backing::Pool { block, .. } => {
                let mut account = engine.memory.account.lock();
                // It is lost to its budget as well.
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
                    let mine = |used: &Point| used.stream.id() == home.id() || used.is_complete();
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
        // A home stream's uses are among them: the free is on none of the users' streams.
        engine.retire(what, users);
        engine.memory.moved();
    }
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes on {}", self.bytes, self.engine().label())
    }
}
