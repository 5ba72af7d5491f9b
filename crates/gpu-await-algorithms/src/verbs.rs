//! [`Algorithms`]: the verbs of streams, devices and queues, defined once.
//!
//! More than 500 lines: a one-line method for each verb, and its docs.
#![forbid(unsafe_code)]

use std::ops::RangeInclusive;

use gpu_await::sibling::{VerbParts, one};
use gpu_await::{Device, Element, Lent, Op, Queue, Readable, Result, Settle, Stream, Writable};

use super::compare::Compare;
use super::elementwise::arithmetic::Arithmetic;
use super::elementwise::formula::Formula;
use super::elementwise::operand::Written;
use super::elementwise::operands::Operands;
use super::elementwise::put;
use super::elementwise::put::Index;
use super::reduce::{Reduction, place};
use super::reduce_op::ReduceBy;
use super::scalar::Scalar;
use super::scan::ScanBy;
use super::sequence::{Sequence, SequenceMut};
use super::{histogram, reduce, rows, scan, segmented, segmented_sort, select, sort, top_k};

/// Algorithms as methods of streams, devices and queues. Sealed.
///
/// | on | a call returns |
/// |---|---|
/// | a [`Stream`], a [`PooledStream`](gpu_await::PooledStream) | an [`Op`] |
/// | a [`Device`]: its [current stream](Device::current_stream) | an [`Op`] |
/// | a [`Queue`]: in a batch, a replayed batch, a graph | a `Result`, where a value of the host is [`Lent`] |
///
/// All of them run on the device in stream order, and take memory as every operation does.
///
/// # Memory
/// On a GPU some verbs allocate scratch memory in stream order, which draws from a [reservation](Device::reserve) like a buffer: each array of it
/// is rounded up to a multiple of 512 bytes. Of `n` elements (or as many as a [`Sequence`] has at most):
///
/// | verbs | scratch memory |
/// |---|---|
/// | reductions of many elements to one value | none for a few thousand elements; otherwise at most 16 bytes for each block of the launch, five times as many as the GPU holds at once: below a MiB |
/// | scans, selections, `run_length_encode` | up to half a percent of the elements' bytes, and a KiB; a [`Reproducible`](crate::Reproducible) scan: one value per tile of some thousand elements |
/// | sorts | none for a few thousand elements; otherwise exactly the bytes of the keys, exactly those of the values, and an array of bookkeeping: at most 16 MiB and some KiB, or a third of a byte an element if that is more |
/// | segmented sorts | 8 bytes for each offset, the scratch memory of a scan of these and, for more than a few hundred elements, exactly the bytes of keys and values |
/// | `top_k`, `bottom_k` and their places | from 2^19 elements on, if at most one in 16 is wanted: `n / 8` bytes, 8 for each result, and some KiB; otherwise the bytes of the elements, for places 4 each more, and those of a sort of these |
/// | segmented reductions, rows of a matrix, histograms, [`transform`](Self::transform) and the verbs after it | none |
///
/// A result for the host is in pinned memory. The host device needs no scratch memory, but puts such a result in device memory first: 512 bytes.
///
/// # Errors
/// Memory that is read and was never written, or whose producer failed; memory of another device; out of memory; arrays and outputs of
/// lengths other than the verb requires; a lost or closed device; a GPU below compute capability 8.0, except for
/// [`transform`](Self::transform) and the verbs after it. Each verb lists what else it refuses. The outputs are then poisoned until they
/// are overwritten.
///
/// # Blocking
/// The first use for a type loads its kernels, which takes milliseconds and waits for everything that runs on the GPU: see
/// [`Preload`](crate::Preload).
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no algorithms",
    label = "not a stream",
    note = "a `Stream`, a `PooledStream`, a `Device` (its current stream) and, inside a batch, its `Queue` have them"
)]
pub trait Algorithms: sealed::Sealed {
    /// What a call returns: an [`Op`] that resolves with the value or, for a queue, a `Result` with `R`.
    type Submitted<R: Settle>;

    #[doc(hidden)]
    #[track_caller]
    fn call<R: Settle>(&self, put: impl FnOnce(&Queue<'_>) -> Result<R>) -> Self::Submitted<R>;

    // ---- many elements, one value -----------------------------------------------------------

    /// Sums the elements. Ready proves that the value is *visible to the host*.
    ///
    /// The sum of no elements is 0. Integers are summed in 64 bits, `f16` and `bf16` in `f32`. A floating
    /// point result is the same from run to run on one device, and may differ between devices in its last
    /// bits.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![1.0f32, 2.0, 3.5]).queued()?;
    /// assert_eq!(stream.sum(&x).await?, 6.5);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Sum`
    #[track_caller]
    fn sum<T: Scalar>(&self, x: &impl Sequence<T>) -> Self::Submitted<Lent<T::Total>> {
        self.call(|queue| reduce::to_host::<T, T::Total, _>(queue, &Reduction::sum(x), |sum| sum))
    }

    /// Sums the elements, on the device. The result goes to `out`, memory of one element. Ready proves
    /// *complete on the device*.
    ///
    /// See [`sum`](Self::sum).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
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
    #[track_caller]
    fn sum_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        out: &mut impl Writable<T::Total>,
    ) -> Self::Submitted<()> {
        self.call(|queue| reduce::to_memory::<T, T::Total>(queue, &Reduction::sum(x), out))
    }

    /// Combines `init` with all elements. Ready proves that the value is *visible to the host*.
    ///
    /// Without elements it is `init`. `op` is a [`ReduceOp`](crate::ReduceOp) or, for integers, a [`BitOp`](crate::BitOp). A
    /// sum or a product is an element, as in a scan: integers wrap, where [`sum`](Self::sum) does not, and `f16` and
    /// `bf16` are computed in `f32` and rounded once, at the end. A floating point result is the same from run to run
    /// on a device, and differs between devices in its last bits. A partial product that overflows or vanishes stays so: the
    /// order in which factors are multiplied depends on their number and the device. For which zero and which NaN is the least or the
    /// greatest, see [`min`](Self::min).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await_algorithms::{BitOp, ReduceOp};
    /// let x = stream.upload(vec![1u8, 2, 255]).queued()?;
    /// assert_eq!(stream.reduce(&x, ReduceOp::Sum, 10).await?, 12);
    /// assert_eq!(stream.reduce(&x, ReduceOp::Min, 10).await?, 1);
    /// assert_eq!(stream.reduce(&x, BitOp::Xor, 0).await?, 1 ^ 2 ^ 255);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Reduce`
    #[track_caller]
    fn reduce<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        op: impl ReduceBy<T>,
        init: T,
    ) -> Self::Submitted<Lent<T>> {
        self.call(|queue| {
            reduce::to_host::<T, T, _>(queue, &Reduction::by(x, op.operator(), init), |reduced| {
                reduced
            })
        })
    }

