#![doc = include_str!("guide.md")]
//!
//! # Items
//! | item | for |
//! |---|---|
//! | [`Algorithms`] | the verbs: all that a program imports, in most cases |
//! | [`Sequence`], [`SequenceMut`], [`UpTo`] | arrays whose length only the device knows |
//! | [`Compare`], [`ReduceOp`], [`BitOp`], [`Reproducible`] | conditions and operators |
//! | [`transform!`], [`Term`] | formulas |
//! | [`Preload`], [`AlgorithmFamily`] | loading kernels before they are needed |

// Tests and examples may unwrap, the library may not.
#![cfg_attr(not(test), warn(clippy::unwrap_used))]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod code;
mod compare;
mod elementwise;
mod histogram;
mod images;
/// For tests of kernels' texts.
#[cfg(test)]
#[path = "../tests/algorithms/ptx/interpreter.rs"]
mod interpreter;
mod launch;
mod lookback;
#[cfg(doctest)]
mod must_not_compile;
mod parts;
mod preload;
mod reduce;
mod reduce_op;
mod rows;
mod scalar;
mod scan;
mod segmented;
mod segmented_sort;
mod select;
mod sequence;
mod sort;
mod top_k;
mod verbs;

pub use compare::Compare;
pub use elementwise::arithmetic::Arithmetic;
pub use elementwise::formula::{Formula, IntoTerm, Mask, Outcome, Term};
pub use elementwise::operand::{Operand, Written};
pub use elementwise::operands::{FormulaOver, OperandType, Operands};
pub use elementwise::put::Index;
pub use preload::{AlgorithmFamily, Preload};
pub use reduce_op::{BitOp, ReduceBy, ReduceOp, Reproducible};
pub use scalar::Scalar;
pub use sequence::{Sequence, SequenceMut, UpTo, UpToMut};
pub use verbs::Algorithms;
