//! [`Accesses`]: the memory that one operation touches, and the questions that its submission asks about it.
//!
//! | the submission asks | when |
//! |---|---|
//! | [whether there is nothing to look for](Accesses::are_plain) | first |
//! | [whether its inputs may still fail](Accesses::may_be_late) | if there is something to look for |
//! | [which points it waits for, and whether its inputs can be read](Accesses::find_edges) | before its turn, under the lock of one allocation at a time |
//! | [to be entered](Accesses::enter) | in its turn |
//! | [to be poisoned](Accesses::poison) | after a failure |
//!
//! Only tracked accesses take part.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::memory::allocation::{Allocation, AllocationHazards, BlockSet, Poison};
use crate::memory::view::Tracking;
use crate::runtime::{Engine, MarkedPoint, Point, Progress};
use gpu_await_protocol::block_hazards::Blocks;
use gpu_await_protocol::hazard::{Content, Mode};
use gpu_await_protocol::timeline::Track;

/// Points of other streams.
pub(crate) type Edges = SmallVec<[MarkedPoint; 2]>;

/// A use of a part of memory.
pub(crate) struct Access<'a> {
    pub(crate) memory: &'a Arc<Allocation>,
    pub(crate) range: Range<u64>,
    pub(crate) mode: Mode,
    pub(crate) tracking: Tracking,
    /// The blocks of a slab that it touches; the range is then the whole slab, by which lists order it.
    pub(crate) named: Option<&'a BlockSet>,
    /// Whether it may touch other blocks too, and is ordered as if it did.
    pub(crate) is_open: bool,
}

/// The parts of memory that one operation touches.
#[derive(Default)]
pub(crate) struct Accesses<'a> {
    pub(crate) all: SmallVec<[Access<'a>; 6]>,
}

impl<'a> Accesses<'a> {
    /// The accesses that other uses of the memory are ordered with.
    #[inline]
    pub(crate) fn tracked(&self) -> impl Iterator<Item = &Access<'a>> {
        self.all.iter().filter(|access| matches!(access.tracking, Tracking::Tracked))
    }

    /// Whether any of them is tracked.
    #[inline]
    pub(crate) fn are_tracked(&self) -> bool {
        self.tracked().next().is_some()
    }

    /// Whether all of the memory belongs to the device and needs no wait on that stream.
    #[inline(always)]
    pub(crate) fn are_plain(&self, engine: &Arc<Engine>, stream: u64) -> bool {
        self.all.iter().all(|Access { memory, tracking, .. }| {
            Arc::ptr_eq(&memory.engine, engine)
                && (!matches!(tracking, Tracking::Tracked) || memory.is_only_used_by(stream))
        })
    }

    /// Whether work that can still fail may have written its inputs.
    #[inline]
    pub(crate) fn may_be_late(&self) -> bool {
        self.tracked().any(Access::may_be_late)
    }

    /// Adds the points of other streams that an operation on that stream must wait for; an error naming `op` if it would read
    /// invalid data.
    pub(crate) fn find_edges(
        &self,
        stream: u64,
        edges: &mut Edges,
        op: impl Fn() -> Arc<str>,
    ) -> Result<()> {
        for access in self.tracked().filter(|access| !access.memory.is_only_used_by(stream)) {
            access.memory.with_hazards(|hazards| {
                access.check(hazards, &op)?;
                hazards.dependencies(&access.order(), access.mode, stream, |on| add(edges, on));
                Ok::<_, Error>(())
            })?;
        }
        Ok(())
    }

    /// Checks that all memory to be read holds valid data.
    pub(crate) fn check(&self, op: impl Fn() -> Arc<str>) -> Result<()> {
        self.tracked()
            .try_for_each(|access| access.memory.with_hazards(|hazards| access.check(hazards, &op)))
    }

    /// The failure of an input, if there was one.
    pub(crate) fn failed(&self, op: impl Fn() -> Arc<str>) -> Option<Error> {
        let mut reads = self.tracked().filter(|access| access.mode != Mode::Overwrite);
        reads.find_map(|access| {
            access.memory.with_hazards(|hazards| match hazards.unreadable(&access.part()) {
                Some((_, Content::Poisoned { by, .. })) => Some(by.upstream(op())),
                _ => None,
            })
        })
    }

    /// Enters the uses by `ticket` of `stream`.
    #[inline]
    pub(crate) fn enter(&self, stream: &Arc<Progress>, ticket: u64) {
        self.tracked().for_each(|access| access.enter(stream, ticket));
    }

    /// Poisons the outputs; `leaves_data` says for which modes the old data is intact.
    pub(crate) fn poison(
        &self,
        error: &Error,
        leaves_data: impl Fn(Mode) -> bool,
        op: impl Fn() -> Arc<str>,
    ) {
        FAILURES.with(|count| count.set(count.get() + 1));
        let mut poison = None;
        for access in self.tracked().filter(|access| access.mode.writes()) {
            let poison = poison.get_or_insert_with(|| Poison::of(error, &op));
            access.memory.poison(&access.part(), leaves_data(access.mode), poison);
        }
    }
}

thread_local! {
    static FAILURES: Cell<u64> = const { Cell::new(0) };
}

/// How many operations have had their outputs poisoned by the calling thread.
pub(crate) fn failures() -> u64 {
    FAILURES.with(Cell::get)
}

/// Adds a point, keeping the last one of each stream.
fn add(edges: &mut Edges, used: &Point) {
    match edges.iter_mut().find(|edge| edge.point.stream.id == used.stream.id) {
        Some(edge) if edge.point.ticket >= used.ticket => {}
        Some(edge) => {
            edge.point.ticket = used.ticket;
            edge.marker = None;
        }
        // The stream's reference count is contended: leave it alone where there is nothing to wait for.
        None if used.stream.is_complete(used.ticket) => {}
        None => edges.push(used.clone().into()),
    }
}

impl Access<'_> {
    /// Whether work that can still fail may have written its inputs.
    #[inline]
    pub(crate) fn may_be_late(&self) -> bool {
        !matches!(self.mode, Mode::Overwrite) && self.memory.late.is_used()
    }

    /// The part of the memory that it touches.
    #[inline]
    pub(crate) fn part(&self) -> Blocks<'_> {
        match self.named {
            None => Blocks::Range(&self.range),
            Some(BlockSet(blocks)) => Blocks::Named(blocks),
        }
    }

    /// The part that it is ordered by.
    #[inline]
    fn order(&self) -> Blocks<'_> {
        if self.is_open { Blocks::Range(&self.range) } else { self.part() }
    }

    /// Checks that the memory holds data that it can read.
    fn check(&self, hazards: &AllocationHazards, op: impl FnOnce() -> Arc<str>) -> Result<()> {
        if matches!(self.mode, Mode::Overwrite) { Ok(()) } else { hazards.check(&self.part(), op) }
    }

    /// Enters the use by `ticket` of `stream`.
    #[inline(always)]
    pub(crate) fn enter(&self, stream: &Arc<Progress>, ticket: u64) {
        match self.named {
            Some(BlockSet(blocks)) if !self.is_open => {
                self.memory.enter_blocks(blocks, self.mode, (stream, ticket));
            }
            _ => self.memory.enter(&self.range, self.mode, stream, ticket),
        }
    }
}
