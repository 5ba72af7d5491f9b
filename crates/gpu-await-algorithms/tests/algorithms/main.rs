//! Algorithms on streams beside plain Rust: every type, at every length and offset where something begins or ends.

#[path = "../../../../tests/under_test"]
mod under_test {
    pub(crate) mod cases;
    pub(crate) mod random;

    #[path = "../../crates/gpu-await-algorithms/tests/under_test/plain.rs"]
    pub(crate) mod plain;
    #[path = "../../crates/gpu-await-algorithms/tests/under_test/refused_calls.rs"]
    pub(crate) mod refused_calls;
}

mod aggregates;
mod algorithms;
mod elementwise;
mod nothing_to_do;
mod operators;
mod pitched;
mod random_algorithms;
mod rows;
mod segmented_sort;
mod special_values;
mod top_k;
