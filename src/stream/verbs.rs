//! The verbs of [`Stream`] and [`Device`], defined once.
//!
//! Each is written as a method of [`Stream`], a [`batch`](Stream::batch) of one; [`verbs!`] gives [`Device`] the same method, on the
//! device's current stream (`every_verb_of_a_device_goes_to_the_current_stream`).
//!
//! More than 500 lines: a one-line method for each verb, with its docs.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::batch::pieces::CopyBy;
use crate::batch::queue::Queue;
use crate::batch::region::{Region, RunOf};
use crate::batch::settle::Settle;
use crate::batch::source::Source;
use crate::device::Device;
use crate::error::refused::{Here, Refused};
use crate::error::{ErrorDetail, EventProblem, Result};
use crate::event::Event;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::copy_2d::Copy2d;
use crate::memory::pinned::PinnedBuffer;
use crate::memory::slab::DeviceSlab;
use crate::memory::view::{Readable, View, ViewMut, Writable};
use crate::memory::{Element, Number};
use crate::op::Op;
use crate::stream::{Marks, Stream};

impl Stream {
    /// A batch of one call.
    #[track_caller]
    #[inline]
    pub(crate) fn one<R: Settle>(
        &self,
        call: impl FnOnce(&Queue<'_>) -> Result<R>,
    ) -> Op<R::Output> {
        let queue = self.queue_of_one();
        let result = call(&queue);
        queue.finish(result)
    }

    /// A batch of one call that takes pinned memory, and returns the memory if refused.
    #[track_caller]
    fn lending<R: Settle, B: Send + Sync + 'static>(
        &self,
        call: impl FnOnce(&Queue<'_>) -> Result<R, Refused<B>>,
    ) -> Op<R::Output> {
        let queue = self.queue_of_one();
        let result = call(&queue);
        queue.finish_returning(result)
    }
}

/// Defines methods of [`Stream`], and the same methods of [`Device`] on its current stream.
macro_rules! verbs {
    ($(
        $(#[$meta:meta])*
        pub fn $name:ident $(<$($generic:ident $(: $bound:ident $(+ $more:tt)*)?),+>)? (
            &$self:ident $(, $arg:ident : $type:ty)* $(,)?
        ) -> $returns:ty $(where $bounded:ident : $first:ident + $second:path,)? $body:block
    )+) => {
        impl Stream {$(
            $(#[$meta])*
            #[track_caller]
            pub fn $name $(<$($generic $(: $bound $(+ $more)*)?),+>)? (
                &$self $(, $arg: $type)*
            ) -> $returns $(where $bounded: $first + $second)? $body
        )+}

        /// The verbs of [`Stream`], on the [current stream](Device::current_stream).
        impl Device {$(
            $(#[$meta])*
            ///
            /// On a [`Device`] it goes to the [current stream](Device::current_stream).
            #[track_caller]
            pub fn $name $(<$($generic $(: $bound $(+ $more)*)?),+>)? (
                &self $(, $arg: $type)*
            ) -> $returns $(where $bounded: $first + $second)? {
                self.current_stream().$name($($arg),*)
            }
        )+}
    };
}

verbs! {
    // ---- copies and fills -----------------------------------------------------------------

    /// Copies host data into a new device buffer. Ready proves *complete on the device*.
    ///
    /// A [`PinnedBuffer`] goes to the device directly; anything else is copied into pinned memory first.
    ///
    /// # Ownership
    /// The source moves in; a pinned buffer returns to its pool when the copy is complete. If the call is
    /// refused, [`accepted`](Op::accepted) returns the data.
    ///
    /// # Blocking
    /// The host copy of a `Vec` takes about 0.1 ms per MiB; above 1 MiB, the first upload of each size also
    /// maps and registers memory, which waits while another stream's [queue is full](Stream#blocking) (see
    /// [`pinned`](Stream::pinned)). For large data use [`Stream::upload_staged`].
    ///
    /// # Errors
    /// Out of device or pinned memory; a [`PinnedBuffer`] of another device; a lost or closed device.
    ///
    /// # Source
    /// `cuMemAllocFromPoolAsync`, `cuMemcpyHtoDAsync`.
    pub fn upload<T: Element>(&self, source: impl Source<T>) -> Op<DeviceBuffer<T>> {
        self.lending(|queue| queue.upload(source))
    }

    /// Copies a slice into a new device buffer; see [`upload`](Self::upload). The slice can be reused as soon
    /// as the call returns.
    ///
    /// # Blocking
    /// As [`upload`](Self::upload) of a `Vec`.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn upload_from<T: Element>(&self, source: &[T]) -> Op<DeviceBuffer<T>> {
        self.one(|queue| queue.upload_from(source))
    }

    /// Copies a pinned buffer into existing device memory. Ready proves *complete on the device* and
    /// hands the pinned buffer back.
    ///
    /// # Ownership
    /// The pinned buffer is lent to the device until the copy is complete; if the future is dropped it
    /// returns to its pool. If the call is refused, [`accepted`](Op::accepted) hands it back. With
    /// [`without_value`](Op::without_value) it returns to its pool by itself, and the copy can be `queued()`.
    ///
    /// # Errors
    /// Lengths that differ; memory of another device; a lost or closed device.
    pub fn upload_into<T: Element>(
        &self,
        source: PinnedBuffer<T>,
        destination: &mut impl Writable<T>,
    ) -> Op<PinnedBuffer<T>> {
        self.lending(|queue| queue.upload_into(source, destination))
    }

    /// Copies device memory into a pooled pinned buffer. Ready proves *visible to the host*.
    ///
    /// # Blocking
    /// Above 1 MiB, the first download of each size maps and registers memory, for which the driver waits
    /// while any thread is blocked in a [full queue](Stream#blocking): [`download_into`](Self::download_into)
    /// takes an existing buffer, and `download_staged` grows the pool off the executor. Up to 1 MiB the pool
    /// has memory ready, unless much was taken at once: see [`pinned`](Stream::pinned).
    ///
    /// # Errors
    /// The data was never written, or its producer failed (the error names it); out of pinned memory; the
    /// device is lost or closed.
    ///
    /// # Source
    /// `cuMemcpyDtoHAsync`.
    pub fn download<T: Element>(&self, source: &impl Readable<T>) -> Op<PinnedBuffer<T>> {
        self.one(|queue| queue.download(source))
    }

    /// Copies device memory into an existing pinned buffer. Ready proves *visible to the host* and hands it
    /// back.
    ///
    /// # Ownership
    /// As of [`upload_into`](Self::upload_into).
    ///
    /// # Errors
    /// As [`download`](Self::download); lengths that differ.
    pub fn download_into<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: PinnedBuffer<T>,
    ) -> Op<PinnedBuffer<T>> {
        self.lending(|queue| queue.download_into(source, destination))
    }

    /// Copies device memory into a `Vec`. Ready proves *visible to the host*.
    ///
    /// # Blocking
    /// As [`download`](Self::download); and the poll that finds it complete copies the data out of pinned
    /// memory, about 0.1 ms per MiB. For large data use [`Stream::download_staged`].
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub fn download_vec<T: Element>(&self, source: &impl Readable<T>) -> Op<Vec<T>> {
        self.one(|queue| queue.download_vec(source))
    }

    /// Copies between device buffers or ranges of them. Ready proves *complete on the device*.
    ///
    /// The destination is on the stream's device; the source may be on another device of the same kind (not one on a GPU and one on the host
    /// device). The copy is ordered with the work of both, and the host does not wait. With peer access it goes directly, otherwise in parts
    /// through pinned host memory, at most 16 MiB for each copy in flight.
    ///
    /// # Blocking
    /// The first copy between two devices enables peer access: see
    /// [`Device::enable_peer`](crate::Device::enable_peer). Through the host, the call takes some 10 µs for
    /// each 4 MiB, and above 1 MiB the first copy of each size maps and registers memory.
    ///
    /// # Errors
    /// Lengths that differ; a source that was never written or whose producer failed; a destination of
    /// another device; a lost or closed device.
    ///
    /// # Source
    /// `cuMemcpyDtoDAsync`, `cuMemcpyPeerAsync`; `cuMemcpyDtoHAsync` and `cuMemcpyHtoDAsync`.
    pub fn copy<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: &mut impl Writable<T>,
    ) -> Op<()> {
        self.one(|queue| queue.copy(source, destination))
    }

    /// Allocates device memory in `blocks` blocks of `block_len` elements, zeroed. Ready proves *complete on the device*.
    ///
    /// See [`DeviceSlab`]. The library keeps 16 bytes per block on the host. If `block_len` is 0, there are no blocks.
    ///
    /// # Errors
    /// Out of device memory; [`ErrorDetail::TooLarge`], also for 2^32 blocks or more; a lost or closed device.
    ///
    /// # Source
    /// `cuMemAllocFromPoolAsync`, `cuMemsetD8Async`.
    pub fn slab<T: Element>(&self, blocks: usize, block_len: usize) -> Op<DeviceSlab<T>> {
        self.one(|queue| queue.slab(blocks, block_len))
    }

    /// Copies many pieces of memory as one operation: to, from or within the device, or from other devices. Ready proves *complete on
    /// the device*, and for pieces in pinned memory *visible to the host*.
    ///
    /// A piece is a source and a destination of equal length: views of buffers, of [`Mapped`](crate::Mapped) memory, of blocks of
    /// [slabs](crate::DeviceSlab). (`zip` of two lists of blocks silently ends with the shorter one: compare their lengths.) The pieces are copied in
    /// any order, so none may touch a byte that another writes. The memory of each is ordered with other work; the copy as a whole runs behind all
    /// work that any piece waits for.
    ///
    /// | moved by | fast for | costs |
    /// |---|---|---|
    /// | [`CopyBy::CopyEngine`] | pieces of 1 MiB or more | one driver call per piece |
    /// | [`CopyBy::Kernel`] | pieces of any size | multiprocessors: as many blocks as eight hold, or the stream's [partition](crate::Partition) |
    ///
    /// [`CopyBy::Auto`] uses the kernel for four or more pieces of less than 1 MiB on average. `cargo bench --bench blocks` measures both.
    ///
    /// # Ownership
    /// The views are borrowed for the call. The kernel reads a list of more than 170 pieces from pinned memory, which the operation keeps until it is
    /// complete.
    ///
    /// # Ordering
    /// Pieces of a device without peer access are copied through the host, in front of the others.
    ///
    /// # Cancel safety
    /// If the future is dropped, the copy goes on. Blocks of a host slab stay with their slab.
    ///
    /// # Blocking
    /// With the copy engines, while the stream's [queue is full](Stream#blocking); each piece takes one slot. With the kernel and more than
    /// 170 pieces, as [`pinned`](Stream::pinned), for 24 bytes per piece.
    ///
    /// # Errors
    /// [`ErrorDetail::BadPiece`]: lengths that differ, pieces that overlap. Sources that were never written or whose producer failed; a
    /// destination or pinned memory of another device; a lost or closed device. All destinations then count as failed.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// use gpu_await::CopyBy;
    /// let x = stream.upload((0..100u32).collect::<Vec<_>>()).queued()?;
    /// let mut y = stream.zeros::<u32>(4).queued()?;
    /// let (left, right) = y.split_at_mut(2)?;
    /// let pieces = vec![(x.slice(70..72)?, left), (x.slice(10..12)?, right)];
    /// stream.copy_many(pieces, CopyBy::Auto).queued()?;
    /// assert_eq!(stream.download(&y).await?, [70, 71, 10, 11]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuMemcpyHtoDAsync`, `cuMemcpyDtoHAsync`, `cuMemcpyDtoDAsync`, `cuMemcpyPeerAsync`, or `cuLaunchKernel` of `kernels/copy_pieces.cu`.
    pub fn copy_many<T: Element>(
        &self,
        pieces: Vec<(View<'_, T>, ViewMut<'_, T>)>,
        by: CopyBy,
    ) -> Op<()> {
        self.one(|queue| queue.copy_many(pieces, by))
    }

    /// Copies rows between device buffers of this device. Ready proves *complete on the device*.
    ///
    /// Gaps between the rows of the destination keep their contents. Gaps of the source are not read. On a
    /// side with gaps, the whole span of the rows must have been written before: for the destination use
    /// [`zeros`](Self::zeros), not [`empty`](Self::empty).
    ///
    /// A copy that is refused or fails marks the whole span of its rows in the destination as failed, gaps
    /// included (rows that do not fit: the whole destination). Rows with gaps do not heal that, not even in
    /// the corrected call: first overwrite the span as a whole, with a [`fill`](Self::fill), a copy without
    /// gaps or a kernel's [`Out`](crate::Out). If the refused call's rows fit there and had gaps,
    /// [`clear_poison`](crate::DeviceBuffer::clear_poison) does as well.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`], [`ErrorDetail::Pitch`]; a source, or gaps of the destination, never
    /// written or whose producer failed; memory of another device; a lost or closed device.
    ///
    /// # Source
    /// A launch of a kernel of this crate, or `cuMemcpy2DAsync` for rows of 256 bytes and more that begin at odd addresses; rows without gaps
    /// on both sides are one `cuMemcpyDtoDAsync`.
    pub fn copy_2d<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: &mut impl Writable<T>,
        rows: Copy2d,
    ) -> Op<()> {
        self.one(|queue| queue.copy_2d(source, destination, rows))
    }

