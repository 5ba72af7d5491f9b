//! Shrinking: making a communicator of some of the ranks of another.
//!
//! | the communicator | by `ncclCommShrink` | else |
//! |---|---|---|
//! | works | with the default flag, if the library has it and some rank is excluded | the ranks meet again, where they have a way |
//! | works, and is aborted for it | with the abort flag, if its ranks have no other way | it is aborted, and they meet again |
//! | is lost | no: its handles are freed | the ranks meet again, where they have a way |
//!
//! A way is the connection of a [group](crate::Group), or the process that all ranks are in; host devices always have one. Ranks that have
//! a way tell one another whether NCCL can shrink theirs: one of them may have lost it meanwhile.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_await::Device;

use super::Communicator;
use crate::error::{Error, LostCause, Result, ShrinkRefusal};
use crate::mesh::Channel;
use crate::nccl::Nccl;
use crate::transport::{LocalRank, Shrink, Transport};
use crate::unique_id::UniqueId;

/// A communicator that NCCL shrinks. Its last handle cannot be dropped meanwhile.
#[derive(Debug)]
pub(super) struct Parent {
    comm: Communicator,
    excluded: Vec<usize>,
    /// Remaining local ranks, by their indices.
    places: Vec<usize>,
    aborts: bool,
}

impl Parent {
    pub(super) fn shrink(
        &self,
        ranks: &[LocalRank],
        (world, contexts): (usize, Vec<u64>),
        channel: Option<Arc<Channel>>,
        end: Instant,
    ) -> Result<Box<dyn Transport>> {
        let Parent { comm, excluded, places, aborts } = self;
        let aborts = *aborts;
        let shrink = Shrink { excluded, places, aborts, world, contexts, channel, end };
        comm.shared().transport().shrink(ranks, shrink)
    }

    /// Some rank has not come: the call that waits for it uses the handles, and only an abort ends it.
    pub(super) fn is_stuck(&self, limit: Duration) {
        match self.aborts {
            true => self.comm.shared().transport().abort(&LostCause::Aborted),
            false => drop(self.comm.shared().fail(LostCause::TimedOut { limit })),
        }
    }
}

/// A communicator that was lost for this is aborted, whatever the outcome.
impl Drop for Parent {
    fn drop(&mut self) {
        if self.aborts {
            self.comm.shared().transport().abort(&LostCause::Aborted);
        }
    }
}

impl Communicator {
    /// Makes a communicator of the remaining ranks when some are excluded: because their processes are gone, or to release their
    /// devices. Every remaining rank calls it with the same ranks; excluded ranks do not. The remaining ranks keep their order and are
    /// renumbered from 0, and those of this process keep their devices. Resolves when all of them are connected. The new
    /// communicator has the limits of this one.
    ///
    /// | this communicator | pending operations | afterwards |
    /// |---|---|---|
    /// | works | are waited for: `shrink` starts when those of this process are complete | it works on |
    /// | works, but an operation waits for an excluded rank | never complete: use [`abort_and_shrink`](Self::abort_and_shrink) | |
    /// | is [lost](Self::lost) | have failed with it | it stays lost |
    ///
    /// NCCL shrinks communicators that work, from version 2.27. Otherwise the ranks connect anew, over the connections of their
    /// [`Group`](crate::Group) or within the process. Ranks that share only a [`UniqueId`] on GPUs can do neither: they have
    /// to distribute a new id.
    ///
    /// # Which one to use
    /// With a [`Group`](crate::Group), await the error of an operation and call `comm.shrink(&group.gone())`: the group detects dead
    /// processes, and works with every version of NCCL. Without one, on NCCL 2.27, put a `timeout(..)` around operations instead of a
    /// [limit](Self::set_limit), which aborts, and call [`abort_and_shrink`](Self::abort_and_shrink) without the ranks that are dead.
    /// [`Group::without`](crate::Group::without) shrinks the group itself, for other communicators.
    ///
    /// # Cancel safety
    /// If the future is dropped while it waits for pending operations, nothing has happened. Later the new communicator is still
    /// connected, for the sake of the other ranks, and then ended.
    ///
    /// # Errors
    /// [`Error::BadRank`]; [`Error::NoRanks`]: none of this process is left; [`Error::CannotShrink`]; as
    /// [`CommunicatorBuilder::connect`](crate::CommunicatorBuilder::connect). If a rank does not call within the
    /// [connect limit](crate::CommunicatorBuilder::connect_limit) and NCCL already waits for it ([`Error::NotConnected`]),
    /// this communicator is lost as well.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::Device;
    /// use gpu_await_nccl::{Communicator, Reduction};
    /// let devices = [Device::host(), Device::host(), Device::host()];
    /// let comm = Communicator::all(&devices).await?;
    /// let smaller = comm.shrink(&[1]).await?; // devices 0 and 2
    /// let mut x = devices[0].full(4, 1.0f32).queued()?;
    /// let mut y = devices[2].full(4, 2.0f32).queued()?;
    /// smaller.group(|g| {
    ///     g.rank(0)?.all_reduce_in_place(&mut x, Reduction::Sum)?;
    ///     g.rank(1)?.all_reduce_in_place(&mut y, Reduction::Sum)
    /// })
    /// .await?;
    /// assert_eq!(devices[2].download(&y).await?, [3.0; 4]);
    /// # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `ncclCommShrink` with `NCCL_SHRINK_DEFAULT`.
    pub async fn shrink(&self, excluded: &[usize]) -> Result<Communicator> {
        let split = self.split(excluded)?;
        for local in &self.shared().ranks {
            // Also on a device that is lost.
            drop(local.stream.done().await);
        }
        self.shared().launches_end().await?;
        self.meet_again(split, false).await
    }

