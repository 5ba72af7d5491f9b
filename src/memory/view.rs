//! Borrowed ranges of device memory, and the arguments of operations.
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};
use std::sync::Arc;

use super::Element;
use super::allocation::{Allocation, NamedUses};
use crate::backend::{DevicePtr, HostPtr};
use crate::error::{ErrorDetail, Result};

/// A borrowed range of a [`DeviceBuffer`](super::buffer::DeviceBuffer), for reading.
pub struct View<'a, T> {
    memory: &'a Arc<Allocation>,
    start_bytes: u64,
    len: usize,
    tracking: Tracking,
    element: PhantomData<&'a T>,
}

/// A borrowed range of a [`DeviceBuffer`](super::buffer::DeviceBuffer), for writing.
pub struct ViewMut<'a, T> {
    memory: &'a Arc<Allocation>,
    start_bytes: u64,
    len: usize,
    tracking: Tracking,
    element: PhantomData<&'a mut T>,
}

/// A range of device memory, in bytes.
#[derive(Clone)]
pub struct Span<'a> {
    pub(crate) memory: &'a Arc<Allocation>,
    pub(crate) range: Range<u64>,
    pub(crate) tracking: Tracking,
    /// The blocks that a launch names, if the span is a whole slab. Only launches use them; for any other use, and on a host
    /// device, the span counts.
    pub(crate) named: Option<&'a NamedUses>,
}

/// What orders the uses of a range. It belongs to the access, and is set when its span is made: other parts of the allocation may be
/// used in another way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Tracking {
    /// The library: the uses are entered in the hazards.
    Tracked,
    /// Nothing: the uses are reads, and nothing writes the range any more; see [`Frozen`](super::frozen::Frozen).
    Frozen,
    /// The caller, through stream order; see [`View::untracked`].
    ByCaller,
}

impl Tracking {
    fn without_tracking(self) -> Tracking {
        match self {
            Tracking::Tracked | Tracking::ByCaller => Tracking::ByCaller,
            Tracking::Frozen => Tracking::Frozen,
        }
    }
}

impl<'a> Span<'a> {
    /// The device address of its start.
    pub(crate) fn ptr(&self) -> DevicePtr {
        self.memory.ptr.offset(self.range.start)
    }

    /// Its host address, if it is pinned memory.
    pub(crate) fn host(&self) -> Option<HostPtr> {
        let start = self.memory.host()?;
        Some(HostPtr(start.0 + self.range.start as usize))
    }

    /// [`ptr`](Self::ptr), as a number.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.ptr().0
    }

    /// Its length in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Its first elements.
    ///
    /// # Errors
    /// The span has fewer elements, is not a whole number of them, or is not aligned for them.
    pub fn view<T: Element>(&self, len: usize) -> Result<View<'a, T>> {
        View::<u8>::over(self.clone(), self.size_bytes() as usize).cast::<T>()?.slice(..len)
    }
}

/// Something with a length in elements.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory",
    label = "not device memory",
    note = "`DeviceBuffer`, `View`, `ViewMut`, `Frozen` and `Mapped` are; of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does"
)]
pub trait Extent: sealed::Sealed {
    /// The number of elements.
    fn len(&self) -> usize;

    /// Whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Device memory of element type `T` that an operation may read: [`DeviceBuffer`](super::buffer::DeviceBuffer), [`View`],
/// [`ViewMut`], [`Frozen`](super::frozen::Frozen), [`Mapped`](super::mapped::Mapped). Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory that can be read as `{T}`",
    label = "not device memory of `{T}`",
    note = "`DeviceBuffer<{T}>`, `View<{T}>`, `ViewMut<{T}>`, `Frozen<{T}>` and `Mapped<{T}>` are",
    note = "of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does",
    note = "host memory is uploaded first: `stream.upload(vec).queued()?`"
)]
pub trait Readable<T>: Extent {
    #[doc(hidden)]
    fn span(&self) -> Span<'_>;
}

