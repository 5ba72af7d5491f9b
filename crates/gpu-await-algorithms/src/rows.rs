//! Verbs for each row of a matrix without gaps, in one launch: one block per row, or one warp for short rows.
//!
//! All of them compute in `f32`, whatever the type of the elements, in an order that depends only on the type, the number of columns and
//! whether rows are aligned to 16 bytes: a result is the same from run to run.
//!
//! | verb | reads a row |
//! |---|---|
//! | `sum_rows`, `arg_max_rows` | once |
//! | `softmax_rows` | twice: for the greatest element and the sum, which is rescaled whenever a greater one comes; and to write |
//! | `layer_norm_rows` | three times: for the mean, for the squared deviations, and to write |
#![forbid(unsafe_code)]

/// These tests inspect the text of the kernels: hence the path.
#[cfg(test)]
#[path = "../tests/algorithms/ptx/rows.rs"]
mod tests;

use std::sync::Arc;

use super::code;
use super::code::{LoadedImage, LoadedKernels};
use super::launch::{AlgorithmLaunch, Inputs};
use super::scalar::Scalar;
use gpu_await::sibling::{HostTwin, Span, UntypedKernel, VerbParts};
use gpu_await::{ErrorDetail, Queue, Readable, Result, Writable};

/// The family of images.
pub(super) const FAMILY: &str = "rows";
/// The types that have images.
pub(super) const TYPES: [&str; 3] = ["f16", "bf16", "f32"];
/// The most blocks of a grid.
const MOST_BLOCKS: u64 = i32::MAX as u64;
const WARP: u32 = 32;

struct RowKernels {
    /// The only kernel on a host device.
    blocks: Arc<UntypedKernel>,
    device: Option<RowTuning>,
}

struct RowTuning {
    warps: Arc<UntypedKernel>,
    blocks_threads: u32,
    warps_threads: u32,
    /// The most columns for which a warp handles a row.
    warp_columns: u32,
}

/// A verb: its name in errors, its kernels' name in the image, and its twin.
struct RowVerb {
    op: &'static str,
    kernel: &'static str,
    twin: fn() -> HostTwin,
}

impl RowKernels {
    /// The kernel to use, and its grid.
    fn grid(&self, rows: u64, columns: u64) -> (&Arc<UntypedKernel>, (u32, u32)) {
        let blocks = |blocks: u64| blocks.min(MOST_BLOCKS) as u32;
        match &self.device {
            None => (&self.blocks, (1, 1)),
            Some(tuning) if columns <= u64::from(tuning.warp_columns) => {
                let warps = u64::from(tuning.warps_threads / WARP);
                (&tuning.warps, (blocks(rows.div_ceil(warps)), tuning.warps_threads))
            }
            Some(tuning) => (&self.blocks, (blocks(rows), tuning.blocks_threads)),
        }
    }
}

impl RowVerb {
    fn kernels<T: Scalar>(&self, queue: &Queue<'_>) -> Result<Arc<RowKernels>> {
        let RowVerb { op, kernel, twin } = self;
        LoadedKernels::get(queue.home(), (op, T::NAME, ""), || {
            let Some(image) = LoadedImage::of(queue.home(), FAMILY, T::NAME)? else {
                return Ok(RowKernels { blocks: code::twin(op, twin()), device: None });
            };
            let tuning = RowTuning {
                warps: image.kernel(&format!("{kernel}_warps"))?,
                blocks_threads: image.fact("blocks_threads"),
                warps_threads: image.fact("warps_threads"),
                warp_columns: image.fact("warp_columns"),
            };
            let blocks = image.kernel(&format!("{kernel}_blocks"))?;
            Ok(RowKernels { blocks, device: Some(tuning) })
        })
    }

