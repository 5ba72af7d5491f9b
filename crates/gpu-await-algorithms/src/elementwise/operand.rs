//! An argument passed to a formula.
//!
//! | passed | the argument is |
//! |---|---|
//! | a number | the same for all elements |
//! | `&buffer`, `&view` | an element of an array |
//! | nothing, in place | the element that is overwritten |
#![forbid(unsafe_code)]

use smallvec::SmallVec;

use gpu_await::sibling::{ArgBlock, Footprint, Span};
use gpu_await::{Readable, Writable};

/// The most arguments of a formula.
pub(super) const MOST: usize = 6;

/// The arguments of a launch, as they are collected.
#[doc(hidden)]
pub struct PassedOperands<'k> {
    pub(super) args: ArgBlock,
    pub(super) footprint: Footprint<'k>,
    /// Which of the arguments are numbers.
    pub(super) scalars: SmallVec<[bool; MOST]>,
    /// For each array that is traversed: its memory, its length and the element size.
    pub(super) arrays: SmallVec<[(Span<'k>, usize, u32); MOST + 1]>,
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

    /// Adds an array that is traversed; its use is entered elsewhere.
    pub(super) fn walks<T>(&mut self, span: &Span<'k>, len: usize) {
        self.arrays.push((span.clone(), len, size_of::<T>() as u32));
        self.touches(span);
    }

    /// An array, as the kernel gets it.
    pub(super) fn touches(&mut self, span: &Span<'k>) {
        self.args.push_memory(span.address(), span.size_bytes());
    }

    /// An array that is overwritten, and none of the arguments.
    pub(super) fn overwrites<T>(&mut self, array: &'k mut impl Writable<T>) -> usize {
        let len = array.len();
        let span = array.span_mut();
        self.footprint.overwrites(&span);
        self.walks::<T>(&span, len);
        len
    }

    /// An array that is read as the last argument, and then overwritten.
    pub(super) fn updates<T>(&mut self, array: &'k mut impl Writable<T>) -> usize {
        let len = array.len();
        let span = array.span_mut();
        self.footprint.updates(&span);
        self.walks::<T>(&span, len);
        self.scalars.push(false);
        self.walks::<T>(&span, len);
        len
    }

    /// An array that is read.
    pub(super) fn reads<T>(&mut self, array: &'k impl Readable<T>) {
        let span = array.span();
        self.footprint.reads(&span);
        self.walks::<T>(&span, array.len());
        self.scalars.push(false);
    }
}

/// An argument of a formula: a number, or device memory of numbers by `&`. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be passed for an argument of a formula over `{T}`",
    label = "neither a `{T}` nor device memory of `{T}`",
    note = "pass the number itself, or `&DeviceBuffer<{T}>`, `&View<{T}>` or `&Frozen<{T}>`; the output says what the elements are",
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
