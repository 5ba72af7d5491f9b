//! Special values: zeros of either sign, infinities, NaNs, subnormal numbers and the ends of the integers, as every scalar argument and
//! as elements, in views that begin at every odd element.
//!
//! Each case runs on the device under test, on the host device in the same process, and in plain Rust, and all three agree: in bits, but
//! for the payload and the sign of a NaN, and for what the documentation leaves open. On a GPU it compares kernels and libraries with
//! their twins; on a host device, these with the model.
//!
//! More than 500 lines: one case after the other, each with its model.

use std::fmt::Debug;

use gpu_await::testing;
use gpu_await::{Device, DeviceBuffer, DeviceKind, ErrorKind, Result, Stream, View, ViewMut};
use gpu_await_algorithms::{Algorithms, Compare, ReduceOp, transform};
use half::{bf16, f16};

use crate::under_test::plain::{Plain, for_each_type};

/// Where views begin, in elements: of no type both are multiples of a vector.
const OFFSETS: [usize; 3] = [0, 1, 3];

/// More than a block, and no multiple of anything.
const LEN: usize = 1_003;

/// A type, its special values, and what plain Rust does with them.
trait Special: Plain {
    fn specials() -> Vec<Self>;
    fn bits(self) -> u64;
}

macro_rules! integers {
    ($($type:ident)+) => {$(
        impl Special for $type {
            fn specials() -> Vec<$type> {
                vec![0, 1, $type::MAX, $type::MIN, $type::MAX - 1, $type::MIN + 1, (0 as $type).wrapping_sub(1)]
            }
            fn bits(self) -> u64 {
                self as u64
            }
        }
    )+};
}
integers! { u8 u16 u32 u64 i8 i16 i32 i64 }

macro_rules! floats {
    ($($type:ident)+) => {$(
        impl Special for $type {
            fn specials() -> Vec<$type> {
                let one = <$type>::of_f64(1.0);
                let least = <$type>::from_bits(1);
                let zero = <$type>::of_f64(0.0);
                let all = [zero, one, least, $type::MIN_POSITIVE, $type::MAX, $type::INFINITY, $type::NAN];
                all.into_iter().flat_map(|x| [x, -x]).collect()
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    )+};
}
floats! { f16 bf16 f32 f64 }

/// What is compared: values, in bits.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen(Vec<u64>);

impl Seen {
    /// Every NaN is one.
    fn of<T: Special>(values: &[T]) -> Seen {
        Seen(values.iter().map(|x| if x.is_nan() { u64::MAX } else { x.bits() }).collect())
    }

    /// Zeros are one as well.
    fn of_equal<T: Special>(values: &[T]) -> Seen {
        let zero = T::of_f64(0.0);
        Seen::of(&values.iter().map(|x| if *x == zero { zero } else { *x }).collect::<Vec<_>>())
    }

    fn raw<T: Special>(values: &[T]) -> Seen {
        Seen(values.iter().map(|x| x.bits()).collect())
    }
}

/// The device under test, and the host device.
struct Both([Stream; 2]);

impl Both {
    fn open() -> Both {
        Both([testing::device(), Device::host()].map(|device| device.stream().expect("a stream")))
    }

    /// A case on both devices, beside what plain Rust makes of it, where the documentation says that.
    fn check<S: PartialEq + Debug>(
        &self,
        what: &dyn Fn() -> String,
        expected: Option<S>,
        case: impl Fn(&Stream) -> Result<S>,
    ) {
        let on = |stream| case(stream).unwrap_or_else(|error| panic!("{}: {error}", what()));
        let host = on(&self.0[1]);
        if self.0[0].device().kind() != DeviceKind::Host {
            let here = on(&self.0[0]);
            assert_eq!(here, host, "{}: the device under test, and the host device", what());
        }
        if let Some(expected) = expected {
            assert_eq!(host, expected, "{}: the host device, and plain Rust", what());
        }
    }
}

/// Special values in every order, with others between them.
fn elements<T: Special>(len: usize) -> Vec<T> {
    let specials = T::specials();
    let of = |at: usize| match at % 5 {
        4 => T::small(at as i32),
        step => specials[(at * (step + 1) + at / 7) % specials.len()],
    };
    (0..len).map(of).collect()
}

/// Memory with the values behind `offset` others.
struct Shifted<T> {
    buffer: DeviceBuffer<T>,
    offset: usize,
    len: usize,
}

impl<T: Special> Shifted<T> {
    fn new(stream: &Stream, values: &[T], offset: usize) -> Result<Self> {
        let all = vec![T::small(5); offset].into_iter().chain(values.iter().copied());
        let buffer = stream.upload(all.collect::<Vec<_>>()).queued()?;
        Ok(Shifted { buffer, offset, len: values.len() })
    }

    fn view(&self) -> Result<View<'_, T>> {
        self.buffer.slice(self.offset..self.offset + self.len)
    }

    fn view_mut(&mut self) -> Result<ViewMut<'_, T>> {
        self.buffer.slice_mut(self.offset..self.offset + self.len)
    }

    /// The values; those in front of them are as they were.
    fn read(&self, stream: &Stream) -> Result<Vec<T>> {
        let all = stream.download(&self.buffer).synchronize()?.to_vec();
        assert!(all[..self.offset].iter().all(|x| *x == T::small(5)), "in front of the view");
        Ok(all[self.offset..].to_vec())
    }
}

