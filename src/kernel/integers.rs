//! The shapes of arguments, and integers in a declaration's conditions, its geometry and its derived arguments.
//!
//! `x.len() == rows * columns` over `u32` would wrap around where the caller's crate has no overflow checks, and admit a launch past its
//! arrays. So the expansion of [`kernel!`](crate::kernel!) shows every integer of a declaration to its expressions as an `i128`, which
//! holds the product of any two lengths, or of four `u32`. The value of an expression is converted back with a check.
//!
//! | an expression | the launch |
//! |---|---|
//! | has a value that its parameter can hold | proceeds |
//! | of a derived argument has any other value | is refused: [`ErrorDetail::IntegerRange`](crate::ErrorDetail::IntegerRange) |
//! | of the geometry has a value that no extent can hold | is refused: the extent is `u32::MAX`, which is beyond every limit |
//! | panics: a division by zero, an overflow if overflows are checked | is refused: [`ErrorDetail::Evaluation`](crate::ErrorDetail::Evaluation) |
//!
//! # Invariants
//! 1. A declaration without `as` in its expressions admits nothing that exact arithmetic would not (`tests/kernels/integers.rs`).
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::marker::PhantomData;

use crate::error::{Error, ErrorDetail};
use crate::memory::view::Extent;
use crate::memory::view_2d::Shape2;
use crate::thread::contain;

/// A primitive integer, for geometries and derived arguments. Sealed.
///
/// In the expressions of [`kernel!`](crate::kernel!), lengths and integer arguments are `i128`. Convert a constant or a struct's field with
/// [`wide`](Self::wide), which is in scope there, to combine it with them.
pub trait Integer: Copy + sealed::Sealed {
    /// Returns the value as an `i128`.
    fn wide(self) -> i128;
}

/// A primitive integer that can be a derived argument.
#[doc(hidden)]
pub trait Parameter: Integer + TryFrom<i128> {
    const LEAST: Self;
    const MOST: Self;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! integers {
    ($($type:ident)+) => {$(
        impl sealed::Sealed for $type {}
        impl Integer for $type {
            #[inline]
            fn wide(self) -> i128 {
                self as i128
            }
        }
        impl Parameter for $type {
            const LEAST: Self = $type::MIN;
            const MOST: Self = $type::MAX;
        }
    )+};
}
integers!(u8 u16 u32 u64 usize i8 i16 i32 i64 isize);

impl sealed::Sealed for i128 {}
impl Integer for i128 {
    #[inline]
    fn wide(self) -> i128 {
        self
    }
}

/// Methods that `usize` has and `i128` lacks, so that expressions over lengths compile unchanged. Their results are those of `usize` where
/// both have one.
#[doc(hidden)]
pub trait AsUnsigned: Copy {
    fn div_ceil(self, by: i128) -> i128;
    fn next_multiple_of(self, of: i128) -> i128;
    fn is_multiple_of(self, of: i128) -> bool;
    fn is_power_of_two(self) -> bool;
}

impl AsUnsigned for i128 {
    #[inline]
    fn div_ceil(self, by: i128) -> i128 {
        let (whole, rest) = (self / by, self % by);
        if rest != 0 && (rest > 0) == (by > 0) { whole + 1 } else { whole }
    }

    #[inline]
    fn next_multiple_of(self, of: i128) -> i128 {
        AsUnsigned::div_ceil(self, of) * of
    }

    #[inline]
    fn is_multiple_of(self, of: i128) -> bool {
        if of == 0 { self == 0 } else { self % of == 0 }
    }

    #[inline]
    fn is_power_of_two(self) -> bool {
        self > 0 && self & (self - 1) == 0
    }
}

/// The length of an array argument, as preconditions see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Len(usize);

impl Len {
    /// Returns the length of anything that has one.
    pub fn of(what: &impl Extent) -> Self {
        Len(what.len())
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }
}

/// How many blocks a table has, and their length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    pub(super) blocks: usize,
    pub(super) block_len: usize,
}

impl TableShape {
    /// The number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The number of elements per block.
    #[must_use]
    pub fn block_len(&self) -> usize {
        self.block_len
    }
}

/// An array, as expressions see it.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct ArrayLen(Len);

/// Rows, as expressions see them.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct RowsLen(Shape2);

impl ArrayLen {
    #[must_use]
    #[inline]
    pub fn new(len: Len) -> Self {
        ArrayLen(len)
    }

    #[must_use]
    #[inline]
    pub fn len(&self) -> i128 {
        self.0.len().wide()
    }

    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A table, as expressions see it.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct TableLen(TableShape);

impl TableLen {
    #[must_use]
    #[inline]
    pub fn new(shape: TableShape) -> Self {
        TableLen(shape)
    }

    #[must_use]
    #[inline]
    pub fn blocks(&self) -> i128 {
        self.0.blocks().wide()
    }

    #[must_use]
    #[inline]
    pub fn block_len(&self) -> i128 {
        self.0.block_len().wide()
    }
}

impl RowsLen {
    #[must_use]
    #[inline]
    pub fn new(shape: Shape2) -> Self {
        RowsLen(shape)
    }

    #[must_use]
    #[inline]
    pub fn rows(&self) -> i128 {
        self.0.rows().wide()
    }

    #[must_use]
    #[inline]
    pub fn columns(&self) -> i128 {
        self.0.columns().wide()
    }

    #[must_use]
    #[inline]
    pub fn pitch(&self) -> i128 {
        self.0.pitch().wide()
    }

