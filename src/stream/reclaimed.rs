//! Waiting until memory can be had.
#![forbid(unsafe_code)]

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use crate::error::Result;
use crate::memory::Reach;
use crate::memory::reclaim::prospect::{Prospect, Reclaimer};
use crate::op::Op;
use crate::runtime::coop;
use crate::stream::Stream;

impl Stream {
    /// Resolves when an allocation of so many bytes on this stream fits, as far as the device's account
    /// says: enough of what was given up is complete, or more was given up. Other allocations may be
    /// quicker; then this one fails again, and `reclaimed` may be awaited again. If the driver refused
    /// what fits, it resolves when memory has moved since, of whatever size: try again, and stop if the
    /// [`advice`](crate::MemoryAdvice) of that error is not to wait.
    ///
    /// It waits for memory that was given up, never for buffers that are alive elsewhere: beside those,
    /// what does not fit is refused at once. To wait until other tasks drop theirs, hold a permit of a
    /// semaphore of your own for as long as each buffer lives, counted in bytes if they differ. Count whole
    /// blocks: multiples of 512 bytes, and up to 1 MiB of an eighth of the next power of two.
    ///
    /// The loop below is one for fresh memory. An operation in place that was refused leaves its memory failed, so that trying again
    /// fails as well, with the same kind: see [`ErrorKind`](crate::ErrorKind).
    ///
    /// # Cancel safety
    /// Yes.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfMemory`](crate::ErrorDetail::OutOfMemory), at once, if what buffers hold
    /// leaves no room for so much; a device that is lost or closed; a thread of this crate.
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
    pub async fn reclaimed(&self, bytes: u64) -> Result<()> {
        coop::proceed().await;
        let (stream, engine) = (self.state(), self.engine());
        let reclaimer = Reclaimer::new(engine);
        loop {
            crate::thread::role::check("waiting for device memory")?;
            engine.check_open()?;
            let version = reclaimer.version();
            let reach = Reach::of(engine)?;
            let outlook = engine.outlook(stream, bytes, reach.bytes());
            let waits = match &outlook.prospect {
                Prospect::Fits => return Ok(()),
                Prospect::Never if engine.graph_memory.give_up() => continue,
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
