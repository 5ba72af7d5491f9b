//! What the verbs of rows compute, one row after the other, slowly, in `f64`; and rows to try them on.
#![forbid(unsafe_code)]

pub(crate) fn sum(x: &[f64]) -> f64 {
    x.iter().sum()
}

pub(crate) fn arg_max(x: &[f64]) -> u64 {
    let is_before = |a: f64, b: f64| a > b || (a.is_nan() && !b.is_nan());
    let mut found = None;
    for at in 0..x.len() {
        if found.is_none_or(|found: usize| is_before(x[at], x[found])) {
            found = Some(at);
        }
    }
    found.map_or(u64::MAX, |at| at as u64)
}

pub(crate) fn softmax(x: &[f64]) -> Vec<f64> {
    // As NumPy has it: of a row with an infinity, or of negative ones alone, all is NaN.
    let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponentials: Vec<f64> = x.iter().map(|x| (x - most).exp()).collect();
    let all: f64 = exponentials.iter().sum();
    exponentials.iter().map(|x| x / all).collect()
}

pub(crate) fn layer_norm(x: &[f64], gamma: &[f64], beta: &[f64], epsilon: f64) -> Vec<f64> {
    let mean = sum(x) / x.len() as f64;
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (variance + epsilon).sqrt();
    let each = x.iter().zip(gamma.iter().zip(beta));
    each.map(|(x, (gamma, beta))| (x - mean) * scale * gamma + beta).collect()
}

/// The sizes of all numbers, on which the error of a sum depends.
pub(crate) fn sizes(x: &[f64]) -> f64 {
    x.iter().filter(|x| x.is_finite()).map(|x| x.abs()).sum()
}

/// Whether both are NaN, the same infinity, or as close as `slack`.
pub(crate) fn is_close(found: f64, wanted: f64, slack: f64) -> bool {
    (found.is_nan() && wanted.is_nan()) || found == wanted || (found - wanted).abs() <= slack
}

/// How many kinds of rows there are.
pub(crate) const KINDS: usize = 14;

/// A row of that kind.
pub(crate) fn row(kind: usize, columns: usize, seed: u64) -> Vec<f32> {
    const INF: f32 = f32::INFINITY;
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut below = |end: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize) % end
    };
    let mut x: Vec<f32> = (0..columns).map(|_| below(65) as f32 / 8.0 - 4.0).collect();
    if columns == 0 {
        return x;
    }
    let (one, other) = (below(columns), below(columns));
    match kind {
        // Each is the greatest so far; the greatest comes first.
        1 => x.iter_mut().enumerate().for_each(|(at, x)| *x = at as f32 / 16.0),
        2 => x.iter_mut().enumerate().for_each(|(at, x)| *x = -(at as f32) / 16.0),
        3 => x.fill(2.5),
        4 => x[one] = f32::NAN,
        5 => (x[one], x[other]) = (f32::NAN, -f32::NAN),
        6 => x[one] = INF,
        7 => x.fill(-INF),
        // A mask.
        8 => x[one..].fill(-INF),
        9 => x[..one].fill(-INF),
        10 => {
            x.fill(-INF);
            x[one] = f32::NAN;
        }
        11 => (x[one], x[other]) = (INF, -INF),
        12 => x.iter_mut().enumerate().for_each(|(at, x)| *x = [-0.0, 0.0][at % 2]),
        13 => (x[one], x[other]) = (80.0, -80.0),
        _ => {}
    }
    x
}
