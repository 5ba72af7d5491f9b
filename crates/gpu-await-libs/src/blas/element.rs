//! The element types of matrix products.
#![forbid(unsafe_code)]

use std::fmt;

use gpu_await::half::{bf16, f16};
use gpu_await::{Element, Number};

/// A type as the libraries name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(hidden)]
pub enum Kind {
    F16,
    Bf16,
    F32,
    F64,
}

/// An element type of matrix products: `f32`, `f64`, and `half`'s `f16` and `bf16`. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no element type of matrix products",
    label = "not `f16`, `bf16`, `f32` or `f64`"
)]
pub trait GemmElement: Element + sealed::Sealed {
    /// The type of `alpha` and `beta`, in which sums are computed.
    type Scale: GemmElement<Scale = Self::Scale> + Number + PartialEq + Default + fmt::Debug + Sums;
    #[doc(hidden)]
    const KIND: Kind;
    #[doc(hidden)]
    fn wide(self) -> Self::Scale;
    #[doc(hidden)]
    fn narrow(wide: Self::Scale) -> Self;
}

/// The arithmetic of the host twin.
#[doc(hidden)]
pub trait Sums:
    std::ops::Add<Output = Self> + std::ops::Mul<Output = Self> + PartialOrd + Sized
{
    /// `self` by the approximation of the Gaussian error linear unit.
    fn gelu(self) -> Self;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty, $scale:ty, $kind:ident, $wide:expr, $narrow:expr;)+) => {$(
        impl sealed::Sealed for $type {}
        impl GemmElement for $type {
            type Scale = $scale;
            const KIND: Kind = Kind::$kind;
            fn wide(self) -> $scale {
                $wide(self)
            }
            fn narrow(wide: $scale) -> Self {
                $narrow(wide)
            }
        }
    )+};
}
elements! {
    f16, f32, F16, f16::to_f32, f16::from_f32;
    bf16, f32, Bf16, bf16::to_f32, bf16::from_f32;
    f32, f32, F32, std::convert::identity, std::convert::identity;
    f64, f64, F64, std::convert::identity, std::convert::identity;
}

macro_rules! sums {
    ($($type:ident)+) => {$(
        impl Sums for $type {
            fn gelu(self) -> Self {
                let inner = (2.0 / std::$type::consts::PI).sqrt() * (self + 0.044_715 * self.powi(3));
                0.5 * self * (1.0 + inner.tanh())
            }
        }
    )+};
}
sums! { f32 f64 }
