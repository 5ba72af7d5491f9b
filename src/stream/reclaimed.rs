//! Waiting until memory is available.
#![forbid(unsafe_code)]

use std::future::{Future, poll_fn};
use std::panic::Location;
use std::pin::Pin;
use std::task::Poll;

use crate::error::Result;
use crate::memory::Reach;
use crate::memory::reclaim::prospect::{Prospect, Reclaimer};
use crate::op::Op;
use crate::runtime::coop;
use crate::stream::Stream;
use gpu_await_protocol::account::block;

impl Stream {
    /// Resolves when an allocation of `bytes` on this stream fits by the device's own accounting: enough
    /// freed memory is no longer in use, or more was freed. Another allocation may take the memory first;
    /// then this one fails again, and `reclaimed` can be awaited again. If the driver refused an allocation
    /// that fits, this resolves once any memory has moved: try again, and stop if the
    /// [`advice`](crate::MemoryAdvice) of that error is not to wait.
    ///
    /// It waits for freed memory, and for [reservations](crate::Device::reserve) and their buffers to end; never for other live buffers: a request
    /// that does not fit beside those fails at once. To wait until other tasks drop their buffers, have each of them reserve its memory, or guard
    /// each buffer with a permit of your own semaphore, counted in bytes if sizes differ. Count whole blocks: multiples of 512 bytes and, up to 1
    /// MiB, of an eighth of the next power of two.
    ///
    /// A task that holds a reservation must wait on a [stream of it](crate::Reservation::stream): on another stream it may wait for itself.
    ///
    /// The loop below is for fresh memory. An in-place operation that was refused leaves its memory failed,
    /// so retrying it fails as well, with the same kind: see [`ErrorKind`](crate::ErrorKind).
    ///
    /// # Cancel safety
    /// Yes.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfMemory`](crate::ErrorDetail::OutOfMemory), at once, if live buffers without a reservation leave no room for `bytes`; on a
    /// stream of a reservation [`ReservationProblem::Spent`](crate::ReservationProblem::Spent), at once, if that is more than is left of it; the
    /// device is lost or closed; a call on a thread of this crate.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # use gpu_await::{Device, DeviceBuffer, ErrorKind, Pressure, Result, Stream};
    /// async fn zeros(stream: &Stream, len: usize) -> Result<DeviceBuffer<u8>> {
    ///     loop {
    ///         match stream.zeros::<u8>(len).queued() {
    ///             Err(error) if error.kind() == ErrorKind::OutOfMemory => {
    ///                 stream.reclaimed(len as u64).await?;
    ///             }
    ///             made => return made,
    ///         }
    ///     }
    /// }
    /// let builder = Device::builder().memory_limit_bytes(100_000).on_pressure(Pressure::Fail);
    /// let device = builder.host();
    /// let streams = [device.stream()?, device.stream()?];
    /// drop(zeros(&streams[0], 70_000).await?);
    /// drop(zeros(&streams[1], 70_000).await?);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    pub fn reclaimed(&self, bytes: u64) -> impl Future<Output = Result<()>> + Send + use<'_> {
        let at = Location::caller();
        async move { self.until_reclaimed(bytes).await.map_err(|error| error.called_at(at)) }
    }

    pub(crate) async fn until_reclaimed(&self, bytes: u64) -> Result<()> {
        coop::proceed().await;
        let (stream, engine) = (self.state(), self.engine());
        let reclaimer = Reclaimer::new(engine);
        loop {
            crate::thread::role::check("waiting for device memory")?;
            engine.check_open()?;
            let version = reclaimer.version();
            if let Some(allowance) = &self.allowance
                && allowance.size_and_left().1 < block(bytes)
            {
                return Err(allowance.spent(block(bytes)));
            }
            let reach = Reach::of(engine)?;
            let outlook = engine.outlook(stream, bytes, reach.bytes(), self.budget());
            let waits = match &outlook.prospect {
                Prospect::Fits => return Ok(()),
                Prospect::Never if engine.memory.graphs.give_up() => continue,
                Prospect::Never => {
                    return Err(reach.refusal(engine, "reclaimed".into(), bytes, &outlook));
                }
                Prospect::Later(waits) => waits.iter(),
            };
            let mut ops: Vec<Op<()>> = waits.cloned().map(Op::until).collect();
            poll_fn(|cx| {
                let any = ops.iter_mut().any(|op| Pin::new(op).poll(cx).is_ready());
                if any || reclaimer.poll(version, cx.waker()) {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
            })
            .await;
        }
    }
}
