//! [`Arithmetic`]: the number types of algorithms, and the host's arithmetic on them.
//!
//! | type | computed as | an operation |
//! |---|---|---|
//! | integers | themselves | wraps; division by zero is defined |
//! | `f16`, `bf16` | `f32` | rounds as `f32` does; the result is rounded again when it is stored |
//! | `f32`, `f64` | themselves | rounds to nearest, and is never fused with another |
//!
//! The device computes the same bits (`ptx.rs`), except for the functions of `math.rs` and the payloads of NaNs.
#![forbid(unsafe_code)]

use half::{bf16, f16};

use super::expression::Literal;
use super::number_kind::NumberKind;
use super::operand::{Operand, PassedOperands};
use gpu_await::Number;

/// A number type that algorithms compute with: `u8` to `u64`, `i8` to `i64`, `f16`, `bf16`, `f32`, `f64`. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a number type that algorithms compute with",
    label = "not a number type of algorithms",
    note = "`u8` to `u64`, `i8` to `i64`, `f16`, `bf16`, `f32` and `f64` are"
)]
pub trait Arithmetic: Number + PartialOrd + sealed::Described + for<'k> Operand<'k, Self> {}

macro_rules! operands {
    ($($type:ty)+) => {$(
        impl Arithmetic for $type {}
        impl<'k> Operand<'k, $type> for $type {
            fn pass(self, passed: &mut PassedOperands<'k>) {
                passed.number(self);
            }
        }
    )+};
}
operands! { u8 u16 u32 u64 i8 i16 i32 i64 f16 bf16 f32 f64 }

/// A number of any type, on its way to another one.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub enum Wide {
    Signed(i64),
    Unsigned(u64),
    Single(f32),
    Double(f64),
}

pub(super) mod sealed {
    use super::{Computed, NumberKind, Wide};

    pub trait Described {
        const KIND: NumberKind;
        /// The type that it is computed in.
        type Computed: Computed;
        fn widen(self) -> Self::Computed;
        fn narrow(value: Self::Computed) -> Self;
        fn to_wide(self) -> Wide;
        fn from_wide(value: Wide) -> Self;
        /// `start + index * step`.
        fn nth(start: Self, step: Self, index: u64) -> Self;
    }
}

/// The host's arithmetic. For an operation that the type does not have, the result is the argument: formulas that use it do
/// not compile.
#[doc(hidden)]
pub trait Computed: Copy + Default + PartialOrd + Send + Sync + 'static {
    fn literal(value: Literal) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn rem(self, other: Self) -> Self;
    fn mul_add(self, factor: Self, summand: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn neg(self) -> Self;
    fn abs(self) -> Self;
    fn not(self) -> Self {
        self
    }
    fn and(self, _other: Self) -> Self {
        self
    }
    fn or(self, _other: Self) -> Self {
        self
    }
    fn xor(self, _other: Self) -> Self {
        self
    }
    fn shl(self, _by: Self) -> Self {
        self
    }
    fn shr(self, _by: Self) -> Self {
        self
    }
    fn sqrt(self) -> Self {
        self
    }
    fn rsqrt(self) -> Self {
        self
    }
    fn recip(self) -> Self {
        self
    }
    fn floor(self) -> Self {
        self
    }
    fn ceil(self) -> Self {
        self
    }
    fn round(self) -> Self {
        self
    }
    fn trunc(self) -> Self {
        self
    }
    fn exp(self) -> Self {
        self
    }
    fn ln(self) -> Self {
        self
    }
    fn sin(self) -> Self {
        self
    }
    fn cos(self) -> Self {
        self
    }
    fn tanh(self) -> Self {
        self
    }
    fn powf(self, _exponent: Self) -> Self {
        self
    }
}

