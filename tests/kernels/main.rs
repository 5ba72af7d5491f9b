//! Kernels: declared, compiled, launched.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod child;
}

mod compile;
mod declared_kernels;
mod integers;
mod launches;
mod rows;
mod tables;
