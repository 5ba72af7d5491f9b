//! Owned, typed device memory.
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use super::allocation::{ALIGNMENT, Allocation};
use super::view::{
    Extent, Readable, Span, Tracking, View, ViewMut, Writable, bytes_of_elements, checked, sealed,
    span,
};
use super::{Element, must_fit};
use crate::error::Result;

/// `len` elements of type `T` in a device's memory.
///
/// Created by the verbs of [`Stream`](crate::Stream): `upload`, `zeros`, `full`, `empty`. It may be passed to
/// operations immediately, on any stream of its device: the device orders them behind the work that writes
/// it.
///
/// # Ownership
/// Operations borrow a buffer only for the call. Dropping it is always safe and never blocks: the memory is
/// freed when every use on every stream is complete, and no stream waits for that.
///
/// It owns its memory, or a part of it: [`split_off`](Self::split_off) makes two buffers of one, which can
/// move to different tasks, be written concurrently, and be joined again with [`unsplit`](Self::unsplit). The
/// memory is freed with the last part. To share a buffer among readers, [`freeze`](Self::freeze) it.
pub struct DeviceBuffer<T> {
    memory: Arc<Allocation>,
    /// The start of its part of the memory, which is exclusive.
    start_bytes: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> DeviceBuffer<T> {
    /// The only constructor, and so the only source of views that were not cast.
    pub(crate) fn new(memory: Allocation, len: usize) -> Self {
        const { must_fit::<T>(ALIGNMENT) };
        DeviceBuffer { memory: Arc::new(memory), start_bytes: 0, len, element: PhantomData }
    }

    pub(crate) fn memory(&self) -> &Allocation {
        &self.memory
    }

    /// The allocation, if the buffer is all of it and holds the only share, and it is not leaked.
    pub(crate) fn memory_mut(&mut self) -> Option<&mut Allocation> {
        let all = self.span().range == (0..self.memory.bytes());
        Arc::get_mut(&mut self.memory).filter(|memory| all && memory.can_be_freed())
    }

    /// Changes its length, within its memory.
    pub(crate) fn set_len(&mut self, len: usize) {
        self.len = len;
    }

    /// Makes the memory behind its end unreadable until the buffer grows and is written there. Returns the end of the last use there,
    /// see [`Allocation::cut_off`].
    pub(crate) fn cut_off(&self) -> u64 {
        self.memory.cut_off(self.span().range.end)
    }

    /// The memory, and the start of its part.
    pub(super) fn place(&self) -> (&Arc<Allocation>, u64) {
        (&self.memory, self.start_bytes)
    }

    /// The memory, and the start and length of its part.
    pub(super) fn into_memory(self) -> (Arc<Allocation>, u64, usize) {
        (self.memory, self.start_bytes, self.len)
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

    /// Returns the device address of the first element, a `CUdeviceptr` as a number. To use it, see
    /// [`Stream::enqueue`](crate::Stream::enqueue).
    ///
    /// The memory is live from the allocation to the free, in the order of their streams.
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.span().ptr().0
    }

    /// Borrows a range (in elements) for reading.
    ///
    /// # Errors
    /// [`OutOfBounds`](crate::ErrorDetail::OutOfBounds) with the range and the length.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>> {
        self.view().slice(range)
    }

