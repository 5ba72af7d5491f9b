//! Elementwise algorithms beside plain Rust: every operation and type, at every length and offset where a vector, a tile or a block begins.
//!
//! More than 500 lines: tables of operations, each with what Rust computes.

use std::cell::RefCell;
use std::fmt::Debug;

use futures::executor::block_on;
use gpu_await::testing::{self, Gate};
use gpu_await::{Device, DeviceBuffer, ErrorDetail, In, InOut, Region, Result, Stream};
use gpu_await_algorithms::{
    Algorithms, Arithmetic, Formula, Index, Outcome, Preload, Term, transform,
};
use half::{bf16, f16};
use proptest::prelude::*;

/// More than a tile of the smallest elements, and no multiple of anything.
const LEN: usize = 8192 + 1003;

// ---- numbers ------------------------------------------------------------------------------------

trait TestNumber: Arithmetic + Debug {
    fn specials() -> Vec<Self>;
    fn random(bits: u64) -> Self;
    /// Where it is among all numbers of the type; `None` of a NaN.
    fn place(self) -> Option<i128>;
    fn small(number: u8) -> Self;
}

macro_rules! integers {
    ($($type:ident)+) => {$(
        impl TestNumber for $type {
            fn specials() -> Vec<$type> {
                let mut all = vec![0, 1, 2, 3, 7, 8, 31, 100, $type::MAX, $type::MAX - 1, $type::MAX / 2];
                all.extend([$type::MIN, $type::MIN + 1, $type::MIN / 2, (0 as $type).wrapping_sub(1)]);
                all
            }
            fn random(bits: u64) -> $type {
                if bits % 3 == 0 { (bits >> 60) as $type } else { (bits >> 7) as $type }
            }
            fn place(self) -> Option<i128> {
                Some(self.into())
            }
            fn small(number: u8) -> $type {
                number as $type
            }
        }
    )+};
}
integers! { u8 u16 u32 u64 i8 i16 i32 i64 }

macro_rules! floats {
    ($($type:ident $bits:ident $from:expr;)+) => {$(
        impl TestNumber for $type {
            fn specials() -> Vec<$type> {
                let from: fn(f64) -> $type = $from;
                let plain = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.7, 100.25, 1e-3, 60000.0, 1e30];
                let mut all: Vec<$type> = plain.iter().flat_map(|x| [from(*x), from(-x)]).collect();
                all.extend([$type::INFINITY, $type::NEG_INFINITY, $type::NAN, $type::MIN_POSITIVE]);
                // The least number, which is no normal one, and the greatest.
                all.extend([$type::from_bits(1), $type::MAX, $type::MIN]);
                all
            }
            fn random(bits: u64) -> $type {
                let from: fn(f64) -> $type = $from;
                match bits % 4 {
                    0 => $type::from_bits((bits >> 3) as $bits),
                    _ => from((bits >> 40) as f64 / (1 << 20) as f64 - 8.0),
                }
            }
            fn place(self) -> Option<i128> {
                let bits = self.to_bits();
                let magnitude = i128::from(bits & !(1 << ($bits::BITS - 1)));
                let is_negative = bits >> ($bits::BITS - 1) == 1;
                // -0 and +0 differ.
                (!self.is_nan()).then_some(if is_negative { -magnitude - 1 } else { magnitude })
            }
            fn small(number: u8) -> $type {
                let from: fn(f64) -> $type = $from;
                from(f64::from(number))
            }
        }
    )+};
}
floats! {
    f16 u16 f16::from_f64;
    bf16 u16 bf16::from_f64;
    f32 u32 |x| x as f32;
    f64 u64 |x| x;
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // Knuth's.
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 ^ self.0 >> 29
    }

    /// All pairs of special numbers first.
    fn pairs<T: TestNumber>(&mut self, len: usize) -> (Vec<T>, Vec<T>) {
        let specials = T::specials();
        let pairs = specials.iter().flat_map(|x| specials.iter().map(|y| (*x, *y)));
        let mut pairs: Vec<(T, T)> = pairs.take(len).collect();
        pairs.resize_with(len, || (T::random(self.next()), T::random(self.next())));
        pairs.into_iter().unzip()
    }
}

fn download<T: Arithmetic>(stream: &Stream, buffer: &DeviceBuffer<T>) -> Vec<T> {
    block_on(stream.download_vec(buffer)).unwrap()
}

/// The same number, or one as near; every NaN is one.
fn near<T: TestNumber>(found: T, expected: T, ulps: i128) -> bool {
    match (found.place(), expected.place()) {
        (Some(found), Some(expected)) => (found - expected).abs() <= ulps,
        (found, expected) => found.is_none() && expected.is_none(),
    }
}

#[track_caller]
fn compare<T: TestNumber>(
    what: &str,
    found: &[T],
    expected: impl Iterator<Item = T>,
    ulps: i128,
    from: impl Fn(usize) -> String,
) {
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let of = || from(at);
        assert!(
            near(*found, expected, ulps),
            "{what} of {}, element {at} of {}: {found:?}, expected {expected:?}",
            std::any::type_name::<T>(),
            of()
        );
    }
}

// ---- every operation, every type ----------------------------------------------------------------

struct World {
    stream: Stream,
}

impl World {
    fn new() -> World {
        World { stream: testing::device().stream().unwrap() }
    }

    /// Formulas of two arrays, where vectors fit and where they do not.
    #[track_caller]
    fn check<T: TestNumber, F: Formula<2>>(
        &self,
        what: &str,
        formula: F,
        ulps: i128,
        expected: impl Fn(T, T) -> T,
    ) {
        let (x, y) = Random(7).pairs::<T>(LEN);
        let stream = &self.stream;
        let (dx, dy) = (
            stream.upload(x.clone()).queued().unwrap(),
            stream.upload(y.clone()).queued().unwrap(),
        );
        for (start, len) in [(0, LEN), (1, LEN - 3)] {
            let mut out = stream.upload(vec![T::ONE; LEN]).queued().unwrap();
            let (vx, vy) = (dx.slice(start..start + len).unwrap(), dy.slice(..len).unwrap());
            let mut to = out.slice_mut(start..start + len).unwrap();
            stream.transform(formula, (&vx, &vy), &mut to).queued().unwrap();
            let found = download(stream, &out);
            let of = |at: usize| format!("({:?}, {:?})", x[start + at], y[at]);
            let all = x[start..][..len].iter().zip(&y).map(|(x, y)| expected(*x, *y));
            compare(what, &found[start..][..len], all, ulps, of);
            let beside = found[..start].iter().chain(&found[start + len..]);
            assert!(beside.into_iter().all(|x| *x == T::ONE), "{what} writes beside its output");
        }
    }

