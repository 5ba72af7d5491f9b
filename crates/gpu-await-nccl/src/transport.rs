//! [`Transport`]: what NCCL and the host twin do differently. Every check, name and error in front of it is the same for both.

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
    /// Where its collectives run, and nothing else.
    pub(crate) stream: Stream,
}

/// The calls of a rank, by its place among those of this process, and the loan of their memory.
pub(crate) struct Placed<'p, 'a> {
    pub(crate) at: usize,
    pub(crate) calls: &'p [Call],
    pub(crate) loan: &'p MemoryLoan<'a, ()>,
}

/// Whose a call is.
pub(crate) trait CallOwner: Send + Sync {
    /// Loses the communicator, unless it is lost already; returns the cause that counts.
    fn fail(&self, cause: LostCause) -> LostCause;
}

/// How a transport shrinks.
pub(crate) struct Shrink<'a> {
    /// In ascending order.
    pub(crate) excluded: &'a [usize],
    /// Ranks of this process that are left, by their places in the one that shrinks.
    pub(crate) places: &'a [usize],
    /// Ends what is pending first.
    pub(crate) aborts: bool,
    pub(crate) world: usize,
    pub(crate) contexts: Vec<u64>,
    pub(crate) channel: Option<Arc<Channel>>,
    pub(crate) end: Instant,
}

pub(crate) trait Transport: Send + Sync {
    /// How many operations of the stream a call is, with the two ends of the loan of its memory.
    fn operations(&self) -> u64;

    /// Puts the calls of one group on the streams of their ranks. At most one thread of the process is in here.
    fn submit(
        &self,
        ranks: &[LocalRank],
        parts: &[Placed<'_, '_>],
        owner: &Weak<dyn CallOwner>,
    ) -> Result<(), LostCause>;

    /// Has the calls of one group captured on the stream of the queue, or put there where nothing is captured. As
    /// [`submit`](Self::submit): at most one thread of the process is in either.
    fn capture(
        &self,
        local: (usize, &LocalRank),
        queue: &RawQueue<'_>,
        calls: &[Call],
        owner: &Weak<dyn CallOwner>,
    ) -> Result<()>;

    /// What each graph with its calls keeps.
    fn kept_by_graphs(&self) -> Arc<()>;

    /// Whether it can make another transport of its own for some of its ranks, without being told how they reach one another.
    fn can_shrink(&self) -> bool;

    /// Makes it. Blocks until all ranks that are left have called it. Without an abort nothing is pending.
    fn shrink(&self, ranks: &[LocalRank], shrink: Shrink<'_>) -> Result<Box<dyn Transport>>;

    /// What went wrong since, if anything did. Called now and then while work is pending.
    fn look(&self) -> Option<LostCause>;

    /// Why nothing new can be done, as another rank told, or as its process ended. The communicator asks in front of each call, in one place:
    /// nobody looks while nothing is pending. A rank that left counts on GPUs, where NCCL would wait for it; not on the twin, where what it
    /// sent still arrives, and only a call that needs more of it fails.
    fn refusal(&self) -> Option<LostCause>;

    /// Ends the work that is on streams, and everything that waits for other ranks. The communicator refuses calls by
    /// now. Does not block.
    fn abort(&self, cause: &LostCause);

    /// Frees what it has: everything is complete, and nobody calls it any more. May block.
    fn finish(&self);
}
