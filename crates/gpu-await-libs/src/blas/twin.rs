//! Matrix products on the CPU.
#![forbid(unsafe_code)]

use super::element::{GemmElement, Sums};
use super::shape::{Activation, Shape};

/// Computes the same as cuBLASLt, summing in the order of `k`.
pub(super) fn gemm<T: GemmElement>(
    shape: &Shape,
    (alpha, beta): (T::Scale, T::Scale),
    (a, b, bias): (&[T], &[T], Option<&[T]>),
    c: &mut [T],
) {
    let (m, n, k) = (shape.m, shape.n, shape.k);
    let zero = T::Scale::default();
    let mut sums = vec![zero; n];
    for product in 0..shape.batch {
        let (a, b) = (&a[product * m * k..], &b[product * k * n..]);
        let c = &mut c[product * m * n..][..m * n];
        for (row, out) in c.chunks_mut(n).enumerate() {
            sums.fill(zero);
            for inner in 0..k {
                let at = if shape.transposed_a { inner * m + row } else { row * k + inner };
                let left = a[at].wide();
                for (column, sum) in sums.iter_mut().enumerate() {
                    let at =
                        if shape.transposed_b { column * k + inner } else { inner * n + column };
                    *sum = *sum + left * b[at].wide();
                }
            }
            for (column, (sum, out)) in sums.iter().zip(out).enumerate() {
                let mut value = alpha * *sum;
                if beta != zero {
                    value = value + beta * out.wide();
                }
                if let Some(bias) = bias {
                    value = value + bias[column].wide();
                }
                let value = match shape.activation {
                    Activation::None => value,
                    Activation::Relu if value < zero => zero,
                    Activation::Relu => value,
                    Activation::Gelu => value.gelu(),
                };
                *out = T::narrow(value);
            }
        }
    }
}
