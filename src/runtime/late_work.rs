//! [`LateWork`]: the ranges of an allocation that were last written by work that can fail when it runs, or by a reader of such work's
//! outputs, and has not ended. Its submitter knows whose work it is.
#![forbid(unsafe_code)]

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use gpu_await_protocol::sync::{Mutex, MutexGuard};
use smallvec::SmallVec;

pub(crate) type AnyWork = dyn Any + Send + Sync;

/// The ranges. Those of several pieces of work of one operation are the same; others do not overlap.
#[derive(Default)]
pub(crate) struct LateWork {
    all: Mutex<Ranges>,
    /// There are some; changed under their lock.
    is_used: AtomicBool,
}

#[derive(Default)]
struct Ranges {
    /// In their order.
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
            let at = ranges.overlapping(range).start;
            for work in work {
                ranges.all.insert(at, LateRange { range: range.clone(), by, work });
            }
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
        ranges.all[ranges.overlapping(range)].iter().filter_map(part).collect()
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
    fn part(&self, range: Range<u64>) -> LateRange {
        LateRange { range, by: self.by, work: self.work.clone() }
    }

    fn overlap(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let part = self.range.start.max(range.start)..self.range.end.min(range.end);
        (!part.is_empty()).then_some(part)
    }
}

impl Ranges {
    /// The places of those that overlap the range, or where it belongs.
    fn overlapping(&self, range: &Range<u64>) -> Range<usize> {
        let first = self.all.partition_point(|known| known.range.end <= range.start);
        let others = self.all[first..].iter();
        first..first + others.take_while(|known| known.overlap(range).is_some()).count()
    }

    /// Leaves what is outside of the range.
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

    /// Each byte has the work that wrote it last.
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