fn conditions<T: Special>(value: T) -> [Compare<T>; 6] {
    use Compare as C;
    [
        C::Less(value),
        C::LessOrEqual(value),
        C::Greater(value),
        C::GreaterOrEqual(value),
        C::Equal(value),
        C::NotEqual(value),
    ]
}

fn holds<T: Special>(condition: Compare<T>, x: T) -> bool {
    match condition {
        Compare::Less(value) => x < value,
        Compare::LessOrEqual(value) => x <= value,
        Compare::Greater(value) => x > value,
        Compare::GreaterOrEqual(value) => x >= value,
        Compare::Equal(value) => x == value,
        Compare::NotEqual(value) => x != value,
    }
}

// ---- fills and copies ---------------------------------------------------------------------------

/// Every bit arrives, those of NaNs too, and no byte beside the view is touched.
#[test]
fn fills_and_copies_of_special_values() {
    fn check<T: Special>(both: &Both) {
        let x = elements::<T>(LEN);
        for to in OFFSETS {
            for value in T::specials() {
                let what = || format!("a fill with {value:?} at {to}");
                both.check(&what, Some(Seen::raw(&[value; LEN])), |stream| {
                    let mut y = Shifted::new(stream, &x, to)?;
                    stream.fill(&mut y.view_mut()?, value).queued()?;
                    Ok(Seen::raw(&y.read(stream)?))
                });
            }
            for from in OFFSETS {
                let what = || format!("a copy of {:?} from {from} to {to}", T::small(1));
                both.check(&what, Some(Seen::raw(&x)), |stream| {
                    let source = Shifted::new(stream, &x, from)?;
                    let mut y = Shifted::new(stream, &[T::small(0); LEN], to)?;
                    stream.copy(&source.view()?, &mut y.view_mut()?).queued()?;
                    Ok(Seen::raw(&y.read(stream)?))
                });
            }
        }
    }
    let both = Both::open();
    for_each_type!(check(&both));
}

// ---- algorithms ---------------------------------------------------------------------------------

/// Each special value as the threshold of each condition.
#[test]
fn thresholds_of_selections() {
    fn check<T: Special>(both: &Both) {
        let x = elements::<T>(LEN);
        for (at, value) in T::specials().into_iter().enumerate() {
            for (number, condition) in conditions(value).into_iter().enumerate() {
                let offset = OFFSETS[(at + number) % OFFSETS.len()];
                let what = || format!("{} {condition:?} at {offset}", std::any::type_name::<T>());
                let (selected, others): (Vec<T>, Vec<T>) =
                    x.iter().partition(|x| holds(condition, **x));
                let expected =
                    (selected.len(), selected.len(), Seen::of(&selected), Seen::of(&others));
                both.check(&what, Some(expected), |stream| {
                    let x = Shifted::new(stream, &x, offset)?;
                    let mut taken = Shifted::new(stream, &[T::small(0); LEN], offset)?;
                    let mut left = Shifted::new(stream, &[T::small(0); LEN], offset)?;
                    let count = stream.count_if(&x.view()?, condition).synchronize()?;
                    let op = stream.copy_if(&x.view()?, condition, &mut taken.view_mut()?);
                    let copied = op.synchronize()?;
                    let first = Seen::of(&taken.read(stream)?[..copied]);
                    let (mut into, mut rest) = (taken.view_mut()?, left.view_mut()?);
                    let op = stream.partition(&x.view()?, condition, &mut into, &mut rest);
                    assert_eq!(op.synchronize()?, copied);
                    assert_eq!(Seen::of(&taken.read(stream)?[..copied]), first);
                    let rest = Seen::of(&left.read(stream)?[..LEN - copied]);
                    Ok((count, copied, first, rest))
                });
            }
        }
    }
    let both = Both::open();
    for_each_type!(check(&both));
}