    /// Aborts this communicator and makes one of the remaining ranks, as [`shrink`](Self::shrink) does: for when an operation
    /// waits for a rank that is dead. Pending operations fail with [`LostCause::Aborted`], as by [`abort`](Self::abort). Some ranks may
    /// call this while others call [`shrink`](Self::shrink).
    ///
    /// Ranks that share only a [`UniqueId`] can continue this way with NCCL 2.27 or newer, as long as the communicator is not
    /// lost.
    ///
    /// # Cancel safety
    /// The abort happens even if the future is dropped.
    ///
    /// # Errors
    /// As [`shrink`](Self::shrink). The communicator is aborted unless the ranks are wrong.
    ///
    /// # Source
    /// `ncclCommShrink` with `NCCL_SHRINK_ABORT`; `ncclCommAbort`.
    pub async fn abort_and_shrink(&self, excluded: &[usize]) -> Result<Communicator> {
        let split = self.split(excluded)?;
        let shared = self.shared();
        // Ranks that have a way tell one another of an abort, and some have aborted already.
        let is_alone = shared.origin.channel.is_none() && !split.excluded.is_empty();
        let aborts =
            is_alone && shared.transport().can_shrink() && shared.lose(LostCause::Aborted).is_ok();
        if !aborts {
            shared.fail(LostCause::Aborted);
        }
        self.meet_again(split, aborts).await
    }

    fn split(&self, excluded: &[usize]) -> Result<Split> {
        let world = self.world();
        if let Some(rank) = excluded.iter().copied().find(|rank| *rank >= world) {
            return Err(Error::BadRank { rank, world });
        }
        let (excluded, left) = (0..world).partition::<Vec<_>, _>(|rank| excluded.contains(rank));
        let is_left = |place: &usize| left.contains(&self.shared().ranks[*place].rank);
        let places: Vec<usize> = (0..self.shared().ranks.len()).filter(is_left).collect();
        match places.is_empty() {
            true => Err(Error::NoRanks { world: left.len(), local: 0 }),
            false => Ok(Split { excluded, left, places }),
        }
    }

    /// `aborts`: it was lost for this, and its work has not been ended.
    async fn meet_again(&self, split: Split, aborts: bool) -> Result<Communicator> {
        let shared = self.shared();
        let Split { excluded, left, places } = split;
        let lost = if aborts { None } else { self.lost() };
        let works = lost.is_none() && !excluded.is_empty() && shared.transport().can_shrink();
        let can = aborts || works;
        let locals: Vec<&LocalRank> = places.iter().map(|place| &shared.ranks[*place]).collect();
        let ranks: Vec<usize> = locals.iter().map(|local| local.rank).collect();
        let channel = shared.origin.channel.as_ref().map(|channel| channel.without(&excluded));
        let world = left.len();
        let refusal = match lost {
            Some(lost) => ShrinkRefusal::Lost { cause: lost.cause },
            None if excluded.is_empty() => ShrinkRefusal::NothingExcluded,
            None => ShrinkRefusal::OldLibrary { found: Nccl::get().map_or(0, Nccl::version) },
        };
        let id = match &channel {
            None if !can && ranks.len() == world => UniqueId::new(locals[0].device.kind())?,
            None if !can => return Err(Error::CannotShrink { reason: refusal }),
            _ => UniqueId::of_group(),
        };
        let comm = self.clone();
        let parent = can.then(|| Arc::new(Parent { comm, excluded, places, aborts }));
        let new_rank = |rank| left.iter().position(|left| *left == rank).unwrap_or_default();
        let ranks: Vec<usize> = ranks.into_iter().map(new_rank).collect();
        let devices: Vec<Device> = locals.iter().map(|local| local.device.clone()).collect();
        let builder = Communicator::builder(id, world).like(shared).shrunk(parent);
        let shrunk = builder.of(ranks, &devices, channel).connect().await;
        let (limit, world) = (shared.origin.connect_limit, self.world());
        shrunk.map_err(|error| error.of_call(limit, world, |rank| left[rank]))
    }
}

/// The excluded ranks, the remaining ones, and which of those are local.
struct Split {
    excluded: Vec<usize>,
    left: Vec<usize>,
    /// Local ones, by their indices.
    places: Vec<usize>,
}
