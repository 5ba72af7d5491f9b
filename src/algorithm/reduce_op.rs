//! [`ReduceOp`]: what elements are combined by.
#![forbid(unsafe_code)]

use super::scalar::{Scalar, is_greater, is_less};

/// What a reduction or a scan combines elements by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. Integers wrap; `f16` and `bf16` are added in `f32`, and each sum is rounded once.
    Sum,
    /// The least; a NaN, if there is one.
    Min,
    /// The greatest; a NaN, if there is one.
    Max,
}

impl ReduceOp {
    /// As images call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
        }
    }

    pub(super) fn combine<T: Scalar>(self, a: T::Computed, b: T::Computed) -> T::Computed {
        match self {
            ReduceOp::Sum => T::add_computed(a, b),
            ReduceOp::Min if is_less(&b, &a) => b,
            ReduceOp::Max if is_greater(&b, &a) => b,
            ReduceOp::Min | ReduceOp::Max => a,
        }
    }
}
