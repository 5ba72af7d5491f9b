//! Selections around the lengths at which their kernels end a part and begin the next, and at which integers of 32 bits end.
//!
//! On a GPU in arrays of up to 2^32 + 1,003 elements: up to 20 GB; a test that finds less says so and does nothing. And everywhere in
//! parts of one tile each, in which a GPU has every seam in arrays that the host looks through. On a host device, where one launch takes
//! all, the same with a few thousand elements.

use gpu_await::{DeviceBuffer, DeviceKind, Graph, In, InOut, Out, Region, Stream, testing};
use gpu_await_algorithms::{Algorithms, Compare, Scalar, Sequence, transform};

use crate::under_test::alone;

const MANIFEST: &str = include_str!("../../kernels/manifest.rs");

/// The values of a fact, in all images.
fn facts(fact: &str) -> Vec<u64> {
    let beginning = format!("(\"{fact}\", ");
    let after = MANIFEST.split(&beginning as &str).skip(1);
    let mut values: Vec<u64> = after
        .map(|rest| rest.split(')').next().and_then(|value| value.parse().ok()).expect("a number"))
        .collect();
    values.sort_unstable();
    values.dedup();
    assert!(!values.is_empty(), "{fact}");
    values
}

/// Whether so much memory is free; says it if not.
fn has_room(stream: &Stream, bytes: u64) -> bool {
    futures::executor::block_on(stream.device().trim(0)).expect("a device");
    let free = stream.device().memory().expect("figures").free_bytes;
    let has_room = free >= bytes + (1 << 30);
    if !has_room {
        println!("not tried: {free} bytes are free, and {bytes} are needed");
    }
    has_room
}

/// Lengths at which something ends: parts, and `int`, with or without a tile. On a host device a few thousand.
fn lengths(stream: &Stream, kernel: &str) -> Vec<u64> {
    if stream.device().kind() == DeviceKind::Host {
        return vec![1, 4_095, 4_096, 4_097];
    }
    let mut lengths = vec![(1 << 31) + 77, (1 << 32) + 1_003];
    for tile in facts(&format!("{kernel}_tile")) {
        lengths.extend([(1 << 31) - tile, (1 << 31) - tile + 1]);
    }
    for part in facts(&format!("{kernel}_part")) {
        lengths.extend([part, part + 1, 2 * part + 1]);
    }
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// Places on both sides of each seam, below a length.
fn places(kernel: &str, len: u64) -> Vec<u64> {
    let mut seams = vec![1, 1 << 30, 1 << 31, 1 << 32, len - 1, 2_048];
    seams.extend(facts(&format!("{kernel}_tile")).into_iter().map(|tile| (1 << 31) - tile));
    for part in facts(&format!("{kernel}_part")) {
        seams.extend([part, 2 * part, 3 * part]);
    }
    let mut places: Vec<u64> =
        seams.into_iter().flat_map(|at| [at.saturating_sub(1), at]).collect();
    places.push(len - 1);
    places.retain(|at| *at < len);
    places.sort_unstable();
    places.dedup();
    places
}

/// All 1 but at the places, where it is 9, 10, and so on.
fn marked(stream: &Stream, len: u64, places: &[u64]) -> DeviceBuffer<u8> {
    let mut x = stream.full(len as usize, 1_u8).queued().expect("memory");
    for (value, at) in (9..).zip(places) {
        let mut one = x.slice_mut(*at as usize..*at as usize + 1).expect("it is in there");
        stream.fill(&mut one, value).queued().expect("a fill");
    }
    x
}

fn marks(places: &[u64]) -> Vec<u8> {
    (9..).take(places.len()).collect()
}

fn first<T: Scalar>(stream: &Stream, x: &DeviceBuffer<T>, count: usize) -> Vec<T> {
    let view = x.slice(..count).expect("it is as long");
    stream.download(&view).synchronize().expect("data").to_vec()
}

/// The last elements before a length.
fn last(stream: &Stream, x: &DeviceBuffer<u8>, len: u64) -> Vec<u8> {
    let len = len as usize;
    let view = x.slice(len.saturating_sub(1_000)..len).expect("it is as long");
    stream.download(&view).synchronize().expect("data").to_vec()
}

fn value(stream: &Stream, count: &DeviceBuffer<u64>) -> u64 {
    stream.download(count).synchronize().expect("a count")[0]
}

#[test]
fn comparisons_at_every_seam() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    for len in lengths(&stream, "select_if") {
        if !has_room(&stream, 2 * len) {
            continue;
        }
        let at = places("select_if", len);
        let (x, n) = (marked(&stream, len, &at), at.len());
        let mut kept = stream.zeros::<u8>(len as usize).queued().expect("memory");
        let found = stream.copy_if(&x, Compare::Greater(8), &mut kept).synchronize();
        assert_eq!(found.expect("a count"), n, "of {len}");
        assert_eq!(first(&stream, &kept, n), marks(&at), "of {len}");
        let found = stream.copy_if(&x, Compare::Less(9), &mut kept).synchronize();
        assert_eq!(found.expect("a count"), len as usize - n, "of {len}");
        let ones = kept.slice(..len as usize - n).expect("it is as long");
        let right = stream.count_if(&ones, Compare::Equal(1)).synchronize().expect("a count");
        assert_eq!(right, len as usize - n, "of {len}");
    }
}

