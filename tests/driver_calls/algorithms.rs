//! Algorithms as the driver sees them: an image once, then some launches, on the stream that they were called on.

use gpu_await::{Completion, Device, DeviceBuffer, DeviceBuilder, ErrorDetail, Op, Region, Stream};
use gpu_await_algorithms::{
    AlgorithmFamily, Algorithms, BitOp, Compare, Preload, ReduceBy, ReduceOp, Reproducible,
};

use super::{Line, Live, OURS, StandIn, async_under_the_stand_in, device_with, my_calls, soon};

const LEN: usize = 100_000;

/// The launches, and whatever else is no memory of the pool and no context.
fn calls(driver: &StandIn) -> Vec<String> {
    let mut calls = my_calls(driver);
    calls.retain(|line| {
        let name = Line(line).name();
        !name.starts_with("cuCtx")
            && !name.starts_with("cuMemAlloc")
            && !name.starts_with("cuMemFree")
    });
    calls
}

fn launches(driver: &StandIn) -> usize {
    let calls = calls(driver);
    assert!(calls.iter().all(|line| Line(line).name() == "cuLaunchKernel"), "{calls:?}");
    let mut streams: Vec<_> = calls.iter().map(|line| Line(line).value("stream")).collect();
    streams.dedup();
    assert!(streams.len() <= 1 && streams != [None], "{calls:?}");
    driver.clear();
    calls.len()
}

#[test]
fn all_is_on_the_stream() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut x = stream.full(LEN, 1u32).queued().unwrap();
        let mut y = stream.full(LEN, 1u32).queued().unwrap();
        let mut sum = stream.zeros::<u64>(1).queued().unwrap();
        use AlgorithmFamily::{Reduce, Scan, Select, Sort};
        device.preload::<u32>(&[Reduce, Scan, Select, Sort]).await.unwrap();
        let mut all = |launches: &dyn Fn(&StandIn) -> usize| {
            let mut counts = Vec::new();
            let few = x.slice(..100).unwrap();
            stream.sum_into(&few, &mut sum).queued().unwrap();
            counts.push(launches(driver));
            stream.sum_into(&x, &mut sum).queued().unwrap();
            counts.push(launches(driver));
            stream.inclusive_scan(&x, ReduceOp::Sum, &mut y).queued().unwrap();
            counts.push(launches(driver));
            stream.copy_if_into(&x, Compare::Less(7), &mut y, &mut sum).queued().unwrap();
            counts.push(launches(driver));
            stream.sort(&mut y.slice_mut(..100).unwrap()).queued().unwrap();
            counts.push(launches(driver));
            stream.sort(&mut x).queued().unwrap();
            counts.push(launches(driver));
            counts
        };
        // Counts, offsets, four passes, and the zeroes in front.
        all(&|_| 0);
        driver.clear();
        assert_eq!(all(&launches), [1, 2, 2, 2, 1, 7]);
        // Two images for each of reductions, scans and selections, three of sorts.
        assert_eq!(driver.live("module") - OURS, 9);
        soon(stream.done()).await.unwrap();
    });
}

