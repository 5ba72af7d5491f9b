//! Borrowed rows of device memory: 2-D ranges with a pitch.
//!
//! A use is tracked for the bytes from the start of the first row to the end of the last, gaps between rows included: the rules for
//! contiguous ranges apply, and adjacent columns are ordered as if they overlapped. A range without gaps is tracked exactly.
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use super::Element;
use super::allocation::Allocation;
use super::buffer::DeviceBuffer;
use super::frozen::Frozen;
use super::view::{Span, Tracking, View, ViewMut, bytes_of_elements, checked_of, span};
use crate::error::{ErrorDetail, Result};

/// The shape of a 2-D range in elements, of a [`View2`] and in a kernel's conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape2 {
    rows: usize,
    columns: usize,
    pitch: usize,
}

/// Borrowed rows of device memory, for reading.
///
/// A kernel takes it for a parameter `x: &[[T]]` and receives the address of its first element; the pitch is
/// passed as a separate value, as usual in CUDA: `pitch: u32 = x.pitch()`. A 2-D copy takes a
/// [`Copy2d`](crate::Copy2d).
///
/// # Ordering
/// Ordered like a [`View`] from the start of its first row to the end of its last: the gaps between its rows
/// must have been written too, and work on adjacent columns is ordered.
///
/// # Examples
/// The lower right corner of a matrix of 4 columns:
/// ```
/// # futures::executor::block_on(async {
/// # let device = gpu_await::Device::host();
/// # let stream = device.stream()?;
/// let x = stream.upload((0..12u32).collect::<Vec<_>>()).queued()?;
/// let corner = x.rows_of(4)?.slice(1.., 2..)?;
/// assert_eq!((corner.rows(), corner.columns(), corner.pitch()), (2, 2, 4));
/// assert_eq!(stream.download(&corner.row(0)?).await?, [6, 7]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
pub struct View2<'a, T> {
    memory: &'a Arc<Allocation>,
    start_bytes: u64,
    shape: Shape2,
    tracking: Tracking,
    element: PhantomData<&'a T>,
}

/// Borrowed rows of device memory, for writing; see [`View2`].
///
/// A kernel takes it for a parameter `y: &mut [[T]]` or `y: Out<[[T]]>`. The latter accepts unwritten memory
/// only if there are no gaps between its rows.
pub struct ViewMut2<'a, T> {
    memory: &'a Arc<Allocation>,
    start_bytes: u64,
    shape: Shape2,
    tracking: Tracking,
    element: PhantomData<&'a mut T>,
}

impl Shape2 {
    /// A view of borrowed rows.
    pub(crate) fn with_pitch(rows: usize, columns: usize, pitch: usize) -> Self {
        Shape2 { rows, columns, pitch }
    }

    /// The number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of elements of a row.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The number of elements from one row's start to the next one's.
    #[must_use]
    pub fn pitch(&self) -> usize {
        self.pitch
    }

    /// Whether nothing lies between the rows.
    #[must_use]
    pub fn is_dense(&self) -> bool {
        self.rows <= 1 || self.pitch == self.columns
    }

    /// The number of elements from the first row's start to the last row's end.
    pub(crate) fn extent(&self) -> usize {
        match self.rows.checked_sub(1) {
            Some(gaps) if self.columns > 0 => gaps * self.pitch + self.columns,
            _ => 0,
        }
    }

    /// `len` elements as rows.
    fn of(len: usize, columns: usize) -> Result<Shape2> {
        match len.checked_div(columns) {
            Some(rows) if rows * columns == len => Ok(Shape2 { rows, columns, pitch: columns }),
            _ => Err(ErrorDetail::Ragged { len, columns }.into()),
        }
    }