macro_rules! integers {
    ($($type:ident $kind:ident $wide:ident($through:ident) $abs:expr;)+) => {$(
        impl sealed::Described for $type {
            const KIND: NumberKind = NumberKind::$kind;
            type Computed = $type;
            fn widen(self) -> $type {
                self
            }
            fn narrow(value: $type) -> $type {
                value
            }
            fn to_wide(self) -> Wide {
                Wide::$wide($through::from(self))
            }
            fn from_wide(value: Wide) -> $type {
                match value {
                    Wide::Signed(value) => value as $type,
                    Wide::Unsigned(value) => value as $type,
                    Wide::Single(value) => value as $type,
                    Wide::Double(value) => value as $type,
                }
            }
            fn nth(start: $type, step: $type, index: u64) -> $type {
                start.wrapping_add(step.wrapping_mul(index as $type))
            }
        }
        impl Computed for $type {
            fn literal(value: Literal) -> $type {
                match value {
                    Literal::Integer(value) => value as $type,
                    Literal::Float(value) => value as $type,
                }
            }
            fn add(self, other: $type) -> $type {
                self.wrapping_add(other)
            }
            fn sub(self, other: $type) -> $type {
                self.wrapping_sub(other)
            }
            fn mul(self, other: $type) -> $type {
                self.wrapping_mul(other)
            }
            fn div(self, other: $type) -> $type {
                if other == 0 { 0 } else { self.wrapping_div(other) }
            }
            fn rem(self, other: $type) -> $type {
                if other == 0 { self } else { self.wrapping_rem(other) }
            }
            fn mul_add(self, factor: $type, summand: $type) -> $type {
                self.wrapping_mul(factor).wrapping_add(summand)
            }
            fn min(self, other: $type) -> $type {
                Ord::min(self, other)
            }
            fn max(self, other: $type) -> $type {
                Ord::max(self, other)
            }
            fn neg(self) -> $type {
                self.wrapping_neg()
            }
            fn abs(self) -> $type {
                let abs: fn($type) -> $type = $abs;
                abs(self)
            }
            fn not(self) -> $type {
                !self
            }
            fn and(self, other: $type) -> $type {
                self & other
            }
            fn or(self, other: $type) -> $type {
                self | other
            }
            fn xor(self, other: $type) -> $type {
                self ^ other
            }
            fn shl(self, by: $type) -> $type {
                self.wrapping_shl(by as u32)
            }
            fn shr(self, by: $type) -> $type {
                self.wrapping_shr(by as u32)
            }
        }
    )+};
}
integers! {
    u8 U8 Unsigned(u64) |x| x;
    u16 U16 Unsigned(u64) |x| x;
    u32 U32 Unsigned(u64) |x| x;
    u64 U64 Unsigned(u64) |x| x;
    i8 I8 Signed(i64) i8::wrapping_abs;
    i16 I16 Signed(i64) i16::wrapping_abs;
    i32 I32 Signed(i64) i32::wrapping_abs;
    i64 I64 Signed(i64) i64::wrapping_abs;
}

macro_rules! floats {
    ($($type:ident $kind:ident $wide:ident;)+) => {$(
        impl sealed::Described for $type {
            const KIND: NumberKind = NumberKind::$kind;
            type Computed = $type;
            fn widen(self) -> $type {
                self
            }
            fn narrow(value: $type) -> $type {
                value
            }
            fn to_wide(self) -> Wide {
                Wide::$wide(self)
            }
            fn from_wide(value: Wide) -> $type {
                match value {
                    Wide::Signed(value) => value as $type,
                    Wide::Unsigned(value) => value as $type,
                    Wide::Single(value) => value as $type,
                    Wide::Double(value) => value as $type,
                }
            }
            fn nth(start: $type, step: $type, index: u64) -> $type {
                (f64::from(start) + index as f64 * f64::from(step)) as $type
            }
        }
        impl Computed for $type {
            fn literal(value: Literal) -> $type {
                match value {
                    Literal::Integer(value) => value as $type,
                    Literal::Float(value) => value as $type,
                }
            }
            fn add(self, other: $type) -> $type {
                self + other
            }
            fn sub(self, other: $type) -> $type {
                self - other
            }
            fn mul(self, other: $type) -> $type {
                self * other
            }
            fn div(self, other: $type) -> $type {
                self / other
            }
            fn rem(self, other: $type) -> $type {
                self % other
            }
            fn mul_add(self, factor: $type, summand: $type) -> $type {
                <$type>::mul_add(self, factor, summand)
            }
            // Of equal numbers the device takes -0 as the smaller, and a number over NaN.
            fn min(self, other: $type) -> $type {
                let is_less = other < self || (other == self && other.is_sign_negative());
                if is_less || self.is_nan() { other } else { self }
            }
            fn max(self, other: $type) -> $type {
                let is_greater = other > self || (other == self && self.is_sign_negative());
                if is_greater || self.is_nan() { other } else { self }
            }
            fn neg(self) -> $type {
                -self
            }
            fn abs(self) -> $type {
                <$type>::abs(self)
            }
            fn sqrt(self) -> $type {
                <$type>::sqrt(self)
            }
            fn rsqrt(self) -> $type {
                1.0 / <$type>::sqrt(self)
            }
            fn recip(self) -> $type {
                1.0 / self
            }
            fn floor(self) -> $type {
                <$type>::floor(self)
            }
            fn ceil(self) -> $type {
                <$type>::ceil(self)
            }
            fn round(self) -> $type {
                <$type>::round(self)
            }
            fn trunc(self) -> $type {
                <$type>::trunc(self)
            }
            fn exp(self) -> $type {
                <$type>::exp(self)
            }
            fn ln(self) -> $type {
                <$type>::ln(self)
            }
            fn sin(self) -> $type {
                <$type>::sin(self)
            }
            fn cos(self) -> $type {
                <$type>::cos(self)
            }
            fn tanh(self) -> $type {
                <$type>::tanh(self)
            }
            fn powf(self, exponent: $type) -> $type {
                <$type>::powf(self, exponent)
            }
        }
    )+};
}
floats! {
    f32 F32 Single;
    f64 F64 Double;
}

