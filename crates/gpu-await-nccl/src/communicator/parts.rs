//! [`RankOf`]: the calls of one rank, checked and written to a [`PendingCalls`]; once for [verbs](super::verbs) of a communicator and of a group,
//! and of a [graph](super::in_graph).
//!
//! | verb | `x` is | `y` is |
//! |---|---|---|
//! | all_reduce | read, *n* | written, *n* |
//! | reduce | read, *n* | written by the root, *n*; left alone by others |
//! | broadcast | read by the root, *n*; left alone by others | written, *n* |
//! | all_gather | read, *n* | written, *n* a rank |
//! | reduce_scatter | read, *n* a rank | written, *n* |
//! | all_to_all | read, *n* a rank | written, *n* a rank |
//! | send, recv | read, *n* | written, *n* |
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::sync::Arc;

use gpu_await::{RawSlice, Readable, Uses, Writable};

use super::shared::{PendingCalls, Shared};
use crate::call::{Call, Verb};
use crate::element::{CollectiveElement, ElementType, Reduction, type_of};
use crate::error::Error;

type Written = gpu_await::Result<()>;

/// A rank of this process, by its index, and the calls that it makes.
pub(super) struct RankOf<'s, 'a> {
    pub(super) shared: &'s Arc<Shared>,
    pub(super) at: usize,
    pub(super) pending: &'s RefCell<PendingCalls<'a>>,
    /// It makes a single call.
    pub(super) is_alone: bool,
}

