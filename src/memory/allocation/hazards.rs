//! The uses of an allocation: which operations used which part of it, whether a part holds valid data, and which work that can still
//! fail wrote it.
//!
//! [`AllocationHazards`] tracks the uses by range or, for a slab, by block. An operation's part of an allocation is a range, or blocks that
//! it names. Only blocks of slabs are named.
//!
//! [`LateWork`] holds the ranges last written by unfinished work that can fail when it runs, or by a reader of such work's outputs. Its
//! submitter knows the type of the work.
//!
//! More than 500 lines: every submission checks all of this for each part.
#![forbid(unsafe_code)]

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use gpu_await_protocol::sync::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::{Allocation, NOBODY};
use crate::error::{Error, ErrorDetail, Result};
use crate::runtime::{Point, Progress};
use gpu_await_protocol::block_hazards::{BlockHazards, Blocks};
use gpu_await_protocol::hazard::{Content, Hazards, Mode};

/// The uses of each part.
pub(crate) enum AllocationHazards {
    Ranges(Hazards<Arc<Progress>, Poison>),
    Slab(Box<BlockHazards<Arc<Progress>, Poison>>),
}

/// The blocks of a slab that an operation names, each by its number.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockSet(pub(crate) Vec<u32>);

/// The blocks of a slab that a launch names: those that it uses in the argument's mode, and others that it only reads.
#[derive(Clone, Debug, Default)]
pub(crate) struct NamedUses {
    pub(crate) used: BlockSet,
    pub(crate) read: BlockSet,
}

/// The range of a part, in memory other than a slab.
fn range<'a>(part: &Blocks<'a>) -> &'a Range<u64> {
    match part {
        Blocks::Range(range) => range,
        // An empty slab is not divided into blocks.
        Blocks::Named(_) => &(0..0),
    }
}

impl AllocationHazards {
    /// See [`Hazards::dependencies`].
    #[inline]
    pub(crate) fn dependencies(
        &self,
        part: &Blocks<'_>,
        mode: Mode,
        stream: u64,
        visit: impl FnMut(&Point),
    ) {
        match self {
            Self::Ranges(ranges) => ranges.dependencies(range(part), mode, stream, visit),
            Self::Slab(slab) => slab.dependencies(part, mode, stream, visit),
        }
    }

    /// See [`Hazards::unreadable`].
    #[inline]
    pub(crate) fn unreadable(&self, part: &Blocks<'_>) -> Option<(Range<u64>, &Content<Poison>)> {
        match self {
            Self::Ranges(ranges) => ranges.unreadable(range(part)),
            Self::Slab(slab) => slab.unreadable(part),
        }
    }

    /// Refuses to read invalid data.
    pub(crate) fn check(&self, part: &Blocks<'_>, op: impl FnOnce() -> Arc<str>) -> Result<()> {
        match self.unreadable(part) {
            None => Ok(()),
            Some((_, Content::Poisoned { by, .. })) => Err(by.upstream(op())),
            Some((part, _)) => {
                Err(ErrorDetail::Unwritten { op: op(), start: part.start, end: part.end }.into())
            }
        }
    }

    /// See [`Hazards::only_user`].
    #[inline]
    pub(super) fn only_user(&self) -> Option<u64> {
        match self {
            Self::Ranges(ranges) => ranges.only_user(),
            Self::Slab(slab) => slab.only_user(),
        }
    }

    pub(super) fn poison(&mut self, part: &Blocks<'_>, leaves_data: bool, poison: &Poison) {
        match self {
            Self::Ranges(ranges) => ranges.poison(range(part), leaves_data, poison),
            Self::Slab(slab) => slab.poison(part, leaves_data, poison),
        }
    }

    pub(super) fn clear_poison(&mut self, part: &Blocks<'_>) {
        match self {
            Self::Ranges(ranges) => ranges.clear_poison(range(part)),
            Self::Slab(slab) => slab.clear_poison(part),
        }
    }

    pub(crate) fn is_written_by(&self, part: &Blocks<'_>, by: (u64, u64)) -> bool {
        match self {
            Self::Ranges(ranges) => ranges.is_written_by(range(part), by),
            Self::Slab(slab) => slab.is_written_by(part, by),
        }
    }