    #[must_use]
    #[inline]
    pub fn is_dense(&self) -> bool {
        self.0.is_dense()
    }
}

/// Why a declaration's expressions have no value. Small, since every launch passes it along.
#[doc(hidden)]
#[derive(Debug)]
pub struct NoValue(Box<Why>);

#[derive(Debug)]
enum Why {
    /// The derived argument `what` cannot hold this value.
    Beyond { what: &'static str, value: i128, least: i128, most: i128 },
    /// The expression `what` panicked.
    Panicked { what: &'static str, message: String },
}

impl NoValue {
    #[cold]
    fn because(why: Why) -> Self {
        NoValue(Box::new(why))
    }

    #[cold]
    pub(super) fn of(self, kernel: &str) -> Error {
        let kernel = kernel.to_owned();
        match *self.0 {
            Why::Beyond { what, value, least, most } => {
                ErrorDetail::IntegerRange { kernel, what, value, least, most }
            }
            Why::Panicked { what, message } => ErrorDetail::Evaluation { kernel, what, message },
        }
        .into()
    }
}

/// The value of a derived argument in the type of its parameter.
#[doc(hidden)]
#[inline]
pub fn fit<T: Parameter>(what: &'static str, value: impl Integer) -> Result<T, NoValue> {
    let value = value.wide();
    T::try_from(value).map_err(|_| {
        let (least, most) = (T::LEAST.wide(), T::MOST.wide());
        NoValue::because(Why::Beyond { what, value, least, most })
    })
}

/// Dispatches on a type that the expansion knows only by name, possibly an alias of an integer: method lookup takes the first trait that has
/// the method for that many references.
#[doc(hidden)]
#[derive(Debug)]
pub struct Named<'a, T, V>(pub &'a V, pub PhantomData<T>);

/// A value of an integer type.
#[doc(hidden)]
pub trait NamedInteger {
    fn shown(&self) -> i128;
}

impl<T: Parameter, V: Integer> NamedInteger for &&Named<'_, T, V> {
    #[inline]
    fn shown(&self) -> i128 {
        self.0.wide()
    }
}

/// A value of another type.
#[doc(hidden)]
pub trait NamedValue<V> {
    fn shown(&self) -> V;
}

impl<T, V: Copy> NamedValue<V> for &Named<'_, T, V> {
    #[inline]
    fn shown(&self) -> V {
        *self.0
    }
}

/// A value that is not plain data, which is an error elsewhere.
#[doc(hidden)]
pub trait NamedAny<'a, V> {
    fn shown(&self) -> &'a V;
}

impl<'a, T, V> NamedAny<'a, V> for Named<'a, T, V> {
    fn shown(&self) -> &'a V {
        self.0
    }
}

/// [`fit`] for such an integer type.
#[doc(hidden)]
pub trait FitInteger<T> {
    fn fitted(&self, what: &'static str) -> Result<T, NoValue>;
}

impl<T: Parameter> FitInteger<T> for &&Named<'_, T, i128> {
    #[inline]
    fn fitted(&self, what: &'static str) -> Result<T, NoValue> {
        fit(what, *self.0)
    }
}

/// A value that already has its type.
#[doc(hidden)]
pub trait FitValue<T> {
    fn fitted(&self, what: &'static str) -> Result<T, NoValue>;
}

impl<T: Copy> FitValue<T> for &Named<'_, T, T> {
    #[inline]
    fn fitted(&self, _what: &'static str) -> Result<T, NoValue> {
        Ok(*self.0)
    }
}

thread_local! {
    /// The declaration's expression that panicked last.
    static PANICKED: Cell<&'static str> = const { Cell::new("") };
}

/// Evaluates a declaration's expressions, each of them in [`evaluate`].
#[doc(hidden)]
#[inline]
pub fn evaluate_all<R>(expressions: impl FnOnce() -> Result<R, NoValue>) -> Result<R, NoValue> {
    contain::hold(expressions).unwrap_or_else(|payload| {
        let message = contain::message_of(payload);
        Err(NoValue::because(Why::Panicked { what: PANICKED.get(), message }))
    })
}

/// The value of the declaration's expression `what`.
#[doc(hidden)]
#[inline]
pub fn evaluate<R>(what: &'static str, expression: impl FnOnce() -> R) -> R {
    /// Costs nothing where nothing panics.
    struct Unwinding(&'static str);
    impl Drop for Unwinding {
        fn drop(&mut self) {
            PANICKED.set(self.0);
        }
    }
    let unwinding = Unwinding(what);
    let value = expression();
    std::mem::forget(unwinding);
    value
}

/// The type of the derived argument `what`, without a value.
#[doc(hidden)]
#[must_use]
pub fn none<T>(_what: &str) -> Option<T> {
    None
}

#[cfg(test)]
mod tests {
    use super::AsUnsigned;

    #[test]
    fn methods_are_those_of_usize() {
        for x in 0..20_usize {
            for y in 0..20_usize {
                let (wide, by) = (x as i128, y as i128);
                assert_eq!(AsUnsigned::is_multiple_of(wide, by), x.is_multiple_of(y));
                if y > 0 {
                    assert_eq!(AsUnsigned::div_ceil(wide, by), x.div_ceil(y) as i128);
                    assert_eq!(
                        AsUnsigned::next_multiple_of(wide, by),
                        x.next_multiple_of(y) as i128
                    );
                }
            }
            assert_eq!(AsUnsigned::is_power_of_two(x as i128), x.is_power_of_two());
        }
        assert_eq!(AsUnsigned::div_ceil(-7_i128, 2), -3);
        assert_eq!(AsUnsigned::div_ceil(7_i128, -2), -3);
        assert!(!AsUnsigned::is_power_of_two(-4_i128));
    }
}
