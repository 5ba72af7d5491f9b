//! Kernels: declared, compiled, launched; and those of libraries.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod child;
    pub(crate) mod random;
}

mod blas;
mod compile;
mod declared_kernels;
mod fft;
mod integers;
mod launches;
mod rows;
