//! [`Formula`]: the result of `transform!`, and the terms that a formula computes with.
//!
//! A formula runs once for each element type, with [`Term`]s as arguments: each operation records a step of an [`Expression`]. The PTX and
//! the host's computation both come from these steps, so they cannot disagree. A term holds only the index of its step, and safe code
//! cannot make steps in any other way: the crate generates all of the PTX, whatever the formula.
#![forbid(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Neg, Not, Rem, Shl, Shr, Sub};

use super::arithmetic::Arithmetic;
use super::expression::{At, Binary, Comparison, Expression, Literal, Logic, Step, Tape, Unary};

/// A formula of `N` arguments, computed for each element: made by [`transform!`](crate::transform!).
///
/// It runs when a kernel of it is first used: once for each device, element type and choice of which arguments are numbers,
/// and perhaps once more in another thread that first uses it at the same time. Later launches repeat the operations of that
/// run. It may use devices itself. One type may be a formula for several numbers of arguments.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a formula of {N} arguments",
    label = "not a formula of {N} arguments",
    note = "pass one argument for each name between the bars of `transform!(|a, x| ..)`; in place, the last name is the element itself"
)]
pub trait Formula<const N: usize>: Copy + Send + Sync + 'static {
    /// Computes with values that record what is done with them.
    fn trace<'t, T: Arithmetic>(arguments: [Term<'t, T>; N]) -> impl Outcome<'t, T>;
}

/// A value inside a formula, of element type `T`.
///
/// It has the operators of `T`, and the methods below. A number written beside it, `2.0 * x` or `x + 1`, is taken as a `T`, or as an `f32` where `T`
/// is `f16` or `bf16`: a number with a decimal point is converted as an `f64` is by `as`, one without as an integer. Constants are `f64` or `i128`.
///
/// | | computed |
/// |---|---|
/// | integers | wrap; `x / 0` is 0, `x % 0` is `x`; a shift takes its distance modulo the width of the type, as `wrapping_shl` |
/// | `f16`, `bf16` | in `f32`, and rounded once, when the element is stored |
/// | `+ - * / sqrt rsqrt recip mul_add abs min max floor ceil round trunc %` | as the host does it, bit for bit: rounded to nearest, and never fused where `mul_add` is not written |
/// | `exp ln sin cos tanh powf` | by functions of the CUDA library, which differ from the exact result by at most this many units in the last place: 2, 1, 2, 2, 2, 8 for `f32`; 1, 1, 2, 2, 2, 2 for `f64`; 1 of their own for `f16` and `bf16`. On a host device by the system's functions, to a few units |
///
/// Operations that a type lacks (`&` for floats, `sqrt` for integers) do not compile, at the line where the formula is used. Payload and
/// sign of a NaN are arbitrary.
pub struct Term<'t, T> {
    tape: &'t Tape,
    at: At,
    element: PhantomData<fn() -> T>,
}

impl<T> fmt::Debug for Term<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Term").finish_non_exhaustive()
    }
}

/// The result of a comparison of [`Term`]s: `x.gt(0.0).select(x, 0.0)`. It has `&`, `|`, `^` and `!`.
pub struct Mask<'t, T> {
    tape: &'t Tape,
    at: At,
    element: PhantomData<fn() -> T>,
}

impl<T> fmt::Debug for Mask<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mask").finish_non_exhaustive()
    }
}

/// The result of a formula: a [`Term`], or a [`Mask`] for flags. Sealed.
#[diagnostic::on_unimplemented(
    message = "a formula of `transform!` cannot end with `{Self}`",
    label = "not a value of the element type, nor a comparison",
    note = "a number alone is no formula: `Stream::fill` fills memory with one"
)]
pub trait Outcome<'t, T>: sealed::Sealed {
    #[doc(hidden)]
    const IS_MASK: bool;
    #[doc(hidden)]
    fn at(&self) -> At;
}

/// The other operand beside a [`Term`]: another term, or a number. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be computed with in a formula",
    label = "not a value of the formula, nor a number",
    note = "numbers are written as they are, `x.max(0.0)`; constants are `f64` or `i128`; what is known at run time is an argument of the formula"
)]
pub trait IntoTerm<'t, T>: sealed::Sealed {
    #[doc(hidden)]
    fn into_term(self, tape: &'t Tape) -> Term<'t, T>;
}

