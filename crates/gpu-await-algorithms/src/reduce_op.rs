//! [`ReduceBy`]: the operator of a reduction: [`ReduceOp`] for all types, [`BitOp`] for integers; [`Reproducible`] fixes the order of a
//! scan's additions.
//!
//! Sum, minimum and maximum have kernels compiled for each type. Products and bitwise operators have images of their own; for integers
//! these have one kernel per width, since the sign makes no difference, and take the bitwise operator as an argument.
#![forbid(unsafe_code)]

use std::fmt::Debug;

use bytemuck::Pod;

use super::launch::Inputs;
use super::scalar::{Extremes, Scalar};

/// The operator of a reduction or a scan, for numbers of any type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. Integers wrap; `f16` and `bf16` are added in `f32`, and each sum is rounded once.
    Sum,
    /// The product. Integers wrap; `f16` and `bf16` are multiplied in `f32`, and each product is rounded once. A reduction
    /// multiplies floating point factors in an order that depends only on their number and the device: a partial product may
    /// overflow or vanish even if the whole one does not.
    Product,
    /// The least; a NaN, if there is one.
    Min,
    /// The greatest; a NaN, if there is one.
    Max,
}

/// The bitwise operator of a reduction or a scan of integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BitOp {
    /// The bits that are set in all elements.
    And,
    /// The bits that are set in any element.
    Or,
    /// The bits that are set in an odd number of elements.
    Xor,
}

/// An operator that a scan applies in one order: the same elements give the same bits in every run.
///
/// On a GPU the sums and products of floating point numbers otherwise differ from run to run in their last bits, because each part of
/// a scan picks up whatever others have combined so far. In one order a scan reads the elements twice and takes about 1.6 times as long. The
/// result depends only on the preceding elements, not on the array's length or on what else the GPU does, and differs between GPUs of
/// different compute capabilities.
///
/// Everything else is the same from run to run anyway, and costs no more with this: scans of integers, minima and maxima, every
/// reduction, and everything on a host device.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// # use gpu_await_algorithms::Algorithms;
/// # let stream = gpu_await::Device::host().stream()?;
/// use gpu_await_algorithms::{ReduceOp, Reproducible};
/// let x = stream.upload(vec![0.1f32; 1_000]).queued()?;
/// let mut sums = stream.empty(1_000).queued()?;
/// stream.inclusive_scan(&x, Reproducible(ReduceOp::Sum), &mut sums).queued()?;
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reproducible(pub ReduceOp);

/// The operator for elements of type `T`: a [`ReduceOp`], alone or [`Reproducible`], or, for integers, a [`BitOp`]. Sealed.
#[diagnostic::on_unimplemented(
    message = "elements of `{T}` are not combined by `{Self}`",
    label = "not an operator on `{T}`",
    note = "`ReduceOp` combines all types of numbers, `BitOp` integers alone"
)]
pub trait ReduceBy<T>: Copy + Debug + Send + Sync + 'static {
    #[doc(hidden)]
    fn operator(self) -> Operator;
    /// Whether a scan applies it in one order.
    #[doc(hidden)]
    fn is_reproducible(self) -> bool {
        false
    }
}

/// Any operator, which `ReduceBy` has matched with the type.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    Of(ReduceOp),
    Bits(BitOp),
}

impl<T: Scalar> ReduceBy<T> for ReduceOp {
    fn operator(self) -> Operator {
        Operator::Of(self)
    }
}

impl<T: Scalar> ReduceBy<T> for Reproducible {
    fn operator(self) -> Operator {
        Operator::Of(self.0)
    }
    fn is_reproducible(self) -> bool {
        true
    }
}

macro_rules! bits_of {
    ($($type:ident)+) => {$(
        impl ReduceBy<$type> for BitOp {
            fn operator(self) -> Operator {
                Operator::Bits(self)
            }
        }
    )+};
}
bits_of! { u8 u16 u32 u64 i8 i16 i32 i64 }

/// Whether to set the bits that both words have, and those that only one of them has; all ones if so.
#[derive(Clone, Copy)]
pub(super) struct BitMasks {
    pub(super) if_both: u64,
    pub(super) if_one: u64,
}

impl Operator {
    /// The kernel's name in images.
    pub(super) fn kernel(self) -> &'static str {
        match self {
            Operator::Of(ReduceOp::Sum) => "sum",
            Operator::Of(ReduceOp::Product) => "product",
            Operator::Of(ReduceOp::Min) => "min",
            Operator::Of(ReduceOp::Max) => "max",
            Operator::Bits(_) => "bits",
        }
    }

    /// The image with this operator for a type: its family, and the image's type.
    pub(super) fn image<T: Scalar>(
        self,
        family: &'static str,
        combined: &'static str,
    ) -> (&'static str, &'static str) {
        match self {
            Operator::Of(ReduceOp::Product) | Operator::Bits(_) => (combined, T::EQUAL_AS),
            Operator::Of(ReduceOp::Sum | ReduceOp::Min | ReduceOp::Max) => (family, T::NAME),
        }
    }

    /// Whether the order in which it combines elements of a type shows in the result: each sum and product of floats is rounded. Types
    /// whose equality is compared as words of their width are integers.
    pub(super) fn rounds<T: Scalar>(self) -> bool {
        let is_float = T::EQUAL_AS != T::WORD;
        is_float && matches!(self, Operator::Of(ReduceOp::Sum | ReduceOp::Product))
    }

    /// The last arguments of its kernels.
    pub(super) fn arguments<'k>(self) -> Inputs<'k> {
        match self {
            Operator::Of(_) => Inputs::default(),
            Operator::Bits(bits) => {
                let BitMasks { if_both, if_one } = bits.masks();
                Inputs::default().value(if_both).value(if_one)
            }
        }
    }
}

impl BitOp {
    fn masks(self) -> BitMasks {
        let (if_both, if_one) = match self {
            BitOp::And => (u64::MAX, 0),
            BitOp::Or => (u64::MAX, u64::MAX),
            BitOp::Xor => (0, u64::MAX),
        };
        BitMasks { if_both, if_one }
    }
}

impl BitMasks {
    /// On the CPU.
    pub(super) fn combine<C: Pod>(self, mut a: C, b: C) -> C {
        let (if_both, if_one) = (self.if_both as u8, self.if_one as u8);
        for (a, b) in bytemuck::bytes_of_mut(&mut a).iter_mut().zip(bytemuck::bytes_of(&b)) {
            *a = (*a & b & if_both) | ((*a ^ b) & if_one);
        }
        a
    }
}

impl ReduceOp {
    /// On the CPU.
    pub(super) fn combine<T: Scalar>(self, a: T::Computed, b: T::Computed) -> T::Computed {
        match self {
            ReduceOp::Sum => T::add_computed(a, b),
            ReduceOp::Product => T::multiply_computed(a, b),
            ReduceOp::Min => a.least_of(b),
            ReduceOp::Max => a.greatest_of(b),
        }
    }
}
