//! How the operations of a queue become a future. The future also reports late failures: of work that can fail when it runs, and of
//! operations that read its outputs.
#![forbid(unsafe_code)]

use crate::batch::queue::Queue;
use crate::batch::settle::{Settle, Settled};
use crate::error::refused::{AtLine, Refused};
use crate::error::{Error, ErrorDetail, Result};
use crate::op::{HostValue, Op, Points};
use crate::submit::Dependencies;

impl Queue<'_> {
    /// A host value of the last submitted operation: whichever future returns it, it is valid only if none of the
    /// operation's inputs fails.
    #[inline]
    pub(crate) fn proved<T: Send + 'static>(&self, value: HostValue<T>) -> HostValue<T> {
        value.if_none_failed(self.outcomes.of_last())
    }

    /// Turns the closure's result into the batch's future.
    pub(crate) fn finish<R: Settle>(&self, result: Result<R>) -> Op<R::Output> {
        match result {
            Ok(value) => {
                let Settled { value, points } = value.settle();
                // Nothing was submitted whose failure would report the loss.
                if self.last.get() == 0
                    && let Some(lost) = self.stream.engine.state.lost()
                {
                    return Op::failed(lost.clone().called_at(self.at.get()));
                }
                if let Some(outcomes) = self.outcomes.take() {
                    return self.finish_late(value, points, outcomes);
                }
                Op::at(points.reaching(self.stream, self.last.get()), value)
            }
            Err(error) => {
                self.stream.progress.timeline.release(self.last.get());
                Op::failed(error.called_at(self.at.get()))
            }
        }
    }

    /// [`finish`](Self::finish) for a call that takes pinned memory.
    pub(crate) fn finish_returning<R: Settle, B: Send + Sync + 'static>(
        &self,
        result: Result<R, Refused<B>>,
    ) -> Op<R::Output> {
        match result {
            Ok(value) => self.finish(Ok(value)),
            Err(refused) => {
                self.stream.progress.timeline.release(self.last.get());
                Op::refused(refused.at_line(self.at.get()))
            }
        }
    }

    /// The future of a value whose work can fail when it runs.
    #[cold]
    #[inline(never)]
    fn finish_late<T: Send + 'static>(
        &self,
        value: HostValue<T>,
        points: Points,
        outcomes: Box<Dependencies>,
    ) -> Op<T> {
        if self.stream.engine.options.verify {
            // In verify mode the operations have already run.
            let failed =
                outcomes.iter().find_map(|outcome| Some((outcome, outcome.check().err()?)));
            if let Some((outcome, cause)) = failed {
                let failed = Error::from(ErrorDetail::Verify { op: outcome.op(), cause });
                return Op::failed(failed.called_at(self.at.get()));
            }
        }
        let points = points.reaching(self.stream, self.last.get());
        Op::at(points, value.if_none_failed(Some(outcomes)))
    }
}