/// Each special value as what a reduction or a scan begins with, and each pair of them as what is combined.
#[test]
fn reductions_and_scans_of_special_values() {
    fn check<T: Special>(both: &Both) {
        let specials = T::specials();
        for (at, init) in specials.iter().enumerate() {
            for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Product] {
                let offset = OFFSETS[at % OFFSETS.len()];
                let what = || format!("{} {op:?} from {init:?}", std::any::type_name::<T>());
                // Of `f64` both zeros are equal, to minimum and maximum.
                let is_extreme = matches!(op, ReduceOp::Min | ReduceOp::Max);
                let seen =
                    if is_extreme && size_of::<T>() == 8 { Seen::of_equal } else { Seen::of };
                for x in &specials {
                    let expected = is_extreme.then(|| {
                        let (a, b) = (*init, *x);
                        let lower = a.order(&b).is_lt();
                        let nan = [a, b].into_iter().find(T::is_nan);
                        let value = if lower == (op == ReduceOp::Min) { a } else { b };
                        seen(&[nan.unwrap_or(value); 1])
                    });
                    both.check(&what, expected, |stream| {
                        let x = Shifted::new(stream, &[*x], offset)?;
                        Ok(seen(&[stream.reduce(&x.view()?, op, *init).synchronize()?]))
                    });
                }
                both.check(&what, None, |stream| {
                    // Two at a time, so that no order of sums is open.
                    let mut seen_all = Vec::new();
                    for x in &specials {
                        let x = Shifted::new(stream, &[*init, *x], offset)?;
                        let mut out = Shifted::new(stream, &[T::small(0); 2], offset)?;
                        let (view, mut to) = (x.view()?, out.view_mut()?);
                        stream.inclusive_scan(&view, op, &mut to).queued()?;
                        seen_all.push(seen(&out.read(stream)?));
                        let (view, mut to) = (x.view()?, out.view_mut()?);
                        stream.exclusive_scan(&view, op, *init, &mut to).queued()?;
                        seen_all.push(seen(&out.read(stream)?));
                        let offsets = stream.upload(vec![0u64, 1, 1, 2]).queued()?;
                        let mut out = Shifted::new(stream, &[T::small(0); 3], offset)?;
                        let mut to = out.view_mut()?;
                        stream
                            .segmented_reduce(&x.view()?, &offsets, op, *init, &mut to)
                            .queued()?;
                        seen_all.push(seen(&out.read(stream)?));
                    }
                    Ok(seen_all)
                });
            }
        }
        for offset in OFFSETS {
            let what = || format!("extremes of {} at {offset}", std::any::type_name::<T>());
            for len in [1, 5, 37, LEN] {
                let x = elements::<T>(len);
                let first = |is_better: fn(&T, &T) -> bool| {
                    let nan = x.iter().position(T::is_nan);
                    nan.or_else(|| {
                        (0..len)
                            .reduce(|best, at| if is_better(&x[at], &x[best]) { at } else { best })
                    })
                };
                let expected = (first(|a, b| a < b), first(|a, b| a > b));
                let values = [expected.0, expected.1].map(|at| x[at.expect("some")]);
                both.check(&what, Some((expected, Seen::of_equal(&values))), |stream| {
                    let x = Shifted::new(stream, &x, offset)?;
                    let x = x.view()?;
                    let places =
                        (stream.arg_min(&x).synchronize()?, stream.arg_max(&x).synchronize()?);
                    let values = [stream.min(&x).synchronize()?, stream.max(&x).synchronize()?];
                    Ok((places, Seen::of_equal(&values)))
                });
            }
        }
    }
    let both = Both::open();
    for_each_type!(check(&both));
}

