//! What no other test may load kernels beside: on a GPU these have the process for themselves, one after the other.

#[path = "../../../../tests/under_test"]
mod under_test {
    pub(crate) mod alone;
    pub(crate) mod foreign;
    pub(crate) mod host_threads;
    pub(crate) mod inside;

    #[path = "../../crates/gpu-await-algorithms/tests/under_test/every_verb.rs"]
    pub(crate) mod every_verb;
    #[path = "../../crates/gpu-await-algorithms/tests/under_test/foreign_arrays.rs"]
    pub(crate) mod foreign_arrays;
}

mod anywhere;
mod in_order;
mod large;
mod reproducible;
