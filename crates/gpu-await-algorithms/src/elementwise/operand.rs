//! An argument passed to a formula.
//!
//! | passed | the argument is |
//! |---|---|
//! | a number | the same for all elements |
//! | `&buffer`, `&view` | an element of an array |
//! | rows, a [`View2`] | an element of a row |
//! | nothing, in place | the element that is overwritten |
#![forbid(unsafe_code)]

use smallvec::SmallVec;

use gpu_await::sibling::{ArgBlock, Footprint, Span, rows_span, rows_span_mut};
use gpu_await::{Readable, Shape2, View2, ViewMut2, Writable};

/// The most arguments of a formula.
pub(super) const MOST: usize = 6;

/// The arguments of a launch, while they are collected.
#[doc(hidden)]
pub struct PassedOperands<'k> {
    pub(super) args: ArgBlock,
    pub(super) footprint: Footprint<'k>,
    /// Which of the arguments are numbers.
    pub(super) scalars: SmallVec<[bool; MOST]>,
    pub(super) arrays: SmallVec<[PassedArray<'k>; MOST + 1]>,
}

/// An array that is traversed.
#[doc(hidden)]
#[derive(Clone)]
pub struct PassedArray<'k> {
    pub(super) span: Span<'k>,
    pub(super) len: usize,
    pub(super) element_bytes: u32,
    /// The shape, for rows.
    pub(super) shape: Option<Shape2>,
}

impl<'k> PassedArray<'k> {
    fn flat<T>(span: Span<'k>, len: usize) -> Self {
        PassedArray { span, len, element_bytes: size_of::<T>() as u32, shape: None }
    }

    fn rows<T>(span: Span<'k>, shape: Shape2) -> Self {
        let len = shape.rows() * shape.columns();
        PassedArray { shape: Some(shape), ..Self::flat::<T>(span, len) }
    }
}

impl<'k> PassedOperands<'k> {
    pub(super) fn new(verb: &'static str) -> Self {
        PassedOperands {
            args: ArgBlock::default(),
            footprint: Footprint::new(verb),
            scalars: SmallVec::new(),
            arrays: SmallVec::new(),
        }
    }

    pub(super) fn number<N: bytemuck::Pod>(&mut self, number: N) {
        self.args.push_value(bytemuck::bytes_of(&number));
        self.scalars.push(true);
    }

    /// Adds an array that is traversed; its use is declared elsewhere.
    fn walks(&mut self, array: PassedArray<'k>) {
        self.touches(&array.span);
        self.arrays.push(array);
    }

    /// An array, as the kernel gets it.
    pub(super) fn touches(&mut self, span: &Span<'k>) {
        self.args.push_memory(span.address(), span.size_bytes());
    }

    /// An array that is overwritten. `in_place` it is also read, as the last argument; otherwise it is not an argument. Returns its length.
    pub(super) fn writes(&mut self, array: PassedArray<'k>, in_place: bool) -> usize {
        let len = array.len;
        // Gaps between rows may be unwritten, and stay so.
        let is_whole = array.shape.is_none_or(|shape| shape.is_dense());
        if in_place || !is_whole {
            self.footprint.updates(&array.span);
        } else {
            self.footprint.overwrites(&array.span);
        }
        if in_place {
            self.walks(array.clone());
            self.scalars.push(false);
        }
        self.walks(array);
        len
    }

    /// An array that is overwritten, and is not an argument.
    pub(super) fn overwrites<T>(&mut self, array: &'k mut impl Writable<T>) -> usize {
        let len = array.len();
        self.writes(PassedArray::flat::<T>(array.span_mut(), len), false)
    }

    /// An array that is read.
    pub(super) fn reads<T>(&mut self, array: &'k impl Readable<T>) {
        self.reads_array(PassedArray::flat::<T>(array.span(), array.len()));
    }

    fn reads_array(&mut self, array: PassedArray<'k>) {
        self.footprint.reads(&array.span);
        self.walks(array);
        self.scalars.push(false);
    }
}

/// An argument of a formula: a number, device memory of numbers by `&`, or rows, a [`View2`] as it is. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be passed for an argument of a formula over `{T}`",
    label = "neither a `{T}` nor device memory of `{T}`",
    note = "pass the number itself, or `&DeviceBuffer<{T}>`, `&View<{T}>` or `&Frozen<{T}>`, or a `View2<{T}>` without `&` (kernels take it with); the output says what the elements are",
    note = "of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does"
)]
pub trait Operand<'k, T> {
    #[doc(hidden)]
    fn pass(self, passed: &mut PassedOperands<'k>);
}

impl<'k, T, B: Readable<T>> Operand<'k, T> for &'k B {
    fn pass(self, passed: &mut PassedOperands<'k>) {
        passed.reads(self);
    }
}

impl<'k, T> Operand<'k, T> for View2<'k, T> {
    fn pass(self, passed: &mut PassedOperands<'k>) {
        passed.reads_array(PassedArray::rows::<T>(rows_span(&self), self.shape()));
    }
}

/// What a formula writes: device memory by `&mut`, or rows, a [`ViewMut2`] as it is. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be written by a formula over `{T}`",
    label = "not writable device memory of `{T}`",
    note = "pass `&mut DeviceBuffer<{T}>`, `&mut ViewMut<{T}>` or `&mut Mapped<{T}>`, or a `ViewMut2<{T}>` without `&mut`",
    note = "of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does"
)]
pub trait Written<'k, T> {
    #[doc(hidden)]
    fn array(self) -> PassedArray<'k>;
}

impl<'k, T, B: Writable<T>> Written<'k, T> for &'k mut B {
    fn array(self) -> PassedArray<'k> {
        let len = self.len();
        PassedArray::flat::<T>(self.span_mut(), len)
    }
}

impl<'k, T> Written<'k, T> for ViewMut2<'k, T> {
    fn array(mut self) -> PassedArray<'k> {
        PassedArray::rows::<T>(rows_span_mut(&mut self), self.shape())
    }
}
