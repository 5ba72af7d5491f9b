//! The arguments of a graph launch: the types of its slots, and the values passed for them.
#![forbid(unsafe_code)]

use std::fmt::Debug;

use bytemuck::Pod;
use smallvec::SmallVec;

use crate::backend::ArgBlock;
use crate::kernel::signature::{In, InOut, Out, Param, Signature, Value};
use crate::memory::Element;
use crate::memory::view::{Readable, Span, View, ViewMut, Writable};

/// A parameter of a [`Graph`](crate::Graph): a number, [`Value<T>`], [`In<T>`], [`InOut<T>`] or [`Out<T>`]. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a slot of graphs",
    label = "not a slot",
    note = "slots are numbers, `Value<T>` for plain data of yours, and the arrays `In<T>`, `InOut<T>` and `Out<T>`"
)]
pub trait GraphSlot: Param {
    /// The closure's argument: the value, a [`View`] or a [`ViewMut`].
    type Of<'a>;
    #[doc(hidden)]
    fn enter<'a>(of: &Self::Of<'a>, passed: &mut Passed<'a>);
}

/// Something that can be passed for the slot `P`, as for a kernel's parameter. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be passed to a graph for its slot `{P}`",
    label = "not an argument for `{P}`",
    note = "for `In<T>` pass `&` a buffer or view, for `InOut<T>` and `Out<T>` `&mut` one, for a number that number",
    note = "of an `Op` pass what `.queued()?` or `.await?` returns, of a `Result` what `?` does"
)]
pub trait GraphArg<'k, P: GraphSlot> {
    #[doc(hidden)]
    fn slot(self, seal: Seal) -> P::Of<'k>;
}

/// The slots of a graph: a tuple of at most eight. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` are not the slots of a graph",
    label = "not a tuple of slots",
    note = "slots are a tuple of at most eight, `(InOut<f32>,)` for a single one"
)]
pub trait GraphSlots: Signature {
    /// The closure's arguments.
    type Of<'a>;
    #[doc(hidden)]
    fn enter<'a>(of: &Self::Of<'a>, passed: &mut Passed<'a>);
}

/// A tuple of arguments for the slots `S`. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` are not the arguments of a graph with the slots `{S}`",
    label = "other arguments than the slots",
    note = "arguments are a tuple with one for each slot, `(x,)` for a single one"
)]
pub trait GraphArgs<'k, S: GraphSlots> {
    #[doc(hidden)]
    fn slots(self, seal: Seal) -> S::Of<'k>;
}

/// Other crates cannot name it, and so cannot implement a function that takes it.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct Seal(pub(super) ());

/// The values passed for the slots.
#[derive(Default)]
#[doc(hidden)]
pub struct Passed<'a> {
    /// Addresses, lengths and values: equal ones give equal launches.
    pub(super) block: ArgBlock,
    /// Each array, and whether it may be written.
    pub(super) arrays: SmallVec<[(Span<'a>, bool); 4]>,
}

impl<'a> Passed<'a> {
    fn array(&mut self, span: Span<'a>, written: bool) {
        self.block.push_memory(span.ptr().0, span.range.end - span.range.start);
        self.block.push_value(&[span.tracking as u8]);
        self.arrays.push((span, written));
    }
}

macro_rules! scalars {
    ($($type:ty)+) => {$(
        impl GraphSlot for $type {
            type Of<'a> = $type;
            fn enter(of: &$type, passed: &mut Passed<'_>) {
                passed.block.push_value(bytemuck::bytes_of(of));
            }
        }
        impl<'k> GraphArg<'k, $type> for $type {
            fn slot(self, _seal: Seal) -> $type {
                self
            }
        }
    )+};
}
scalars! { u8 u16 u32 u64 usize i8 i16 i32 i64 isize f32 f64 half::f16 half::bf16 }

impl<T: Pod + Debug + Send + Sync> GraphSlot for Value<T> {
    type Of<'a> = T;
    fn enter(of: &T, passed: &mut Passed<'_>) {
        passed.block.push_value(bytemuck::bytes_of(of));
    }
}
impl<'k, T: Pod + Debug + Send + Sync> GraphArg<'k, Value<T>> for T {
    fn slot(self, _seal: Seal) -> T {
        self
    }
}

impl<T: Element> GraphSlot for In<T> {
    type Of<'a> = View<'a, T>;
    fn enter<'a>(of: &View<'a, T>, passed: &mut Passed<'a>) {
        passed.array(of.whole(), false);
    }
}
impl<'k, T: Element, B: Readable<T>> GraphArg<'k, In<T>> for &'k B {
    fn slot(self, _seal: Seal) -> View<'k, T> {
        View::over(self.span(), self.len())
    }
}

macro_rules! written {
    ($($marker:ident)+) => {$(
        impl<T: Element> GraphSlot for $marker<T> {
            type Of<'a> = ViewMut<'a, T>;
            fn enter<'a>(of: &ViewMut<'a, T>, passed: &mut Passed<'a>) {
                passed.array(of.whole(), true);
            }
        }
        impl<'k, T: Element, B: Writable<T>> GraphArg<'k, $marker<T>> for &'k mut B {
            fn slot(self, _seal: Seal) -> ViewMut<'k, T> {
                let len = self.len();
                ViewMut::over(self.span_mut(), len)
            }
        }
    )+};
}
written! { InOut Out }

macro_rules! tuples {
    ($(($($param:ident $arg:ident $index:tt)+))+) => {$(
        impl<$($param: GraphSlot),+> GraphSlots for ($($param,)+) {
            type Of<'a> = ($($param::Of<'a>,)+);
            fn enter<'a>(of: &Self::Of<'a>, passed: &mut Passed<'a>) {
                $($param::enter(&of.$index, passed);)+
            }
        }
        impl<'k, $($param: GraphSlot, $arg: GraphArg<'k, $param>),+> GraphArgs<'k, ($($param,)+)> for ($($arg,)+) {
            fn slots(self, seal: Seal) -> ($($param::Of<'k>,)+) {
                ($(self.$index.slot(seal),)+)
            }
        }
    )+};
}
tuples! {
    (P0 A0 0)
    (P0 A0 0 P1 A1 1)
    (P0 A0 0 P1 A1 1 P2 A2 2)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6)
    (P0 A0 0 P1 A1 1 P2 A2 2 P3 A3 3 P4 A4 4 P5 A5 5 P6 A6 6 P7 A7 7)
}

impl GraphSlots for () {
    type Of<'a> = ();
    fn enter((): &(), _key: &mut Passed<'_>) {}
}
impl<'k> GraphArgs<'k, ()> for () {
    fn slots(self, _seal: Seal) {}
}
