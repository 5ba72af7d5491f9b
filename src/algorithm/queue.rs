//! The verbs of a queue for reductions and selections; those for scans and sorts are beside their launches.
#![forbid(unsafe_code)]

use super::compare::Compare;
use super::launch::AlgorithmLaunch;
use super::reduce::{Reduction, place};
use super::reduce_op::ReduceBy;
use super::scalar::Scalar;
use super::select;
use super::sequence::Sequence;
use crate::batch::queue::Queue;
use crate::batch::settle::Lent;
use crate::error::Result;
use crate::memory::view::{Readable, Writable};

impl Queue<'_> {
    /// See [`Stream::sum`](crate::Stream::sum).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn sum<T: Scalar>(&self, x: &impl Sequence<T>) -> Result<Lent<T::Total>> {
        self.verb(|| self.reduce_to_host::<T, T::Total, _>(&Reduction::sum(x), |sum| sum))
    }

    /// See [`Stream::sum_into`](crate::Stream::sum_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn sum_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        out: &mut impl Writable<T::Total>,
    ) -> Result<()> {
        self.verb(|| self.reduce_to_memory::<T, T::Total>(&Reduction::sum(x), out))
    }

    /// See [`Stream::reduce`](crate::Stream::reduce).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn reduce<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        op: impl ReduceBy<T>,
        init: T,
    ) -> Result<Lent<T>> {
        self.verb(|| {
            self.reduce_to_host::<T, T, _>(&Reduction::by(x, op.operator(), init), |reduced| {
                reduced
            })
        })
    }

    /// See [`Stream::reduce_into`](crate::Stream::reduce_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn reduce_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        op: impl ReduceBy<T>,
        init: T,
        out: &mut impl Writable<T>,
    ) -> Result<()> {
        self.verb(|| self.reduce_to_memory::<T, T>(&Reduction::by(x, op.operator(), init), out))
    }

    /// See [`Stream::min`](crate::Stream::min).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn min<T: Scalar>(&self, x: &impl Sequence<T>) -> Result<Lent<T>> {
        self.verb(|| self.reduce_to_host::<T, T, _>(&Reduction::min(x), |least| least))
    }

    /// See [`Stream::min_into`](crate::Stream::min_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn min_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        out: &mut impl Writable<T>,
    ) -> Result<()> {
        self.verb(|| self.reduce_to_memory::<T, T>(&Reduction::min(x), out))
    }

    /// See [`Stream::max`](crate::Stream::max).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn max<T: Scalar>(&self, x: &impl Sequence<T>) -> Result<Lent<T>> {
        self.verb(|| self.reduce_to_host::<T, T, _>(&Reduction::max(x), |greatest| greatest))
    }

    /// See [`Stream::max_into`](crate::Stream::max_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn max_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        out: &mut impl Writable<T>,
    ) -> Result<()> {
        self.verb(|| self.reduce_to_memory::<T, T>(&Reduction::max(x), out))
    }

    /// See [`Stream::arg_min`](crate::Stream::arg_min).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn arg_min<T: Scalar>(&self, x: &impl Sequence<T>) -> Result<Lent<Option<usize>>> {
        self.verb(|| self.reduce_to_host::<T, u64, _>(&Reduction::arg_min(x), place))
    }

    /// See [`Stream::arg_min_into`](crate::Stream::arg_min_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn arg_min_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        out: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.verb(|| self.reduce_to_memory::<T, u64>(&Reduction::arg_min(x), out))
    }

    /// See [`Stream::arg_max`](crate::Stream::arg_max).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn arg_max<T: Scalar>(&self, x: &impl Sequence<T>) -> Result<Lent<Option<usize>>> {
        self.verb(|| self.reduce_to_host::<T, u64, _>(&Reduction::arg_max(x), place))
    }

    /// See [`Stream::arg_max_into`](crate::Stream::arg_max_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn arg_max_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        out: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.verb(|| self.reduce_to_memory::<T, u64>(&Reduction::arg_max(x), out))
    }

    /// See [`Stream::dot`](crate::Stream::dot).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn dot<T: Scalar>(
        &self,
        x: &impl Readable<T>,
        y: &impl Readable<T>,
    ) -> Result<Lent<T::Total>> {
        self.verb(|| {
            let products = Reduction::dot(x, y)?;
            self.reduce_to_host::<T, T::Total, _>(&products, |sum| sum)
        })
    }

    /// See [`Stream::dot_into`](crate::Stream::dot_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn dot_into<T: Scalar>(
        &self,
        x: &impl Readable<T>,
        y: &impl Readable<T>,
        out: &mut impl Writable<T::Total>,
    ) -> Result<()> {
        self.verb(|| {
            let products = Reduction::dot(x, y).map_err(|error| {
                AlgorithmLaunch::new("dot").overwrites(&out.span_mut()).refuse(error)
            })?;
            self.reduce_to_memory::<T, T::Total>(&products, out)
        })
    }

    /// See [`Stream::count_if`](crate::Stream::count_if).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn count_if<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
    ) -> Result<Lent<usize>> {
        self.verb(|| {
            let counted = Reduction::count_if(x, condition);
            let read = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
            self.reduce_to_host::<T, u64, _>(&counted, read)
        })
    }

    /// See [`Stream::count_if_into`](crate::Stream::count_if_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn count_if_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
        out: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.verb(|| {
            let counted = Reduction::count_if(x, condition);
            self.reduce_to_memory::<T, u64>(&counted, out)
        })
    }

    /// See [`Stream::copy_if`](crate::Stream::copy_if).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn copy_if<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
        selected: &mut impl Writable<T>,
    ) -> Result<Lent<usize>> {
        self.verb(|| self.select_to_host::<T>(&select::copy_if(x, condition, selected)))
    }

    /// See [`Stream::copy_if_into`](crate::Stream::copy_if_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn copy_if_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
        selected: &mut impl Writable<T>,
        count: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.verb(|| self.select_to_memory::<T>(&select::copy_if(x, condition, selected), count))
    }

    /// See [`Stream::partition`](crate::Stream::partition).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn partition<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
        selected: &mut impl Writable<T>,
        others: &mut impl Writable<T>,
    ) -> Result<Lent<usize>> {
        self.verb(|| self.select_to_host::<T>(&select::partition(x, condition, selected, others)))
    }

    /// See [`Stream::partition_into`](crate::Stream::partition_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn partition_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
        selected: &mut impl Writable<T>,
        others: &mut impl Writable<T>,
        count: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.verb(|| {
            self.select_to_memory::<T>(&select::partition(x, condition, selected, others), count)
        })
    }

    /// See [`Stream::unique`](crate::Stream::unique).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn unique<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        selected: &mut impl Writable<T>,
    ) -> Result<Lent<usize>> {
        self.verb(|| self.select_to_host::<T>(&select::unique(x, selected)))
    }

    /// See [`Stream::unique_into`](crate::Stream::unique_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn unique_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        selected: &mut impl Writable<T>,
        count: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.verb(|| self.select_to_memory::<T>(&select::unique(x, selected), count))
    }

    /// See [`Stream::run_length_encode`](crate::Stream::run_length_encode).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn run_length_encode<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        values: &mut impl Writable<T>,
        lengths: &mut impl Writable<u64>,
    ) -> Result<Lent<usize>> {
        self.verb(|| self.select_to_host::<T>(&select::run_lengths(x, values, lengths)))
    }

    /// See [`Stream::run_length_encode_into`](crate::Stream::run_length_encode_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn run_length_encode_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        values: &mut impl Writable<T>,
        lengths: &mut impl Writable<u64>,
        count: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.verb(|| self.select_to_memory::<T>(&select::run_lengths(x, values, lengths), count))
    }

    /// See [`Stream::select`](crate::Stream::select).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn select<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        flags: &impl Readable<u8>,
        selected: &mut impl Writable<T>,
    ) -> Result<Lent<usize>> {
        self.verb(|| self.select_to_host::<T>(&select::select(x, flags, selected)))
    }

    /// See [`Stream::select_into`](crate::Stream::select_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn select_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        flags: &impl Readable<u8>,
        selected: &mut impl Writable<T>,
        count: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.verb(|| self.select_to_memory::<T>(&select::select(x, flags, selected), count))
    }

    /// See [`Stream::partition_flagged`](crate::Stream::partition_flagged).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn partition_flagged<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        flags: &impl Readable<u8>,
        selected: &mut impl Writable<T>,
        others: &mut impl Writable<T>,
    ) -> Result<Lent<usize>> {
        self.verb(|| {
            self.select_to_host::<T>(&select::partition_flagged(x, flags, selected, others))
        })
    }

    /// See [`Stream::partition_flagged_into`](crate::Stream::partition_flagged_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn partition_flagged_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        flags: &impl Readable<u8>,
        selected: &mut impl Writable<T>,
        others: &mut impl Writable<T>,
        count: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.verb(|| {
            self.select_to_memory::<T>(
                &select::partition_flagged(x, flags, selected, others),
                count,
            )
        })
    }

    /// See [`Stream::positions`](crate::Stream::positions).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn positions(
        &self,
        flags: &impl Sequence<u8>,
        places: &mut impl Writable<u64>,
    ) -> Result<Lent<usize>> {
        self.verb(|| self.select_to_host::<u8>(&select::positions(flags, places)))
    }

    /// See [`Stream::positions_into`](crate::Stream::positions_into).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn positions_into(
        &self,
        flags: &impl Sequence<u8>,
        places: &mut impl Writable<u64>,
        count: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.verb(|| self.select_to_memory::<u8>(&select::positions(flags, places), count))
    }
}
