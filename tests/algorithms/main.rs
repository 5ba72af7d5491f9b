//! Algorithms on streams beside plain Rust: every type, at every length and offset where something begins or ends.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod cases;
    pub(crate) mod plain;
    pub(crate) mod random;
    pub(crate) mod refused_calls;
}

mod aggregates;
mod algorithms;
mod elementwise;
mod operators;
mod random_algorithms;
mod segmented_sort;
mod special_values;
mod top_k;