    #[track_caller]
    fn check_flags<T: TestNumber, F: Formula<2>>(
        &self,
        what: &str,
        formula: F,
        expected: impl Fn(T, T) -> bool,
    ) {
        let (x, y) = Random(8).pairs::<T>(LEN);
        let stream = &self.stream;
        let (dx, dy) = (
            stream.upload(x.clone()).queued().unwrap(),
            stream.upload(y.clone()).queued().unwrap(),
        );
        for (start, len) in [(0, LEN), (3, LEN - 3)] {
            let mut flags = stream.full(LEN, 9u8).queued().unwrap();
            let (vx, vy) = (dx.slice(start..).unwrap(), dy.slice(start..).unwrap());
            let mut to = flags.slice_mut(..len).unwrap();
            stream.transform_flags(formula, (&vx, &vy), &mut to).queued().unwrap();
            let found = download(stream, &flags);
            let all = x[start..].iter().zip(&y[start..]).map(|(x, y)| u8::from(expected(*x, *y)));
            let of = |at: usize| format!("({:?}, {:?})", x[start + at], y[start + at]);
            compare(what, &found[..len], all, 0, of);
            assert!(found[len..].iter().all(|flag| *flag == 9), "{what} writes beside its output");
        }
    }
}

macro_rules! check {
    ($world:ident $type:ident ulps $ulps:literal: $(|$x:ident, $y:ident| $formula:expr => $expected:expr;)+) => {$(
        $world.check::<$type, _>(
            stringify!($formula),
            transform!(|$x, $y| $formula),
            $ulps,
            |$x: $type, $y: $type| $expected,
        );
    )+};
    ($world:ident $type:ident: $($rest:tt)+) => { check! { $world $type ulps 0: $($rest)+ } };
}

/// What all types have.
fn check_comparisons<T: TestNumber>(world: &World) {
    world.check_flags::<T, _>("lt", transform!(|x, y| x.lt(y)), |x, y| x < y);
    world.check_flags::<T, _>("le", transform!(|x, y| x.le(y)), |x, y| x <= y);
    world.check_flags::<T, _>("gt", transform!(|x, y| x.gt(y)), |x, y| x > y);
    world.check_flags::<T, _>("ge", transform!(|x, y| x.ge(y)), |x, y| x >= y);
    world.check_flags::<T, _>("eq", transform!(|x, y| x.eq(y)), |x, y| x == y);
    world.check_flags::<T, _>("ne", transform!(|x, y| x.ne(y)), |x, y| x != y);
    let (one, two) = (T::small(1), T::small(2));
    world.check_flags::<T, _>(
        "logic",
        transform!(|x, y| (x.lt(y) | x.eq(1)) & !(y.gt(2) ^ x.ge(y))),
        |x, y| (x < y || x == one) && ((y > two) == (x >= y)),
    );
    world.check::<T, _>("select", transform!(|x, y| x.lt(y).select(x, 2)), 0, |x, y| {
        if x < y { x } else { two }
    });
}

macro_rules! of_integers {
    ($($type:ident $abs:expr;)+) => {$(
        #[test]
        fn $type() {
            let world = World::new();
            check! { world $type:
                |x, y| x + y => x.wrapping_add(y);
                |x, y| x - y => x.wrapping_sub(y);
                |x, y| x * y => x.wrapping_mul(y);
                |x, y| x / y => if y == 0 { 0 } else { x.wrapping_div(y) };
                |x, y| x % y => if y == 0 { x } else { x.wrapping_rem(y) };
                |x, y| x & y => x & y;
                |x, y| x | y => x | y;
                |x, y| x ^ y => x ^ y;
                |x, y| x << y => x.wrapping_shl(y as u32);
                |x, y| x >> y => x.wrapping_shr(y as u32);
                |x, y| -x ^ !y => x.wrapping_neg() ^ !y;
                |x, y| x.abs() + y => { let abs: fn($type) -> $type = $abs; abs(x).wrapping_add(y) };
                |x, y| x.min(y) => x.min(y);
                |x, y| x.max(y) => x.max(y);
                |x, y| x.mul_add(y, 3) => x.wrapping_mul(y).wrapping_add(3);
                |x, y| (x + y).clamp(3, 100) => x.wrapping_add(y).clamp(3, 100);
                // What is above the bits of a short integer must not show.
                |x, y| (x + y) / (x * 3 + 1) => {
                    let by = x.wrapping_mul(3).wrapping_add(1);
                    if by == 0 { 0 } else { x.wrapping_add(y).wrapping_div(by) }
                };
                |x, y| ((x + y) >> 1) % (x - y).max(1) => {
                    let by = x.wrapping_sub(y).max(1);
                    (x.wrapping_add(y) >> 1).wrapping_rem(by)
                };
                |x, y| (x + y).lt(y).select(!x, (x << 3).max(y)) => {
                    if x.wrapping_add(y) < y { !x } else { (x << 3).max(y) }
                };
                |x, y| 100 - x * 2 + (1 << (y & 3)) => {
                    (100 as $type).wrapping_sub(x.wrapping_mul(2)).wrapping_add(1 << (y & 3))
                };
            }
            check_comparisons::<$type>(&world);
        }
    )+};
}

/// Integers wrap, and division by zero is defined.
mod integers {
    use super::*;
    of_integers! {
        u8 |x| x;
        u16 |x| x;
        u32 |x| x;
        u64 |x| x;
        i8 i8::wrapping_abs;
        i16 i16::wrapping_abs;
        i32 i32::wrapping_abs;
        i64 i64::wrapping_abs;
    }
}

