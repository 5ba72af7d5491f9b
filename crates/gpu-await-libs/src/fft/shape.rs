//! The shape of Fourier transforms.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use gpu_await::{Element, ErrorDetail, Result};
use rustfft::{FftDirection, FftPlanner};
use smallvec::SmallVec;

/// A type of real numbers that transforms compute with: `f32`, `f64`. Sealed.
#[diagnostic::on_unimplemented(
    message = "transforms do not compute with `{Self}`",
    label = "not `f32` or `f64`"
)]
pub trait FftElement: Element + rustfft::FftNum + sealed::Sealed {
    #[doc(hidden)]
    const DOUBLE: bool;

    /// A transform on the CPU. Not generic, since otherwise every crate that transforms would compile its own planner.
    #[doc(hidden)]
    fn planned(extent: usize, direction: FftDirection) -> Arc<dyn rustfft::Fft<Self>>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

impl FftElement for f32 {
    const DOUBLE: bool = false;

    fn planned(extent: usize, direction: FftDirection) -> Arc<dyn rustfft::Fft<f32>> {
        FftPlanner::new().plan_fft(extent, direction)
    }
}

impl FftElement for f64 {
    const DOUBLE: bool = true;

    fn planned(extent: usize, direction: FftDirection) -> Arc<dyn rustfft::Fft<f64>> {
        FftPlanner::new().plan_fft(extent, direction)
    }
}

#[derive(Clone, Debug)]
pub(super) struct FftShape {
    pub(super) extents: SmallVec<[usize; 3]>,
    pub(super) batch: usize,
    pub(super) is_real: bool,
    pub(super) is_double: bool,
}

impl FftShape {
    pub(super) fn new(extents: &[usize], is_real: bool, is_double: bool) -> Self {
        FftShape { extents: SmallVec::from_slice(extents), batch: 1, is_real, is_double }
    }

    /// The total number of elements of all signals.
    pub(super) fn len(&self) -> usize {
        self.batch * self.extents.iter().product::<usize>()
    }

    /// The total number of elements of all spectra.
    pub(super) fn spectrum_len(&self) -> usize {
        let last = self.extents.last().copied().unwrap_or(0);
        if self.is_real { self.len() / last * (last / 2 + 1) } else { self.len() }
    }

    /// The alignment that cuFFT requires of every address, even of real numbers: the size of a complex number.
    pub(super) fn alignment(&self) -> u64 {
        if self.is_double { 16 } else { 8 }
    }

    /// Refuses extents that are impossible for a transform.
    pub(super) fn check(&self, device: &str) -> Result<()> {
        let too_few = |what| Err(ErrorDetail::TooFew { what, found: 0, least: 1 }.into());
        if self.extents.is_empty() {
            return too_few("the dimensions of a transform");
        }
        if self.extents.contains(&0) {
            return too_few("an extent of a transform");
        }
        if self.batch == 0 {
            return too_few("the batch of a transform");
        }
        if self.extents.len() > 3 {
            let what = "a transform of more than three dimensions";
            return Err(ErrorDetail::Unsupported { what, device: device.to_owned() }.into());
        }
        let extents = self.extents.iter().chain([&self.batch]);
        let len = extents.copied().try_fold(16_usize, usize::checked_mul);
        if len.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            let (len, element_bytes) = (usize::MAX, 16);
            return Err(ErrorDetail::TooLarge { len, element_bytes }.into());
        }
        Ok(())
    }
}

impl fmt::Display for FftShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_real { "real" } else { "complex" };
        write!(f, "{kind} {:?}, {} of them", self.extents.as_slice(), self.batch)
    }
}