/// Device memory of element type `T` that an operation may write: [`DeviceBuffer`](super::buffer::DeviceBuffer), [`ViewMut`],
/// [`Mapped`](super::mapped::Mapped). Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not device memory that can be written as `{T}`",
    label = "not writable device memory of `{T}`",
    note = "`DeviceBuffer<{T}>`, `ViewMut<{T}>` and `Mapped<{T}>` are, passed by `&mut`",
    note = "rows (`ViewMut2`) are written by `copy_2d`, a kernel, or `transform(transform!(|v| v), (value,), rows)` of gpu-await-algorithms; \
            through the view that they were made of, what is between them is written too",
    note = "of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does"
)]
pub trait Writable<T>: Readable<T> {
    #[doc(hidden)]
    fn span_mut(&mut self) -> Span<'_>;
}

pub(crate) mod sealed {
    pub trait Sealed {}
    impl<T> Sealed for super::View<'_, T> {}
    impl<T> Sealed for super::ViewMut<'_, T> {}
}

impl<'a, T: Element> View<'a, T> {
    /// A view of the elements at an offset.
    pub(super) fn new(
        memory: &'a Arc<Allocation>,
        start_bytes: u64,
        len: usize,
        tracking: Tracking,
    ) -> Self {
        View { memory, start_bytes, len, tracking, element: PhantomData }
    }

    /// A view of the elements of a range.
    pub(crate) fn over(span: Span<'a>, len: usize) -> Self {
        View::new(span.memory, span.range.start, len, span.tracking)
    }

    /// Its range.
    pub(crate) fn whole(&self) -> Span<'a> {
        span::<T>(self.memory, self.start_bytes, self.len, self.tracking)
    }

    /// The memory, where the elements begin in it, and what orders its uses.
    pub(super) fn place(&self) -> (&'a Arc<Allocation>, u64, Tracking) {
        (self.memory, self.start_bytes, self.tracking)
    }

    /// The first `mid` elements, or all, and the rest.
    pub(super) fn cut(self, mid: usize) -> (View<'a, T>, View<'a, T>) {
        let mid = mid.min(self.len);
        let start_bytes = self.start_bytes + bytes_of_elements::<T>(mid);
        (View { len: mid, ..self }, View { start_bytes, len: self.len - mid, ..self })
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

    /// Returns the device address of the first element; see [`DeviceBuffer::device_ptr`](super::buffer::DeviceBuffer::device_ptr).
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

    /// Reinterprets the bytes as elements of another type.
    ///
    /// # Errors
    /// [`ErrorDetail::Reinterpret`] if they are not a whole number of such elements, or not aligned for them.
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
        let View { memory, start_bytes, tracking, .. } = self;
        let len = cast_len::<T, U>(memory, start_bytes, self.len)?;
        Ok(View { memory, start_bytes, len, tracking, element: PhantomData })
    }

    pub(super) fn without_tracking(self) -> View<'a, T> {
        View { tracking: self.tracking.without_tracking(), ..self }
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// An exclusive view of the elements at an offset.
    pub(super) fn new(memory: &'a Arc<Allocation>, start_bytes: u64, len: usize) -> Self {
        ViewMut { memory, start_bytes, len, tracking: Tracking::Tracked, element: PhantomData }
    }

    /// A view of the elements of an exclusive range.
    pub(crate) fn over(span: Span<'a>, len: usize) -> Self {
        let Span { memory, range, tracking, .. } = span;
        ViewMut { memory, start_bytes: range.start, len, tracking, element: PhantomData }
    }

    /// Its range, which is exclusive while this exists.
    pub(crate) fn whole(&self) -> Span<'a> {
        span::<T>(self.memory, self.start_bytes, self.len, self.tracking)
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

    /// Returns the device address of the first element; see [`DeviceBuffer::device_ptr`](super::buffer::DeviceBuffer::device_ptr).
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.span().ptr().0
    }

    /// Splits into two disjoint parts.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] if `mid > len`.
    pub fn split_at_mut(self, mid: usize) -> Result<(ViewMut<'a, T>, ViewMut<'a, T>)> {
        checked(..mid, self.len)?;
        Ok(self.cut(mid))
    }

    /// The memory, where the elements begin in it, and what orders its uses.
    pub(super) fn place(&self) -> (&'a Arc<Allocation>, u64, Tracking) {
        (self.memory, self.start_bytes, self.tracking)
    }

    /// The first `mid` elements, or all, and the rest.
    pub(super) fn cut(self, mid: usize) -> (ViewMut<'a, T>, ViewMut<'a, T>) {
        let mid = mid.min(self.len);
        let start_bytes = self.start_bytes + bytes_of_elements::<T>(mid);
        let right = ViewMut { start_bytes, len: self.len - mid, ..self };
        (ViewMut { len: mid, ..self }, right)
    }

    /// Reborrows all of it.
    pub(super) fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { memory: self.memory, element: PhantomData, ..*self }
    }

    /// Reinterprets the bytes as elements of another type; see [`View::cast`].
    ///
    /// # Errors
    /// As [`View::cast`].
    pub fn cast<U: Element>(self) -> Result<ViewMut<'a, U>> {
        let ViewMut { memory, start_bytes, tracking, .. } = self;
        let len = cast_len::<T, U>(memory, start_bytes, self.len)?;
        Ok(ViewMut { memory, start_bytes, len, tracking, element: PhantomData })
    }

    /// Makes this part readable again; see [`DeviceBuffer::clear_poison`](super::buffer::DeviceBuffer::clear_poison).
    ///
    /// # Errors
    /// As [`DeviceBuffer::clear_poison`](super::buffer::DeviceBuffer::clear_poison).
    pub fn clear_poison(&mut self) -> Result<()> {
        let Span { memory, range, .. } = self.whole();
        memory.clear_poison(&range, "clear_poison")
    }

    pub(super) fn without_tracking(self) -> ViewMut<'a, T> {
        ViewMut { tracking: self.tracking.without_tracking(), ..self }
    }

    /// Borrows all of it for reading.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        let ViewMut { memory, start_bytes, len, tracking, .. } = *self;
        View { memory, start_bytes, len, tracking, element: PhantomData }
    }

    /// Borrows a part of this range for reading, in elements.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] with the range and the length.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>> {
        self.view().slice(range)
    }

    /// Borrows a part of this range for writing, in elements.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] with the range and the length.
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>> {
        self.reborrow().part(range)
    }

    pub(super) fn part(self, range: impl RangeBounds<usize>) -> Result<ViewMut<'a, T>> {
        let range = checked(range, self.len)?;
        let start_bytes = self.start_bytes + bytes_of_elements::<T>(range.start);
        Ok(ViewMut { start_bytes, len: range.len(), ..self })
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