impl<'a> RankOf<'_, 'a> {
    fn rank(&self) -> usize {
        self.shared.ranks[self.at].rank
    }

    fn world(&self) -> usize {
        self.shared.world
    }

    /// Writes a call that passed its checks; otherwise its outputs fail with those of the others.
    fn make<P, C>(
        &self,
        op: &'static str,
        memory: impl FnOnce(Uses<'a>) -> Uses<'a, P>,
        checked: Result<C, Error>,
        call: impl FnOnce(P, C) -> Call,
    ) -> Written {
        let mut pending = self.pending.borrow_mut();
        let slices = pending.include(op, memory);
        pending.calls.push(call(slices, checked?));
        Ok(())
    }

    /// Memory that is read, and other memory that is written.
    fn read_write<T: CollectiveElement, X: Readable<T>, Y: Writable<T>>(
        &self,
        op: &'static str,
        (x, y): (&'a X, &'a mut Y),
        checked: Result<(Verb, usize), Error>,
    ) -> Written {
        self.make(
            op,
            |uses| uses.reads(x).writes(y),
            checked,
            |(x, y), (verb, count)| call::<T>(verb, count, x.address(), y.address()),
        )
    }

    /// Memory that is read and written.
    fn update<T: CollectiveElement, X: Writable<T>>(
        &self,
        op: &'static str,
        x: &'a mut X,
        checked: Result<(Verb, usize), Error>,
        addresses: impl FnOnce(u64, u64) -> (u64, u64),
    ) -> Written {
        self.make(
            op,
            |uses| uses.updates(x),
            checked,
            |(x,), (verb, count)| {
                let share = (count * size_of::<T>()) as u64;
                let (from, to) = addresses(x.address(), share);
                call::<T>(verb, count, from, to)
            },
        )
    }

    fn read<T: CollectiveElement, X: Readable<T>>(
        &self,
        op: &'static str,
        x: &'a X,
        checked: Result<Verb, Error>,
    ) -> Written {
        self.one(op, |uses| uses.reads(x), checked, x.len())
    }

    fn write<T: CollectiveElement, Y: Writable<T>>(
        &self,
        op: &'static str,
        y: &'a mut Y,
        checked: Result<Verb, Error>,
    ) -> Written {
        let count = y.len();
        self.one(op, |uses| uses.writes(y), checked, count)
    }

    /// Memory that is read, or that is written.
    fn one<T: CollectiveElement>(
        &self,
        op: &'static str,
        memory: impl FnOnce(Uses<'a>) -> Uses<'a, (RawSlice<T>,)>,
        checked: Result<Verb, Error>,
        count: usize,
    ) -> Written {
        let make = |(x,): (RawSlice<T>,), verb| call::<T>(verb, count, x.address(), x.address());
        self.make(op, memory, checked, make)
    }

    fn check_rank(&self, rank: usize) -> Result<(), Error> {
        let world = self.world();
        if rank < world { Ok(()) } else { Err(Error::BadRank { rank, world }) }
    }

    /// Only a group sends to its own rank.
    fn check_peer(&self, op: &'static str, rank: usize) -> Result<(), Error> {
        self.check_rank(rank)?;
        match self.is_alone && rank == self.rank() {
            true => Err(Error::OwnRank { op, rank }),
            false => Ok(()),
        }
    }

    /// The elements of each rank's share.
    fn share(&self, op: &'static str, what: &'static str, found: usize) -> Result<usize, Error> {
        let world = self.world();
        if found.is_multiple_of(world) {
            return Ok(found / world);
        }
        Err(Error::NotShared { op, what, found, world })
    }

    pub(super) fn all_reduce<T, X, Y>(&self, x: &'a X, y: &'a mut Y, by: Reduction) -> Written
    where
        T: CollectiveElement,
        X: Readable<T>,
        Y: Writable<T>,
    {
        let checked = length("all_reduce", "y", x.len(), y.len());
        let checked = checked.map(|()| (Verb::AllReduce(by), x.len()));
        self.read_write("all_reduce", (x, y), checked)
    }

    pub(super) fn all_reduce_in_place<T: CollectiveElement, X: Writable<T>>(
        &self,
        x: &'a mut X,
        by: Reduction,
    ) -> Written {
        let checked = Ok((Verb::AllReduce(by), x.len()));
        self.update("all_reduce", x, checked, |x, _| (x, x))
    }

    pub(super) fn reduce<T, X, Y>(
        &self,
        x: &'a X,
        y: &'a mut Y,
        by: Reduction,
        root: usize,
    ) -> Written
    where
        T: CollectiveElement,
        X: Readable<T>,
        Y: Writable<T>,
    {
        let (checked, verb) = (self.check_rank(root), Verb::Reduce(by, root));
        if self.rank() != root {
            return self.read("reduce", x, checked.map(|()| verb));
        }
        let checked = checked.and_then(|()| length("reduce", "y", x.len(), y.len()));
        let checked = checked.map(|()| (verb, x.len()));
        self.read_write("reduce", (x, y), checked)
    }

    pub(super) fn reduce_in_place<T: CollectiveElement, X: Writable<T>>(
        &self,
        x: &'a mut X,
        by: Reduction,
        root: usize,
    ) -> Written {
        let (checked, verb) = (self.check_rank(root), Verb::Reduce(by, root));
        if self.rank() != root {
            return self.read("reduce", &*x, checked.map(|()| verb));
        }
        let checked = checked.map(|()| (verb, x.len()));
        self.update("reduce", x, checked, |x, _| (x, x))
    }

    pub(super) fn broadcast<T, X, Y>(&self, x: &'a X, y: &'a mut Y, root: usize) -> Written
    where
        T: CollectiveElement,
        X: Readable<T>,
        Y: Writable<T>,
    {
        let (checked, verb) = (self.check_rank(root), Verb::Broadcast(root));
        if self.rank() != root {
            return self.write("broadcast", y, checked.map(|()| verb));
        }
        let checked = checked.and_then(|()| length("broadcast", "y", x.len(), y.len()));
        let checked = checked.map(|()| (verb, x.len()));
        self.read_write("broadcast", (x, y), checked)
    }

    pub(super) fn broadcast_in_place<T: CollectiveElement, X: Writable<T>>(
        &self,
        x: &'a mut X,
        root: usize,
    ) -> Written {
        let checked = self.check_rank(root).map(|()| Verb::Broadcast(root));
        match self.rank() == root {
            true => self.read("broadcast", &*x, checked),
            false => self.write("broadcast", x, checked),
        }
    }

    pub(super) fn all_gather<T, X, Y>(&self, x: &'a X, y: &'a mut Y) -> Written
    where
        T: CollectiveElement,
        X: Readable<T>,
        Y: Writable<T>,
    {
        let checked = length("all_gather", "y", self.world() * x.len(), y.len());
        let checked = checked.map(|()| (Verb::AllGather, x.len()));
        self.read_write("all_gather", (x, y), checked)
    }

    pub(super) fn all_gather_in_place<T: CollectiveElement, Y: Writable<T>>(
        &self,
        y: &'a mut Y,
    ) -> Written {
        let share = self.share("all_gather", "y", y.len()).map(|count| (Verb::AllGather, count));
        let rank = self.rank() as u64;
        self.update("all_gather", y, share, |y, share| (y + rank * share, y))
    }

    pub(super) fn reduce_scatter<T, X, Y>(&self, x: &'a X, y: &'a mut Y, by: Reduction) -> Written
    where
        T: CollectiveElement,
        X: Readable<T>,
        Y: Writable<T>,
    {
        let checked = length("reduce_scatter", "x", self.world() * y.len(), x.len());
        let checked = checked.map(|()| (Verb::ReduceScatter(by), y.len()));
        self.read_write("reduce_scatter", (x, y), checked)
    }

    pub(super) fn reduce_scatter_in_place<T: CollectiveElement, X: Writable<T>>(
        &self,
        x: &'a mut X,
        by: Reduction,
    ) -> Written {
        let share = self.share("reduce_scatter", "x", x.len());
        let share = share.map(|count| (Verb::ReduceScatter(by), count));
        let rank = self.rank() as u64;
        self.update("reduce_scatter", x, share, |x, share| (x, x + rank * share))
    }

    pub(super) fn all_to_all<T, X, Y>(&self, x: &'a X, y: &'a mut Y) -> Written
    where
        T: CollectiveElement,
        X: Readable<T>,
        Y: Writable<T>,
    {
        let checked = length("all_to_all", "y", x.len(), y.len());
        let checked = checked.and_then(|()| self.share("all_to_all", "x", x.len()));
        self.read_write("all_to_all", (x, y), checked.map(|count| (Verb::AllToAll, count)))
    }

    pub(super) fn send<T: CollectiveElement, X: Readable<T>>(
        &self,
        x: &'a X,
        peer: usize,
    ) -> Written {
        self.read("send", x, self.check_peer("send", peer).map(|()| Verb::Send(peer)))
    }

    pub(super) fn recv<T: CollectiveElement, Y: Writable<T>>(
        &self,
        y: &'a mut Y,
        peer: usize,
    ) -> Written {
        self.write("recv", y, self.check_peer("recv", peer).map(|()| Verb::Receive(peer)))
    }

    pub(super) fn barrier(&self) -> Written {
        let memory = self.shared.scratch(self.at);
        self.make(
            "barrier",
            |uses| uses,
            Ok(()),
            |(), ()| Call {
                verb: Verb::Barrier,
                element: ElementType::F32,
                count: 1,
                from: memory,
                to: memory,
            },
        )
    }
}

fn call<T: CollectiveElement>(verb: Verb, count: usize, from: u64, to: u64) -> Call {
    Call { verb, element: type_of::<T>(), count, from, to }
}

fn length(
    op: &'static str,
    what: &'static str,
    expected: usize,
    found: usize,
) -> Result<(), Error> {
    if found == expected { Ok(()) } else { Err(Error::WrongLength { op, what, expected, found }) }
}
