//! Read-only device memory.
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use super::Element;
use super::allocation::Allocation;
use super::buffer::DeviceBuffer;
use super::view::{Extent, Readable, Span, Tracking, View, checked, sealed, span};
use crate::error::Result;

/// `len` elements of type `T` in a device's memory, complete and read-only: weights, tables.
///
/// Created by [`DeviceBuffer::freeze`]. Operations on any stream read it without ordering, locking or
/// tracking, so many threads can launch kernels that read the same memory without contention. Cheap to clone;
/// clones share the memory.
///
/// # Ownership
/// Operations borrow it only for the call. Dropping it is always safe and never blocks. Readers are not
/// tracked, so the memory is freed once all work that was on any stream of the device when the last handle
/// was dropped is complete; no stream waits for that.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// # let device = gpu_await::Device::host();
/// # let (a, b) = (device.stream()?, device.stream()?);
/// # let axpy = gpu_await::kernels::axpy::load(&device).await?;
/// let weights = a.upload(vec![1.0f32; 1000]).queued()?.freeze().await?;
/// let mut y = b.zeros(1000).queued()?;
/// axpy.launch(&b, 2.0, &weights, &mut y).queued()?;
/// assert_eq!(b.download(&y).await?[999], 2.0);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
///
/// It cannot be written:
/// ```compile_fail
/// # futures::executor::block_on(async {
/// # let device = gpu_await::Device::host();
/// # let stream = device.stream()?;
/// let mut weights = stream.zeros::<f32>(1000).queued()?.freeze().await?;
/// stream.fill(&mut weights, 1.0).await?;
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
pub struct Frozen<T> {
    memory: Arc<Allocation>,
    start_bytes: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Frozen<T> {
    /// Freezes the buffer. The caller hands it out only when everything that writes it is complete.
    pub(crate) fn new(buffer: DeviceBuffer<T>) -> Self {
        let (memory, start_bytes, len) = buffer.into_memory();
        memory.freeze();
        Frozen { memory, start_bytes, len, element: PhantomData }
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The size in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the device address of the first element; see [`DeviceBuffer::device_ptr`].
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.span().ptr().0
    }

    /// Borrows a range (in elements).
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`](crate::ErrorDetail::OutOfBounds) with the range and the length.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>> {
        self.view().slice(range)
    }

    /// Borrows all of it.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        View::new(&self.memory, self.start_bytes, self.len, Tracking::Frozen)
    }

    /// Returns an owned part (in elements), for another task: another handle to the same memory.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`](crate::ErrorDetail::OutOfBounds) with the range and the length.
    pub fn part(&self, range: impl RangeBounds<usize>) -> Result<Frozen<T>> {
        let range = checked(range, self.len)?;
        let start_bytes = self.start_bytes + (range.start * size_of::<T>()) as u64;
        Ok(Frozen {
            memory: self.memory.clone(),
            start_bytes,
            len: range.len(),
            element: PhantomData,
        })
    }
}

impl<T> Clone for Frozen<T> {
    fn clone(&self) -> Self {
        Frozen { memory: self.memory.clone(), ..*self }
    }
}

impl<T> sealed::Sealed for Frozen<T> {}

impl<T: Element> Extent for Frozen<T> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<T: Element> Readable<T> for Frozen<T> {
    fn span(&self) -> Span<'_> {
        span::<T>(&self.memory, self.start_bytes, self.len, Tracking::Frozen)
    }
}

impl<T> fmt::Debug for Frozen<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (element, len) = (std::any::type_name::<T>(), self.len);
        write!(f, "Frozen<{element}>({len} elements, {:?})", self.memory)
    }
}
