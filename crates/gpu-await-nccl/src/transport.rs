//! [`Transport`]: what NCCL and the host twin do differently. Every check, name and error in front of it is the same for both.

pub(crate) mod gpu;
pub(crate) mod host;

use std::sync::Weak;

use gpu_await::{Device, Stream, WorkOutcome};

use crate::call::Call;
use crate::communicator::shared::Shared;
use crate::error::LostCause;

/// A rank of this process.
pub(crate) struct LocalRank {
    pub(crate) rank: usize,
    pub(crate) device: Device,
    /// Where its collectives run, and nothing else.
    pub(crate) stream: Stream,
}

/// A call of a rank, by its place among those of this process.
pub(crate) struct Placed {
    pub(crate) at: usize,
    pub(crate) call: Call,
    /// The driver's handle of the rank's stream, which the loan of the memory gives.
    pub(crate) stream: u64,
    pub(crate) outcome: WorkOutcome,
}

pub(crate) trait Transport: Send + Sync {
    /// Puts the calls of one group on the streams of their ranks. At most one thread of the process is in here.
    fn submit(
        &self,
        ranks: &[LocalRank],
        calls: &[Placed],
        shared: &Weak<Shared>,
    ) -> Result<(), LostCause>;

    /// What went wrong since, if anything did. Called now and then while work is pending.
    fn look(&self) -> Option<LostCause>;

    /// Ends the work that is on streams, and everything that waits for other ranks. The communicator refuses calls by
    /// now. Does not block.
    fn abort(&self, cause: &LostCause);

    /// Frees what it has: everything is complete, and nobody calls it any more. May block.
    fn finish(&self);
}
