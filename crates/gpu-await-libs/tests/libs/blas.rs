//! Matrix products: against a plain loop, for every type, layout and epilogue; ordered like any operation; and what is
//! refused.

use gpu_await::half::{bf16, f16};
use gpu_await::testing::{self, Gate};
use gpu_await::{DeviceBuffer, DeviceKind, ErrorDetail, ErrorKind, Result, Stream};
use gpu_await_libs::{Activation, Blas, Gemm, GemmElement};

use crate::under_test::child;
use crate::under_test::random::Random;

/// What is computed, and how.
#[derive(Clone, Copy, Debug, Default)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    batch: usize,
    transposed_a: bool,
    transposed_b: bool,
    bias: bool,
    activation: Activation,
    beta: f64,
}

const SMALL: Case = Case {
    m: 16,
    n: 24,
    k: 32,
    batch: 1,
    transposed_a: false,
    transposed_b: false,
    bias: false,
    activation: Activation::None,
    beta: 0.0,
};

fn numbers(len: usize, random: &mut Random) -> Vec<f64> {
    // Few bits, so that every type holds them.
    (0..len).map(|_| random.below(33) as f64 / 16.0 - 1.0).collect()
}

/// The product, in `f64`.
fn expected(case: &Case, a: &[f64], b: &[f64], bias: &[f64], c: &[f64], alpha: f64) -> Vec<f64> {
    let Case { m, n, k, .. } = *case;
    let mut out = Vec::new();
    for product in 0..case.batch {
        let (a, b) = (&a[product * m * k..], &b[product * k * n..]);
        for row in 0..m {
            for column in 0..n {
                let at_a = |i: usize| if case.transposed_a { i * m + row } else { row * k + i };
                let at_b =
                    |i: usize| if case.transposed_b { column * k + i } else { i * n + column };
                let sum: f64 = (0..k).map(|i| a[at_a(i)] * b[at_b(i)]).sum();
                let mut value = alpha * sum;
                if case.beta != 0.0 {
                    value += case.beta * c[(product * m + row) * n + column];
                }
                if case.bias {
                    value += bias[column];
                }
                out.push(match case.activation {
                    Activation::Relu => value.max(0.0),
                    Activation::Gelu => {
                        let inner = (2.0 / std::f64::consts::PI).sqrt();
                        0.5 * value * (1.0 + (inner * (value + 0.044_715 * value.powi(3))).tanh())
                    }
                    _ => value,
                });
            }
        }
    }
    out
}

/// A type of elements as the tests need it.
trait Real: GemmElement {
    fn of(value: f64) -> Self;
    fn value(self) -> f64;
    fn scale(value: f64) -> Self::Scale;
    /// How far results are off, relative to 1.
    const SLACK: f64;
}

macro_rules! real {
    ($($type:ty, $of:expr, $value:expr, $scale:ty, $slack:literal;)+) => {$(
        impl Real for $type {
            fn of(value: f64) -> Self { $of(value) }
            fn value(self) -> f64 { $value(self) }
            fn scale(value: f64) -> $scale { value as $scale }
            const SLACK: f64 = $slack;
        }
    )+};
}
real! {
    f16, f16::from_f64, f16::to_f64, f32, 2e-3;
    bf16, bf16::from_f64, bf16::to_f64, f32, 1.6e-2;
    f32, |value| value as f32, f64::from, f32, 1e-5;
    f64, |value| value, |value| value, f64, 1e-12;
}

fn plan<T: Real>(blas: &Blas, case: &Case) -> Result<Gemm<T>> {
    let mut builder =
        blas.gemm::<T>(case.m, case.n, case.k).batch(case.batch).activation(case.activation);
    if case.transposed_a {
        builder = builder.transposed_a();
    }
    if case.transposed_b {
        builder = builder.transposed_b();
    }
    if case.bias {
        builder = builder.bias();
    }
    builder.plan_blocking()
}

