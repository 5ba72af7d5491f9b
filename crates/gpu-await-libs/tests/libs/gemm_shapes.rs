//! Shapes of matrix products beside those without gaps: strides, wide outputs, extents of 0, and shapes that come again.

use gpu_await::half::{bf16, f16};
use gpu_await::testing;
use gpu_await::{DeviceKind, ErrorDetail, Result, Stream};
use gpu_await_libs::{Activation, Blas, GemmBuilder, GemmElement};

use crate::under_test::child;
use crate::under_test::random::Random;

/// What lies in gaps; every type holds it.
const GAP: f64 = -77.0;

/// An operand's rows and matrices, and how many elements they are apart.
#[derive(Clone, Copy, Debug, Default)]
struct Placed {
    rows: usize,
    columns: usize,
    row: usize,
    matrix: usize,
}

impl Placed {
    fn packed(rows: usize, columns: usize) -> Self {
        Placed { rows, columns, row: columns, matrix: rows * columns }
    }

    fn at(&self, matrix: usize, row: usize, column: usize) -> usize {
        matrix * self.matrix + row * self.row + column
    }

    fn len(&self, count: usize) -> usize {
        match self.rows * self.columns * count {
            0 => 0,
            _ => self.at(count - 1, self.rows - 1, self.columns),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    batch: usize,
    transposed_a: bool,
    transposed_b: bool,
    a: Placed,
    b: Placed,
    c: Placed,
    bias: bool,
    activation: Activation,
    beta: f64,
    /// Elements behind the last one.
    more: usize,
}

impl Case {
    fn packed([m, n, k, batch]: [usize; 4]) -> Self {
        let [a, b, c] =
            [(m, k), (k, n), (m, n)].map(|(rows, columns)| Placed::packed(rows, columns));
        let (transposed_a, transposed_b, bias, activation) =
            (false, false, false, Activation::None);
        let (beta, more) = (0.0, 0);
        Case { m, n, k, batch, transposed_a, transposed_b, a, b, c, bias, activation, beta, more }
    }

    fn random(random: &mut Random) -> Self {
        let mut below = |most: usize| random.below(most);
        let [m, n, k, batch] = [1 + below(12), 1 + below(12), 1 + below(12), 1 + below(4)];
        let mut case = Case::packed([m, n, k, batch]);
        (case.transposed_a, case.transposed_b) = (below(2) == 1, below(2) == 1);
        case.a = if case.transposed_a { Placed::packed(k, m) } else { Placed::packed(m, k) };
        case.b = if case.transposed_b { Placed::packed(n, k) } else { Placed::packed(k, n) };
        for input in [&mut case.a, &mut case.b] {
            let apart = below(9);
            let width = input.columns * batch + apart;
            (input.row, input.matrix) = match below(4) {
                // Each row has a row of every matrix.
                0 => (width, input.columns),
                // All products read the same.
                1 => (input.columns + apart, 0),
                // They overlap.
                2 => (input.columns, 1 + apart),
                _ => (input.columns + apart, input.rows * (input.columns + apart) + below(9)),
            };
        }
        let apart = below(9);
        (case.c.row, case.c.matrix) = match below(2) {
            0 => (n * batch + apart, n),
            _ => (n + apart, m * (n + apart) + below(9)),
        };
        case.bias = below(2) == 1;
        case.activation = [Activation::None, Activation::Relu, Activation::Gelu][below(3)];
        case.beta = [0.0, 1.5][below(2)];
        case.more = below(3);
        case
    }

    /// All of `c`, in `f64`.
    fn expected(&self, a: &[f64], b: &[f64], bias: &[f64], c: &[f64], alpha: f64) -> Vec<f64> {
        let mut out = c.to_vec();
        for product in 0..self.batch {
            for (row, column) in (0..self.m).flat_map(|row| (0..self.n).map(move |n| (row, n))) {
                let part = |k: usize| {
                    let (a_row, a_column) = if self.transposed_a { (k, row) } else { (row, k) };
                    let (b_row, b_column) =
                        if self.transposed_b { (column, k) } else { (k, column) };
                    a[self.a.at(product, a_row, a_column)] * b[self.b.at(product, b_row, b_column)]
                };
                let sum: f64 = (0..self.k).map(part).sum();
                let at = self.c.at(product, row, column);
                let mut value = if self.k == 0 { 0.0 } else { alpha * sum };
                value += if self.beta == 0.0 { 0.0 } else { self.beta * c[at] };
                value += if self.bias { bias[column] } else { 0.0 };
                out[at] = match self.activation {
                    Activation::Relu => value.max(0.0),
                    Activation::Gelu => {
                        let inner = (2.0 / std::f64::consts::PI).sqrt();
                        0.5 * value * (1.0 + (inner * (value + 0.044_715 * value.powi(3))).tanh())
                    }
                    _ => value,
                };
            }
        }
        out
    }
}

/// A type's numbers as the tests need them.
trait Real: GemmElement {
    fn of(value: f64) -> Self;
    fn value(self) -> f64;
    /// How far results are off, relative to 1.
    const SLACK: f64;
}

macro_rules! real {
    ($($type:ty, $of:expr, $value:expr, $slack:literal;)+) => {$(
        impl Real for $type {
            fn of(value: f64) -> Self { $of(value) }
            fn value(self) -> f64 { $value(self) }
            const SLACK: f64 = $slack;
        }
    )+};
}
real! {
    f16, f16::from_f64, f16::to_f64, 2e-3;
    bf16, bf16::from_f64, bf16::to_f64, 1.6e-2;
    f32, |value| value as f32, f64::from, 1e-5;
    f64, |value| value, |value| value, 1e-8;
}

/// The product of these types beside the slow one, with all that it must leave alone.
fn check<T: Real, C: Real + GemmElement<Scale = T::Scale>>(
    (blas, stream): (&Blas, &Stream),
    case: &Case,
    alpha: f64,
    random: &mut Random,
    output: impl Fn(GemmBuilder<T>) -> GemmBuilder<T, C>,
) -> Result<()>
where
    T::Scale: Real,
{
    let mut numbers = |len: usize| -> Vec<f64> {
        // Few bits, so that every type holds them.
        (0..len).map(|_| random.below(33) as f64 / 16.0 - 1.0).collect()
    };
    let Case { m, n, k, batch, more, .. } = *case;
    let [a, b] = [case.a, case.b].map(|placed| numbers(placed.len(batch) + more));
    let (bias, new) = (numbers(n), numbers(case.c.len(batch)));
    let mut c = vec![GAP; case.c.len(batch) + more];
    for product in 0..batch {
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let at = case.c.at(product, row, column);
            c[at] = new[at];
        }
    }
    let want = case.expected(&a, &b, &bias, &c, alpha);
    let builder = blas.gemm::<T>(m, n, k).batch(batch).activation(case.activation);
    let builder = builder.strides_a(case.a.row, case.a.matrix).strides_b(case.b.row, case.b.matrix);
    let builder = builder.strides_c(case.c.row, case.c.matrix);
    let builder = if case.bias { builder.bias() } else { builder };
    let builder = if case.transposed_a { builder.transposed_a() } else { builder };
    let builder = if case.transposed_b { builder.transposed_b() } else { builder };
    let inputs = [a, b]
        .map(|values| stream.upload(values.into_iter().map(T::of).collect::<Vec<_>>()).queued());
    let outputs = [bias, c]
        .map(|values| stream.upload(values.into_iter().map(C::of).collect::<Vec<_>>()).queued());
    let ([a, b], [bias, c]) = (inputs, outputs);
    let (a, b, bias, mut c) = (a?, b?, bias?, c?);
    let (alpha, beta) = (<T::Scale as Real>::of(alpha), <T::Scale as Real>::of(case.beta));
    let gemm = output(builder).plan_blocking()?;
    match case.bias {
        true => gemm.launch_with_bias(stream, alpha, &a, &b, &bias, beta, &mut c).queued()?,
        false => gemm.launch(stream, alpha, &a, &b, beta, &mut c).queued()?,
    }
    let got = stream.download(&c).synchronize()?;
    let names = [std::any::type_name::<T>(), std::any::type_name::<C>()];
    for (index, (got, want)) in got.iter().zip(&want).enumerate() {
        let (got, off) = (got.value(), (got.value() - want).abs());
        // The library's approximation of `tanh` has no more bits than an `f16`'s.
        let slack = if case.activation == Activation::Gelu { C::SLACK.max(1e-3) } else { C::SLACK };
        assert!(
            off <= slack * (1.0 + want.abs()) * (1.0 + k as f64).sqrt(),
            "{names:?} {case:?}: {got} at {index}, not {want}"
        );
        // Not even rounded.
        assert!(*want != GAP || got == GAP, "{names:?} {case:?}: {got} in the gap at {index}");
    }
    Ok(())
}

/// Every layout, with every type and output: what is in gaps stays.
#[test]
fn strides_of_every_kind() -> Result<()> {
    let device = testing::device();
    let (stream, blas) = (device.stream()?, Blas::load_blocking(&device)?);
    let mut random = Random(21);
    for _ in 0..60 {
        let case = Case::random(&mut random);
        let on = (&blas, &stream);
        check::<f16, f16>(on, &case, 0.5, &mut random, |it| it)?;
        check::<bf16, bf16>(on, &case, 0.5, &mut random, |it| it)?;
        check::<f32, f32>(on, &case, 0.5, &mut random, |it| it)?;
        check::<f16, f32>(on, &case, 0.5, &mut random, GemmBuilder::wide_output)?;
        check::<bf16, f32>(on, &case, 0.5, &mut random, GemmBuilder::wide_output)?;
        // Of `f64` there is no product with an epilogue.
        let case = Case { bias: false, activation: Activation::None, ..case };
        check::<f64, f64>(on, &case, 0.5, &mut random, |it| it)?;
    }
    Ok(())
}

/// As BLAS does: without rows, columns or products nothing is written; without sums `c` is scaled, or zero.
#[test]
fn extents_of_zero() -> Result<()> {
    let device = testing::device();
    let (stream, blas) = (device.stream()?, Blas::load_blocking(&device)?);
    let mut random = Random(22);
    for extents in
        [[0, 5, 3, 2], [5, 0, 3, 2], [5, 7, 3, 0], [0, 0, 0, 1], [5, 7, 0, 1], [5, 7, 0, 3]]
    {
        for (beta, bias) in [(0.0, false), (1.5, false), (0.0, true), (-0.5, true)] {
            for activation in [Activation::None, Activation::Relu] {
                for (transposed_a, transposed_b) in [(false, false), (true, true)] {
                    let mut case = Case { beta, bias, activation, ..Case::packed(extents) };
                    (case.transposed_a, case.transposed_b) = (transposed_a, transposed_b);
                    let [m, n, k, _] = extents;
                    if transposed_a {
                        (case.a, case.b) = (Placed::packed(k, m), Placed::packed(n, k));
                    }
                    let on = (&blas, &stream);
                    check::<f32, f32>(on, &case, 2.0, &mut random, |it| it)?;
                    check::<f16, f32>(
                        on,
                        &case,
                        f64::INFINITY,
                        &mut random,
                        GemmBuilder::wide_output,
                    )?;
                    check::<bf16, bf16>(
                        on,
                        &Case { more: 4, ..case },
                        f64::NAN,
                        &mut random,
                        |it| it,
                    )?;
                }
            }
        }
    }
    // In a row with others, and overwriting what was never written.
    let gemm = blas.gemm::<f32>(4, 4, 0).plan_blocking()?;
    let (none, mut c) = (stream.empty::<f32>(0).queued()?, stream.empty::<f32>(16).queued()?);
    gemm.launch(&stream, 1.0, &none, &none, 0.0, &mut c).queued()?;
    assert_eq!(stream.download(&c).synchronize()?, [0.0; 16]);
    // One whose extents, without the zero, fit no address space.
    blas.gemm::<f32>(1 << 40, 0, 1 << 20).plan_blocking()?;
    let refused = blas.gemm::<f32>(1 << 40, 1 << 40, 0).plan_blocking().unwrap_err();
    assert!(matches!(refused.detail(), ErrorDetail::TooLarge { .. }), "{refused}");
    Ok(())
}

#[test]
fn what_strides_refuse() -> Result<()> {
    let device = testing::device();
    let (stream, blas) = (device.stream()?, Blas::load_blocking(&device)?);
    let gemm = || blas.gemm::<f32>(4, 8, 16).batch(3);
    let refused = gemm().strides_a(15, 64).plan_blocking().unwrap_err();
    let said = "gemm: rows of 16 elements overlap at a pitch of 15";
    assert_eq!(refused.detail().to_string(), said);
    // Stored as `n` rows of `k`.
    let refused = gemm().transposed_b().strides_b(8, 0).plan_blocking().unwrap_err();
    assert!(
        matches!(refused.detail(), ErrorDetail::Pitch { width: 16, pitch: 8, .. }),
        "{refused}"
    );
    for (row, matrix) in [(8, 31), (8, 0), (23, 8), (24, 7), (100, 101), (usize::MAX, 8)] {
        gemm().strides_c(row, matrix).plan_blocking().unwrap_err();
    }
    for (row, matrix) in [(8, 32), (24, 8), (40, 9), (9, 35), (9, 1000)] {
        gemm().strides_c(row, matrix).plan_blocking()?;
    }
    // Neither strides nor their products wrap.
    for (row, matrix) in [(usize::MAX, 0), (16, usize::MAX), (1 << 62, 1 << 62)] {
        let refused = gemm().strides_a(row, matrix).plan_blocking().unwrap_err();
        assert!(matches!(refused.detail(), ErrorDetail::TooLarge { .. }), "{refused}");
    }
    // The figure is that of all matrices.
    for batch in [1 << 61, usize::MAX] {
        let refused = blas.gemm::<f32>(2, 2, 2).batch(batch).plan_blocking().unwrap_err();
        let expected = batch.saturating_mul(4);
        assert!(
            matches!(refused.detail(), ErrorDetail::TooLarge { len, .. } if *len == expected),
            "{refused}"
        );
    }
    // Nothing overlaps, but that is not looked for.
    let refused = blas.gemm::<f32>(3, 3, 3).batch(3).strides_c(7, 10).plan_blocking().unwrap_err();
    let said = refused.detail().to_string();
    assert!(said.contains("neither follow nor interleave"), "{said}");
    // A distance that there is none of does not matter.
    let one = blas.gemm::<f32>(1, 8, 16).strides_a(usize::MAX, usize::MAX).plan_blocking()?;
    let (a, b) = (stream.ones::<f32>(16).queued()?, stream.ones::<f32>(128).queued()?);
    let mut c = stream.empty::<f32>(8).queued()?;
    one.launch(&stream, 1.0, &a, &b, 0.0, &mut c).queued()?;
    assert_eq!(stream.download(&c).synchronize()?, [16.0; 8]);

    // Three elements are missing; and a `c` with gaps is not overwritten.
    let gaps = blas.gemm::<f32>(2, 2, 2).strides_a(5, 0).strides_c(4, 0).plan_blocking()?;
    let (four, mut c) = (stream.ones::<f32>(4).queued()?, stream.empty::<f32>(8).queued()?);
    let error = gaps.launch(&stream, 1.0, &four, &four, 0.0, &mut c).queued().unwrap_err();
    assert!(
        matches!(error.detail(), ErrorDetail::WrongLength { what: "a", expected: 7, found: 4, .. }),
        "{error}"
    );
    let (seven, mut c) = (stream.ones::<f32>(7).queued()?, stream.empty::<f32>(8).queued()?);
    let error = gaps.launch(&stream, 1.0, &seven, &four, 0.0, &mut c).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    let mut c = stream.full(8, 9.0f32).queued()?;
    gaps.launch(&stream, 1.0, &seven, &four, 0.0, &mut c).queued()?;
    assert_eq!(stream.download(&c).synchronize()?, [2.0, 2.0, 9.0, 9.0, 2.0, 2.0, 9.0, 9.0]);
    // Interleaved ones without gaps are.
    let heads = blas.gemm::<f32>(2, 2, 2).batch(2).strides_c(4, 2).plan_blocking()?;
    let (eight, mut c) = (stream.ones::<f32>(8).queued()?, stream.empty::<f32>(8).queued()?);
    heads.launch(&stream, 1.0, &eight, &eight, 0.0, &mut c).queued()?;
    assert_eq!(stream.download(&c).synchronize()?, [2.0; 8]);
    Ok(())
}

/// A service whose batches have different numbers of rows searches once for each. Counted in the library's own log.
#[test]
fn shapes_that_come_again() {
    const NAME: &str = concat!(module_path!(), "::shapes_that_come_again");
    let device = testing::device();
    let log = std::env::temp_dir().join(format!("gpu-await-shapes-{}.log", std::process::id()));
    if device.kind() == DeviceKind::Cuda && child::parameter().is_none() {
        let mut command = child::command(NAME, "child");
        command.env("CUBLASLT_LOG_LEVEL", "5").env("CUBLASLT_LOG_FILE", &log);
        child::run_command(command, NAME, "child");
        let text = std::fs::read_to_string(&log).expect("the library's log");
        std::fs::remove_file(&log).ok();
        let searched = "[Api][cublasLtMatmulAlgoGetHeuristic]";
        assert_eq!(text.lines().filter(|line| line.contains(searched)).count(), 10);
        return;
    }
    let stream = device.stream().unwrap();
    let blas = Blas::load_blocking(&device).unwrap();
    for _ in 0..5 {
        for rows in 1..=10 {
            let gemm = blas.clone().gemm::<f32>(rows, 8, 16).plan();
            let gemm = futures::executor::block_on(gemm).unwrap();
            let a = stream.ones(rows * 16).queued().unwrap();
            let (b, mut c) =
                (stream.ones(128).queued().unwrap(), stream.empty(rows * 8).queued().unwrap());
            gemm.launch(&stream, 1.0, &a, &b, 0.0, &mut c).queued().unwrap();
            assert_eq!(stream.download(&c).synchronize().unwrap(), vec![16.0f32; rows * 8]);
        }
    }
}
