//! [`GroupCalls`]: the calls of a group, as they are recorded.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use super::parts::{Draft, RankOf};
use super::shared::{OfParts, Part, Shared};
use crate::error::Error;

/// Records the calls of a [`group`](crate::Communicator::group), each for a [rank](Self::rank) in this process.
pub struct GroupCalls<'a> {
    shared: Arc<Shared>,
    parts: RefCell<OfParts<Part<'a>>>,
    /// The first refused call.
    refused: RefCell<Option<gpu_await::Error>>,
    /// If they are captured.
    draft: Option<Draft<'a>>,
}

/// Records the calls of one rank in a [`group`](crate::Communicator::group), also [in a graph](crate::GraphCalls::group). A call borrows
/// its memory until the group is submitted, and returns its errors immediately.
pub struct RankCalls<'g, 'a> {
    pub(super) group: &'g GroupCalls<'a>,
    at: usize,
}

impl<'a> GroupCalls<'a> {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        shared.wait_for_room();
        GroupCalls::of(shared, None)
    }

    /// Of calls that are captured.
    pub(super) fn in_graph(shared: &Arc<Shared>) -> Self {
        GroupCalls::of(shared, Some(Draft::new()))
    }

    fn of(shared: &Arc<Shared>, draft: Option<Draft<'a>>) -> Self {
        let (shared, parts, refused) = (shared.clone(), RefCell::default(), RefCell::default());
        GroupCalls { shared, parts, refused, draft }
    }

    pub(super) fn into_draft(self) -> Draft<'a> {
        self.draft.unwrap_or_else(Draft::new)
    }

    /// A rank by its place.
    pub(super) fn rank_at(&self, at: usize) -> RankCalls<'_, 'a> {
        RankCalls { group: self, at }
    }

    pub(super) fn into_parts(self) -> OfParts<Part<'a>> {
        self.parts.into_inner()
    }

    /// The error of the first refused call, whatever the closure did with it.
    pub(super) fn refused(&self) -> Option<gpu_await::Error> {
        self.refused.borrow_mut().take()
    }

    /// The calls are not made: what they would have written counts as failed.
    pub(super) fn fail(self, error: &gpu_await::Error) {
        for part in self.into_parts() {
            part.fail(Error::Runtime(error.clone()));
        }
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
                Err(Error::NotLocal { rank, local }.into())
            }
        }
    }
}

impl<'a> RankCalls<'_, 'a> {
    pub(super) fn make(
        &self,
        part: impl FnOnce(&RankOf<'_, 'a>) -> gpu_await::Result<Part<'a>>,
    ) -> gpu_await::Result<()> {
        let (shared, draft) = (&self.group.shared, self.group.draft.as_ref());
        match part(&RankOf { draft, ..RankOf::new(shared, self.at, false) }) {
            Ok(part) => {
                self.group.parts.borrow_mut().push(part);
                Ok(())
            }
            Err(error) => {
                self.group.refused.borrow_mut().get_or_insert_with(|| error.clone());
                Err(error)
            }
        }
    }
}

impl fmt::Debug for GroupCalls<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupCalls").field("calls", &self.parts.borrow().len()).finish()
    }
}

impl fmt::Debug for RankCalls<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.group.shared.ranks[self.at].rank;
        f.debug_struct("RankCalls").field("rank", &rank).finish()
    }
}