    pub(super) fn poison_written(&mut self, part: &Blocks<'_>, by: (u64, u64), poison: &Poison) {
        match self {
            Self::Ranges(ranges) => ranges.poison_written(range(part), by, poison),
            Self::Slab(slab) => slab.poison_written(part, by, poison),
        }
    }

    /// See [`Hazards::users`].
    pub(crate) fn users(&self) -> SmallVec<[Point; 2]> {
        match self {
            Self::Ranges(ranges) => ranges.users(),
            Self::Slab(slab) => slab.users(),
        }
    }

    /// See [`Hazards::cut_off`]. A slab does not grow, so all of it stays.
    pub(super) fn cut_off(&mut self, from: u64) -> u64 {
        match self {
            Self::Ranges(ranges) => ranges.cut_off(from),
            Self::Slab(_) => u64::MAX,
        }
    }

    /// Poison that was replaced. Its drop may run a user's code.
    #[inline]
    pub(super) fn replaced(&mut self) -> &mut Vec<Poison> {
        match self {
            Self::Ranges(ranges) => &mut ranges.replaced,
            Self::Slab(slab) => &mut slab.replaced,
        }
    }
}

/// The failure that made a range invalid.
#[derive(Clone, Debug)]
pub(crate) struct Poison {
    pub(crate) producer: Arc<str>,
    pub(crate) cause: Error,
}

impl Poison {
    /// The poison left by an operation that failed with `error`; an upstream failure is passed on unchanged,
    /// through any number of operations.
    pub(crate) fn of(error: &Error, op: impl FnOnce() -> Arc<str>) -> Self {
        match error.detail() {
            ErrorDetail::Upstream { producer, cause, .. } => {
                Poison { producer: producer.clone(), cause: cause.clone() }
            }
            _ => Poison { producer: op(), cause: error.clone() },
        }
    }

    /// The error for an operation that reads the range.
    pub(crate) fn upstream(&self, op: Arc<str>) -> Error {
        let Poison { producer, cause } = self.clone();
        ErrorDetail::Upstream { op, producer, cause }.into()
    }
}

impl PartialEq for Poison {
    fn eq(&self, other: &Self) -> bool {
        // Launches of one kernel share the `Arc` of its name.
        Arc::ptr_eq(&self.producer, &other.producer) && self.cause.is(&other.cause)
    }
}

impl Allocation {
    pub(crate) fn with_hazards<R>(&self, f: impl FnOnce(&AllocationHazards) -> R) -> R {
        f(&self.hazards.lock())
    }

