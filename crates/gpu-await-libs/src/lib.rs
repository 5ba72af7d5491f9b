#![doc = include_str!("guide.md")]
//!
//! # Items
//! | item | for |
//! |---|---|
//! | [`Blas`], [`GemmBuilder`], [`Gemm`] | matrix products: the library, their shape, a plan |
//! | [`Fft`], [`FftBuilder`], [`ComplexFft`], [`RealFft`] | Fourier transforms: the library, their shape, plans |
//!
//! The feature `blas` provides the products, `fft` the transforms; both are on by default. GPU support depends on the features of `gpu-await`.

// Tests and examples may unwrap, the library may not.
#![cfg_attr(not(test), warn(clippy::unwrap_used))]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "blas")]
mod blas;
#[cfg(feature = "fft")]
mod fft;
#[cfg(any(feature = "blas", feature = "fft"))]
mod library_object;
#[cfg(any(feature = "blas", feature = "fft"))]
mod work_area;

/// The traits of [`Complex`], in the version that [`Fft`] takes.
#[cfg(feature = "fft")]
pub use num_complex;

#[cfg(feature = "blas")]
pub use blas::{Activation, Blas, Gemm, GemmBuilder, GemmElement};
#[cfg(feature = "fft")]
pub use fft::{ComplexFft, Fft, FftBuilder, FftElement, RealFft};
#[cfg(feature = "fft")]
pub use num_complex::Complex;