/// By all bits: a NaN's sign decides, and so does a zero's.
#[test]
fn orders_of_special_values() {
    fn check<T: Special>(both: &Both) {
        for (len, offset) in [(7, 1), (64, 3), (LEN, 0), (LEN, 1)] {
            let x = elements::<T>(len);
            let what = || format!("{len} of {} at {offset}", std::any::type_name::<T>());
            let mut places: Vec<u64> = (0..len as u64).collect();
            places.sort_by(|a, b| x[*a as usize].order(&x[*b as usize]));
            let up: Vec<T> = places.iter().map(|at| x[*at as usize]).collect();
            let down: Vec<T> = up.iter().rev().copied().collect();
            let k = len / 2;
            let seen = [&up, &down, &up, &down[..k].to_vec(), &up[..k].to_vec()];
            let expected = (seen.map(|x| Seen::raw(x)), places.clone());
            both.check(&what, Some(expected), |stream| {
                let mut sorted = Shifted::new(stream, &x, offset)?;
                stream.sort(&mut sorted.view_mut()?).queued()?;
                let ascending = sorted.read(stream)?;
                stream.sort_descending(&mut sorted.view_mut()?).queued()?;
                let descending = sorted.read(stream)?;
                let mut keys = Shifted::new(stream, &x, offset)?;
                let mut values = Shifted::new(stream, &places_of(len), offset)?;
                let (mut by, mut moved) = (keys.view_mut()?, values.view_mut()?);
                stream.sort_by_key(&mut by, &mut moved).queued()?;
                let source = Shifted::new(stream, &x, offset)?;
                let mut greatest = Shifted::new(stream, &vec![T::small(0); k], offset)?;
                stream.top_k(&source.view()?, &mut greatest.view_mut()?).queued()?;
                let mut least = Shifted::new(stream, &vec![T::small(0); k], offset)?;
                stream.bottom_k(&source.view()?, &mut least.view_mut()?).queued()?;
                let seen = [
                    ascending,
                    descending,
                    keys.read(stream)?,
                    greatest.read(stream)?,
                    least.read(stream)?,
                ];
                Ok((seen.map(|x| Seen::raw(&x)), values.read(stream)?))
            });
        }
    }
    fn places_of(len: usize) -> Vec<u64> {
        (0..len as u64).collect()
    }
    let both = Both::open();
    for_each_type!(check(&both));
}

/// Zeros of either sign are one run, and each NaN is its own.
#[test]
fn runs_of_special_values() {
    fn check<T: Special>(both: &Both) {
        let mut x = elements::<T>(LEN);
        // Runs, and of zeros mixed ones.
        for at in (0..LEN).filter(|at| at % 3 != 0) {
            let same = x[at - 1];
            x[at] = if same == T::small(0) { x[at] } else { same };
        }
        let zeros: Vec<T> = T::specials().into_iter().filter(|x| *x == T::of_f64(0.0)).collect();
        x.splice(100..100 + 6, (0..6).map(|at| zeros[at % zeros.len()]));
        for offset in OFFSETS {
            let what = || format!("runs of {} at {offset}", std::any::type_name::<T>());
            let starts: Vec<usize> =
                (0..x.len()).filter(|at| *at == 0 || x[*at] != x[at - 1]).collect();
            let ends = starts[1..].iter().copied().chain([x.len()]);
            let firsts: Vec<T> = starts.iter().map(|at| x[*at]).collect();
            let lasts: Vec<T> = ends.clone().map(|end| x[end - 1]).collect();
            let lengths: Vec<u64> =
                starts.iter().zip(ends).map(|(start, end)| (end - start) as u64).collect();
            let expected = (Seen::of(&firsts), Seen::of(&lasts), lengths);
            both.check(&what, Some(expected), |stream| {
                let source = Shifted::new(stream, &x, offset)?;
                let mut values = Shifted::new(stream, &vec![T::small(0); x.len()], offset)?;
                let mut lengths = Shifted::new(stream, &vec![0u64; x.len()], offset)?;
                let op = stream.unique(&source.view()?, &mut values.view_mut()?);
                let runs = op.synchronize()?;
                let firsts = Seen::of(&values.read(stream)?[..runs]);
                let (mut last, mut long) = (values.view_mut()?, lengths.view_mut()?);
                let op = stream.run_length_encode(&source.view()?, &mut last, &mut long);
                assert_eq!(op.synchronize()?, runs);
                let lasts = Seen::of(&values.read(stream)?[..runs]);
                Ok((firsts, lasts, lengths.read(stream)?[..runs].to_vec()))
            });
        }
    }
    let both = Both::open();
    for_each_type!(check(&both));
}

