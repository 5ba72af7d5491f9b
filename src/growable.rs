//! [`GrowableBuffer`]: device memory that grows and shrinks where it is.
//!
//! | elements | are | can be read |
//! |---|---|---|
//! | below `len` | memory like any other | once they are written |
//! | from `len` on, committed | memory that a shrink could not take back, or the rest of a step | never: [`OutOfBounds`](ErrorDetail::OutOfBounds) |
//! | from there on, reserved | addresses without memory | likewise |
//!
//! # Invariants
//! 1. Every view ends at `len`: no new work touches memory behind it, and all memory in front of it is
//!    committed (`random_growth_beside_a_model`).
//! 2. Memory that was cut off is unwritten when it becomes part of the buffer again (`what_was_cut_off_is_unwritten`).
//! 3. A step is removed only when nothing uses it or may use it again (`a_step_in_use_stays`,
//!    `a_compiled_list_keeps_its_steps`, `a_detached_loan_keeps_its_steps`).

use std::fmt;
use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::panic::Location;
use std::sync::{Arc, Weak};
use std::task::Poll;

use crate::device::Device;
use crate::device::reservation::Reservation;
use crate::error::{Error, ErrorDetail, ErrorKind, Result};
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::range::AddressRange;
use crate::memory::reclaim::allowance::Allowance;
use crate::memory::reclaim::prospect::Reclaimer;
use crate::memory::view::{Extent, Readable, Span, ViewMut, Writable, sealed};
use crate::runtime::stream_state::StreamState;
use crate::runtime::{Engine, coop};
use crate::thread::process::Process;
use crate::thread::role;
use crate::thread::worker::{Unwanted, package};

/// `len` elements of type `T` in device memory that grows and shrinks in place: its addresses are reserved once, and memory comes and goes in
/// steps of the GPU's granularity, 2 MiB.
///
/// Created by [`Device::growable`]. It is passed to operations like a [`DeviceBuffer`], with the same rules for ordering, errors and drops. The
/// address of an element never changes, contents stay, and submitted work goes on undisturbed. It suits caches and tables that grow while kernels use
/// them: nothing is copied.
///
/// # Ownership
/// After a drop, its memory and addresses are freed when every use on every stream is complete.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// let device = gpu_await::Device::host();
/// let mut table = device.growable::<u32>(1 << 30).await?; // 4 GiB of addresses
/// table.grow(1000).await?;
/// device.fill(&mut table, 1).queued()?;
/// let address = table.device_ptr();
/// table.grow(1_000_000).await?;
/// device.fill(&mut table.slice_mut(1000..)?, 2).queued()?;
/// assert_eq!(device.download(&table.slice(999..1001)?).await?, [1, 2]);
/// assert_eq!((table.device_ptr(), table.committed_bytes()), (address, 4 << 20));
/// device.done().await?;
/// assert_eq!(table.shrink(1000).await?, 2 << 20); // a step, taken back
/// assert!(table.slice(..1001).is_err());
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
pub struct GrowableBuffer<T> {
    /// A buffer over the whole range, whose length is the part that may be used.
    buffer: DeviceBuffer<T>,
    /// Weak, because the buffer's memory owns it: it must not be unmapped on the thread that drops this.
    range: Weak<AddressRange>,
    /// How much of the range has been committed, without the part for which a decommit has begun.
    committed: u64,
    reserved_len: usize,
    /// The device's default stream, on whose behalf memory is claimed.
    stream: Weak<StreamState>,
}

