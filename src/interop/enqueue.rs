//! `enqueue`: another library's work as an operation, on a stream, in a batch, or on a device's current stream.

use std::error::Error as StdError;
use std::panic::resume_unwind;

use crate::batch::queue::Queue;
use crate::batch::settle::Lent;
use crate::device::Device;
use crate::error::Result;
use crate::op::{HostValue, Op};
use crate::stream::Stream;
use crate::submit::{Calls, Footprint, RawQueue, Recorder, Uses};

impl Stream {
    /// Puts work of another library on the stream, as one operation: cuBLAS, cuFFT, a C library, a raw driver
    /// call.
    ///
    /// `call` runs on this thread before `enqueue` returns, with the device's context current and the thread's capture
    /// mode relaxed. It gets the raw stream and the addresses of the ranges declared in `uses`, and returns the value of the
    /// future. Ready proves that everything it put on the stream is *complete on the device*.
    ///
    /// A library of your own:
    /// ```
    /// # use gpu_await::{Device, DeviceBuffer, DeviceKind, Error, Op, Stream, Uses};
    /// /// Sums `x` into `total`.
    /// fn sum(stream: &Stream, x: &DeviceBuffer<f32>, total: &mut DeviceBuffer<f32>) -> Op<()> {
    ///     let uses = Uses::new("sum").reads(x).writes(total);
    ///     // SAFETY: the library reads `x` and overwrites `total`, on the stream that it is given.
    ///     unsafe {
    ///         stream.enqueue(uses, |queue, (x, total)| match queue.kind() {
    ///             DeviceKind::Cuda => their_sum(queue.stream(), x.address(), x.len(), total.address()),
    ///             _ => Ok(queue.host(move || total.as_mut_slice()[0] = x.as_slice().iter().sum())?),
    ///         })
    ///     }
    /// }
    /// # fn their_sum(_: u64, _: u64, _: usize, _: u64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> { Ok(()) }
    /// # futures::executor::block_on(async {
    /// # let device = Device::host();
    /// # let stream = device.stream()?;
    /// # let x = stream.full(10, 1.5f32).queued()?;
    /// # let mut total = stream.empty(1).queued()?;
    /// sum(&stream, &x, &mut total).queued()?;
    /// assert_eq!(stream.download(&total).await?, [15.0]);
    /// # Ok::<(), Error>(()) }).unwrap();
    /// ```
    ///
    /// # Ordering
    /// As for any operation: after earlier work on the stream, and after conflicting uses of the declared ranges on other
    /// streams. The stream does not become shared, as it does after [`as_raw`](Self::as_raw).
    ///
    /// # Ownership
    /// Declared memory is borrowed for the call and kept by the operation. The value that `call` returns belongs to the
    /// future and is dropped with it, complete or not, so values that the work needs must be [kept](Uses::keeps) or
    /// [lent](Uses::lends) instead.
    ///
    /// # Blocking
    /// As long as `call` blocks; threads that submit to this stream block as well. Threads and tasks that wait for earlier
    /// work on the stream are not held up if this is its first `enqueue` or the previous one took more than 50 µs.
    ///
    /// # Cancel safety
    /// If the future is dropped, the work goes on, and everything it uses is kept until it is complete.
    ///
    /// # Errors
    /// As for any operation; [`ErrorDetail::Foreign`](crate::ErrorDetail::Foreign) with the error of `call` as its
    /// source (an [`Error`](crate::Error) of this crate is returned as it is). Memory declared as written then counts as
    /// failed until it is overwritten.
    ///
    /// `call` reports errors that are known when the work is submitted. A library whose status is known only when the work has
    /// run, on a host thread, is called differently:
    /// - on a host device in [`RawQueue::try_host`], whose error is the operation's;
    /// - on any device between [`MemoryLoan::ready`](crate::MemoryLoan::ready) and
    ///   [`end`](crate::MemoryLoan::end) or [`fail`](crate::MemoryLoan::fail) of a loan, see
    ///   [`lend_memory`](Self::lend_memory).
    ///
    /// Inside `call`, everything of this crate that submits, waits or calls the driver fails with
    /// [`ErrorDetail::WrongThread`](crate::ErrorDetail::WrongThread), because the stream is locked.
    ///
    /// # Panics
    /// If `call` panics. Work that it had put on the stream is covered by the next operation there.
    ///
    /// # Safety
    /// - The work touches device memory only as `uses` declares it, apart from memory that the caller keeps alive and
    ///   orders itself; it overwrites all memory declared with [`writes`](Uses::writes).
    /// - All of it is on the stream passed to `call`, or joined to that stream by events before `call` returns.
    ///   The handle is not used afterwards, and the stream is neither captured nor destroyed.
    /// - Host memory that the work touches is lent, or outlives the work. After the loss of the device nobody knows
    ///   how long the work goes on.
    /// - [Kept](Uses::keeps) values may be dropped on another thread, and without a current context if the operation
    ///   is refused.
    /// - Work declared as [capturable](Uses::can_be_captured) meets the conditions described there.
    #[track_caller]
    pub unsafe fn enqueue<P, R: Send + 'static, E>(
        &self,
        uses: Uses<'_, P>,
        call: impl FnOnce(&RawQueue<'_>, P) -> std::result::Result<R, E>,
    ) -> Op<R>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        let queue = self.queue_of_one();
        // SAFETY: the caller's promise is the same.
        let returned = unsafe { queue.enqueue(uses, call) };
        // The queue's last point is the operation's.
        let value = returned.map(|value| Lent::to(self.state(), 0, HostValue::here(value)));
        queue.finish(value)
    }
}

