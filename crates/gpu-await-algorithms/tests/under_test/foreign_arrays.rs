//! Every algorithm on memory of another device: a typed error without an operation, as of [`foreign`](super::foreign)'s calls.

use gpu_await_algorithms::{Algorithms, Compare, ReduceOp, Sequence, SequenceMut, transform};

use super::foreign::Outcome::WrongDevice;
use super::foreign::{LEN, Probe, each};

pub(crate) const PROBES: &[Probe] = &[
    Probe {
        calls: &["transform", "transform_in_place", "transform_flags"],
        outcome: WrongDevice,
        run: |pair| {
            let (mut x, mut y) = (pair.their_buffer(), pair.buffer());
            let mut flags = pair.stream.zeros::<u8>(LEN).queued()?;
            let (sum, is_more) = (transform!(|x, y| x + y), transform!(|x| x.gt(0.0)));
            each([
                pair.tries(|s| s.transform(sum, (&x, 1.0), &mut y).queued()),
                pair.tries(|s| s.transform_in_place(sum, (&x,), &mut y).queued()),
                pair.tries(|s| s.transform_flags(is_more, (&x,), &mut flags).queued()),
                pair.tries(|s| s.transform(sum, (1.0, 2.0), &mut x).queued()),
            ])
        },
    },
    Probe {
        calls: &["sequence", "cast"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, mut y) = (pair.their_buffer(), pair.their_buffer());
            let mut bytes = pair.stream.zeros::<u8>(LEN).queued()?;
            each([
                pair.tries(|s| s.sequence(0.0, 1.0, &mut y).queued()),
                pair.tries(|s| s.cast(&x, &mut bytes).queued()),
            ])
        },
    },
    Probe {
        calls: &["gather", "scatter"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, mut y) = (pair.their_buffer(), pair.buffer());
            let index = pair.stream.zeros::<u32>(LEN).queued()?;
            each([
                pair.tries(|s| s.gather(&x, &index, &mut y).queued()),
                pair.tries(|s| s.scatter(&x, &index, &mut y).queued()),
            ])
        },
    },
    Probe {
        calls: &["sum", "reduce", "min", "max", "arg_min", "arg_max", "count_if", "dot"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, own) = (pair.their_buffer(), pair.buffer());
            each([
                pair.tries(|s| s.sum(&x).synchronize().map(drop)),
                pair.tries(|s| s.reduce(&x, ReduceOp::Max, 0.0).synchronize().map(drop)),
                pair.tries(|s| s.min(&x).synchronize().map(drop)),
                pair.tries(|s| s.max(&x).synchronize().map(drop)),
                pair.tries(|s| s.arg_min(&x).synchronize().map(drop)),
                pair.tries(|s| s.arg_max(&x).synchronize().map(drop)),
                pair.tries(|s| s.count_if(&x, Compare::Less(3.0)).synchronize().map(drop)),
                pair.tries(|s| s.dot(&x, &own).synchronize().map(drop)),
                pair.tries(|s| s.dot(&own, &x).synchronize().map(drop)),
            ])
        },
    },
    Probe {
        calls: &[
            "sum_into",
            "reduce_into",
            "min_into",
            "max_into",
            "arg_min_into",
            "arg_max_into",
            "count_if_into",
            "dot_into",
        ],
        outcome: WrongDevice,
        run: |pair| {
            let x = pair.buffer();
            let mut to = pair.elsewhere.zeros::<f32>(1).synchronize()?;
            let mut at = pair.elsewhere.zeros::<u64>(1).synchronize()?;
            each([
                pair.tries(|s| s.sum_into(&x, &mut to).queued()),
                pair.tries(|s| s.reduce_into(&x, ReduceOp::Max, 0.0, &mut to).queued()),
                pair.tries(|s| s.min_into(&x, &mut to).queued()),
                pair.tries(|s| s.max_into(&x, &mut to).queued()),
                pair.tries(|s| s.arg_min_into(&x, &mut at).queued()),
                pair.tries(|s| s.arg_max_into(&x, &mut at).queued()),
                pair.tries(|s| s.count_if_into(&x, Compare::Less(3.0), &mut at).queued()),
                pair.tries(|s| s.dot_into(&x, &x, &mut to).queued()),
            ])
        },
    },
    Probe {
        calls: &["inclusive_scan", "exclusive_scan"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, own) = (pair.their_buffer(), pair.buffer());
            let (mut to, mut there) = (pair.buffer(), pair.their_buffer());
            each([
                pair.tries(|s| s.inclusive_scan(&x, ReduceOp::Sum, &mut to).queued()),
                pair.tries(|s| s.exclusive_scan(&x, ReduceOp::Sum, 0.0, &mut to).queued()),
                pair.tries(|s| s.inclusive_scan(&own, ReduceOp::Sum, &mut there).queued()),
                pair.tries(|s| s.exclusive_scan(&own, ReduceOp::Sum, 0.0, &mut there).queued()),
            ])
        },
    },
    Probe {
        calls: &["sort", "sort_descending", "sort_by_key", "sort_by_key_descending"],
        outcome: WrongDevice,
        run: |pair| {
            let (mut x, mut own) = (pair.their_buffer(), pair.buffer());
            let mut keys = pair.buffer();
            each([
                pair.tries(|s| s.sort(&mut x).queued()),
                pair.tries(|s| s.sort_descending(&mut x).queued()),
                pair.tries(|s| s.sort_by_key(&mut x, &mut own).queued()),
                pair.tries(|s| s.sort_by_key_descending(&mut keys, &mut x).queued()),
            ])
        },
    },
    Probe {
        calls: &["copy_if", "partition", "unique", "select", "partition_flagged", "positions"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, mut to, mut rest) = (pair.their_buffer(), pair.buffer(), pair.buffer());
            let flags = pair.elsewhere.zeros::<u8>(LEN).synchronize()?;
            let (own, mut places) = (pair.buffer(), pair.stream.zeros::<u64>(LEN).queued()?);
            let less = Compare::Less(3.0);
            each([
                pair.tries(|s| s.copy_if(&x, less, &mut to).synchronize().map(drop)),
                pair.tries(|s| s.partition(&x, less, &mut to, &mut rest).synchronize().map(drop)),
                pair.tries(|s| s.unique(&x, &mut to).synchronize().map(drop)),
                pair.tries(|s| s.select(&own, &flags, &mut to).synchronize().map(drop)),
                pair.tries(|s| {
                    s.partition_flagged(&own, &flags, &mut to, &mut rest).synchronize().map(drop)
                }),
                pair.tries(|s| s.positions(&flags, &mut places).synchronize().map(drop)),
            ])
        },
    },
    Probe {
        calls: &[
            "copy_if_into",
            "partition_into",
            "unique_into",
            "select_into",
            "partition_flagged_into",
            "positions_into",
        ],
        outcome: WrongDevice,
        run: |pair| {
            let (x, mut to, mut rest) = (pair.buffer(), pair.buffer(), pair.buffer());
            let flags = pair.stream.zeros::<u8>(LEN).queued()?;
            let mut places = pair.stream.zeros::<u64>(LEN).queued()?;
            let mut n = pair.elsewhere.zeros::<u64>(1).synchronize()?;
            let less = Compare::Less(3.0);
            each([
                pair.tries(|s| s.copy_if_into(&x, less, &mut to, &mut n).queued()),
                pair.tries(|s| s.partition_into(&x, less, &mut to, &mut rest, &mut n).queued()),
                pair.tries(|s| s.unique_into(&x, &mut to, &mut n).queued()),
                pair.tries(|s| s.select_into(&x, &flags, &mut to, &mut n).queued()),
                pair.tries(|s| {
                    s.partition_flagged_into(&x, &flags, &mut to, &mut rest, &mut n).queued()
                }),
                pair.tries(|s| s.positions_into(&flags, &mut places, &mut n).queued()),
            ])
        },
    },
    Probe {
        calls: &["run_length_encode", "run_length_encode_into"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, own, mut to) = (pair.their_buffer(), pair.buffer(), pair.buffer());
            let mut there = pair.their_buffer();
            let mut lengths = pair.stream.zeros::<u64>(LEN).queued()?;
            let mut lengths_there = pair.elsewhere.zeros::<u64>(LEN).synchronize()?;
            let mut n = pair.elsewhere.zeros::<u64>(1).synchronize()?;
            let drop_value = |op: gpu_await::Op<usize>| op.synchronize().map(drop);
            each([
                pair.tries(|s| drop_value(s.run_length_encode(&x, &mut to, &mut lengths))),
                pair.tries(|s| drop_value(s.run_length_encode(&own, &mut there, &mut lengths))),
                pair.tries(|s| drop_value(s.run_length_encode(&own, &mut to, &mut lengths_there))),
                pair.tries(|s| {
                    s.run_length_encode_into(&own, &mut to, &mut lengths, &mut n).queued()
                }),
            ])
        },
    },
    Probe {
        calls: &["histogram", "histogram_between"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, own) = (pair.their_buffer(), pair.buffer());
            let mut counts = pair.stream.zeros::<u64>(LEN - 1).queued()?;
            let mut there = pair.elsewhere.zeros::<u64>(LEN - 1).synchronize()?;
            each([
                pair.tries(|s| s.histogram(&x, 0.0..=1.0, &mut counts).queued()),
                pair.tries(|s| s.histogram(&own, 0.0..=1.0, &mut there).queued()),
                pair.tries(|s| s.histogram_between(&x, &own, &mut counts).queued()),
                pair.tries(|s| s.histogram_between(&own, &x, &mut counts).queued()),
                pair.tries(|s| s.histogram_between(&own, &own, &mut there).queued()),
            ])
        },
    },
    Probe {
        calls: &["segmented_reduce"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, own, mut to) = (pair.their_buffer(), pair.buffer(), pair.buffer());
            let mut there = pair.their_buffer();
            let offsets = pair.stream.zeros::<u64>(LEN + 1).queued()?;
            let offsets_there = pair.elsewhere.zeros::<u64>(LEN + 1).synchronize()?;
            let max = ReduceOp::Max;
            each([
                pair.tries(|s| s.segmented_reduce(&x, &offsets, max, 0.0, &mut to).queued()),
                pair.tries(|s| {
                    s.segmented_reduce(&own, &offsets_there, max, 0.0, &mut to).queued()
                }),
                pair.tries(|s| s.segmented_reduce(&own, &offsets, max, 0.0, &mut there).queued()),
            ])
        },
    },
    Probe {
        calls: &["sum_rows", "arg_max_rows", "softmax_rows", "layer_norm_rows"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, own, mut to) = (pair.their_buffer(), pair.buffer(), pair.buffer());
            let mut there = pair.their_buffer();
            let mut places = pair.stream.zeros::<u64>(LEN).queued()?;
            each([
                pair.tries(|s| s.sum_rows(&x, 1, &mut to).queued()),
                pair.tries(|s| s.sum_rows(&own, 1, &mut there).queued()),
                pair.tries(|s| s.arg_max_rows(&x, 1, &mut places).queued()),
                pair.tries(|s| s.softmax_rows(&x, LEN, &mut to).queued()),
                pair.tries(|s| s.softmax_rows(&own, LEN, &mut there).queued()),
                pair.tries(|s| s.layer_norm_rows(&own, &x, &own, 1.0, &mut to).queued()),
                pair.tries(|s| s.layer_norm_rows(&own, &own, &x, 1.0, &mut to).queued()),
            ])
        },
    },
    Probe {
        calls: &["top_k", "bottom_k", "top_k_places", "bottom_k_places"],
        outcome: WrongDevice,
        run: |pair| {
            let (x, own, mut to) = (pair.their_buffer(), pair.buffer(), pair.buffer());
            let mut there = pair.their_buffer();
            let mut places = pair.stream.zeros::<u64>(LEN).queued()?;
            let mut places_there = pair.elsewhere.zeros::<u64>(LEN).synchronize()?;
            each([
                pair.tries(|s| s.top_k(&x, &mut to).queued()),
                pair.tries(|s| s.bottom_k(&own, &mut there).queued()),
                pair.tries(|s| s.top_k_places(&own, &mut to, &mut places_there).queued()),
                pair.tries(|s| s.bottom_k_places(&x, &mut to, &mut places).queued()),
            ])
        },
    },
    Probe {
        calls: &[
            "segmented_sort",
            "segmented_sort_descending",
            "segmented_sort_by_key",
            "segmented_sort_by_key_descending",
        ],
        outcome: WrongDevice,
        run: |pair| {
            let (mut x, mut own, mut keys) = (pair.their_buffer(), pair.buffer(), pair.buffer());
            let offsets = pair.stream.zeros::<u64>(3).queued()?;
            let there = pair.elsewhere.zeros::<u64>(3).synchronize()?;
            each([
                pair.tries(|s| s.segmented_sort(&mut x, &offsets).queued()),
                pair.tries(|s| s.segmented_sort_descending(&mut own, &there).queued()),
                pair.tries(|s| s.segmented_sort_by_key(&mut x, &mut own, &offsets).queued()),
                pair.tries(|s| {
                    s.segmented_sort_by_key_descending(&mut keys, &mut x, &offsets).queued()
                }),
            ])
        },
    },
    Probe {
        calls: &["up_to", "up_to_mut", "sum", "sort"],
        outcome: WrongDevice,
        run: |pair| {
            let n = pair.elsewhere.full(1, LEN as u64).synchronize()?;
            let (x, mut y) = (pair.buffer(), pair.buffer());
            each([
                pair.tries(|s| s.sum(&x.up_to(&n)?).synchronize().map(drop)),
                pair.tries(|s| s.sort(&mut y.up_to_mut(&n)?).queued()),
            ])
        },
    },
];
