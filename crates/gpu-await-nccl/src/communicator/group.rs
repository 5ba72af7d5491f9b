//! [`GroupCalls`]: the calls of a group, as they are recorded.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::parts::RankOf;
use super::shared::{OfParts, PendingCalls, Shared};
use crate::error::Error;

/// Records the calls of a [`group`](crate::Communicator::group), each for a [rank](Self::rank) in this process.
pub struct GroupCalls<'a> {
    shared: Arc<Shared>,
    /// By the indices of the ranks.
    pending: OfParts<RefCell<PendingCalls<'a>>>,
    /// The first refusal.
    refused: RefCell<Option<gpu_await::Error>>,
}

/// Records the calls of one rank in a [`group`](crate::Communicator::group), also [in a graph](crate::GraphCalls::group). A call borrows
/// its memory until the group is submitted. It returns errors of ranks and lengths immediately; errors of the memory are the group's.
pub struct RankCalls<'g, 'a> {
    group: &'g GroupCalls<'a>,
    at: usize,
}

impl<'a> GroupCalls<'a> {
    #[track_caller]
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        let at = Location::caller();
        let pending = shared.ranks.iter().map(|_| PendingCalls::made_at(at)).collect();
        GroupCalls { shared: shared.clone(), pending, refused: RefCell::default() }
    }

    /// A rank by its index.
    pub(super) fn rank_at(&self, at: usize) -> RankCalls<'_, 'a> {
        RankCalls { group: self, at }
    }

    /// Takes the calls of a rank.
    pub(super) fn take(&self, at: usize) -> PendingCalls<'a> {
        self.pending[at].take()
    }

    pub(super) fn take_all(&self) -> impl Iterator<Item = PendingCalls<'a>> {
        self.pending.iter().map(RefCell::take)
    }

    /// The closure's result, or the error of the first refused call, whatever the closure did with that.
    pub(super) fn written(&self, returned: gpu_await::Result<()>) -> gpu_await::Result<()> {
        self.refused.borrow_mut().take().map_or(returned, Err)
    }

    fn refuse(&self, error: &gpu_await::Error) {
        self.refused.borrow_mut().get_or_insert_with(|| error.clone());
    }

    /// Selects the rank that calls are recorded for.
    ///
    /// # Errors
    /// [`Error::NotLocal`].
    pub fn rank(&self, rank: usize) -> gpu_await::Result<RankCalls<'_, 'a>> {
        let mut ranks = self.shared.ranks.iter().map(|local| local.rank);
        match ranks.position(|local| local == rank) {
            Some(at) => Ok(self.rank_at(at)),
            None => {
                let local = self.shared.ranks.iter().map(|local| local.rank).collect();
                let error = Error::NotLocal { rank, local }.into();
                self.refuse(&error);
                Err(error)
            }
        }
    }
}

impl<'a> RankCalls<'_, 'a> {
    pub(super) fn make(
        &self,
        call: impl FnOnce(&RankOf<'_, 'a>) -> gpu_await::Result<()>,
    ) -> gpu_await::Result<()> {
        let (group, at) = (self.group, self.at);
        let pending = &group.pending[at];
        let written = call(&RankOf { shared: &group.shared, at, pending, is_alone: false });
        written.inspect_err(|error| group.refuse(error))
    }
}

/// A group whose closure is running: if that panics, no call is made, and what the calls would have written counts as failed.
pub(super) struct Recorded<'g, 'a>(pub(super) &'g GroupCalls<'a>);

impl Drop for Recorded<'_, '_> {
    fn drop(&mut self) {
        let GroupCalls { shared, pending, .. } = self.0;
        for (local, pending) in shared.ranks.iter().zip(pending) {
            pending.take().refuse(local, &Error::NotCalled);
        }
    }
}

impl fmt::Debug for GroupCalls<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls: usize = self.pending.iter().map(|pending| pending.borrow().calls.len()).sum();
        f.debug_struct("GroupCalls").field("calls", &calls).finish()
    }
}

impl fmt::Debug for RankCalls<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.group.shared.ranks[self.at].rank;
        f.debug_struct("RankCalls").field("rank", &rank).finish()
    }
}