impl Device {
    /// Reserves addresses for a buffer that starts empty and may grow to `reserve_len` elements. Puts nothing on a stream.
    ///
    /// # Shapes and units
    /// Addresses take no memory and do not count in the limit. [Committed](GrowableBuffer::committed_bytes) memory, which is outside the device's
    /// pool, counts in [`MemoryInfo::allocated_bytes`](crate::MemoryInfo). Growth [with a reservation](crate::Reservation::grow) draws from that
    /// [reservation](Device::reserve); other growth takes nothing from reservations.
    ///
    /// # Blocking
    /// Blocks no executor thread: the driver calls are made on a thread of this crate.
    ///
    /// # Cancel safety
    /// Dropping the future leaves nothing behind.
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`]: a GPU without such memory; [`ErrorDetail::TooLarge`], also if there are not enough contiguous addresses; a
    /// lost or closed device; inside a host function.
    ///
    /// # Source
    /// `cuMemAddressReserve`, `cuMemGetAllocationGranularity`; `mmap(2)`.
    pub async fn growable<T: Element>(&self, reserve_len: usize) -> Result<GrowableBuffer<T>> {
        coop::proceed().await;
        role::check_driver("reserving addresses")?;
        let element_bytes = size_of::<T>();
        let bytes = reserve_len
            .checked_mul(element_bytes)
            .filter(|bytes| *bytes <= isize::MAX as usize / 2)
            .ok_or(ErrorDetail::TooLarge { len: reserve_len, element_bytes })?;
        let (engine, stream) = (self.engine().clone(), self.default_stream().state());
        let reserving = move || AddressRange::reserve(&engine, bytes as u64);
        let range =
            on_errands(self.engine(), reserving).await.map_err(|error| match error.kind() {
                // Out of addresses: no memory was requested.
                ErrorKind::OutOfMemory => {
                    ErrorDetail::TooLarge { len: reserve_len, element_bytes }.into()
                }
                _ => error,
            })?;
        let (kept, stream) = (Arc::downgrade(&range), Arc::downgrade(stream));
        let buffer = DeviceBuffer::new(range.into_allocation(), 0);
        let reserved_len = reserve_len;
        Ok(GrowableBuffer { buffer, range: kept, committed: 0, reserved_len, stream })
    }
}

impl<T: Element> GrowableBuffer<T> {
    /// How many bytes of memory it has, in whole steps.
    #[must_use]
    pub fn committed_bytes(&self) -> u64 {
        self.range().committed()
    }

    fn range(&self) -> Arc<AddressRange> {
        self.range.upgrade().unwrap_or_else(|| unreachable!("the buffer's memory has it"))
    }

    /// Borrows all of it for writing.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        self.buffer.view_mut()
    }

    /// Borrows a range (in elements) for writing.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] with the range and the length.
    pub fn slice_mut(
        &mut self,
        range: impl std::ops::RangeBounds<usize>,
    ) -> Result<ViewMut<'_, T>> {
        self.buffer.slice_mut(range)
    }

    /// Makes it at least `len` elements long. The new ones are unwritten, like those of [`empty`](crate::Stream::empty). Puts nothing on a stream; ready
    /// proves that operations may use them.
    ///
    /// # Blocking
    /// Blocks no executor thread. The driver calls, some 50 µs per 2 MiB, are made one after another on the device's thread for such calls; launches
    /// of other threads can go in between.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the length unchanged; memory committed so far stays for the next growth, or until a [shrink](Self::shrink).
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`]: more than is reserved. Out of memory, even after everything that streams keep and the pool does not use was
    /// returned: unlike [`Reservation::grow`](crate::Reservation::grow), it waits neither for work that still uses freed memory nor for
    /// [reservations](Device::reserve); a lost or closed device; inside a host function. The length is then unchanged.
    ///
    /// # Source
    /// `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`.
    #[track_caller]
    pub fn grow(&mut self, len: usize) -> impl Future<Output = Result<()>> + Send + use<'_, T> {
        let at = Location::caller();
        async move { self.grow_from(None, len).await.map_err(|error| error.called_at(at)) }
    }

    /// [`grow`](Self::grow) with memory drawn from `allowance`.
    pub(crate) async fn grow_from(
        &mut self,
        allowance: Option<&Arc<Allowance>>,
        len: usize,
    ) -> Result<()> {
        coop::proceed().await;
        role::check_driver("growing memory")?;
        let engine = self.buffer.memory().engine.clone();
        engine.check_open()?;
        if len > self.reserved_len {
            let (start, unit) = (self.buffer.len(), "elements that are reserved");
            let len_reserved = self.reserved_len;
            return Err(
                ErrorDetail::OutOfBounds { start, end: len, len: len_reserved, unit }.into()
            );
        }
        let range = self.range();
        let to = range.in_steps(len as u64 * size_of::<T>() as u64);
        if to > self.committed {
            range.want(to);
            // If the stream is gone, the device is closed.
            let stream = self.stream.upgrade().ok_or_else(|| engine.closed())?;
            let allowance = allowance.cloned();
            on_errands(&engine, move || range.commit(&stream, to, allowance)).await?;
            self.committed = to;
        }
        self.buffer.set_len(len.max(self.buffer.len()));
        Ok(())
    }

    /// Shortens it to at most `len` elements at once, and frees the memory behind them, from the end down to the last step in use: by work that is
    /// not complete, by a [`Graph`](crate::Graph) that was compiled with it, unless in a slot (a [`Region`](crate::Region) keeps nothing), or by a [detached loan](crate::MemoryLoan::detach). It waits for none of
    /// these; the value is the number of bytes freed. To free more later, call it again with the same length or less. Puts nothing on a stream.
    ///
    /// Elements that were cut off must be written before they can be read, even after a growth.
    ///
    /// # Ownership
    /// Work with [untracked](crate::View::untracked) views of the elements cut off must be complete, as before a drop.
    ///
    /// # Blocking
    /// As [`grow`](Self::grow).
    ///
    /// # Cancel safety
    /// Dropped before its first poll, the future does nothing; after that, the shrink goes on.
    ///
    /// # Errors
    /// A driver refusal; a lost or closed device; inside a host function.
    ///
    /// # Source
    /// `cuMemUnmap`.
    pub async fn shrink(&mut self, len: usize) -> Result<u64> {
        coop::proceed().await;
        role::check_driver("shrinking memory")?;
        let engine = self.buffer.memory().engine.clone();
        engine.check_open()?;
        self.buffer.set_len(len.min(self.buffer.len()));
        let in_use = self.buffer.cut_off();
        let range = self.range();
        let to = range.in_steps(in_use);
        // From here on a growth must commit it again.
        self.committed = self.committed.min(to);
        range.want(self.committed);
        on_errands(&engine, move || {
            // SAFETY: `cut_off` found no use behind `to`, and there can be no new one: operations use views, which end in front of `to`
            // until a growth has wanted and committed the memory again.
            unsafe { range.decommit(to) }
        })
        .await
    }
}