fn check<T: Real>(blas: &Blas, stream: &Stream, case: &Case, random: &mut Random) -> Result<()> {
    let Case { m, n, k, batch, .. } = *case;
    let gemm = match plan::<T>(blas, case) {
        // Of `f64` there is no product with an epilogue.
        Err(error) if error.kind() == ErrorKind::Foreign && T::SLACK < 1e-9 => return Ok(()),
        plan => plan?,
    };
    let alpha = 0.5;
    let values = [batch * m * k, batch * k * n, n, batch * m * n].map(|len| numbers(len, random));
    let upload = |values: &[f64]| -> Result<DeviceBuffer<T>> {
        stream.upload(values.iter().map(|value| T::of(*value)).collect::<Vec<_>>()).queued()
    };
    let [a, b, bias, c] = &values;
    let want = expected(case, a, b, bias, c, alpha);
    let (a, b, bias) = (upload(a)?, upload(b)?, upload(bias)?);
    // What is overwritten may be unwritten.
    let mut c = if case.beta == 0.0 { stream.empty(c.len()).queued()? } else { upload(c)? };
    let (alpha, beta) = (T::scale(alpha), T::scale(case.beta));
    match case.bias {
        true => gemm.launch_with_bias(stream, alpha, &a, &b, &bias, beta, &mut c),
        false => gemm.launch(stream, alpha, &a, &b, beta, &mut c),
    }
    .queued()?;
    let got = stream.download(&c).synchronize()?;
    for (index, (got, want)) in got.iter().zip(&want).enumerate() {
        let off = (got.value() - want).abs();
        // The library's approximation has no more bits than a float.
        let is_gelu = case.activation == Activation::Gelu;
        let slack = if is_gelu { T::SLACK.max(1e-8) } else { T::SLACK };
        assert!(
            off <= slack * (1.0 + want.abs()) * (k as f64).sqrt(),
            "{} {case:?}: {} at {index}, not {want}",
            std::any::type_name::<T>(),
            got.value()
        );
    }
    Ok(())
}

#[test]
fn every_type_layout_and_epilogue() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let blas = Blas::load_blocking(&device)?;
    let mut random = Random(7);
    let mut cases = vec![
        SMALL,
        Case { m: 1, n: 8, k: 8, ..SMALL },
        Case { m: 8, n: 8, k: 128, batch: 5, ..SMALL },
        Case { batch: 3, transposed_b: true, beta: 1.5, ..SMALL },
    ];
    for transposed_a in [false, true] {
        for transposed_b in [false, true] {
            cases.push(Case { transposed_a, transposed_b, ..SMALL });
        }
    }
    for activation in [Activation::None, Activation::Relu, Activation::Gelu] {
        for bias in [false, true] {
            cases.push(Case { activation, bias, transposed_b: true, ..SMALL });
            cases.push(Case { activation, bias, beta: -0.5, ..SMALL });
        }
    }
    for case in &cases {
        check::<f32>(&blas, &stream, case, &mut random)?;
        check::<f64>(&blas, &stream, case, &mut random)?;
        check::<f16>(&blas, &stream, case, &mut random)?;
        check::<bf16>(&blas, &stream, case, &mut random)?;
    }
    Ok(())
}

/// What a plan is asked for is what the shapes say, also if they are no multiple of anything.
#[test]
fn odd_shapes() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let blas = Blas::load_blocking(&device)?;
    let mut random = Random(8);
    for _ in 0..40 {
        let mut extent = || 1 + random.below(40);
        let case = Case { m: extent(), n: extent(), k: extent(), ..SMALL };
        check::<f32>(&blas, &stream, &case, &mut random)?;
    }
    Ok(())
}

// ---- order --------------------------------------------------------------------------------------

#[tokio::test]
async fn waits_for_what_writes_its_inputs() -> Result<()> {
    let device = testing::device();
    let (stream, producer) = (device.stream()?, device.stream()?);
    let gemm = Blas::load(&device).await?.gemm::<f32>(16, 16, 16).plan().await?;
    let (mut a, b) = (stream.zeros::<f32>(256).queued()?, stream.full(256, 0.5f32).queued()?);
    let mut c = stream.empty::<f32>(256).queued()?;
    stream.done().await?;
    let gate = Gate::close(&producer)?;
    producer.fill(&mut a, 1.0).queued()?;
    let product = gemm.launch(&stream, 1.0, &a, &b, 0.0, &mut c);
    let seen = device.stream()?.download(&c);
    assert!(!product.is_complete() && !seen.is_complete());
    gate.open();
    assert_eq!(seen.await?, [8.0; 256]);
    product.await
}

/// Each launch has a workspace of its own: products on two streams do not disturb each other.
#[tokio::test]
async fn products_on_two_streams() -> Result<()> {
    let device = testing::device();
    let streams = [device.stream()?, device.stream()?];
    // Few rows and a long `k`, where the sum is split.
    let (m, n, k) = (64, 64, 16_384);
    let gemm = Blas::load(&device).await?.gemm::<f32>(m, n, k).plan().await?;
    let mut products = Vec::new();
    for round in 0..20 {
        for stream in &streams {
            let value = (round % 4) as f32;
            let a = stream.full(m * k, 1.0f32).queued()?;
            let b = stream.full(k * n, value).queued()?;
            let mut c = stream.empty::<f32>(m * n).queued()?;
            gemm.launch(stream, 1.0, &a, &b, 0.0, &mut c).queued()?;
            products.push((stream.download(&c), value * k as f32));
        }
        if device.kind() == DeviceKind::Host {
            break;
        }
    }
    for (product, want) in products {
        let got = product.await?;
        assert!(got.iter().all(|got| *got == want), "{} is not {want}", got[0]);
    }
    Ok(())
}