macro_rules! halves {
    ($($type:ident $kind:ident;)+) => {$(
        impl sealed::Described for $type {
            const KIND: NumberKind = NumberKind::$kind;
            type Computed = f32;
            fn widen(self) -> f32 {
                self.to_f32()
            }
            fn narrow(value: f32) -> $type {
                $type::from_f32(value)
            }
            fn to_wide(self) -> Wide {
                Wide::Single(self.to_f32())
            }
            fn from_wide(value: Wide) -> $type {
                $type::from_f32(match value {
                    Wide::Signed(value) => {
                        let magnitude = odd_from_integer(value.unsigned_abs());
                        if value < 0 { -magnitude } else { magnitude }
                    }
                    Wide::Unsigned(value) => odd_from_integer(value),
                    Wide::Single(value) => value,
                    Wide::Double(value) => odd_from_double(value),
                })
            }
            fn nth(start: $type, step: $type, index: u64) -> $type {
                let value = f64::from(start.to_f32()) + index as f64 * f64::from(step.to_f32());
                $type::from_wide(Wide::Double(value))
            }
        }
    )+};
}
halves! {
    f16 F16;
    bf16 Bf16;
}

/// Rounds to odd: rounding that once more, to a shorter type, is rounding once.
fn odd_from_integer(value: u64) -> f32 {
    let shift = 40_u32.saturating_sub(value.leading_zeros());
    let kept = value >> shift;
    let lost = u64::from(kept << shift != value);
    // Both are exact: 24 bits, and a power of two.
    (kept | lost) as f32 * (1_u64 << shift) as f32
}

fn odd_from_double(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || value.is_nan() {
        return near;
    }
    let is_farther = f64::from(near).abs() > value.abs();
    f32::from_bits((near.to_bits() - u32::from(is_farther)) | 1)
}

#[cfg(test)]
mod tests {
    use super::sealed::Described;
    use super::*;

    /// Half a step above an even neighbour, and a little more than `f32` shows.
    #[test]
    fn halves_are_rounded_once() {
        let tie = 1.0 + 2_f64.powi(-9) + 2_f64.powi(-8);
        assert_eq!(bf16::from_wide(Wide::Double(tie - 2_f64.powi(-8))).to_f32(), 1.0);
        let above = 1.0 + 2_f64.powi(-8) + 2_f64.powi(-40);
        assert_eq!(bf16::from_wide(Wide::Double(above)).to_f32(), 1.0078125);
        assert_eq!(
            f16::from_wide(Wide::Double(1.0 + 2_f64.powi(-11) + 2_f64.powi(-40))).to_bits(),
            0x3C01
        );
        let integer = (1_u64 << 62) + (1 << 54) + 1;
        assert_eq!(bf16::from_wide(Wide::Unsigned(integer)).to_bits() & 1, 1);
        assert_eq!(f16::from_wide(Wide::Signed(i64::MIN)), f16::NEG_INFINITY);
        assert!(bf16::from_wide(Wide::Double(f64::NAN)).is_nan());
        assert_eq!(bf16::from_wide(Wide::Double(f64::MAX)), bf16::INFINITY);
    }
}