    /// Copies rows of a pinned buffer into device memory. Ready proves *complete on the device* and hands the
    /// pinned buffer back. For gaps, including those of a refused call, see [`copy_2d`](Self::copy_2d).
    ///
    /// # Ownership
    /// As of [`upload_into`](Self::upload_into).
    ///
    /// # Errors
    /// As [`copy_2d`](Self::copy_2d).
    ///
    /// # Source
    /// `cuMemcpy2DAsync`; rows without gaps on both sides are one `cuMemcpyHtoDAsync`.
    pub fn upload_2d<T: Element>(
        &self,
        source: PinnedBuffer<T>,
        destination: &mut impl Writable<T>,
        rows: Copy2d,
    ) -> Op<PinnedBuffer<T>> {
        self.lending(|queue| queue.upload_2d(source, destination, rows))
    }

    /// Copies rows of device memory into an existing pinned buffer. Ready proves *visible to the host* and
    /// hands it back; gaps between rows keep their contents.
    ///
    /// # Ownership
    /// As of [`upload_into`](Self::upload_into).
    ///
    /// # Errors
    /// As [`copy_2d`](Self::copy_2d).
    ///
    /// # Source
    /// `cuMemcpy2DAsync`; rows without gaps on both sides are one `cuMemcpyDtoHAsync`.
    pub fn download_2d<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: PinnedBuffer<T>,
        rows: Copy2d,
    ) -> Op<PinnedBuffer<T>> {
        self.lending(|queue| queue.download_2d(source, destination, rows))
    }

    /// Allocates without writing. Reading the memory before it is written is an error, even through a
    /// kernel's `&mut [T]`: a copy, a fill or a kernel's [`Out`](crate::Out) must overwrite it first. Ready
    /// proves *complete on the device*.
    ///
    /// # Blocking
    /// Briefly, at a memory limit or if the driver refuses memory that fits: see
    /// [`Pressure`](crate::Pressure). This holds for all verbs that make a buffer.
    ///
    /// # Errors
    /// Out of device memory, with the requested, free and total bytes; a lost or closed device.
    ///
    /// # Source
    /// `cuMemAllocFromPoolAsync`.
    pub fn empty<T: Element>(&self, len: usize) -> Op<DeviceBuffer<T>> {
        self.one(|queue| queue.empty(len))
    }

    /// Allocates and fills with zero; elements may have any size. Ready proves *complete on the device*.
    ///
    /// # Errors
    /// As [`empty`](Self::empty).
    pub fn zeros<T: Element>(&self, len: usize) -> Op<DeviceBuffer<T>> {
        self.one(|queue| queue.zeros(len))
    }

    /// Allocates and fills with one. Ready proves *complete on the device*.
    ///
    /// # Errors
    /// As [`empty`](Self::empty).
    pub fn ones<T: Number>(&self, len: usize) -> Op<DeviceBuffer<T>> {
        self.one(|queue| queue.ones(len))
    }

    /// Allocates and fills with `value`. Ready proves *complete on the device*.
    ///
    /// # Errors
    /// As [`empty`](Self::empty); an element type of more than 16 bytes.
    pub fn full<T: Element>(&self, len: usize, value: T) -> Op<DeviceBuffer<T>> {
        self.one(|queue| queue.full(len, value))
    }

    /// Overwrites a buffer or a range with `value`. Ready proves *complete on the device*.
    ///
    /// # Errors
    /// A buffer of another device; an element type of more than 16 bytes; a lost or closed device.
    ///
    /// # Source
    /// `cuMemsetD8Async`, `cuMemsetD16Async`, `cuMemsetD32Async`; `cuLaunchKernel` for a value whose bytes do not repeat after 4, or that is not aligned.
    pub fn fill<T: Element>(&self, destination: &mut impl Writable<T>, value: T) -> Op<()> {
        self.one(|queue| queue.fill(destination, value))
    }

    // ---- host functions -------------------------------------------------------------------

    /// Runs a closure on the host when the stream reaches it. Ready returns its result.
    ///
    /// All host functions of a process run one after the other on a driver thread, those of a host device on a thread of that device:
    /// keep them short, and never let one wait for another. After a device fault no more of them run.
    ///
    /// The driver refuses every call inside one. Methods that submit, block or need the driver return
    /// [`ErrorDetail::WrongThread`] there; queries ([`Op::is_complete`], [`Device::stats`]) answer from known
    /// state and let the device's poller ask; an [`Op`] that is polled there is woken by the poller.
    ///
    /// # Ownership
    /// Captured values that the closure does not return are dropped when it ends, *on that thread*. Handles
    /// of this crate may be dropped there: that enqueues and never blocks. Return values that take long to
    /// drop, or must not be dropped on a driver thread, so that they belong to the future. A result that is
    /// never taken, a panic's payload, and a closure that never ran are dropped with the future, or by a
    /// thread of this crate.
    ///
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let table = vec![1u32; 1000];
    /// let (sum, table) = stream.host_fn(move || (table.iter().sum::<u32>(), table)).await?;
    /// assert_eq!((sum, table.len()), (1000, 1000)); // and it is dropped here
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Blocking
    /// While another stream's [queue is full](Stream#blocking) the driver accepts no host functions on any
    /// stream: the call waits until that queue moves. To avoid that, await the earlier work and run the
    /// function in the task.
    ///
    /// # Panics
    /// Awaiting it resumes the closure's panic. After `queued()` the panic's message is only printed.
    ///
    /// # Errors
    /// A lost or closed device. `queued()` works for `()`; any other value must be awaited.
    ///
    /// # Examples
    /// A closure that uses a result of the device. A single word can go through a
    /// [`PinnedFlag`](crate::PinnedFlag) that an earlier kernel writes, with no await in between:
    /// ```
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// use gpu_await::{Device, Grid, LaunchConfig, kernel};
    ///
    /// kernel! {
    ///     /// `zeros` becomes the number of zeros in `x`.
    ///     pub unsafe fn count_zeros(x: &[u32], zeros: &PinnedFlag);
    ///     launch = LaunchConfig::new(1, 1);
    ///     host = twin;
    /// }
    /// fn twin(_: &Grid, x: &[u32], zeros: &AtomicU32) {
    ///     zeros.store(x.iter().filter(|x| **x == 0).count() as u32, Ordering::Release);
    /// }
    ///
    /// # futures::executor::block_on(async {
    /// # let device = Device::host();
    /// # let stream = device.stream()?;
    /// let count_zeros = count_zeros::load(&device).await?;
    /// let zeros = device.pinned_flag()?;
    /// let x = stream.upload(vec![0u32, 1, 0]).queued()?;
    /// count_zeros.launch(&stream, &x, &zeros).queued()?;
    /// let report = stream.host_fn(move || format!("{} zeros", zeros.get()));
    /// assert_eq!(report.await?, "2 zeros");
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    /// An array is awaited first, and moves into the closure:
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// # let x = stream.upload(vec![1u32, 2, 3]).queued()?;
    /// let host = stream.download(&x).await?;
    /// let sum = stream.host_fn(move || host.iter().sum::<u32>()).await?;
    /// assert_eq!(sum, 6);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuLaunchHostFunc`.
    pub fn host_fn<R: Send + 'static>(
        &self,
        function: impl FnOnce() -> R + Send + 'static,
    ) -> Op<R> {
        self.one(|queue| queue.host_fn(function))
    }

    // ---- batches --------------------------------------------------------------------------

    /// Puts several operations on the stream as one future, with one marker and one waker; it returns what
    /// the closure returns.
    ///
    /// The closure runs at once; inside it the verbs of [`Queue`] return plain results. Host values are
    /// [`Lent`](crate::Lent) and handed back by the future. Ready proves that every operation of the batch is
    /// complete, and that the host values it returns are *visible to the host*, including those that another
    /// batch lent.
    ///
    /// # Blocking
    /// As the verbs that the closure calls.
    ///
    /// # Errors
    /// The error that the closure returns; operations that it submitted before go on. Verbs that take a
    /// pinned buffer fail with [`Refused`](crate::Refused), which `?` turns into an [`Error`](crate::Error):
    /// if such a verb comes last, end the closure with `Ok(q.upload_into(part, &mut x)?)`.
    ///
    /// # Panics
    /// If the closure panics; operations that it submitted before go on.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let (x, y) = stream
    ///     .batch(|q| {
    ///         let x = q.full(4, 7u32)?;
    ///         let y = q.download(&x)?;
    ///         Ok((x, y))
    ///     })
    ///     .await?;
    /// assert_eq!((x.len(), &y[..]), (4, &[7; 4][..]));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn batch<R: Settle>(&self, work: impl FnOnce(&Queue<'_>) -> Result<R>) -> Op<R::Output> {
        let queue = self.queue();
        let result = work(&queue);
        queue.finish(result)
    }

    /// A [`batch`](Stream::batch) that remembers its last run: the closure's launches are collected in lists,
    /// and a list with the same shape as in the previous run is launched as one graph, with changed arguments
    /// updated. A list of another shape is launched operation by operation, and its graph is discarded. Fills
    /// and copies within the device count as launches.
    ///
    /// The closure runs each time; results, ordering, errors and the value are those of a batch. The
    /// **shape** of a list is its kernels, in order, and their dependencies: arguments, lengths and launch
    /// configurations may differ. A list ends at anything other than a launch, and at a kernel that runs for
    /// the first time, waits for a [flag](crate::PinnedFlag), is cooperative or has clusters. Fresh memory
    /// (`empty`, `zeros`, `full`, `upload`) does not end it: it is allocated in front of the list.
    ///
    /// Use one region for each closure and call site: two closures that alternate in one region are never
    /// replayed ([`Region`]). Work of other libraries ends a list even if it can be captured; a
    /// [`Graph`](crate::Graph) captures it.
    ///
    /// Ready proves the same as that of a batch.
    ///
    /// # Errors
    /// As [`batch`](Stream::batch); and a launch that the driver refuses after the closure has returned.
    ///
    /// # Blocking
    /// As a batch; for a call that compiles a graph, see [`Graph::launch`](crate::Graph::launch).
    ///
    /// # Panics
    /// If the closure panics; the operations before the panic are submitted as a list like any other, and the
    /// region keeps its counts and graphs.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await::Region;
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// # let axpy = gpu_await::kernels::axpy::load(&device).await?;
    /// let (x, mut y) = (stream.full(100, 1.0f32).queued()?, stream.full(100, 0.0f32).queued()?);
    /// let mut region = Region::new();
    /// for n in 0..10 {
    ///     let steps = stream.replay(&mut region, |q| {
    ///         axpy.launch(q, n as f32, &x, &mut y)?;
    ///         axpy.launch(q, 1.0, &x, &mut y)
    ///     });
    ///     steps.await?;
    /// }
    /// assert_eq!(stream.download(&y).await?[0], 55.0);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuGraphInstantiate`, `cuGraphExecKernelNodeSetParams`, `cuGraphLaunch`.
    pub fn replay<R: Settle>(
        &self,
        region: &mut Region,
        work: impl FnOnce(&Queue<'_>) -> Result<R>,
    ) -> Op<R::Output> {
        let run_of = RunOf::new(self.handle(), region);
        let run = run_of.run();
        let queue = self.queue().listing(run);
        let result = work(&queue);
        run.end();
        let result = result.and_then(|value| run.take_refused().map_or(Ok(value), Err));
        queue.finish(result)
    }

    // ---- order ----------------------------------------------------------------------------

    /// Records the point behind everything submitted so far. The host does not wait.
    ///
    /// # Blocking
    /// No, even while another thread is blocked by the stream's full queue, as long as the stream has spare
    /// events (a few dozen, reused once complete and dropped): the driver creates no event while any stream's
    /// [queue is full](Stream#blocking). Yes, if the stream is shared with other libraries and its queue is
    /// full.
    ///
    /// # Errors
    /// A device that is lost or closed.
    ///
    /// # Source
    /// `cuEventRecord`.
    pub fn record(&self) -> Result<Event> {
        let marked = self.mark().map(|at| Event::recorded(self.engine(), at, false));
        marked.here()
    }

    /// Records a point with a device timestamp; see [`Event::elapsed_since`].
    ///
    /// # Blocking
    /// While another thread is blocked by this stream's full queue: the timestamp goes behind that thread's
    /// work. While a thread is blocked by another stream's [full queue](Stream#blocking): only if the
    /// device's spare timed events are all in use (there are eight when a queue begins to fill; they return
    /// when dropped). In both cases [`record_timed_async`](Stream::record_timed_async) waits off the
    /// executor.
    ///
    /// # Errors
    /// A device that is lost or closed.
    pub fn record_timed(&self) -> Result<Event> {
        let marked = self.mark_timed().map(|at| Event::recorded(self.engine(), at, true));
        marked.here()
    }

    /// Makes everything submitted to this stream *from now on* wait, on the device, for a point of another
    /// stream: a stream (everything submitted to it so far), an event or an operation. The host does not
    /// wait. Ready proves that this stream has passed the wait.
    ///
    /// Buffers do not need this: work on the same memory is ordered automatically.
    ///
    /// # Errors
    /// A stream of another kind of device; an interprocess event of another GPU
    /// ([`ErrorDetail::WrongDevice`]); a device that is lost or closed. [`ErrorDetail::DependencyLost`]: the
    /// other stream's device was lost. If that was before the call, nothing was put on this stream; an event
    /// or an operation that was complete by then needs no wait. If it is lost later, while this stream waits
    /// for it, everything behind the wait on this stream fails in the same way; this device still works, so
    /// make a new stream.
    ///
    /// # Source
    /// `cuStreamWaitEvent`.
    pub fn wait(&self, mark: &impl Marks) -> Op<()> {
        self.wait_for(mark.marks())
    }

    /// Runs `work` as a [`batch`](Self::batch) and measures it: returns its value and its time on the device.
    /// Ready proves the same as for the batch.
    ///
    /// The time begins when the stream reaches the work, and includes waits inside it, e.g. for memory that
    /// another stream still uses. To exclude them, [`wait`](Self::wait) for the other stream first.
    ///
    /// # Blocking
    /// As [`record_timed`](Self::record_timed), for two timed events. Where a queue may be full, use
    /// [`record_timed_async`](Stream::record_timed_async) before and after the work.
    ///
    /// # Errors
    /// Those of `work`; the device is lost or closed. The poll that finds it complete queries the driver for
    /// the time: inside a host function that is [`ErrorDetail::WrongThread`].
    ///
    /// # Source
    /// `cuEventElapsedTime`: about half a microsecond of resolution.
    pub fn timed<R: Settle>(
        &self,
        work: impl FnOnce(&Queue<'_>) -> Result<R>,
    ) -> Op<(R::Output, Duration)> {
        let mut ends = None;
        let op = self.batch(|queue| {
            let start = queue.part(|| queue.record_timed())?;
            let value = work(queue)?;
            ends = Some((start, queue.part(|| queue.record_timed())?));
            Ok(value)
        });
        match ends {
            Some((start, end)) => op.try_map_value(move |value| Ok((value, end.elapsed_since(&start)?))),
            // The batch failed before its end, so `op` holds only the error.
            None => op.try_map_value(|_| {
                let (which, problem) = ("the end event", EventProblem::Unrecorded);
                Err(ErrorDetail::Event { which, problem }.into())
            }),
        }
    }
}
