//! What documentation says is the same in every run: on a GPU 30 runs over 30 million elements, compared bit by bit.

use gpu_await::{DeviceBuffer, DeviceKind, Element, Op, Stream};
use gpu_await_algorithms::{Algorithms, Compare, ReduceOp, Reproducible, Scalar, Sequence};
use half::{bf16, f16};

use crate::under_test::alone;

/// Elements, and how many runs are compared.
fn size(stream: &Stream) -> (usize, u32) {
    match stream.device().kind() {
        DeviceKind::Host => (30_000, 2),
        _ => (30_000_000, 30),
    }
}

/// Numbers whose sums are rounded, in every order in another way.
fn numbers<T: Scalar>(len: usize, of: fn(f64) -> T) -> Vec<T> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    (0..len).map(|_| of(next() * 2.0 - 1.0)).collect()
}

/// Factors whose products stay near 1.
fn factors<T: Scalar>(len: usize, of: fn(f64) -> T) -> Vec<T> {
    (0..len).map(|at| of(if at % 2 == 0 { 1.25 } else { 0.8 })).collect()
}

fn bits<T: Element>(stream: &Stream, x: &DeviceBuffer<T>) -> Vec<u8> {
    let found = stream.download(x).synchronize().expect("data");
    bytemuck::cast_slice(&found).to_vec()
}

/// Runs it again and again.
fn same_each_time<T: Element>(
    stream: &Stream,
    what: &str,
    (out, runs): (&mut DeviceBuffer<T>, u32),
    put: impl Fn(&mut DeviceBuffer<T>) -> Op<()>,
) {
    let mut expected = None;
    for run in 0..runs {
        put(out).queued().expect(what);
        let found = bits(stream, out);
        match &expected {
            None => expected = Some(found),
            // Not `assert_eq`, which would print all of it.
            Some(expected) => assert!(found == *expected, "{what}: run {run} differs"),
        }
    }
}

#[test]
fn the_same_bits_in_every_run() {
    fn check<T: Scalar>(stream: &Stream, of: fn(f64) -> T) {
        let (len, runs) = size(stream);
        let x = stream.upload(numbers(len, of)).queued().expect("memory");
        let y = stream.upload(factors(len, of)).queued().expect("memory");
        let mut out = stream.empty::<T>(len).queued().expect("memory");
        let (sum, product) = (Reproducible(ReduceOp::Sum), Reproducible(ReduceOp::Product));
        let init = of(0.5);
        let name = std::any::type_name::<T>();
        let each = &mut out;
        let what = format!("sums of {name}");
        same_each_time(stream, &what, (each, runs), |out| stream.inclusive_scan(&x, sum, out));
        let what = format!("sums of {name} from a first value");
        let scan = |out: &mut _| stream.exclusive_scan(&x, sum, init, out);
        same_each_time(stream, &what, (each, runs), scan);
        let what = format!("products of {name}");
        same_each_time(stream, &what, (each, runs), |out| stream.inclusive_scan(&y, product, out));
        let scan = |out: &mut _| stream.exclusive_scan(&y, product, init, out);
        same_each_time(stream, &what, (each, runs), scan);
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let what = format!("{op:?} of {name}");
            same_each_time(stream, &what, (each, runs), |out| stream.inclusive_scan(&x, op, out));
        }
    }
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    check::<f32>(&stream, |value| value as f32);
    check::<f64>(&stream, |value| value);
    check::<f16>(&stream, f16::from_f64);
    check::<bf16>(&stream, bf16::from_f64);
}

