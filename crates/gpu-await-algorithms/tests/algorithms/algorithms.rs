//! Reductions, scans, sorts and selections beside the same in plain Rust: every type, lengths at the boundaries of blocks, tiles and
//! grids, keys of every bit pattern, parts at odd offsets, numbers of elements that the device alone knows.

use futures::executor::block_on;
use gpu_await::{
    DeviceBuffer, DeviceKind, ErrorDetail, ErrorKind, Graph, In, Op, Out, Region, Stream, ViewMut,
    testing,
};
use gpu_await_algorithms::{Algorithms, Compare, ReduceOp, Sequence, SequenceMut};
use half::{bf16, f16};

use crate::under_test::plain::{
    Plain, assert_same, down, for_each_type, lengths, patterns, small, stream, up,
};
use crate::under_test::random::Random;
use crate::under_test::refused_calls::each_call_refused;

#[test]
fn sums_are_right() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            let x = small::<T>(len, len as u64 + 3);
            let buffer = up(stream, &x);
            let what = format!("{} of {}", len, std::any::type_name::<T>());
            let exact: f64 = x.iter().map(|x| x.as_f64()).sum();
            let sum = T::total_as_f64(stream.sum(&buffer).synchronize().expect("a sum"));
            assert_eq!(sum, exact, "the sum of {what}");
            let squares: f64 = x.iter().map(|x| x.as_f64() * x.as_f64()).sum();
            let dot = T::total_as_f64(stream.dot(&buffer, &buffer).synchronize().expect("a sum"));
            let most = if size_of::<T::Total>() == 4 { 16_777_216.0 } else { f64::MAX };
            if squares < most {
                assert_eq!(dot, squares, "the product of {what}");
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn the_least_and_the_greatest() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            for (which, x) in patterns::<T>(len, 0x1234_5678_9abc_def0).iter().enumerate() {
                let buffer = up(stream, x);
                let what = format!("{len} of {}, pattern {which}", std::any::type_name::<T>());
                let nan = x.iter().position(|x| x.is_nan());
                let before = |a: &T, b: &T| a.partial_cmp(b) == Some(std::cmp::Ordering::Less);
                let first = |better: &dyn Fn(&T, &T) -> bool| match nan {
                    Some(nan) => Some(nan),
                    None => {
                        (0..len).reduce(|best, at| if better(&x[at], &x[best]) { at } else { best })
                    }
                };
                let (least, greatest) = (first(&before), first(&|a, b| before(b, a)));
                assert_eq!(
                    stream.arg_min(&buffer).synchronize().expect("a place"),
                    least,
                    "{what}"
                );
                assert_eq!(
                    stream.arg_max(&buffer).synchronize().expect("a place"),
                    greatest,
                    "{what}"
                );
                let (min, max) =
                    (stream.min(&buffer).synchronize(), stream.max(&buffer).synchronize());
                let (min, max) = (min.expect("a value"), max.expect("a value"));
                let Some((least, greatest)) = least.zip(greatest) else { continue };
                // Which of -0 and 0 is open.
                assert!(min == x[least] || min.same(&x[least]), "{what}: {min:?} {:?}", x[least]);
                assert!(max == x[greatest] || max.same(&x[greatest]), "{what}: {max:?}");
            }
        }
        let nothing = stream.empty::<T>(0).queued().expect("nothing");
        let (min, max) = (stream.min(&nothing).synchronize(), stream.max(&nothing).synchronize());
        assert!(min.expect("a value") > max.expect("a value"));
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

fn conditions<T: Plain>(with: T) -> [Compare<T>; 6] {
    [
        Compare::Less(with),
        Compare::LessOrEqual(with),
        Compare::Greater(with),
        Compare::GreaterOrEqual(with),
        Compare::Equal(with),
        Compare::NotEqual(with),
    ]
}

fn holds<T: Plain>(condition: &Compare<T>, x: &T) -> bool {
    match condition {
        Compare::Less(with) => x < with,
        Compare::LessOrEqual(with) => x <= with,
        Compare::Greater(with) => x > with,
        Compare::GreaterOrEqual(with) => x >= with,
        Compare::Equal(with) => x == with,
        Compare::NotEqual(with) => x != with,
    }
}

