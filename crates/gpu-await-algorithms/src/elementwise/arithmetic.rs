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

use super::expression::{Binary, Literal, Unary};
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

/// A number of any type, on its way to another type.
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

/// The host's arithmetic, on a few hundred elements at a time. An operation that the type lacks changes nothing: formulas that use it
/// do not compile.
#[doc(hidden)]
pub trait Computed: Copy + Default + PartialOrd + Send + Sync + 'static {
    fn literal(value: Literal) -> Self;
    fn mul_add(self, factor: Self, summand: Self) -> Self;
    fn unary(to: &mut [Self], op: Unary, x: &[Self]);
    fn binary(to: &mut [Self], op: Binary, x: &[Self], y: &[Self]);
}

pub(super) fn map<A: Copy, R>(to: &mut [R], x: &[A], f: impl Fn(A) -> R) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to = f(*x));
}

pub(super) fn zip<A: Copy, R>(to: &mut [R], x: &[A], y: &[A], f: impl Fn(A, A) -> R) {
    to.iter_mut().zip(x.iter().zip(y)).for_each(|(to, (x, y))| *to = f(*x, *y));
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
            fn mul_add(self, factor: $type, summand: $type) -> $type {
                self.wrapping_mul(factor).wrapping_add(summand)
            }
            fn unary(to: &mut [$type], op: Unary, x: &[$type]) {
                match op {
                    Unary::Neg => map(to, x, $type::wrapping_neg),
                    Unary::Not => map(to, x, |x: $type| !x),
                    Unary::Abs => map(to, x, $abs),
                    _ => {}
                }
            }
            fn binary(to: &mut [$type], op: Binary, x: &[$type], y: &[$type]) {
                match op {
                    Binary::Add => zip(to, x, y, $type::wrapping_add),
                    Binary::Sub => zip(to, x, y, $type::wrapping_sub),
                    Binary::Mul => zip(to, x, y, $type::wrapping_mul),
                    Binary::Div => zip(to, x, y, |x, y| if y == 0 { 0 } else { x.wrapping_div(y) }),
                    Binary::Rem => zip(to, x, y, |x, y| if y == 0 { x } else { x.wrapping_rem(y) }),
                    Binary::And => zip(to, x, y, |x, y| x & y),
                    Binary::Or => zip(to, x, y, |x, y| x | y),
                    Binary::Xor => zip(to, x, y, |x, y| x ^ y),
                    Binary::Shl => zip(to, x, y, |x, y| x.wrapping_shl(y as u32)),
                    Binary::Shr => zip(to, x, y, |x, y| x.wrapping_shr(y as u32)),
                    Binary::Min => zip(to, x, y, Ord::min),
                    Binary::Max => zip(to, x, y, Ord::max),
                    Binary::Powf => {}
                }
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
            fn mul_add(self, factor: $type, summand: $type) -> $type {
                <$type>::mul_add(self, factor, summand)
            }
            fn unary(to: &mut [$type], op: Unary, x: &[$type]) {
                match op {
                    Unary::Neg => map(to, x, |x: $type| -x),
                    Unary::Not => {}
                    Unary::Abs => map(to, x, <$type>::abs),
                    Unary::Sqrt => map(to, x, <$type>::sqrt),
                    Unary::Rsqrt => map(to, x, |x: $type| 1.0 / x.sqrt()),
                    Unary::Recip => map(to, x, |x: $type| 1.0 / x),
                    Unary::Floor => map(to, x, <$type>::floor),
                    Unary::Ceil => map(to, x, <$type>::ceil),
                    Unary::Round => map(to, x, <$type>::round),
                    Unary::Trunc => map(to, x, <$type>::trunc),
                    Unary::Exp => map(to, x, <$type>::exp),
                    Unary::Ln => map(to, x, <$type>::ln),
                    Unary::Sin => map(to, x, <$type>::sin),
                    Unary::Cos => map(to, x, <$type>::cos),
                    Unary::Tanh => map(to, x, <$type>::tanh),
                }
            }
            fn binary(to: &mut [$type], op: Binary, x: &[$type], y: &[$type]) {
                // Of two zeros the device takes -0 as the smaller, and it prefers a number to NaN.
                let min = |x: $type, y: $type| {
                    let is_less = y < x || (y == x && y.is_sign_negative());
                    if is_less || x.is_nan() { y } else { x }
                };
                let max = |x: $type, y: $type| {
                    let is_greater = y > x || (y == x && x.is_sign_negative());
                    if is_greater || x.is_nan() { y } else { x }
                };
                match op {
                    Binary::Add => zip(to, x, y, |x, y| x + y),
                    Binary::Sub => zip(to, x, y, |x, y| x - y),
                    Binary::Mul => zip(to, x, y, |x, y| x * y),
                    Binary::Div => zip(to, x, y, |x, y| x / y),
                    Binary::Rem => zip(to, x, y, |x, y| x % y),
                    Binary::Min => zip(to, x, y, min),
                    Binary::Max => zip(to, x, y, max),
                    Binary::Powf => zip(to, x, y, <$type>::powf),
                    _ => {}
                }
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

/// Rounds to odd: rounding the result again, to a shorter type, is as good as rounding once.
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

    /// Half a step above an even neighbour, plus a little that `f32` cannot represent.
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