/// Each pair of special values as the ends of a histogram, and all of them as levels: counts, or the same refusal.
#[test]
fn bounds_of_histograms() {
    fn check<T: Special>(both: &Both) {
        let x = elements::<T>(LEN);
        for (at, lower) in T::specials().into_iter().enumerate() {
            for upper in T::specials() {
                let offset = OFFSETS[at % OFFSETS.len()];
                let what = || format!("{} {lower:?}..={upper:?}", std::any::type_name::<T>());
                both.check(&what, None, |stream| {
                    let source = Shifted::new(stream, &x, offset)?;
                    let mut counts = Shifted::new(stream, &[0u64; 7], offset)?;
                    let mut to = counts.view_mut()?;
                    match stream.histogram(&source.view()?, lower..=upper, &mut to).queued() {
                        Ok(()) => counts.read(stream),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::InvalidCall, "{error}");
                            Ok(Vec::new())
                        }
                    }
                });
            }
        }
        let mut levels: Vec<T> = T::specials().into_iter().filter(|x| !x.is_nan()).collect();
        levels.sort_by(T::order);
        let last = levels.len() - 1;
        let mut expected = vec![0; last];
        for x in x.iter().filter(|x| **x >= levels[0] && **x <= levels[last]) {
            let bin = (0..last).rev().find(|bin| levels[*bin] <= *x).expect("in some");
            expected[bin] += 1;
        }
        for offset in OFFSETS {
            let what = || format!("{} levels at {offset}", std::any::type_name::<T>());
            both.check(&what, Some(expected.clone()), |stream| {
                let source = Shifted::new(stream, &x, offset)?;
                let levels = Shifted::new(stream, &levels, offset)?;
                let mut counts = Shifted::new(stream, &vec![0u64; last], offset)?;
                let mut to = counts.view_mut()?;
                stream.histogram_between(&source.view()?, &levels.view()?, &mut to).queued()?;
                counts.read(stream)
            });
        }
    }
    let both = Both::open();
    for_each_type!(check(&both));
}

/// Each special value as a number of a formula, of a sequence, and as what is converted.
#[test]
fn numbers_of_formulas() {
    fn check<T: Special + gpu_await_algorithms::Arithmetic>(both: &Both) {
        let x = elements::<T>(LEN);
        for (at, a) in T::specials().into_iter().enumerate() {
            let offset = OFFSETS[at % OFFSETS.len()];
            let what = || format!("{} and {a:?} at {offset}", std::any::type_name::<T>());
            let greater: Vec<T> = x.iter().map(|x| if *x > a { *x } else { a }).collect();
            both.check(&what, Some(Seen::of(&greater)), |stream| {
                let source = Shifted::new(stream, &x, offset)?;
                let mut out = Shifted::new(stream, &[T::small(0); LEN], offset)?;
                let (x, mut to) = (source.view()?, out.view_mut()?);
                let clamped = transform!(|a, x| x.gt(a).select(x, a));
                stream.transform(clamped, (a, &x), &mut to).queued()?;
                Ok(Seen::of(&out.read(stream)?))
            });
            both.check(&what, None, |stream| {
                let source = Shifted::new(stream, &x, offset)?;
                let mut out = Shifted::new(stream, &[T::small(0); LEN], offset)?;
                let mut all = Vec::new();
                // Hygiene: the names in `$formula` are those of this line.
                macro_rules! formulas {
                    ($a:ident $x:ident: $($formula:expr),+ $(,)?) => {$(
                        let (view, mut to) = (source.view()?, out.view_mut()?);
                        stream.transform(transform!(|$a, $x| $formula), (a, &view), &mut to).queued()?;
                        all.push(Seen::of(&out.read(stream)?));
                    )+};
                }
                formulas!(a x: a + x, a - x, a * x, x / a, a / x, x % a, x.min(a), x.max(a), a.abs() - x);
                for step in [T::small(0), a] {
                    let mut few = Shifted::new(stream, &[T::small(0); 2], offset)?;
                    stream.sequence(a, step, &mut few.view_mut()?).queued()?;
                    all.push(Seen::of(&few.read(stream)?));
                }
                Ok(all)
            });
        }
        for offset in OFFSETS {
            let what = || format!("{} as other types at {offset}", std::any::type_name::<T>());
            both.check(&what, None, |stream| {
                let source = Shifted::new(stream, &x, offset)?;
                let mut all = Vec::new();
                macro_rules! to {
                    ($($type:ident)+) => {$(
                        let mut out = Shifted::new(stream, &[<$type>::small(0); LEN], offset)?;
                        stream.cast(&source.view()?, &mut out.view_mut()?).queued()?;
                        all.push(Seen::of::<$type>(&out.read(stream)?));
                    )+};
                }
                to!(u8 i8 u16 i16 u32 i32 u64 i64 f16 bf16 f32 f64);
                Ok(all)
            });
        }
    }
    let both = Both::open();
    for_each_type!(check(&both));
}

