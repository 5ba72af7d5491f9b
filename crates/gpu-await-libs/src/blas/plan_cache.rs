//! The library's most recently used plans by shape, so that a shape that comes again is not searched for again.
//!
//! Only host memory is kept: descriptors, algorithms, known calls. Scratch memory belongs to each [`Gemm`](super::Gemm).
//!
//! # Invariants
//! 1. At most [`MOST`] plans are kept: the least recently used is evicted (`what_was_used_last_stays`).
#![forbid(unsafe_code)]

use std::collections::HashMap;

use super::shape::Shape;

/// Plans kept at once.
pub(super) const MOST: usize = 256;

/// Plans, and when each was used.
pub(super) struct PlanCache<P> {
    plans: HashMap<Shape, (P, u64)>,
    uses: u64,
}

impl<P: Clone> PlanCache<P> {
    pub(super) fn new() -> Self {
        PlanCache { plans: HashMap::new(), uses: 0 }
    }

    pub(super) fn find(&mut self, shape: &Shape) -> Option<P> {
        self.uses += 1;
        let (plan, used) = self.plans.get_mut(shape)?;
        *used = self.uses;
        Some(plan.clone())
    }

    /// Enters a plan, and returns the plans that it displaces, to be dropped after the lock is released.
    pub(super) fn enter(&mut self, shape: Shape, plan: P) -> [Option<P>; 2] {
        self.uses += 1;
        // Two threads may have searched for the same shape.
        let before = self.plans.insert(shape, (plan, self.uses)).map(|(plan, _)| plan);
        let is_full = self.plans.len() > MOST;
        let oldest = self.plans.iter().filter(|_| is_full).min_by_key(|(_, (_, used))| *used);
        let oldest = oldest.map(|(shape, _)| *shape);
        [before, oldest.and_then(|shape| self.plans.remove(&shape)).map(|(plan, _)| plan)]
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST, PlanCache};
    use crate::blas::element::Kind;
    use crate::blas::shape::Shape;

    fn rows(m: usize) -> Shape {
        Shape::new(m, 8, 8, Kind::F32)
    }

    #[test]
    fn what_was_used_last_stays() {
        let mut cache = PlanCache::new();
        for m in 0..MOST {
            assert_eq!(cache.find(&rows(m)), None);
            assert_eq!(cache.enter(rows(m), m), [None, None]);
        }
        // All but one come again.
        for m in (0..MOST).filter(|m| *m != 7) {
            assert_eq!(cache.find(&rows(m)), Some(m));
        }
        assert_eq!(cache.enter(rows(MOST), MOST), [None, Some(7)]);
        assert_eq!(cache.find(&rows(7)), None);
        assert_eq!(cache.find(&rows(0)), Some(0));
        assert_eq!(cache.enter(rows(7), 7), [None, Some(1)]);
        assert_eq!(cache.plans.len(), MOST);
    }

    #[test]
    fn what_distinguishes_plans() {
        let mut cache = PlanCache::new();
        cache.enter(rows(1), "rows");
        assert_eq!(cache.find(&Shape { bias: true, ..rows(1) }), None);
        assert_eq!(cache.find(&Shape { out: Kind::F64, ..rows(1) }), None);
        assert_eq!(cache.find(&Shape { workspace_bytes: 0, ..rows(1) }), None);
        assert_eq!(cache.enter(rows(1), "again"), [Some("rows"), None]);
        assert_eq!(cache.find(&rows(1)), Some("again"));
    }
}