impl Reservation {
    /// Makes a [growable buffer](Device::growable) at least `len` elements long, like [`grow`](GrowableBuffer::grow), with the missing steps drawn
    /// from the reservation. For a service that takes turns: reserve the missing bytes, grow, drop the reservation. Until then a step that a
    /// [`shrink`](GrowableBuffer::shrink) frees returns to the reservation.
    ///
    /// It waits until freed memory that it needs is no longer in use on the device, even under [`Pressure::Wait`](crate::Pressure::Wait).
    ///
    /// # Shapes and units
    /// Steps are 2 MiB: reserve the bytes of `len`, rounded up to whole steps, minus [`committed_bytes`](GrowableBuffer::committed_bytes).
    ///
    /// # Blocking
    /// As [`grow`](GrowableBuffer::grow).
    ///
    /// # Cancel safety
    /// As [`grow`](GrowableBuffer::grow).
    ///
    /// # Errors
    /// As [`grow`](GrowableBuffer::grow); [`ReservationProblem::Spent`](crate::ReservationProblem::Spent); [`ErrorDetail::WrongDevice`]: a buffer of another device.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// let device = gpu_await::Device::builder().memory_limit_bytes(8 << 20).host();
    /// let mut cache = device.growable::<u8>(1 << 30).await?;
    /// let turn = device.reserve(4 << 20).await?;
    /// turn.grow(&mut cache, 3 << 20).await?;
    /// assert_eq!((cache.committed_bytes(), turn.left_bytes()), (4 << 20, 0));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    pub fn grow<'b, T: Element>(
        &'b self,
        buffer: &'b mut GrowableBuffer<T>,
        len: usize,
    ) -> impl Future<Output = Result<()>> + Send + use<'b, T> {
        let at = Location::caller();
        async move { self.grow_in_turn(buffer, len).await.map_err(|error| error.called_at(at)) }
    }

    async fn grow_in_turn<T: Element>(
        &self,
        buffer: &mut GrowableBuffer<T>,
        len: usize,
    ) -> Result<()> {
        let allowance = self.allowance();
        let engine = allowance.engine();
        let found = &buffer.memory().engine;
        if engine.state.id != found.state.id {
            let (expected, found) = (engine.label().to_owned(), found.label().to_owned());
            return Err(ErrorDetail::WrongDevice { what: "the buffer", expected, found }.into());
        }
        let moves = Reclaimer::new(engine);
        loop {
            let version = moves.version();
            match buffer.grow_from(Some(allowance), len).await {
                Err(error) if comes_free(&error) => {}
                grown => return grown,
            }
            poll_fn(|cx| match moves.poll(version, cx.waker()) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            })
            .await;
        }
    }
}