/// Every verb that promises it by itself.
#[test]
fn reductions_are_the_same_in_every_run() {
    fn check<T: Scalar>(stream: &Stream, of: fn(f64) -> T) {
        let (len, runs) = size(stream);
        let x = stream.upload(numbers(len, of)).queued().expect("memory");
        let y = stream.upload(factors(len, of)).queued().expect("memory");
        let name = std::any::type_name::<T>();
        let mut total = stream.empty::<T::Total>(1).queued().expect("memory");
        let what = format!("the sum of {name}");
        same_each_time(stream, &what, (&mut total, runs), |out| stream.sum_into(&x, out));
        let what = format!("the sum of products of {name}");
        same_each_time(stream, &what, (&mut total, runs), |out| stream.dot_into(&x, &y, out));
        let mut one = stream.empty::<T>(1).queued().expect("memory");
        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            let what = format!("{op:?} of {name}");
            let put = |out: &mut _| stream.reduce_into(&y, op, of(0.5), out);
            same_each_time(stream, &what, (&mut one, runs), put);
        }
        // Short segments, and long ones.
        for each in [len / 100_000 + 1, len / 7] {
            let mut offsets: Vec<u64> = (0..len as u64).step_by(each).collect();
            offsets.push(len as u64);
            let mut out = stream.empty::<T>(offsets.len() - 1).queued().expect("memory");
            let offsets = stream.upload(offsets).queued().expect("memory");
            for op in [ReduceOp::Sum, ReduceOp::Product] {
                let what = format!("{op:?} of segments of {each} {name}");
                let put = |out: &mut _| stream.segmented_reduce(&x, &offsets, op, of(0.5), out);
                same_each_time(stream, &what, (&mut out, runs), put);
            }
        }
        let mut count = stream.empty::<u64>(1).queued().expect("memory");
        let what = format!("a count of {name}");
        let put = |out: &mut _| stream.count_if_into(&x, Compare::Less(of(0.0)), out);
        same_each_time(stream, &what, (&mut count, runs), put);
    }
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    check::<f32>(&stream, |value| value as f32);
    check::<f64>(&stream, |value| value);
    check::<f16>(&stream, f16::from_f64);
}

/// In one order it is as right as otherwise: beside sums in `f64`, at every length around tiles, also where the device alone knows it.
#[test]
fn one_order_is_as_right() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    let lengths: &[usize] = match device.kind() {
        DeviceKind::Host => &[0, 1, 100, 5_000],
        _ => &[0, 1, 100, 1_920, 2_304, 2_305, 3_072, 3_073, 6_144, 6_145, 100_003, 9_500_001],
    };
    for &len in lengths {
        let x: Vec<f32> = numbers(len, |value| value as f32);
        let mut so_far = 0.0_f64;
        let sums: Vec<f64> = x
            .iter()
            .map(|x| {
                so_far += f64::from(*x);
                so_far
            })
            .collect();
        // Steps of sums of up to so many numbers below 1.
        let near = |found: f32, expected: f64| (f64::from(found) - expected).abs() <= 0.05;
        let buffer = stream.upload(x.clone()).queued().expect("memory");
        let mut out = stream.zeros::<f32>(len).queued().expect("memory");
        let by = Reproducible(ReduceOp::Sum);
        stream.inclusive_scan(&buffer, by, &mut out).queued().expect("queued");
        let found = stream.download(&out).synchronize().expect("data").to_vec();
        let wrong = found.iter().zip(&sums).position(|(found, sum)| !near(*found, *sum));
        assert_eq!(wrong, None, "of {len}");
        // The order depends on the elements in front alone.
        let some = len - len / 3;
        let count = stream.full(1, some as u64).queued().expect("memory");
        let mut again = stream.full(len, -7.0_f32).queued().expect("memory");
        let known = buffer.up_to(&count).expect("one");
        stream.inclusive_scan(&known, by, &mut again).queued().expect("queued");
        let again = stream.download(&again).synchronize().expect("data").to_vec();
        assert!(again[..some] == found[..some], "{some} of {len}");
        assert!(again[some..].iter().all(|rest| *rest == -7.0), "{some} of {len}");
        stream.exclusive_scan(&buffer, by, 2.0, &mut out).queued().expect("queued");
        let found = stream.download(&out).synchronize().expect("data").to_vec();
        let before = std::iter::once(0.0).chain(sums.iter().copied());
        let wrong = found.iter().zip(before).position(|(found, sum)| !near(*found, sum + 2.0));
        assert_eq!(wrong, None, "from a first value, of {len}");
    }
}