/// The kernels that come with the crate.
#[test]
fn numbers_of_kernels() -> Result<()> {
    let both = Both::open();
    let load = |stream: &Stream| {
        let device = stream.device();
        let axpy = gpu_await::kernels::axpy::load_blocking(&device)?;
        Ok::<_, gpu_await::Error>((axpy, gpu_await::kernels::scale::load_blocking(&device)?))
    };
    let kernels = [load(&both.0[0])?, load(&both.0[1])?];
    let (x, mut y) = (elements::<f32>(LEN), elements::<f32>(LEN));
    y.reverse();
    for a in f32::specials() {
        let fused: Vec<f32> = x.iter().zip(&y).map(|(x, y)| a.mul_add(*x, *y)).collect();
        let scaled: Vec<f32> = x.iter().map(|x| a * x).collect();
        let expected = (Seen::of(&fused), Seen::of(&scaled));
        both.check(&|| format!("{a:?}"), Some(expected), |stream| {
            let (axpy, scale) = &kernels[usize::from(!std::ptr::eq(stream, &both.0[0]))];
            let (mut x, mut y) = (Shifted::new(stream, &x, 1)?, Shifted::new(stream, &y, 3)?);
            axpy.launch(stream, a, &x.view()?, &mut y.view_mut()?).queued()?;
            scale.launch(stream, a, &mut x.view_mut()?).queued()?;
            Ok((Seen::of(&y.read(stream)?), Seen::of(&x.read(stream)?)))
        });
    }
    Ok(())
}

// ---- libraries ----------------------------------------------------------------------------------

/// `alpha` and `beta` with what they scale: a zero of either sign is no factor.
mod products {
    use gpu_await_libs::{Activation, Blas, Gemm, GemmElement};

    use super::*;

    const N: usize = 16;

    /// All elements of a product are alike: `a` has `a` and 0, `b` ones, `c` has `c`.
    struct Case {
        alpha: f64,
        a: f64,
        beta: f64,
        c: f64,
    }

    fn on<T: Special + GemmElement>(
        gemm: &Gemm<T>,
        stream: &Stream,
        case: &Case,
        scale: fn(f64) -> T::Scale,
    ) -> Result<Seen> {
        let mut a = vec![T::of_f64(0.0); N * N];
        a.iter_mut().step_by(N).for_each(|first| *first = T::of_f64(case.a));
        let a = stream.upload(a).queued()?;
        let b = stream.full(N * N, T::of_f64(1.0)).queued()?;
        let mut c = match case.beta == 0.0 {
            // What is overwritten may hold anything, and may be unwritten.
            true if case.c == 0.0 => stream.empty::<T>(N * N).queued()?,
            _ => stream.full(N * N, T::of_f64(case.c)).queued()?,
        };
        let (alpha, beta) = (scale(case.alpha), scale(case.beta));
        // Three times: the third launches what the second captured.
        for _ in 0..3 {
            if case.beta != 0.0 {
                stream.fill(&mut c, T::of_f64(case.c)).queued()?;
            }
            gemm.launch(stream, alpha, &a, &b, beta, &mut c).queued()?;
        }
        let c = stream.download(&c).synchronize()?;
        assert!(c.iter().all(|each| each.same(&c[0])), "{:?}", &c[..N]);
        Ok(Seen::of_equal(&c[..1]))
    }