#[test]
fn partitions_at_every_seam() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    for len in lengths(&stream, "partition_if") {
        if !has_room(&stream, 3 * len) {
            continue;
        }
        let at = places("partition_if", len);
        let (x, n) = (marked(&stream, len, &at), at.len());
        let mut kept = stream.zeros::<u8>(len as usize).queued().expect("memory");
        let mut others = stream.zeros::<u8>(len as usize).queued().expect("memory");
        let found = stream.partition(&x, Compare::Greater(8), &mut kept, &mut others).synchronize();
        assert_eq!(found.expect("a count"), n, "of {len}");
        assert_eq!(first(&stream, &kept, n), marks(&at), "of {len}");
        let right = stream.sum(&others).synchronize().expect("a sum");
        assert_eq!(right, len - n as u64, "of {len}");
    }
}

/// By flags, and where these are.
#[test]
fn flags_at_every_seam() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    for len in lengths(&stream, "select_flagged") {
        if !has_room(&stream, 4 * len) {
            continue;
        }
        let at = places("select_flagged", len);
        let (x, n) = (marked(&stream, len, &at), at.len());
        let mut flags = stream.empty::<u8>(len as usize).queued().expect("memory");
        stream.transform_flags(transform!(|x| x.gt(8)), (&x,), &mut flags).queued().expect("flags");
        let mut kept = stream.zeros::<u8>(len as usize).queued().expect("memory");
        let found = stream.select(&x, &flags, &mut kept).synchronize();
        assert_eq!(found.expect("a count"), n, "of {len}");
        assert_eq!(first(&stream, &kept, n), marks(&at), "of {len}");
        let mut others = stream.zeros::<u8>(len as usize).queued().expect("memory");
        let found = stream.partition_flagged(&x, &flags, &mut kept, &mut others).synchronize();
        assert_eq!(found.expect("a count"), n, "of {len}");
        assert_eq!(first(&stream, &kept, n), marks(&at), "of {len}");
        assert_eq!(stream.sum(&others).synchronize().expect("a sum"), len - n as u64, "of {len}");
    }
}

