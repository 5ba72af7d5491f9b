//! Products, and operators of bits, beside the same in plain Rust: reductions, of segments as well, and scans; every type, lengths at
//! the boundaries of blocks, tiles and grids, parts at odd offsets, numbers of elements that the device alone knows.

use gpu_await::Stream;
use gpu_await_algorithms::{Algorithms, BitOp, ReduceBy, ReduceOp, Sequence};
use half::{bf16, f16};

use crate::under_test::plain::{
    Plain, assert_same, down, for_each_type, is_large, lengths, patterns, segments_of, stream, up,
};
use crate::under_test::random::Random;

/// What plain Rust combines by.
trait Combined: Plain {
    /// In what products are computed, before they are rounded once.
    type Wide: Copy;
    fn wide(self) -> Self::Wide;
    fn times(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn rounded_once(wide: Self::Wide) -> Self;
    /// Many of them, whose product is neither 0 nor too large for the type in whatever order.
    fn factors(len: usize) -> Vec<Self>;
}

macro_rules! integers {
    ($($type:ident)+) => {$(
        impl Combined for $type {
            type Wide = $type;
            fn wide(self) -> $type {
                self
            }
            fn times(a: $type, b: $type) -> $type {
                a.wrapping_mul(b)
            }
            fn rounded_once(wide: $type) -> $type {
                wide
            }
            fn factors(len: usize) -> Vec<$type> {
                let any = patterns::<$type>(len, 0x1234_5678_9abc_def1).pop().expect("some");
                any.into_iter().map(|x| x | 1).collect()
            }
        }
    )+};
}
integers! { u8 u16 u32 u64 i8 i16 i32 i64 }

macro_rules! floats {
    ($($type:ident in $wide:ident, $rounded:expr;)+) => {$(
        impl Combined for $type {
            type Wide = $wide;
            fn wide(self) -> $wide {
                self.into()
            }
            fn times(a: $wide, b: $wide) -> $wide {
                a * b
            }
            fn rounded_once(wide: $wide) -> $type {
                $rounded(wide)
            }
            fn factors(len: usize) -> Vec<$type> {
                let mut random = Random(len as u64 | 1);
                let of_len = |at: usize| at * 8 / len.max(1) != (at + 1) * 8 / len.max(1);
                let factor = |at: usize| if of_len(at) { 1.5 } else { [1.0, -1.0][random.below(2)] };
                (0..len).map(factor).map(<$type>::of_f64).collect()
            }
        }
    )+};
}
floats! {
    f16 in f32, f16::from_f32;
    bf16 in f32, bf16::from_f32;
    f32 in f32, std::convert::identity;
    f64 in f64, std::convert::identity;
}

/// One operator on elements of a type, and what it gives in plain Rust.
struct Case<T: Combined, O> {
    op: O,
    init: T,
    combine: fn(T::Wide, T::Wide) -> T::Wide,
}

impl<T: Combined, O: ReduceBy<T>> Case<T, O> {
    fn reduced(&self, x: &[T]) -> T {
        let all = x.iter().map(|x| x.wide());
        T::rounded_once(all.fold(self.init.wide(), self.combine))
    }

    /// What each element comes to with those before it; and, beginning with `init`, what those come to alone.
    fn scanned(&self, x: &[T]) -> (Vec<T>, Vec<T>) {
        let (mut with, mut without): (Option<T::Wide>, _) = (None, self.init.wide());
        let each = x.iter().map(|x| {
            let x = x.wide();
            let (inclusive, exclusive) = (with.map_or(x, |with| (self.combine)(with, x)), without);
            (with, without) = (Some(inclusive), (self.combine)(exclusive, x));
            (T::rounded_once(inclusive), T::rounded_once(exclusive))
        });
        each.unzip()
    }

    fn of_segments(&self, x: &[T], offsets: &[u64]) -> Vec<T> {
        let segments = offsets.windows(2).map(|ends| ends[0] as usize..ends[1] as usize);
        segments.map(|ends| self.reduced(&x[ends])).collect()
    }

    fn check(&self, stream: &Stream, x: &[T]) {
        let Case { op, init, .. } = *self;
        let what = format!("{op:?} of {} {}", x.len(), std::any::type_name::<T>());
        let buffer = up(stream, x);
        let expected = self.reduced(x);
        let found = stream.reduce(&buffer, op, init).synchronize().expect("a value");
        assert_same(&[found], &[expected], &what);
        let mut out = stream.empty::<T>(1).queued().expect("memory");
        stream.reduce_into(&buffer, op, init, &mut out).queued().expect("a reduction");
        assert_same(&down(stream, &out), &[expected], &what);
        let (inclusive, exclusive) = self.scanned(x);
        let mut out = stream.empty::<T>(x.len()).queued().expect("memory");
        stream.inclusive_scan(&buffer, op, &mut out).queued().expect("a scan");
        assert_same(&down(stream, &out), &inclusive, &format!("inclusive {what}"));
        stream.exclusive_scan(&buffer, op, init, &mut out).queued().expect("a scan");
        assert_same(&down(stream, &out), &exclusive, &format!("exclusive {what}"));
        for longest in [33, 5_000] {
            let offsets = segments_of(x.len(), longest);
            let mut out = stream.empty::<T>(offsets.len() - 1).queued().expect("memory");
            let there = up(stream, &offsets);
            let reduce = stream.segmented_reduce(&buffer, &there, op, init, &mut out);
            reduce.queued().expect("a reduction");
            assert_same(&down(stream, &out), &self.of_segments(x, &offsets), &what);
        }
    }

