//! Work of a batch that can fail when it runs: the future of the batch tells of it.
#![forbid(unsafe_code)]

use std::cell::RefCell;

use crate::backend::DeviceKind;
use crate::batch::queue::Queue;
use crate::batch::settle::{Settle, Settled};
use crate::error::{ErrorDetail, Result};
use crate::op::Op;
use crate::submit::Outcomes;

impl<'s> Queue<'s> {
    /// For a closure of the user's, which may enqueue work that fails when it runs, on a host device.
    pub(crate) fn note_in(&mut self, outcomes: &'s Outcomes) {
        self.outcomes =
            (self.stream.engine().backend.kind() == DeviceKind::Host).then_some(outcomes);
    }

    pub(crate) fn outcomes(&self) -> Option<&'s Outcomes> {
        self.outcomes
    }

    /// Whether it has work that can fail when it runs.
    #[inline]
    fn may_fail_late(&self) -> bool {
        self.outcomes.is_some_and(|outcomes| !outcomes.borrow().is_empty())
    }

    /// [`finish`](Self::finish) of a closure of the user's.
    #[inline]
    pub(crate) fn finish_noted<R: Settle>(&self, result: Result<R>) -> Op<R::Output> {
        match result {
            Ok(value) if self.may_fail_late() => self.finish_late(value),
            result => self.finish(result),
        }
    }

    /// What becomes of a value whose work may fail when it runs.
    #[cold]
    #[inline(never)]
    fn finish_late<R: Settle>(&self, value: R) -> Op<R::Output> {
        let outcomes = self.outcomes.map(RefCell::take).unwrap_or_default();
        if self.stream.engine().options.verify {
            // They have run.
            let failed =
                outcomes.iter().find_map(|outcome| Some((outcome, outcome.check().err()?)));
            if let Some((outcome, cause)) = failed {
                let (op, at) = (outcome.op().clone(), self.at.get());
                return Op::failed(ErrorDetail::Verify { op, at, cause }.into());
            }
        }
        let Settled { value, points } = value.settle().unless_failed(outcomes);
        Op::at(points.reaching(self.stream, self.last.get()), value)
    }
}