#[test]
fn positions_at_every_seam() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    for len in lengths(&stream, "select_places") {
        // Nine bytes for each element; of 2^32 it is more than what this file may take.
        if len > 1 << 32 || !has_room(&stream, 9 * len) {
            continue;
        }
        let at = places("select_places", len);
        let mut flags = stream.zeros::<u8>(len as usize).queued().expect("memory");
        for at in &at {
            let mut one = flags.slice_mut(*at as usize..*at as usize + 1).expect("a place");
            stream.fill(&mut one, 255).queued().expect("a fill");
        }
        let mut found = stream.zeros::<u64>(len as usize).queued().expect("memory");
        let count = stream.positions(&flags, &mut found).synchronize().expect("a count");
        assert_eq!(count, at.len(), "of {len}");
        assert_eq!(first(&stream, &found, at.len()), at, "of {len}");
    }
}

#[test]
fn runs_at_every_seam() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    for len in lengths(&stream, "unique") {
        if !has_room(&stream, 2 * len) {
            continue;
        }
        // Two runs.
        let mut x = stream.zeros::<u8>(len as usize).queued().expect("memory");
        let begins = (len as usize).saturating_sub(1_000);
        stream.fill(&mut x.slice_mut(begins..).expect("the end"), 4).queued().expect("a fill");
        let mut kept = stream.zeros::<u8>(len as usize).queued().expect("memory");
        let found = stream.unique(&x, &mut kept).synchronize().expect("a count");
        let expected: &[u8] = if begins > 0 { &[0, 4] } else { &[4] };
        assert_eq!(found, expected.len(), "of {len}");
        assert_eq!(first(&stream, &kept, found), expected, "of {len}");
        // No two that are equal and beside each other.
        stream.sequence(3_u8, 1, &mut x).queued().expect("numbers");
        let found = stream.unique(&x, &mut kept).synchronize().expect("a count");
        assert_eq!(found as u64, len);
        let sums = (stream.sum(&x).synchronize(), stream.sum(&kept).synchronize());
        assert_eq!(sums.0.expect("a sum"), sums.1.expect("a sum"), "of {len}");
        assert_eq!(last(&stream, &x, len), last(&stream, &kept, len), "of {len}");
    }
}

/// Runs and how long they are, which go on over seams.
#[test]
fn lengths_of_runs_at_every_seam() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    for len in lengths(&stream, "run_lengths") {
        // Ten bytes for each element.
        if len > 1 << 31 || !has_room(&stream, 10 * len) {
            continue;
        }
        let at = places("run_lengths", len);
        let x = marked(&stream, len, &at);
        let mut expected: Vec<(u8, u64)> = Vec::new();
        let mut end = 0;
        for (value, at) in (9..).zip(&at) {
            if *at > end {
                expected.push((1, at - end));
            }
            expected.push((value, 1));
            end = at + 1;
        }
        if len > end {
            expected.push((1, len - end));
        }
        let mut values = stream.zeros::<u8>(len as usize).queued().expect("memory");
        let mut long = stream.zeros::<u64>(len as usize).queued().expect("memory");
        let found = stream.run_length_encode(&x, &mut values, &mut long).synchronize();
        assert_eq!(found.expect("a count"), expected.len(), "of {len}");
        let values = first(&stream, &values, expected.len());
        let found: Vec<_> = values.into_iter().zip(first(&stream, &long, expected.len())).collect();
        assert_eq!(found, expected, "of {len}");
    }
}

