//! 2-D ranges as a kernel's arguments, and as its host twin sees them.
//!
//! | marker | passed as | the device sees | the host twin sees |
//! |---|---|---|---|
//! | [`In2<T>`] | `&view` | `const T*`, the first element | [`Slice2<T>`] |
//! | [`InOut2<T>`] | `&mut view` | `T*` | [`SliceMut2<T>`] |
//! | [`Out2<T>`] | likewise; the kernel overwrites every element | `T*` | [`SliceMut2<T>`] |
//!
//! # Invariants
//! 1. A twin gets a slice of each row and never one over the gaps, which may belong to another argument
//!    (`columns_beside_each_other_are_two_arguments`).
//! 2. An [`Out2`] with gaps is tracked as read and written, so that unwritten gaps stay marked as unwritten (`gaps_stay_unwritten`).

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use super::signature::sealed::Sealed;
use super::signature::{Arg, ArgList, Param};
use crate::backend::ArgBlock;
use crate::memory::allocation::ALIGNMENT;
use crate::memory::must_fit;
use crate::memory::view::Span;
use crate::memory::view_2d::{Shape2, View2, ViewMut2};

/// Marker: a 2-D array that the kernel reads.
#[derive(Debug)]
pub struct In2<T>(PhantomData<fn() -> T>);

/// Marker: a 2-D array that the kernel may read and write. All of it must have been written.
#[derive(Debug)]
pub struct InOut2<T>(PhantomData<fn() -> T>);

/// Marker: a 2-D array of which the kernel overwrites every element before reading any. Unwritten memory is
/// accepted if there are no gaps between its rows, and counts as written from then on.
#[derive(Debug)]
pub struct Out2<T>(PhantomData<fn() -> T>);

/// Rows of a host device's memory, as a host twin reads them.
#[derive(Debug)]
pub struct Slice2<'a, T> {
    start: *const T,
    shape: Shape2,
    element: PhantomData<&'a T>,
}

/// Rows of a host device's memory, as a host twin writes them.
#[derive(Debug)]
pub struct SliceMut2<'a, T> {
    start: *mut T,
    shape: Shape2,
    element: PhantomData<&'a mut T>,
}

// SAFETY: it reads like a `&[T]`.
unsafe impl<T: Sync> Send for Slice2<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Slice2<'_, T> {}
// SAFETY: it reads and writes like a `&mut [T]`.
unsafe impl<T: Send> Send for SliceMut2<'_, T> {}
// SAFETY: a shared reference only reads.
unsafe impl<T: Sync> Sync for SliceMut2<'_, T> {}

impl<T> Slice2<'_, T> {
    /// Returns rows, columns and pitch.
    #[must_use]
    pub fn shape(&self) -> Shape2 {
        self.shape
    }

    /// Returns a row.
    ///
    /// # Panics
    /// If there is no row with that number.
    #[must_use]
    pub fn row(&self, row: usize) -> &[T] {
        let start = self.start.wrapping_add(offset(self.shape, row));
        // SAFETY: it was made from memory with that many rows of that shape (`twin`), so these
        // elements are live and only read for `'a`.
        unsafe { std::slice::from_raw_parts(start, self.shape.columns()) }
    }

    /// Returns all rows, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[T]> {
        (0..self.shape.rows()).map(|row| self.row(row))
    }
}

impl<T> SliceMut2<'_, T> {
    /// Returns rows, columns and pitch.
    #[must_use]
    pub fn shape(&self) -> Shape2 {
        self.shape
    }

    /// Returns a row.
    ///
    /// # Panics
    /// If there is no row with that number.
    #[must_use]
    pub fn row(&self, row: usize) -> &[T] {
        let start = self.start.wrapping_add(offset(self.shape, row)).cast_const();
        // SAFETY: as in `row_mut`; nothing writes them while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(start, self.shape.columns()) }
    }

    /// Returns a row for writing.
    ///
    /// # Panics
    /// If there is no row with that number.
    pub fn row_mut(&mut self, row: usize) -> &mut [T] {
        let start = self.start.wrapping_add(offset(self.shape, row));
        // SAFETY: it was made from memory with that many rows of that shape (`twin`), so these elements are
        // live and exclusive for `'a`; and one row is borrowed at a time.
        unsafe { std::slice::from_raw_parts_mut(start, self.shape.columns()) }
    }

    /// Returns all rows, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[T]> {
        (0..self.shape.rows()).map(|row| self.row(row))
    }

    /// Returns all rows for writing, in order.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = &mut [T]> {
        let (start, shape) = (self.start, self.shape);
        (0..shape.rows()).map(move |row| {
            let start = start.wrapping_add(offset(shape, row));
            // SAFETY: as in `row_mut`; each row is returned once, and no two overlap, since the pitch is no less
            // than a row.
            unsafe { std::slice::from_raw_parts_mut(start, shape.columns()) }
        })
    }
}

