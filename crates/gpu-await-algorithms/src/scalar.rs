//! [`Scalar`]: the element types that algorithms compute with.
//!
//! | type | computed in | summed in |
//! |---|---|---|
//! | `u8` `u16` `u32` `u64` | itself | `u64` |
//! | `i8` `i16` `i32` `i64` | itself | `i64` |
//! | `f16` `bf16` | `f32`, rounded once at the end | `f32` |
//! | `f32` `f64` | itself | itself |
#![forbid(unsafe_code)]

use std::cmp::Ordering;
use std::fmt::Debug;

use bytemuck::Pod;
use half::{bf16, f16};

use gpu_await::Number;

/// Element types that algorithms compute with: `u8` to `u64`, `i8` to `i64`, [`f16`](half::f16), [`bf16`](half::bf16), `f32` and
/// `f64`. Sealed.
#[diagnostic::on_unimplemented(
    message = "algorithms do not compute with `{Self}`",
    label = "not a number type of algorithms",
    note = "`u8` to `u64`, `i8` to `i64`, `half::f16`, `half::bf16`, `f32` and `f64` are"
)]
pub trait Scalar: Number + ScalarParts {
    /// The type of sums: `u64` or `i64` for integers, so that the sums of narrow ones do not wrap; `f32` for `f16` and
    /// `bf16`; `f32` and `f64` for themselves.
    type Total: Number + Pod + Debug;

    #[doc(hidden)]
    fn total(self) -> Self::Total;
    #[doc(hidden)]
    fn add_totals(a: Self::Total, b: Self::Total) -> Self::Total;
    /// Integers wrap, floats are rounded to nearest even.
    #[doc(hidden)]
    fn of_total(total: Self::Total) -> Self;
    #[doc(hidden)]
    fn multiply_totals(a: Self::Total, b: Self::Total) -> Self::Total;
}

/// The arithmetic of the kernels and their twins.
#[doc(hidden)]
pub trait ScalarParts: Copy + Debug + Send + Sync + 'static {
    /// The type's name in images.
    const NAME: &'static str;
    /// The unsigned type of its width.
    const WORD: &'static str;
    /// The type of its width that images use for it where values are only compared for equality: for integers the bits.
    const EQUAL_AS: &'static str;
    /// How its bits are ordered, ascending: like the bits of `bits ^ (negative ? IF_NEGATIVE : 0) ^ ALWAYS`.
    const IF_NEGATIVE: u64;
    const ALWAYS: u64;
    type Computed: Pod + Extremes + Debug + Send + Sync;
    const LEAST: Self::Computed;
    const GREATEST: Self::Computed;
    fn computed(self) -> Self::Computed;
    /// Rounded to nearest even.
    fn rounded(computed: Self::Computed) -> Self;
    /// A range without a value, if the kernels know one: for integers a range must begin before it ends.
    const NOTHING: Option<(Self::Computed, Self::Computed)>;
    /// The greatest value below this one, if there is one; a NaN for a NaN.
    fn before(computed: Self::Computed) -> Option<Self::Computed>;
    /// The least value above this one.
    fn after(computed: Self::Computed) -> Option<Self::Computed>;
    /// Integers wrap.
    fn add_computed(a: Self::Computed, b: Self::Computed) -> Self::Computed;
    /// Integers wrap.
    fn multiply_computed(a: Self::Computed, b: Self::Computed) -> Self::Computed;
    fn key_bits(self) -> u64;
    /// Bins of equal width from `lower` to `upper`, both included, in the form that the kernels use: the lower end; for
    /// integers the distance to the upper end, for floats the upper end; and, for floats, the number of bins per unit.
    /// `None` if there are none.
    fn even_bins(lower: Self, upper: Self, bins: u32) -> Option<[Self::Computed; 3]>;
    /// The bin that a value is in.
    fn even_bin(self, range: &[Self::Computed; 3], bins: u32) -> Option<usize>;
}

/// The lesser and the greater of two values, as in the kernels; a NaN, if one of them is. The first of two equal ones.
#[doc(hidden)]
pub trait Extremes: PartialOrd + Copy {
    fn least_of(self, other: Self) -> Self {
        if is_less(&other, &self) { other } else { self }
    }
    fn greatest_of(self, other: Self) -> Self {
        if is_greater(&other, &self) { other } else { self }
    }
}

macro_rules! compared {
    ($($type:ident)+) => {$(impl Extremes for $type {})+};
}
compared! { u8 u16 u32 u64 i8 i16 i32 i64 f64 }

/// IEEE 754's `minimum` and `maximum`, which are instructions (`min.NaN`, `max.NaN`): -0 is less than +0, and each NaN becomes this one.
impl Extremes for f32 {
    fn least_of(self, other: f32) -> f32 {
        match self.partial_cmp(&other) {
            None => CANONICAL_NAN,
            Some(Ordering::Less) => self,
            Some(Ordering::Greater) => other,
            // The same bits, or zeros of either sign.
            Some(Ordering::Equal) => f32::from_bits(self.to_bits() | other.to_bits()),
        }
    }
    fn greatest_of(self, other: f32) -> f32 {
        match self.partial_cmp(&other) {
            None => CANONICAL_NAN,
            Some(Ordering::Less) => other,
            Some(Ordering::Greater) => self,
            Some(Ordering::Equal) => f32::from_bits(self.to_bits() & other.to_bits()),
        }
    }
}

/// The NaN that `f32` instructions return.
const CANONICAL_NAN: f32 = f32::from_bits(0x7fff_ffff);

/// Whether `a` is preferred to `b` as the minimum; a NaN is preferred to all.
pub(super) fn is_less<C: PartialOrd>(a: &C, b: &C) -> bool {
    a < b || (is_nan(a) && !is_nan(b))
}