/// A number of elements that the device alone knows; in batches, replayed ones and graphs.
#[test]
fn every_form_at_a_seam() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    let part = match device.kind() {
        DeviceKind::Host => 1_000,
        _ => *facts("select_if_part").last().expect("one"),
    };
    let len = 2 * part + 1;
    if !has_room(&stream, 2 * len) {
        return;
    }
    let at = places("select_if", len);
    let x = marked(&stream, len, &at);
    let mut kept = stream.zeros::<u8>(len as usize).queued().expect("memory");
    let mut count = stream.empty::<u64>(1).queued().expect("memory");
    let greater = Compare::Greater(8);
    for most in [0, 1, part - 1, part, part + 1, 2 * part, len, u64::MAX] {
        let expected: Vec<u64> = at.iter().copied().filter(|at| *at < most).collect();
        let there = stream.full(1, most).queued().expect("memory");
        let known = x.up_to(&there).expect("one");
        stream.copy_if_into(&known, greater, &mut kept, &mut count).queued().expect("queued");
        assert_eq!(value(&stream, &count), expected.len() as u64, "up to {most}");
        assert_eq!(first(&stream, &kept, expected.len()), marks(&expected), "up to {most}");
        let lost = stream.copy_if(&known, Compare::Less(9), &mut kept).synchronize();
        let others = most.min(len) as usize - expected.len();
        assert_eq!(lost.expect("a count"), others, "up to {most}");
    }
    let batched = stream.batch(|q| {
        let found = q.copy_if(&x, greater, &mut kept)?;
        Ok((found, q.copy_if(&x, Compare::Less(9), &mut kept)?))
    });
    let all = (at.len(), len as usize - at.len());
    assert_eq!(batched.synchronize().expect("two counts"), all);
    let mut region = Region::new();
    for _ in 0..3 {
        let replayed = stream.replay(&mut region, |q| {
            let found = q.copy_if(&x, greater, &mut kept)?;
            Ok((found, q.copy_if(&x, Compare::Less(9), &mut kept)?))
        });
        assert_eq!(replayed.synchronize().expect("two counts"), all);
    }
    let graph: Graph<(In<u8>, InOut<u8>, Out<u64>)> =
        device.graph((), |q, (), (x, mut kept, mut count)| {
            q.copy_if_into(&x, Compare::Greater(8), &mut kept, &mut count)
        });
    for _ in 0..3 {
        stream.fill(&mut count, 0).queued().expect("a fill");
        graph.launch(&stream, (&x, &mut kept, &mut count)).queued().expect("a launch");
        assert_eq!(value(&stream, &count), at.len() as u64);
        assert_eq!(first(&stream, &kept, at.len()), marks(&at));
    }
}

/// Elements of eight bytes around the first seam.
#[test]
fn wide_types_at_the_first_seam() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    let len = match device.kind() {
        DeviceKind::Host => 4_097,
        _ => *facts("select_if_part").last().expect("one") + 1,
    };
    if !has_room(&stream, 16 * len) {
        return;
    }
    let n = len as usize;
    {
        let mut x = stream.empty::<u64>(n).queued().expect("memory");
        stream.sequence(0_u64, 1, &mut x).queued().expect("numbers");
        let mut kept = stream.zeros::<u64>(n).queued().expect("memory");
        let from = len - 2_000;
        let found = stream.copy_if(&x, Compare::GreaterOrEqual(from), &mut kept).synchronize();
        assert_eq!(found.expect("a count"), 2_000);
        assert_eq!(first(&stream, &kept, 2_000), (from..len).collect::<Vec<_>>());
        let found = stream.unique(&x, &mut kept).synchronize().expect("a count");
        assert_eq!(found, n);
        let sums = (stream.sum(&x).synchronize(), stream.sum(&kept).synchronize());
        assert_eq!(sums.0.expect("a sum"), sums.1.expect("a sum"));
    }
    let mut x = stream.empty::<f64>(n).queued().expect("memory");
    stream.sequence(0.0_f64, 1.0, &mut x).queued().expect("numbers");
    let mut kept = stream.zeros::<f64>(n).queued().expect("memory");
    let from = (len - 2_000) as f64;
    let found = stream.copy_if(&x, Compare::GreaterOrEqual(from), &mut kept).synchronize();
    assert_eq!(found.expect("a count"), 2_000);
    let expected: Vec<f64> = (len - 2_000..len).map(|at| at as f64).collect();
    assert_eq!(first(&stream, &kept, 2_000), expected);
    assert_eq!(stream.unique(&x, &mut kept).synchronize().expect("a count"), n);
}