/// The device's: a number before a NaN, and -0 for the less.
trait Least: PartialOrd + Copy {
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

macro_rules! least {
    ($($type:ident)+) => {$(
        impl Least for $type {
            fn least(self, other: $type) -> $type {
                if self == 0.0 && other == 0.0 {
                    return if self.is_sign_negative() { self } else { other };
                }
                self.min(other)
            }
            fn greatest(self, other: $type) -> $type {
                -(-self).least(-other)
            }
        }
    )+};
}
least! { f32 f64 }

/// What is computed, as what is stored.
trait Stored<C> {
    fn stored(value: C) -> Self;
}
impl Stored<f32> for f16 {
    fn stored(value: f32) -> f16 {
        f16::from_f32(value)
    }
}
impl Stored<f32> for bf16 {
    fn stored(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}
impl Stored<f32> for f32 {
    fn stored(value: f32) -> f32 {
        value
    }
}
impl Stored<f64> for f64 {
    fn stored(value: f64) -> f64 {
        value
    }
}

macro_rules! check_floats {
    ($world:ident $type:ident as $computed:ident ulps $ulps:literal: $(|$x:ident, $y:ident| $formula:expr => $expected:expr;)+) => {$(
        $world.check::<$type, _>(
            stringify!($formula),
            transform!(|$x, $y| $formula),
            $ulps,
            |$x: $type, $y: $type| {
                let ($x, $y) = (<$computed>::from($x), <$computed>::from($y));
                <$type>::stored($expected)
            },
        );
    )+};
}

macro_rules! of_floats {
    ($($type:ident as $computed:ident;)+) => {$(
        #[test]
        fn $type() {
            let world = World::new();
            check_floats! { world $type as $computed ulps 0:
                |x, y| x + y => x + y;
                |x, y| x - y => x - y;
                |x, y| x * y => x * y;
                |x, y| x / y => x / y;
                |x, y| x % y => x % y;
                // Two roundings, and one.
                |x, y| x * y + 0.1 => x * y + 0.1;
                |x, y| x.mul_add(y, 0.1) => x.mul_add(y, 0.1);
                |x, y| -x + 2 * y.abs() => -x + 2.0 * y.abs();
                |x, y| (x * x + y).sqrt() => (x * x + y).sqrt();
                |x, y| (x - y).rsqrt() => 1.0 / (x - y).sqrt();
                |x, y| (x + y).recip() => 1.0 / (x + y);
                |x, y| x.min(y) => x.least(y);
                |x, y| x.max(y) => x.greatest(y);
                |x, y| x.floor() - y.ceil() => x.floor() - y.ceil();
                |x, y| x.round() + y * 0 => x.round() + y * 0.0;
                |x, y| (x / y).trunc() => (x / y).trunc();
                |x, y| (x - y).clamp(-1.5, 0.75) => (x - y).clamp(-1.5, 0.75);
                |x, y| x.ge(0.0).select(x, 0.01 * y) => if x >= 0.0 { x } else { 0.01 * y };
                |x, y| { let d = x - y; d * d / 2.0 } => { let d = x - y; d * d / 2.0 };
            }
            check_comparisons::<$type>(&world);
        }
    )+};
}

/// The same bits as Rust's; `f16` and `bf16` are computed in `f32` and rounded once.
mod floats {
    use super::*;
    of_floats! {
        f16 as f32;
        bf16 as f32;
        f32 as f32;
        f64 as f64;
    }
}

macro_rules! check_functions {
    ($world:ident $($type:ident as $computed:ident: $exp:literal $ln:literal $sin:literal $cos:literal $tanh:literal $powf:literal;)+) => {$(
        check_floats! { $world $type as $computed ulps $exp: |x, y| (x + y * 0).exp() => (x + y * 0.0).exp(); }
        check_floats! { $world $type as $computed ulps $ln: |x, y| (x + y * 0).ln() => (x + y * 0.0).ln(); }
        check_floats! { $world $type as $computed ulps $sin: |x, y| (x + y * 0).sin() => (x + y * 0.0).sin(); }
        check_floats! { $world $type as $computed ulps $cos: |x, y| (x + y * 0).cos() => (x + y * 0.0).cos(); }
        check_floats! { $world $type as $computed ulps $tanh: |x, y| (x + y * 0).tanh() => (x + y * 0.0).tanh(); }
        check_floats! { $world $type as $computed ulps $powf: |x, y| x.powf(y) => x.powf(y); }
    )+};
}

/// Within what the docs say, and the half of a unit, rounded up, by which the host's may be off.
#[test]
fn functions_keep_their_bounds() {
    let world = World::new();
    check_functions! { world
        f16 as f32: 1 1 1 1 1 1;
        bf16 as f32: 1 1 1 1 1 1;
        f32 as f32: 3 2 3 3 3 9;
        f64 as f64: 2 2 3 3 3 3;
    }
}

// ---- where vectors, tiles and blocks begin and end ----------------------------------------------

/// Lengths around everything that a kernel counts in, for elements of one byte up to eight.
fn lengths() -> Vec<usize> {
    let mut all = vec![0, 1, 15, 16, 17, 31, 32, 33];
    for tile in [256, 512, 1024, 2048, 4096, 8192, 16384] {
        all.extend([tile - 1, tile, tile + 1]);
    }
    all
}

fn check_length<T: TestNumber>(stream: &Stream, len: usize, starts: [usize; 3]) {
    const GAP: usize = 17;
    let [from, other, to] = starts;
    let mut random = Random(len as u64);
    let (x, y) = random.pairs::<T>(len + GAP);
    let (dx, dy) = (stream.upload(x).queued().unwrap(), stream.upload(y).queued().unwrap());
    let seven = T::small(7);
    let mut out = stream.full(len + GAP, seven).queued().unwrap();
    let mut moved = stream.full(len + GAP, seven).queued().unwrap();
    let (vx, vy) = (dx.slice(from..from + len).unwrap(), dy.slice(other..other + len).unwrap());
    let sum = transform!(|x, y| x + y);
    stream.transform(sum, (&vx, &vy), &mut out.slice_mut(to..to + len).unwrap()).queued().unwrap();
    // In one piece, of memory that begins where it begins.
    let mut whole = stream.empty::<T>(len).queued().unwrap();
    let (mut cx, mut cy) =
        (stream.empty(len).queued().unwrap(), stream.empty(len).queued().unwrap());
    stream.copy(&vx, &mut cx).queued().unwrap();
    stream.copy(&vy, &mut cy).queued().unwrap();
    stream.transform(sum, (&cx, &cy), &mut whole).queued().unwrap();
    let (found, whole) = (download(stream, &out), download(stream, &whole));
    let same = |a: &T, b: &T| near(*a, *b, 0);
    let expected = &found[to..to + len];
    assert!(whole.iter().zip(expected).all(|(a, b)| same(a, b)), "{len} {starts:?}");
    let beside = found[..to].iter().chain(&found[to + len..]);
    assert!(beside.into_iter().all(|x| same(x, &seven)), "{len} {starts:?} writes beside");
    // An element at a time, which no vector has a part in.
    for at in [0, len / 2, len.saturating_sub(1)].into_iter().filter(|at| *at < len) {
        let (x, y) = (cx.slice(at..=at).unwrap(), cy.slice(at..=at).unwrap());
        let mut one = moved.slice_mut(at..=at).unwrap();
        stream.transform(sum, (&x, &y), &mut one).queued().unwrap();
        assert!(same(&download(stream, &moved)[at], &whole[at]), "{len}: element {at}");
    }
}

#[test]
fn every_length_and_offset() {
    let stream = testing::device().stream().unwrap();
    for len in lengths() {
        for starts in [[0, 0, 0], [1, 1, 1], [0, 3, 0], [0, 0, 5], [16, 16, 16]] {
            check_length::<u8>(&stream, len, starts);
            check_length::<i16>(&stream, len, starts);
            check_length::<f16>(&stream, len, starts);
            check_length::<f32>(&stream, len, starts);
            check_length::<u64>(&stream, len, starts);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_length_and_offset(len in 0..20_000_usize, from in 0..17_usize, other in 0..17_usize, to in 0..17_usize) {
        let stream = testing::device().stream().unwrap();
        check_length::<u8>(&stream, len, [from, other, to]);
        check_length::<bf16>(&stream, len, [from, other, to]);
        check_length::<i32>(&stream, len, [from, other, to]);
        check_length::<f64>(&stream, len, [from, other, to]);
    }
}

// ---- numbers among the arguments ----------------------------------------------------------------

fn check_numbers<T: TestNumber>(stream: &Stream) {
    let numbers: Vec<T> = (0..LEN).map(|at| T::small((at % 7) as u8)).collect();
    let x = stream.upload(numbers).queued().unwrap();
    let mut out = stream.empty::<T>(LEN).queued().unwrap();
    let six = transform!(|a, b, c, d, e, f| a * b + c * d - e * f);
    let [two, three, five] = [2, 3, 5].map(T::small);
    stream.transform(six, (two, &x, &x, three, five, &x), &mut out).queued().unwrap();
    // 2x + 3x - 5x.
    assert!(download(stream, &out).iter().all(|x| *x == T::zeroed()));
    stream.transform(six, (two, three, two, two, two, five), &mut out).queued().unwrap();
    assert!(download(stream, &out).iter().all(|x| *x == T::zeroed()));
    stream.transform(six, (&x, &x, &x, &x, &x, &x), &mut out).queued().unwrap();
    let square = |at: usize| T::small(((at % 7) * (at % 7)) as u8);
    assert!(download(stream, &out).iter().enumerate().all(|(at, x)| *x == square(at)));
}

#[test]
fn numbers_and_arrays_for_six_arguments() {
    let stream = testing::device().stream().unwrap();
    check_numbers::<u8>(&stream);
    check_numbers::<u16>(&stream);
    check_numbers::<u32>(&stream);
    check_numbers::<u64>(&stream);
    check_numbers::<i8>(&stream);
    check_numbers::<i16>(&stream);
    check_numbers::<i32>(&stream);
    check_numbers::<i64>(&stream);
    check_numbers::<f16>(&stream);
    check_numbers::<bf16>(&stream);
    check_numbers::<f32>(&stream);
    check_numbers::<f64>(&stream);
}

/// Numbers of every width arrive as they were passed, negative ones and those with all bits.
#[test]
fn passed_numbers_keep_their_bits() {
    fn check<T: TestNumber>(stream: &Stream) {
        let mut out = stream.empty::<T>(3).queued().unwrap();
        for number in T::specials() {
            stream.transform(transform!(|a| a), (number,), &mut out).queued().unwrap();
            assert!(download(stream, &out).iter().all(|x| near(*x, number, 0)), "{number:?}");
        }
    }
    let stream = testing::device().stream().unwrap();
    check::<u8>(&stream);
    check::<i8>(&stream);
    check::<u16>(&stream);
    check::<i16>(&stream);
    check::<u64>(&stream);
    check::<i64>(&stream);
    check::<f16>(&stream);
    check::<bf16>(&stream);
    check::<f32>(&stream);
    check::<f64>(&stream);
}

// ---- casts --------------------------------------------------------------------------------------

/// What Rust says of both types, and for halves that they are rounded once.
trait CastTo<U> {
    fn cast_to(self) -> U;
}

macro_rules! casts {
    ([$($from:ident)+] $to:tt) => { $( casts! { @each $from $to } )+ };
    (@each $from:ident [$($to:ident)+]) => {$(
        impl CastTo<$to> for $from {
            fn cast_to(self) -> $to {
                self as $to
            }
        }
    )+};
}
casts! { [u8 u16 u32 u64 i8 i16 i32 i64 f32 f64] [u8 u16 u32 u64 i8 i16 i32 i64 f32 f64] }

macro_rules! casts_of_halves {
    ($half:ident: $($number:ident)+) => {
        $(
            impl CastTo<$number> for $half {
                fn cast_to(self) -> $number {
                    self.to_f64() as $number
                }
            }
            impl CastTo<$half> for $number {
                fn cast_to(self) -> $half {
                    nearest(self as i128, f64::from_number(self))
                }
            }
        )+
    };
}

trait FromNumber<T> {
    fn from_number(number: T) -> Self;
}

macro_rules! from_numbers {
    ($($number:ident)+) => {$(
        impl FromNumber<$number> for f64 {
            fn from_number(number: $number) -> f64 {
                number as f64
            }
        }
    )+};
}
from_numbers! { u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 }

/// The nearest half of a number, which is an integer where `f64` would round it; half-way cases to even.
fn nearest<H: Half>(integer: i128, value: f64) -> H {
    let first = H::near(value);
    if !first.wide().is_finite() && !value.is_finite() {
        return first;
    }
    // Of the neighbours the nearest one, by exact distances.
    let neighbours = [first.below(), first, first.above()];
    let exact = value.abs() >= 2_f64.powi(53) && value.is_finite() && value.abs() < 2_f64.powi(64);
    let distance = |half: &H| -> (u8, f64, u128) {
        let wide = half.rounding();
        if exact {
            (0, 0.0, (wide as i128 - integer).unsigned_abs())
        } else {
            (0, (wide - value).abs(), 0)
        }
    };
    let compare = |a: &H, b: &H| {
        let by = distance(a).partial_cmp(&distance(b)).unwrap_or(std::cmp::Ordering::Equal);
        by.then((a.bits() & 1).cmp(&(b.bits() & 1)))
    };
    let candidates = neighbours.into_iter().filter(|half| !half.wide().is_nan());
    candidates.min_by(compare).unwrap_or(first)
}

/// `f16` or `bf16`.
trait Half: TestNumber {
    fn near(value: f64) -> Self;
    fn wide(self) -> f64;
    fn bits(self) -> u16;
    fn of_bits(bits: u16) -> Self;
    /// The value, and of infinity what would be in its place.
    fn rounding(self) -> f64;
    fn below(self) -> Self {
        let bits = self.bits();
        if bits & 0x7FFF == 0 { self } else { Self::of_bits(bits - 1) }
    }
    fn above(self) -> Self {
        if self.wide().is_finite() { Self::of_bits(self.bits() + 1) } else { self }
    }
}

macro_rules! halves {
    ($($half:ident $infinity:expr;)+) => {$(
        impl Half for $half {
            fn near(value: f64) -> $half {
                $half::from_f64(value)
            }
            fn wide(self) -> f64 {
                self.to_f64()
            }
            fn bits(self) -> u16 {
                self.to_bits()
            }
            fn of_bits(bits: u16) -> $half {
                $half::from_bits(bits)
            }
            fn rounding(self) -> f64 {
                if self.is_infinite() { f64::copysign($infinity, self.to_f64()) } else { self.to_f64() }
            }
        }
    )+};
}
halves! {
    f16 65536.0;
    bf16 2_f64.powi(128);
}
casts_of_halves! { f16: u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 }
casts_of_halves! { bf16: u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 }

macro_rules! casts_between_halves {
    ($($from:ident $to:ident;)+) => {$(
        impl CastTo<$to> for $from {
            fn cast_to(self) -> $to {
                self.to_f64().cast_to()
            }
        }
    )+};
}
casts_between_halves! { f16 bf16; bf16 f16; f16 f16; bf16 bf16; }

fn check_cast<T: TestNumber + CastTo<U>, U: TestNumber>(stream: &Stream) {
    let (mut x, _) = Random(9).pairs::<T>(LEN);
    x.extend(T::specials());
    let dx = stream.upload(x.clone()).queued().unwrap();
    for start in [0, 1] {
        let mut out = stream.empty::<U>(x.len()).queued().unwrap();
        let mut to = out.slice_mut(start..).unwrap();
        stream.cast(&dx.slice(start..).unwrap(), &mut to).queued().unwrap();
        let found = block_on(stream.download_vec(&out.slice(start..).unwrap())).unwrap();
        let what = format!("cast from {}", std::any::type_name::<T>());
        let expected = x[start..].iter().map(|x| x.cast_to());
        compare(&what, &found, expected, 0, |at| format!("{:?}", x[start + at]));
    }
}

macro_rules! cast_tests {
    ($($name:ident)+) => {$(
        #[test]
        fn $name() {
            let stream = testing::device().stream().unwrap();
            check_cast::<$name, u8>(&stream);
            check_cast::<$name, u16>(&stream);
            check_cast::<$name, u32>(&stream);
            check_cast::<$name, u64>(&stream);
            check_cast::<$name, i8>(&stream);
            check_cast::<$name, i16>(&stream);
            check_cast::<$name, i32>(&stream);
            check_cast::<$name, i64>(&stream);
            check_cast::<$name, f16>(&stream);
            check_cast::<$name, bf16>(&stream);
            check_cast::<$name, f32>(&stream);
            check_cast::<$name, f64>(&stream);
        }
    )+};
}

/// From each type to each type, as `as` does.
mod casts_from {
    use super::*;
    cast_tests! { u8 u16 u32 u64 i8 i16 i32 i64 f16 bf16 f32 f64 }
}

// ---- sequence, gather, scatter ------------------------------------------------------------------

#[test]
fn sequences_start_and_step() {
    fn check<T: TestNumber>(stream: &Stream, start: T, step: T, expected: impl Fn(u64) -> T) {
        for (begin, len) in [(0, LEN), (1, LEN - 1), (0, 1), (0, 33)] {
            let mut out = stream.empty::<T>(LEN).queued().unwrap();
            let mut to = out.slice_mut(begin..begin + len).unwrap();
            stream.sequence(start, step, &mut to).queued().unwrap();
            let found = block_on(stream.download_vec(&to)).unwrap();
            compare("sequence", &found, (0..len as u64).map(&expected), 0, |at| at.to_string());
        }
    }
    let stream = testing::device().stream().unwrap();
    check::<u8>(&stream, 250, 3, |i| 250_u8.wrapping_add((i as u8).wrapping_mul(3)));
    check::<i8>(&stream, -5, -3, |i| (-5_i8).wrapping_sub((i as i8).wrapping_mul(3)));
    check::<u16>(&stream, 1, 9, |i| 1_u16.wrapping_add((i as u16).wrapping_mul(9)));
    check::<i16>(&stream, 1, -9, |i| 1_i16.wrapping_sub((i as i16).wrapping_mul(9)));
    check::<u32>(&stream, 7, 1 << 20, |i| 7_u32.wrapping_add((i as u32) << 20));
    check::<i32>(&stream, 7, -2, |i| 7 - 2 * i as i32);
    check::<u64>(&stream, u64::MAX, 1 << 40, |i| (i << 40).wrapping_sub(1));
    check::<i64>(&stream, -1, 3, |i| 3 * i as i64 - 1);
    check::<f32>(&stream, 0.1, 0.3, |i| {
        (f64::from(0.1_f32) + i as f64 * f64::from(0.3_f32)) as f32
    });
    check::<f64>(&stream, -0.1, 0.3, |i| -0.1 + i as f64 * 0.3);
    let [start, step] = [0.1, 0.3].map(f16::from_f64);
    check(&stream, start, step, |i| (start.to_f64() + i as f64 * step.to_f64()).cast_to());
    let [start, step] = [0.1, 0.3].map(bf16::from_f64);
    check(&stream, start, step, |i| (start.to_f64() + i as f64 * step.to_f64()).cast_to());
}

fn check_gather<T: TestNumber, I: Index + TryFrom<u64>>(stream: &Stream) {
    const SOURCE: usize = 777;
    let mut random = Random(3);
    let (x, _) = random.pairs::<T>(SOURCE);
    // Some are behind the end, and some far behind it.
    let places: Vec<u64> = (0..LEN as u64)
        .map(|at| match at % 97 {
            13 => SOURCE as u64 + at,
            14 => u64::from(u32::MAX) - at,
            15 => SOURCE as u64,
            _ => random.next() % SOURCE as u64,
        })
        .collect();
    let index = |place: u64| I::try_from(place).unwrap_or_else(|_| panic!("fits"));
    let indices: Vec<I> = places.iter().map(|place| index(*place)).collect();
    let (dx, di) =
        (stream.upload(x.clone()).queued().unwrap(), stream.upload(indices).queued().unwrap());
    for start in [0, 1] {
        let mut out = stream.empty::<T>(LEN).queued().unwrap();
        let mut to = out.slice_mut(start..).unwrap();
        stream.gather(&dx, &di.slice(start..).unwrap(), &mut to).queued().unwrap();
        let found = block_on(stream.download_vec(&to)).unwrap();
        let expected =
            places[start..].iter().map(|at| x.get(*at as usize).copied().unwrap_or(T::zeroed()));
        compare("gather", &found, expected, 0, |at| places[start + at].to_string());

        // The other way round: each element is written once, or by elements that are equal.
        let mut back = stream.full(SOURCE, T::small(7)).queued().unwrap();
        stream.scatter(&to, &di.slice(start..).unwrap(), &mut back).queued().unwrap();
        let named: std::collections::HashSet<u64> = places[start..].iter().copied().collect();
        let expected = (0..SOURCE).map(|at| match named.contains(&(at as u64)) {
            true => x[at],
            false => T::small(7),
        });
        compare("scatter", &download(stream, &back), expected, 0, |at| at.to_string());
    }
}

#[test]
fn gathers_and_scatters_stay_inside() {
    let stream = testing::device().stream().unwrap();
    check_gather::<u8, u32>(&stream);
    check_gather::<u8, u64>(&stream);
    check_gather::<f16, u32>(&stream);
    check_gather::<i32, u64>(&stream);
    check_gather::<f32, u32>(&stream);
    check_gather::<f64, u32>(&stream);
    check_gather::<i64, u64>(&stream);
    let x = stream.full(3, 1u8).queued().unwrap();
    let far = stream.upload(vec![u64::MAX, 1 << 63, 3]).queued().unwrap();
    let mut out = stream.full(3, 9u8).queued().unwrap();
    stream.gather(&x, &far, &mut out).queued().unwrap();
    assert_eq!(download(&stream, &out), [0; 3]);
    stream.scatter(&x, &far, &mut out).queued().unwrap();
    assert_eq!(download(&stream, &out), [0; 3]);
    // Nothing to read from.
    let nothing = stream.empty::<u8>(0).queued().unwrap();
    stream.gather(&nothing, &far, &mut out).queued().unwrap();
    assert_eq!(download(&stream, &out), [0; 3]);
}

// ---- operations like the others -----------------------------------------------------------------

#[tokio::test]
async fn in_place_is_one_kernel() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let axpy = transform!(|a, x, y| a * x + y);
    let x = stream.full(LEN, 2.0f32).queued()?;
    let mut y = stream.full(LEN, 1.0f32).queued()?;
    stream.transform_in_place(axpy, (3.0, &x), &mut y).await?;
    assert!(download(&stream, &y).iter().all(|y| *y == 7.0));
    stream.transform_in_place(transform!(|x| x * 2.0), (), &mut y.slice_mut(1..)?).await?;
    stream.transform_in_place(transform!(|x| 3.0 * x), (), &mut y.slice_mut(..LEN - 1)?).await?;
    let found = download(&stream, &y);
    assert_eq!((found[0], found[1], found[LEN - 1]), (21.0, 42.0, 14.0));
    assert!(found[1..LEN - 1].iter().all(|y| *y == 42.0));
    Ok(())
}

/// Halves of one buffer, each on a stream that another one holds up.
#[tokio::test]
async fn two_streams_at_once() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let mut x = a.full(LEN, 1i32).queued()?;
    let (double, next) = (transform!(|x| x * 2), transform!(|x| x + 1));
    // Loading their kernels would wait for what the gate holds up.
    device.preload_transform::<(InOut<i32>,)>(double).await?;
    device.preload_transform::<(InOut<i32>,)>(next).await?;
    a.done().await?;
    let gate = Gate::close(&a)?;
    let (mut low, mut high) = x.split_at_mut(LEN / 2 + 1)?;
    let behind = a.transform_in_place(double, (), &mut low);
    // It does not wait for the other half.
    b.transform_in_place(double, (), &mut high).await?;
    assert!(!behind.is_complete());
    // And this waits for both, on the device.
    let all = b.transform_in_place(next, (), &mut x);
    assert!(!all.is_complete());
    gate.open();
    behind.await?;
    all.await?;
    assert!(download(&b, &x).iter().all(|x| *x == 3));
    Ok(())
}

#[tokio::test]
async fn replayed_and_in_a_graph() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let axpy = transform!(|a, x, y| a * x + y);
    let positive = transform!(|x| x.gt(0.0));
    let x = stream.full(LEN, 2.0f32).queued()?;
    let (mut y, mut flags) =
        (stream.full(LEN, 1.0f32).queued()?, stream.zeros::<u8>(LEN).queued()?);
    let mut index = stream.zeros::<u32>(LEN).queued()?;
    let mut out = stream.zeros::<f32>(LEN).queued()?;
    let mut region = Region::new();
    for round in 0..6 {
        let op = stream.replay(&mut region, |q| {
            // Addresses that are no multiples of a vector, every other time.
            let start = round % 2;
            q.transform_in_place(axpy, (1.0, &x.slice(start..)?), &mut y.slice_mut(start..)?)?;
            q.transform_flags(positive, (&y,), &mut flags)?;
            q.sequence(0, 1, &mut index)?;
            q.gather(&y, &index, &mut out)?;
            q.transform_in_place(transform!(|x| -x), (), &mut out)
        });
        op.await?;
        let found = download(&stream, &out);
        assert_eq!(found[1], -(3.0 + 2.0 * round as f32));
        assert_eq!(found[0], -(3.0 + 2.0 * (round / 2) as f32));
        assert!(found[1..].iter().all(|x| *x == found[1]));
        assert!(download(&stream, &flags).iter().all(|flag| *flag == 1));
    }
    let report = region.report();
    assert!(report.replayed >= 3 && report.refused == 0, "{report:?}");

