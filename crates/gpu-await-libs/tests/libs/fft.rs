//! Fourier transforms: against the plain sum, for every kind and dimension; ordered like any operation; and what is
//! refused.

use std::f64::consts::TAU;

use gpu_await::testing::{self, Gate};
use gpu_await::{DeviceKind, Error, ErrorDetail, ErrorKind, In, Out, Region, Result};
use gpu_await_libs::{Complex, Fft, FftElement};

use crate::under_test::random::Random;

fn numbers(len: usize, random: &mut Random) -> Vec<Complex<f64>> {
    let mut number = || random.below(33) as f64 / 16.0 - 1.0;
    (0..len).map(|_| Complex::new(number(), number())).collect()
}

/// The sum itself.
fn transformed(extents: &[usize], data: &[Complex<f64>], sign: f64) -> Vec<Complex<f64>> {
    let len: usize = extents.iter().product();
    let indices = |mut at: usize| -> Vec<usize> {
        let mut indices: Vec<usize> = Vec::new();
        for extent in extents.iter().rev() {
            indices.push(at % extent);
            at /= extent;
        }
        indices.reverse();
        indices
    };
    let mut out = Vec::new();
    for signal in data.chunks(len) {
        for frequency in 0..len {
            let frequencies = indices(frequency);
            let term = |(at, value): (usize, &Complex<f64>)| {
                let places = indices(at);
                let turns = frequencies.iter().zip(&places).zip(extents);
                let turns: f64 =
                    turns.map(|((f, p), extent)| (f * p) as f64 / *extent as f64).sum();
                value * Complex::from_polar(1.0, sign * TAU * turns)
            };
            out.push(signal.iter().enumerate().map(term).sum());
        }
    }
    out
}

fn close(got: &[Complex<f64>], want: &[Complex<f64>], slack: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (got - want).norm();
        assert!(off < slack * (1.0 + want.norm()), "{what}: {got} at {index}, not {want}");
    }
}

const SHAPES: &[(&[usize], usize)] =
    &[(&[1], 1), (&[8], 1), (&[12], 3), (&[17], 2), (&[4, 6], 1), (&[5, 8], 2), (&[3, 4, 5], 2)];

macro_rules! kinds {
    ($name:ident, $type:ty, $slack:literal) => {
        #[test]
        fn $name() -> Result<()> {
            let device = testing::device();
            let stream = device.stream()?;
            let fft = Fft::load_blocking(&device)?;
            let mut random = Random(3);
            let narrow = |value: &Complex<f64>| Complex::new(value.re as $type, value.im as $type);
            let wide =
                |value: &Complex<$type>| Complex::new(f64::from(value.re), f64::from(value.im));
            for (extents, batch) in SHAPES {
                let what = format!("{extents:?} x {batch}");
                let len = extents.iter().product::<usize>() * batch;
                let plan = fft.complex::<$type>(extents).batch(*batch).plan_blocking()?;
                let values = numbers(len, &mut random);
                let x = stream.upload(values.iter().map(narrow).collect::<Vec<_>>()).queued()?;
                let mut y = stream.empty::<Complex<$type>>(len).queued()?;
                plan.forward(&stream, &x, &mut y).queued()?;
                let got: Vec<_> = stream.download(&y).synchronize()?.iter().map(wide).collect();
                close(&got, &transformed(extents, &values, -1.0), $slack, &what);
                plan.inverse(&stream, &x, &mut y).queued()?;
                let got: Vec<_> = stream.download(&y).synchronize()?.iter().map(wide).collect();
                close(&got, &transformed(extents, &values, 1.0), $slack, &what);
                plan.forward_in_place(&stream, &mut y).queued()?;
                let n = extents.iter().product::<usize>() as f64;
                let back: Vec<_> = stream.download(&y).synchronize()?.iter().map(wide).collect();
                let scaled: Vec<_> = values.iter().map(|value| value * n).collect();
                close(&back, &scaled, $slack, &what);

                // Of the real parts.
                let plan = fft.real::<$type>(extents).batch(*batch).plan_blocking()?;
                let real: Vec<_> = values.iter().map(|value| Complex::new(value.re, 0.0)).collect();
                let last = extents[extents.len() - 1];
                let half = last / 2 + 1;
                let s = stream
                    .upload(real.iter().map(|v| v.re as $type).collect::<Vec<_>>())
                    .queued()?;
                let mut spectrum = stream.empty::<Complex<$type>>(len / last * half).queued()?;
                plan.forward(&stream, &s, &mut spectrum).queued()?;
                let got: Vec<_> =
                    stream.download(&spectrum).synchronize()?.iter().map(wide).collect();
                let whole = transformed(extents, &real, -1.0);
                let want: Vec<_> =
                    whole.chunks(last).flat_map(|row| &row[..half]).copied().collect();
                close(&got, &want, $slack, &what);
                let mut back = stream.empty::<$type>(len).queued()?;
                plan.inverse(&stream, &mut spectrum, &mut back).queued()?;
                let back: Vec<_> = stream
                    .download(&back)
                    .synchronize()?
                    .iter()
                    .map(|v| Complex::new(f64::from(*v), 0.0))
                    .collect();
                let scaled: Vec<_> = real.iter().map(|value| value * n).collect();
                close(&back, &scaled, $slack, &what);
            }
            Ok(())
        }
    };
}
kinds!(every_kind_in_f32, f32, 1e-4);
kinds!(every_kind_in_f64, f64, 1e-10);