/// As many elements as 32 bits count.
#[test]
fn the_greatest_of_all_that_32_bits_count() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    let most = u64::from(u32::MAX);
    let lengths = match device.kind() {
        DeviceKind::Host => vec![4_097],
        _ => facts("tile")
            .into_iter()
            .flat_map(|tile| [most - tile, most - tile + 1, most])
            .collect(),
    };
    for len in lengths {
        if !has_room(&stream, 3 * len) {
            continue;
        }
        let at = places("select_if", len);
        let x = marked(&stream, len, &at);
        let mut greatest = stream.empty::<u8>(5).queued().expect("memory");
        stream.top_k(&x, &mut greatest).queued().expect("queued");
        let expected: Vec<u8> = marks(&at).into_iter().rev().take(5).collect();
        assert_eq!(first(&stream, &greatest, 5), expected, "of {len}");
    }
}

/// Rows whose elements 32 bits do not count: of warps, of blocks, and a single one.
#[test]
fn rows_beyond_32_bits() {
    let device = alone::device();
    let stream = device.stream().expect("a stream");
    let shapes: [(usize, usize); 3] = match device.kind() {
        DeviceKind::Host => [(1_000, 5), (1_100, 4), (4_097, 1)],
        _ => [(1_000, 4_294_970), (1_100, 3_904_520), ((1 << 32) + 1_003, 1)],
    };
    for (columns, rows) in shapes {
        let len = columns * rows;
        if !has_room(&stream, 4 * len as u64 + 16 * rows as u64) {
            continue;
        }
        let what = format!("{rows} rows of {columns}");
        let mut x = stream.zeros::<half::f16>(len).queued().expect("memory");
        let mut end = x.slice_mut(len - 1..).expect("it is in there");
        stream.fill(&mut end, half::f16::from_f32(30.0)).queued().expect("a fill");
        let mut sums = stream.empty::<f32>(rows).queued().expect("memory");
        let mut places = stream.empty::<u64>(rows).queued().expect("memory");
        stream.sum_rows(&x, columns, &mut sums).queued().expect("queued");
        stream.arg_max_rows(&x, columns, &mut places).queued().expect("queued");
        let sum = stream.sum(&sums).synchronize().expect("a sum");
        let end = sums.slice(rows - 1..).expect("it is in there");
        let end = stream.download(&end).synchronize().expect("data")[0];
        assert_eq!((sum, end), (30.0, 30.0), "{what}");
        let place = stream.sum(&places).synchronize().expect("a sum");
        let end = places.slice(rows - 1..).expect("it is in there");
        let end = stream.download(&end).synchronize().expect("data")[0];
        assert_eq!((place, end), (columns as u64 - 1, columns as u64 - 1), "{what}");
        let mut y = stream.empty::<half::f16>(len).queued().expect("memory");
        stream.softmax_rows(&x, columns, &mut y).queued().expect("queued");
        let end = y.slice(len - 1_000..).expect("it is in there");
        let end = stream.download(&end).synchronize().expect("data").to_vec();
        // 30 is so far above the others that they are nothing beside it.
        assert!(end[..999].iter().all(|y| y.to_f32() < 1e-4) && end[999].to_f32() > 0.99, "{what}");
        if columns == 1_000 {
            let begin = first(&stream, &y, 1_000);
            assert!(begin.iter().all(|y| y.to_f32() == half::f16::from_f32(1e-3).to_f32()));
        }
    }
}

