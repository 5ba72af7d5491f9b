//! What arrays come to as a whole, by runs, by bins and by segments, beside the same in plain Rust: every type, lengths at the
//! boundaries of blocks, tiles and grids, parts at odd offsets, numbers of elements that the device alone knows.

use futures::FutureExt;
use futures::executor::block_on;
use gpu_await::testing::DriverCall;
use gpu_await::{ErrorDetail, ErrorKind, ReduceOp, Stream, testing};
use half::{bf16, f16};

use under_test::plain::{Plain, assert_same, down, for_each_type, lengths, small, stream, up};

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
    let unwritten = stream.empty::<f32>(3).queued().expect("memory");
    let error = stream.reduce(&unwritten, ReduceOp::Sum, 0.0).synchronize().expect_err("unwritten");
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
}

/// Each call of the driver refused in turn: an error, or the right values; and nothing is left behind.
#[test]
fn every_call_refused_once() {
    for nth in 1..12 {
        for kind in [DriverCall::Launch, DriverCall::Alloc, DriverCall::CopyToHost] {
            let (faults, handle) = testing::faults();
            let device = testing::host_with(faults);
            let stream = device.stream().expect("a stream");
            let x: Vec<u32> = (0..500).map(|at| at * 7 % 501).collect();
            let buffer = up(&stream, &x);
            let mut out = stream.zeros::<u32>(1).queued().expect("memory");
            stream.done().synchronize().expect("done");
            handle.fail_nth(kind, nth, ErrorKind::Driver);
            stream.reduce_into(&buffer, ReduceOp::Sum, 1, &mut out).abandon();
            let sum = x.iter().sum::<u32>() + 1;
            if let Ok(max) = stream.reduce(&out, ReduceOp::Max, 0).synchronize() {
                assert_eq!(max, sum, "{kind:?} {nth}");
            }
            drop((buffer, out));
            assert!(device.lost().now_or_never().is_none(), "{kind:?} {nth}");
            stream.done().synchronize().expect("done");
            block_on(device.trim(0)).ok();
        }
    }
}