    let graph = device.graph::<(In<f32>, InOut<f32>), _, _>((), |q, (), (x, mut y)| {
        q.transform_in_place(transform!(|a, x, y| a * x + y), (2.0, &x), &mut y)?;
        q.transform_in_place(transform!(|y| y + 0.5), (), &mut y)
    });
    let mut z = stream.full(LEN, 1.0f32).queued()?;
    for _ in 0..3 {
        graph.launch(&stream, (&x, &mut z)).queued()?;
    }
    assert!(download(&stream, &z).iter().all(|z| *z == 1.0 + 3.0 * 4.5));
    // Other addresses, which are no multiples of a vector, and another length.
    graph.launch(&stream, (&x.slice(3..)?, &mut z.slice_mut(1..LEN - 2)?)).queued()?;
    let found = download(&stream, &z);
    assert_eq!((found[0], found[1], found[LEN - 3], found[LEN - 2]), (14.5, 19.0, 19.0, 14.5));
    Ok(())
}

#[tokio::test]
async fn on_the_current_stream() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut before = 0;
    let mut one_more = |what: &str| {
        assert!(stream.submitted() > before, "{what}");
        before = stream.submitted();
    };
    let on_stream = async {
        let mut x = device.empty::<i32>(5).queued()?;
        let mut y = device.empty::<i32>(5).queued()?;
        let mut flags = device.empty::<u8>(5).queued()?;
        one_more("empty");
        device.sequence(0, 1, &mut x).queued()?;
        one_more("sequence");
        device.transform(transform!(|x| 4 - x), (&x,), &mut y).queued()?;
        one_more("transform");
        device.transform_in_place(transform!(|x| x * x), (), &mut x).queued()?;
        one_more("transform_in_place");
        device.transform_flags(transform!(|x| x.gt(3)), (&x,), &mut flags).queued()?;
        one_more("transform_flags");
        let mut index = device.empty::<u32>(5).queued()?;
        device.cast(&y, &mut index).queued()?;
        one_more("cast");
        let mut out = device.zeros::<i32>(5).queued()?;
        device.gather(&x, &index, &mut out).queued()?;
        one_more("gather");
        assert_eq!(device.download(&out).await?, [16, 9, 4, 1, 0]);
        device.scatter(&x, &index, &mut out).queued()?;
        one_more("scatter");
        assert_eq!(device.download(&out).await?, [16, 9, 4, 1, 0]);
        assert_eq!(device.download(&flags).await?, [0, 0, 1, 1, 1]);
        Ok(())
    };
    stream.scope(on_stream).await
}