#[test]
fn what_satisfies_a_condition() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            let x = patterns::<T>(len, 77).pop().expect("some");
            let buffer = up(stream, &x);
            let with = x.get(len / 2).copied().unwrap_or(T::small(1));
            for condition in conditions(with) {
                let what = format!("{len} of {}, {condition:?}", std::any::type_name::<T>());
                let (yes, no): (Vec<T>, Vec<T>) = x.iter().partition(|x| holds(&condition, x));
                let count = stream.count_if(&buffer, condition).synchronize().expect("a count");
                assert_eq!(count, yes.len(), "{what}");
                let (mut kept, mut others) = (up(stream, &x), up(stream, &x));
                let count = stream.copy_if(&buffer, condition, &mut kept).synchronize();
                assert_eq!(count.expect("a count"), yes.len(), "{what}");
                let found = down(stream, &kept);
                assert_same(&found[..yes.len()], &yes, &what);
                assert_same(&found[yes.len()..], &x[yes.len()..], "what is behind stays");
                let count = stream.partition(&buffer, condition, &mut kept, &mut others);
                assert_eq!(count.synchronize().expect("a count"), yes.len(), "{what}");
                assert_same(&down(stream, &kept)[..yes.len()], &yes, &what);
                assert_same(&down(stream, &others)[..no.len()], &no, &what);
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn what_is_flagged() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            let x = patterns::<T>(len, 99).pop().expect("some");
            let mut random = Random(len as u64 | 1);
            let flags: Vec<u8> = (0..len).map(|_| [0, 0, 1, 255, 2][random.below(5)]).collect();
            let what = format!("{len} of {}", std::any::type_name::<T>());
            let (buffer, set) = (up(stream, &x), up(stream, &flags));
            let yes: Vec<T> =
                x.iter().zip(&flags).filter(|(_, flag)| **flag != 0).map(|(x, _)| *x).collect();
            let no: Vec<T> =
                x.iter().zip(&flags).filter(|(_, flag)| **flag == 0).map(|(x, _)| *x).collect();
            let (mut kept, mut others) = (up(stream, &x), up(stream, &x));
            let count = stream.select(&buffer, &set, &mut kept).synchronize().expect("a count");
            assert_eq!(count, yes.len(), "{what}");
            assert_same(&down(stream, &kept)[..count], &yes, &what);
            let count = stream.partition_flagged(&buffer, &set, &mut kept, &mut others);
            assert_eq!(count.synchronize().expect("a count"), yes.len(), "{what}");
            assert_same(&down(stream, &kept)[..yes.len()], &yes, &what);
            assert_same(&down(stream, &others)[..no.len()], &no, &what);
            let mut places = stream.zeros::<u64>(len).queued().expect("memory");
            let count = stream.positions(&set, &mut places).synchronize().expect("a count");
            let expected: Vec<u64> =
                (0..len as u64).filter(|at| flags[*at as usize] != 0).collect();
            assert_eq!(down(stream, &places)[..count], expected, "{what}");
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn runs_leave_their_first() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            for x in patterns::<T>(len, 5) {
                let mut expected = x.clone();
                expected.dedup_by(|a, b| a == b);
                let mut firsts = up(stream, &x);
                let count = stream.unique(&up(stream, &x), &mut firsts).synchronize();
                assert_eq!(count.expect("a count"), expected.len());
                assert_same(&down(stream, &firsts)[..expected.len()], &expected, "runs");
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn scans_are_right() {
    type Combine<'f, T> = &'f dyn Fn(T, T) -> T;
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            // Sums of 16-bit floats are rounded: whole numbers as long as they are small.
            let is_short = size_of::<T>() == 2 && T::small(0).as_f64() < 0.0;
            let x = small::<T>(if is_short { len.min(33) } else { len }, len as u64);
            let buffer = up(stream, &x);
            let least = |a: T, b: T| if b < a { b } else { a };
            let greatest = |a: T, b: T| if b > a { b } else { a };
            let ops: [(ReduceOp, Combine<'_, T>); 3] =
                [(ReduceOp::Sum, &T::add), (ReduceOp::Min, &least), (ReduceOp::Max, &greatest)];
            for (op, combine) in ops {
                let what = format!("{op:?} of {} of {}", x.len(), std::any::type_name::<T>());
                let mut inclusive = Vec::new();
                for x in &x {
                    let with = inclusive.last().map_or(*x, |so_far| combine(*so_far, *x));
                    inclusive.push(with);
                }
                let mut out = stream.empty::<T>(x.len()).queued().expect("memory");
                stream.inclusive_scan(&buffer, op, &mut out).queued().expect("a scan");
                assert_same(&down(stream, &out), &inclusive, &what);
                let init = T::small(9);
                let shifted =
                    std::iter::once(init).chain(inclusive.iter().map(|x| combine(init, *x)));
                let exclusive: Vec<T> = shifted.take(x.len()).collect();
                let mut out = stream.empty::<T>(x.len()).queued().expect("memory");
                stream.exclusive_scan(&buffer, op, init, &mut out).queued().expect("a scan");
                assert_same(&down(stream, &out), &exclusive, &what);
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

/// Sorts are right, and stable.
fn check_sorts<T: Plain>(stream: &Stream) {
    for len in lengths(stream) {
        for (which, x) in patterns::<T>(len, 0xfedc_ba98_7654_3210).into_iter().enumerate() {
            let what = format!("{len} of {}, pattern {which}", std::any::type_name::<T>());
            let mut order: Vec<u32> = (0..len as u32).collect();
            order.sort_by(|a, b| x[*a as usize].order(&x[*b as usize]));
            let sorted: Vec<T> = order.iter().map(|at| x[*at as usize]).collect();
            let mut buffer = up(stream, &x);
            stream.sort(&mut buffer).queued().expect("a sort");
            assert_bits(&down(stream, &buffer), &sorted, &what);
            let (mut keys, mut values) =
                (up(stream, &x), up(stream, &(0..len as u32).collect::<Vec<_>>()));
            stream.sort_by_key(&mut keys, &mut values).queued().expect("a sort");
            assert_bits(&down(stream, &keys), &sorted, &what);
            assert_eq!(down(stream, &values), order, "{what}");

            order.sort();
            order.sort_by(|a, b| x[*b as usize].order(&x[*a as usize]));
            let sorted: Vec<T> = order.iter().map(|at| x[*at as usize]).collect();
            let mut buffer = up(stream, &x);
            stream.sort_descending(&mut buffer).queued().expect("a sort");
            assert_bits(&down(stream, &buffer), &sorted, &what);
            let wide: Vec<u64> = (0..len as u64).collect();
            let (mut keys, mut values) = (up(stream, &x), up(stream, &wide));
            stream.sort_by_key_descending(&mut keys, &mut values).queued().expect("a sort");
            let found: Vec<u32> = down(stream, &values).iter().map(|at| *at as u32).collect();
            assert_eq!(found, order, "{what}");
        }
    }
}
/// Sorts keep every bit, also a NaN's.
fn assert_bits<T: Plain>(found: &[T], expected: &[T], what: &str) {
    let differ = found
        .iter()
        .zip(expected)
        .position(|(a, b)| gpu_await::bytemuck::bytes_of(a) != gpu_await::bytemuck::bytes_of(b));
    assert_eq!(differ, None, "{what}");
}

#[test]
fn sorts_of_bytes() {
    let stream = stream();
    check_sorts::<u8>(&stream);
    check_sorts::<i8>(&stream);
}

#[test]
fn sorts_of_two_bytes() {
    let stream = stream();
    check_sorts::<u16>(&stream);
    check_sorts::<i16>(&stream);
    check_sorts::<f16>(&stream);
    check_sorts::<bf16>(&stream);
}

#[test]
fn sorts_of_four_bytes() {
    let stream = stream();
    check_sorts::<u32>(&stream);
    check_sorts::<i32>(&stream);
    check_sorts::<f32>(&stream);
}

#[test]
fn sorts_of_eight_bytes() {
    let stream = stream();
    check_sorts::<u64>(&stream);
    check_sorts::<i64>(&stream);
    check_sorts::<f64>(&stream);
}

/// What was selected goes on into other algorithms, and the host waits once.
#[test]
fn the_device_alone_knows_how_many() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            let x = small::<T>(len, len as u64 + 11);
            let condition = Compare::GreaterOrEqual(T::small(9));
            let mut expected: Vec<T> = x.iter().filter(|x| holds(&condition, x)).copied().collect();
            let mut kept = up(stream, &x);
            let mut count = stream.empty::<u64>(1).queued().expect("memory");
            stream
                .copy_if_into(&up(stream, &x), condition, &mut kept, &mut count)
                .queued()
                .expect("it goes on");
            let sum = stream.sum(&kept.up_to(&count).expect("one")).synchronize().expect("a sum");
            assert_eq!(T::total_as_f64(sum), expected.iter().map(|x| x.as_f64()).sum::<f64>());
            let least = stream
                .arg_min(&kept.view().up_to(&count).expect("one"))
                .synchronize()
                .expect("a place");
            assert_eq!(least.is_none(), expected.is_empty());
            let again = stream.count_if(&kept.up_to(&count).expect("one"), condition).synchronize();
            assert_eq!(again.expect("a count"), expected.len());
            let mut running = up(stream, &x);
            let scan = stream.inclusive_scan(
                &kept.up_to(&count).expect("one"),
                ReduceOp::Max,
                &mut running,
            );
            scan.queued().expect("a scan");
            let running = down(stream, &running);
            assert_same(&running[expected.len()..], &x[expected.len()..], "what is behind stays");
            let mut unique = up(stream, &x);
            let runs = stream
                .unique(&kept.up_to(&count).expect("one"), &mut unique)
                .synchronize()
                .expect("a count");
            let before = down(stream, &kept);
            stream
                .sort_descending(&mut kept.view_mut().up_to_mut(&count).expect("one"))
                .queued()
                .expect("a sort");
            let after = down(stream, &kept);
            let mut runs_expected = expected.clone();
            runs_expected.dedup_by(|a, b| a == b);
            assert_eq!(runs, runs_expected.len());
            expected.sort_by(|a, b| b.order(a));
            assert_same(&after[..expected.len()], &expected, "sorted");
            assert_same(
                &after[expected.len()..],
                &before[expected.len()..],
                "what is behind stays",
            );
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn parts_at_odd_offsets() {
    fn check<T: Plain>(stream: &Stream) {
        let x = small::<T>(9_000, 17);
        for start in [1, 3, 7] {
            for len in [1, 40, 5_000] {
                let mut buffer = up(stream, &x);
                let part = &x[start..start + len];
                let view = buffer.slice(start..start + len).expect("inside");
                let sum = T::total_as_f64(stream.sum(&view).synchronize().expect("a sum"));
                assert_eq!(sum, part.iter().map(|x| x.as_f64()).sum::<f64>());
                let mut out = up(stream, &x);
                let count = {
                    let mut kept = out.slice_mut(start..start + len).expect("inside");
                    stream.copy_if(&view, Compare::NotEqual(T::small(1)), &mut kept).synchronize()
                };
                let kept: Vec<T> = part.iter().filter(|x| **x != T::small(1)).copied().collect();
                assert_eq!(count.expect("a count"), kept.len());
                assert_same(&down(stream, &out)[start..start + kept.len()], &kept, "kept");
                {
                    let mut view = buffer.slice_mut(start..start + len).expect("inside");
                    stream.sort(&mut view).queued().expect("a sort");
                }
                let mut expected = x.clone();
                expected[start..start + len].sort_by(T::order);
                assert_same(&down(stream, &buffer), &expected, "a sorted part");
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

/// More tiles than a grid has blocks.
#[test]
fn more_than_a_grid() {
    let stream = stream();
    let len = match stream.device().kind() {
        DeviceKind::Cuda => 50_000_017_u32,
        _ => 200_003,
    };
    let x: Vec<u32> = (0..len).map(|at| at.wrapping_mul(2_654_435_761)).collect();
    let mut buffer = up(&stream, &x);
    let sum = stream.sum(&buffer).synchronize().expect("a sum");
    assert_eq!(sum, x.iter().map(|x| u64::from(*x)).sum::<u64>());
    let mut out = stream.zeros::<u32>(len as usize).queued().expect("memory");
    let condition = Compare::Less(1 << 30);
    let count = stream.copy_if(&buffer, condition, &mut out).synchronize().expect("a count");
    let kept: Vec<u32> = x.iter().copied().filter(|x| *x < 1 << 30).collect();
    assert!(down(&stream, &out)[..count] == kept[..]);
    stream.inclusive_scan(&buffer, ReduceOp::Sum, &mut out).queued().expect("a scan");
    let mut so_far = 0_u32;
    let is_right = |(x, sum): (&u32, &u32)| {
        so_far = so_far.wrapping_add(*x);
        so_far == *sum
    };
    assert!(x.iter().zip(&down(&stream, &out)).all(is_right));
    let mut numbers: Vec<u32> = (0..len).collect();
    let mut values = up(&stream, &numbers);
    stream.sort_by_key(&mut buffer, &mut values).queued().expect("a sort");
    numbers.sort_by_key(|at| x[*at as usize]);
    assert!(down(&stream, &values) == numbers);
}

/// The same program eagerly, as a batch, as a replayed batch and as a graph.
#[test]
fn wherever_launches_go() {
    let device = testing::device();
    let stream = device.stream().expect("a stream");
    let mut region = Region::new();
    type Slots = (In<u32>, Out<u32>, Out<u32>);
    let graph: Graph<Slots> = device.graph((), |q, (), (x, mut sums, mut total)| {
        q.inclusive_scan(&x, ReduceOp::Sum, &mut sums)?;
        q.sort_descending(&mut sums)?;
        q.max_into(&sums, &mut total)
    });
    for (round, len) in [100_usize, 20_000, 100, 20_000, 20_000, 300].into_iter().enumerate() {
        let x: Vec<u32> = (0..len).map(|at| (at + round) as u32 % 5).collect();
        let total: u32 = x.iter().sum();
        let x = up(&stream, &x);
        let replayed = stream.replay(&mut region, |q| {
            let mut sums = q.empty::<u32>(len)?;
            q.inclusive_scan(&x, ReduceOp::Sum, &mut sums)?;
            q.sort_descending(&mut sums)?;
            q.max(&sums)
        });
        assert_eq!(replayed.synchronize().expect("a value"), total, "replay, round {round}");
        let batched = stream.batch(|q| {
            let mut sums = q.empty::<u32>(len)?;
            q.inclusive_scan(&x, ReduceOp::Sum, &mut sums)?;
            q.sort_descending(&mut sums)?;
            q.max(&sums)
        });
        assert_eq!(batched.synchronize().expect("a value"), total, "batch, round {round}");
        let (mut sums, mut most) = (
            stream.empty::<u32>(len).queued().expect("memory"),
            stream.empty::<u32>(1).queued().expect("memory"),
        );
        graph.launch(&stream, (&x, &mut sums, &mut most)).queued().expect("a launch");
        assert_eq!(down(&stream, &most), [total], "graph, round {round}");
    }
}

#[test]
fn two_streams_at_once() {
    let device = testing::device();
    let (a, b) = (device.stream().expect("a stream"), device.stream().expect("a stream"));
    let x: Vec<u32> = (0..50_000u32).map(|at| at.wrapping_mul(2_654_435_761) % 1_000_003).collect();
    for _ in 0..20 {
        let mut left = up(&a, &x);
        let mut right = up(&b, &x);
        a.sort(&mut left).queued().expect("a sort");
        b.sort_descending(&mut right).queued().expect("a sort");
        // Each goes on with what the other made.
        let (least, most) = block_on(async { futures::join!(b.min(&left), a.max(&right)) });
        let (least, most) = (least.expect("a value"), most.expect("a value"));
        assert_eq!((Some(&least), Some(&most)), (x.iter().min(), x.iter().max()));
    }
}

#[test]
fn refusals() {
    let stream = stream();
    let x = up(&stream, &[1.0f32, 2.0, 3.0]);
    let mut short = stream.zeros::<f32>(2).queued().expect("memory");
    let error =
        stream.inclusive_scan(&x, ReduceOp::Sum, &mut short).queued().expect_err("too short");
    assert!(
        matches!(error.detail(), ErrorDetail::WrongLength { expected: 3, found: 2, .. }),
        "{error}"
    );
    let error = stream.download(&short).synchronize().expect_err("poisoned");
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    let mut short = stream.zeros::<f32>(2).queued().expect("memory");
    let error =
        stream.copy_if(&x, Compare::Less(2.0), &mut short).synchronize().expect_err("too short");
    assert!(matches!(error.detail(), ErrorDetail::WrongLength { .. }), "{error}");
    let mut two = stream.zeros::<f32>(2).queued().expect("memory");
    let error = stream.sum_into(&x, &mut two).queued().expect_err("two results");
    assert!(
        matches!(error.detail(), ErrorDetail::WrongLength { expected: 1, found: 2, .. }),
        "{error}"
    );
    let other = up(&stream, &[1.0f32]);
    let error = stream.dot(&x, &other).synchronize().expect_err("lengths");
    assert!(matches!(error.detail(), ErrorDetail::WrongLength { .. }), "{error}");
    let unwritten = stream.empty::<f32>(3).queued().expect("memory");
    let error = stream.sum(&unwritten).synchronize().expect_err("unwritten");
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    let mut unwritten = stream.empty::<f32>(3).queued().expect("memory");
    let error = stream.copy_if(&x, Compare::Less(2.0), &mut unwritten).synchronize();
    let error = error.expect_err("what is not selected would be read unwritten");
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    let two = stream.zeros::<u64>(2).queued().expect("memory");
    assert!(x.up_to(&two).is_err_and(|error| error.to_string().contains("expected 1")));
    let device = testing::device();
    let elsewhere = up(&device.stream().expect("a stream"), &[1.0f32]);
    assert!(stream.sum(&elsewhere).synchronize().is_err());
}

/// Kernels read and write whole words: values that begin between two of them are refused, whatever their type says.
#[test]
fn values_between_words() {
    let stream = stream();
    let offsets = up(&stream, &[0u64, 3]);
    type Sorts<'s> = &'s dyn Fn(&mut DeviceBuffer<u32>, &mut ViewMut<'_, [u8; 8]>) -> Op<()>;
    let sorts: [Sorts<'_>; 4] = [
        &|keys, values| stream.sort_by_key(keys, values),
        &|keys, values| stream.sort_by_key_descending(keys, values),
        &|keys, values| stream.segmented_sort_by_key(keys, values, &offsets),
        &|keys, values| stream.segmented_sort_by_key_descending(keys, values, &offsets),
    ];
    let numbers = [30u64, 10, 20];
    for (at, sort) in sorts.iter().enumerate() {
        let expected = if at % 2 == 0 { [10, 20, 30] } else { [30, 20, 10] };
        for from in 0..9 {
            let mut bytes = up(&stream, &[0u8; 33]);
            let mut values = bytes.slice_mut(from..from + 24).expect("a part");
            stream.fill(&mut values, 0).queued().expect("a fill");
            let all: Vec<u8> = numbers.iter().flat_map(|value| value.to_ne_bytes()).collect();
            stream.copy(&up(&stream, &all), &mut values).queued().expect("a copy");
            let mut keys = up(&stream, &[3u32, 1, 2]);
            let before = stream.submitted();
            let mut values = values.cast::<[u8; 8]>().expect("elements");
            let sorted = sort(&mut keys, &mut values).queued();
            let start = values.device_ptr();
            if start.is_multiple_of(8) {
                sorted.expect("a sort");
                let sorted = stream.download(&values).synchronize().expect("data");
                assert_eq!(sorted, expected.map(u64::to_ne_bytes), "sort {at}");
                continue;
            }
            let error = sorted.expect_err("between two words");
            let ErrorDetail::Misaligned { what: "the values", ptr, alignment: 8, .. } =
                error.detail()
            else {
                panic!("sort {at} from {from}: {error}");
            };
            assert_eq!((*ptr, stream.submitted()), (start, before), "sort {at} from {from}");
            let error = stream.download(&keys).synchronize().expect_err("poisoned");
            assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
        }
    }
    let mut bytes = up(&stream, &[0u8; 14]);
    let mut odd = bytes.slice_mut(1..13).expect("a part").cast::<[u8; 4]>().expect("elements");
    let error = stream.sort_by_key(&mut up(&stream, &[3u32, 1, 2]), &mut odd).queued();
    let error = error.expect_err("between two words");
    assert!(matches!(error.detail(), ErrorDetail::Misaligned { alignment: 4, .. }), "{error}");
}

/// As of IEEE 754's `minimum` and `maximum`; of `f64` as of a comparison, so that the first of both zeros and of NaNs is kept.
#[test]
fn both_zeros_and_any_nan() {
    fn check<T: Plain>(stream: &Stream, minus: u64, odd_nan: u64, nan: u64) {
        let of =
            |bits: &[u64]| up(stream, &bits.iter().map(|x| T::of_bits(*x)).collect::<Vec<_>>());
        let same_bits = |got: T, expected: u64, what: &str| {
            let bits = gpu_await::bytemuck::bytes_of(&got);
            let expected = expected.to_le_bytes();
            let what = format!("{what} of {}", std::any::type_name::<T>());
            assert_eq!(bits, &expected[..bits.len()], "{what}: {got:?}");
        };
        for (op, zeros) in [(ReduceOp::Min, minus), (ReduceOp::Max, 0)] {
            let first = T::of_bits(if op == ReduceOp::Min { 0 } else { minus });
            for x in [[0, minus], [minus, 0]] {
                let x = of(&x);
                let got = stream.reduce(&x, op, first).synchronize().expect("a value");
                same_bits(got, zeros, "zeros");
                let alone = match op {
                    ReduceOp::Min => stream.min(&x).synchronize(),
                    _ => stream.max(&x).synchronize(),
                };
                same_bits(alone.expect("a value"), zeros, "zeros");
                let mut scanned = of(&[0, 0]);
                let put = stream.inclusive_scan(&x, op, &mut scanned).queued();
                put.expect("a scan");
                same_bits(down(stream, &scanned)[1], zeros, "scanned zeros");
                stream.exclusive_scan(&x, op, first, &mut scanned).queued().expect("a scan");
                let mut reduced = of(&[0]);
                let offsets = up(stream, &[0u64, 2]);
                let put = stream.segmented_reduce(&x, &offsets, op, first, &mut reduced).queued();
                put.expect("a reduction");
                same_bits(down(stream, &reduced)[0], zeros, "zeros of a segment");
            }
            let x = of(&[0, odd_nan, 0]);
            same_bits(stream.reduce(&x, op, first).synchronize().expect("a value"), nan, "a NaN");
            let mut scanned = of(&[0, 0, 0]);
            stream.inclusive_scan(&x, op, &mut scanned).queued().expect("a scan");
            let got = down(stream, &scanned);
            same_bits(got[0], 0, "in front of a NaN");
            same_bits(got[1], nan, "a scanned NaN");
            same_bits(got[2], nan, "behind a NaN");
            stream.exclusive_scan(&x, op, first, &mut scanned).queued().expect("a scan");
            same_bits(down(stream, &scanned)[2], nan, "behind a NaN");
            let mut reduced = of(&[0]);
            let offsets = up(stream, &[0u64, 3]);
            stream.segmented_reduce(&x, &offsets, op, first, &mut reduced).queued().expect("put");
            same_bits(down(stream, &reduced)[0], nan, "a NaN of a segment");
        }
    }
    let stream = stream();
    check::<f32>(&stream, 1 << 31, 0xffc1_2345, 0x7fff_ffff);
    check::<f16>(&stream, 1 << 15, 0xfe12, 0x7fff);
    check::<bf16>(&stream, 1 << 15, 0xffd2, 0x7fff);
    // The kernels of `f64` compare.
    let odd = f64::from_bits(0xfff8_0000_1234_5678);
    let scanned = |x: &[f64], op| {
        let mut out = up(&stream, x);
        stream.inclusive_scan(&up(&stream, x), op, &mut out).queued().expect("a scan");
        down(&stream, &out).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    for op in [ReduceOp::Min, ReduceOp::Max] {
        assert_eq!(scanned(&[0.0, -0.0], op), [0, 0]);
        assert_eq!(scanned(&[-0.0, 0.0], op), [1 << 63, 1 << 63]);
        assert_eq!(scanned(&[1.0, odd, f64::NAN], op)[1..], [odd.to_bits(); 2]);
    }
    let least = stream.min(&up(&stream, &[1.0, odd])).synchronize().expect("a value");
    assert_eq!(least.to_bits(), odd.to_bits());
}

/// Each call of the driver refused in turn: an error, or the right values; and nothing is left behind.
#[test]
fn every_call_refused_once() {
    each_call_refused(40, |stream, refuse, which| {
        let x: Vec<u32> = (0..500).map(|at| at * 7 % 501).collect();
        let buffer = up(stream, &x);
        let mut kept = up(stream, &x);
        let mut count = stream.zeros::<u64>(1).queued().expect("memory");
        refuse();
        let condition = Compare::Less(250);
        stream.copy_if_into(&buffer, condition, &mut kept, &mut count).abandon();
        stream.sort(&mut kept.up_to_mut(&count).expect("one")).abandon();
        let mut sums = stream
            .zeros::<u32>(500)
            .queued()
            .or_else(|_| stream.zeros::<u32>(500).queued())
            .expect("memory");
        let kept_now = kept.up_to(&count).expect("one");
        stream.inclusive_scan(&kept_now, ReduceOp::Sum, &mut sums).abandon();
        let expected: Vec<u32> = x.iter().copied().filter(|x| *x < 250).collect();
        if let Ok(sum) = stream.sum(&kept.up_to(&count).expect("one")).synchronize() {
            assert_eq!(sum, expected.iter().map(|x| u64::from(*x)).sum::<u64>(), "{which}");
        }
        if let Ok(most) = stream.max(&sums).synchronize() {
            assert_eq!(most, expected.iter().sum::<u32>(), "{which}");
        }
    });
}

/// What a list was ended by was written where the algorithm was called, not where that calls what it consists of.
#[tokio::test]
async fn reports_name_the_callers_line() -> gpu_await::Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut x = stream.upload((0..5_000_u32).rev().collect::<Vec<_>>()).queued()?;
    let flags = stream.full(5_000, 1_u8).queued()?;
    let mut places = stream.zeros::<u64>(5_000).queued()?;
    let mut top = stream.empty::<u32>(3).queued()?;
    let mut region = Region::new();
    for _ in 0..3 {
        let op = stream.replay(&mut region, |q| {
            q.sort(&mut x)?;
            let sum = q.sum(&x)?;
            let count = q.positions(&flags, &mut places)?;
            q.top_k(&x, &mut top)?;
            Ok((sum, count, q.max(&x)?))
        });
        let (sum, count, most) = op.await?;
        assert_eq!((sum, count, most), (4_999 * 2_500, 5_000, 4_999));
        let mut sites = 0;
        for list in region.last_run() {
            let told = list.to_string();
            for site in told.split(" at ").skip(1) {
                assert!(site.starts_with(file!()), "{told}");
                sites += 1;
            }
        }
        // A GPU takes all of it as one graph, once it is compiled; a host device runs parts of it as host functions.
        assert!(sites > 0 || device.kind() == DeviceKind::Cuda, "{:?}", region.last_run());
    }
    Ok(())
}