#[tokio::test]
async fn one_plan_on_two_streams() -> Result<()> {
    let device = testing::device();
    let streams = [device.stream()?, device.stream()?];
    let n = if device.kind() == DeviceKind::Cuda { 1 << 20 } else { 1 << 10 };
    let plan = Fft::load(&device).await?.complex::<f32>(&[n]).plan().await?;
    let mut seen = Vec::new();
    for round in 0..20 {
        for stream in &streams {
            let value = Complex::new((round % 5) as f32, 0.0);
            let x = stream.full(n, value).queued()?;
            let mut y = stream.empty(n).queued()?;
            plan.forward(stream, &x, &mut y).queued()?;
            seen.push((stream.download(&y.slice(..2)?), value.re * n as f32));
        }
    }
    for (op, want) in seen {
        let got = op.await?;
        assert!(
            (got[0].re - want).abs() <= want * 1e-5 && got[1].norm() < 1.0 + want * 1e-5,
            "{got:?}"
        );
    }
    Ok(())
}

/// What is transformed is what is there by then. Some lengths take one kernel, others several, and some need memory besides.
#[tokio::test]
async fn the_same_addresses_again() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let fft = Fft::load(&device).await?;
    let host = device.kind() == DeviceKind::Host;
    for n in [16, 4_099, if host { 64 } else { 1 << 20 }] {
        let plan = fft.complex::<f32>(&[n]).plan().await?;
        let mut x = stream.empty::<Complex<f32>>(n).queued()?;
        let mut y = stream.empty::<Complex<f32>>(n).queued()?;
        for round in 0..6_u8 {
            let value = Complex::new(f32::from(round), -1.0);
            stream.fill(&mut x, value).queued()?;
            plan.forward(&stream, &x, &mut y).queued()?;
            let sum = stream.download(&y.slice(..1)?).await?[0];
            let want = value * n as f32;
            assert!((sum - want).norm() <= 1e-4 * want.norm(), "{n}: {sum}, not {want}");
            plan.inverse(&stream, &y, &mut x).queued()?;
            let back = stream.download(&x.slice(..1)?).await?[0];
            assert!((back - want).norm() <= 1e-3 * want.norm(), "{n}: {back}, not {want}");
            plan.forward_in_place(&stream, &mut x).queued()?;
            let sum = stream.download(&x.slice(..1)?).await?[0];
            let want = want * n as f32;
            assert!((sum - want).norm() <= 1e-3 * want.norm(), "{n}: {sum}, not {want}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn waits_for_what_writes_its_input() -> Result<()> {
    let device = testing::device();
    let (stream, producer) = (device.stream()?, device.stream()?);
    let plan = Fft::load(&device).await?.complex::<f64>(&[16]).plan().await?;
    let mut x = stream.zeros::<Complex<f64>>(16).queued()?;
    stream.done().await?;
    let gate = Gate::close(&producer)?;
    producer.fill(&mut x, Complex::new(1.0, 0.0)).queued()?;
    let mut y = stream.empty(16).queued()?;
    let host = stream.batch(|q| {
        plan.forward(q, &x, &mut y)?;
        q.download(&y)
    });
    assert!(!host.is_complete());
    gate.open();
    assert_eq!(host.await?[0], Complex::new(16.0, 0.0));
    Ok(())
}

#[tokio::test]
async fn what_is_refused() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let fft = Fft::load(&device).await?;
    for extents in [&[0][..], &[], &[4, 0]] {
        let refused = fft.complex::<f32>(extents).plan().await.unwrap_err();
        assert!(matches!(refused.detail(), ErrorDetail::TooFew { .. }), "{refused}");
    }
    let told = fft.real::<f32>(&[8]).batch(0).plan().await.unwrap_err().to_string();
    assert_eq!(told, "the batch of a transform: 0, at least 1 needed");
    let refused = fft.complex::<f32>(&[2; 4]).plan().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    let refused = fft.complex::<f32>(&[1 << 40, 1 << 40]).plan().await.unwrap_err();
    assert!(matches!(refused.detail(), ErrorDetail::TooLarge { .. }), "{refused}");

    let plan = fft.complex::<f32>(&[16]).plan().await?;
    let x = stream.full(16, Complex::new(1.0f32, 0.0)).queued()?;
    let mut y = stream.zeros(15).queued()?;
    let error = plan.forward(&stream, &x, &mut y).await.unwrap_err();
    assert!(
        matches!(
            error.detail(),
            ErrorDetail::WrongLength { what: "the output", expected: 16, found: 15, .. }
        ),
        "{error}"
    );
    let read = stream.download(&y).await.unwrap_err();
    assert!(matches!(read.detail(), ErrorDetail::Upstream { .. }), "{read}");
    let elsewhere = testing::peer_device().stream()?;
    let mut z = elsewhere.zeros(16).queued()?;
    let error = plan.forward_in_place(&elsewhere, &mut z).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { what: "the plan", .. }), "{error}");
    // In flight, the plan may go.
    let gate = Gate::close(&stream)?;
    let mut y = stream.empty(16).queued()?;
    plan.forward(&stream, &x, &mut y).abandon();
    drop((plan, fft));
    let seen = stream.download(&y);
    gate.open();
    assert_eq!(seen.await?[0], Complex::new(16.0, 0.0));
    device.close(std::time::Duration::from_secs(10)).await
}

