//! All arguments passed to a formula, as a tuple, and the tuple of their types.
#![forbid(unsafe_code)]

use super::arithmetic::Arithmetic;
use super::formula::Formula;
use super::operand::{Operand, PassedOperands};
use super::prepared::Prepared;
use gpu_await::{In, In2, InOut, InOut2};

/// A tuple of [`Operand`]s for a formula of `N` arguments; `IN_PLACE` without the last one. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` are not the arguments of a formula over `{T}`",
    label = "not a tuple with one number or one `&buffer` for each argument",
    note = "arguments are a tuple, `(&x,)` for a single one, of at most six; in place, the last argument of the formula is the element itself and is not passed"
)]
pub trait Operands<'k, T, const N: usize, const IN_PLACE: bool> {
    #[doc(hidden)]
    fn pass(self, passed: &mut PassedOperands<'k>);
}

impl<'k, T> Operands<'k, T, 1, true> for () {
    fn pass(self, _passed: &mut PassedOperands<'k>) {}
}

/// The type of an argument of a formula, for [`preload_transform`](crate::Preload::preload_transform): a number type for a number, else
/// [`In`] or, in place, [`InOut`] of it; for rows, including the output's, [`In2`] or [`InOut2`]. Sealed.
pub trait OperandType: sealed::OperandType + 'static {
    /// The number type.
    type Element: Arithmetic;
    #[doc(hidden)]
    const IS_SCALAR: bool;
    #[doc(hidden)]
    const IS_ROWS: bool;
}

mod sealed {
    pub trait OperandType {}
}

macro_rules! operand_types {
    ($($type:ty, $is_scalar:literal, $is_rows:literal;)+) => {$(
        impl<T: Arithmetic> sealed::OperandType for $type {}
        impl<T: Arithmetic> OperandType for $type {
            type Element = T;
            const IS_SCALAR: bool = $is_scalar;
            const IS_ROWS: bool = $is_rows;
        }
    )+};
}
operand_types! {
    T, true, false;
    In<T>, false, false;
    InOut<T>, false, false;
    In2<T>, false, true;
    InOut2<T>, false, true;
}

/// A formula that takes arguments of these types, a tuple of [`OperandType`]s. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a formula over arguments of the types `{S}`",
    label = "not a formula over `{S}`",
    note = "the types are a tuple with one for each argument: `f32` for a number, `In<f32>` for an array; all of one number type"
)]
pub trait FormulaOver<S>: Copy + Send + 'static {
    #[doc(hidden)]
    fn prepare(self) -> Prepared;
}

macro_rules! tuples {
    ($($n:literal $one_more:literal: $($operand:ident $index:tt)+;)+) => {$(
        tuples! { @pass $n false $($operand $index)+ }
        tuples! { @pass $one_more true $($operand $index)+ }

        impl<F, E, $($operand),+> FormulaOver<($($operand,)+)> for F
        where
            F: Formula<$n>,
            E: Arithmetic,
            $($operand: OperandType<Element = E>),+
        {
            fn prepare(self) -> Prepared {
                Prepared::new::<E, F, $n>(&[$($operand::IS_SCALAR),+], $($operand::IS_ROWS)||+)
            }
        }
    )+};
    (@pass $n:literal $in_place:literal $($operand:ident $index:tt)+) => {
        impl<'k, T, $($operand: Operand<'k, T>),+> Operands<'k, T, $n, $in_place> for ($($operand,)+) {
            fn pass(self, passed: &mut PassedOperands<'k>) {
                $(self.$index.pass(passed);)+
            }
        }
    };
}
tuples! {
    1 2: A 0;
    2 3: A 0 B 1;
    3 4: A 0 B 1 C 2;
    4 5: A 0 B 1 C 2 D 3;
    5 6: A 0 B 1 C 2 D 3 G 4;
    6 7: A 0 B 1 C 2 D 3 G 4 H 5;
}
