//! Algorithms on streams: operations like the other verbs, whose kernels come with the crate or are made by it.
//!
//! | module | algorithms |
//! |---|---|
//! | `elementwise` | `transform`, `sequence`, `cast`, `gather`, `scatter` |

pub(crate) mod elementwise;