    /// Borrows the whole buffer for reading.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        let DeviceBuffer { memory, start_bytes, len, .. } = self;
        View::new(memory, *start_bytes, *len, Tracking::Tracked)
    }

    /// Borrows a range (in elements) for writing.
    ///
    /// # Errors
    /// [`OutOfBounds`](crate::ErrorDetail::OutOfBounds) with the range and the length.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>> {
        self.view_mut().part(range)
    }

    /// Borrows the whole buffer for writing.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        let DeviceBuffer { memory, start_bytes, len, .. } = self;
        ViewMut::new(memory, *start_bytes, *len)
    }

    /// Splits into two parts that two streams may write concurrently.
    ///
    /// # Errors
    /// [`OutOfBounds`](crate::ErrorDetail::OutOfBounds) if `mid > len`.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// let device = gpu_await::Device::host();
    /// let (a, b) = (device.stream()?, device.stream()?);
    /// let mut x = a.zeros::<u32>(10).queued()?;
    /// let (mut left, mut right) = x.split_at_mut(4)?;
    /// a.fill(&mut left, 1).queued()?;
    /// b.fill(&mut right, 2).queued()?;
    /// assert_eq!(&a.download(&x).await?[3..6], [1, 2, 2]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn split_at_mut(&mut self, mid: usize) -> Result<(ViewMut<'_, T>, ViewMut<'_, T>)> {
        self.view_mut().split_at_mut(mid)
    }

    /// Makes the buffer readable again after a failed in-place operation, so that the operation can be
    /// retried. Puts nothing on a stream. Call it once the error has been dealt with, like
    /// [`Mutex::clear_poison`](std::sync::Mutex::clear_poison).
    ///
    /// This works if the operation was refused before it began, for example because of a wrong length or
    /// device ([`InvalidCall`](crate::ErrorKind::InvalidCall)), or because a `sort` found no scratch memory.
    /// The memory is then unchanged.
    ///
    /// # Errors
    /// [`Upstream`](crate::ErrorDetail::Upstream) or [`Unwritten`](crate::ErrorDetail::Unwritten) if a part cannot
    /// be made readable and must be overwritten: it was never written; the operation would have overwritten rather
    /// than updated it, which is assumed of all outputs passed to a [`Graph`](crate::Graph); or the operation had
    /// begun, and the driver or a closure of [`enqueue`](crate::Stream::enqueue) failed in the middle, or it
    /// failed when it ran. The other parts are made readable anyway.
    ///
    /// # Examples
    /// ```
    /// # use gpu_await::{Device, ErrorKind, kernels};
    /// # futures::executor::block_on(async {
    /// # let device = Device::host();
    /// # let stream = device.stream()?;
    /// let axpy = kernels::axpy::load(&device).await?; // y += a * x
    /// let (x, longer) = (stream.full(3, 1.0f32).queued()?, stream.full(4, 1.0f32).queued()?);
    /// let mut y = stream.full(3, 2.0f32).queued()?;
    /// let error = axpy.launch(&stream, 1.0, &longer, &mut y).queued().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::InvalidCall); // of 4 elements and 3
    /// y.clear_poison()?;
    /// axpy.launch(&stream, 1.0, &x, &mut y).queued()?;
    /// assert_eq!(stream.download(&y).await?, [3.0; 3]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn clear_poison(&mut self) -> Result<()> {
        self.view_mut().clear_poison()
    }

    /// Splits in two: this buffer keeps the elements before `at`, and those from `at` on are returned. Puts
    /// nothing on a stream.
    ///
    /// # Ownership
    /// Both are independent buffers, for different tasks: work on one is not ordered behind work on the
    /// other. Their memory is freed with the last of them.
    ///
    /// # Errors
    /// [`OutOfBounds`](crate::ErrorDetail::OutOfBounds) if `at > len`; nothing is split then.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let (a, b) = (device.stream()?, device.stream()?);
    /// let mut left = a.zeros::<u32>(10).queued()?;
    /// let mut right = left.split_off(4)?;
    /// let other = std::thread::spawn(move || {
    ///     b.fill(&mut right, 2).queued()?;
    ///     Ok::<_, gpu_await::Error>(right)
    /// });
    /// a.fill(&mut left, 1).queued()?;
    /// left.unsplit(other.join().expect("no panic")?).expect("what was split off");
    /// assert_eq!(a.download(&left).await?[3..6], [1, 2, 2]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn split_off(&mut self, at: usize) -> Result<DeviceBuffer<T>> {
        checked(..at, self.len)?;
        let start_bytes = self.start_bytes + bytes_of_elements::<T>(at);
        let len = std::mem::replace(&mut self.len, at) - at;
        Ok(DeviceBuffer { memory: self.memory.clone(), start_bytes, len, element: PhantomData })
    }

    /// Rejoins a part that was [split off](Self::split_off) the end of this buffer. Copies nothing, and puts
    /// nothing on a stream.
    ///
    /// # Errors
    /// Returns `other` if it does not directly follow this buffer in the same memory.
    pub fn unsplit(&mut self, other: DeviceBuffer<T>) -> std::result::Result<(), DeviceBuffer<T>> {
        let follows = other.start_bytes == self.span().range.end;
        if !follows || !Arc::ptr_eq(&self.memory, &other.memory) {
            return Err(other);
        }
        self.len += other.len;
        Ok(())
    }
}

impl<T> sealed::Sealed for DeviceBuffer<T> {}

impl<T: Element> Extent for DeviceBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<T: Element> Readable<T> for DeviceBuffer<T> {
    fn span(&self) -> Span<'_> {
        span::<T>(&self.memory, self.start_bytes, self.len, Tracking::Tracked)
    }
}

impl<T: Element> Writable<T> for DeviceBuffer<T> {
    fn span_mut(&mut self) -> Span<'_> {
        span::<T>(&self.memory, self.start_bytes, self.len, Tracking::Tracked)
    }
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "DeviceBuffer<{}>({} elements, {:?})",
            std::any::type_name::<T>(),
            self.len,
            self.memory
        )
    }
}