/// Whether memory that a growth lacks may be in use by work, or kept by streams.
fn comes_free(error: &Error) -> bool {
    matches!(
        error.detail(),
        ErrorDetail::OutOfMemory { driver_refused: false, pending_bytes, kept_bytes, .. }
            if pending_bytes + kept_bytes > 0
    )
}

/// Runs `work` on the device's thread for calls that may block.
async fn on_errands<R: Send + 'static>(
    engine: &Arc<Engine>,
    work: impl FnOnce() -> Result<R> + Send + 'static,
) -> Result<R> {
    // In the child of a fork, no thread does the parent's errands.
    engine.check_open()?;
    let (task, result) = package(Process::remembered(), Unwanted::IsDone, work);
    engine.errand(move |_| task());
    match result.await {
        Ok(result) => result,
        // The errand was dropped.
        Err(error) => Err(engine.check_open().err().unwrap_or(error)),
    }
}

/// Reads and borrows go to the device memory.
impl<T> Deref for GrowableBuffer<T> {
    type Target = DeviceBuffer<T>;

    fn deref(&self) -> &DeviceBuffer<T> {
        &self.buffer
    }
}

impl<T> sealed::Sealed for GrowableBuffer<T> {}

impl<T: Element> Extent for GrowableBuffer<T> {
    fn len(&self) -> usize {
        self.buffer.len()
    }
}

impl<T: Element> Readable<T> for GrowableBuffer<T> {
    fn span(&self) -> Span<'_> {
        self.buffer.span()
    }
}

impl<T: Element> Writable<T> for GrowableBuffer<T> {
    fn span_mut(&mut self) -> Span<'_> {
        self.buffer.span_mut()
    }
}

impl<T> fmt::Debug for GrowableBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GrowableBuffer({:?} of {})", self.buffer, self.reserved_len)
    }
}

#[cfg(test)]
mod tests {
    use crate::device::Device;
    use crate::memory::range::AddressRange;

    /// A shrink whose errand runs after that of a later growth.
    #[test]
    fn a_late_shrink_takes_nothing() {
        let device = Device::host();
        let stream = device.default_stream().state().clone();
        let range = AddressRange::reserve(device.engine(), 8 << 20).expect("addresses");
        range.want(4 << 20);
        range.commit(&stream, 4 << 20, None).expect("memory");
        range.want(0);
        range.want(2 << 20);
        range.commit(&stream, 2 << 20, None).expect("memory");
        // SAFETY: nothing uses it.
        assert_eq!(unsafe { range.decommit(0) }.expect("a step"), 2 << 20);
        assert_eq!(range.committed(), 2 << 20);
    }
}