/// The argument that does not begin where cuFFT wants it to.
fn misaligned(error: &Error, alignment_expected: u64) -> &'static str {
    match *error.detail() {
        ErrorDetail::Misaligned { op: "fft", what, ptr, alignment } => {
            assert_eq!((alignment, ptr % alignment), (alignment_expected, alignment_expected / 2));
            what
        }
        _ => panic!("{error}"),
    }
}

/// Every transform, with each of its arguments half a complex number off.
fn odd_elements<T: FftElement + Default>() -> Result<()> {
    const N: usize = 8;
    let complex = |n: usize| 2 * n;
    let device = testing::device();
    let stream = device.stream()?;
    let fft = Fft::load_blocking(&device)?;
    let alignment = 2 * size_of::<T>() as u64;
    for batch in [1, 3] {
        let (len, half) = (N * batch, (N / 2 + 1) * batch);
        let real = fft.real::<T>(&[N]).batch(batch).plan_blocking()?;
        let whole = fft.complex::<T>(&[N]).batch(batch).plan_blocking()?;
        let x = stream.zeros::<T>(complex(len) + 1).queued()?;
        let mut y = stream.zeros::<T>(complex(len) + 1).queued()?;
        let refused = |error: Result<()>| misaligned(&error.unwrap_err(), alignment);
        // Where the input begins, and the output: odd elements lie between complex numbers.
        for (from, to) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            let at = |what: &[&'static str; 2]| what[usize::from(from == 0)];
            let is_even = from + to == 0;
            let spectra = from..from + complex(half);
            let spectra_out = to..to + complex(half);
            let out = real.forward(
                &stream,
                &x.slice(from..from + len)?,
                &mut y.slice_mut(spectra_out)?.cast::<Complex<T>>()?,
            );
            let what = ["the signal", "the spectrum"];
            let out = out.queued();
            if is_even {
                out?
            } else {
                assert_eq!(refused(out), at(&what))
            }

            let mut z = stream.zeros::<T>(complex(len) + 1).queued()?;
            let mut spectrum = z.slice_mut(spectra)?.cast::<Complex<T>>()?;
            stream.fill(&mut y, T::default()).queued()?;
            let out = real.inverse(&stream, &mut spectrum, &mut y.slice_mut(to..to + len)?);
            let (out, what) = (out.queued(), ["the spectrum", "the signal"]);
            // The signal is looked at first.
            let first = if to == 1 { what[1] } else { what[0] };
            if is_even {
                out?
            } else {
                assert_eq!(refused(out), first)
            }

            stream.fill(&mut y, T::default()).queued()?;
            let input = x.slice(from..from + complex(len))?.cast::<Complex<T>>()?;
            let mut output = y.slice_mut(to..to + complex(len))?.cast::<Complex<T>>()?;
            let what = ["the input", "the output"];
            for out in [
                whole.forward(&stream, &input, &mut output).queued(),
                whole.inverse(&stream, &input, &mut output).queued(),
            ] {
                if is_even { out? } else { assert_eq!(refused(out), at(&what)) }
            }
            if to == 1 {
                stream.fill(&mut output, Complex::default()).queued()?;
                let out = whole.forward_in_place(&stream, &mut output).queued();
                assert_eq!(refused(out), "the data");
                stream.fill(&mut output, Complex::default()).queued()?;
                let out = whole.inverse_in_place(&stream, &mut output).queued();
                assert_eq!(refused(out), "the data");
            }
            stream.fill(&mut y, T::default()).queued()?;
        }
    }
    Ok(())
}

