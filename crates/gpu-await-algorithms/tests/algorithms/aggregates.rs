//! What arrays come to as a whole, by runs, by bins and by segments, beside the same in plain Rust: every type, lengths at the
//! boundaries of blocks, tiles and grids, parts at odd offsets, numbers of elements that the device alone knows.

use gpu_await::{ErrorDetail, Stream};
use gpu_await_algorithms::{Algorithms, ReduceOp, Sequence};
use half::{bf16, f16};

use crate::under_test::plain::{
    Plain, assert_same, down, fewer_patterns, for_each_type, lengths, patterns, segments_of, small,
    stream, up,
};
use crate::under_test::random::Random;
use crate::under_test::refused_calls::each_call_refused;

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max];

/// What `op` makes of `init` and small whole numbers; sums of 16-bit floats are exact in f32, and rounded once.
fn combined<T: Plain>(x: &[T], op: ReduceOp, init: T) -> T {
    let before = |a: &T, b: &T| a.partial_cmp(b).expect("a number");
    let all = x.iter().copied().chain([init]);
    match op {
        ReduceOp::Sum => {
            let is_float = T::small(0).as_f64() < 0.0;
            let wrapped = || all.clone().fold(T::of_bits(0), T::add);
            if is_float { T::of_f64(all.clone().map(T::as_f64).sum()) } else { wrapped() }
        }
        ReduceOp::Min => all.min_by(before).expect("init"),
        ReduceOp::Max => all.max_by(before).expect("init"),
        ReduceOp::Product => unreachable!("tests/algorithms/operators.rs has products"),
    }
}