#[tokio::test]
async fn in_a_batch_and_on_a_device() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let gemm = Blas::load(&device).await?.gemm::<f32>(8, 8, 8).plan().await?;
    let (a, b) = (stream.full(64, 1.0f32).queued()?, stream.full(64, 2.0f32).queued()?);
    let mut c = stream.empty::<f32>(64).queued()?;
    let host = stream
        .batch(|q| {
            gemm.launch(q, 1.0, &a, &b, 0.0, &mut c)?;
            gemm.launch(q, 1.0, &a, &b, 1.0, &mut c)?;
            q.download(&c)
        })
        .await?;
    assert_eq!(host, [32.0; 64]);
    gemm.launch(&device, 2.0, &a, &b, 0.0, &mut c).queued()?;
    assert_eq!(stream.download(&c).await?, [32.0; 64]);
    Ok(())
}

/// A call that comes again with the same addresses and scales is not made again: what its kernel computes with is what
/// is there by then.
#[tokio::test]
async fn the_same_addresses_again() -> Result<()> {
    const N: usize = 32;
    let device = testing::device();
    let stream = device.stream()?;
    let blas = Blas::load(&device).await?;
    let plain = blas.gemm::<f32>(N, N, N).plan().await?;
    let biased = blas.gemm::<f32>(N, N, N).bias().activation(Activation::Relu).plan().await?;
    let mut a = stream.empty::<f32>(N * N).queued()?;
    let mut b = stream.empty::<f32>(N * N).queued()?;
    let mut bias = stream.empty::<f32>(N).queued()?;
    let mut outs = [stream.zeros(N * N).queued()?, stream.zeros(N * N).queued()?];
    for round in 0..12_u8 {
        let value = f32::from(round) - 5.0;
        stream.fill(&mut a, value).queued()?;
        stream.fill(&mut b, 2.0).queued()?;
        stream.fill(&mut bias, 3.0).queued()?;
        let product = value * 2.0 * N as f32;
        for (which, c) in outs.iter_mut().enumerate() {
            stream.fill(c, 1.0).queued()?;
            let alpha = 1.0 + which as f32;
            plain.launch(&stream, alpha, &a, &b, 0.0, c).queued()?;
            assert_eq!(stream.download(&*c).await?, [alpha * product; N * N], "{round}");
            plain.launch(&stream, alpha, &a, &b, -1.0, c).queued()?;
            assert_eq!(stream.download(&*c).await?, [0.0; N * N], "{round}");
            biased.launch_with_bias(&stream, 1.0, &a, &b, &bias, 0.0, c).queued()?;
            let want = (product + 3.0).max(0.0);
            assert_eq!(stream.download(&*c).await?, [want; N * N], "{round}");
        }
    }
    Ok(())
}

/// A plan, and the library, may go while products are under way.
#[tokio::test]
async fn dropped_in_flight() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let gate = Gate::close(&stream)?;
    let gemm = Blas::load(&device).await?.gemm::<f32>(8, 8, 8).plan().await?;
    let (a, b) = (stream.full(64, 1.0f32).queued()?, stream.full(64, 2.0f32).queued()?);
    let mut c = stream.empty::<f32>(64).queued()?;
    gemm.launch(&stream, 1.0, &a, &b, 0.0, &mut c).abandon();
    drop((gemm, a, b));
    let seen = stream.download(&c);
    gate.open();
    assert_eq!(seen.await?, [16.0; 64]);
    device.close(std::time::Duration::from_secs(10)).await
}

// ---- what is refused ----------------------------------------------------------------------------

