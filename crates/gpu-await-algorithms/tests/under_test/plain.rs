//! What plain Rust does with every element type, and arrays to try algorithms on.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::fmt::Debug;

use gpu_await::{DeviceBuffer, DeviceKind, Stream, testing};
use gpu_await_algorithms::Scalar;
use half::{bf16, f16};

use super::random::Random;

/// What plain Rust does with an element.
pub(crate) trait Plain: Scalar + Debug + PartialEq + PartialOrd {
    /// Of any bits; of 64 random ones.
    fn of_bits(bits: u64) -> Self;
    /// A small whole number, which sums keep exact.
    fn small(number: i32) -> Self;
    fn as_f64(self) -> f64;
    /// Rounded to nearest even.
    fn of_f64(value: f64) -> Self;
    fn total_as_f64(total: Self::Total) -> f64;
    fn order(&self, other: &Self) -> std::cmp::Ordering;
    /// The same bits, or both NaN.
    fn same(&self, other: &Self) -> bool;
    fn is_nan(&self) -> bool;
    fn add(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($type:ident)+) => {$(
        impl Plain for $type {
            fn of_bits(bits: u64) -> Self {
                bits as $type
            }
            fn small(number: i32) -> Self {
                (number & 63) as $type
            }
            fn as_f64(self) -> f64 {
                self as f64
            }
            fn of_f64(value: f64) -> Self {
                value as $type
            }
            fn total_as_f64(total: Self::Total) -> f64 {
                total as f64
            }
            fn order(&self, other: &Self) -> std::cmp::Ordering {
                self.cmp(other)
            }
            fn same(&self, other: &Self) -> bool {
                self == other
            }
            fn is_nan(&self) -> bool {
                false
            }
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
        }
    )+};
}
integers! { u8 u16 u32 u64 i8 i16 i32 i64 }

macro_rules! floats {
    ($($type:ident: $bits:ident, $small:expr, $round:expr, $add:expr;)+) => {$(
        impl Plain for $type {
            fn of_bits(bits: u64) -> Self {
                $type::from_bits(bits as $bits)
            }
            fn small(number: i32) -> Self {
                $small((number & 15) as f32 - 7.0)
            }
            fn as_f64(self) -> f64 {
                f64::from(self)
            }
            fn of_f64(value: f64) -> Self {
                $round(value)
            }
            fn total_as_f64(total: Self::Total) -> f64 {
                f64::from(total)
            }
            fn order(&self, other: &Self) -> std::cmp::Ordering {
                self.total_cmp(other)
            }
            fn same(&self, other: &Self) -> bool {
                self.to_bits() == other.to_bits() || (self.is_nan() && other.is_nan())
            }
            fn is_nan(&self) -> bool {
                $type::is_nan(*self)
            }
            fn add(self, other: Self) -> Self {
                $add(self, other)
            }
        }
    )+};
}
floats! {
    f16: u16, f16::from_f32, f16::from_f64, |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32());
    bf16: u16, bf16::from_f32, bf16::from_f64, |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32());
    f32: u32, std::convert::identity, |x: f64| x as f32, |a: f32, b: f32| a + b;
    f64: u64, f64::from, std::convert::identity, |a: f64, b: f64| a + b;
}

/// Calls a generic function for each type.
macro_rules! for_each_type {
    ($function:ident($($argument:expr),*)) => {
        $function::<u8>($($argument),*);
        $function::<u16>($($argument),*);
        $function::<u32>($($argument),*);
        $function::<u64>($($argument),*);
        $function::<i8>($($argument),*);
        $function::<i16>($($argument),*);
        $function::<i32>($($argument),*);
        $function::<i64>($($argument),*);
        $function::<f16>($($argument),*);
        $function::<bf16>($($argument),*);
        $function::<f32>($($argument),*);
        $function::<f64>($($argument),*);
    };
}

pub(crate) use for_each_type;

pub(crate) fn stream() -> Stream {
    testing::device().stream().expect("a stream")
}

/// None, one and some, around warps and a byte's values; on a GPU also around blocks, tiles and grids, which a host device has not: there
/// one function computes everything.
pub(crate) fn lengths(stream: &Stream) -> Vec<usize> {
    let mut lengths = vec![0, 1, 2, 31, 32, 33, 255, 256, 257, 2049];
    if stream.device().kind() == DeviceKind::Cuda {
        lengths.extend([2047, 4095, 4096, 4097, 9_999, 65_537, (1 << 20) - 1, (1 << 20) + 1]);
    }
    up_to_largest(lengths)
}

/// Those that are not above `GPU_AWAIT_TEST_LARGEST`, for tools under which kernels are slow.
pub(crate) fn up_to_largest(mut lengths: Vec<usize>) -> Vec<usize> {
    if let Ok(largest) = std::env::var("GPU_AWAIT_TEST_LARGEST") {
        let largest = largest.parse().expect("GPU_AWAIT_TEST_LARGEST: a number of elements");
        lengths.retain(|len| *len <= largest);
    }
    lengths
}

/// Bit patterns of every kind, then all equal, sorted, and in reverse.
pub(crate) fn patterns<T: Plain>(len: usize, seed: u64) -> Vec<Vec<T>> {
    let mut random = Random(seed | 1);
    let mut any =
        || T::of_bits((random.below(1 << 32) as u64) << 32 | random.below(1 << 32) as u64);
    let wild: Vec<T> = (0..len).map(|_| any()).collect();
    let mut sorted = wild.clone();
    sorted.sort_by(T::order);
    let reverse: Vec<T> = sorted.iter().rev().copied().collect();
    let few: Vec<T> = (0..len).map(|at| T::of_bits((at as u64 * 7919) % 3)).collect();
    vec![vec![T::of_bits(seed); len], sorted, reverse, few, wild]
}

/// `patterns`, each with its number; of many elements the last one alone, as the host takes long for them.
pub(crate) fn fewer_patterns<T: Plain>(len: usize, seed: u64) -> Vec<(usize, Vec<T>)> {
    let all = patterns(len, seed).into_iter().enumerate();
    all.skip(if is_large(len) { 4 } else { 0 }).collect()
}

pub(crate) fn is_large(len: usize) -> bool {
    len > 100_000
}

pub(crate) fn small<T: Plain>(len: usize, seed: u64) -> Vec<T> {
    let mut random = Random(seed | 1);
    (0..len).map(|_| T::small(random.below(1 << 20) as i32)).collect()
}

pub(crate) fn up<T: Plain>(stream: &Stream, x: &[T]) -> DeviceBuffer<T> {
    stream.upload(x.to_vec()).queued().expect("memory")
}

pub(crate) fn down<T: Plain>(stream: &Stream, x: &DeviceBuffer<T>) -> Vec<T> {
    stream.download(x).synchronize().expect("data").to_vec()
}

pub(crate) fn assert_same<T: Plain>(found: &[T], expected: &[T], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differ = found.iter().zip(expected).position(|(found, expected)| !found.same(expected));
    if let Some(at) = differ {
        panic!("{what}: at {at} {:?} instead of {:?}", found[at], expected[at]);
    }
}

/// Offsets of segments of every length up to `longest`, some empty; the last ends with the array.
pub(crate) fn segments_of(len: usize, longest: usize) -> Vec<u64> {
    let mut random = Random((len * 31 + longest) as u64 | 1);
    let mut offsets = vec![0];
    let mut at = 0;
    while at < len {
        at = (at + random.below(longest + 1)).min(len);
        offsets.push(at as u64);
    }
    offsets.push(len as u64);
    offsets
}
