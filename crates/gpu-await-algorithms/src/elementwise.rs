//! Elementwise algorithms: `transform` by a formula, `sequence`, `cast`, `gather`, `scatter`.
//!
//! A kernel's text is generated at first use, for a formula and an element type; the host computes the same from the same steps. After that
//! each call is an ordinary launch: ordered by what it reads and writes, and listed by replayed batches and graphs.
//!
//! | file | what it is |
//! |---|---|
//! | `arithmetic`, `number_kind` | the number types, and the host's arithmetic |
//! | `expression`, `formula` | a formula's steps, and how they are recorded |
//! | `ptx`, `math` | a kernel's text; pure |
//! | `twin` | the host's kernels |
//! | `loaded`, `prepared` | a device's kernels |
//! | `operand`, `operands`, `put` | the arguments, and the launches |

pub(crate) mod arithmetic;
pub(crate) mod expression;
pub(crate) mod formula;
pub(crate) mod loaded;
mod math;
pub(crate) mod number_kind;
pub(crate) mod operand;
pub(crate) mod operands;
mod prepared;
pub(crate) mod ptx;
pub(crate) mod put;
mod twin;