impl Device {
    /// [`Stream::enqueue`] on the [current stream](Self::current_stream).
    ///
    /// # Safety
    /// As [`Stream::enqueue`].
    #[track_caller]
    pub unsafe fn enqueue<P, R: Send + 'static, E>(
        &self,
        uses: Uses<'_, P>,
        call: impl FnOnce(&RawQueue<'_>, P) -> std::result::Result<R, E>,
    ) -> Op<R>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        // SAFETY: the caller's promise is the same.
        unsafe { self.current_stream().enqueue(uses, call) }
    }
}

impl Queue<'_> {
    /// Puts work of another library on the stream; see [`Stream::enqueue`]. Returns the value of `call`; the
    /// work may not have begun by then. An error of [`RawQueue::try_host`] is an error of the whole batch.
    ///
    /// In the closure of a [`Graph`](crate::Graph) the work is captured instead.
    ///
    /// # Errors
    /// As [`Stream::enqueue`]; in the closure of a graph [`ErrorDetail::NotInGraph`](crate::ErrorDetail::NotInGraph), unless the work
    /// [can be captured](Uses::can_be_captured) and [lends](Uses::lends) nothing.
    ///
    /// # Panics
    /// If `call` does.
    ///
    /// # Safety
    /// As [`Stream::enqueue`].
    #[track_caller]
    pub unsafe fn enqueue<P, R, E>(
        &self,
        uses: Uses<'_, P>,
        call: impl FnOnce(&RawQueue<'_>, P) -> std::result::Result<R, E>,
    ) -> Result<R>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        self.verb(|| {
            if let Some(at) = uses.declared.at {
                self.at.set(at);
            }
            if uses.is_for_graphs() && self.is_recording_graph() {
                return self.enqueue_captured(uses, call);
            }
            let submit = |footprint: &mut Footprint<'_>, commands: u32, calls: &mut Calls<'_>| {
                self.submit(footprint, commands, calls)?;
                Ok(())
            };
            let put = uses.put(self.stream, (), Some(&self.outcomes), call, submit);
            put.unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// In the closure of a graph.
    #[cold]
    fn enqueue_captured<P, R, E>(
        &self,
        uses: Uses<'_, P>,
        call: impl FnOnce(&RawQueue<'_>, P) -> std::result::Result<R, E>,
    ) -> Result<R>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        let recorder = Recorder::default();
        let record = |footprint: &mut Footprint<'_>, _: u32, calls: &mut Calls<'_>| {
            Ok(self.record_captured(footprint, &recorder, calls)?)
        };
        let put = uses.put(self.stream, &recorder, None, call, record);
        put.unwrap_or_else(|panic| resume_unwind(panic))
    }
}