/// Every verb's kernels are found, and take what they are passed.
#[test]
fn every_verb_is_launched() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        fn all<T: gpu_await_algorithms::Scalar>(
            stream: &gpu_await::Stream,
            zero: T,
            one: T,
        ) -> gpu_await::Result<()> {
            let x = stream.full(LEN, one).queued()?;
            let flags = stream.zeros::<u8>(LEN).queued()?;
            let (mut y, mut z) = (stream.full(LEN, one).queued()?, stream.full(LEN, one).queued()?);
            let (mut values, mut wide) =
                (stream.zeros::<f32>(LEN).queued()?, stream.zeros::<f64>(LEN).queued()?);
            let (mut value, mut total) = (stream.full(1, one).queued()?, stream.empty(1).queued()?);
            let mut count = stream.zeros::<u64>(1).queued()?;
            let mut places = stream.zeros::<u64>(LEN).queued()?;
            stream.sum_into(&x, &mut total).queued()?;
            stream.dot_into(&x, &x, &mut total).queued()?;
            stream.min_into(&x, &mut value).queued()?;
            stream.max_into(&x, &mut value).queued()?;
            stream.arg_min_into(&x, &mut count).queued()?;
            stream.arg_max_into(&x, &mut count).queued()?;
            stream.count_if_into(&x, Compare::Less(one), &mut count).queued()?;
            for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
                stream.reduce_into(&x, op, one, &mut value).queued()?;
                for offsets in [3, LEN] {
                    let offsets = places.slice(..offsets)?;
                    let mut each = y.slice_mut(1..offsets.len())?;
                    stream.segmented_reduce(&x, &offsets, op, one, &mut each).queued()?;
                }
                stream.inclusive_scan(&x, op, &mut y).queued()?;
                stream.exclusive_scan(&x, op, one, &mut y).queued()?;
            }
            let condition = Compare::Less(one);
            stream.copy_if_into(&x, condition, &mut y, &mut count).queued()?;
            stream.partition_into(&x, condition, &mut y, &mut z, &mut count).queued()?;
            stream.unique_into(&x, &mut y, &mut count).queued()?;
            stream.run_length_encode_into(&x, &mut y, &mut places, &mut count).queued()?;
            for bins in [7, 5_000] {
                let mut counts = stream.empty(bins).queued()?;
                stream.histogram(&x, zero..=one, &mut counts).queued()?;
                stream.histogram_between(&x, &x.slice(..=bins)?, &mut counts).queued()?;
            }
            stream.select_into(&x, &flags, &mut y, &mut count).queued()?;
            stream.partition_flagged_into(&x, &flags, &mut y, &mut z, &mut count).queued()?;
            stream.positions_into(&flags, &mut places, &mut count).queued()?;
            for offsets in [2, LEN] {
                let offsets = places.slice(..offsets)?;
                stream.segmented_sort(&mut y, &offsets).queued()?;
                stream.segmented_sort_descending(&mut y.slice_mut(..9)?, &offsets).queued()?;
                stream.segmented_sort_by_key(&mut z, &mut values, &offsets).queued()?;
                stream.segmented_sort_by_key_descending(&mut z, &mut wide, &offsets).queued()?;
            }
            let many = stream.full(1 << 20, one).queued()?;
            stream.top_k(&many, &mut y.slice_mut(..9)?).queued()?;
            stream.bottom_k_places(&many, &mut z, &mut places.slice_mut(..LEN)?).queued()?;
            let mut at = places.slice_mut(..9)?;
            stream.bottom_k_places(&many, &mut y.slice_mut(..9)?, &mut at).queued()?;
            for len in [1, 100, LEN] {
                stream.top_k(&x, &mut y.slice_mut(..len)?).queued()?;
                let (mut least, mut at) = (y.slice_mut(..len)?, places.slice_mut(..len)?);
                stream.bottom_k_places(&x, &mut least, &mut at).queued()?;
            }
            for len in [100, LEN] {
                stream.sort(&mut y.slice_mut(..len)?).queued()?;
                stream.sort_descending(&mut y.slice_mut(..len)?).queued()?;
                let mut keys = z.slice_mut(..len)?;
                stream.sort_by_key(&mut keys, &mut values.slice_mut(..len)?).queued()?;
                stream.sort_by_key_descending(&mut keys, &mut wide.slice_mut(..len)?).queued()?;
            }
            Ok(())
        }
        fn bits<T: gpu_await_algorithms::Scalar>(
            stream: &gpu_await::Stream,
            one: T,
        ) -> gpu_await::Result<()>
        where
            BitOp: ReduceBy<T>,
        {
            let x = stream.full(LEN, one).queued()?;
            let (mut y, mut value) = (stream.empty(LEN).queued()?, stream.empty(1).queued()?);
            for len in [100, LEN] {
                stream.reduce_into(&x.slice(..len)?, BitOp::Xor, one, &mut value).queued()?;
            }
            stream.inclusive_scan(&x, BitOp::And, &mut y).queued()?;
            stream.exclusive_scan(&x, BitOp::Or, one, &mut y).queued()?;
            let offsets = stream.zeros::<u64>(LEN).queued()?;
            for offsets in [offsets.slice(..3)?, offsets.view()] {
                let mut each = y.slice_mut(1..offsets.len())?;
                stream.segmented_reduce(&x, &offsets, BitOp::Xor, one, &mut each).queued()?;
            }
            Ok(())
        }
        fn rows<T: gpu_await_algorithms::Scalar<Total = f32>>(
            stream: &gpu_await::Stream,
            one: T,
        ) -> gpu_await::Result<()> {
            let x = stream.full(LEN, one).queued()?;
            let (mut y, mut values) = (stream.empty(LEN).queued()?, stream.empty(1).queued()?);
            let mut places = stream.empty(1).queued()?;
            for columns in [100, LEN] {
                let x = x.slice(..columns)?;
                let mut y = y.slice_mut(..columns)?;
                stream.sum_rows(&x, columns, &mut values).queued()?;
                stream.arg_max_rows(&x, columns, &mut places).queued()?;
                stream.softmax_rows(&x, columns, &mut y).queued()?;
                stream.layer_norm_rows(&x, &x, &x, 1.0, &mut y).queued()?;
            }
            Ok(())
        }
        rows(&stream, half::f16::ONE).unwrap();
        rows(&stream, half::bf16::ONE).unwrap();
        rows(&stream, 1.0f32).unwrap();
        bits(&stream, 1u8).unwrap();
        bits(&stream, 1i16).unwrap();
        bits(&stream, 1i64).unwrap();
        all(&stream, 0, 1u8).unwrap();
        all(&stream, half::f16::ZERO, half::f16::ONE).unwrap();
        all(&stream, 0, 1i32).unwrap();
        all(&stream, 0.0, 1.0f64).unwrap();
        assert!(driver.live("module") > OURS);
        soon(stream.done()).await.unwrap();
    });
}