#[test]
fn reductions_begin_with_init() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            let x = small::<T>(len, len as u64 + 3);
            let buffer = up(stream, &x);
            let mut out = stream.empty::<T>(1).queued().expect("memory");
            for (op, init) in OPS.into_iter().flat_map(|op| [(op, 0), (op, 3), (op, 15)]) {
                let what = format!("{op:?} of {init} and {len} of {}", std::any::type_name::<T>());
                let init = T::small(init);
                let expected = combined(&x, op, init);
                let found = stream.reduce(&buffer, op, init).synchronize().expect("a value");
                assert_same(&[found], &[expected], &what);
                stream.reduce_into(&buffer, op, init, &mut out).queued().expect("a reduction");
                assert_same(&down(stream, &out), &[expected], &what);
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn reductions_of_parts_and_of_up_to() {
    fn check<T: Plain>(stream: &Stream) {
        let x = small::<T>(9_000, 17);
        let buffer = up(stream, &x);
        let init = T::small(5);
        for (start, len) in [(1, 1), (3, 40), (7, 5_000), (5, 0)] {
            let view = buffer.slice(start..start + len).expect("inside");
            for op in OPS {
                let found = stream.reduce(&view, op, init).synchronize().expect("a value");
                let expected = combined(&x[start..start + len], op, init);
                assert_same(&[found], &[expected], "a part");
            }
        }
        for counted in [0, 1, 33, 4_097, 9_000, 1 << 40] {
            let count = up(stream, &[counted]);
            for op in OPS {
                let up_to = buffer.up_to(&count).expect("one");
                let found = stream.reduce(&up_to, op, init).synchronize().expect("a value");
                let expected = combined(&x[..counted.min(9_000) as usize], op, init);
                assert_same(&[found], &[expected], "as many as the device says");
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

/// A NaN wins, whether it is an element or `init`; sums of narrow integers wrap.
#[test]
fn reductions_of_nan_and_past_the_end() {
    let stream = stream();
    let reduce = |x: &[f32], op, init| {
        stream.reduce(&up(&stream, x), op, init).synchronize().expect("a value")
    };
    for op in OPS {
        assert!(reduce(&[1.0, f32::NAN, 2.0], op, 0.0).is_nan(), "{op:?}");
        assert!(reduce(&[1.0, 2.0], op, f32::NAN).is_nan(), "{op:?}");
        assert!(reduce(&[], op, f32::NAN).is_nan(), "{op:?}");
    }
    let bytes = up(&stream, &[200u8; 5_000]);
    let sum = stream.reduce(&bytes, ReduceOp::Sum, 1).synchronize().expect("a value");
    assert_eq!(sum, (200 * 5_000 + 1) as u8);
    assert_eq!(stream.sum(&bytes).synchronize().expect("a value"), 1_000_000);
}

/// Runs of equal elements, with the last of each.
fn runs<T: Plain>(x: &[T]) -> (Vec<T>, Vec<u64>) {
    let runs = x.chunk_by(|a, b| a == b);
    runs.map(|run| (*run.last().expect("an element"), run.len() as u64)).unzip()
}

/// Runs of every length, short ones and long ones mixed.
fn in_runs<T: Plain>(len: usize) -> Vec<T> {
    let mut random = Random(len as u64 | 1);
    let mut x = Vec::new();
    while x.len() < len {
        let longest = [1, 3, 40, 5_000][random.below(4)];
        let run = 1 + random.below(longest);
        x.extend(std::iter::repeat_n(T::small(x.len() as i32), run));
    }
    x.truncate(len);
    x
}

#[test]
fn runs_have_values_and_lengths() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            let mut all = fewer_patterns::<T>(len, 5);
            all.push((5, in_runs(len)));
            for (which, x) in all {
                let what = format!("{len} of {}, pattern {which}", std::any::type_name::<T>());
                let (values, counts) = runs(&x);
                let mut found = (up(stream, &x), up(stream, &vec![7u64; len]));
                let count = stream.run_length_encode(&up(stream, &x), &mut found.0, &mut found.1);
                assert_eq!(count.synchronize().expect("a count"), values.len(), "{what}");
                let (found_values, found_counts) = (down(stream, &found.0), down(stream, &found.1));
                assert_bits(&found_values[..values.len()], &values, &what);
                assert_same(&found_values[values.len()..], &x[values.len()..], "the rest stays");
                assert_eq!(found_counts[..counts.len()], counts, "{what}");
                assert!(found_counts[counts.len()..].iter().all(|rest| *rest == 7), "{what}");
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

/// What is written is bits that were there: -0 stays apart from 0, and of a NaN every bit is kept.
fn assert_bits<T: Plain>(found: &[T], expected: &[T], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differ = found
        .iter()
        .zip(expected)
        .position(|(a, b)| bytemuck::bytes_of(a) != bytemuck::bytes_of(b));
    assert_eq!(differ, None, "{what}");
}

/// Runs of what was selected, and what they come to, without the host.
#[test]
fn runs_of_parts_and_of_up_to() {
    fn check<T: Plain>(stream: &Stream) {
        let x = in_runs::<T>(9_000);
        let buffer = up(stream, &x);
        for (start, len) in [(1, 1), (3, 40), (7, 5_000), (5, 0)] {
            let view = buffer.slice(start..start + len).expect("inside");
            let (mut values, mut counts) = (up(stream, &x), up(stream, &vec![7u64; 9_000]));
            let count = {
                let mut values = values.slice_mut(start..start + len).expect("inside");
                let mut counts = counts.slice_mut(start..start + len).expect("inside");
                stream.run_length_encode(&view, &mut values, &mut counts).synchronize()
            };
            let expected = runs(&x[start..start + len]);
            let there = start..start + expected.0.len();
            assert_eq!(count.expect("a count"), there.len());
            assert_same(&down(stream, &values)[there.clone()], &expected.0, "values of a part");
            assert_eq!(down(stream, &counts)[there], expected.1);
        }
        for counted in [0, 1, 33, 4_097, 9_000, 1 << 40] {
            let counted_there = up(stream, &[counted]);
            let (mut values, mut counts) = (up(stream, &x), up(stream, &vec![7u64; 9_000]));
            let mut count = up(stream, &[7u64]);
            let up_to = buffer.up_to(&counted_there).expect("one");
            let runs_of =
                stream.run_length_encode_into(&up_to, &mut values, &mut counts, &mut count);
            runs_of.queued().expect("runs");
            let all = stream.sum(&counts.up_to(&count).expect("one"));
            assert_eq!(all.synchronize().expect("a sum"), counted.min(9_000));
            let expected = runs(&x[..counted.min(9_000) as usize]);
            assert_eq!(down(stream, &count), [expected.0.len() as u64]);
            assert_same(&down(stream, &values)[..expected.0.len()], &expected.0, "values");
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

/// A run that goes on over two parts that the kernels take one after the other.
#[test]
#[ignore = "takes 44 GB of a GPU"]
fn runs_over_parts() {
    let stream = stream();
    let len = (1 << 32) + 100;
    let mut x = stream.full(len, 7u8).queued().expect("memory");
    stream.fill(&mut x.slice_mut(..10).expect("inside"), 3).queued().expect("a fill");
    stream.fill(&mut x.slice_mut(len - 5..).expect("inside"), 9).queued().expect("a fill");
    let mut values = stream.zeros::<u8>(len).queued().expect("memory");
    let mut lengths = stream.zeros::<u64>(len).queued().expect("memory");
    let count = stream.run_length_encode(&x, &mut values, &mut lengths).synchronize();
    assert_eq!(count.expect("a count"), 3);
    let values = stream.download(&values.slice(..4).expect("inside")).synchronize();
    assert_eq!(values.expect("data"), [3, 7, 9, 0]);
    let lengths = stream.download(&lengths.slice(..4).expect("inside")).synchronize();
    assert_eq!(lengths.expect("data"), [10, len as u64 - 15, 5, 0]);
}

/// Bins of one width, computed as the docs say.
trait Binned: Plain {
    fn bin(self, lower: Self, upper: Self, bins: usize) -> Option<usize>;
}

macro_rules! integer_bins {
    ($($type:ident)+) => {$(
        impl Binned for $type {
            fn bin(self, lower: Self, upper: Self, bins: usize) -> Option<usize> {
                let (x, lower, upper) = (self as i128, lower as i128, upper as i128);
                let bin = (x - lower) * bins as i128 / (upper - lower + 1);
                (lower..=upper).contains(&x).then_some(bin as usize)
            }
        }
    )+};
}
integer_bins! { u8 u16 u32 u64 i8 i16 i32 i64 }

macro_rules! float_bins {
    ($($type:ident in $computed:ident;)+) => {$(
        impl Binned for $type {
            fn bin(self, lower: Self, upper: Self, bins: usize) -> Option<usize> {
                let wide = |x: Self| $computed::from(x);
                let (x, lower, upper) = (wide(self), wide(lower), wide(upper));
                let bin = ((x - lower) * (bins as $computed / (upper - lower))) as usize;
                (lower..=upper).contains(&x).then_some(bin.min(bins - 1))
            }
        }
    )+};
}
float_bins! { f16 in f32; bf16 in f32; f32 in f32; f64 in f64; }

fn counted(bins: usize, of: impl Iterator<Item = Option<usize>>) -> Vec<u64> {
    let mut counts = vec![0; bins];
    of.flatten().for_each(|bin| counts[bin] += 1);
    counts
}

/// The ends, in order, of a range of any size; finite.
fn ends<T: Plain>(x: &[T], random: &mut Random) -> (T, T) {
    let pick = |at: usize| x.get(at).copied().filter(|x| x.as_f64().is_finite());
    let (a, b) = (pick(random.below(x.len().max(1))), pick(random.below(x.len().max(1))));
    let (a, b) = (a.unwrap_or(T::small(0)), b.unwrap_or(T::small(9)));
    let (a, b) = if a.as_f64() <= b.as_f64() { (a, b) } else { (b, a) };
    let span = T::of_f64(b.as_f64() - a.as_f64()).as_f64();
    // The difference of the greatest floats is none, and for the least ones no bin is narrow enough.
    if span > 1e-30 && span.is_finite() { (a, b) } else { (T::small(0), T::small(9)) }
}

#[test]
fn bins_of_one_width() {
    fn check<T: Binned>(stream: &Stream) {
        for len in lengths(stream) {
            let mut all = fewer_patterns::<T>(len, 0x1234_5678_9abc_def0);
            all.push((5, small::<T>(len, 3)));
            for (which, x) in all {
                let mut random = Random(len as u64 * 8 + which as u64 + 1);
                let buffer = up(stream, &x);
                for bins in [1, 7, 256, 2_048, 2_049, 70_001] {
                    let (lower, upper) = ends(&x, &mut random);
                    let what = format!("{bins} bins of {len}, {lower:?}..={upper:?}, {which}");
                    let mut counts = stream.empty(bins).queued().expect("memory");
                    stream.histogram(&buffer, lower..=upper, &mut counts).queued().expect("counts");
                    let expected = counted(bins, x.iter().map(|x| x.bin(lower, upper, bins)));
                    assert!(down(stream, &counts) == expected, "{what}");
                }
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

/// At the ends of 64 bits, where the kernel's first guess may be out by one.
#[test]
fn bins_of_all_that_64_bits_hold() {
    let stream = stream();
    let mut random = Random(99);
    let mut word = || (random.below(1 << 32) as u64) << 32 | random.below(1 << 32) as u64;
    for bins in [3, 1_000, 2_048, 99_991, 1 << 20] {
        let edge = |bin: u64| (u128::from(bin) << 64).div_ceil(bins as u128) as u64;
        let edges = (0..5_000).map(|_| edge(word() % bins as u64));
        let edges: Vec<u64> = edges.flat_map(|x| [x.wrapping_sub(1), x, x + 1]).collect();
        for (lower, upper) in [(0, u64::MAX), (1, u64::MAX), (0, u64::MAX - 1), (1 << 63, u64::MAX)]
        {
            let x: Vec<u64> = edges.iter().copied().chain([0, 1, lower, upper, u64::MAX]).collect();
            let mut counts = stream.empty(bins).queued().expect("memory");
            let there = up(&stream, &x);
            stream.histogram(&there, lower..=upper, &mut counts).queued().expect("counts");
            let expected = counted(bins, x.iter().map(|x| x.bin(lower, upper, bins)));
            assert!(down(&stream, &counts) == expected, "{bins} bins, {lower}..={upper}");
            let signed: Vec<i64> = x.iter().map(|x| (*x ^ (1 << 63)) as i64).collect();
            let (from, to) = ((lower ^ (1 << 63)) as i64, (upper ^ (1 << 63)) as i64);
            let there = up(&stream, &signed);
            stream.histogram(&there, from..=to, &mut counts).queued().expect("counts");
            assert!(down(&stream, &counts) == expected, "{bins} bins, {from}..={to}");
        }
    }
}

#[test]
fn bins_between_levels() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            let mut all = fewer_patterns::<T>(len, 0xfedc_ba98_7654_3210);
            all.push((5, small::<T>(len, 3)));
            for (which, x) in all {
                let buffer = up(stream, &x);
                for bins in [1, 5, 300, 3_000] {
                    // Some of them equal.
                    let mut levels = patterns::<T>(bins + 1, len as u64 | 5).pop().expect("levels");
                    levels.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = T::small(2));
                    levels.sort_by(|a, b| a.partial_cmp(b).expect("a number"));
                    let bin = |x: &T| {
                        let is_inside = *x >= levels[0] && *x <= levels[bins];
                        let at = levels[1..bins].partition_point(|level| level <= x);
                        is_inside.then_some(at)
                    };
                    let mut counts = stream.empty(bins).queued().expect("memory");
                    let there = up(stream, &levels);
                    let count = stream.histogram_between(&buffer, &there, &mut counts);
                    count.queued().expect("counts");
                    let expected = counted(bins, x.iter().map(bin));
                    assert!(down(stream, &counts) == expected, "{bins} of {len}, {which}");
                }
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn bins_of_parts_and_of_up_to() {
    fn check<T: Binned>(stream: &Stream) {
        let x = small::<T>(9_000, 17);
        let buffer = up(stream, &x);
        let (lower, upper) = (T::small(1), T::small(12));
        for (start, len) in [(1, 1), (3, 40), (7, 5_000), (5, 0)] {
            let view = buffer.slice(start..start + len).expect("inside");
            let mut counts = stream.full(9, 7u64).queued().expect("memory");
            {
                let mut counts = counts.slice_mut(1..6).expect("inside");
                stream.histogram(&view, lower..=upper, &mut counts).queued().expect("counts");
            }
            let part = &x[start..start + len];
            let expected = counted(5, part.iter().map(|x| x.bin(lower, upper, 5)));
            assert_eq!(down(stream, &counts), [&[7], &expected[..], &[7, 7, 7]].concat());
        }
        for there_are in [0, 1, 33, 4_097, 9_000, 1 << 40] {
            let count = up(stream, &[there_are]);
            let mut counts = stream.full(5, 7u64).queued().expect("memory");
            let up_to = buffer.up_to(&count).expect("one");
            stream.histogram(&up_to, lower..=upper, &mut counts).queued().expect("counts");
            let part = &x[..there_are.min(9_000) as usize];
            let expected = counted(5, part.iter().map(|x| x.bin(lower, upper, 5)));
            assert_eq!(down(stream, &counts), expected);
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

/// Levels that are not in order leave the counts in their memory, and count nothing twice.
#[test]
fn levels_in_no_order() {
    let stream = stream();
    let x = patterns::<u32>(9_999, 7).pop().expect("some");
    let levels = patterns::<u32>(301, 9).pop().expect("some");
    let mut counts = stream.full(302, 7u64).queued().expect("memory");
    {
        let mut counts = counts.slice_mut(1..301).expect("inside");
        let count = stream.histogram_between(&up(&stream, &x), &up(&stream, &levels), &mut counts);
        count.queued().expect("counts");
    }
    let counts = down(&stream, &counts);
    assert_eq!((counts[0], counts[301]), (7, 7));
    assert!(counts[1..301].iter().sum::<u64>() <= 9_999);
}

fn reduced<T: Plain>(x: &[T], offsets: &[u64], op: ReduceOp, init: T) -> Vec<T> {
    let inside = |at: u64| at.min(x.len() as u64) as usize;
    let segments = offsets.windows(2).map(|ends| inside(ends[0])..inside(ends[1]));
    segments.map(|ends| combined(x.get(ends).unwrap_or(&[]), op, init)).collect()
}

#[test]
fn segments_of_every_length() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            let x = small::<T>(len, len as u64 + 3);
            let buffer = up(stream, &x);
            for longest in [1, 33, 1_000, 10_000] {
                let offsets = segments_of(len, longest);
                let there = up(stream, &offsets);
                for op in OPS {
                    let what = format!("{op:?} of {len} of {}", std::any::type_name::<T>());
                    let mut out = stream.empty(offsets.len() - 1).queued().expect("memory");
                    let init = T::small(3);
                    let reduce = stream.segmented_reduce(&buffer, &there, op, init, &mut out);
                    reduce.queued().expect("a reduction");
                    assert_same(&down(stream, &out), &reduced(&x, &offsets, op, init), &what);
                }
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn segments_of_parts_and_of_up_to() {
    fn check<T: Plain>(stream: &Stream) {
        let x = small::<T>(9_000, 17);
        let buffer = up(stream, &x);
        let init = T::small(5);
        for longest in [5, 3_000] {
            let offsets = segments_of(4_000, longest);
            let segments = offsets.len() - 1;
            let there = up(stream, &[&[9], &offsets[..]].concat());
            let view = there.slice(1..).expect("inside");
            let part = buffer.slice(3..4_003).expect("inside");
            for op in OPS {
                let mut out = up(stream, &vec![T::small(1); segments + 2]);
                {
                    let mut out = out.slice_mut(1..segments + 1).expect("inside");
                    let reduce = stream.segmented_reduce(&part, &view, op, init, &mut out);
                    reduce.queued().expect("a reduction");
                }
                let expected = reduced(&x[3..4_003], &offsets, op, init);
                let expected = [&[T::small(1)], &expected[..], &[T::small(1)]].concat();
                assert_same(&down(stream, &out), &expected, "segments of a part");
                for (elements, counted) in [(0, 0), (2_000, 1), (1 << 40, 2), (3_999, 1 << 40)] {
                    let (elements_there, counted_there) =
                        (up(stream, &[elements]), up(stream, &[counted]));
                    let whole = up(stream, &offsets);
                    let mut out = up(stream, &vec![T::small(1); segments]);
                    let x_up_to = buffer.up_to(&elements_there).expect("one");
                    let up_to = whole.up_to(&counted_there).expect("one");
                    let reduce = stream.segmented_reduce(&x_up_to, &up_to, op, init, &mut out);
                    reduce.queued().expect("a reduction");
                    let (x, offsets) = (
                        &x[..elements.min(9_000) as usize],
                        &offsets[..counted.min(offsets.len() as u64) as usize],
                    );
                    let mut expected = reduced(x, offsets, op, init);
                    expected.resize(segments, T::small(1));
                    assert_same(&down(stream, &out), &expected, "as many as the device says");
                }
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

/// Offsets that are in no order, or past the end, are segments inside of the array.
#[test]
fn segments_stay_inside() {
    let stream = stream();
    let x: Vec<u32> = (1..=5_000).collect();
    let buffer = up(&stream, &x);
    let offsets = [4_990, 10, u64::MAX, 5_000, 0, 6_000, 5_000, 4_999];
    for repeats in [1, 500] {
        // Short on average, and long.
        let offsets = offsets.repeat(repeats);
        let mut out = stream.empty(offsets.len() - 1).queued().expect("memory");
        let there = up(&stream, &offsets);
        let sums = stream.segmented_reduce(&buffer, &there, ReduceOp::Sum, 0, &mut out);
        sums.queued().expect("sums");
        assert_eq!(down(&stream, &out), reduced(&x, &offsets, ReduceOp::Sum, 0));
    }
}

/// What runs come to, segment by segment, without the host: run lengths, where runs begin, the sum of each.
#[test]
fn segments_of_runs() {
    let stream = stream();
    let x = in_runs::<u32>(9_000);
    let buffer = up(&stream, &x);
    let (mut values, mut counts) = (up(&stream, &x), up(&stream, &vec![0u64; 9_001]));
    let mut count = up(&stream, &[0u64]);
    {
        let mut counts = counts.slice_mut(..9_000).expect("inside");
        let runs = stream.run_length_encode_into(&buffer, &mut values, &mut counts, &mut count);
        runs.queued().expect("runs");
    }
    let mut begins = stream.empty::<u64>(9_001).queued().expect("memory");
    stream.exclusive_scan(&counts, ReduceOp::Sum, 0, &mut begins).queued().expect("a scan");
    let mut sums = stream.empty::<u32>(9_000).queued().expect("memory");
    let reduce = stream.segmented_reduce(&buffer, &begins, ReduceOp::Sum, 0, &mut sums);
    reduce.queued().expect("sums");
    let sums = down(&stream, &sums);
    let expected: Vec<u32> = x.chunk_by(|a, b| a == b).map(|run| run.iter().sum()).collect();
    assert_eq!(sums[..expected.len()], expected);
    assert!(sums[expected.len()..].iter().all(|sum| *sum == 0));
}

#[test]
fn refusals() {
    let stream = stream();
    let x = up(&stream, &[1.0f32, 2.0, 3.0]);
    let mut two = stream.zeros::<f32>(2).queued().expect("memory");
    let error = stream.reduce_into(&x, ReduceOp::Max, 0.0, &mut two).queued().expect_err("two");
    let detail = error.detail();
    let ErrorDetail::WrongLength { op, expected, found, .. } = detail else { panic!("{error}") };
    assert_eq!((*op, *expected, *found), ("reduce", 1, 2));
    let error = stream.download(&two).synchronize().expect_err("poisoned");
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    let mut short = stream.zeros::<u64>(2).queued().expect("memory");
    let mut values = up(&stream, &[1.0f32, 2.0, 3.0]);
    let error = stream.run_length_encode(&x, &mut values, &mut short).synchronize();
    let error = error.expect_err("too short");
    assert!(
        matches!(error.detail(), ErrorDetail::WrongLength { expected: 3, found: 2, .. }),
        "{error}"
    );
    let mut counts = stream.zeros::<u64>(4).queued().expect("memory");
    for range in [2.0..=1.0, 1.0..=1.0, f32::NAN..=1.0, 0.0..=f32::INFINITY, f32::MIN..=f32::MAX] {
        let error = stream.histogram(&x, range.clone(), &mut counts).queued();
        let error = error.expect_err("no range");
        assert!(matches!(error.detail(), ErrorDetail::Precondition { .. }), "{range:?}: {error}");
    }
    let mut none = stream.zeros::<u64>(0).queued().expect("memory");
    let bytes = stream.full(4, 1u8).queued().expect("memory");
    let (nine, three) = (9u8, 3);
    let error = stream.histogram(&bytes, nine..=three, &mut counts).queued().expect_err("a range");
    assert!(error.to_string().contains("`a range that does not end before it begins`"), "{error}");
    let error = stream.histogram(&x, 0.0..=1.0, &mut none).queued().expect_err("no bin");
    assert!(matches!(error.detail(), ErrorDetail::Precondition { .. }), "{error}");
    let error = stream.histogram_between(&x, &x, &mut counts).queued().expect_err("levels");
    let detail = error.detail();
    assert!(matches!(detail, ErrorDetail::WrongLength { expected: 5, found: 3, .. }), "{error}");
    let error = stream.download(&counts).synchronize().expect_err("poisoned");
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    let offsets = up(&stream, &[0u64, 1, 3]);
    let mut sums = stream.zeros::<f32>(3).queued().expect("memory");
    let reduce = stream.segmented_reduce(&x, &offsets, ReduceOp::Sum, 0.0, &mut sums);
    let error = reduce.queued().expect_err("three");
    let detail = error.detail();
    assert!(matches!(detail, ErrorDetail::WrongLength { expected: 2, found: 3, .. }), "{error}");
    let error = stream.download(&sums).synchronize().expect_err("poisoned");
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    let unwritten = stream.empty::<f32>(3).queued().expect("memory");
    let error = stream.reduce(&unwritten, ReduceOp::Sum, 0.0).synchronize().expect_err("unwritten");
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
}

/// Each call of the driver refused in turn: an error, or the right values; and nothing is left behind.
#[test]
fn every_call_refused_once() {
    each_call_refused(32, |stream, refuse, which| {
        let x: Vec<u32> = (0..500).map(|at| at * 7 % 501).collect();
        let buffer = up(stream, &x);
        let mut out = stream.zeros::<u32>(1).queued().expect("memory");
        let mut counts = stream.zeros::<u64>(9).queued().expect("memory");
        let offsets = up(stream, &[0, 7, 400, 500]);
        let mut sums = stream.zeros::<u32>(3).queued().expect("memory");
        let (mut values, mut lengths, mut count) =
            (up(stream, &x), up(stream, &vec![0u64; 500]), up(stream, &[0u64]));
        refuse();
        stream.reduce_into(&buffer, ReduceOp::Sum, 1, &mut out).abandon();
        let sum = x.iter().sum::<u32>() + 1;
        if let Ok(max) = stream.reduce(&out, ReduceOp::Max, 0).synchronize() {
            assert_eq!(max, sum, "{which}");
        }
        let all = stream.run_length_encode_into(&buffer, &mut values, &mut lengths, &mut count);
        all.abandon();
        if let Ok(all) = stream.sum(&lengths.up_to(&count).expect("one")).synchronize() {
            assert_eq!(all, 500, "{which}");
        }
        stream.histogram(&buffer, 0..=500, &mut counts).abandon();
        if let Ok(all) = stream.sum(&counts).synchronize() {
            assert_eq!(all, 500, "{which}");
        }
        let reduce = stream.segmented_reduce(&buffer, &offsets, ReduceOp::Sum, 0, &mut sums);
        reduce.abandon();
        if let Ok(all) = stream.sum(&sums).synchronize() {
            assert_eq!(all, u64::from(sum) - 1, "{which}");
        }
    });
}
