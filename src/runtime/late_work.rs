//! [`LateWork`]: the ranges of an allocation that were last written by work that can fail when it runs, or by a reader of such work's
//! outputs, and has not ended. Its submitter knows whose work it is.
#![forbid(unsafe_code)]

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

pub(crate) type AnyWork = dyn Any + Send + Sync;

/// The ranges, in no order. They overlap only where one operation has several pieces of work.
#[derive(Default)]
pub(crate) struct LateWork {
    all: Mutex<Ranges>,
    /// There are some; changed under their lock.
    is_used: AtomicBool,
}

#[derive(Default)]
struct Ranges {
    all: Vec<LateRange>,
    /// The length at which those of work that is gone are removed.
    tidied_at: usize,
}

/// A range, and the work that wrote it: a ticket of a stream, by their numbers.
struct LateRange {
    range: Range<u64>,
    by: (u64, u64),
    work: Weak<AnyWork>,
}

/// A part of a range that was asked for, and who wrote it.
pub(crate) struct LatePart<T> {
    pub(crate) part: Range<u64>,
    pub(crate) by: (u64, u64),
    pub(crate) work: Arc<T>,
}

impl LateWork {
    /// Whether there may be some.
    #[inline]
    pub(crate) fn is_used(&self) -> bool {
        // ORDERING: Relaxed: readers of the work's outputs got them from its submitter.
        self.is_used.load(Ordering::Relaxed)
    }

    /// The range was written by an operation, of that work.
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
            work.for_each(|work| ranges.all.push(LateRange { range: range.clone(), by, work }));
        }
        self.note_use(&ranges);
    }

    /// Another operation overwrites the range.
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
        ranges.all.iter().filter_map(part).collect()
    }

    /// The work has ended, or has failed and calls `each` for the ranges that it wrote: nobody enters or leaves them meanwhile.
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
    fn overlap(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let part = self.range.start.max(range.start)..self.range.end.min(range.end);
        (!part.is_empty()).then_some(part)
    }
}

impl Ranges {
    /// Leaves what is outside of the range.
    fn cut(&mut self, range: &Range<u64>) {
        let mut behind = Vec::new();
        self.all.retain_mut(|known| {
            if known.overlap(range).is_none() {
                return true;
            }
            if range.end < known.range.end {
                let (range, work) = (range.end..known.range.end, known.work.clone());
                behind.push(LateRange { range, by: known.by, work });
            }
            known.range.end = range.start;
            !known.range.is_empty()
        });
        self.all.append(&mut behind);
    }
}