impl<T: Element> Readable<T> for View<'_, T> {
    fn span(&self) -> Span<'_> {
        span::<T>(self.memory, self.start_bytes, self.len, self.tracking)
    }
}

impl<T: Element> Readable<T> for ViewMut<'_, T> {
    fn span(&self) -> Span<'_> {
        span::<T>(self.memory, self.start_bytes, self.len, self.tracking)
    }
}

impl<T: Element> Writable<T> for ViewMut<'_, T> {
    fn span_mut(&mut self) -> Span<'_> {
        span::<T>(self.memory, self.start_bytes, self.len, self.tracking)
    }
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

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

pub(super) fn span<T>(
    memory: &Arc<Allocation>,
    start: u64,
    len: usize,
    tracking: Tracking,
) -> Span<'_> {
    Span { memory, range: start..start + bytes_of_elements::<T>(len), tracking, named: None }
}

pub(super) fn bytes_of_elements<T>(len: usize) -> u64 {
    len as u64 * size_of::<T>() as u64
}

/// How many elements of type `U` fill the bytes of `len` elements of type `T` at byte `start`.
fn cast_len<T, U>(memory: &Allocation, start: u64, len: usize) -> Result<usize> {
    let bytes = bytes_of_elements::<T>(len);
    let (element_bytes, alignment) = (size_of::<U>(), align_of::<U>());
    // The address of an empty buffer is 0.
    let aligned = memory.ptr.offset(start).0.is_multiple_of(alignment as u64);
    match bytes.checked_div(element_bytes as u64) {
        Some(len) if aligned && bytes.is_multiple_of(element_bytes as u64) => Ok(len as usize),
        _ => Err(ErrorDetail::Reinterpret { start, bytes, element_bytes, alignment }.into()),
    }
}

/// The range in elements, if it lies within `len`.
pub(super) fn checked(range: impl RangeBounds<usize>, len: usize) -> Result<Range<usize>> {
    checked_of(range, len, "elements")
}

/// The range, if it lies within `len` of `unit`.
pub(super) fn checked_of(
    range: impl RangeBounds<usize>,
    len: usize,
    unit: &'static str,
) -> Result<Range<usize>> {
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
        return Err(ErrorDetail::OutOfBounds { start, end, len, unit }.into());
    }
    Ok(start..end)
}
