//! Sorts of segments beside the same in plain Rust: every type and bit pattern, segments of every length, up and down, alone and
//! with values, parts at odd offsets, numbers of elements and of offsets that the device alone knows.

use std::cmp::Ordering;
use std::ops::Range;

use gpu_await::{ErrorDetail, Stream};
use gpu_await_algorithms::{Algorithms, Sequence, SequenceMut};
use half::{bf16, f16};

use crate::under_test::plain::{
    Plain, down, fewer_patterns, for_each_type, is_large, lengths, patterns, segments_of, small,
    stream, up,
};
use crate::under_test::refused_calls::each_call_refused;

/// No segment begins in front of the one before it, or ends behind the array.
fn segments(offsets: &[u64], len: usize) -> Vec<Range<usize>> {
    let mut begins = Vec::new();
    for offset in offsets {
        let inside = (*offset).min(len as u64) as usize;
        begins.push(begins.last().map_or(inside, |last| inside.max(*last)));
    }
    begins.windows(2).map(|ends| ends[0]..ends[1]).collect()
}

/// Where each element comes from; what is in no segment stays.
fn order<T: Plain>(x: &[T], segments: &[Range<usize>], descending: bool) -> Vec<u32> {
    let mut order: Vec<u32> = (0..x.len() as u32).collect();
    let by = |a: &u32, b: &u32| -> Ordering { x[*a as usize].order(&x[*b as usize]) };
    for segment in segments {
        order[segment.clone()].sort_by(|a, b| if descending { by(b, a) } else { by(a, b) });
    }
    order
}

fn same_bits<T: Plain>(found: &[T], x: &[T], order: &[u32]) -> bool {
    let same = |(a, at): (&T, &u32)| bytemuck::bytes_of(a) == bytemuck::bytes_of(&x[*at as usize]);
    found.len() == order.len() && found.iter().zip(order).all(same)
}

fn check_all<T: Plain>(stream: &Stream, x: &[T], offsets: &[u64], what: &str) {
    let segments = segments(offsets, x.len());
    let offsets = up(stream, offsets);
    for descending in [false, true] {
        let expected = order(x, &segments, descending);
        let (mut alone, mut keys, mut wide_keys) = (up(stream, x), up(stream, x), up(stream, x));
        let places: Vec<u32> = (0..x.len() as u32).collect();
        let wide_places: Vec<u64> = (0..x.len() as u64).collect();
        let (mut values, mut wide_values) = (up(stream, &places), up(stream, &wide_places));
        let queued = if descending {
            [
                stream.segmented_sort_descending(&mut alone, &offsets),
                stream.segmented_sort_by_key_descending(&mut keys, &mut values, &offsets),
                stream.segmented_sort_by_key_descending(&mut wide_keys, &mut wide_values, &offsets),
            ]
        } else {
            [
                stream.segmented_sort(&mut alone, &offsets),
                stream.segmented_sort_by_key(&mut keys, &mut values, &offsets),
                stream.segmented_sort_by_key(&mut wide_keys, &mut wide_values, &offsets),
            ]
        };
        queued.into_iter().for_each(|sort| sort.queued().expect("a sort"));
        assert!(same_bits(&down(stream, &alone), x, &expected), "{what}: alone");
        assert!(down(stream, &values) == expected, "{what}: values of 4 bytes");
        assert!(same_bits(&down(stream, &keys), x, &expected), "{what}: with 4 bytes");
        let wide = down(stream, &wide_values);
        assert!(wide.iter().map(|at| *at as u32).eq(expected.iter().copied()), "{what}: 8 bytes");
        assert!(same_bits(&down(stream, &wide_keys), x, &expected), "{what}: with 8 bytes");
    }
}

