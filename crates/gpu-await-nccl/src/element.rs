//! Element types and reductions, and the arithmetic of the host twin.
//!
//! | type | NCCL reduces in | the host twin in |
//! |---|---|---|
//! | integers | the type, wrapping | the type, wrapping |
//! | `f32`, `f64` | the type | the type, in the order of the ranks |
//! | `f16`, `bf16` | the type or `f32`, by algorithm | `f32`, rounded once |
#![forbid(unsafe_code)]

use bytemuck::Pod;
use half::{bf16, f16};

/// How the elements of several ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The product.
    Product,
    /// The minimum; on host devices NaN is neither less nor more than anything.
    Min,
    /// The maximum; NaN as in [`Min`](Self::Min).
    Max,
    /// The sum divided by the number of ranks. Integers round towards zero, and their sum wraps before it is divided.
    Average,
}

/// An element type of collectives: `f16`, `bf16`, `f32`, `f64`, `i8`, `u8`, `i32`, `u32`, `i64`, `u64`.
/// Sealed.
#[diagnostic::on_unimplemented(
    message = "NCCL has no element type `{Self}`",
    note = "f16, bf16, f32, f64, i8, u8, i32, u32, i64 and u64 are; send other plain types as bytes: `view().cast::<u8>()?`"
)]
pub trait CollectiveElement: gpu_await::Element + sealed::Sealed {}

/// The element types as values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each is the type of that name")]
pub enum ElementType {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

mod sealed {
    /// What the crate knows about an element type.
    pub trait Sealed {
        #[doc(hidden)]
        const TYPE: super::ElementType;
    }
}

/// The number of a type, for the crate.
pub(crate) fn type_of<T: CollectiveElement>() -> ElementType {
    <T as sealed::Sealed>::TYPE
}

macro_rules! elements {
    ($($type:ty, $name:ident;)+) => {
        $(
            impl sealed::Sealed for $type {
                const TYPE: ElementType = ElementType::$name;
            }
            impl CollectiveElement for $type {}
        )+

        impl ElementType {
            /// All of them, in the order of their numbers on the wire.
            pub(crate) const ALL: [ElementType; 10] = [$(ElementType::$name),+];

            /// The size of an element.
            #[must_use]
            pub fn size_bytes(self) -> usize {
                match self {
                    $(ElementType::$name => size_of::<$type>(),)+
                }
            }
        }

        /// Reduces the same number of elements of each rank, given as bytes in the order of the ranks, into `out`.
        pub(crate) fn reduce(element: ElementType, by: Reduction, ranks: &[&[u8]], out: &mut [u8]) {
            match element {
                $(ElementType::$name => reduce_as::<$type>(by, ranks, out),)+
            }
        }
    };
}
elements! {
    i8, I8;
    u8, U8;
    i32, I32;
    u32, U32;
    i64, I64;
    u64, U64;
    f16, F16;
    f32, F32;
    f64, F64;
    bf16, Bf16;
}

impl Reduction {
    /// All of them, in the order of their numbers on the wire, which are NCCL's.
    pub(crate) const ALL: [Reduction; 5] =
        [Reduction::Sum, Reduction::Product, Reduction::Max, Reduction::Min, Reduction::Average];
}

fn reduce_as<T: Arithmetic>(by: Reduction, ranks: &[&[u8]], out: &mut [u8]) {
    let size = size_of::<T>();
    for (at, to) in out.chunks_exact_mut(size).enumerate() {
        let of = |rank: &&[u8]| T::read(&rank[at * size..][..size]);
        let all = ranks.iter().map(of);
        let reduced = match by {
            Reduction::Sum | Reduction::Average => all.reduce(T::add),
            Reduction::Product => all.reduce(T::multiply),
            Reduction::Min => all.reduce(|a, b| if b < a { b } else { a }),
            Reduction::Max => all.reduce(|a, b| if b > a { b } else { a }),
        };
        let Some(reduced) = reduced else { return };
        let reduced =
            if by == Reduction::Average { T::divide(reduced, ranks.len()) } else { reduced };
        T::write(reduced, to);
    }
}

trait Arithmetic: Pod {
    /// What it is reduced in.
    type In: Copy + PartialOrd;
    fn read(bytes: &[u8]) -> Self::In;
    fn write(value: Self::In, bytes: &mut [u8]);
    fn add(a: Self::In, b: Self::In) -> Self::In;
    fn multiply(a: Self::In, b: Self::In) -> Self::In;
    fn divide(a: Self::In, by: usize) -> Self::In;
}

macro_rules! integers {
    ($($type:ty)+) => {$(
        impl Arithmetic for $type {
            type In = $type;
            fn read(bytes: &[u8]) -> $type { bytemuck::pod_read_unaligned(bytes) }
            fn write(value: $type, bytes: &mut [u8]) { bytes.copy_from_slice(&value.to_ne_bytes()); }
            fn add(a: $type, b: $type) -> $type { a.wrapping_add(b) }
            fn multiply(a: $type, b: $type) -> $type { a.wrapping_mul(b) }
            // More ranks than the type can count: the quotient is zero.
            fn divide(a: $type, by: usize) -> $type { <$type>::try_from(by).map_or(0, |by| a / by) }
        }
    )+};
}
integers! { i8 u8 i32 u32 i64 u64 }

macro_rules! floats {
    ($($type:ty, $in:ty, $widen:expr, $narrow:expr;)+) => {$(
        impl Arithmetic for $type {
            type In = $in;
            fn read(bytes: &[u8]) -> $in { ($widen)(bytemuck::pod_read_unaligned::<$type>(bytes)) }
            fn write(value: $in, bytes: &mut [u8]) {
                bytes.copy_from_slice(bytemuck::bytes_of::<$type>(&($narrow)(value)));
            }
            fn add(a: $in, b: $in) -> $in { a + b }
            fn multiply(a: $in, b: $in) -> $in { a * b }
            fn divide(a: $in, by: usize) -> $in { a / by as $in }
        }
    )+};
}
floats! {
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Pod>(element: ElementType, by: Reduction, ranks: &[&[T]]) -> Vec<T> {
        let mut out = ranks[0].to_vec();
        let ranks: Vec<&[u8]> = ranks.iter().map(|rank| bytemuck::cast_slice(rank)).collect();
        reduce(element, by, &ranks, bytemuck::cast_slice_mut(&mut out));
        out
    }

    #[test]
    fn integers_wrap() {
        let of = |by| reduced::<u8>(ElementType::U8, by, &[&[200, 3], &[100, 5]]);
        assert_eq!(of(Reduction::Sum), [44, 8]);
        assert_eq!(of(Reduction::Product), [32, 15]);
        assert_eq!(of(Reduction::Min), [100, 3]);
        assert_eq!(of(Reduction::Max), [200, 5]);
        assert_eq!(of(Reduction::Average), [22, 4]);
    }

    #[test]
    fn half_sums_round_once() {
        // 2048 + 1 is 2048 in `f16`; 2048 + 1 + 1 is not.
        let [a, b] = [2048.0, 1.0].map(f16::from_f32);
        let sum = reduced(ElementType::F16, Reduction::Sum, &[&[a], &[b], &[b]]);
        assert_eq!(sum[0].to_f32(), 2050.0);
    }

    #[test]
    fn averages_divide() {
        let of = |by| reduced::<i32>(ElementType::I32, by, &[&[-7], &[2], &[1]]);
        assert_eq!(of(Reduction::Average), [-1]);
        let of = |by| reduced::<f64>(ElementType::F64, by, &[&[1.0], &[2.0]]);
        assert_eq!(of(Reduction::Average), [1.5]);
    }
}
