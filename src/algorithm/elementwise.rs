//! Elementwise algorithms: `transform` by a formula, `sequence`, `cast`, `gather`, `scatter`.
//!
//! A kernel is text made for the formula and the element type when it is used first; the host computes the same from the same steps.
//! From there on each is a launch like any other: ordered by what it reads and writes, and listed by replayed batches and graphs.
//!
//! | file | what it is |
//! |---|---|
//! | `arithmetic`, `number_kind` | the number types, and what the host computes |
//! | `expression`, `formula` | a formula's steps, and how they are written down |
//! | `ptx`, `math` | the text of a kernel; pure |
//! | `twin` | the host's kernels |
//! | `loaded`, `prepared` | the kernels of a device |
//! | `operand`, `operands`, `put`, `verbs` | what is passed, and the methods |

pub(crate) mod arithmetic;
pub(crate) mod expression;
pub(crate) mod formula;
mod loaded;
mod math;
pub(crate) mod number_kind;
pub(crate) mod operand;
pub(crate) mod operands;
mod prepared;
pub(crate) mod ptx;
pub(crate) mod put;
mod twin;
pub(crate) mod verbs;
