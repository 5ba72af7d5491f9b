//! [`Transport`]: what NCCL and the host twin do differently. All checks, names and errors before it are the same for both.

pub(crate) mod gpu;
pub(crate) mod host;

use std::sync::{Arc, Weak};
use std::time::Instant;

use gpu_await::{Device, MemoryLoan, RawQueue, Stream};

use crate::call::Call;
use crate::error::{LostCause, Result};
use crate::mesh::Channel;

/// A rank of this process.
pub(crate) struct LocalRank {
    pub(crate) rank: usize,
    pub(crate) device: Device,
    /// The stream of its collectives, and of nothing else.
    pub(crate) stream: Stream,
}

/// The calls of a rank, by its index among those of this process, and the loan of their memory.
pub(crate) struct Placed<'p, 'a> {
    pub(crate) at: usize,
    pub(crate) calls: &'p [Call],
    pub(crate) loan: &'p MemoryLoan<'a, ()>,
}

/// The owner of a call.
pub(crate) trait CallOwner: Send + Sync {
    /// Loses the communicator, unless it is lost already; returns the cause that counts.
    fn fail(&self, cause: LostCause) -> LostCause;
}

/// How a transport shrinks.
pub(crate) struct Shrink<'a> {
    /// In ascending order.
    pub(crate) excluded: &'a [usize],
    /// Remaining ranks of this process, by their indices in the communicator that shrinks.
    pub(crate) places: &'a [usize],
    /// Ends what is pending first.
    pub(crate) aborts: bool,
    pub(crate) world: usize,
    pub(crate) contexts: Vec<u64>,
    pub(crate) channel: Option<Arc<Channel>>,
    pub(crate) end: Instant,
}

pub(crate) trait Transport: Send + Sync {
    /// How many operations of the stream a call takes, including the two ends of the loan of its memory.
    fn operations(&self) -> u64;

    /// Puts the calls of one group on the streams of their ranks. At most one thread of the process is in here.
    fn submit(
        &self,
        ranks: &[LocalRank],
        parts: &[Placed<'_, '_>],
        owner: &Weak<dyn CallOwner>,
    ) -> Result<(), LostCause>;

    /// Has the calls of one group captured on the stream of the queue, or put there if the stream is not
    /// capturing. As [`submit`](Self::submit): at most one thread of the process is in either.
    fn capture(
        &self,
        local: (usize, &LocalRank),
        queue: &RawQueue<'_>,
        calls: &[Call],
        owner: &Weak<dyn CallOwner>,
    ) -> Result<()>;

    /// The object that each graph with its calls keeps alive.
    fn kept_by_graphs(&self) -> Arc<()>;

    /// Whether it can by itself make another transport for some of its ranks, without being told how they reach one another.
    fn can_shrink(&self) -> bool;

    /// Makes that transport. Blocks until all remaining ranks have called it. Without an abort nothing is pending.
    fn shrink(&self, ranks: &[LocalRank], shrink: Shrink<'_>) -> Result<Box<dyn Transport>>;

    /// What has gone wrong, if anything. Called now and then while work is pending.
    fn look(&self) -> Option<LostCause>;

    /// Why nothing new can be done, because of what another rank said, or because its process ended. The communicator asks before each call, in one
    /// place: nobody looks while nothing is pending. A rank that left counts on GPUs, where NCCL would wait for it; not on the twin, where what it
    /// sent still arrives, and only a call that needs more from it fails.
    fn refusal(&self) -> Option<LostCause>;

    /// Ends the work on streams, and everything that waits for other ranks. The communicator already refuses calls. Does not
    /// block.
    fn abort(&self, cause: &LostCause);

    /// Frees what it has: everything is complete, and nobody calls it any more. May block.
    fn finish(&self);
}
