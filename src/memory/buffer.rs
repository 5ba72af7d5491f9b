//! Typed device memory and its views.
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};
use std::sync::Arc;

use super::allocation::{ALIGNMENT, Allocation};
use super::{Element, must_fit};
use crate::backend::DevicePtr;
use crate::error::{ErrorDetail, Result};

/// `len` elements of type `T` in a device's memory.
///
/// Made by the verbs of [`Stream`](crate::Stream): `upload`, `zeros`, `full`, `empty`. It may be
/// passed to operations at once, also on other streams of its device: they are ordered behind what
/// wrote it, on the device.
///
/// # Ownership
/// Operations borrow a buffer only for the call. Dropping it is always right and never blocks: the
/// memory is freed when every use on every stream is complete, and no stream waits for that.
pub struct DeviceBuffer<T> {
    memory: Arc<Allocation>,
    len: usize,
    element: PhantomData<T>,
}

/// A borrowed range of a [`DeviceBuffer`], for reading.
pub struct View<'a, T> {
    memory: &'a Arc<Allocation>,
    start_bytes: u64,
    len: usize,
    tracked: bool,
    element: PhantomData<&'a T>,
}

/// A borrowed range of a [`DeviceBuffer`], for writing.
pub struct ViewMut<'a, T> {
    memory: &'a Arc<Allocation>,
    start_bytes: u64,
    len: usize,
    tracked: bool,
    element: PhantomData<&'a mut T>,
}

/// A range of device memory, in bytes.
#[derive(Clone)]
pub struct Span<'a> {
    pub(crate) memory: &'a Arc<Allocation>,
    pub(crate) range: Range<u64>,
    /// Whether uses are entered and ordered; see [`View::untracked`] and
    /// [`Frozen`](super::frozen::Frozen).
    pub(crate) tracked: bool,
}

impl Span<'_> {
    /// Where it begins.
    pub(crate) fn ptr(&self) -> DevicePtr {
        self.memory.ptr().offset(self.range.start)
    }
}

/// Something with a length in elements.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory",
    label = "not device memory",
    note = "`DeviceBuffer`, `View`, `ViewMut` and `Frozen` are"
)]
pub trait Extent: sealed::Sealed {
    /// The number of elements.
    fn len(&self) -> usize;

    /// Whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Device memory of element type `T` that an operation may read: [`DeviceBuffer`], [`View`],
/// [`ViewMut`], [`Frozen`](super::frozen::Frozen). Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory that can be read as `{T}`",
    label = "not device memory of `{T}`",
    note = "`DeviceBuffer<{T}>`, `View<{T}>`, `ViewMut<{T}>` and `Frozen<{T}>` are; host memory is uploaded first: `stream.upload(vec)`"
)]
pub trait Readable<T>: Extent {
    #[doc(hidden)]
    fn span(&self) -> Span<'_>;
}

/// Device memory of element type `T` that an operation may write: [`DeviceBuffer`], [`ViewMut`].
/// Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory that can be written as `{T}`",
    label = "not writable device memory of `{T}`",
    note = "`DeviceBuffer<{T}>` and `ViewMut<{T}>` are, passed by `&mut`"
)]
pub trait Writable<T>: Readable<T> {
    #[doc(hidden)]
    fn span_mut(&mut self) -> Span<'_>;
}

pub(super) mod sealed {
    pub trait Sealed {}
    impl<T> Sealed for super::DeviceBuffer<T> {}
    impl<T> Sealed for super::View<'_, T> {}
    impl<T> Sealed for super::ViewMut<'_, T> {}
}

impl<T: Element> DeviceBuffer<T> {
    /// The one way to a buffer, and so to a view of elements that were not cast.
    pub(crate) fn new(memory: Allocation, len: usize) -> Self {
        const { must_fit::<T>(ALIGNMENT) };
        DeviceBuffer { memory: Arc::new(memory), len, element: PhantomData }
    }

    pub(crate) fn memory(&self) -> &Allocation {
        &self.memory
    }

    /// The allocation, if nobody else has a share of it.
    pub(crate) fn memory_mut(&mut self) -> Option<&mut Allocation> {
        Arc::get_mut(&mut self.memory)
    }

    pub(super) fn into_memory(self) -> (Arc<Allocation>, usize) {
        (self.memory, self.len)
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
    /// The memory is live from where the operation that made it stands on its stream, to where its free does.
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.memory.ptr().0
    }

    /// Borrows a range (in elements) for reading.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] with the range and the length.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>> {
        self.view().slice(range)
    }

    /// Borrows the whole buffer for reading.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        let (memory, len) = (&self.memory, self.len);
        View { memory, start_bytes: 0, len, tracked: true, element: PhantomData }
    }

    /// Borrows a range (in elements) for writing.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] with the range and the length.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>> {
        self.view_mut().part(range)
    }

    /// Borrows the whole buffer for writing.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        let (memory, len) = (&self.memory, self.len);
        ViewMut { memory, start_bytes: 0, len, tracked: true, element: PhantomData }
    }

    /// Splits into two halves that two streams may fill at once.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] if `mid > len`.
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
}

impl<'a, T: Element> View<'a, T> {
    /// Of memory that nobody writes any more: there is nothing to order.
    pub(super) fn of_frozen(memory: &'a Arc<Allocation>, len: usize) -> Self {
        View { memory, start_bytes: 0, len, tracked: false, element: PhantomData }
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

    /// Returns the device address of the first element; see [`DeviceBuffer::device_ptr`].
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.span().ptr().0
    }

