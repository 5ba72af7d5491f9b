//! The greatest and the least elements, and where they are, beside a stable sort in plain Rust: every type and bit pattern, as many
//! as none, one, some and all, parts at odd offsets, numbers of elements that the device alone knows.

use gpu_await::{DeviceBuffer, DeviceKind, ErrorDetail, Stream};
use gpu_await_algorithms::{Algorithms, Compare, Sequence};
use half::{bf16, f16};

use crate::under_test::plain::{
    Plain, down, fewer_patterns, for_each_type, lengths, patterns, small, stream, up, up_to_largest,
};
use crate::under_test::refused_calls::each_call_refused;

/// The places of elements, the greatest or the least first, of equal ones the first.
fn order<T: Plain>(x: &[T], descending: bool) -> Vec<u64> {
    let mut order: Vec<u64> = (0..x.len() as u64).collect();
    let by = |a: &u64, b: &u64| x[*a as usize].order(&x[*b as usize]);
    order.sort_by(|a, b| if descending { by(b, a) } else { by(a, b) });
    order
}

/// As many as each of `most`, with places and without.
fn check_all<T: Plain>(stream: &Stream, x: &[T], most: &[usize], what: &str) {
    let buffer = up(stream, x);
    for descending in [true, false] {
        let order = order(x, descending);
        for k in most.iter().copied().filter(|k| *k <= x.len()) {
            let what = format!("{k} of {what}");
            let values: Vec<T> = order[..k].iter().map(|at| x[*at as usize]).collect();
            let (mut out, mut places) = empty::<T>(stream, k);
            let mut alone = stream.empty::<T>(k).queued().expect("memory");
            if descending {
                stream.top_k_places(&buffer, &mut out, &mut places).queued().expect("them");
                stream.top_k(&buffer, &mut alone).queued().expect("them");
            } else {
                stream.bottom_k_places(&buffer, &mut out, &mut places).queued().expect("them");
                stream.bottom_k(&buffer, &mut alone).queued().expect("them");
            }
            assert!(down(stream, &places) == order[..k], "{what}: places");
            assert!(same_bits(&down(stream, &out), &values), "{what}: with places");
            assert!(same_bits(&down(stream, &alone), &values), "{what}: alone");
        }
    }
    assert!(same_bits(&down(stream, &buffer), x), "{what}: the input");
}

/// Of -0 and 0, and of NaN, each is itself.
fn same_bits<T: Plain>(found: &[T], expected: &[T]) -> bool {
    bytemuck::cast_slice::<T, u8>(found) == bytemuck::cast_slice::<T, u8>(expected)
}

fn empty<T: Plain>(stream: &Stream, k: usize) -> (DeviceBuffer<T>, DeviceBuffer<u64>) {
    let out = stream.empty(k).queued().expect("memory");
    (out, stream.empty(k).queued().expect("memory"))
}

