//! Fourier transforms on the CPU.
#![forbid(unsafe_code)]

use num_complex::Complex;
use rustfft::FftDirection;

use super::shape::{FftElement, FftShape};

/// Transforms all signals in place, along each dimension in turn.
pub(super) fn complex<T: FftElement>(shape: &FftShape, data: &mut [Complex<T>], forward: bool) {
    let direction = if forward { FftDirection::Forward } else { FftDirection::Inverse };
    let len: usize = shape.extents.iter().product();
    let mut line = Vec::new();
    for (dimension, &extent) in shape.extents.iter().enumerate() {
        let fft = T::planned(extent, direction);
        // The distance between neighbours along the dimension.
        let stride: usize = shape.extents[dimension + 1..].iter().product();
        for signal in data.chunks_mut(len) {
            for start in (0..len).filter(|at| (at / stride).is_multiple_of(extent)) {
                let places = (0..extent).map(|index| start + index * stride);
                line.clear();
                line.extend(places.clone().map(|place| signal[place]));
                fft.process(&mut line);
                places.zip(&line).for_each(|(place, value)| signal[place] = *value);
            }
        }
    }
}

/// Transforms real signals, and keeps the half of the last dimension that does not mirror the other.
pub(super) fn real_forward<T: FftElement>(
    shape: &FftShape,
    signal: &[T],
    spectrum: &mut [Complex<T>],
) {
    let mut data: Vec<_> = signal.iter().map(|value| Complex::new(*value, T::zero())).collect();
    complex(shape, &mut data, true);
    let last = shape.extents.last().copied().unwrap_or(1);
    let kept = data.chunks(last).flat_map(|row| &row[..last / 2 + 1]);
    spectrum.iter_mut().zip(kept).for_each(|(out, value)| *out = *value);
}

/// The inverse: the other half mirrors the conjugates in all dimensions.
pub(super) fn real_inverse<T: FftElement>(
    shape: &FftShape,
    spectrum: &[Complex<T>],
    signal: &mut [T],
) {
    let len: usize = shape.extents.iter().product();
    let last = shape.extents.last().copied().unwrap_or(1);
    let half = last / 2 + 1;
    let mut data = Vec::with_capacity(shape.len());
    for spectrum in spectrum.chunks(len / last * half) {
        for at in 0..len {
            let (row, column) = (at / last, at % last);
            if column < half {
                data.push(spectrum[row * half + column]);
                continue;
            }
            // The row of the mirror: each index of the earlier dimensions, negated.
            let (mut rest, mut mirror, mut stride) = (row, 0, 1);
            for &extent in shape.extents[..shape.extents.len() - 1].iter().rev() {
                let index = rest % extent;
                mirror += (extent - index) % extent * stride;
                (rest, stride) = (rest / extent, stride * extent);
            }
            data.push(spectrum[mirror * half + last - column].conj());
        }
    }
    complex(shape, &mut data, false);
    signal.iter_mut().zip(&data).for_each(|(out, value)| *out = value.re);
}