// ---- what is refused ----------------------------------------------------------------------------

#[tokio::test]
async fn refused_calls_poison_the_output() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (x, longer) = (stream.full(4, 1u8).queued()?, stream.full(5, 1u8).queued()?);
    let unwritten = stream.empty::<u8>(4).queued()?;
    let mut out = stream.full(4, 7u8).queued()?;
    let sum = transform!(|x, y| x + y);

    let error = stream.transform(sum, (&x, &longer), &mut out).queued().unwrap_err();
    let lengths = matches!(
        error.detail(),
        ErrorDetail::LengthMismatch { op: "transform", source_len: 5, destination_len: 4 }
    );
    assert!(lengths, "{error}");
    let error = stream.download(&out).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    stream.transform(sum, (&x, &x), &mut out).queued()?;
    assert_eq!(stream.download(&out).await?, [2; 4]);

    let error = stream.transform(sum, (&x, &unwritten), &mut out).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    let mut fresh = stream.empty::<u8>(4).queued()?;
    let error = stream.transform_in_place(sum, (&x,), &mut fresh).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    let index = stream.zeros::<u32>(3).queued()?;
    let error = stream.gather(&longer, &index, &mut out).queued().unwrap_err().to_string();
    assert!(
        error.starts_with("gather: the array of indices has 3 elements, expected 4"),
        "{error}"
    );
    let error = stream.scatter(&x, &index, &mut out).queued().unwrap_err().to_string();
    assert!(
        error.starts_with("scatter: the array of indices has 3 elements, expected 4"),
        "{error}"
    );
    let index = stream.zeros::<u32>(4).queued()?;
    let mut fresh = stream.empty::<u8>(4).queued()?;
    let error = stream.scatter(&x, &index, &mut fresh).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");

    let large = transform!(|x| x + 300);
    let error = stream.transform(large, (&x,), &mut out).queued().unwrap_err();
    let literal = matches!(error.detail(), ErrorDetail::LiteralOutOfRange { value: 300, .. });
    assert!(literal, "{error}");
    let mut wide = stream.zeros::<u16>(4).queued()?;
    stream.transform_in_place(large, (), &mut wide).queued()?;
    assert_eq!(stream.download(&wide).await?, [300; 4]);

    let mut elsewhere = Device::host().stream()?.full(4, 1u8).queued()?;
    let error = stream.transform(sum, (&x, &x), &mut elsewhere).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    Ok(())
}