#[test]
fn as_many_as_are_asked_for() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            for (which, x) in fewer_patterns::<T>(len, 0x0fed_cba9_8765_4321) {
                let what = format!("{len} of {}, pattern {which}", std::any::type_name::<T>());
                check_all(stream, &x, &[0, 1, 32, 33, 1_000, len / 2, len], &what);
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn of_parts_and_of_up_to() {
    fn check<T: Plain>(stream: &Stream) {
        let x = small::<T>(9_000, 17);
        let buffer = up(stream, &x);
        for (start, len, k) in [(1, 1, 1), (3, 40, 7), (7, 5_000, 33), (7, 8_000, 4_000)] {
            let view = buffer.slice(start..start + len).expect("inside");
            let mut out = up(stream, &vec![T::small(1); k + 2]);
            let mut places = stream.full(k + 2, 7u64).queued().expect("memory");
            {
                let mut out = out.slice_mut(1..=k).expect("inside");
                let mut places = places.slice_mut(1..=k).expect("inside");
                stream.top_k_places(&view, &mut out, &mut places).queued().expect("them");
            }
            let part = &x[start..start + len];
            let order = order(part, true);
            assert_eq!(down(stream, &places), [&[7], &order[..k], &[7]].concat());
            let values = order[..k].iter().map(|at| part[*at as usize]);
            let ends = [T::small(1)];
            let expected: Vec<T> = ends.into_iter().chain(values).chain(ends).collect();
            assert!(down(stream, &out) == expected);
        }
        for counted in [0, 1, 33, 4_097, 9_000, 1 << 40] {
            let count = up(stream, &[counted]);
            let mut out = up(stream, &[T::small(1); 100]);
            let mut places = stream.full(100, 7u64).queued().expect("memory");
            let up_to = buffer.up_to(&count).expect("one");
            stream.bottom_k_places(&up_to, &mut out, &mut places).queued().expect("them");
            let part = &x[..counted.min(9_000) as usize];
            let mut expected: Vec<u64> = order(part, false).into_iter().take(100).collect();
            let mut values: Vec<T> = expected.iter().map(|at| part[*at as usize]).collect();
            expected.resize(100, 7);
            values.resize(100, T::small(1));
            assert_eq!(down(stream, &places), expected);
            assert!(down(stream, &out) == values);
            let mut alone = up(stream, &[T::small(1); 100]);
            stream.bottom_k(&up_to, &mut alone).queued().expect("them");
            assert!(down(stream, &alone) == values);
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

/// As many as a GPU does not sort all of. A test a type: racecheck keeps memory for each launch of a process.
fn check_of_many<T: Plain>() {
    let stream = &stream();
    let is_gpu = stream.device().kind() == DeviceKind::Cuda;
    let lengths = if is_gpu { vec![(1 << 19) + 5, (1 << 20) + 5] } else { vec![3_005] };
    let patterns = |len| patterns::<T>(len, 0x2545_f491_4f6c_dd1d).into_iter().enumerate();
    let all = up_to_largest(lengths).into_iter().flat_map(patterns);
    // Equal ones, few different ones, and any.
    for (which, x) in all.filter(|(which, _)| [0, 3, 4].contains(which)) {
        let len = x.len();
        let what = format!("{len} of {}, pattern {which}", std::any::type_name::<T>());
        check_all(stream, &x, &[1, 7, 100, len / 16], &what);
        let buffer = up(stream, &x);
        for counted in [0, 1, 99, len / 2] {
            let count = up(stream, &[counted as u64]);
            let mut out = up(stream, &[x[0]; 100]);
            let mut places = stream.full(100, 7u64).queued().expect("memory");
            let up_to = buffer.up_to(&count).expect("one");
            stream.top_k_places(&up_to, &mut out, &mut places).queued().expect("them");
            let mut expected: Vec<u64> = order(&x[..counted], true).into_iter().take(100).collect();
            let mut values: Vec<T> = expected.iter().map(|at| x[*at as usize]).collect();
            expected.resize(100, 7);
            values.resize(100, x[0]);
            let what = format!("{counted} of {what}");
            assert_eq!(down(stream, &places), expected, "{what}");
            assert!(same_bits(&down(stream, &out), &values), "{what}");
        }
    }
}

macro_rules! of_many {
    ($($of_many:ident: $type:ty;)+) => {$(
        #[test]
        fn $of_many() {
            check_of_many::<$type>();
        }
    )+};
}

of_many! {
    of_many_u8: u8;
    of_many_u16: u16;
    of_many_u32: u32;
    of_many_u64: u64;
    of_many_i8: i8;
    of_many_i16: i16;
    of_many_i32: i32;
    of_many_i64: i64;
    of_many_f16: f16;
    of_many_bf16: bf16;
    of_many_f32: f32;
    of_many_f64: f64;
}

/// Of what was selected, without the host.
#[test]
fn of_a_selection() {
    let stream = stream();
    let x: Vec<i32> = (0..5_000).map(|at| at * 7 % 5_003).collect();
    let mut kept = up(&stream, &x);
    let mut count = stream.empty::<u64>(1).queued().expect("memory");
    let less = Compare::Less(1_000);
    stream.copy_if_into(&up(&stream, &x), less, &mut kept, &mut count).queued().expect("some");
    let mut greatest = stream.zeros::<i32>(3).queued().expect("memory");
    stream.top_k(&kept.up_to(&count).expect("one"), &mut greatest).queued().expect("them");
    let mut expected: Vec<i32> = x.into_iter().filter(|x| *x < 1_000).collect();
    expected.sort_by(|a, b| b.cmp(a));
    assert_eq!(down(&stream, &greatest), expected[..3]);
}

#[test]
fn refusals() {
    let stream = stream();
    let x = up(&stream, &[1.0f32, 2.0, 3.0]);
    let mut four = stream.zeros::<f32>(4).queued().expect("memory");
    let error = stream.top_k(&x, &mut four).queued().expect_err("too many");
    let detail = error.detail();
    assert!(matches!(detail, ErrorDetail::WrongLength { expected: 4, found: 3, .. }), "{error}");
    let error = stream.download(&four).synchronize().expect_err("poisoned");
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    let mut two = stream.zeros::<f32>(2).queued().expect("memory");
    let mut places = stream.zeros::<u64>(3).queued().expect("memory");
    let error = stream.bottom_k_places(&x, &mut two, &mut places).queued().expect_err("places");
    let detail = error.detail();
    assert!(matches!(detail, ErrorDetail::WrongLength { expected: 2, found: 3, .. }), "{error}");
    let error = stream.download(&places).synchronize().expect_err("poisoned");
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    let unwritten = stream.empty::<f32>(3).queued().expect("memory");
    let error = stream.top_k(&unwritten, &mut two).queued().expect_err("unwritten");
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
}

/// Each call of the driver refused in turn: an error, or the right values; and nothing is left behind.
#[test]
fn every_call_refused_once() {
    each_call_refused(16, |stream, refuse, which| {
        let x: Vec<u32> = (0..500).map(|at| at * 7 % 501).collect();
        let buffer = up(stream, &x);
        let mut out = stream.zeros::<u32>(5).queued().expect("memory");
        let mut places = stream.zeros::<u64>(5).queued().expect("memory");
        refuse();
        stream.top_k(&buffer, &mut out).abandon();
        stream.bottom_k_places(&buffer, &mut out, &mut places).abandon();
        let order = order(&x, false);
        if let Ok(found) = stream.download(&places).synchronize() {
            assert_eq!(found, order[..5], "{which}");
        }
        if let Ok(found) = stream.download(&out).synchronize() {
            let values = order[..5].iter().map(|at| x[*at as usize]);
            assert!(found.iter().copied().eq(values), "{which}");
        }
    });
}