#[tokio::test]
async fn what_is_refused() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let blas = Blas::load(&device).await?;
    let refused = blas.gemm::<f32>(1 << 40, 1 << 40, 1).plan().await.unwrap_err();
    assert!(matches!(refused.detail(), ErrorDetail::TooLarge { .. }), "{refused}");

    let gemm = blas.gemm::<f32>(8, 8, 8).plan().await?;
    let (a, mut c) = (stream.full(65, 1.0f32).queued()?, stream.zeros(64).queued()?);
    let error = gemm.launch(&stream, 1.0, &a, &a.slice(..64)?, 0.0, &mut c).await.unwrap_err();
    assert!(
        matches!(
            error.detail(),
            ErrorDetail::WrongLength { what: "a", expected: 64, found: 65, .. }
        ),
        "{error}"
    );
    // What it would have written counts as failed, until it is overwritten.
    let read = stream.download(&c).await.unwrap_err();
    assert!(matches!(read.detail(), ErrorDetail::Upstream { .. }), "{read}");
    let error = gemm.launch(&stream, 1.0, &a.slice(1..)?, &a.slice(..64)?, 0.0, &mut c).await;
    let error = error.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Misaligned { what: "a", .. }), "{error}");
    let whole = a.slice(..64)?;
    let error =
        gemm.launch_with_bias(&stream, 1.0, &whole, &whole, &a.slice(..8)?, 0.0, &mut c).await;
    let error = error.unwrap_err();
    let said = "gemm: the bias, which the plan was made without, has 8 elements, expected 0";
    assert_eq!(error.detail().to_string(), said);
    let biased = blas.gemm::<f32>(8, 8, 8).bias().plan().await?;
    let error = biased.launch(&stream, 1.0, &whole, &whole, 0.0, &mut c).await.unwrap_err();
    let said = "gemm: the bias, which `launch_with_bias` takes, has 0 elements, expected 8";
    assert_eq!(error.detail().to_string(), said);

    let other = testing::peer_device();
    let elsewhere = other.stream()?;
    let (x, mut y) = (elsewhere.full(64, 1.0f32).queued()?, elsewhere.zeros(64).queued()?);
    let error = gemm.launch(&elsewhere, 1.0, &x, &x, 0.0, &mut y).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { what: "the plan", .. }), "{error}");
    let error = gemm.launch(&stream, 1.0, &x, &whole, 0.0, &mut c).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    gemm.launch(&stream, 1.0, &whole, &whole, 0.0, &mut c).await?;
    assert_eq!(stream.download(&c).await?, [8.0; 64]);
    Ok(())
}

/// Counted in the library's own log.
#[test]
fn a_launch_searches_for_nothing() {
    const NAME: &str = concat!(module_path!(), "::a_launch_searches_for_nothing");
    let device = testing::device();
    if device.kind() == DeviceKind::Host {
        return;
    }
    let log = std::env::temp_dir().join(format!("gpu-await-blas-{}.log", std::process::id()));
    if child::parameter().is_none() {
        let mut command = child::command(NAME, "child");
        command.env("CUBLASLT_LOG_LEVEL", "5").env("CUBLASLT_LOG_FILE", &log);
        child::run_command(command, NAME, "child");
        let text = std::fs::read_to_string(&log).expect("the library's log");
        std::fs::remove_file(&log).ok();
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        assert_eq!(count("[Api][cublasLtMatmulAlgoGetHeuristic]"), 1);
        // One that is made, and one that is captured: the others launch what that put into the capture.
        assert_eq!(count("[Api][cublasLtMatmul]"), 2);
        return;
    }
    let stream = device.stream().unwrap();
    let gemm = Blas::load_blocking(&device).unwrap().gemm::<f32>(64, 64, 64);
    let gemm = gemm.plan_blocking().unwrap();
    let (a, mut c) = (stream.ones(4096).queued().unwrap(), stream.empty(4096).queued().unwrap());
    for _ in 0..10 {
        gemm.launch(&stream, 1.0, &a, &a, 0.0, &mut c).queued().unwrap();
    }
    assert_eq!(stream.download(&c).synchronize().unwrap(), [64.0; 4096]);
}

/// The first product in a partition chooses for that number of multiprocessors.
#[test]
fn products_in_partitions() {
    const NAME: &str = concat!(module_path!(), "::products_in_partitions");
    let device = testing::device();
    let log = std::env::temp_dir().join(format!("gpu-await-parts-{}.log", std::process::id()));
    if device.kind() == DeviceKind::Cuda && child::parameter().is_none() {
        let mut command = child::command(NAME, "child");
        command.env("CUBLASLT_LOG_LEVEL", "5").env("CUBLASLT_LOG_FILE", &log);
        child::run_command(command, NAME, "child");
        let text = std::fs::read_to_string(&log).expect("the library's log");
        std::fs::remove_file(&log).ok();
        let searched = "[Api][cublasLtMatmulAlgoGetHeuristic]";
        // For the plan, and for the one size.
        assert_eq!(text.lines().filter(|line| line.contains(searched)).count(), 2);
        return;
    }
    let gemm = Blas::load_blocking(&device).unwrap().gemm::<f32>(64, 64, 64);
    let gemm = gemm.plan_blocking().unwrap();
    let mut streams = vec![device.stream().unwrap()];
    for _ in 0..2 {
        let reserved = futures::executor::block_on(device.reserve_partition(8));
        // A host device may have one multiprocessor.
        streams.extend(reserved.ok().map(|partition| partition.stream().unwrap()));
    }
    for stream in &streams {
        let (a, mut c) =
            (stream.ones(4096).queued().unwrap(), stream.empty(4096).queued().unwrap());
        for _ in 0..4 {
            gemm.launch(stream, 1.0, &a, &a, 0.0, &mut c).queued().unwrap();
        }
        assert_eq!(stream.download(&c).synchronize().unwrap(), [64.0; 4096]);
    }
}