#[tokio::test]
async fn nothing_is_an_empty_operation() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let x = stream.empty::<f32>(0).queued()?;
    let mut out = stream.empty::<f32>(0).queued()?;
    let mut flags = stream.empty::<u8>(0).queued()?;
    let index = stream.empty::<u64>(0).queued()?;
    let before = stream.submitted();
    stream.transform(transform!(|a, x| a + x), (1.0, &x), &mut out).await?;
    stream.transform_flags(transform!(|x| x.gt(0.0)), (&x,), &mut flags).await?;
    stream.transform_in_place(transform!(|x| -x), (), &mut out).await?;
    stream.sequence(1.0, 2.0, &mut out).await?;
    stream.cast(&x, &mut flags).await?;
    stream.gather(&x, &index, &mut out).await?;
    stream.scatter(&x, &index, &mut out).await?;
    assert_eq!(stream.submitted(), before);
    Ok(())
}

#[tokio::test]
async fn preloaded_for_each_use() -> Result<()> {
    let device = testing::device();
    let axpy = transform!(|a, x, y| a * x + y);
    device.preload_transform::<(f32, In<f32>, InOut<f32>)>(axpy).await?;
    device.preload_transform::<(In<u8>,)>(transform!(|x| x.gt(3))).await?;
    let large = transform!(|x| x.max(1000));
    device.preload_transform::<(In<u16>,)>(large).await?;
    let error = device.preload_transform::<(In<u8>,)>(large).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::LiteralOutOfRange { .. }), "{error}");
    let stream = device.stream()?;
    let x = stream.full(3, 2.0f32).queued()?;
    let mut y = stream.full(3, 1.0f32).queued()?;
    stream.transform_in_place(axpy, (3.0, &x), &mut y).queued()?;
    assert_eq!(stream.download(&y).await?, [7.0; 3]);
    Ok(())
}