/// A device on which launches of selections take a tile each.
fn in_small_parts(options: DeviceBuilder) -> Device {
    options.part_of_selections(1).cuda(0).expect("the stand-in has a device")
}

/// The stand-in runs no kernel: where a count should be there is what was there before.
#[test]
fn a_kernel_that_leaves_no_count() {
    async_under_the_stand_in(async |_| {
        let bad = |op, found: Option<ErrorDetail>| {
            let expected = ErrorDetail::BadCount { op, found: u64::MAX, most: LEN };
            assert_eq!(found, Some(expected));
        };
        let detail = |error: gpu_await::Error| error.detail().clone();
        let devices = [device_with(Completion::Adaptive), in_small_parts(Device::builder())];
        for device in devices {
            let stream = device.stream().unwrap();
            let x = stream.full(LEN, 1u32).queued().unwrap();
            let flags = stream.full(LEN, 1u8).queued().unwrap();
            let (y, z) = (stream.full(LEN, 1u32), stream.full(LEN, 1u64));
            let (y, z) = (&mut y.await.unwrap(), &mut z.await.unwrap());
            let found = soon(stream.copy_if(&x, Compare::Less(7), y)).await;
            bad("copy_if", found.err().map(detail));
            let found = soon(stream.unique(&x, y)).await;
            bad("unique", found.err().map(detail));
            let found = soon(stream.positions(&flags, z)).await;
            bad("positions", found.err().map(detail));
            let found = soon(stream.run_length_encode(&x, y, z)).await;
            bad("run_length_encode", found.err().map(detail));
            let batched = stream.batch(|q| q.select(&x, &flags, y));
            bad("select", soon(batched).await.err().map(detail));
            let mut region = Region::new();
            for _ in 0..2 {
                let replayed = stream.replay(&mut region, |q| q.select(&x, &flags, y));
                bad("select", soon(replayed).await.err().map(detail));
            }
        }
    });
}

/// In verify mode that is found also where the count stays on the device.
#[test]
fn no_count_on_the_device() {
    async_under_the_stand_in(async |_| {
        let device = Device::builder().verify(true).cuda(0).unwrap();
        let stream = device.stream().unwrap();
        let x = stream.full(LEN, 1u32).queued().unwrap();
        let mut y = stream.full(LEN, 1u32).queued().unwrap();
        let mut count = stream.full(1, 0u64).queued().unwrap();
        let error = stream.copy_if_into(&x, Compare::Less(7), &mut y, &mut count).queued();
        let expected = ErrorDetail::BadCount { op: "copy_if", found: u64::MAX, most: LEN };
        assert_eq!(*error.unwrap_err().detail(), expected);
        for read in [stream.download(&count).await.map(drop), stream.download(&y).await.map(drop)] {
            let error = read.unwrap_err();
            assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
        }
    });
}