    /// Whether no other stream's use of the memory is pending, all of its data is valid, and nothing that wrote it can still fail: a
    /// use on `stream` needs no wait and has no failed input.
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
        if self.only_user.load(Ordering::Relaxed) != stream.id {
            self.note_only_user(&hazards);
        }
        if has_replaced {
            self.let_go(&mut hazards);
        }
    }

    /// Enters a use of a slab's blocks.
    pub(crate) fn enter_blocks(&self, blocks: &[u32], mode: Mode, by: (&Arc<Progress>, u64)) {
        let mut hazards = self.hazards.lock();
        if let AllocationHazards::Slab(slab) = &mut *hazards
            && self.record(slab, &Blocks::Named(blocks), mode, by)
        {
            self.let_go(&mut hazards);
        }
        // ORDERING: Relaxed: under the lock.
        if self.only_user.load(Ordering::Relaxed) != by.0.id {
            self.note_only_user(&hazards);
        }
    }

    /// Records a use in a slab; returns whether poison was replaced.
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

    /// Drops replaced poison, on the reaper's thread if that may run a user's code: the caller holds locks, and a drop may submit.
    #[cold]
    #[inline(never)]
    fn let_go(&self, hazards: &mut AllocationHazards) {
        let replaced = std::mem::take(hazards.replaced());
        if replaced.iter().any(|poison| poison.cause.is_foreign()) {
            self.engine.background.drop_later(Box::new(replaced));
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

    /// Enters a range written by work that can still fail.
    pub(crate) fn enter_late(
        &self,
        range: &Range<u64>,
        by: (u64, u64),
        work: impl Iterator<Item = Weak<AnyWork>>,
    ) {
        self.late.enter(range, by, work);
        self.note_only_user(&self.hazards.lock());
    }

    /// Makes the memory behind `from` unreadable until it is written again. Returns the end of the last part that is in use or may be used again: by
    /// work that is not complete, by a graph's list, or by a share other than the caller's and the lists', whose parts are unknown.
    pub(crate) fn cut_off(self: &Arc<Self>, from: u64) -> u64 {
        // Not under the lock: a query that finds a completion wakes its waiters.
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

    /// The failure of the first unreadable part of the range, as an error naming `op`; `None` if that part
    /// was never written.
    pub(crate) fn failure(&self, range: &Range<u64>, op: &'static str) -> Option<Error> {
        let (hazards, part) = (self.hazards.lock(), Blocks::Range(range));
        let unreadable = hazards.unreadable(&part);
        let has_failed = matches!(unreadable, Some((_, Content::Poisoned { .. })));
        has_failed.then(|| hazards.check(&part, || op.into()).err()).flatten()
    }

    /// Poisons the outputs of a failed operation. `leaves_data`: the operation was never entered, and would have updated the range.
    pub(crate) fn poison(&self, part: &Blocks<'_>, leaves_data: bool, poison: &Poison) {
        let mut hazards = self.hazards.lock();
        hazards.poison(part, leaves_data, poison);
        self.note_only_user(&hazards);
        self.let_go(&mut hazards);
    }

    /// Makes a part readable again that failed operations would have updated; an error naming `op` if that is not possible.
    pub(crate) fn clear_poison(&self, range: &Range<u64>, op: &'static str) -> Result<()> {
        let mut hazards = self.hazards.lock();
        let part = Blocks::Range(range);
        hazards.clear_poison(&part);
        self.note_only_user(&hazards);
        self.let_go(&mut hazards);
        hazards.check(&part, || op.into())
    }
}

pub(crate) type AnyWork = dyn Any + Send + Sync;

/// Ranges written by late work. Several works of one operation have the same range; other ranges do not overlap.
#[derive(Default)]
pub(crate) struct LateWork {
    all: Mutex<Ranges>,
    /// Whether there are any; changed under the lock.
    is_used: AtomicBool,
}

#[derive(Default)]
struct Ranges {
    /// In ascending order.
    all: Vec<LateRange>,
    /// The length at which ranges of dropped work are removed.
    tidied_at: usize,
}

/// A range, the work that wrote it, and the stream id and ticket of the write.
struct LateRange {
    range: Range<u64>,
    by: (u64, u64),
    work: Weak<AnyWork>,
}

/// A part of a queried range, and the work that wrote it.
pub(crate) struct LatePart<T> {
    pub(crate) part: Range<u64>,
    pub(crate) by: (u64, u64),
    pub(crate) work: Arc<T>,
}

impl LateWork {
    /// Whether there may be late work.
    #[inline]
    pub(crate) fn is_used(&self) -> bool {
        // ORDERING: Relaxed: readers of the work's outputs got them from its submitter.
        self.is_used.load(Ordering::Relaxed)
    }

    /// Enters a range that was written by an operation of that work.
    pub(crate) fn enter(
        &self,
        range: &Range<u64>,
        by: (u64, u64),
        work: impl Iterator<Item = Weak<AnyWork>>,
    ) {
        let mut ranges = self.all.lock();
        ranges.cut(range);
        if ranges.all.len() >= ranges.tidied_at {
            ranges.all.retain(|known| known.work.strong_count() > 0);
            ranges.tidied_at = 2 * ranges.all.len() + 8;
        }
        if !range.is_empty() {
            let at = ranges.overlapping(range).start;
            for work in work {
                ranges.all.insert(at, LateRange { range: range.clone(), by, work });
            }
        }
        self.note_use(&ranges);
    }

    /// Removes a range that another operation overwrites.
    pub(crate) fn leave(&self, range: &Range<u64>) {
        let mut ranges = self.all.lock();
        ranges.cut(range);
        self.note_use(&ranges);
    }

    /// The work that wrote parts of the range.
    pub(crate) fn of<T: Any + Send + Sync>(
        &self,
        range: &Range<u64>,
    ) -> SmallVec<[LatePart<T>; 1]> {
        let ranges = self.all.lock();
        let part = |known: &LateRange| {
            let part = known.overlap(range)?;
            let work = known.work.upgrade()?.downcast().ok()?;
            Some(LatePart { part, by: known.by, work })
        };
        ranges.all[ranges.overlapping(range)].iter().filter_map(part).collect()
    }

    /// Removes the ranges of work that has ended or failed, and calls `each` for them, under the lock.
    pub(crate) fn take<T>(&self, work: &Arc<T>, mut each: impl FnMut(&Range<u64>, (u64, u64))) {
        let mut ranges = self.all.lock();
        ranges.all.retain(|known| {
            let is_its = std::ptr::addr_eq(known.work.as_ptr(), Arc::as_ptr(work));
            if is_its {
                each(&known.range, known.by);
            }
            !is_its
        });
        self.note_use(&ranges);
    }

    fn note_use(&self, ranges: &MutexGuard<'_, Ranges>) {
        // ORDERING: Relaxed: as in `is_used`.
        self.is_used.store(!ranges.all.is_empty(), Ordering::Relaxed);
    }
}

impl LateRange {
    fn part(&self, range: Range<u64>) -> LateRange {
        LateRange { range, by: self.by, work: self.work.clone() }
    }

    fn overlap(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let part = self.range.start.max(range.start)..self.range.end.min(range.end);
        (!part.is_empty()).then_some(part)
    }
}

impl Ranges {
    /// The indices of the ranges that overlap `range`, or the index where it belongs.
    fn overlapping(&self, range: &Range<u64>) -> Range<usize> {
        let first = self.all.partition_point(|known| known.range.end <= range.start);
        let others = self.all[first..].iter();
        first..first + others.take_while(|known| known.overlap(range).is_some()).count()
    }

    /// Removes the range, and keeps the parts of known ranges outside it.
    fn cut(&mut self, range: &Range<u64>) {
        let places = self.overlapping(range);
        let found = &self.all[places.clone()];
        let before = found.iter().map(|known| (known, known.range.start..range.start));
        let behind = found.iter().map(|known| (known, range.end..known.range.end));
        let left = before.chain(behind).filter(|(_, part)| !part.is_empty());
        let left: SmallVec<[LateRange; 2]> = left.map(|(known, part)| known.part(part)).collect();
        self.all.splice(places, left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 24;

    /// Compares the ranges with a model that stores the last writer of each byte.
    #[test]
    fn ranges_are_as_bytes_would_be() {
        let works: Vec<Arc<u64>> = (0..4).map(Arc::new).collect();
        let mut seed = 1u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for _ in 0..200 {
            let (late, mut bytes) = (LateWork::default(), vec![Vec::new(); LEN as usize]);
            for step in 0..40 {
                let (a, b) = (random(LEN + 1), random(LEN + 1));
                let range = a.min(b)..a.max(b);
                let (first, count) = (random(3), random(3));
                let writes = first..first + count;
                if count == 0 {
                    late.leave(&range);
                } else {
                    let work = |at| Arc::downgrade(&works[at as usize]) as Weak<AnyWork>;
                    late.enter(&range, (0, step), writes.clone().map(work));
                }
                for byte in range {
                    bytes[byte as usize] = writes.clone().map(|at| (at, step)).collect();
                }
                let (a, b) = (random(LEN + 1), random(LEN + 1));
                let mut found = vec![Vec::new(); LEN as usize];
                for LatePart { part, by, work } in late.of::<u64>(&(a.min(b)..a.max(b))) {
                    part.for_each(|byte| found[byte as usize].push((*work, by.1)));
                }
                for byte in a.min(b)..a.max(b) {
                    let (found, known) = (&mut found[byte as usize], &bytes[byte as usize]);
                    found.sort_unstable();
                    assert_eq!(found, known, "byte {byte}");
                }
            }
        }
    }
}