/// Of one argument, of two, and of three with flags: nothing says that a type is one formula alone.
#[derive(Clone, Copy)]
struct ThreeFormulas;

impl Formula<1> for ThreeFormulas {
    fn trace<'t, T: Arithmetic>([x]: [Term<'t, T>; 1]) -> impl Outcome<'t, T> {
        x + 1_i128
    }
}

impl Formula<2> for ThreeFormulas {
    fn trace<'t, T: Arithmetic>([x, y]: [Term<'t, T>; 2]) -> impl Outcome<'t, T> {
        x * y
    }
}

impl Formula<3> for ThreeFormulas {
    fn trace<'t, T: Arithmetic>([x, y, z]: [Term<'t, T>; 3]) -> impl Outcome<'t, T> {
        (x + y).gt(z)
    }
}

#[tokio::test]
async fn a_type_of_several_formulas() -> Result<()> {
    for order in [[1, 2, 3], [3, 2, 1], [2, 3, 1], [1, 3, 2]] {
        // Each has all kernels yet to load.
        let device = testing::device();
        let stream = device.stream()?;
        let x = stream.upload(vec![10u64, 20, 30, 40]).queued()?;
        let y = stream.upload(vec![2u64, 3, 4, 5]).queued()?;
        for arguments in order {
            let mut out = stream.zeros::<u64>(4).queued()?;
            let mut flags = stream.zeros::<u8>(4).queued()?;
            match arguments {
                1 => {
                    stream.transform::<_, _, 1>(ThreeFormulas, (&x,), &mut out).queued()?;
                    assert_eq!(stream.download(&out).await?, [11, 21, 31, 41], "{order:?}");
                }
                2 => {
                    stream.transform::<_, _, 2>(ThreeFormulas, (&x, &y), &mut out).queued()?;
                    assert_eq!(stream.download(&out).await?, [20, 60, 120, 200], "{order:?}");
                }
                _ => {
                    let operands = (&x, &y, 30);
                    stream
                        .transform_flags::<u64, _, 3>(ThreeFormulas, operands, &mut flags)
                        .queued()?;
                    assert_eq!(stream.download(&flags).await?, [0, 0, 1, 1], "{order:?}");
                }
            }
        }
        assert_eq!(stream.download(&x).await?, [10, 20, 30, 40], "{order:?}");
        assert_eq!(stream.download(&y).await?, [2, 3, 4, 5], "{order:?}");
    }
    Ok(())
}