/// Two launches for each part, and one that marks what parts leave to one another as unwritten.
#[test]
fn parts_are_launched_one_by_one() {
    async_under_the_stand_in(async |driver| {
        let device = in_small_parts(Device::builder());
        let stream = device.stream().unwrap();
        let x = stream.full(LEN, 1u32).queued().unwrap();
        let (y, count) = (stream.full(LEN, 1u32), stream.full(1, 0u64));
        let (y, count) = (&mut y.await.unwrap(), &mut count.await.unwrap());
        // Loads them.
        stream.unique_into(&x, y, count).queued().unwrap();
        // `unique` of `u32` takes 4,608 elements in a tile of its PTX.
        for (parts, len) in [(1, 0), (1, 4_608), (2, 4_609), (2, 9_216), (3, 9_217), (22, LEN)] {
            let some = x.slice(..len).unwrap();
            driver.clear();
            stream.unique_into(&some, y, count).queued().unwrap();
            let calls = calls(driver);
            let launches = calls.iter().filter(|line| Line(line).name() == "cuLaunchKernel");
            let fills = calls.iter().filter(|line| Line(line).name().starts_with("cuMemset"));
            let (launches, fills) = (launches.count(), fills.count());
            assert_eq!((launches, fills), (2 * parts, usize::from(parts > 1)), "of {len}");
            assert_eq!(calls.len(), launches + fills, "{calls:?}");
        }
        soon(stream.done()).await.unwrap();
    });
}

/// In one order a scan of more than a tile has three launches; where the order does not show it stays at two.
#[test]
fn scans_in_one_order() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        fn check<T: gpu_await_algorithms::Scalar>(
            stream: &Stream,
            driver: &StandIn,
            one: T,
            some: usize,
        ) {
            let x = stream.full(LEN, one).queued().unwrap();
            let mut y = stream.full(LEN, one).queued().unwrap();
            let (sum, product) = ((ReduceOp::Sum, some), (ReduceOp::Product, some));
            for (op, of_many) in [sum, product, (ReduceOp::Min, 2), (ReduceOp::Max, 2)] {
                let op = Reproducible(op);
                let mut counts = |len: usize| {
                    let (x, mut y) = (x.slice(..len).unwrap(), y.slice_mut(..len).unwrap());
                    driver.clear();
                    stream.inclusive_scan(&x, op, &mut y).queued().unwrap();
                    let inclusive = calls(driver).len();
                    driver.clear();
                    stream.exclusive_scan(&x, op, one, &mut y).queued().unwrap();
                    (inclusive, calls(driver).len())
                };
                // The first ones load them.
                counts(100);
                counts(LEN);
                assert_eq!(counts(100), (2, 2), "{op:?}");
                assert_eq!(counts(LEN), (of_many, of_many), "{op:?}");
            }
        }
        check(&stream, driver, 1.0f32, 3);
        check(&stream, driver, half::f16::ONE, 3);
        check(&stream, driver, 1.0f64, 3);
        check(&stream, driver, 1u32, 2);
        soon(stream.done()).await.unwrap();
    });
}

/// With the switch no machine code is loaded, of which the stand-in knows none: each image is loaded once.
#[test]
fn general_images_alone() {
    async_under_the_stand_in(async |driver| {
        for general in [false, true] {
            driver.clear();
            let device = Device::builder().general_images(general).cuda(0).unwrap();
            let stream = device.stream().unwrap();
            device
                .preload::<f32>(&[AlgorithmFamily::Reduce, AlgorithmFamily::Select])
                .await
                .unwrap();
            let x = stream.full(9, 1.0f32).queued().unwrap();
            assert!(soon(stream.sum(&x)).await.is_ok());
            let loads: Vec<String> = driver
                .calls()
                .into_iter()
                .filter(|line| Line(line).name().starts_with("cuLibraryLoadData"))
                .collect();
            let refused = loads.len() as i64 - driver.live("module");
            assert_eq!(refused == 0, general, "{loads:?}");
            drop((x, stream));
            soon(device.close(std::time::Duration::from_secs(60))).await.unwrap();
        }
    });
}

/// What verbs are tried on.
struct Arrays {
    x: DeviceBuffer<u32>,
    many: DeviceBuffer<u32>,
    offsets: DeviceBuffer<u64>,
    y: DeviceBuffer<u32>,
    numbers: DeviceBuffer<u64>,
    count: DeviceBuffer<u64>,
}