    /// Borrows a part of this range, in elements.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] with the range and the length.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<View<'a, T>> {
        let range = checked(range, self.len)?;
        let start_bytes = self.start_bytes + bytes_of_elements::<T>(range.start);
        Ok(View { start_bytes, len: range.len(), ..*self })
    }

    /// The same bytes as elements of another type.
    ///
    /// # Errors
    /// [`ErrorDetail::Reinterpret`] if they are no whole number of such elements, or not aligned for
    /// them.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let x = stream.upload(vec![1.0f32, -2.0]).queued()?;
    /// let bits = stream.download(&x.view().cast::<u32>()?).await?;
    /// assert_eq!(bits, [1.0f32.to_bits(), (-2.0f32).to_bits()]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn cast<U: Element>(self) -> Result<View<'a, U>> {
        let View { memory, start_bytes, tracked, .. } = self;
        let len = cast_len::<T, U>(memory, start_bytes, self.len)?;
        Ok(View { memory, start_bytes, len, tracked, element: PhantomData })
    }

    pub(super) fn without_tracking(self) -> View<'a, T> {
        View { tracked: false, ..self }
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
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

    /// Returns the device address of the first element; see [`DeviceBuffer::device_ptr`].
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.span().ptr().0
    }

    /// Splits into two disjoint halves.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] if `mid > len`.
    pub fn split_at_mut(self, mid: usize) -> Result<(ViewMut<'a, T>, ViewMut<'a, T>)> {
        checked(..mid, self.len)?;
        let start_bytes = self.start_bytes + bytes_of_elements::<T>(mid);
        let right = ViewMut { start_bytes, len: self.len - mid, ..self };
        Ok((ViewMut { len: mid, ..self }, right))
    }

    /// The same bytes as elements of another type; see [`View::cast`].
    ///
    /// # Errors
    /// As [`View::cast`].
    pub fn cast<U: Element>(self) -> Result<ViewMut<'a, U>> {
        let ViewMut { memory, start_bytes, tracked, .. } = self;
        let len = cast_len::<T, U>(memory, start_bytes, self.len)?;
        Ok(ViewMut { memory, start_bytes, len, tracked, element: PhantomData })
    }

    pub(super) fn without_tracking(self) -> ViewMut<'a, T> {
        ViewMut { tracked: false, ..self }
    }

    /// Borrows a part of this range for writing, in elements.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] with the range and the length.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>> {
        let whole = ViewMut { memory: self.memory, element: PhantomData, ..*self };
        whole.part(range)
    }

    fn part(self, range: impl RangeBounds<usize>) -> Result<ViewMut<'a, T>> {
        let range = checked(range, self.len)?;
        let start_bytes = self.start_bytes + bytes_of_elements::<T>(range.start);
        Ok(ViewMut { start_bytes, len: range.len(), ..self })
    }
}

impl<T: Element> Extent for DeviceBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<T: Element> Extent for View<'_, T> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<T: Element> Extent for ViewMut<'_, T> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<T: Element> Readable<T> for DeviceBuffer<T> {
    fn span(&self) -> Span<'_> {
        span::<T>(&self.memory, 0, self.len, true)
    }
}

impl<T: Element> Readable<T> for View<'_, T> {
    fn span(&self) -> Span<'_> {
        span::<T>(self.memory, self.start_bytes, self.len, self.tracked)
    }
}

impl<T: Element> Readable<T> for ViewMut<'_, T> {
    fn span(&self) -> Span<'_> {
        span::<T>(self.memory, self.start_bytes, self.len, self.tracked)
    }
}

impl<T: Element> Writable<T> for DeviceBuffer<T> {
    fn span_mut(&mut self) -> Span<'_> {
        span::<T>(&self.memory, 0, self.len, true)
    }
}

impl<T: Element> Writable<T> for ViewMut<'_, T> {
    fn span_mut(&mut self) -> Span<'_> {
        span::<T>(self.memory, self.start_bytes, self.len, self.tracked)
    }
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

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

impl<T> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View({} elements at byte {} of {:?})", self.len, self.start_bytes, self.memory)
    }
}

impl<T> fmt::Debug for ViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (len, start) = (self.len, self.start_bytes);
        write!(f, "ViewMut({len} elements at byte {start} of {:?})", self.memory)
    }
}

pub(super) fn span<T>(memory: &Arc<Allocation>, start: u64, len: usize, tracked: bool) -> Span<'_> {
    Span { memory, range: start..start + bytes_of_elements::<T>(len), tracked }
}

fn bytes_of_elements<T>(len: usize) -> u64 {
    len as u64 * size_of::<T>() as u64
}

/// How many elements of type `U` the bytes of `len` elements of type `T` at byte `start` are.
fn cast_len<T, U>(memory: &Allocation, start: u64, len: usize) -> Result<usize> {
    let bytes = bytes_of_elements::<T>(len);
    let (element_bytes, alignment) = (size_of::<U>(), align_of::<U>());
    // That of an empty buffer is 0.
    let aligned = memory.ptr().offset(start).0.is_multiple_of(alignment as u64);
    match bytes.checked_div(element_bytes as u64) {
        Some(len) if aligned && bytes.is_multiple_of(element_bytes as u64) => Ok(len as usize),
        _ => Err(ErrorDetail::Reinterpret { start, bytes, element_bytes, alignment }.into()),
    }
}

/// The range in elements, if it lies within `len`.
fn checked(range: impl RangeBounds<usize>, len: usize) -> Result<Range<usize>> {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(end) => end.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => len,
    };
    if start > end || end > len {
        return Err(ErrorDetail::OutOfBounds { start, end, len }.into());
    }
    Ok(start..end)
}