    fn check<T: Special + GemmElement>(both: &Both, scale: fn(f64) -> T::Scale) {
        let plans = [0, 1].map(|at| {
            let blas = Blas::load_blocking(&both.0[at].device()).expect("a library");
            blas.gemm::<T>(N, N, N).plan_blocking().expect("a plan")
        });
        // Subnormal, of `f32`.
        let tiny = f64::from(f32::from_bits(1 << 16));
        let specials = [0.0, -0.0, 1.0, -2.0, tiny, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
        for alpha in specials {
            for a in [0.0, -0.0, 0.5, f64::INFINITY, f64::NAN] {
                for beta in specials {
                    for c in [0.0, -0.0, 3.0, f64::INFINITY, f64::NAN] {
                        let case = Case { alpha, a, beta, c };
                        let name = std::any::type_name::<T>();
                        let what = || format!("{name}: {alpha} * {a} + {beta} * {c}");
                        // Whether cuBLASLt multiplies by 0 then is its choice, of the whole or of a part of a sum: it made NaN of these
                        // here, and elsewhere not.
                        if alpha == 0.0 && !a.is_finite() || alpha.is_infinite() {
                            continue;
                        }
                        // The other terms of the sum are 0 * 1.
                        let product = alpha * a;
                        let kept = if beta == 0.0 { 0.0 } else { beta * c };
                        let expected = Seen::of_equal(&[T::of_f64(product + kept)]);
                        both.check(&what, Some(expected), |stream| {
                            let is_first = std::ptr::eq(stream, &both.0[0]);
                            on(&plans[usize::from(!is_first)], stream, &case, scale)
                        });
                    }
                }
            }
        }
    }

    #[test]
    fn scales_of_products() {
        let both = Both::open();
        check::<f32>(&both, |x| x as f32);
        check::<f64>(&both, |x| x);
        check::<f16>(&both, |x| x as f32);
        check::<bf16>(&both, |x| x as f32);
    }

    /// What a bias and an activation make of an overwritten `c` where both scales are 0.
    #[test]
    fn a_bias_alone() {
        let both = Both::open();
        for activation in [Activation::None, Activation::Relu, Activation::Gelu] {
            let plans = [0, 1].map(|at| {
                let blas = Blas::load_blocking(&both.0[at].device()).expect("a library");
                let gemm = blas.gemm::<f32>(N, N, N).bias().activation(activation);
                gemm.plan_blocking().expect("a plan")
            });
            for bias in [0.0, 2.0, f32::INFINITY] {
                let what = || format!("{activation:?} of {bias}");
                let is_exact = activation != Activation::Gelu;
                let expected = is_exact.then(|| Seen::of(&[bias]));
                both.check(&what, expected, |stream| {
                    let gemm = &plans[usize::from(!std::ptr::eq(stream, &both.0[0]))];
                    let one = stream.full(N * N, 1.0f32).queued()?;
                    let row = stream.full(N, bias).queued()?;
                    let mut c = stream.empty(N * N).queued()?;
                    gemm.launch_with_bias(stream, -0.0, &one, &one, &row, -0.0, &mut c).queued()?;
                    let c = stream.download(&c).synchronize()?;
                    Ok(Seen::of(&[if is_exact { c[0] } else { (c[0] * 1e4).round() }]))
                });
            }
        }
    }

    /// A NaN passes through an activation, or does not: on every device alike.
    #[test]
    fn activations_of_a_nan() {
        let both = Both::open();
        for activation in [Activation::Relu, Activation::Gelu] {
            let plans = [0, 1].map(|at| {
                let blas = Blas::load_blocking(&both.0[at].device()).expect("a library");
                let gemm = blas.gemm::<f32>(N, N, N).activation(activation);
                gemm.plan_blocking().expect("a plan")
            });
            both.check(&|| format!("{activation:?} of a NaN"), None, |stream| {
                let gemm = &plans[usize::from(!std::ptr::eq(stream, &both.0[0]))];
                let nan = stream.full(N * N, f32::NAN).queued()?;
                let mut c = stream.empty(N * N).queued()?;
                gemm.launch(stream, 1.0, &nan, &nan, 0.0, &mut c).queued()?;
                Ok(Seen::of(&stream.download(&c).synchronize()?[..1]))
            });
        }
    }
}