/// Whether `a` is preferred to `b` as the maximum; a NaN is preferred to all.
pub(super) fn is_greater<C: PartialOrd>(a: &C, b: &C) -> bool {
    a > b || (is_nan(a) && !is_nan(b))
}

#[expect(clippy::eq_op, reason = "a NaN is not equal to itself")]
fn is_nan<C: PartialOrd>(a: &C) -> bool {
    a != a
}

macro_rules! integers {
    ($($type:ident as $word:ident, sums $total:ident, always $always:expr;)+) => {$(
        impl ScalarParts for $type {
            const NAME: &'static str = stringify!($type);
            const WORD: &'static str = stringify!($word);
            const EQUAL_AS: &'static str = Self::WORD;
            const IF_NEGATIVE: u64 = 0;
            const ALWAYS: u64 = $always;
            type Computed = $type;
            const LEAST: $type = $type::MIN;
            const GREATEST: $type = $type::MAX;
            const NOTHING: Option<($type, $type)> = None;
            fn computed(self) -> $type {
                self
            }
            fn rounded(computed: $type) -> $type {
                computed
            }
            fn before(computed: $type) -> Option<$type> {
                computed.checked_sub(1)
            }
            fn after(computed: $type) -> Option<$type> {
                computed.checked_add(1)
            }
            fn add_computed(a: $type, b: $type) -> $type {
                a.wrapping_add(b)
            }
            fn multiply_computed(a: $type, b: $type) -> $type {
                a.wrapping_mul(b)
            }
            fn key_bits(self) -> u64 {
                u64::from(self as $word)
            }
            fn even_bins(lower: $type, upper: $type, _bins: u32) -> Option<[$type; 3]> {
                (lower <= upper).then(|| [lower, upper.wrapping_sub(lower), 0])
            }
            fn even_bin(self, [lower, span, _]: &[$type; 3], bins: u32) -> Option<usize> {
                let (at, span) = (self.wrapping_sub(*lower) as $word, *span as $word);
                let bin = || u128::from(at) * u128::from(bins) / (u128::from(span) + 1);
                (at <= span).then(|| bin() as usize)
            }
        }
        impl Scalar for $type {
            type Total = $total;
            fn total(self) -> $total {
                $total::from(self)
            }
            fn add_totals(a: $total, b: $total) -> $total {
                a.wrapping_add(b)
            }
            fn of_total(total: $total) -> $type {
                total as $type
            }
            fn multiply_totals(a: $total, b: $total) -> $total {
                a.wrapping_mul(b)
            }
        }
    )+};
}
integers! {
    u8 as u8, sums u64, always 0;
    u16 as u16, sums u64, always 0;
    u32 as u32, sums u64, always 0;
    u64 as u64, sums u64, always 0;
    i8 as u8, sums i64, always 1 << 7;
    i16 as u16, sums i64, always 1 << 15;
    i32 as u32, sums i64, always 1 << 31;
    i64 as u64, sums i64, always 1 << 63;
}

macro_rules! floats {
    ($($type:ident as $word:ident, in $computed:ident, $rounded:expr, $wide:expr;)+) => {$(
        impl ScalarParts for $type {
            const NAME: &'static str = stringify!($type);
            const WORD: &'static str = stringify!($word);
            const EQUAL_AS: &'static str = Self::NAME;
            const IF_NEGATIVE: u64 = ($word::MAX >> 1) as u64;
            const ALWAYS: u64 = 1 << ($word::BITS - 1);
            type Computed = $computed;
            const LEAST: $computed = $computed::NEG_INFINITY;
            const GREATEST: $computed = $computed::INFINITY;
            const NOTHING: Option<($computed, $computed)> = Some((1.0, 0.0));
            fn computed(self) -> $computed {
                $wide(self)
            }
            fn rounded(computed: $computed) -> $type {
                $rounded(computed)
            }
            fn before(computed: $computed) -> Option<$computed> {
                (computed != $computed::NEG_INFINITY).then(|| computed.next_down())
            }
            fn after(computed: $computed) -> Option<$computed> {
                (computed != $computed::INFINITY).then(|| computed.next_up())
            }
            fn add_computed(a: $computed, b: $computed) -> $computed {
                a + b
            }
            fn multiply_computed(a: $computed, b: $computed) -> $computed {
                a * b
            }
            fn key_bits(self) -> u64 {
                u64::from(self.to_bits())
            }
            fn even_bins(lower: $type, upper: $type, bins: u32) -> Option<[$computed; 3]> {
                let (lower, upper) = ($wide(lower), $wide(upper));
                let scale = bins as $computed / (upper - lower);
                let there_are = lower < upper && (upper - lower).is_finite() && scale.is_finite();
                there_are.then_some([lower, upper, scale])
            }
            fn even_bin(self, [lower, upper, scale]: &[$computed; 3], bins: u32) -> Option<usize> {
                let x = $wide(self);
                let bin = || (((x - lower) * scale) as u32).min(bins - 1);
                (x >= *lower && x <= *upper).then(|| bin() as usize)
            }
        }
        impl Scalar for $type {
            type Total = $computed;
            fn total(self) -> $computed {
                $wide(self)
            }
            fn add_totals(a: $computed, b: $computed) -> $computed {
                a + b
            }
            fn of_total(total: $computed) -> $type {
                $rounded(total)
            }
            fn multiply_totals(a: $computed, b: $computed) -> $computed {
                a * b
            }
        }
    )+};
}
floats! {
    f16 as u16, in f32, f16::from_f32, f16::to_f32;
    bf16 as u16, in f32, bf16::from_f32, bf16::to_f32;
    f32 as u32, in f32, std::convert::identity, std::convert::identity;
    f64 as u64, in f64, std::convert::identity, std::convert::identity;
}