    /// A part, and its offset in elements; the offset of an empty part is 0.
    fn part(
        &self,
        rows: impl RangeBounds<usize>,
        columns: impl RangeBounds<usize>,
    ) -> Result<(usize, Shape2)> {
        let (rows, columns) =
            (checked_of(rows, self.rows, "rows")?, checked_of(columns, self.columns, "columns")?);
        let shape = Shape2 { rows: rows.len(), columns: columns.len(), pitch: self.pitch };
        let start = if shape.extent() == 0 { 0 } else { rows.start * self.pitch + columns.start };
        Ok((start, shape))
    }
}

impl<T: Element> DeviceBuffer<T> {
    /// Borrows the whole buffer as rows of `columns` elements, for reading.
    ///
    /// # Errors
    /// [`ErrorDetail::Ragged`] if they are not a whole number of rows.
    pub fn rows_of(&self, columns: usize) -> Result<View2<'_, T>> {
        self.view().rows_of(columns)
    }

    /// Borrows the whole buffer as rows of `columns` elements, for writing.
    ///
    /// # Errors
    /// [`ErrorDetail::Ragged`] if they are not a whole number of rows.
    pub fn rows_of_mut(&mut self, columns: usize) -> Result<ViewMut2<'_, T>> {
        self.view_mut().rows_of_mut(columns)
    }
}

impl<T: Element> Frozen<T> {
    /// Borrows all of it as rows of `columns` elements.
    ///
    /// # Errors
    /// [`ErrorDetail::Ragged`] if they are not a whole number of rows.
    pub fn rows_of(&self, columns: usize) -> Result<View2<'_, T>> {
        self.view().rows_of(columns)
    }
}

impl<'a, T: Element> View<'a, T> {
    /// The same elements as rows of `columns` elements.
    ///
    /// # Errors
    /// [`ErrorDetail::Ragged`] if they are not a whole number of rows.
    pub fn rows_of(&self, columns: usize) -> Result<View2<'a, T>> {
        let shape = Shape2::of(self.len(), columns)?;
        let (memory, start_bytes, tracking) = self.place();
        Ok(View2 { memory, start_bytes, shape, tracking, element: PhantomData })
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// The same elements as rows of `columns` elements.
    ///
    /// # Errors
    /// [`ErrorDetail::Ragged`] if they are not a whole number of rows.
    pub fn rows_of_mut(self, columns: usize) -> Result<ViewMut2<'a, T>> {
        let shape = Shape2::of(self.len(), columns)?;
        let (memory, start_bytes, tracking) = self.place();
        Ok(ViewMut2 { memory, start_bytes, shape, tracking, element: PhantomData })
    }
}

impl<'a, T> View2<'a, T> {
    /// The number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// The number of elements of a row.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.shape.columns
    }

    /// The number of elements from one row's start to the next one's.
    #[must_use]
    pub fn pitch(&self) -> usize {
        self.shape.pitch
    }

    /// Rows, columns and pitch.
    #[must_use]
    pub fn shape(&self) -> Shape2 {
        self.shape
    }

    pub(crate) fn span(&self) -> Span<'a> {
        span::<T>(self.memory, self.start_bytes, self.shape.extent(), self.tracking)
    }
}

impl<'a, T: Element> View2<'a, T> {
    /// Returns the device address of the first element; see [`DeviceBuffer::device_ptr`].
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.span().ptr().0
    }

    /// Borrows a part: a range of rows, and a range of elements in each.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] with the range, and the number of rows or columns.
    pub fn slice(
        &self,
        rows: impl RangeBounds<usize>,
        columns: impl RangeBounds<usize>,
    ) -> Result<View2<'a, T>> {
        let (start, shape) = self.shape.part(rows, columns)?;
        let start_bytes = self.start_bytes + bytes_of_elements::<T>(start);
        Ok(View2 { start_bytes, shape, ..*self })
    }

    /// Borrows one row.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] if there is no such row.
    pub fn row(&self, row: usize) -> Result<View<'a, T>> {
        let View2 { memory, start_bytes, shape, tracking, .. } = self.slice(row..=row, ..)?;
        Ok(View::new(memory, start_bytes, shape.columns, tracking))
    }
}