#[test]
fn segments_of_every_length() {
    fn check<T: Plain>(stream: &Stream) {
        for len in lengths(stream) {
            let all = fewer_patterns::<T>(len, 0x0fed_cba9_8765_4321);
            for (which, x) in all.into_iter().filter(|(which, _)| *which >= 3) {
                let longest: &[usize] =
                    if is_large(len) { &[900, 1_000_000] } else { &[40, 900, 1_000_000] };
                for longest in longest.iter().copied() {
                    let offsets = segments_of(len, longest);
                    let what = std::any::type_name::<T>();
                    let what = format!("{len} of {what}, to {longest}, pattern {which}");
                    check_all(stream, &x, &offsets, &what);
                }
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

/// Offsets that are in no order, or past the end; and what is in no segment.
#[test]
fn segments_do_not_overlap() {
    let stream = stream();
    let x = patterns::<i32>(9_000, 7).pop().expect("some");
    let offsets = [5, 900, 30, 100, 2_000, 1_000, 1_010, 8_000];
    check_all(&stream, &x, &offsets, "in no order");
    check_all(&stream, &x, &[100, 50, u64::MAX, 20], "past the end");
    check_all(&stream, &x, &[8_990, 1 << 33, 0], "at the end");
    check_all(&stream, &x, &[17], "no segment");
    check_all(&stream, &x, &[], "no offset");
}

#[test]
fn segments_of_parts_and_of_up_to() {
    fn check<T: Plain>(stream: &Stream) {
        let x = small::<T>(9_000, 17);
        for longest in [5, 3_000] {
            let offsets = segments_of(4_000, longest);
            let there = up(stream, &[&[9], &offsets[..]].concat());
            let mut buffer = up(stream, &x);
            {
                let view = there.slice(1..).expect("inside");
                let mut part = buffer.slice_mut(3..4_003).expect("inside");
                stream.segmented_sort(&mut part, &view).queued().expect("a sort");
            }
            let found = down(stream, &buffer);
            assert!(found[..3] == x[..3] && found[4_003..] == x[4_003..]);
            let part = &x[3..4_003];
            let expected = order(part, &segments(&offsets, 4_000), false);
            assert!(same_bits(&found[3..4_003], part, &expected));
            for (elements, counted) in [(0, 0), (2_000, 1), (1 << 40, 3), (3_999, 1 << 40)] {
                let (elements_there, counted_there) =
                    (up(stream, &[elements]), up(stream, &[counted]));
                let whole = up(stream, &offsets);
                let mut buffer = up(stream, &x);
                {
                    let mut up_to = buffer.up_to_mut(&elements_there).expect("one");
                    let offsets = whole.up_to(&counted_there).expect("one");
                    let sort = stream.segmented_sort_descending(&mut up_to, &offsets);
                    sort.queued().expect("a sort");
                }
                let offsets = &offsets[..counted.min(offsets.len() as u64) as usize];
                let segments = segments(offsets, elements.min(9_000) as usize);
                let expected = order(&x, &segments, true);
                assert!(same_bits(&down(stream, &buffer), &x, &expected));
            }
        }
    }
    let stream = stream();
    for_each_type!(check(&stream));
}

#[test]
fn refusals() {
    let stream = stream();
    let offsets = up(&stream, &[0u64, 3]);
    let mut keys = up(&stream, &[3.0f32, 2.0, 1.0]);
    let mut values = up(&stream, &[1u32, 2]);
    let error = stream.segmented_sort_by_key(&mut keys, &mut values, &offsets).queued();
    let error = error.expect_err("two values");
    let detail = error.detail();
    assert!(matches!(detail, ErrorDetail::WrongLength { expected: 3, found: 2, .. }), "{error}");
    let error = stream.download(&keys).synchronize().expect_err("poisoned");
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    let mut keys = up(&stream, &[3.0f32, 2.0, 1.0]);
    let unwritten = stream.empty::<u64>(2).queued().expect("memory");
    let error = stream.segmented_sort(&mut keys, &unwritten).queued().expect_err("unwritten");
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
}

/// Each call of the driver refused in turn: an error, or the right values; and nothing is left behind.
#[test]
fn every_call_refused_once() {
    each_call_refused(12, |stream, refuse, which| {
        let x: Vec<u32> = (0..500).map(|at| at * 7 % 501).collect();
        let mut buffer = up(stream, &x);
        let offsets = up(stream, &[3u64, 400, 450]);
        refuse();
        stream.segmented_sort(&mut buffer, &offsets).abandon();
        stream.segmented_sort_descending(&mut buffer, &offsets).abandon();
        if let Ok(found) = stream.download(&buffer).synchronize() {
            let expected = order(&x, &[3..400, 400..450], true);
            assert!(same_bits(&found, &x, &expected), "{which}");
        }
    });
}
