//! What arrays come to as a whole, by runs, by bins and by segments, beside the same in plain Rust: every type, lengths at the
//! boundaries of blocks, tiles and grids, parts at odd offsets, numbers of elements that the device alone knows.

use futures::FutureExt;
use futures::executor::block_on;
use gpu_await::testing::DriverCall;
use gpu_await::{ErrorDetail, ErrorKind, ReduceOp, Stream, testing};
use half::{bf16, f16};

use under_test::plain::{
    Plain, assert_same, down, for_each_type, lengths, patterns, small, stream, up,
};
use under_test::random::Random;

mod under_test {
    pub(crate) mod plain;
    pub(crate) mod random;
}

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
            let mut all = patterns::<T>(len, 5);
            all.push(in_runs(len));
            for (which, x) in all.into_iter().enumerate() {
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
    let unwritten = stream.empty::<f32>(3).queued().expect("memory");
    let error = stream.reduce(&unwritten, ReduceOp::Sum, 0.0).synchronize().expect_err("unwritten");
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
}

/// Each call of the driver refused in turn: an error, or the right values; and nothing is left behind.
#[test]
fn every_call_refused_once() {
    for nth in 1..24 {
        for kind in [DriverCall::Launch, DriverCall::Alloc, DriverCall::CopyToHost] {
            let (faults, handle) = testing::faults();
            let device = testing::host_with(faults);
            let stream = device.stream().expect("a stream");
            let x: Vec<u32> = (0..500).map(|at| at * 7 % 501).collect();
            let buffer = up(&stream, &x);
            let mut out = stream.zeros::<u32>(1).queued().expect("memory");
            let (mut values, mut lengths, mut count) =
                (up(&stream, &x), up(&stream, &vec![0u64; 500]), up(&stream, &[0u64]));
            stream.done().synchronize().expect("done");
            handle.fail_nth(kind, nth, ErrorKind::Driver);
            stream.reduce_into(&buffer, ReduceOp::Sum, 1, &mut out).abandon();
            let sum = x.iter().sum::<u32>() + 1;
            if let Ok(max) = stream.reduce(&out, ReduceOp::Max, 0).synchronize() {
                assert_eq!(max, sum, "{kind:?} {nth}");
            }
            let all = stream.run_length_encode_into(&buffer, &mut values, &mut lengths, &mut count);
            all.abandon();
            if let Ok(all) = stream.sum(&lengths.up_to(&count).expect("one")).synchronize() {
                assert_eq!(all, 500, "{kind:?} {nth}");
            }
            drop((buffer, out, values, lengths, count));
            assert!(device.lost().now_or_never().is_none(), "{kind:?} {nth}");
            stream.done().synchronize().expect("done");
            block_on(device.trim(0)).ok();
        }
    }
}