/// A device whose selections take a tile in each launch.
fn in_small_parts() -> gpu_await::Device {
    let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    let opened = testing::builder().part_of_selections(1).named(&name);
    opened.unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Every selection, each tile in a part of its own, beside plain Rust.
#[test]
fn small_parts_select_the_same() {
    fn check<T: Scalar + PartialEq + std::fmt::Debug>(stream: &Stream, of: fn(u64) -> T) {
        for len in [0_usize, 1, 1_281, 20_000, 61_003] {
            for known in [None, Some(0), Some(1_280), Some(20_001), Some(len as u64)] {
                let here = known.map_or(len, |known| len.min(known as usize));
                let what = format!("{here} of {len} {}", std::any::type_name::<T>());
                // Runs of all lengths up to some thousands.
                let group = |at: u64| (at * at * at / 50_000_000) % 97 + at / 9_000;
                let x: Vec<T> = (0..len as u64).map(|at| of(group(at) % 50)).collect();
                let flags: Vec<u8> = (0..len as u64).map(|at| (group(at) % 3) as u8).collect();
                let (x_there, flags_there) = (&x[..here], &flags[..here]);
                let buffer = stream.upload(x.clone()).queued().expect("memory");
                let set = stream.upload(flags.clone()).queued().expect("memory");
                let count = stream.full(1, known.unwrap_or(u64::MAX)).queued().expect("memory");
                let (all, all_flags) = (buffer.up_to(&count).unwrap(), set.up_to(&count).unwrap());
                let mut kept = stream.upload(x.clone()).queued().expect("memory");
                let mut others = stream.upload(x.clone()).queued().expect("memory");
                let mut numbers = stream.zeros::<u64>(len).queued().expect("memory");
                let with = of(25);

                let (yes, no): (Vec<T>, Vec<T>) = x_there.iter().partition(|x| **x == with);
                let found = stream.copy_if(&all, Compare::Equal(with), &mut kept).synchronize();
                assert_eq!(found.expect("a count"), yes.len(), "{what}");
                assert_eq!(first(stream, &kept, yes.len()), yes, "{what}");
                let found = stream.partition(&all, Compare::Equal(with), &mut kept, &mut others);
                assert_eq!(found.synchronize().expect("a count"), yes.len(), "{what}");
                assert_eq!(first(stream, &others, no.len()), no, "{what}");

                let set_here = |at: &usize| flags_there[*at] != 0;
                let at: Vec<usize> = (0..here).filter(set_here).collect();
                let yes: Vec<T> = at.iter().map(|at| x_there[*at]).collect();
                let found = stream.select(&all, &set, &mut kept).synchronize().expect("a count");
                assert_eq!(found, yes.len(), "{what}");
                assert_eq!(first(stream, &kept, found), yes, "{what}");
                let found = stream.partition_flagged(&all, &set, &mut kept, &mut others);
                assert_eq!(found.synchronize().expect("a count"), yes.len(), "{what}");
                let found = stream.positions(&all_flags, &mut numbers).synchronize();
                assert_eq!(found.expect("a count"), at.len(), "{what}");
                let expected: Vec<u64> = at.iter().map(|at| *at as u64).collect();
                assert_eq!(first(stream, &numbers, at.len()), expected, "{what}");

                let runs: Vec<(T, u64)> =
                    x_there.chunk_by(|a, b| a == b).map(|run| (run[0], run.len() as u64)).collect();
                let values: Vec<T> = runs.iter().map(|run| run.0).collect();
                let found = stream.unique(&all, &mut kept).synchronize().expect("a count");
                assert_eq!(found, runs.len(), "{what}");
                assert_eq!(first(stream, &kept, found), values, "{what}");
                let found = stream.run_length_encode(&all, &mut kept, &mut numbers).synchronize();
                assert_eq!(found.expect("a count"), runs.len(), "{what}");
                let lengths: Vec<u64> = runs.iter().map(|run| run.1).collect();
                assert_eq!(first(stream, &kept, runs.len()), values, "{what}");
                assert_eq!(first(stream, &numbers, runs.len()), lengths, "{what}");
            }
        }
    }
    // Its turn, on a GPU.
    let _turn = alone::device();
    let device = in_small_parts();
    let stream = device.stream().expect("a stream");
    check::<u8>(&stream, |number| number as u8);
    check::<i32>(&stream, |number| number as i32);
    check::<half::f16>(&stream, |number| half::f16::from_f32(number as f32));
    check::<f64>(&stream, |number| number as f64);
}