mod sealed {
    pub trait Sealed {}
    impl<T> Sealed for super::Term<'_, T> {}
    impl<T> Sealed for super::Mask<'_, T> {}
    impl Sealed for f64 {}
    impl Sealed for i128 {}
}

/// A formula, recorded for elements of type `T`.
pub(super) fn written<T: Arithmetic, F: Formula<N>, const N: usize>() -> Expression {
    let tape = Tape::new();
    let result = {
        let argument = |number| Term::new(&tape, Step::Argument(number as u32));
        let arguments: [Term<'_, T>; N] = std::array::from_fn(argument);
        F::trace(arguments).at()
    };
    tape.finish(result)
}

/// Whether a formula ends with a comparison.
pub(super) const fn gives_flags<T: Arithmetic, F: Formula<N>, const N: usize>() -> bool {
    const fn of<'t, T, O: Outcome<'t, T>, const N: usize>(_: fn([Term<'t, T>; N]) -> O) -> bool {
        O::IS_MASK
    }
    of::<T, _, N>(F::trace::<T>)
}

impl<'t, T> Term<'t, T> {
    fn new(tape: &'t Tape, step: Step) -> Self {
        Term { tape, at: tape.push(step), element: PhantomData }
    }

    fn unary(self, op: Unary) -> Self {
        Term::new(self.tape, Step::Unary(op, self.at))
    }

    fn binary(self, op: Binary, other: impl IntoTerm<'t, T>) -> Self {
        let other = other.into_term(self.tape);
        Term::new(self.tape, Step::Binary(op, self.at, other.at))
    }

    fn compare(self, op: Comparison, other: impl IntoTerm<'t, T>) -> Mask<'t, T> {
        let other = other.into_term(self.tape);
        Mask::new(self.tape, Step::Compare(op, self.at, other.at))
    }
}

impl<'t, T> Mask<'t, T> {
    fn new(tape: &'t Tape, step: Step) -> Self {
        Mask { tape, at: tape.push(step), element: PhantomData }
    }
}

macro_rules! of_floats {
    ($($(#[$meta:meta])* $name:ident $op:ident;)+) => {$(
        $(#[$meta])*
        #[must_use]
        pub fn $name(self) -> Self {
            const { assert!(T::KIND.is_float(), concat!("`", stringify!($name), "` is a function of floating point numbers")) };
            self.unary(Unary::$op)
        }
    )+};
}

macro_rules! comparisons {
    ($($(#[$meta:meta])* $name:ident $op:ident;)+) => {$(
        $(#[$meta])*
        #[must_use]
        pub fn $name(self, other: impl IntoTerm<'t, T>) -> Mask<'t, T> {
            self.compare(Comparison::$op, other)
        }
    )+};
}

impl<'t, T: Arithmetic> Term<'t, T> {
    of_floats! {
        /// The square root.
        sqrt Sqrt;
        /// `1 / x.sqrt()`, rounded twice.
        rsqrt Rsqrt;
        /// `1 / x`.
        recip Recip;
        /// The largest whole number that is not greater.
        floor Floor;
        /// The smallest whole number that is not less.
        ceil Ceil;
        /// The nearest whole number; half-way cases go away from zero.
        round Round;
        /// The next whole number in the direction of zero.
        trunc Trunc;
        /// e to the power of the value.
        exp Exp;
        /// The natural logarithm.
        ln Ln;
        /// The sine of an angle in radians.
        sin Sin;
        /// The cosine of an angle in radians.
        cos Cos;
        /// The hyperbolic tangent.
        tanh Tanh;
    }

    comparisons! {
        /// Whether it is less. False if either is a NaN.
        lt Lt;
        /// Whether it is less or equal. False if either is a NaN.
        le Le;
        /// Whether it is greater. False if either is a NaN.
        gt Gt;
        /// Whether it is greater or equal. False if either is a NaN.
        ge Ge;
        /// Whether both are equal. False if either is a NaN.
        eq Eq;
        /// Whether they differ. True if either is a NaN.
        ne Ne;
    }

    /// The absolute value; the least integer stays itself, as in `wrapping_abs`.
    #[must_use]
    pub fn abs(self) -> Self {
        if T::KIND.is_signed() { self.unary(Unary::Abs) } else { self }
    }

    /// The lesser of two; the number if the other is a NaN, and −0 before +0.
    #[must_use]
    pub fn min(self, other: impl IntoTerm<'t, T>) -> Self {
        self.binary(Binary::Min, other)
    }

    /// The greater of two; the number if the other is a NaN, and +0 before −0.
    #[must_use]
    pub fn max(self, other: impl IntoTerm<'t, T>) -> Self {
        self.binary(Binary::Max, other)
    }

    /// `low` if it is less, `high` if it is greater, else the value itself; a NaN stays one.
    #[must_use]
    pub fn clamp(self, low: impl IntoTerm<'t, T>, high: impl IntoTerm<'t, T>) -> Self {
        let low = low.into_term(self.tape);
        let high = high.into_term(self.tape);
        self.lt(low).select(low, self.gt(high).select(high, self))
    }

    /// `x * factor + summand`, rounded once for floating point numbers.
    #[must_use]
    pub fn mul_add(self, factor: impl IntoTerm<'t, T>, summand: impl IntoTerm<'t, T>) -> Self {
        let factor = factor.into_term(self.tape);
        let summand = summand.into_term(self.tape);
        Term::new(self.tape, Step::MulAdd(self.at, factor.at, summand.at))
    }

    /// The value to the power of `exponent`.
    #[must_use]
    pub fn powf(self, exponent: impl IntoTerm<'t, T>) -> Self {
        const { assert!(T::KIND.is_float(), "`powf` is a function of floating point numbers") };
        self.binary(Binary::Powf, exponent)
    }
}

impl<'t, T: Arithmetic> Mask<'t, T> {
    /// The first value where the mask holds, and `otherwise` where it does not. Both are computed for all elements.
    #[must_use]
    pub fn select(
        self,
        where_it_holds: impl IntoTerm<'t, T>,
        otherwise: impl IntoTerm<'t, T>,
    ) -> Term<'t, T> {
        let yes = where_it_holds.into_term(self.tape);
        let no = otherwise.into_term(self.tape);
        Term::new(self.tape, Step::Select(self.at, yes.at, no.at))
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:ident $(of $which:ident)?;)+) => {$(
        impl<'t, T: Arithmetic, O: IntoTerm<'t, T>> $trait<O> for Term<'t, T> {
            type Output = Term<'t, T>;
            fn $method(self, other: O) -> Term<'t, T> {
                $(const {
                    assert!(T::KIND.$which(), concat!("`", stringify!($method), "` is an operator of integers"));
                })?
                self.binary(Binary::$op, other)
            }
        }
        operators! { @beside f64 $trait $method }
        operators! { @beside i128 $trait $method }
    )+};
    (@beside $number:ident $trait:ident $method:ident) => {
        impl<'t, T: Arithmetic> $trait<Term<'t, T>> for $number {
            type Output = Term<'t, T>;
            fn $method(self, other: Term<'t, T>) -> Term<'t, T> {
                let number: Term<'t, T> = self.into_term(other.tape);
                number.$method(other)
            }
        }
    };
}
operators! {
    Add add Add;
    Sub sub Sub;
    Mul mul Mul;
    Div div Div;
    Rem rem Rem;
    BitAnd bitand And of is_integer;
    BitOr bitor Or of is_integer;
    BitXor bitxor Xor of is_integer;
    Shl shl Shl of is_integer;
    Shr shr Shr of is_integer;
}

impl<T: Arithmetic> Neg for Term<'_, T> {
    type Output = Self;
    fn neg(self) -> Self {
        self.unary(Unary::Neg)
    }
}

impl<T: Arithmetic> Not for Term<'_, T> {
    type Output = Self;
    fn not(self) -> Self {
        const { assert!(T::KIND.is_integer(), "`!` is an operator of integers") };
        self.unary(Unary::Not)
    }
}

macro_rules! mask_operators {
    ($($trait:ident $method:ident $op:ident;)+) => {$(
        impl<T> $trait for Mask<'_, T> {
            type Output = Self;
            fn $method(self, other: Self) -> Self {
                Mask::new(self.tape, Step::Logic(Logic::$op, self.at, other.at))
            }
        }
    )+};
}
mask_operators! {
    BitAnd bitand And;
    BitOr bitor Or;
    BitXor bitxor Xor;
}

impl<T> Not for Mask<'_, T> {
    type Output = Self;
    fn not(self) -> Self {
        Mask::new(self.tape, Step::LogicNot(self.at))
    }
}

impl<'t, T> IntoTerm<'t, T> for Term<'t, T> {
    fn into_term(self, _tape: &'t Tape) -> Term<'t, T> {
        self
    }
}

impl<'t, T: Arithmetic> IntoTerm<'t, T> for f64 {
    fn into_term(self, tape: &'t Tape) -> Term<'t, T> {
        const { assert!(T::KIND.is_float(), "a number with a point stands beside integers") };
        Term::new(tape, Step::Literal(Literal::Float(self)))
    }
}

impl<'t, T: Arithmetic> IntoTerm<'t, T> for i128 {
    fn into_term(self, tape: &'t Tape) -> Term<'t, T> {
        Term::new(tape, Step::Literal(Literal::Integer(self)))
    }
}

impl<'t, T> Outcome<'t, T> for Term<'t, T> {
    const IS_MASK: bool = false;
    fn at(&self) -> At {
        self.at
    }
}

impl<'t, T> Outcome<'t, T> for Mask<'t, T> {
    const IS_MASK: bool = true;
    fn at(&self) -> At {
        self.at
    }
}

impl<T> Clone for Term<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Term<'_, T> {}

impl<T> Clone for Mask<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Mask<'_, T> {}

/// Makes a formula that [`transform`](crate::Algorithms::transform) computes for each element: `transform!(|a, x, y| a * x + y)`.
///
/// The names between the bars are its arguments, one to six; what is passed decides whether each is an array or a number. The
/// expression sees nothing else of the surrounding function: a local variable in it is "can't capture dynamic environment in a fn
/// item" (E0434), and the closure that the compiler suggests there is no formula. Name an argument, and pass the variable for it:
/// `transform!(|a, x| a * x)` with `(a, &x)`. The expression may be a block with `let`; what it can do with the arguments is
/// listed at [`Term`](crate::Term). The value has no size and is `Copy`, and serves every element type that its operators have.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// # use gpu_await_algorithms::Algorithms;
/// use gpu_await_algorithms::transform;
/// # let device = gpu_await::Device::host();
/// # let stream = device.stream()?;
/// let axpy = transform!(|a, x, y| a * x + y);
/// let relu = transform!(|x| x.max(0.0));
///
/// let x = stream.upload(vec![1.0f32, -2.0, 3.0]).queued()?;
/// let y = stream.full(3, 1.0f32).queued()?;
/// let mut out = stream.empty(3).queued()?;
/// stream.transform(axpy, (2.0, &x, &y), &mut out).queued()?;
/// stream.transform_in_place(relu, (), &mut out).queued()?;
/// assert_eq!(stream.download(&out).await?, [3.0, 0.0, 7.0]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[macro_export]
macro_rules! transform {
    (| $($argument:ident),+ $(,)? | $body:expr) => {{
        #[derive(Clone, Copy, Debug)]
        struct Transform;
        impl $crate::Formula<{ [$(::core::stringify!($argument)),+].len() }> for Transform {
            fn trace<'t, T: $crate::Arithmetic>(
                [$($argument),+]: [$crate::Term<'t, T>; { [$(::core::stringify!($argument)),+].len() }],
            ) -> impl $crate::Outcome<'t, T> {
                $body
            }
        }
        Transform
    }};
    ($($other:tt)*) => {
        ::core::compile_error!(
            "`transform!` takes names between bars and one expression, `transform!(|a, x| a * x)`: their types come from what is passed"
        )
    };
}