/// The number of elements before a row.
fn offset(shape: Shape2, row: usize) -> usize {
    let rows = shape.rows();
    assert!(row < rows, "row {row} of {rows}");
    row * shape.pitch()
}

impl<T> Index<(usize, usize)> for Slice2<'_, T> {
    type Output = T;

    fn index(&self, (row, column): (usize, usize)) -> &T {
        &self.row(row)[column]
    }
}

impl<T> Index<(usize, usize)> for SliceMut2<'_, T> {
    type Output = T;

    fn index(&self, (row, column): (usize, usize)) -> &T {
        &self.row(row)[column]
    }
}

impl<T> IndexMut<(usize, usize)> for SliceMut2<'_, T> {
    fn index_mut(&mut self, (row, column): (usize, usize)) -> &mut T {
        &mut self.row_mut(row)[column]
    }
}

fn describe(shape: &Shape2, name: &str) -> String {
    let (rows, columns, pitch) = (shape.rows(), shape.columns(), shape.pitch());
    format!("{name}.rows() = {rows}, {name}.columns() = {columns}, {name}.pitch() = {pitch}")
}

fn push(list: &mut ArgList<'_>, span: &Span<'_>, shape: Shape2) {
    let bytes = span.range.end - span.range.start;
    let numbers = [shape.rows(), shape.columns(), shape.pitch()].map(|number| number as u64);
    list.block.push_memory_with(span.ptr().0, bytes, numbers);
}

/// The start of a 2-D argument, and its shape; dangling but aligned for one without elements.
fn rows<T>(args: &ArgBlock, index: usize) -> (*mut T, Shape2) {
    const { must_fit::<T>(ALIGNMENT) };
    let [rows, columns, pitch] = args.numbers(index).map(|number| number as usize);
    let start = match args.memory_bytes(index) {
        0 => std::ptr::dangling_mut(),
        _ => args.address(index) as *mut T,
    };
    (start, Shape2::with_pitch(rows, columns, pitch))
}

impl<T> Sealed for In2<T> {}
impl<T: 'static> Param for In2<T> {
    type Shape = Shape2;
    type Twin<'a> = Slice2<'a, T>;
    // SAFETY: the caller vouches for the memory, whose shape `rows` returns.
    unsafe fn twin<'a>(args: &'a ArgBlock, index: usize) -> Slice2<'a, T> {
        let (start, shape) = rows::<T>(args, index);
        Slice2 { start, shape, element: PhantomData }
    }
    fn describe(shape: &Shape2, name: &str) -> String {
        describe(shape, name)
    }
}
impl<'k, T: 'static> Arg<'k, In2<T>> for &'k View2<'_, T> {
    fn push(self, list: &mut ArgList<'k>) -> Shape2 {
        let span = self.span();
        list.footprint.reads(&span);
        push(list, &span, self.shape());
        self.shape()
    }
}

macro_rules! written_rows {
    ($($marker:ident $overwrites:literal)+) => {$(
        impl<T> Sealed for $marker<T> {}
        impl<T: 'static> Param for $marker<T> {
            type Shape = Shape2;
            type Twin<'a> = SliceMut2<'a, T>;
            // SAFETY: the caller vouches for the memory, whose shape `rows` returns.
            unsafe fn twin<'a>(args: &'a ArgBlock, index: usize) -> SliceMut2<'a, T> {
                let (start, shape) = rows::<T>(args, index);
                SliceMut2 { start, shape, element: PhantomData }
            }
            fn describe(shape: &Shape2, name: &str) -> String {
                describe(shape, name)
            }
        }
        impl<'k, T: 'static> Arg<'k, $marker<T>> for &'k mut ViewMut2<'_, T> {
            fn push(self, list: &mut ArgList<'k>) -> Shape2 {
                let (span, shape) = (self.span_mut(), self.shape());
                if $overwrites && shape.is_dense() {
                    list.footprint.overwrites(&span);
                } else {
                    list.footprint.updates(&span);
                }
                push(list, &span, shape);
                shape
            }
        }
    )+};
}
written_rows! { InOut2 false Out2 true }
