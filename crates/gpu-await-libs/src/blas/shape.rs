//! The shape of matrix products, and their epilogue.
#![forbid(unsafe_code)]

use std::fmt;

use gpu_await::{Error, ErrorDetail, Result};

use super::element::Kind;

/// The last step for each element of a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// Negative elements become 0.
    Relu,
    /// The Gaussian error linear unit, by its approximation with `tanh`.
    Gelu,
}

/// The alignment of addresses that vector loads need: algorithms are chosen for it.
pub(super) const ALIGNMENT: u64 = 16;

/// The workspace that cuBLAS's manual recommends for a Hopper GPU.
const WORKSPACE_BYTES: usize = 32 << 20;

#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) batch: usize,
    pub(super) kind: Kind,
    pub(super) transposed_a: bool,
    pub(super) transposed_b: bool,
    pub(super) bias: bool,
    pub(super) activation: Activation,
    pub(super) tf32: bool,
    pub(super) workspace_bytes: usize,
}

impl Shape {
    pub(super) fn new(m: usize, n: usize, k: usize, kind: Kind) -> Self {
        Shape {
            m,
            n,
            k,
            batch: 1,
            kind,
            transposed_a: false,
            transposed_b: false,
            bias: false,
            activation: Activation::None,
            tf32: false,
            workspace_bytes: WORKSPACE_BYTES,
        }
    }

    /// Refuses extents of 0, and matrices that fit no address space.
    pub(super) fn check(&self) -> Result<()> {
        let extents = [("m", self.m), ("n", self.n), ("k", self.k), ("the batch", self.batch)];
        if let Some((what, _)) = extents.into_iter().find(|(_, extent)| *extent == 0) {
            return Err(too_few(what));
        }
        for (rows, columns) in [(self.m, self.k), (self.k, self.n), (self.m, self.n)] {
            let len = rows.checked_mul(columns).and_then(|len| len.checked_mul(self.batch));
            if len.and_then(|len| len.checked_mul(8)).is_none() {
                let (len, element_bytes) = (rows.saturating_mul(columns), 8);
                return Err(ErrorDetail::TooLarge { len, element_bytes }.into());
            }
        }
        Ok(())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { m, n, k, batch, .. } = self;
        write!(f, "{m} x {k} times {k} x {n}, {batch} of them")
    }
}

/// An extent that is 0.
fn too_few(what: &'static str) -> Error {
    ErrorDetail::TooFew { what, found: 0, least: 1 }.into()
}
