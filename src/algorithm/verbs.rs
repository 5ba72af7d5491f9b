//! The algorithm verbs of a stream, and of a device on its current stream: each is a batch of one.
//!
//! More than 500 lines: a method of one line for each verb, and its docs.
#![forbid(unsafe_code)]

use std::ops::RangeInclusive;

use super::compare::Compare;
use super::reduce_op::ReduceBy;
use super::scalar::Scalar;
use super::sequence::{Sequence, SequenceMut};
use crate::device::Device;
use crate::memory::Element;
use crate::memory::view::{Readable, Writable};
use crate::op::Op;
use crate::stream::Stream;
use crate::stream::verbs::verbs;

/// What the docs of every verb say.
macro_rules! blocking {
    () => {
        "# Blocking
The first use for a type loads its kernels, which takes milliseconds and waits for everything that runs on the GPU: see
[`Device::preload`](crate::Device::preload)."
    };
}

/// The errors of most verbs.
macro_rules! errors {
    () => {
        "Elements that were never written or whose producer failed; out of memory; an output of another length; a GPU below compute
capability 8.0; a lost or closed device. The outputs are then poisoned until they are overwritten."
    };
}

verbs! {
    // ---- many elements, one value -----------------------------------------------------------

    /// Sums the elements. Ready proves that the value is *visible to the host*.
    ///
    /// The sum of no elements is 0. Integers are summed in 64 bits, `f16` and `bf16` in `f32`. A floating
    /// point result is the same from run to run on one device, and may differ between devices in its last
    /// bits.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![1.0f32, 2.0, 3.5]).queued()?;
    /// assert_eq!(stream.sum(&x).await?, 6.5);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Sum`
    pub fn sum<T: Scalar>(&self, x: &impl Sequence<T>) -> Op<T::Total> {
        self.one(|queue| queue.sum(x))
    }

    /// Sums the elements, on the device. The result goes to `out`, memory of one element. Ready proves
    /// *complete on the device*.
    ///
    /// See [`sum`](Stream::sum).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![200u8; 1000]).queued()?;
    /// let mut sum = stream.empty::<u64>(1).queued()?;
    /// stream.sum_into(&x, &mut sum).queued()?;
    /// assert_eq!(stream.download(&sum).await?[0], 200_000);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Sum`
    pub fn sum_into<T: Scalar>(&self, x: &impl Sequence<T>, out: &mut impl Writable<T::Total>) -> Op<()> {
        self.one(|queue| queue.sum_into(x, out))
    }

    /// Combines `init` with all elements. Ready proves that the value is *visible to the host*.
    ///
    /// Of nothing it is `init`. `op` is a [`ReduceOp`](crate::ReduceOp), or of integers a [`BitOp`](crate::BitOp). A
    /// sum or a product is an element, as of a scan: integers wrap, where [`sum`](Stream::sum) does not, and `f16` and
    /// `bf16` are computed in `f32` and rounded once, at the end. A floating point result is the same from run to run
    /// on a device, and differs between devices in its last bits. A product that passes the ends of the type on its
    /// way stays there: in what order factors are multiplied depends on their number and the device. Which of both zeros and of NaNs is
    /// the least and the greatest, [`min`](Stream::min) says.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await::{BitOp, ReduceOp};
    /// let x = stream.upload(vec![1u8, 2, 255]).queued()?;
    /// assert_eq!(stream.reduce(&x, ReduceOp::Sum, 10).await?, 12);
    /// assert_eq!(stream.reduce(&x, ReduceOp::Min, 10).await?, 1);
    /// assert_eq!(stream.reduce(&x, BitOp::Xor, 0).await?, 1 ^ 2 ^ 255);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Reduce`
    pub fn reduce<T: Scalar>(&self, x: &impl Sequence<T>, op: impl ReduceBy<T>, init: T) -> Op<T> {
        self.one(|queue| queue.reduce(x, op, init))
    }

    /// Combines `init` with all elements, on the device. The result goes to `out`, memory of one element. Ready
    /// proves *complete on the device*.
    ///
    /// See [`reduce`](Stream::reduce).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Reduce`
    pub fn reduce_into<T: Scalar>(&self, x: &impl Sequence<T>, op: impl ReduceBy<T>, init: T, out: &mut impl Writable<T>) -> Op<()> {
        self.one(|queue| queue.reduce_into(x, op, init, out))
    }

    /// Finds the least element. Ready proves that the value is *visible to the host*.
    ///
    /// A NaN, if there is one; of nothing the greatest value of the type, an infinity for floats. Of `f16`, `bf16` and `f32` it is
    /// IEEE 754's `minimum`: −0 is less than +0, and a NaN has no sign and all bits of the payload. Of `f64` both zeros are equal, and
    /// all NaNs: it is any of them.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Min`
    pub fn min<T: Scalar>(&self, x: &impl Sequence<T>) -> Op<T> {
        self.one(|queue| queue.min(x))
    }

    /// Finds the least element, on the device. The result goes to `out`, memory of one element. Ready proves
    /// *complete on the device*.
    ///
    /// See [`min`](Stream::min).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Min`
    pub fn min_into<T: Scalar>(&self, x: &impl Sequence<T>, out: &mut impl Writable<T>) -> Op<()> {
        self.one(|queue| queue.min_into(x, out))
    }

    /// Finds where the least element is, the first of equal ones, as -0.0 and 0.0 are. Ready proves that the value is
    /// *visible to the host*.
    ///
    /// The first NaN, if there is one; `None` of nothing.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![3i32, 1, 2, 1]).queued()?;
    /// assert_eq!(stream.arg_min(&x).await?, Some(1));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::ArgMin`
    pub fn arg_min<T: Scalar>(&self, x: &impl Sequence<T>) -> Op<Option<usize>> {
        self.one(|queue| queue.arg_min(x))
    }

    /// Finds where the least element is, on the device. The result goes to `out`, memory of one element. Ready
    /// proves *complete on the device*.
    ///
    /// See [`arg_min`](Stream::arg_min). Of nothing it is `u64::MAX`.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceReduce``::ArgMin`
    pub fn arg_min_into<T: Scalar>(&self, x: &impl Sequence<T>, out: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.arg_min_into(x, out))
    }

    /// Finds the greatest element. Ready proves that the value is *visible to the host*.
    ///
    /// A NaN, if there is one; of nothing the least value of the type, an infinity for floats. Of zeros and NaNs it is
    /// IEEE 754's `maximum`, as [`min`](Stream::min) is its `minimum`.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Max`
    pub fn max<T: Scalar>(&self, x: &impl Sequence<T>) -> Op<T> {
        self.one(|queue| queue.max(x))
    }

    /// Finds the greatest element, on the device. The result goes to `out`, memory of one element. Ready proves
    /// *complete on the device*.
    ///
    /// See [`max`](Stream::max).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Max`
    pub fn max_into<T: Scalar>(&self, x: &impl Sequence<T>, out: &mut impl Writable<T>) -> Op<()> {
        self.one(|queue| queue.max_into(x, out))
    }

    /// Finds where the greatest element is, the first of equal ones. Ready proves that the value is *visible to the host*.
    ///
    /// The first NaN, if there is one; `None` of nothing.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![3i32, 1, 2, 1]).queued()?;
    /// assert_eq!(stream.arg_max(&x).await?, Some(0));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::ArgMax`
    pub fn arg_max<T: Scalar>(&self, x: &impl Sequence<T>) -> Op<Option<usize>> {
        self.one(|queue| queue.arg_max(x))
    }

    /// Finds where the greatest element is, on the device. The result goes to `out`, memory of one element. Ready
    /// proves *complete on the device*.
    ///
    /// See [`arg_max`](Stream::arg_max). Of nothing it is `u64::MAX`.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceReduce``::ArgMax`
    pub fn arg_max_into<T: Scalar>(&self, x: &impl Sequence<T>, out: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.arg_max_into(x, out))
    }

    /// Sums the products of two arrays' elements up. Ready proves that the value is *visible to the host*.
    ///
    /// See [`sum`](Stream::sum). The arrays have the same length.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![1i32, 2, 3]).queued()?;
    /// assert_eq!(stream.dot(&x, &x).await?, 14);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Reduce`
    pub fn dot<T: Scalar>(&self, x: &impl Readable<T>, y: &impl Readable<T>) -> Op<T::Total> {
        self.one(|queue| queue.dot(x, y))
    }

    /// Sums the products of two arrays' elements up, on the device. The result goes to `out`, memory of one
    /// element. Ready proves *complete on the device*.
    ///
    /// See [`dot`](Stream::dot).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Reduce`
    pub fn dot_into<T: Scalar>(&self, x: &impl Readable<T>, y: &impl Readable<T>, out: &mut impl Writable<T::Total>) -> Op<()> {
        self.one(|queue| queue.dot_into(x, y, out))
    }

    /// Counts the elements that satisfy a condition. Ready proves that the value is *visible to the host*.
    ///
    /// See [`Compare`].
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await::Compare;
    /// let x = stream.upload(vec![1.0f32, -2.0, 3.0]).queued()?;
    /// assert_eq!(stream.count_if(&x, Compare::Greater(0.0)).await?, 2);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::TransformReduce`
    pub fn count_if<T: Scalar>(&self, x: &impl Sequence<T>, condition: Compare<T>) -> Op<usize> {
        self.one(|queue| queue.count_if(x, condition))
    }

    /// Counts the elements that satisfy a condition, on the device. The result goes to `out`, memory of one
    /// element. Ready proves *complete on the device*.
    ///
    /// See [`count_if`](Stream::count_if).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceReduce``::TransformReduce`
    pub fn count_if_into<T: Scalar>(&self, x: &impl Sequence<T>, condition: Compare<T>, out: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.count_if_into(x, condition, out))
    }

    // ---- each segment of an array, one value ------------------------------------------------

    /// Combines `init` with the elements of each segment: `out` has one element for each. Ready proves *complete on
    /// the device*.
    ///
    /// Segment `i` is from `offsets[i]` up to `offsets[i + 1]`, so that `out` has one element less than there are
    /// offsets. Segments may be empty, which gives `init`, may overlap, and leave elements out. Where the array ends
    /// before a segment does, that ends there as well; one that ends before it begins is empty. Where the device
    /// alone knows how many offsets there are ([`UpTo`](crate::UpTo)), the rest of `out` stays as it was, and must
    /// have been written. A segment is reduced as by [`reduce`](Stream::reduce), by a warp where segments are short
    /// on average and by a block otherwise: one that is far longer than the others is slow. A floating point result
    /// is the same from run to run on a device, and differs between devices in its last bits.
    ///
    /// Which of both zeros and of NaNs is the least and the greatest, [`min`](Stream::min) says.
    ///
    /// # Errors
    /// Elements or offsets that were never written or whose producer failed; an output of another length; a GPU below
    /// compute capability 8.0; a lost or closed device. The output is then poisoned until it is overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await::ReduceOp;
    /// let x = stream.upload(vec![1.0f32, 2.0, 3.0, 4.0]).queued()?;
    /// let offsets = stream.upload(vec![0u64, 3, 3, 4]).queued()?;
    /// let mut sums = stream.empty(3).queued()?;
    /// stream.segmented_reduce(&x, &offsets, ReduceOp::Sum, 0.0, &mut sums).queued()?;
    /// assert_eq!(stream.download(&sums).await?, [6.0, 0.0, 4.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceSegmentedReduce::Reduce`
    pub fn segmented_reduce<T: Scalar>(&self, x: &impl Sequence<T>, offsets: &impl Sequence<u64>, op: impl ReduceBy<T>, init: T, out: &mut impl Writable<T>) -> Op<()> {
        self.one(|queue| queue.segmented_reduce(x, offsets, op, init, out))
    }

    // ---- scans ---------------------------------------------------------------------------------

    /// Combines each element with all before it. Ready proves *complete on the device*.
    ///
    /// `op` is a [`ReduceOp`](crate::ReduceOp), alone or [`Reproducible`](crate::Reproducible), or of integers a
    /// [`BitOp`](crate::BitOp).
    ///
    /// The output is as long as the input. Where the device alone knows how many elements there are
    /// ([`UpTo`](crate::UpTo)), the rest of it stays as it was, and must have been written.
    ///
    /// Sums and products of floating point numbers differ **from run to run** on a GPU in their last bits, as each part of
    /// the array takes up what others have combined by then: [`Reproducible`](crate::Reproducible) gives the same bits each
    /// time, in about 1.6 times as long. They differ between devices as the order of the additions does: a host device adds
    /// one after the other, whose rounding adds up over tens of millions of `f32`. Everything else is exact.
    ///
    /// Which of both zeros and of NaNs is the least and the greatest, [`min`](Stream::min) says; of `f64` it is the first of them.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await::ReduceOp;
    /// let x = stream.upload(vec![1u32, 2, 3]).queued()?;
    /// let mut sums = stream.empty(3).queued()?;
    /// stream.inclusive_scan(&x, ReduceOp::Sum, &mut sums).queued()?;
    /// assert_eq!(stream.download(&sums).await?, [1, 3, 6]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceScan``::InclusiveScan`
    pub fn inclusive_scan<T: Scalar>(&self, x: &impl Sequence<T>, op: impl ReduceBy<T>, out: &mut impl Writable<T>) -> Op<()> {
        self.one(|queue| queue.inclusive_scan(x, op, out))
    }

    /// Combines all elements before each with `init`. Ready proves *complete on the device*.
    ///
    /// `op` is a [`ReduceOp`](crate::ReduceOp), alone or [`Reproducible`](crate::Reproducible), or of integers a
    /// [`BitOp`](crate::BitOp).
    ///
    /// The output is as long as the input. Where the device alone knows how many elements there are
    /// ([`UpTo`](crate::UpTo)), the rest of it stays as it was, and must have been written.
    ///
    /// Sums and products of floating point numbers differ **from run to run** on a GPU in their last bits, as each part of
    /// the array takes up what others have combined by then: [`Reproducible`](crate::Reproducible) gives the same bits each
    /// time, in about 1.6 times as long. They differ between devices as the order of the additions does: a host device adds
    /// one after the other, whose rounding adds up over tens of millions of `f32`. Everything else is exact.
    ///
    /// Which of both zeros and of NaNs is the least and the greatest, [`min`](Stream::min) says; of `f64` it is the first of them.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await::ReduceOp;
    /// let x = stream.upload(vec![1u32, 2, 3]).queued()?;
    /// let mut sums = stream.empty(3).queued()?;
    /// stream.exclusive_scan(&x, ReduceOp::Sum, 10, &mut sums).queued()?;
    /// assert_eq!(stream.download(&sums).await?, [10, 11, 13]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceScan``::ExclusiveScan`
    pub fn exclusive_scan<T: Scalar>(&self, x: &impl Sequence<T>, op: impl ReduceBy<T>, init: T, out: &mut impl Writable<T>) -> Op<()> {
        self.one(|queue| queue.exclusive_scan(x, op, init, out))
    }

    // ---- all elements, in another order -----------------------------------------------------

    /// Sorts the elements in place, the least first. Ready proves *complete on the device*.
    ///
    /// Floating point numbers come in the order of [`f32::total_cmp`]: -NaN, -inf, .., -0, 0, .., inf, NaN. It
    /// takes device memory as large as the elements while it runs.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let mut x = stream.upload(vec![3.0f32, -1.0, 2.0]).queued()?;
    /// stream.sort(&mut x).queued()?;
    /// assert_eq!(stream.download(&x).await?, [-1.0, 2.0, 3.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortKeys`
    pub fn sort<T: Scalar>(&self, x: &mut impl SequenceMut<T>) -> Op<()> {
        self.one(|queue| queue.sort(x))
    }

    /// Sorts the elements in place, the greatest first. Ready proves *complete on the device*.
    ///
    /// Floating point numbers come in the reverse order of [`f32::total_cmp`]: NaN, inf, .., 0, -0, .., -inf,
    /// -NaN. It takes device memory as large as the elements while it runs.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortKeysDescending`
    pub fn sort_descending<T: Scalar>(&self, x: &mut impl SequenceMut<T>) -> Op<()> {
        self.one(|queue| queue.sort_descending(x))
    }

    /// Sorts keys in place, the least first, and values with them. Ready proves *complete on the device*.
    ///
    /// Values of equal keys stay in their order (it is stable). Values have 4 or 8 bytes, and begin at a multiple of that.
    /// See [`sort`](Stream::sort).
    ///
    /// # Errors
    /// [`ErrorDetail::Misaligned`](crate::ErrorDetail::Misaligned): values that do not begin at a multiple of their size.
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let mut keys = stream.upload(vec![2u8, 1, 2]).queued()?;
    /// let mut values = stream.upload(vec![10u32, 20, 30]).queued()?;
    /// stream.sort_by_key(&mut keys, &mut values).queued()?;
    /// assert_eq!(stream.download(&values).await?, [20, 10, 30]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortPairs`
    pub fn sort_by_key<K: Scalar, V: Element>(&self, keys: &mut impl SequenceMut<K>, values: &mut impl Writable<V>) -> Op<()> {
        self.one(|queue| queue.sort_by_key(keys, values))
    }

    /// Sorts keys in place, the greatest first, and values with them. Ready proves *complete on the device*.
    ///
    /// Values of equal keys stay in their order (it is stable). Values have 4 or 8 bytes, and begin at a multiple of that. See
    /// [`sort_descending`](Stream::sort_descending).
    ///
    /// # Errors
    /// [`ErrorDetail::Misaligned`](crate::ErrorDetail::Misaligned): values that do not begin at a multiple of their size.
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortPairsDescending`
    pub fn sort_by_key_descending<K: Scalar, V: Element>(&self, keys: &mut impl SequenceMut<K>, values: &mut impl Writable<V>) -> Op<()> {
        self.one(|queue| queue.sort_by_key_descending(keys, values))
    }

    /// Sorts the elements of each segment in place, the least first. Ready proves *complete on the device*.
    ///
    /// Segment `i` is from `offsets[i]` up to `offsets[i + 1]`; what is in no segment stays where it is. An offset that
    /// is below one in front of it counts as that one, and one past the end of the array as that, so that segments do
    /// not overlap. The order is that of [`sort`](Stream::sort). A segment is sorted by a warp or, if it is longer than
    /// that holds, by a block: a few long ones leave most of the GPU idle. It takes device memory as large as the
    /// elements while it runs.
    ///
    /// # Errors
    /// Elements or offsets that were never written or whose producer failed; out of memory; a GPU below compute
    /// capability 8.0; a lost or closed device. The arrays are then poisoned until they are overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let mut x = stream.upload(vec![3i32, 1, 2, 9, 7, 8]).queued()?;
    /// let offsets = stream.upload(vec![0u64, 3, 5]).queued()?;
    /// stream.segmented_sort(&mut x, &offsets).queued()?;
    /// assert_eq!(stream.download(&x).await?, [1, 2, 3, 7, 9, 8]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceSegmentedSort::SortKeys`
    pub fn segmented_sort<T: Scalar>(&self, x: &mut impl SequenceMut<T>, offsets: &impl Sequence<u64>) -> Op<()> {
        self.one(|queue| queue.segmented_sort(x, offsets))
    }

    /// Sorts the elements of each segment in place, the greatest first. Ready proves *complete on the device*.
    ///
    /// The order is that of [`sort_descending`](Stream::sort_descending). See [`segmented_sort`](Stream::segmented_sort).
    ///
    /// # Errors
    /// Elements or offsets that were never written or whose producer failed; out of memory; a GPU below compute
    /// capability 8.0; a lost or closed device. The arrays are then poisoned until they are overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceSegmentedSort::SortKeysDescending`
    pub fn segmented_sort_descending<T: Scalar>(&self, x: &mut impl SequenceMut<T>, offsets: &impl Sequence<u64>) -> Op<()> {
        self.one(|queue| queue.segmented_sort_descending(x, offsets))
    }

    /// Sorts the keys of each segment in place, the least first, and values with them. Ready proves *complete on the
    /// device*.
    ///
    /// Values of equal keys stay in their order (it is stable). Values have 4 or 8 bytes, and begin at a multiple of that. See
    /// [`segmented_sort`](Stream::segmented_sort).
    ///
    /// # Errors
    /// [`ErrorDetail::Misaligned`](crate::ErrorDetail::Misaligned): values that do not begin at a multiple of their size.
    /// Elements or offsets that were never written or whose producer failed; out of memory; values of another length; a GPU below compute
    /// capability 8.0; a lost or closed device. The arrays are then poisoned until they are overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceSegmentedSort::StableSortPairs`
    pub fn segmented_sort_by_key<K: Scalar, V: Element>(&self, keys: &mut impl SequenceMut<K>, values: &mut impl Writable<V>, offsets: &impl Sequence<u64>) -> Op<()> {
        self.one(|queue| queue.segmented_sort_by_key(keys, values, offsets))
    }

    /// Sorts the keys of each segment in place, the greatest first, and values with them. Ready proves *complete on
    /// the device*.
    ///
    /// Values of equal keys stay in their order (it is stable). Values have 4 or 8 bytes, and begin at a multiple of that. See
    /// [`segmented_sort`](Stream::segmented_sort).
    ///
    /// # Errors
    /// [`ErrorDetail::Misaligned`](crate::ErrorDetail::Misaligned): values that do not begin at a multiple of their size.
    /// Elements or offsets that were never written or whose producer failed; out of memory; values of another length; a GPU below compute
    /// capability 8.0; a lost or closed device. The arrays are then poisoned until they are overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceSegmentedSort::StableSortPairsDescending`
    pub fn segmented_sort_by_key_descending<K: Scalar, V: Element>(&self, keys: &mut impl SequenceMut<K>, values: &mut impl Writable<V>, offsets: &impl Sequence<u64>) -> Op<()> {
        self.one(|queue| queue.segmented_sort_by_key_descending(keys, values, offsets))
    }

    /// Writes the greatest elements, the greatest first, as many as `greatest` has. Ready proves *complete on the
    /// device*.
    ///
    /// They come in the order of [`sort_descending`](Stream::sort_descending), so that a NaN is greater than
    /// everything else, and one whose sign is set less. Where the device alone knows how many elements there are
    /// ([`UpTo`](crate::UpTo)), and these are less, the rest of the output stays as it was, and must have been
    /// written. Of many elements of up to 32 bits, few are selected and sorted; otherwise all are, in device memory
    /// of twice as much as they have.
    ///
    /// # Errors
    /// More of them than elements; elements that were never written or whose producer failed; out of memory; a GPU
    /// below compute capability 8.0; a lost or closed device. The outputs are then poisoned until they are
    /// overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![3.0f32, -1.0, 7.0, 2.0]).queued()?;
    /// let mut greatest = stream.empty(2).queued()?;
    /// stream.top_k(&x, &mut greatest).queued()?;
    /// assert_eq!(stream.download(&greatest).await?, [7.0, 3.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceTopK::MaxKeys`, `DeviceRadixSort``::SortKeysDescending`
    pub fn top_k<T: Scalar>(&self, x: &impl Sequence<T>, greatest: &mut impl Writable<T>) -> Op<()> {
        self.one(|queue| queue.top_k(x, greatest))
    }

    /// Writes the greatest elements, the greatest first, and where each is. Ready proves *complete on the device*.
    ///
    /// Of equal ones those in front are taken, and come first (it is stable). The arrays have the same length. See
    /// [`top_k`](Stream::top_k).
    ///
    /// # Errors
    /// More of them than elements; elements that were never written or whose producer failed; out of memory; a GPU
    /// below compute capability 8.0; a lost or closed device. The outputs are then poisoned until they are
    /// overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![3i32, 7, 1, 7, 3]).queued()?;
    /// let (mut greatest, mut places) = (stream.empty(3).queued()?, stream.empty(3).queued()?);
    /// stream.top_k_places(&x, &mut greatest, &mut places).queued()?;
    /// assert_eq!(stream.download(&greatest).await?, [7, 7, 3]);
    /// assert_eq!(stream.download(&places).await?, [1, 3, 0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortPairsDescending`
    pub fn top_k_places<T: Scalar>(&self, x: &impl Sequence<T>, greatest: &mut impl Writable<T>, places: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.top_k_places(x, greatest, places))
    }

    /// Writes the least elements, the least first, as many as `least` has. Ready proves *complete on the device*.
    ///
    /// They come in the order of [`sort`](Stream::sort). See [`top_k`](Stream::top_k).
    ///
    /// # Errors
    /// More of them than elements; elements that were never written or whose producer failed; out of memory; a GPU
    /// below compute capability 8.0; a lost or closed device. The outputs are then poisoned until they are
    /// overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortKeys`
    pub fn bottom_k<T: Scalar>(&self, x: &impl Sequence<T>, least: &mut impl Writable<T>) -> Op<()> {
        self.one(|queue| queue.bottom_k(x, least))
    }

    /// Writes the least elements, the least first, and where each is. Ready proves *complete on the device*.
    ///
    /// Of equal ones those in front are taken, and come first (it is stable). The arrays have the same length. See
    /// [`bottom_k`](Stream::bottom_k).
    ///
    /// # Errors
    /// More of them than elements; elements that were never written or whose producer failed; out of memory; a GPU
    /// below compute capability 8.0; a lost or closed device. The outputs are then poisoned until they are
    /// overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortPairs`
    pub fn bottom_k_places<T: Scalar>(&self, x: &impl Sequence<T>, least: &mut impl Writable<T>, places: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.bottom_k_places(x, least, places))
    }

    // ---- some elements, in their order ------------------------------------------------------

    /// Copies the elements that satisfy a condition, in their order. Ready proves that the count, which it
    /// resolves with, is *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await::Compare;
    /// let x = stream.upload(vec![4i32, -1, 5, -6]).queued()?;
    /// let mut kept = stream.zeros(4).queued()?;
    /// assert_eq!(stream.copy_if(&x, Compare::Greater(0), &mut kept).await?, 2);
    /// assert_eq!(stream.download(&kept.slice(..2)?).await?, [4, 5]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceSelect``::If`
    pub fn copy_if<T: Scalar>(&self, x: &impl Sequence<T>, condition: Compare<T>, selected: &mut impl Writable<T>) -> Op<usize> {
        self.one(|queue| queue.copy_if(x, condition, selected))
    }

    /// Copies the elements that satisfy a condition, in their order. The count goes to `count`, memory of one
    /// element: [`up_to`](crate::DeviceBuffer::up_to) passes what was selected on without a host wait. Ready
    /// proves *complete on the device*.
    ///
    /// See [`copy_if`](Stream::copy_if). An output must be at least as long as the input, because its final
    /// length is not known beforehand; the rest stays as it was, and so all of it must have been written
    /// before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await::Compare;
    /// let x = stream.upload(vec![4i32, -1, 5, -6]).queued()?;
    /// let mut kept = stream.zeros(4).queued()?;
    /// let mut count = stream.empty::<u64>(1).queued()?;
    /// stream.copy_if_into(&x, Compare::Greater(0), &mut kept, &mut count).queued()?;
    /// assert_eq!(stream.sum(&kept.up_to(&count)?).await?, 9);       // the one host wait
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceSelect``::If`
    pub fn copy_if_into<T: Scalar>(&self, x: &impl Sequence<T>, condition: Compare<T>, selected: &mut impl Writable<T>, count: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.copy_if_into(x, condition, selected, count))
    }

    /// Copies the elements that satisfy a condition to one place and the others to another, both in their order.
    /// Ready proves that the count, which it resolves with, is *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DevicePartition::If`
    pub fn partition<T: Scalar>(&self, x: &impl Sequence<T>, condition: Compare<T>, selected: &mut impl Writable<T>, others: &mut impl Writable<T>) -> Op<usize> {
        self.one(|queue| queue.partition(x, condition, selected, others))
    }

    /// Copies the elements that satisfy a condition to one place and the others to another, both in their order.
    /// The count goes to `count`, memory of one element: [`up_to`](crate::DeviceBuffer::up_to) passes what was
    /// selected on without a host wait. Ready proves *complete on the device*.
    ///
    /// See [`partition`](Stream::partition). An output must be at least as long as the input, because its
    /// final length is not known beforehand; the rest stays as it was, and so all of it must have been
    /// written before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DevicePartition::If`
    pub fn partition_into<T: Scalar>(&self, x: &impl Sequence<T>, condition: Compare<T>, selected: &mut impl Writable<T>, others: &mut impl Writable<T>, count: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.partition_into(x, condition, selected, others, count))
    }

    /// Copies the first of each run of equal elements. Ready proves that the count, which it resolves with, is
    /// *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![1u8, 1, 2, 1]).queued()?;
    /// let mut firsts = stream.zeros(4).queued()?;
    /// assert_eq!(stream.unique(&x, &mut firsts).await?, 3);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Unique`
    pub fn unique<T: Scalar>(&self, x: &impl Sequence<T>, selected: &mut impl Writable<T>) -> Op<usize> {
        self.one(|queue| queue.unique(x, selected))
    }

    /// Copies the first of each run of equal elements. The count goes to `count`, memory of one element:
    /// [`up_to`](crate::DeviceBuffer::up_to) passes what was selected on without a host wait. Ready proves
    /// *complete on the device*.
    ///
    /// See [`unique`](Stream::unique). An output must be at least as long as the input, because its final
    /// length is not known beforehand; the rest stays as it was, and so all of it must have been written
    /// before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Unique`
    pub fn unique_into<T: Scalar>(&self, x: &impl Sequence<T>, selected: &mut impl Writable<T>, count: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.unique_into(x, selected, count))
    }

    /// Writes each run of equal elements as its value and its length, in their order. Ready proves that the number
    /// of runs, which it resolves with, is *visible to the host*.
    ///
    /// -0 and 0 are equal, and the value is the last of them; each NaN is a run of its own. Of sorted elements these
    /// are the distinct ones and how often each is there. An output is at least as long as the input, as nobody
    /// knows before how many runs there are; the rest stays as it was, and so all of it must have been written
    /// before ([`zeros`](Stream::zeros)). The same elements give the same outputs on every device.
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![5u8, 5, 2, 2, 2, 5]).queued()?;
    /// let (mut values, mut lengths) = (stream.zeros(6).queued()?, stream.zeros(6).queued()?);
    /// let runs = stream.run_length_encode(&x, &mut values, &mut lengths).await?;
    /// assert_eq!(stream.download(&values).await?[..runs], [5, 2, 5]);
    /// assert_eq!(stream.download(&lengths).await?[..runs], [2, 3, 1]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceRunLengthEncode::Encode`
    pub fn run_length_encode<T: Scalar>(&self, x: &impl Sequence<T>, values: &mut impl Writable<T>, lengths: &mut impl Writable<u64>) -> Op<usize> {
        self.one(|queue| queue.run_length_encode(x, values, lengths))
    }

    /// Writes each run of equal elements as its value and its length, in their order. The number of runs goes to
    /// `count`, memory of one element: [`up_to`](crate::DeviceBuffer::up_to) passes them on without a host wait.
    /// Ready proves *complete on the device*.
    ///
    /// See [`run_length_encode`](Stream::run_length_encode).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceRunLengthEncode::Encode`
    pub fn run_length_encode_into<T: Scalar>(&self, x: &impl Sequence<T>, values: &mut impl Writable<T>, lengths: &mut impl Writable<u64>, count: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.run_length_encode_into(x, values, lengths, count))
    }

    /// Copies the elements whose flag is not 0, in their order. There are as many flags as elements. Ready proves
    /// that the count, which it resolves with, is *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Flagged`
    pub fn select<T: Scalar>(&self, x: &impl Sequence<T>, flags: &impl Readable<u8>, selected: &mut impl Writable<T>) -> Op<usize> {
        self.one(|queue| queue.select(x, flags, selected))
    }

    /// Copies the elements whose flag is not 0, in their order. There are as many flags as elements. The count
    /// goes to `count`, memory of one element: [`up_to`](crate::DeviceBuffer::up_to) passes what was selected on
    /// without a host wait. Ready proves *complete on the device*.
    ///
    /// See [`select`](Stream::select). An output must be at least as long as the input, because its final
    /// length is not known beforehand; the rest stays as it was, and so all of it must have been written
    /// before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Flagged`
    pub fn select_into<T: Scalar>(&self, x: &impl Sequence<T>, flags: &impl Readable<u8>, selected: &mut impl Writable<T>, count: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.select_into(x, flags, selected, count))
    }

    /// Copies the elements whose flag is not 0 to one place and the others to another, both in their order. Ready
    /// proves that the count, which it resolves with, is *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DevicePartition::Flagged`
    pub fn partition_flagged<T: Scalar>(&self, x: &impl Sequence<T>, flags: &impl Readable<u8>, selected: &mut impl Writable<T>, others: &mut impl Writable<T>) -> Op<usize> {
        self.one(|queue| queue.partition_flagged(x, flags, selected, others))
    }

    /// Copies the elements whose flag is not 0 to one place and the others to another, both in their order. The
    /// count goes to `count`, memory of one element: [`up_to`](crate::DeviceBuffer::up_to) passes what was
    /// selected on without a host wait. Ready proves *complete on the device*.
    ///
    /// See [`partition_flagged`](Stream::partition_flagged). An output must be at least as long as the input,
    /// because its final length is not known beforehand; the rest stays as it was, and so all of it must have
    /// been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DevicePartition::Flagged`
    pub fn partition_flagged_into<T: Scalar>(&self, x: &impl Sequence<T>, flags: &impl Readable<u8>, selected: &mut impl Writable<T>, others: &mut impl Writable<T>, count: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.partition_flagged_into(x, flags, selected, others, count))
    }

    /// Writes the positions of the flags that are not 0, in their order. Ready proves that the count, which it
    /// resolves with, is *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Flagged`
    pub fn positions(&self, flags: &impl Sequence<u8>, places: &mut impl Writable<u64>) -> Op<usize> {
        self.one(|queue| queue.positions(flags, places))
    }

    /// Writes the positions of the flags that are not 0, in their order. The count goes to `count`, memory of one
    /// element: [`up_to`](crate::DeviceBuffer::up_to) passes what was selected on without a host wait. Ready
    /// proves *complete on the device*.
    ///
    /// See [`positions`](Stream::positions). An output must be at least as long as the input, because its
    /// final length is not known beforehand; the rest stays as it was, and so all of it must have been
    /// written before ([`zeros`](Stream::zeros)).
    ///
    /// # Errors
    #[doc = errors!()]
    ///
    #[doc = blocking!()]
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Flagged`
    pub fn positions_into(&self, flags: &impl Sequence<u8>, places: &mut impl Writable<u64>, count: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.positions_into(flags, places, count))
    }

    // ---- how many elements fall into each bin -----------------------------------------------

    /// Counts the elements of each bin: `counts` has as many as there are bins of the same width in `range`. Ready
    /// proves *complete on the device*.
    ///
    /// Of integers bin `b` has those for which `(x - start) * bins / (end - start + 1)`, rounded down, is `b`:
    /// `0..=255` and 256 counts are a bin a byte. Of floats it is `(x - start) * (bins / (end - start))`, rounded
    /// as its type is (`f16` and `bf16` as `f32`) and then down; the end is in the last bin. What is outside of the
    /// range is not counted, nor is a NaN. The counts are overwritten, and the same on every device. Up to 2048 bins
    /// are counted in shared memory; more take longer, most of all where many elements are in few of them.
    ///
    /// # Errors
    /// A range that ends before it begins; of floats also one that is not finite, is empty, or is too narrow for its
    /// bins; no bin; 2^31 bins or more. Elements that were never written or whose producer failed; out of memory; a
    /// GPU below compute capability 8.0; a lost or closed device. The counts are then poisoned until they are
    /// overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![0.1f32, 0.2, 0.6, 1.0, 7.0]).queued()?;
    /// let mut counts = stream.empty(4).queued()?;
    /// stream.histogram(&x, 0.0..=1.0, &mut counts).queued()?;
    /// assert_eq!(stream.download(&counts).await?, [2, 0, 1, 1]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceHistogram::HistogramEven`
    pub fn histogram<T: Scalar>(&self, x: &impl Sequence<T>, range: RangeInclusive<T>, counts: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.histogram(x, range, counts))
    }

    /// Counts the elements between each level and the next: `levels` has one more than `counts`. Ready proves
    /// *complete on the device*.
    ///
    /// A bin has its lower level, and not its upper one, but for the last bin, which has both. No level is below the
    /// one before it: otherwise each element is counted in some bin, or in none. What is outside of the levels is
    /// not counted, nor is a NaN. The counts are overwritten, and the same on every device. See
    /// [`histogram`](Stream::histogram).
    ///
    /// # Errors
    /// Levels of another length; no bin; 2^31 bins or more. Elements or levels that were never written or whose
    /// producer failed; out of memory; a GPU below compute capability 8.0; a lost or closed device. The counts are
    /// then poisoned until they are overwritten.
    ///
    #[doc = blocking!()]
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let ages = stream.upload(vec![3u8, 17, 18, 40, 65, 90]).queued()?;
    /// let levels = stream.upload(vec![0u8, 18, 65, 255]).queued()?;
    /// let mut counts = stream.empty(3).queued()?;
    /// stream.histogram_between(&ages, &levels, &mut counts).queued()?;
    /// assert_eq!(stream.download(&counts).await?, [2, 2, 2]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceHistogram::HistogramRange`
    pub fn histogram_between<T: Scalar>(&self, x: &impl Sequence<T>, levels: &impl Readable<T>, counts: &mut impl Writable<u64>) -> Op<()> {
        self.one(|queue| queue.histogram_between(x, levels, counts))
    }
}
