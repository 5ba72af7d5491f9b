//! Matrix products and Fourier transforms: beside plain Rust, ordered like any operation, in graphs, and called from anywhere.

#[path = "../../../../tests/under_test"]
mod under_test {
    pub(crate) mod child;
    pub(crate) mod inside;
    pub(crate) mod random;

    #[path = "../../crates/gpu-await-libs/tests/under_test/every_plan.rs"]
    pub(crate) mod every_plan;
}

mod anywhere;
mod blas;
mod fft;
mod gemm_shapes;
mod graphs;
