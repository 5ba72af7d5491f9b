//! The verbs of [`Stream`] and [`Device`], defined once.
//!
//! Each is written as a method of [`Stream`], a [`batch`](Stream::batch) of one; [`verbs!`] gives [`Device`] the same method, which goes to
//! the device's current stream (`every_verb_of_a_device_goes_to_the_current_stream`).
//!
//! More than 500 lines: a method of one line for each verb, and its docs.
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

    /// A batch of one call that is given pinned memory: if refused, it returns the memory.
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

/// Makes methods of [`Stream`], and of [`Device`] the same on its current stream.
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
    /// A [`PinnedBuffer`] goes to the device as it is; anything else is copied into pinned memory
    /// first.
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
    /// Out of device or pinned memory; a [`PinnedBuffer`] of another device; a device that is lost or closed.
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
    /// Lengths that differ; memory of another device; a device that is lost or closed.
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
    /// Above 1 MiB, the first download of each size maps and registers memory, which the driver does not do
    /// while any thread is blocked in a [full queue](Stream#blocking): [`download_into`](Self::download_into)
    /// takes a buffer that exists, and `download_staged` grows the pool off the executor. Up to 1 MiB the
    /// pool has memory ready, unless much was taken at once: see [`pinned`](Stream::pinned).
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

    /// Copies device memory into a pinned buffer that is passed in. Ready proves *visible to the host* and
    /// hands it back.
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
    /// As [`download`](Self::download); and the poll that finds it complete copies from pinned memory, about
    /// 0.1 ms per MiB. For large data use [`Stream::download_staged`].
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub fn download_vec<T: Element>(&self, source: &impl Readable<T>) -> Op<Vec<T>> {
        self.one(|queue| queue.download_vec(source))
    }

    /// Copies between device buffers or ranges of them. Ready proves *complete on the device*.
    ///
    /// The source may be on another device of the same kind (not: one on a GPU and one on the host device), the destination is on the stream's.
    /// The copy is ordered with the work of both, and
    /// the host does not wait. Where the two devices can reach each other's memory it goes directly,
    /// otherwise in parts through pinned host memory, at most 16 MiB for each copy in flight.
    ///
    /// # Blocking
    /// The first copy between two devices enables peer access: see
    /// [`Device::enable_peer`](crate::Device::enable_peer). Through the host, the call takes some 10 µs for
    /// each 4 MiB, and above 1 MiB the first copy of each size maps and registers memory.
    ///
    /// # Errors
    /// Lengths that differ; a source that nothing has written or whose producer failed; a
    /// destination of another device; a device that is lost or closed.
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
    /// See [`DeviceSlab`]. The library remembers 16 bytes a block on the host.
    ///
    /// # Errors
    /// Out of device memory; [`ErrorDetail::TooLarge`], also of 2^32 blocks or more; a device that is lost or closed.
    ///
    /// # Source
    /// `cuMemAllocFromPoolAsync`, `cuMemsetD8Async`.
    pub fn slab<T: Element>(&self, blocks: usize, block_len: usize) -> Op<DeviceSlab<T>> {
        self.one(|queue| queue.slab(blocks, block_len))
    }

    /// Copies many pieces of memory as one operation: to the device, back, within it, from other devices. Ready proves *complete on the
    /// device*, and for pieces in pinned memory *visible to the host*.
    ///
    /// A piece is a source and a destination of equal length: views of buffers, of [`Mapped`](crate::Mapped) memory, of blocks of
    /// [slabs](crate::DeviceSlab). (`zip` of two lists of blocks ends where the shorter one does, and nothing is told: compare their lengths.) The pieces are copied in no order, so no byte that one writes may be touched by another. Each is ordered
    /// with other work by the memory that it touches; the copy is ordered as a whole, behind all work that any piece waits for.
    ///
    /// | moved by | fast for | takes |
    /// |---|---|---|
    /// | [`CopyBy::CopyEngine`] | pieces of 1 MiB or more | one call of the driver a piece |
    /// | [`CopyBy::Kernel`] | pieces of any size | multiprocessors: as many blocks as eight hold, or the stream's [partition](crate::Partition) |
    ///
    /// [`CopyBy::Auto`] takes the kernel for four pieces or more of less than 1 MiB on average. `cargo bench --bench blocks` measures both.
    ///
    /// # Ownership
    /// The views are borrowed for the call. The kernel finds more than 170 pieces in pinned memory, which the operation keeps until it is complete.
    ///
    /// # Ordering
    /// Pieces of a device whose memory this one does not reach are copied through the host, in front of the others.
    ///
    /// # Cancel safety
    /// If the future is dropped, the copy goes on. Blocks of a host slab stay with their slab.
    ///
    /// # Blocking
    /// The copy engines: while the stream's [queue is full](Stream#blocking), of which each piece takes one place. More than 170 pieces: as
    /// [`pinned`](Stream::pinned), for 24 bytes a piece.
    ///
    /// # Errors
    /// [`ErrorDetail::BadPiece`]: lengths that differ, pieces that overlap. Sources that nothing has written or whose producer failed; a
    /// destination or pinned memory of another device; a device that is lost or closed. All destinations count as failed then.
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
    /// Gaps between the rows of the destination keep their contents. Gaps of the source are not read.
    /// On a side with gaps, all that the rows span must have been written before: for the destination
    /// say [`zeros`](Self::zeros), not [`empty`](Self::empty).
    ///
    /// A copy that is refused or fails marks the whole span of its rows in the destination as failed,
    /// gaps included (rows that do not fit: the whole destination). Rows that leave gaps do not heal
    /// that, also not the corrected call: overwrite the span as a whole first, with a
    /// [`fill`](Self::fill), a copy without gaps or a kernel's [`Out`](crate::Out).
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`], [`ErrorDetail::Pitch`]; a source, or gaps of the destination,
    /// that nothing has written or whose producer failed; memory of another device; a device that is
    /// lost or closed.
    ///
    /// # Source
    /// `cuMemcpy2DAsync`; rows without gaps on both sides are one `cuMemcpyDtoDAsync`.
    pub fn copy_2d<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: &mut impl Writable<T>,
        rows: Copy2d,
    ) -> Op<()> {
        self.one(|queue| queue.copy_2d(source, destination, rows))
    }

    /// Copies rows of a pinned buffer into device memory. Ready proves *complete on the device* and
    /// hands the pinned buffer back. About gaps, also those of a call that was refused, see
    /// [`copy_2d`](Self::copy_2d).
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

    /// Copies rows of device memory into a pinned buffer that is passed in. Ready proves *visible to the
    /// host* and hands it back; gaps between rows are as they were.
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

    /// Allocates without writing. Reading it before something wrote it is an error, also through a
    /// kernel's `&mut [T]`: it is for what a copy, a fill or a kernel's [`Out`](crate::Out) overwrites
    /// first. Ready proves *complete on the device*.
    ///
    /// # Blocking
    /// At a memory limit, and where the driver refuses what fits, for a moment: see
    /// [`Pressure`](crate::Pressure). So do all verbs that make a buffer.
    ///
    /// # Errors
    /// Out of device memory, with what was asked, free and there in all; a device that is lost or
    /// closed.
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
    /// A buffer of another device; an element type of more than 16 bytes; a device that is lost or
    /// closed.
    ///
    /// # Source
    /// `cuMemsetD8Async`, `cuMemsetD16Async`, `cuMemsetD32Async`, `cuMemsetD2D32Async`.
    pub fn fill<T: Element>(&self, destination: &mut impl Writable<T>, value: T) -> Op<()> {
        self.one(|queue| queue.fill(destination, value))
    }

    // ---- host functions -------------------------------------------------------------------

    /// Runs a closure on the host when the stream reaches it. Ready hands over its result.
    ///
    /// All host functions of a process run one after the other on a thread of the driver, those of a host device on one of its own: keep
    /// them short, and never let one wait for another. After a fault of the device no more of them run.
    ///
    /// The driver refuses every call inside one. Methods that submit, block or need the driver return
    /// [`ErrorDetail::WrongThread`] there; methods that only ask ([`Op::is_complete`], [`Device::stats`])
    /// answer with what is known and let the device's poller ask; an [`Op`] that is polled there is woken by
    /// the poller.
    ///
    /// # Ownership
    /// Captured values that the closure does not return are dropped when it ends, *on that thread*. Handles
    /// of this crate may be dropped there: that enqueues and never blocks. Return values that take long to
    /// drop, or must not be dropped on a thread of the driver: they then belong to the future. A result that
    /// is never taken, the payload of a panic, and a closure that never ran are dropped where the future is
    /// dropped, or by a thread of this crate.
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
    /// stream: the call waits until that queue moves. To avoid that, await the work in front and run the
    /// function in the task.
    ///
    /// # Panics
    /// Awaiting it resumes the closure's panic. After `queued()` the panic's message is printed, and that is all.
    ///
    /// # Errors
    /// A device that is lost or closed. `queued()` works for `()`; another value needs the await.
    ///
    /// # Examples
    /// A closure that uses a result of the device. A word goes through a [`PinnedFlag`](crate::PinnedFlag)
    /// that a kernel in front of it writes, with no await in between:
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
    /// a closure whose last call is one ends with `Ok(q.upload_into(part, &mut x)?)`.
    ///
    /// # Panics
    /// If the closure does; operations that it submitted before go on.
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

    /// A [`batch`](Stream::batch) that remembers: the closure's launches are collected in lists, and a list
    /// that has the same shape as in the previous run is launched as one graph, with changed arguments
    /// updated. A run of another shape is launched operation by operation, and discards the graph. Fills and
    /// copies within the device count as launches.
    ///
    /// The closure runs each time; results, ordering, errors and the value are those of a batch. The
    /// **shape** of a list is its kernels, in order, and which of them wait for which: arguments, lengths and
    /// launch configurations may differ. A list ends with anything other than a launch, and with a kernel
    /// that runs for the first time, waits for a [flag](crate::PinnedFlag), is cooperative or has clusters.
    /// Fresh memory (`empty`, `zeros`, `full`, `upload`) does not end it: it is allocated in front of the
    /// list.
    ///
    /// Use one region for each closure and call site: two closures that alternate in one region are never
    /// replayed ([`Region`]). Work of other libraries ends a list even if it can be captured; a
    /// [`Graph`](crate::Graph) captures it.
    ///
    /// Ready proves the same as that of a batch.
    ///
    /// # Errors
    /// As [`batch`](Stream::batch); a launch that the driver refuses after the closure has returned.
    ///
    /// # Blocking
    /// As a batch; a call that compiles a graph takes as long as [`Graph::launch`](crate::Graph::launch)
    /// says.
    ///
    /// # Panics
    /// If the closure does; the operations before the panic are submitted as a list like any other, and the
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
    /// No, even while another thread is blocked by the stream's full queue, as long as the stream has events
    /// in stock (a few dozen, reused when they are complete and dropped): the driver creates none while any
    /// stream's [queue is full](Stream#blocking). Yes, if the stream is shared with other libraries and its
    /// queue is full.
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

    /// Records a point with a time stamp of the device; see [`Event::elapsed_since`].
    ///
    /// # Blocking
    /// While another thread is blocked by this stream's full queue: the time stamp goes behind what that
    /// thread submits. While a thread is blocked by another stream's [full queue](Stream#blocking): only if
    /// more timed events are in use than the device has in stock (eight when a queue begins to fill; they
    /// return when dropped). In both cases [`record_timed_async`](Stream::record_timed_async) waits off the
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
    /// Buffers do not need this: work on the same memory is ordered by itself.
    ///
    /// # Errors
    /// A stream of another kind of device; an interprocess event of another GPU
    /// ([`ErrorDetail::WrongDevice`]); a device that is lost or closed.
    /// [`ErrorDetail::DependencyLost`]: the other stream's device was lost. If that was before the
    /// call, nothing was put on this stream; an event or an operation that was complete by then is nothing to
    /// wait for. If it is lost later, while this stream waits for it,
    /// everything behind the wait on this stream fails in the same way; the device works, so make a
    /// new stream.
    ///
    /// # Source
    /// `cuStreamWaitEvent`.
    pub fn wait(&self, mark: &impl Marks) -> Op<()> {
        self.wait_for(mark.marks())
    }

    /// Runs `work` as a [`batch`](Self::batch) and measures it: gives its value and its time on the device.
    /// Ready proves what the batch proves.
    ///
    /// The time begins when the stream reaches the work, and includes waits inside it, e.g. for memory that
    /// another stream still uses. To exclude them, [`wait`](Self::wait) for the other stream first.
    ///
    /// # Blocking
    /// It takes two timed events: as [`record_timed`](Self::record_timed). Where a queue may be full, use
    /// [`record_timed_async`](Stream::record_timed_async) before and after the work.
    ///
    /// # Errors
    /// Those of `work`; the device is lost or closed. The poll that finds it complete asks the driver for the
    /// time: inside a host function that is [`ErrorDetail::WrongThread`].
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
            // The batch failed before its end, so `op` holds the error and nothing else.
            None => op.try_map_value(|_| {
                let (which, problem) = ("the end event", EventProblem::Unrecorded);
                Err(ErrorDetail::Event { which, problem }.into())
            }),
        }
    }
}