    /// At odd offsets, and as many as the device says.
    fn check_parts(&self, stream: &Stream, x: &[T]) {
        let Case { op, init, .. } = *self;
        let buffer = up(stream, x);
        for (start, len) in [(1, 1), (3, 40), (7, 5_000), (5, 0)] {
            let (part, view) =
                (&x[start..start + len], buffer.slice(start..start + len).expect("inside"));
            let found = stream.reduce(&view, op, init).synchronize().expect("a value");
            assert_same(&[found], &[self.reduced(part)], "a part");
            let mut out = up(stream, x);
            {
                let mut out = out.slice_mut(1..=len).expect("inside");
                stream.exclusive_scan(&view, op, init, &mut out).queued().expect("a scan");
            }
            let expected = [&x[..1], &self.scanned(part).1, &x[len + 1..]].concat();
            assert_same(&down(stream, &out), &expected, "a part, scanned");
        }
        for counted in [0, 1, 33, 4_097, 1 << 40] {
            let counts = up(stream, &[7, counted, 9]);
            let count = counts.slice(1..2).expect("inside");
            let up_to = buffer.up_to(&count).expect("one");
            let counted = (counted as usize).min(x.len());
            let found = stream.reduce(&up_to, op, init).synchronize().expect("a value");
            assert_same(&[found], &[self.reduced(&x[..counted])], "as many as the device says");
            let mut out = up(stream, x);
            stream.inclusive_scan(&up_to, op, &mut out).queued().expect("a scan");
            let expected = [&self.scanned(&x[..counted]).0, &x[counted..]].concat();
            assert_same(&down(stream, &out), &expected, "as many as the device says, scanned");
        }
    }
}

#[test]
fn products() {
    fn check<T: Combined>(stream: &Stream) {
        let case = Case { op: ReduceOp::Product, init: T::small(9), combine: T::times };
        for len in lengths(stream) {
            case.check(stream, &T::factors(len));
        }
        case.check_parts(stream, &T::factors(9_000));
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn bits() {
    /// Few bits are left of many, whichever operator it is; of some all, and of some none.
    fn masked<T: Combined>(len: usize, mask: impl Fn(T) -> T) -> Vec<Vec<T>> {
        let all = patterns::<T>(len, 0x0123_4567_89ab_cdef);
        all.into_iter()
            .skip(if is_large(len) { 4 } else { 2 })
            .map(|x| x.into_iter().map(&mask).collect())
            .collect()
    }
    macro_rules! check {
        ($stream:expr, $($type:ident)+) => {$(
            let most = $type::MAX;
            let and = Case { op: BitOp::And, init: most - 2, combine: |a: $type, b| a & b };
            let or = Case { op: BitOp::Or, init: 4, combine: |a: $type, b| a | b };
            let xor = Case { op: BitOp::Xor, init: most - 9, combine: |a: $type, b| a ^ b };
            for len in lengths($stream) {
                for x in masked::<$type>(len, |x| x | 0x55) { and.check($stream, &x); }
                for x in masked::<$type>(len, |x| x & 0x2a) { or.check($stream, &x); }
                for x in masked::<$type>(len, |x| x) { xor.check($stream, &x); }
            }
            let x = masked::<$type>(9_000, |x| x).pop().expect("some");
            and.check_parts($stream, &x);
            or.check_parts($stream, &x);
            xor.check_parts($stream, &x);
        )+};
    }
    let stream = stream();
    check!(&stream, u8 u16 u32 u64 i8 i16 i32 i64);
}

/// A NaN, or an infinity and 0, make all of it a NaN; of nothing the product is `init`, and of -0 it is -0.
#[test]
fn products_of_nan_and_zero() {
    let stream = stream();
    let product = |x: &[f32], init| {
        let product = stream.reduce(&up(&stream, x), ReduceOp::Product, init);
        product.synchronize().expect("a value")
    };
    assert!(product(&[1.0, f32::NAN, 2.0], 1.0).is_nan());
    assert!(product(&[f32::INFINITY, 0.0], 1.0).is_nan());
    assert!(product(&[], f32::NAN).is_nan());
    assert_eq!(product(&[], -0.0).to_bits(), (-0.0f32).to_bits());
    assert_eq!(product(&[-0.0], 1.0).to_bits(), (-0.0f32).to_bits());
}

/// A sum of -0 alone is -0.
#[test]
fn a_sum_keeps_the_sign_of_zero() {
    let stream = stream();
    let sum = |x: &[f32], init| stream.reduce(&up(&stream, x), ReduceOp::Sum, init).synchronize();
    assert_eq!(sum(&[-0.0, -0.0], -0.0).expect("a value").to_bits(), (-0.0f32).to_bits());
    assert_eq!(sum(&[-0.0], 0.0).expect("a value").to_bits(), 0);
}