    /// Puts it on the queue's stream. `refused` is the error in the lengths.
    fn run<T: Scalar>(
        &self,
        queue: &Queue<'_>,
        (x, rows, columns): (&Span<'_>, usize, usize),
        more: (&[&Span<'_>], &Inputs<'_>),
        out: &Span<'_>,
        refused: Option<ErrorDetail>,
    ) -> Result<()> {
        let refuse = |error| AlgorithmLaunch::new(self.op).overwrites(out).refuse(error);
        if let Some(refused) = refused {
            return Err(refuse(refused.into()));
        }
        let (spans, values) = more;
        let memory = [x, out].into_iter().chain(spans.iter().copied());
        queue.check_memory(memory).map_err(refuse)?;
        let launch = AlgorithmLaunch::new(self.op).reads(x);
        let launch = launch.value(rows as u64).value(columns as u64);
        let launch = spans.iter().fold(launch, |launch, span| launch.reads(span));
        let launch = launch.inputs(values).overwrites(out);
        if rows == 0 {
            return launch.run_nothing(queue);
        }
        let kernels = self.kernels::<T>(queue).map_err(refuse)?;
        let (kernel, grid) = kernels.grid(rows as u64, columns as u64);
        launch.run(queue, kernel, grid)
    }
}

pub(super) fn sum_rows<T: Scalar<Total = f32>>(
    queue: &Queue<'_>,
    x: &impl Readable<T>,
    columns: usize,
    out: &mut impl Writable<f32>,
) -> Result<()> {
    let verb = RowVerb { op: "sum_rows", kernel: "sum", twin: twin::sum::<T> };
    let rows = out.len();
    let refused = not_a_matrix(verb.op, x.len(), rows, columns);
    let matrix = (&x.span(), rows, columns);
    verb.run::<T>(queue, matrix, (&[], &Inputs::default()), &out.span_mut(), refused)
}

pub(super) fn arg_max_rows<T: Scalar<Total = f32>>(
    queue: &Queue<'_>,
    x: &impl Readable<T>,
    columns: usize,
    out: &mut impl Writable<u64>,
) -> Result<()> {
    let verb = RowVerb { op: "arg_max_rows", kernel: "arg_max", twin: twin::arg_max::<T> };
    let rows = out.len();
    let refused = not_a_matrix(verb.op, x.len(), rows, columns);
    let matrix = (&x.span(), rows, columns);
    verb.run::<T>(queue, matrix, (&[], &Inputs::default()), &out.span_mut(), refused)
}

pub(super) fn softmax_rows<T: Scalar<Total = f32>>(
    queue: &Queue<'_>,
    x: &impl Readable<T>,
    columns: usize,
    out: &mut impl Writable<T>,
) -> Result<()> {
    let verb = RowVerb { op: "softmax_rows", kernel: "softmax", twin: twin::softmax::<T> };
    let (rows, refused) = rows_of(verb.op, (x.len(), out.len()), columns);
    let matrix = (&x.span(), rows, columns);
    verb.run::<T>(queue, matrix, (&[], &Inputs::default()), &out.span_mut(), refused)
}

pub(super) fn layer_norm_rows<T: Scalar<Total = f32>>(
    queue: &Queue<'_>,
    x: &impl Readable<T>,
    (gamma, beta, epsilon): (&impl Readable<T>, &impl Readable<T>, f32),
    out: &mut impl Writable<T>,
) -> Result<()> {
    let verb = RowVerb { op: "layer_norm_rows", kernel: "layer_norm", twin: twin::layer_norm::<T> };
    let (columns, found) = (gamma.len(), beta.len());
    let (rows, refused) = rows_of(verb.op, (x.len(), out.len()), columns);
    let (op, what, expected) = (verb.op, "beta", columns);
    let of_beta = ErrorDetail::WrongLength { op, what, expected, found };
    let refused = refused.or((found != expected).then_some(of_beta));
    let (matrix, spans) = ((&x.span(), rows, columns), [&gamma.span(), &beta.span()]);
    let more = (&spans[..], &Inputs::default().value(epsilon));
    verb.run::<T>(queue, matrix, more, &out.span_mut(), refused)
}

/// The number of rows of a matrix whose output is as large, or the error in its length or its output's.
fn rows_of(
    op: &'static str,
    (len, found): (usize, usize),
    columns: usize,
) -> (usize, Option<ErrorDetail>) {
    let rows = len.checked_div(columns).unwrap_or(0);
    if rows * columns != len {
        return (rows, Some(ErrorDetail::Ragged { len, columns }));
    }
    let (what, expected) = ("the output", len);
    let of_output = ErrorDetail::WrongLength { op, what, expected, found };
    (rows, (found != expected).then_some(of_output))
}

/// The error of a matrix that has one result for each row.
fn not_a_matrix(
    op: &'static str,
    found: usize,
    rows: usize,
    columns: usize,
) -> Option<ErrorDetail> {
    let (what, expected) = ("the matrix", rows.saturating_mul(columns));
    (found != expected).then_some(ErrorDetail::WrongLength { op, what, expected, found })
}

/// The same on the CPU.
mod twin {
    use super::{HostTwin, Scalar};
    use crate::reduce::twin::combined;
    use crate::scalar::{Extremes, is_greater};
    use gpu_await::{Grid, In, Out, TwinFn};

    pub(super) fn sum<T: Scalar<Total = f32>>() -> HostTwin {
        let sum = |_: &Grid, x: &[T], _rows: u64, columns: u64, out: &mut [f32]| {
            for (out, x) in out.iter_mut().zip(rows(x, columns)) {
                *out = added(x, |x| x.total());
            }
        };
        TwinFn::<(In<T>, u64, u64, Out<f32>)>::erase(sum)
    }

    pub(super) fn arg_max<T: Scalar<Total = f32>>() -> HostTwin {
        let arg_max = |_: &Grid, x: &[T], _rows: u64, columns: u64, out: &mut [u64]| {
            for (out, x) in out.iter_mut().zip(rows(x, columns)) {
                let found = x.iter().map(|x| x.total()).enumerate();
                let found = found.reduce(|a, b| if is_greater(&b.1, &a.1) { b } else { a });
                *out = found.map_or(u64::MAX, |(at, _)| at as u64);
            }
        };
        TwinFn::<(In<T>, u64, u64, Out<u64>)>::erase(arg_max)
    }

    pub(super) fn softmax<T: Scalar<Total = f32>>() -> HostTwin {
        let softmax = |_: &Grid, x: &[T], _rows: u64, columns: u64, out: &mut [T]| {
            for (out, x) in written(out, columns).zip(rows(x, columns)) {
                let most = x.iter().map(|x| x.total()).fold(f32::NEG_INFINITY, f32::greatest_of);
                let scale = 1.0 / added(x, |x| (x.total() - most).exp());
                for (x, out) in x.iter().zip(out) {
                    *out = T::of_total((x.total() - most).exp() * scale);
                }
            }
        };
        TwinFn::<(In<T>, u64, u64, Out<T>)>::erase(softmax)
    }

    pub(super) fn layer_norm<T: Scalar<Total = f32>>() -> HostTwin {
        let layer_norm = |_: &Grid,
                          x: &[T],
                          _rows: u64,
                          columns: u64,
                          gamma: &[T],
                          beta: &[T],
                          epsilon: f32,
                          out: &mut [T]| {
            for (out, x) in written(out, columns).zip(rows(x, columns)) {
                let mean = added(x, |x| x.total()) / columns as f32;
                let squares = added(x, |x| (x.total() - mean) * (x.total() - mean));
                let scale = 1.0 / (squares / columns as f32 + epsilon).sqrt();
                for ((x, out), (gamma, beta)) in x.iter().zip(out).zip(gamma.iter().zip(beta)) {
                    let normal = (x.total() - mean) * scale;
                    *out = T::of_total(normal * gamma.total() + beta.total());
                }
            }
        };
        TwinFn::<(In<T>, u64, u64, In<T>, In<T>, f32, Out<T>)>::erase(layer_norm)
    }

    /// The sum of a function of each element; 0 if there are none.
    fn added<T: Scalar>(x: &[T], of: impl Fn(T) -> f32) -> f32 {
        combined(x, &of, &|a, b| a + b).unwrap_or(0.0)
    }

    /// As many rows as are asked for, which are empty if there are no columns.
    fn rows<T>(x: &[T], columns: u64) -> impl Iterator<Item = &[T]> {
        let columns = columns as usize;
        (0..).map(move |row| &x[row * columns..][..columns])
    }

    fn written<T>(out: &mut [T], columns: u64) -> impl Iterator<Item = &mut [T]> {
        out.chunks_mut(columns as usize)
    }
}
