//! The verbs of a communicator with one rank in this process, and of a rank in a group: each is one of [`RankOf`].
#![forbid(unsafe_code)]

use std::panic::Location;

use gpu_await::{Op, Readable, Writable};

use super::Communicator;
use super::group::RankCalls;
use super::parts::RankOf;
use super::shared::PendingCalls;
use crate::element::{CollectiveElement, Reduction};
use crate::error::Error;

impl Communicator {
    /// A single call of the only rank of this process.
    #[track_caller]
    fn alone<'a>(
        &self,
        op: &'static str,
        call: impl FnOnce(&RankOf<'_, 'a>) -> gpu_await::Result<()>,
    ) -> Op<()> {
        let shared = self.shared();
        if shared.ranks.len() != 1 {
            return shared.refused(op, Error::SeveralRanks { op, local: self.ranks() });
        }
        shared.wait_for_room();
        let pending = PendingCalls::made_at(Location::caller());
        let written = call(&RankOf { shared, at: 0, pending: &pending, is_alone: true });
        shared.run(op, [pending.into_inner()], written)
    }

    /// Sends `x` to the rank `peer`, which must [receive](Self::recv) the same number of elements. Ready proves that `x` has been
    /// read; whether it arrived is known to the receiver.
    ///
    /// # Blocking
    /// The first send between two ranks connects them, and blocks until the peer receives; see [`Communicator`](Communicator#blocking).
    ///
    /// # Errors
    /// [`Error::BadRank`]; [`Error::OwnRank`]; [`Error::SeveralRanks`]; [`Error::Lost`]; as of any operation.
    ///
    /// # Source
    /// `ncclSend`.
    #[track_caller]
    pub fn send<T: CollectiveElement, X: Readable<T>>(&self, x: &X, peer: usize) -> Op<()> {
        self.alone("send", |rank| rank.send(x, peer))
    }

    /// Receives into `y` what the rank `peer` [sends](Self::send): as many elements as `y` has. Ready proves that they are in `y`.
    ///
    /// # Blocking
    /// As [`send`](Self::send).
    ///
    /// # Errors
    /// As [`send`](Self::send).
    ///
    /// # Source
    /// `ncclRecv`.
    #[track_caller]
    pub fn recv<T: CollectiveElement, Y: Writable<T>>(&self, y: &mut Y, peer: usize) -> Op<()> {
        self.alone("recv", |rank| rank.recv(y, peer))
    }

    /// Synchronizes all ranks, on the device. Ready proves that every rank has called it and that the collectives each rank called
    /// before it are complete there. It does not wait for other streams.
    ///
    /// # Errors
    /// [`Error::SeveralRanks`]; [`Error::Lost`]; the loss of the device.
    ///
    /// # Source
    /// `ncclAllReduce`, of one element.
    #[track_caller]
    pub fn barrier(&self) -> Op<()> {
        self.alone("barrier", |rank| rank.barrier())
    }
}

impl<'a> RankCalls<'_, 'a> {
    /// See [`Communicator::send`]. In a group a rank may send to itself.
    ///
    /// # Errors
    /// [`Error::BadRank`]; as of any operation.
    pub fn send<T: CollectiveElement, X: Readable<T>>(
        &self,
        x: &'a X,
        peer: usize,
    ) -> gpu_await::Result<()> {
        self.make(|rank| rank.send(x, peer))
    }

    /// See [`Communicator::recv`].
    ///
    /// # Errors
    /// [`Error::BadRank`]; as of any operation.
    pub fn recv<T: CollectiveElement, Y: Writable<T>>(
        &self,
        y: &'a mut Y,
        peer: usize,
    ) -> gpu_await::Result<()> {
        self.make(|rank| rank.recv(y, peer))
    }

    /// See [`Communicator::barrier`].
    ///
    /// # Errors
    /// The loss of the device.
    pub fn barrier(&self) -> gpu_await::Result<()> {
        self.make(|rank| rank.barrier())
    }
}