    /// Combines `init` with all elements, on the device. The result goes to `out`, memory of one element. Ready
    /// proves *complete on the device*.
    ///
    /// See [`reduce`](Self::reduce).
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Reduce`
    #[track_caller]
    fn reduce_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        op: impl ReduceBy<T>,
        init: T,
        out: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            reduce::to_memory::<T, T>(queue, &Reduction::by(x, op.operator(), init), out)
        })
    }

    /// Finds the least element. Ready proves that the value is *visible to the host*.
    ///
    /// A NaN, if there is one; without elements the greatest value of the type, an infinity for floats. For `f16`, `bf16` and `f32` it is
    /// IEEE 754's `minimum`: −0 is less than +0, and a NaN has no sign and all bits of the payload. For `f64` both zeros are equal, and
    /// all NaNs: the result is any of them.
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Min`
    #[track_caller]
    fn min<T: Scalar>(&self, x: &impl Sequence<T>) -> Self::Submitted<Lent<T>> {
        self.call(|queue| reduce::to_host::<T, T, _>(queue, &Reduction::min(x), |least| least))
    }

    /// Finds the least element, on the device. The result goes to `out`, memory of one element. Ready proves
    /// *complete on the device*.
    ///
    /// See [`min`](Self::min).
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Min`
    #[track_caller]
    fn min_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        out: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| reduce::to_memory::<T, T>(queue, &Reduction::min(x), out))
    }

    /// Finds the position of the least element, the first of equal ones; -0.0 and 0.0 are equal. Ready proves that the value is
    /// *visible to the host*.
    ///
    /// The first NaN, if there is one; `None` without elements.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![3i32, 1, 2, 1]).queued()?;
    /// assert_eq!(stream.arg_min(&x).await?, Some(1));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::ArgMin`
    #[track_caller]
    fn arg_min<T: Scalar>(&self, x: &impl Sequence<T>) -> Self::Submitted<Lent<Option<usize>>> {
        self.call(|queue| reduce::to_host::<T, u64, _>(queue, &Reduction::arg_min(x), place))
    }

