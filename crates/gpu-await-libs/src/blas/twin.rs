//! Matrix products on the CPU.
//!
//! The sums of a row are computed at once, each in the order of `k`: one row of `b` after the other, which is widened and brought into that
//! order before.
#![forbid(unsafe_code)]

use super::element::{GemmElement, Sums};
use super::shape::{Activation, Matrices, Shape};

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
    let (mut sums, mut left) = (vec![zero; shape.n], vec![zero; shape.k]);
    let mut right = Vec::new();
    for product in 0..shape.batch {
        if product == 0 || in_b.strides.matrix > 0 {
            right = widened(&in_b, shape.transposed_b, product, b);
        }
        for row in 0..shape.m {
            for (inner, left) in left.iter_mut().enumerate() {
                let (row, column) = if shape.transposed_a { (inner, row) } else { (row, inner) };
                *left = a[in_a.index(product, row, column)].wide();
            }
            sums.fill(zero);
            for (left, right) in left.iter().zip(right.chunks(shape.n)) {
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = *sum + *left * *right;
                }
            }
            let out = &mut c[in_c.index(product, row, 0)..][..shape.n];
            for (column, (sum, out)) in sums.iter().zip(out).enumerate() {
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

fn activated<S: Sums + Default>(activation: Activation, value: S) -> S {
    match activation {
        Activation::Relu if value < S::default() => S::default(),
        Activation::None | Activation::Relu => value,
        Activation::Gelu => value.gelu(),
    }
}

/// One matrix without gaps; of a transposed one, its transpose.
fn widened<T: GemmElement>(
    matrices: &Matrices,
    transposed: bool,
    product: usize,
    elements: &[T],
) -> Vec<T::Scale> {
    let (rows, columns) = (matrices.rows, matrices.columns);
    let at = |row, column| elements[matrices.index(product, row, column)].wide();
    match transposed {
        false => {
            (0..rows).flat_map(|row| (0..columns).map(move |column| at(row, column))).collect()
        }
        true => (0..columns).flat_map(|column| (0..rows).map(move |row| at(row, column))).collect(),
    }
}