/// Defines each verb for a communicator and for a rank in a group.
macro_rules! verbs {
    ($(
        $(#[$meta:meta])*
        $verb:ident, $in_place:ident, ($($arg:ident: $type:ty),*), $errors:literal, $source:literal, $short:literal;
    )+) => {
        impl Communicator {
            $(
                $(#[$meta])*
                ///
                /// # Errors
                #[doc = $errors]
                /// [`Error::SeveralRanks`]; [`Error::Lost`]; as of any operation.
                ///
                /// # Source
                #[doc = $source]
                #[track_caller]
                pub fn $verb<T, X, Y>(&self, x: &X, y: &mut Y $(, $arg: $type)*) -> Op<()>
                where
                    T: CollectiveElement,
                    X: Readable<T>,
                    Y: Writable<T>,
                {
                    self.alone(stringify!($verb), |rank| rank.$verb(x, y $(, $arg)*))
                }

                #[doc = $short]
                ///
                /// # Errors
                #[doc = concat!("As [`", stringify!($verb), "`](Self::", stringify!($verb), ").")]
                #[track_caller]
                pub fn $in_place<T: CollectiveElement, X: Writable<T>>(&self, x: &mut X $(, $arg: $type)*) -> Op<()> {
                    self.alone(stringify!($verb), |rank| rank.$in_place(x $(, $arg)*))
                }
            )+
        }

        impl<'a> RankCalls<'_, 'a> {
            $(
                #[doc = concat!("See [`Communicator::", stringify!($verb), "`].")]
                ///
                /// # Errors
                #[doc = $errors]
                /// As of any operation.
                pub fn $verb<T, X, Y>(&self, x: &'a X, y: &'a mut Y $(, $arg: $type)*) -> gpu_await::Result<()>
                where
                    T: CollectiveElement,
                    X: Readable<T>,
                    Y: Writable<T>,
                {
                    self.make(|rank| rank.$verb(x, y $(, $arg)*))
                }

                #[doc = concat!("See [`Communicator::", stringify!($in_place), "`].")]
                ///
                /// # Errors
                #[doc = $errors]
                /// As of any operation.
                pub fn $in_place<T: CollectiveElement, X: Writable<T>>(
                    &self,
                    x: &'a mut X $(, $arg: $type)*
                ) -> gpu_await::Result<()> {
                    self.make(|rank| rank.$in_place(x $(, $arg)*))
                }
            )+
        }
    };
}

verbs! {
    /// Reduces `x` across all ranks, element by element, into `y` on every rank. All lengths are equal. Ready proves that the result
    /// is in `y`.
    all_reduce, all_reduce_in_place, (by: Reduction),
    "[`Error::WrongLength`];", "`ncclAllReduce`.",
    "[`all_reduce`](Self::all_reduce) in place: `x` is replaced by the result.";

    /// Reduces `x` across all ranks, element by element, into `y` on the rank `root`. Other ranks do not use `y`. Ready proves that
    /// the result is in `y` on the root, and that `x` has been read on the others.
    reduce, reduce_in_place, (by: Reduction, root: usize),
    "[`Error::WrongLength`]; [`Error::BadRank`];", "`ncclReduce`.",
    "[`reduce`](Self::reduce) in place: `x` is replaced by the result on the rank `root`, and unchanged on the others.";

    /// Copies `x` of the rank `root` into `y` on every rank. Other ranks do not use `x`. Ready proves that the elements are in `y`.
    broadcast, broadcast_in_place, (root: usize),
    "[`Error::WrongLength`]; [`Error::BadRank`];", "`ncclBroadcast`.",
    "[`broadcast`](Self::broadcast) in place: `x` of the rank `root` replaces `x` on the others.";

    /// Concatenates `x` of all ranks, in rank order, into `y` on every rank; `y` has `world` times as many elements. Ready proves that they
    /// are in `y`.
    all_gather, all_gather_in_place, (),
    "[`Error::WrongLength`]; in place [`Error::NotShared`];", "`ncclAllGather`.",
    "[`all_gather`](Self::all_gather) in place: this rank contributes its own part of `x`. All of `x` must have been written before.";

    /// Reduces `x` across all ranks, element by element, and scatters the result: the *i*-th of `world` equal parts goes into `y` on rank
    /// *i*. Ready proves that this rank's part is in `y`.
    reduce_scatter, reduce_scatter_in_place, (by: Reduction),
    "[`Error::WrongLength`]; in place [`Error::NotShared`];", "`ncclReduceScatter`.",
    "[`reduce_scatter`](Self::reduce_scatter) in place: this rank's part of `x` is replaced by the result; the other parts are unspecified.";
}

impl Communicator {
    /// Sends the *i*-th of `world` equal parts of `x` to rank *i*, and receives one part from every rank into `y`, in rank order. Ready
    /// proves that all parts are in `y`.
    ///
    /// # Errors
    /// [`Error::WrongLength`]; [`Error::NotShared`]; [`Error::SeveralRanks`]; [`Error::Lost`]; as of any operation.
    ///
    /// # Source
    /// `ncclSend` and `ncclRecv`, in a group.
    #[track_caller]
    pub fn all_to_all<T, X, Y>(&self, x: &X, y: &mut Y) -> Op<()>
    where
        T: CollectiveElement,
        X: Readable<T>,
        Y: Writable<T>,
    {
        self.alone("all_to_all", |rank| rank.all_to_all(x, y))
    }
}

impl<'a> RankCalls<'_, 'a> {
    /// See [`Communicator::all_to_all`].
    ///
    /// # Errors
    /// [`Error::WrongLength`]; [`Error::NotShared`]; as of any operation.
    pub fn all_to_all<T, X, Y>(&self, x: &'a X, y: &'a mut Y) -> gpu_await::Result<()>
    where
        T: CollectiveElement,
        X: Readable<T>,
        Y: Writable<T>,
    {
        self.make(|rank| rank.all_to_all(x, y))
    }
}