thread_local! {
    /// What a formula uses while it is written down.
    static INNER: RefCell<Option<Stream>> = const { RefCell::new(None) };
}

/// Written down for the first time it computes with itself.
#[derive(Clone, Copy)]
struct UsesItself;

impl Formula<1> for UsesItself {
    fn trace<'t, T: Arithmetic>([x]: [Term<'t, T>; 1]) -> impl Outcome<'t, T> {
        if let Some(stream) = INNER.take() {
            let mut inner = stream.full(4, 6u32).queued().expect("memory");
            stream
                .transform_in_place::<_, _, 1>(UsesItself, (), &mut inner)
                .queued()
                .expect("a launch");
            assert_eq!(stream.download(&inner).synchronize().expect("a download"), [7; 4]);
        }
        x + 1_i128
    }
}

/// No lock is held while a formula is written down.
#[test]
fn a_formula_that_uses_itself() {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let stream = testing::device().stream().expect("a stream");
        let mut outer = stream.full(4, 1u32).queued().expect("memory");
        INNER.set(Some(stream.clone()));
        let launched = stream.transform_in_place::<_, _, 1>(UsesItself, (), &mut outer).queued();
        launched.expect("a launch");
        let outer = stream.download(&outer).synchronize().expect("a download");
        done.send(outer.to_vec()).expect("somebody waits");
    });
    let outer = is_done.recv_timeout(std::time::Duration::from_secs(60));
    assert_eq!(outer.expect("it does not wait for itself"), [2; 4]);
}
