//! Matrix products on the CPU.
//!
//! Some columns of `b` at a time, widened: the sums of a row of these are computed together, each in the order of `k`. So `b` is read in
//! place, transposed or not, and is never copied as a whole.
#![forbid(unsafe_code)]

use super::element::{GemmElement, Sums};
use super::shape::{Activation, Shape};

/// Computes the same as cuBLASLt.
pub(super) fn gemm<T: GemmElement, C: GemmElement<Scale = T::Scale>>(
    shape: &Shape,
    (alpha, beta): (T::Scale, T::Scale),
    (a, b, bias): (&[T], &[T], Option<&[C]>),
    c: &mut [C],
) {
    if shape.is_empty() {
        return;
    }
    let zero = T::Scale::default();
    let bias: Option<Vec<_>> = bias.map(|bias| bias.iter().map(|bias| bias.wide()).collect());
    let (in_a, in_b, in_c) = (shape.a(), shape.b(), shape.c());
    let (mut left, mut right) = (Vec::new(), vec![[zero; TILE]; shape.k]);
    for product in 0..shape.batch {
        let at = |row: usize, inner: usize| {
            let (row, column) = if shape.transposed_a { (inner, row) } else { (row, inner) };
            a[in_a.index(product, row, column)].wide()
        };
        left.clear();
        left.extend((0..shape.m).flat_map(|row| (0..shape.k).map(move |inner| at(row, inner))));
        for first in (0..shape.n).step_by(TILE) {
            let width = TILE.min(shape.n - first);
            for (inner, right) in right.iter_mut().enumerate() {
                for (column, right) in (first..).zip(&mut right[..width]) {
                    let (row, column) =
                        if shape.transposed_b { (column, inner) } else { (inner, column) };
                    *right = b[in_b.index(product, row, column)].wide();
                }
            }
            for row in 0..shape.m {
                let mut sums = [zero; TILE];
                for (left, right) in left[row * shape.k..].iter().zip(&right) {
                    for (sum, right) in sums.iter_mut().zip(right) {
                        *sum = *sum + *left * *right;
                    }
                }
                let out = &mut c[in_c.index(product, row, first)..][..width];
                for (column, (sum, out)) in (first..).zip(sums.iter().zip(out)) {
                    let mut value = alpha * *sum;
                    if beta != zero {
                        value = value + beta * out.wide();
                    }
                    if let Some(bias) = &bias {
                        value = value + bias[column];
                    }
                    *out = C::narrow(activated(shape.activation, value));
                }
            }
        }
    }
}

/// Columns at a time: enough sums to keep the CPU's adders busy, few enough for its registers.
const TILE: usize = 32;

fn activated<S: Sums + Default>(activation: Activation, value: S) -> S {
    match activation {
        Activation::Relu if value < S::default() => S::default(),
        Activation::None | Activation::Relu => value,
        Activation::Gelu => value.gelu(),
    }
}