    /// Finds the position of the least element, on the device. The result goes to `out`, memory of one
    /// element. Ready proves *complete on the device*.
    ///
    /// See [`arg_min`](Self::arg_min). Without elements it is `u64::MAX`.
    ///
    /// # Source
    /// CUB's `DeviceReduce``::ArgMin`
    #[track_caller]
    fn arg_min_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        out: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| reduce::to_memory::<T, u64>(queue, &Reduction::arg_min(x), out))
    }

    /// Finds the greatest element. Ready proves that the value is *visible to the host*.
    ///
    /// A NaN, if there is one; without elements the least value of the type, an infinity for floats. For zeros and NaNs it is
    /// IEEE 754's `maximum`, as [`min`](Self::min) is its `minimum`.
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Max`
    #[track_caller]
    fn max<T: Scalar>(&self, x: &impl Sequence<T>) -> Self::Submitted<Lent<T>> {
        self.call(|queue| {
            reduce::to_host::<T, T, _>(queue, &Reduction::max(x), |greatest| greatest)
        })
    }

    /// Finds the greatest element, on the device. The result goes to `out`, memory of one element. Ready proves
    /// *complete on the device*.
    ///
    /// See [`max`](Self::max).
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Max`
    #[track_caller]
    fn max_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        out: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| reduce::to_memory::<T, T>(queue, &Reduction::max(x), out))
    }

    /// Finds the position of the greatest element, the first of equal ones. Ready proves that the value is *visible to the host*.
    ///
    /// The first NaN, if there is one; `None` without elements.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![3i32, 1, 2, 1]).queued()?;
    /// assert_eq!(stream.arg_max(&x).await?, Some(0));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::ArgMax`
    #[track_caller]
    fn arg_max<T: Scalar>(&self, x: &impl Sequence<T>) -> Self::Submitted<Lent<Option<usize>>> {
        self.call(|queue| reduce::to_host::<T, u64, _>(queue, &Reduction::arg_max(x), place))
    }

    /// Finds the position of the greatest element, on the device. The result goes to `out`, memory of one
    /// element. Ready proves *complete on the device*.
    ///
    /// See [`arg_max`](Self::arg_max). Without elements it is `u64::MAX`.
    ///
    /// # Source
    /// CUB's `DeviceReduce``::ArgMax`
    #[track_caller]
    fn arg_max_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        out: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| reduce::to_memory::<T, u64>(queue, &Reduction::arg_max(x), out))
    }

    /// Sums the products of two arrays' elements. Ready proves that the value is *visible to the host*.
    ///
    /// See [`sum`](Self::sum). The arrays have the same length.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![1i32, 2, 3]).queued()?;
    /// assert_eq!(stream.dot(&x, &x).await?, 14);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Reduce`
    #[track_caller]
    fn dot<T: Scalar>(
        &self,
        x: &impl Readable<T>,
        y: &impl Readable<T>,
    ) -> Self::Submitted<Lent<T::Total>> {
        self.call(|queue| {
            let products = Reduction::dot(x, y)?;
            reduce::to_host::<T, T::Total, _>(queue, &products, |sum| sum)
        })
    }

    /// Sums the products of two arrays' elements, on the device. The result goes to `out`, memory of one
    /// element. Ready proves *complete on the device*.
    ///
    /// See [`dot`](Self::dot).
    ///
    /// # Source
    /// CUB's `DeviceReduce``::Reduce`
    #[track_caller]
    fn dot_into<T: Scalar>(
        &self,
        x: &impl Readable<T>,
        y: &impl Readable<T>,
        out: &mut impl Writable<T::Total>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            reduce::to_memory::<T, T::Total>(queue, &reduce::dot_into(x, y, out)?, out)
        })
    }

    /// Counts the elements that satisfy a condition. Ready proves that the value is *visible to the host*.
    ///
    /// See [`Compare`].
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await_algorithms::Compare;
    /// let x = stream.upload(vec![1.0f32, -2.0, 3.0]).queued()?;
    /// assert_eq!(stream.count_if(&x, Compare::Greater(0.0)).await?, 2);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceReduce``::TransformReduce`
    #[track_caller]
    fn count_if<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
    ) -> Self::Submitted<Lent<usize>> {
        self.call(|queue| {
            let counted = Reduction::count_if(x, condition);
            let read = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
            reduce::to_host::<T, u64, _>(queue, &counted, read)
        })
    }

    /// Counts the elements that satisfy a condition, on the device. The result goes to `out`, memory of one
    /// element. Ready proves *complete on the device*.
    ///
    /// See [`count_if`](Self::count_if).
    ///
    /// # Source
    /// CUB's `DeviceReduce``::TransformReduce`
    #[track_caller]
    fn count_if_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
        out: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            let counted = Reduction::count_if(x, condition);
            reduce::to_memory::<T, u64>(queue, &counted, out)
        })
    }

    // ---- each segment of an array, one value ------------------------------------------------

    /// Combines `init` with the elements of each segment: `out` has one element for each. Ready proves *complete on
    /// the device*.
    ///
    /// Segment `i` is from `offsets[i]` up to `offsets[i + 1]`, so `out` has one element less than there are
    /// offsets. Segments may be empty, which gives `init`, may overlap, and may leave elements out. A segment that
    /// exceeds the array ends with it; one that ends before it begins is empty. If only the device
    /// knows how many offsets there are ([`UpTo`](crate::UpTo)), the rest of `out` is unchanged, and must
    /// have been written. Segments are reduced as by [`reduce`](Self::reduce), by a warp each if they are short
    /// on average and by a block otherwise: one that is far longer than the others is slow. A floating point result
    /// is the same from run to run on a device, and differs between devices in its last bits.
    ///
    /// For which zero and which NaN is the least or the greatest, see [`min`](Self::min).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await_algorithms::ReduceOp;
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
    #[track_caller]
    fn segmented_reduce<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        offsets: &impl Sequence<u64>,
        op: impl ReduceBy<T>,
        init: T,
        out: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| segmented::segmented_reduce(queue, x, offsets, op, init, out))
    }

    // ---- rows of a matrix -------------------------------------------------------------------

    /// Sums each row of a matrix: `out` has one element for each. Ready proves *complete on the device*.
    ///
    /// `x` has `out.len()` rows of `columns` elements, one after the other; `f16`, `bf16` or `f32`, which are summed in `f32`. Without
    /// columns the sum is 0. The result is the same from run to run on a device. It differs in its last bits between devices, and between a
    /// matrix that begins at a multiple of 16 bytes and one that does not. For other types, and for rows of different lengths, use
    /// [`segmented_reduce`](Self::segmented_reduce).
    ///
    /// A row is read by a warp, or from 1,025 columns on by a block: a single row of millions occupies only one multiprocessor,
    /// and [`sum`](Self::sum) is faster.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongLength`](gpu_await::ErrorDetail::WrongLength): a matrix of another length.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]).queued()?;
    /// let mut sums = stream.empty(2).queued()?;
    /// stream.sum_rows(&x, 3, &mut sums).queued()?;
    /// assert_eq!(stream.download(&sums).await?, [6.0, 15.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    fn sum_rows<T: Scalar<Total = f32>>(
        &self,
        x: &impl Readable<T>,
        columns: usize,
        out: &mut impl Writable<f32>,
    ) -> Self::Submitted<()> {
        self.call(|queue| rows::sum_rows(queue, x, columns, out))
    }

    /// Finds the column of the greatest element of each row of a matrix, the first of equal ones: `out` has one element for each row. Ready proves
    /// *complete on the device*.
    ///
    /// The first NaN, if there is one, as in NumPy and PyTorch; -0.0 and 0.0 are equal. Without columns it is `u64::MAX`. For the matrix see
    /// [`sum_rows`](Self::sum_rows).
    ///
    /// # Errors
    /// [`ErrorDetail::WrongLength`](gpu_await::ErrorDetail::WrongLength): a matrix of another length.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let logits = stream.upload(vec![0.5f32, 2.0, 1.0, 7.0, 7.0, 0.0]).queued()?;
    /// let mut tokens = stream.empty(2).queued()?;
    /// stream.arg_max_rows(&logits, 3, &mut tokens).queued()?;
    /// assert_eq!(stream.download(&tokens).await?, [1, 0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    fn arg_max_rows<T: Scalar<Total = f32>>(
        &self,
        x: &impl Readable<T>,
        columns: usize,
        out: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| rows::arg_max_rows(queue, x, columns, out))
    }

    /// Computes the softmax of each row of a matrix: `exp(x - most) / sum`, where `most` is the row's greatest element and `sum` is the sum of
    /// all its `exp(x - most)`. Ready proves *complete on the device*.
    ///
    /// `x` and `out` have whole rows of `columns` elements, one after the other; `f16`, `bf16` or `f32`, computed in `f32` and rounded once. Special
    /// values are as in NumPy and PyTorch: negative infinities become 0, as masks need; a row with a NaN or an infinity, or with only negative
    /// infinities, becomes NaN. For how far results agree, see [`sum_rows`](Self::sum_rows).
    ///
    /// # Errors
    /// [`ErrorDetail::Ragged`](gpu_await::ErrorDetail::Ragged): a partial row; [`ErrorDetail::WrongLength`](gpu_await::ErrorDetail::WrongLength).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![1.0f32, 1.0, f32::NEG_INFINITY, 5.0]).queued()?;
    /// let mut y = stream.empty(4).queued()?;
    /// stream.softmax_rows(&x, 2, &mut y).queued()?;
    /// assert_eq!(stream.download(&y).await?, [0.5, 0.5, 0.0, 1.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018.
    #[track_caller]
    fn softmax_rows<T: Scalar<Total = f32>>(
        &self,
        x: &impl Readable<T>,
        columns: usize,
        out: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| rows::softmax_rows(queue, x, columns, out))
    }

    /// Normalises each row of a matrix: `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, where the variance is the mean of the squares of
    /// `x - mean`, and `gamma` and `beta` have an element for each column. Ready proves *complete on the device*.
    ///
    /// `x` and `out` have whole rows of `gamma.len()` elements, one after the other; `f16`, `bf16` or `f32`, computed in `f32` and rounded once. A
    /// row with a NaN or an infinity becomes NaN. So does a row of variance 0 if `epsilon` is 0; equal elements have variance 0 only if their mean is
    /// exact. A row whose sum, or sum of squares, overflows `f32` becomes NaN, or 0 before `gamma`. For how far results agree, see
    /// [`sum_rows`](Self::sum_rows).
    ///
    /// # Errors
    /// [`ErrorDetail::Ragged`](gpu_await::ErrorDetail::Ragged): a partial row; [`ErrorDetail::WrongLength`](gpu_await::ErrorDetail::WrongLength).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![1.0f32, 3.0, 10.0, 50.0]).queued()?;
    /// let (gamma, beta) = (stream.full(2, 2.0f32).queued()?, stream.full(2, 1.0f32).queued()?);
    /// let mut y = stream.empty(4).queued()?;
    /// stream.layer_norm_rows(&x, &gamma, &beta, 0.0, &mut y).queued()?;
    /// assert_eq!(stream.download(&y).await?, [-1.0, 3.0, -1.0, 3.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    fn layer_norm_rows<T: Scalar<Total = f32>>(
        &self,
        x: &impl Readable<T>,
        gamma: &impl Readable<T>,
        beta: &impl Readable<T>,
        epsilon: f32,
        out: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| rows::layer_norm_rows(queue, x, (gamma, beta, epsilon), out))
    }

    // ---- scans ---------------------------------------------------------------------------------

    /// Combines each element with all elements before it. Ready proves *complete on the device*.
    ///
    /// `op` is a [`ReduceOp`](crate::ReduceOp), alone or [`Reproducible`](crate::Reproducible), or for integers a
    /// [`BitOp`](crate::BitOp).
    ///
    /// The output is as long as the input. If only the device knows how many elements there are
    /// ([`UpTo`](crate::UpTo)), the rest of it is unchanged, and must have been written.
    ///
    /// Sums and products of floating point numbers differ **from run to run** on a GPU in their last bits, as each part of
    /// the array picks up whatever others have combined by then: [`Reproducible`](crate::Reproducible) gives the same bits each
    /// time, and takes about 1.6 times as long. They differ between devices as the order of the additions does: a host device adds
    /// one after the other, whose rounding errors accumulate over tens of millions of `f32`. Everything else is exact.
    ///
    /// For which zero and which NaN is the least or the greatest, see [`min`](Self::min); for `f64` it is the first of them. The first element
    /// is combined with nothing, and stays as it is.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await_algorithms::ReduceOp;
    /// let x = stream.upload(vec![1u32, 2, 3]).queued()?;
    /// let mut sums = stream.empty(3).queued()?;
    /// stream.inclusive_scan(&x, ReduceOp::Sum, &mut sums).queued()?;
    /// assert_eq!(stream.download(&sums).await?, [1, 3, 6]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceScan``::InclusiveScan`
    #[track_caller]
    fn inclusive_scan<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        op: impl ReduceBy<T>,
        out: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| scan::scan(queue, x.elements(), ScanBy::of(op, None), out))
    }

    /// Combines all elements before each with `init`. Ready proves *complete on the device*.
    ///
    /// `op` is a [`ReduceOp`](crate::ReduceOp), alone or [`Reproducible`](crate::Reproducible), or for integers a
    /// [`BitOp`](crate::BitOp).
    ///
    /// The output is as long as the input. If only the device knows how many elements there are
    /// ([`UpTo`](crate::UpTo)), the rest of it is unchanged, and must have been written.
    ///
    /// Sums and products of floating point numbers differ **from run to run** on a GPU in their last bits, as each part of
    /// the array picks up whatever others have combined by then: [`Reproducible`](crate::Reproducible) gives the same bits each
    /// time, and takes about 1.6 times as long. They differ between devices as the order of the additions does: a host device adds
    /// one after the other, whose rounding errors accumulate over tens of millions of `f32`. Everything else is exact.
    ///
    /// For which zero and which NaN is the least or the greatest, see [`min`](Self::min); for `f64` it is the first of them.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await_algorithms::ReduceOp;
    /// let x = stream.upload(vec![1u32, 2, 3]).queued()?;
    /// let mut sums = stream.empty(3).queued()?;
    /// stream.exclusive_scan(&x, ReduceOp::Sum, 10, &mut sums).queued()?;
    /// assert_eq!(stream.download(&sums).await?, [10, 11, 13]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceScan``::ExclusiveScan`
    #[track_caller]
    fn exclusive_scan<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        op: impl ReduceBy<T>,
        init: T,
        out: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| scan::scan(queue, x.elements(), ScanBy::of(op, Some(init)), out))
    }

    // ---- all elements, in another order -----------------------------------------------------

    /// Sorts the elements in place, ascending. Ready proves *complete on the device*.
    ///
    /// Floating point numbers come in the order of [`f32::total_cmp`]: -NaN, -inf, .., -0, 0, .., inf, NaN. It
    /// takes device memory as large as the elements while it runs.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let mut x = stream.upload(vec![3.0f32, -1.0, 2.0]).queued()?;
    /// stream.sort(&mut x).queued()?;
    /// assert_eq!(stream.download(&x).await?, [-1.0, 2.0, 3.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortKeys`
    #[track_caller]
    fn sort<T: Scalar>(&self, x: &mut impl SequenceMut<T>) -> Self::Submitted<()> {
        self.call(|queue| sort::sort_keys(queue, "sort", x, false))
    }

    /// Sorts the elements in place, descending. Ready proves *complete on the device*.
    ///
    /// Floating point numbers come in the reverse order of [`f32::total_cmp`]: NaN, inf, .., 0, -0, .., -inf,
    /// -NaN. It takes device memory as large as the elements while it runs.
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortKeysDescending`
    #[track_caller]
    fn sort_descending<T: Scalar>(&self, x: &mut impl SequenceMut<T>) -> Self::Submitted<()> {
        self.call(|queue| sort::sort_keys(queue, "sort_descending", x, true))
    }

    /// Sorts keys in place, the least first, and values with them. Ready proves *complete on the device*.
    ///
    /// Values of equal keys keep their order (the sort is stable). Values have 4 or 8 bytes, and begin at a multiple of that.
    /// See [`sort`](Self::sort).
    ///
    /// # Errors
    /// [`ErrorDetail::Misaligned`](gpu_await::ErrorDetail::Misaligned): values that do not begin at a multiple of their size.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
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
    #[track_caller]
    fn sort_by_key<K: Scalar, V: Element>(
        &self,
        keys: &mut impl SequenceMut<K>,
        values: &mut impl Writable<V>,
    ) -> Self::Submitted<()> {
        self.call(|queue| sort::sort_pairs(queue, "sort_by_key", keys, values, false))
    }

    /// Sorts keys in place, the greatest first, and values with them. Ready proves *complete on the device*.
    ///
    /// Values of equal keys keep their order (the sort is stable). Values have 4 or 8 bytes, and begin at a multiple of that.
    /// See [`sort_descending`](Self::sort_descending).
    ///
    /// # Errors
    /// [`ErrorDetail::Misaligned`](gpu_await::ErrorDetail::Misaligned): values that do not begin at a multiple of their size.
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortPairsDescending`
    #[track_caller]
    fn sort_by_key_descending<K: Scalar, V: Element>(
        &self,
        keys: &mut impl SequenceMut<K>,
        values: &mut impl Writable<V>,
    ) -> Self::Submitted<()> {
        self.call(|queue| sort::sort_pairs(queue, "sort_by_key_descending", keys, values, true))
    }

    /// Sorts the elements of each segment in place, the least first. Ready proves *complete on the device*.
    ///
    /// Segment `i` is from `offsets[i]` up to `offsets[i + 1]`; elements in no segment stay where they are. An offset below
    /// an earlier one counts as that one, and an offset past the end of the array as the end, so segments do
    /// not overlap. The order is that of [`sort`](Self::sort). A segment is sorted by a warp or, if it is too long for
    /// one, by a block: a few long ones leave most of the GPU idle. It takes device memory as large as the
    /// elements while it runs.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
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
    #[track_caller]
    fn segmented_sort<T: Scalar>(
        &self,
        x: &mut impl SequenceMut<T>,
        offsets: &impl Sequence<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| segmented_sort::sort_keys(queue, "segmented_sort", x, offsets, false))
    }

    /// Sorts the elements of each segment in place, the greatest first. Ready proves *complete on the device*.
    ///
    /// The order is that of [`sort_descending`](Self::sort_descending). See [`segmented_sort`](Self::segmented_sort).
    ///
    /// # Source
    /// CUB's `DeviceSegmentedSort::SortKeysDescending`
    #[track_caller]
    fn segmented_sort_descending<T: Scalar>(
        &self,
        x: &mut impl SequenceMut<T>,
        offsets: &impl Sequence<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            segmented_sort::sort_keys(queue, "segmented_sort_descending", x, offsets, true)
        })
    }

    /// Sorts the keys of each segment in place, the least first, and values with them. Ready proves *complete on the
    /// device*.
    ///
    /// Values of equal keys keep their order (the sort is stable). Values have 4 or 8 bytes, and begin at a multiple of that.
    /// See [`segmented_sort`](Self::segmented_sort).
    ///
    /// # Errors
    /// [`ErrorDetail::Misaligned`](gpu_await::ErrorDetail::Misaligned): values that do not begin at a multiple of their size.
    ///
    /// # Source
    /// CUB's `DeviceSegmentedSort::StableSortPairs`
    #[track_caller]
    fn segmented_sort_by_key<K: Scalar, V: Element>(
        &self,
        keys: &mut impl SequenceMut<K>,
        values: &mut impl Writable<V>,
        offsets: &impl Sequence<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            segmented_sort::sort_pairs(
                queue,
                "segmented_sort_by_key",
                (keys, values),
                offsets,
                false,
            )
        })
    }

    /// Sorts the keys of each segment in place, the greatest first, and values with them. Ready proves *complete on
    /// the device*.
    ///
    /// Values of equal keys keep their order (the sort is stable). Values have 4 or 8 bytes, and begin at a multiple of that.
    /// See [`segmented_sort`](Self::segmented_sort).
    ///
    /// # Errors
    /// [`ErrorDetail::Misaligned`](gpu_await::ErrorDetail::Misaligned): values that do not begin at a multiple of their size.
    ///
    /// # Source
    /// CUB's `DeviceSegmentedSort::StableSortPairsDescending`
    #[track_caller]
    fn segmented_sort_by_key_descending<K: Scalar, V: Element>(
        &self,
        keys: &mut impl SequenceMut<K>,
        values: &mut impl Writable<V>,
        offsets: &impl Sequence<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            let op = "segmented_sort_by_key_descending";
            segmented_sort::sort_pairs(queue, op, (keys, values), offsets, true)
        })
    }

    /// Writes the greatest elements, in descending order, as many as `greatest` holds. Ready proves *complete on
    /// the device*.
    ///
    /// They come in the order of [`sort_descending`](Self::sort_descending), so a NaN is greater than
    /// everything else, or less if its sign is set. If only the device knows how many elements there are
    /// ([`UpTo`](crate::UpTo)), and there are fewer, the rest of the output is unchanged, and must have been
    /// written. To get few of many elements of up to 32 bits, these are selected and sorted; otherwise all are sorted, in device
    /// memory of twice their size.
    ///
    /// # Errors
    /// More outputs than elements.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
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
    #[track_caller]
    fn top_k<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        greatest: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            top_k::top::<T>(queue, ("top_k", true), x.elements(), top_k::out(greatest), None)
        })
    }

    /// Writes the greatest elements, in descending order, and their positions. Ready proves *complete on the device*.
    ///
    /// Of equal elements the earlier ones are taken, and come first (it is stable). The arrays have the same
    /// length. See [`top_k`](Self::top_k).
    ///
    /// # Errors
    /// More outputs than elements.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
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
    #[track_caller]
    fn top_k_places<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        greatest: &mut impl Writable<T>,
        places: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            let places = Some(top_k::out(places));
            top_k::top::<T>(
                queue,
                ("top_k_places", true),
                x.elements(),
                top_k::out(greatest),
                places,
            )
        })
    }

    /// Writes the least elements, in ascending order, as many as `least` holds. Ready proves *complete on the device*.
    ///
    /// They come in the order of [`sort`](Self::sort). See [`top_k`](Self::top_k).
    ///
    /// # Errors
    /// More outputs than elements.
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortKeys`
    #[track_caller]
    fn bottom_k<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        least: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            top_k::top::<T>(queue, ("bottom_k", false), x.elements(), top_k::out(least), None)
        })
    }

    /// Writes the least elements, in ascending order, and their positions. Ready proves *complete on the device*.
    ///
    /// Of equal elements the earlier ones are taken, and come first (it is stable). The arrays have the same
    /// length. See [`bottom_k`](Self::bottom_k).
    ///
    /// # Errors
    /// More outputs than elements.
    ///
    /// # Source
    /// CUB's `DeviceRadixSort``::SortPairs`
    #[track_caller]
    fn bottom_k_places<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        least: &mut impl Writable<T>,
        places: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            let places = Some(top_k::out(places));
            top_k::top::<T>(
                queue,
                ("bottom_k_places", false),
                x.elements(),
                top_k::out(least),
                places,
            )
        })
    }

    // ---- some elements, in their order ------------------------------------------------------

    /// Copies the elements that satisfy a condition, in their order. Ready proves that the count, which it
    /// resolves with, is *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await_algorithms::Compare;
    /// let x = stream.upload(vec![4i32, -1, 5, -6]).queued()?;
    /// let mut kept = stream.zeros(4).queued()?;
    /// assert_eq!(stream.copy_if(&x, Compare::Greater(0), &mut kept).await?, 2);
    /// assert_eq!(stream.download(&kept.slice(..2)?).await?, [4, 5]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceSelect``::If`
    #[track_caller]
    fn copy_if<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
        selected: &mut impl Writable<T>,
    ) -> Self::Submitted<Lent<usize>> {
        self.call(|queue| select::to_host::<T>(queue, &select::copy_if(x, condition, selected)))
    }

    /// Copies the elements that satisfy a condition, in their order. The count goes to `count`, memory of one
    /// element: [`up_to`](crate::Sequence::up_to) passes what was selected on without a host wait. Ready
    /// proves *complete on the device*.
    ///
    /// See [`copy_if`](Self::copy_if). An output must be at least as long as the input, because its final
    /// length is not known beforehand; the rest stays as it was, and so all of it must have been written
    /// before ([`zeros`](Stream::zeros)).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::{Algorithms, Sequence};
    /// # let stream = gpu_await::Device::host().stream()?;
    /// use gpu_await_algorithms::Compare;
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
    #[track_caller]
    fn copy_if_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
        selected: &mut impl Writable<T>,
        count: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            select::to_memory::<T>(queue, &select::copy_if(x, condition, selected), count)
        })
    }

    /// Copies the elements that satisfy a condition to one place and the others to another, both in their order.
    /// Ready proves that the count, which it resolves with, is *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Source
    /// CUB's `DevicePartition::If`
    #[track_caller]
    fn partition<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
        selected: &mut impl Writable<T>,
        others: &mut impl Writable<T>,
    ) -> Self::Submitted<Lent<usize>> {
        self.call(|queue| {
            select::to_host::<T>(queue, &select::partition(x, condition, selected, others))
        })
    }

    /// Copies the elements that satisfy a condition to one place and the others to another, both in their order.
    /// The count goes to `count`, memory of one element: [`up_to`](crate::Sequence::up_to) passes what was
    /// selected on without a host wait. Ready proves *complete on the device*.
    ///
    /// See [`partition`](Self::partition). An output must be at least as long as the input, because its
    /// final length is not known beforehand; the rest stays as it was, and so all of it must have been
    /// written before ([`zeros`](Stream::zeros)).
    ///
    /// # Source
    /// CUB's `DevicePartition::If`
    #[track_caller]
    fn partition_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        condition: Compare<T>,
        selected: &mut impl Writable<T>,
        others: &mut impl Writable<T>,
        count: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            select::to_memory::<T>(queue, &select::partition(x, condition, selected, others), count)
        })
    }

    /// Copies the first of each run of equal elements. Ready proves that the count, which it resolves with, is
    /// *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let stream = gpu_await::Device::host().stream()?;
    /// let x = stream.upload(vec![1u8, 1, 2, 1]).queued()?;
    /// let mut firsts = stream.zeros(4).queued()?;
    /// assert_eq!(stream.unique(&x, &mut firsts).await?, 3);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Unique`
    #[track_caller]
    fn unique<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        selected: &mut impl Writable<T>,
    ) -> Self::Submitted<Lent<usize>> {
        self.call(|queue| select::to_host::<T>(queue, &select::unique(x, selected)))
    }

    /// Copies the first of each run of equal elements. The count goes to `count`, memory of one element:
    /// [`up_to`](crate::Sequence::up_to) passes what was selected on without a host wait. Ready proves
    /// *complete on the device*.
    ///
    /// See [`unique`](Self::unique). An output must be at least as long as the input, because its final
    /// length is not known beforehand; the rest stays as it was, and so all of it must have been written
    /// before ([`zeros`](Stream::zeros)).
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Unique`
    #[track_caller]
    fn unique_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        selected: &mut impl Writable<T>,
        count: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| select::to_memory::<T>(queue, &select::unique(x, selected), count))
    }

    /// Writes each run of equal elements as its value and its length, in their order. Ready proves that the number
    /// of runs, which it resolves with, is *visible to the host*.
    ///
    /// -0 and 0 are equal, and the value is the last of them; each NaN is a run of its own. For sorted elements these
    /// are the distinct values and how often each occurs. An output must be at least as long as the input, because the number of
    /// runs is not known beforehand; the rest stays as it was, and so all of it must have been written before
    /// ([`zeros`](Stream::zeros)). The same elements give the same outputs on every device.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
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
    #[track_caller]
    fn run_length_encode<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        values: &mut impl Writable<T>,
        lengths: &mut impl Writable<u64>,
    ) -> Self::Submitted<Lent<usize>> {
        self.call(|queue| select::to_host::<T>(queue, &select::run_lengths(x, values, lengths)))
    }

    /// Writes each run of equal elements as its value and its length, in their order. The number of runs goes to
    /// `count`, memory of one element: [`up_to`](crate::Sequence::up_to) passes them on without a host wait.
    /// Ready proves *complete on the device*.
    ///
    /// See [`run_length_encode`](Self::run_length_encode).
    ///
    /// # Source
    /// CUB's `DeviceRunLengthEncode::Encode`
    #[track_caller]
    fn run_length_encode_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        values: &mut impl Writable<T>,
        lengths: &mut impl Writable<u64>,
        count: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            select::to_memory::<T>(queue, &select::run_lengths(x, values, lengths), count)
        })
    }

    /// Copies the elements whose flag is not 0, in their order. There are as many flags as elements. Ready proves
    /// that the count, which it resolves with, is *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Flagged`
    #[track_caller]
    fn select<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        flags: &impl Readable<u8>,
        selected: &mut impl Writable<T>,
    ) -> Self::Submitted<Lent<usize>> {
        self.call(|queue| select::to_host::<T>(queue, &select::select(x, flags, selected)))
    }

    /// Copies the elements whose flag is not 0, in their order. There are as many flags as elements. The count
    /// goes to `count`, memory of one element: [`up_to`](crate::Sequence::up_to) passes what was selected on
    /// without a host wait. Ready proves *complete on the device*.
    ///
    /// See [`select`](Self::select). An output must be at least as long as the input, because its final
    /// length is not known beforehand; the rest stays as it was, and so all of it must have been written
    /// before ([`zeros`](Stream::zeros)).
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Flagged`
    #[track_caller]
    fn select_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        flags: &impl Readable<u8>,
        selected: &mut impl Writable<T>,
        count: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| select::to_memory::<T>(queue, &select::select(x, flags, selected), count))
    }

    /// Copies the elements whose flag is not 0 to one place and the others to another, both in their order. Ready
    /// proves that the count, which it resolves with, is *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Source
    /// CUB's `DevicePartition::Flagged`
    #[track_caller]
    fn partition_flagged<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        flags: &impl Readable<u8>,
        selected: &mut impl Writable<T>,
        others: &mut impl Writable<T>,
    ) -> Self::Submitted<Lent<usize>> {
        self.call(|queue| {
            select::to_host::<T>(queue, &select::partition_flagged(x, flags, selected, others))
        })
    }

    /// Copies the elements whose flag is not 0 to one place and the others to another, both in their order. The
    /// count goes to `count`, memory of one element: [`up_to`](crate::Sequence::up_to) passes what was
    /// selected on without a host wait. Ready proves *complete on the device*.
    ///
    /// See [`partition_flagged`](Self::partition_flagged). An output must be at least as long as the input,
    /// because its final length is not known beforehand; the rest stays as it was, and so all of it must have
    /// been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Source
    /// CUB's `DevicePartition::Flagged`
    #[track_caller]
    fn partition_flagged_into<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        flags: &impl Readable<u8>,
        selected: &mut impl Writable<T>,
        others: &mut impl Writable<T>,
        count: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| {
            select::to_memory::<T>(
                queue,
                &select::partition_flagged(x, flags, selected, others),
                count,
            )
        })
    }

    /// Writes the positions of the flags that are not 0, in their order. Ready proves that the count, which it
    /// resolves with, is *visible to the host*.
    ///
    /// An output must be at least as long as the input, because its final length is not known beforehand; the
    /// rest stays as it was, and so all of it must have been written before ([`zeros`](Stream::zeros)).
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Flagged`
    #[track_caller]
    fn positions(
        &self,
        flags: &impl Sequence<u8>,
        places: &mut impl Writable<u64>,
    ) -> Self::Submitted<Lent<usize>> {
        self.call(|queue| select::to_host::<u8>(queue, &select::positions(flags, places)))
    }

    /// Writes the positions of the flags that are not 0, in their order. The count goes to `count`, memory of one
    /// element: [`up_to`](crate::Sequence::up_to) passes what was selected on without a host wait. Ready
    /// proves *complete on the device*.
    ///
    /// See [`positions`](Self::positions). An output must be at least as long as the input, because its
    /// final length is not known beforehand; the rest stays as it was, and so all of it must have been
    /// written before ([`zeros`](Stream::zeros)).
    ///
    /// # Source
    /// CUB's `DeviceSelect``::Flagged`
    #[track_caller]
    fn positions_into(
        &self,
        flags: &impl Sequence<u8>,
        places: &mut impl Writable<u64>,
        count: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| select::to_memory::<u8>(queue, &select::positions(flags, places), count))
    }

    // ---- how many elements fall into each bin -----------------------------------------------

    /// Counts the elements of each bin: `counts` has as many as there are bins of the same width in `range`. Ready
    /// proves *complete on the device*.
    ///
    /// For integers, bin `b` has those for which `(x - start) * bins / (end - start + 1)`, rounded down, is `b`:
    /// `0..=255` and 256 counts make one bin per byte. For floats it is `(x - start) * (bins / (end - start))`, rounded
    /// as its type is (`f16` and `bf16` as `f32`) and then down; the end is in the last bin, or near it if there are more bins
    /// than the type counts exactly (2^24 for `f32`). Values outside the
    /// range are not counted, nor are NaNs. The counts are overwritten, and the same on every device. Up to 2048 bins
    /// are counted in shared memory; more take longer, especially where many elements are in few of them.
    ///
    /// # Errors
    /// A range that ends before it begins; for floats also one that is not finite, is empty, or is too narrow for its
    /// bins; no bin; 2^31 bins or more.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
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
    #[track_caller]
    fn histogram<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        range: RangeInclusive<T>,
        counts: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| histogram::histogram(queue, x, range, counts))
    }

    /// Counts the elements between each level and the next: `levels` has one element more than `counts`. Ready proves
    /// *complete on the device*.
    ///
    /// A bin includes its lower level but not its upper one, except for the last bin, which includes both. Levels must not
    /// decrease: otherwise each element is counted in some bin, or in none. Values outside the levels are
    /// not counted, nor are NaNs. The counts are overwritten, and the same on every device. See
    /// [`histogram`](Self::histogram).
    ///
    /// # Errors
    /// No bin; 2^31 bins or more.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
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
    #[track_caller]
    fn histogram_between<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        levels: &impl Readable<T>,
        counts: &mut impl Writable<u64>,
    ) -> Self::Submitted<()> {
        self.call(|queue| histogram::histogram_between(queue, x, levels, counts))
    }

    // ---- formulas, and other kernels that are made at first use -----------------------------

    /// Computes each element of `output` by a formula from the elements at the same index. Ready proves *complete on the device*.
    ///
    /// `operands` is a tuple with one operand for each argument of the formula, in order: a number, or `&x` for an array as long
    /// as `output`. All have one type, that of `output`, which is overwritten; `&mut` means that it is not one of the arrays
    /// ([`transform_in_place`](Self::transform_in_place) is for that). It is one launch, and a kernel node of a graph.
    ///
    /// Rows with a pitch, a [`View2`](gpu_await::View2) and for the output a [`ViewMut2`](gpu_await::ViewMut2), are passed as they are, without `&`. All
    /// have the same number of rows and row length; an array among them is taken as rows without gaps. Gaps between rows stay
    /// as they were, and must have been written in the output.
    ///
    /// # Blocking
    /// The first use of a formula on a device, for each element type, each choice of which arguments are numbers, and once more for rows, has the
    /// driver compile the kernel: this takes some milliseconds, and until everything that runs on the GPU has ended, full [queues](Stream#blocking)
    /// included. [`preload_transform`](crate::Preload::preload_transform) does that ahead, off the executor. After that it is a launch:
    /// [`Stream::launch`].
    ///
    /// # Errors
    /// [`ErrorDetail::LiteralOutOfRange`](gpu_await::ErrorDetail::LiteralOutOfRange): a number in the formula that the integer type cannot
    /// represent.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// use gpu_await_algorithms::transform;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![3.0f32, 5.0]).queued()?;
    /// let y = stream.upload(vec![4.0f32, 12.0]).queued()?;
    /// let mut out = stream.empty(2).queued()?;
    /// let hypot = transform!(|x, y| (x * x + y * y).sqrt());
    /// stream.transform(hypot, (&x, &y), &mut out).queued()?;
    /// assert_eq!(stream.download(&out).await?, [5.0, 13.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// The second and third column of a matrix of four, doubled:
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// use gpu_await_algorithms::transform;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload((0..8).collect::<Vec<u32>>()).queued()?;
    /// let mut out = stream.empty(4).queued()?;
    /// stream.transform(transform!(|x| 2 * x), (x.rows_of(4)?.slice(.., 1..3)?,), out.rows_of_mut(2)?).queued()?;
    /// assert_eq!(stream.download(&out).await?, [2, 4, 10, 12]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuLibraryLoadData` once, then `cuLaunchKernel`.
    #[track_caller]
    fn transform<'k, T: Arithmetic, F: Formula<N>, const N: usize>(
        &self,
        formula: F,
        operands: impl Operands<'k, T, N, false>,
        output: impl Written<'k, T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| put::transform(queue, formula, operands, output))
    }

    /// Replaces each element of `updated` by the result of a formula, of which it is the last argument. Ready proves *complete on
    /// the device*.
    ///
    /// `operands` is a tuple for the arguments before that, as in [`transform`](Self::transform), and `()` if there are none. All
    /// of `updated` must have been written before.
    ///
    /// # Blocking
    /// As [`transform`](Self::transform), with which it shares its kernels.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// use gpu_await_algorithms::transform;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.full(4, 10u32).queued()?;
    /// let mut y = stream.full(4, 1u32).queued()?;
    /// stream.transform_in_place(transform!(|y| y << 2), (), &mut y).queued()?;
    /// stream.transform_in_place(transform!(|a, x, y| a * x + y), (3, &x), &mut y).queued()?;
    /// assert_eq!(stream.download(&y).await?, [34; 4]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    fn transform_in_place<'k, T: Arithmetic, F: Formula<N>, const N: usize>(
        &self,
        formula: F,
        operands: impl Operands<'k, T, N, true>,
        updated: impl Written<'k, T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| put::transform_in_place(queue, formula, operands, updated))
    }

    /// Computes a comparison for each element: 1 where it holds, 0 where it does not. Ready proves *complete on the device*.
    ///
    /// The formula ends with a comparison, as `|x| x.gt(0.0) & x.lt(1.0)`; otherwise it is like [`transform`](Self::transform).
    ///
    /// # Blocking
    /// As [`transform`](Self::transform).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// use gpu_await_algorithms::transform;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![-1i32, 0, 7]).queued()?;
    /// let mut flags = stream.empty(3).queued()?;
    /// stream.transform_flags(transform!(|least, x| x.ge(least)), (0, &x), &mut flags).queued()?;
    /// assert_eq!(stream.download(&flags).await?, [0, 1, 1]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    fn transform_flags<'k, T: Arithmetic, F: Formula<N>, const N: usize>(
        &self,
        formula: F,
        operands: impl Operands<'k, T, N, false>,
        flags: impl Written<'k, u8>,
    ) -> Self::Submitted<()> {
        self.call(|queue| put::transform_flags(queue, formula, operands, flags))
    }

    /// Writes `start`, `start + step`, `start + 2 * step` and so on. Ready proves *complete on the device*.
    ///
    /// Integers wrap. Floating point numbers are `start + index * step` in `f64`, rounded once to the type: the error does not grow with the
    /// index.
    ///
    /// # Blocking
    /// The first use for a type, as [`transform`](Self::transform); [`Preload`](crate::Preload) has a method that loads it ahead.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let mut x = stream.empty(4).queued()?;
    /// stream.sequence(1.0f32, 0.5, &mut x).queued()?;
    /// assert_eq!(stream.download(&x).await?, [1.0, 1.5, 2.0, 2.5]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    fn sequence<T: Arithmetic>(
        &self,
        start: T,
        step: T,
        output: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| put::sequence(queue, start, step, output))
    }

    /// Converts each element to another number type, as `as` does. Ready proves *complete on the device*.
    ///
    /// Integers keep their lower bits. From a floating point number to an integer it truncates, saturates, and turns a NaN into 0. To a
    /// floating point number, including `f16` and `bf16`, it rounds once, to nearest, half-way cases to even.
    ///
    /// # Blocking
    /// The first use for two types, as [`transform`](Self::transform); [`preload_cast`](crate::Preload::preload_cast) loads it ahead.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![1.9f32, -3.0, 300.0, f32::NAN]).queued()?;
    /// let mut bytes = stream.empty::<u8>(4).queued()?;
    /// stream.cast(&x, &mut bytes).queued()?;
    /// assert_eq!(stream.download(&bytes).await?, [1, 0, 255, 0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    fn cast<T: Arithmetic, U: Arithmetic>(
        &self,
        source: &impl Readable<T>,
        output: &mut impl Writable<U>,
    ) -> Self::Submitted<()> {
        self.call(|queue| put::cast(queue, source, output))
    }

    /// Reads elements at indices: `output[i] = source[indices[i]]`. Ready proves *complete on the device*.
    ///
    /// `output` is as long as `indices`. An index that is not below `source.len()` reads nothing, and gives 0.
    ///
    /// # Blocking
    /// The first use for a type, as [`transform`](Self::transform); [`Preload`](crate::Preload) has a method that loads it ahead.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![10i32, 20, 30]).queued()?;
    /// let indices = stream.upload(vec![2u32, 0, 9]).queued()?;
    /// let mut out = stream.empty(3).queued()?;
    /// stream.gather(&x, &indices, &mut out).queued()?;
    /// assert_eq!(stream.download(&out).await?, [30, 10, 0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    fn gather<T: Arithmetic, I: Index>(
        &self,
        source: &impl Readable<T>,
        indices: &impl Readable<I>,
        output: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| put::gather(queue, source, indices, output))
    }

    /// Writes elements at indices: `target[indices[i]] = source[i]`. Ready proves *complete on the device*.
    ///
    /// `indices` is as long as `source`. An index that is not below `target.len()` writes nothing. If several elements go to one index, any
    /// one of them ends up there. Elements that no index names are unchanged, so all of `target` must have been written before.
    ///
    /// # Blocking
    /// The first use for a type, as [`transform`](Self::transform); [`Preload`](crate::Preload) has a method that loads it ahead.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await_algorithms::Algorithms;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![1.5f64, 2.5]).queued()?;
    /// let indices = stream.upload(vec![3u64, 0]).queued()?;
    /// let mut out = stream.zeros(4).queued()?;
    /// stream.scatter(&x, &indices, &mut out).queued()?;
    /// assert_eq!(stream.download(&out).await?, [2.5, 0.0, 0.0, 1.5]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    fn scatter<T: Arithmetic, I: Index>(
        &self,
        source: &impl Readable<T>,
        indices: &impl Readable<I>,
        target: &mut impl Writable<T>,
    ) -> Self::Submitted<()> {
        self.call(|queue| put::scatter(queue, source, indices, target))
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Stream {}
    impl Sealed for super::Device {}
    impl Sealed for super::Queue<'_> {}
}

impl Algorithms for Stream {
    type Submitted<R: Settle> = Op<R::Output>;

    fn call<R: Settle>(&self, put: impl FnOnce(&Queue<'_>) -> Result<R>) -> Op<R::Output> {
        one(self, put)
    }
}

/// On the device's [current stream](Device::current_stream).
impl Algorithms for Device {
    type Submitted<R: Settle> = Op<R::Output>;

    fn call<R: Settle>(&self, put: impl FnOnce(&Queue<'_>) -> Result<R>) -> Op<R::Output> {
        one(&self.current_stream(), put)
    }
}

impl Algorithms for Queue<'_> {
    type Submitted<R: Settle> = Result<R>;

    fn call<R: Settle>(&self, put: impl FnOnce(&Queue<'_>) -> Result<R>) -> Result<R> {
        self.verb(|| put(self))
    }
}