/// A verb, and whether it writes `numbers`, and not `y`.
type Verb = (&'static str, bool, fn(&Stream, &mut Arrays) -> Op<()>);

const IN_STEPS: [Verb; 9] = [
    ("reduce", false, |s, a| {
        s.reduce_into(&a.x, ReduceOp::Sum, 0, &mut a.y.slice_mut(..1).unwrap())
    }),
    ("segmented_reduce", false, |s, a| {
        let mut out = a.y.slice_mut(..2).unwrap();
        s.segmented_reduce(&a.x, &a.offsets, ReduceOp::Max, 0, &mut out)
    }),
    ("a scan in one order", false, |s, a| {
        let mut sums = a.y.view_mut().cast::<f32>().unwrap();
        let x = a.x.view().cast::<f32>().unwrap();
        s.inclusive_scan(&x, Reproducible(ReduceOp::Sum), &mut sums)
    }),
    ("run_length_encode", true, |s, a| {
        s.run_length_encode_into(&a.x, &mut a.y, &mut a.numbers, &mut a.count)
    }),
    ("histogram", true, |s, a| s.histogram(&a.x, 0..=9, &mut a.numbers)),
    ("top_k", false, |s, a| s.top_k(&a.x, &mut a.y.slice_mut(..9).unwrap())),
    ("bottom_k_places", true, |s, a| {
        let mut places = a.numbers.slice_mut(..9).unwrap();
        s.bottom_k_places(&a.x, &mut a.y.slice_mut(..9).unwrap(), &mut places)
    }),
    ("top_k of many", false, |s, a| s.top_k(&a.many, &mut a.y.slice_mut(..9).unwrap())),
    ("segmented_sort_by_key", true, |s, a| {
        s.segmented_sort_by_key(&mut a.y, &mut a.numbers, &a.offsets)
    }),
];

/// Memory or a launch of an algorithm refused: an error, outputs that nobody reads, and nothing that lives on.
#[test]
fn any_step_refused() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut a = Arrays {
            x: stream.full(LEN, 1u32).queued().unwrap(),
            many: stream.full(1 << 20, 1u32).queued().unwrap(),
            offsets: stream.upload(vec![0, 9, LEN as u64]).queued().unwrap(),
            y: stream.full(LEN, 1u32).queued().unwrap(),
            numbers: stream.full(LEN, 1u64).queued().unwrap(),
            count: stream.full(1, 1u64).queued().unwrap(),
        };
        for (name, writes_numbers, verb) in IN_STEPS {
            verb(&stream, &mut a).queued().unwrap();
            soon(stream.done()).await.unwrap();
            let before = Live::settled(driver).of("memory");
            for call in ["cuMemAllocFromPoolAsync", "cuLaunchKernel"] {
                for nth in 1.. {
                    let what = format!("{name}: {call} {nth}");
                    assert!(nth < 40, "{what}");
                    // No memory that waits to be freed helps out.
                    soon(stream.done()).await.unwrap();
                    soon(device.trim(0)).await.unwrap();
                    // The second time as well: what an allocation does without may make room for it.
                    driver.fail(call, nth, 1);
                    driver.fail(call, nth + 1, 1);
                    let result = verb(&stream, &mut a).queued();
                    if driver.forgive() == 2 {
                        result.unwrap_or_else(|error| panic!("{what}: {error}"));
                        break;
                    }
                    assert!(result.is_err(), "{what}");
                    let read = match writes_numbers {
                        true => soon(stream.download(&a.numbers)).await.map(drop),
                        false => soon(stream.download(&a.y)).await.map(drop),
                    };
                    let error = read.expect_err(&what);
                    assert!(
                        matches!(error.detail(), ErrorDetail::Upstream { .. }),
                        "{what}: {error}"
                    );
                    stream.fill(&mut a.y, 1).queued().unwrap();
                    stream.fill(&mut a.numbers, 1).queued().unwrap();
                    stream.fill(&mut a.count, 1).queued().unwrap();
                }
            }
            soon(stream.done()).await.unwrap();
            assert_eq!(Live::settled(driver).of("memory"), before, "{name}");
        }
    });
}