impl<'a, T> ViewMut2<'a, T> {
    /// The number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// The number of elements of a row.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.shape.columns
    }

    /// The number of elements from one row's start to the next one's.
    #[must_use]
    pub fn pitch(&self) -> usize {
        self.shape.pitch
    }

    /// Rows, columns and pitch.
    #[must_use]
    pub fn shape(&self) -> Shape2 {
        self.shape
    }

    pub(crate) fn span_mut(&mut self) -> Span<'a> {
        span::<T>(self.memory, self.start_bytes, self.shape.extent(), self.tracking)
    }
}

impl<'a, T: Element> ViewMut2<'a, T> {
    /// Returns the device address of the first element; see [`DeviceBuffer::device_ptr`].
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.view().device_ptr()
    }

    /// Borrows all of it for reading.
    #[must_use]
    pub fn view(&self) -> View2<'_, T> {
        let ViewMut2 { memory, start_bytes, shape, tracking, .. } = *self;
        View2 { memory, start_bytes, shape, tracking, element: PhantomData }
    }

    /// Borrows a part for writing; see [`View2::slice`].
    ///
    /// # Errors
    /// As [`View2::slice`].
    pub fn slice_mut(
        &mut self,
        rows: impl RangeBounds<usize>,
        columns: impl RangeBounds<usize>,
    ) -> Result<ViewMut2<'_, T>> {
        let (start, shape) = self.shape.part(rows, columns)?;
        Ok(self.at(start, shape))
    }

    /// Borrows one row for writing.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] if there is no such row.
    pub fn row_mut(&mut self, row: usize) -> Result<ViewMut<'_, T>> {
        let ViewMut2 { memory, start_bytes, shape, tracking, .. } =
            self.slice_mut(row..=row, ..)?;
        let row = ViewMut::new(memory, start_bytes, shape.columns);
        Ok(if tracking == Tracking::Tracked { row } else { row.without_tracking() })
    }

    /// Splits into the rows before `mid` and the others, which two streams may write concurrently.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] if there are fewer rows.
    pub fn split_rows_at_mut(self, mid: usize) -> Result<(ViewMut2<'a, T>, ViewMut2<'a, T>)> {
        let (above, below) = (self.shape.part(..mid, ..)?, self.shape.part(mid.., ..)?);
        Ok((self.at(above.0, above.1), self.at(below.0, below.1)))
    }

    /// Splits into the columns before `mid` and the others. One kernel may write both; work on them on two
    /// streams is ordered, because their rows interleave.
    ///
    /// # Errors
    /// [`ErrorDetail::OutOfBounds`] if there are fewer columns.
    pub fn split_columns_at_mut(self, mid: usize) -> Result<(ViewMut2<'a, T>, ViewMut2<'a, T>)> {
        let (left, right) = (self.shape.part(.., ..mid)?, self.shape.part(.., mid..)?);
        Ok((self.at(left.0, left.1), self.at(right.0, right.1)))
    }

    /// The part of that shape at offset `start`, in elements. The caller takes disjoint parts.
    fn at<'b>(&self, start: usize, shape: Shape2) -> ViewMut2<'b, T>
    where
        'a: 'b,
    {
        let start_bytes = self.start_bytes + bytes_of_elements::<T>(start);
        ViewMut2 {
            start_bytes,
            shape,
            memory: self.memory,
            tracking: self.tracking,
            element: PhantomData,
        }
    }
}

impl<T> Clone for View2<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View2<'_, T> {}

impl<T> fmt::Debug for View2<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let View2 { start_bytes, shape, memory, .. } = self;
        write!(f, "View2({shape:?} at byte {start_bytes} of {memory:?})")
    }
}

impl<T> fmt::Debug for ViewMut2<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ViewMut2 { start_bytes, shape, memory, .. } = self;
        write!(f, "ViewMut2({shape:?} at byte {start_bytes} of {memory:?})")
    }
}