#[test]
fn odd_elements_are_refused() -> Result<()> {
    odd_elements::<f32>()?;
    odd_elements::<f64>()
}

/// The check is of each launch: in a batch, in a replayed one, and for each argument of a graph.
#[tokio::test]
async fn odd_elements_in_every_list() -> Result<()> {
    const N: usize = 8;
    let device = testing::device();
    let stream = device.stream()?;
    let plan = Fft::load(&device).await?.real::<f32>(&[N]).plan().await?;
    let x = stream.upload((0..=N).map(|n| n as f32).collect::<Vec<_>>()).queued()?;
    let mut y = stream.zeros::<Complex<f32>>(N / 2 + 1).queued()?;
    let (even, odd) = (x.slice(..N)?, x.slice(1..)?);
    let error = stream.batch(|q| plan.forward(q, &odd, &mut y)).await.unwrap_err();
    assert_eq!(misaligned(&error, 8), "the signal");
    let told = error.to_string();
    assert!(told.contains("4 bytes behind a multiple of 8: begin the view"), "{told}");
    let mut region = Region::new();
    for signal in [&even, &even, &odd, &even] {
        let done = stream.replay(&mut region, |q| plan.forward(q, signal, &mut y)).await;
        match signal.device_ptr() == odd.device_ptr() {
            true => assert_eq!(misaligned(&done.unwrap_err(), 8), "the signal"),
            false => done?,
        }
    }
    assert_eq!(stream.download(&y).await?[0].re, 28.0);
    let graph = device.graph::<(In<f32>, Out<Complex<f32>>), _, _>(plan, |q, plan, (x, mut y)| {
        plan.forward(q, &x, &mut y)
    });
    graph.launch(&stream, (&even, &mut y)).await?;
    let error = graph.launch(&stream, (&odd, &mut y)).await.unwrap_err();
    assert_eq!(misaligned(&error, 8), "the signal");
    graph.launch(&stream, (&even, &mut y)).await?;
    assert_eq!(stream.download(&y).await?[0].re, 28.0);
    Ok(())
}
