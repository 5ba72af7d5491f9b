//! Every algorithm, called where a call that waits would wait for itself; see [`inside`](super::inside).

use std::sync::Arc;

use gpu_await::Result;
use gpu_await_algorithms::{AlgorithmFamily, Algorithms, Compare, Preload, ReduceOp, transform};

use super::inside::{Methods, World, at_once};

/// Makes a job of each. What it takes is made here, outside of the host function; the full stream waits for that from here on.
pub(crate) fn every_verb(world: &World) -> Result<Methods> {
    let World { device, host, full, idle, .. } = world;
    let mut list = Methods::called_in(file!());
    let buffer = || full.full(8, 1.0f32).queued();
    let other = Arc::new(idle.full(8, 2.0f32).queued()?);
    idle.synchronize()?;
    // From now on what is submitted to it waits for the host function.
    full.wait(host).queued()?;

    macro_rules! both {
        ($how:ident $stream:literal $device:literal, $on:ident => $call:expr) => {
            both!($how $stream $device, $on, () = () => $call);
        };
        // with something that the call takes
        ($how:ident $stream:literal $device:literal, $on:ident, $with:pat = $make:expr => $call:expr) => {{
            let ($on, $with) = (full.clone(), $make);
            list.$how($stream, move || $call);
            let ($on, $with) = (device.clone(), $make);
            list.$how($device, move || $call);
        }};
    }
    macro_rules! queue {
        ($name:literal, $q:ident => $call:expr) => {
            queue!($name, $q, () = () => $call);
        };
        ($name:literal, $q:ident, $with:pat = $make:expr => $call:expr) => {{
            let (stream, $with) = (full.clone(), $make);
            list.refuses($name, move || stream.batch(|$q| $call.map(drop).map_err(gpu_await::Error::from)).queued());
        }};
    }
    macro_rules! each {
        ($how:ident: $($name:literal, $object:ident => |$on:ident| $call:expr;)+) => {$({
            let $on = $object.clone();
            list.$how($name, move || $call);
        })+};
    }

    let twice = transform!(|x| x * 2.0);
    both!(refuses "Stream::transform" "Device::transform", s, (b, mut to) = (other.clone(), buffer()?) => s.transform(twice, (&*b,), &mut to).queued());
    both!(refuses "Stream::transform_in_place" "Device::transform_in_place", s, mut b = buffer()? => s.transform_in_place(twice, (), &mut b).queued());
    let flags = || full.zeros::<u8>(8).queued();
    both!(refuses "Stream::transform_flags" "Device::transform_flags", s, (b, mut to) = (buffer()?, flags()?) => s.transform_flags(transform!(|x| x.gt(0.0)), (&b,), &mut to).queued());
    both!(refuses "Stream::sequence" "Device::sequence", s, mut b = buffer()? => s.sequence(0.0, 1.0, &mut b).queued());
    both!(refuses "Stream::cast" "Device::cast", s, (b, mut to) = (buffer()?, flags()?) => s.cast(&b, &mut to).queued());
    let index = || full.zeros::<u32>(8).queued();
    both!(refuses "Stream::gather" "Device::gather", s, (b, i, mut to) = (other.clone(), index()?, buffer()?) => s.gather(&*b, &i, &mut to).queued());
    both!(refuses "Stream::scatter" "Device::scatter", s, (b, i, mut to) = (other.clone(), index()?, buffer()?) => s.scatter(&*b, &i, &mut to).queued());
    let count = || full.zeros::<u64>(1).queued();
    let places = || full.zeros::<u64>(8).queued();
    let one = || full.zeros::<f32>(1).queued();
    let offsets = || full.zeros::<u64>(9).queued();
    let nine = || full.zeros::<f32>(9).queued();
    both!(refuses "Stream::sum" "Device::sum", s, b = buffer()? => s.sum(&b).submitted());
    both!(refuses "Stream::reduce" "Device::reduce", s, b = buffer()? => s.reduce(&b, ReduceOp::Sum, 0.0).submitted());
    both!(refuses "Stream::reduce_into" "Device::reduce_into", s, (b, mut to) = (buffer()?, one()?) => s.reduce_into(&b, ReduceOp::Sum, 0.0, &mut to).queued());
    both!(refuses "Stream::min" "Device::min", s, b = buffer()? => s.min(&b).submitted());
    both!(refuses "Stream::max" "Device::max", s, b = buffer()? => s.max(&b).submitted());
    both!(refuses "Stream::arg_min" "Device::arg_min", s, b = buffer()? => s.arg_min(&b).submitted());
    both!(refuses "Stream::arg_max" "Device::arg_max", s, b = buffer()? => s.arg_max(&b).submitted());
    both!(refuses "Stream::sum_into" "Device::sum_into", s, (b, mut to) = (buffer()?, one()?) => s.sum_into(&b, &mut to).queued());
    both!(refuses "Stream::min_into" "Device::min_into", s, (b, mut to) = (buffer()?, one()?) => s.min_into(&b, &mut to).queued());
    both!(refuses "Stream::max_into" "Device::max_into", s, (b, mut to) = (buffer()?, one()?) => s.max_into(&b, &mut to).queued());
    both!(refuses "Stream::arg_min_into" "Device::arg_min_into", s, (b, mut to) = (buffer()?, count()?) => s.arg_min_into(&b, &mut to).queued());
    both!(refuses "Stream::arg_max_into" "Device::arg_max_into", s, (b, mut to) = (buffer()?, count()?) => s.arg_max_into(&b, &mut to).queued());
    both!(refuses "Stream::dot" "Device::dot", s, b = buffer()? => s.dot(&b, &b).submitted());
    both!(refuses "Stream::dot_into" "Device::dot_into", s, (b, mut to) = (buffer()?, one()?) => s.dot_into(&b, &b, &mut to).queued());
    both!(refuses "Stream::count_if" "Device::count_if", s, b = buffer()? => s.count_if(&b, Compare::Less(1.0)).submitted());
    both!(refuses "Stream::count_if_into" "Device::count_if_into", s, (b, mut to) = (buffer()?, count()?) => s.count_if_into(&b, Compare::Less(1.0), &mut to).queued());
    both!(refuses "Stream::inclusive_scan" "Device::inclusive_scan", s, (b, mut to) = (buffer()?, buffer()?) => s.inclusive_scan(&b, ReduceOp::Sum, &mut to).queued());
    both!(refuses "Stream::exclusive_scan" "Device::exclusive_scan", s, (b, mut to) = (buffer()?, buffer()?) => s.exclusive_scan(&b, ReduceOp::Sum, 0.0, &mut to).queued());
    both!(refuses "Stream::sort" "Device::sort", s, mut b = buffer()? => s.sort(&mut b).queued());
    both!(refuses "Stream::sort_descending" "Device::sort_descending", s, mut b = buffer()? => s.sort_descending(&mut b).queued());
    both!(refuses "Stream::sort_by_key" "Device::sort_by_key", s, (mut b, mut v) = (buffer()?, buffer()?) => s.sort_by_key(&mut b, &mut v).queued());
    both!(refuses "Stream::sort_by_key_descending" "Device::sort_by_key_descending", s, (mut b, mut v) = (buffer()?, buffer()?) => s.sort_by_key_descending(&mut b, &mut v).queued());
    both!(refuses "Stream::copy_if" "Device::copy_if", s, (b, mut to) = (buffer()?, buffer()?) => s.copy_if(&b, Compare::Less(1.0), &mut to).submitted());
    both!(refuses "Stream::copy_if_into" "Device::copy_if_into", s, (b, mut to, mut n) = (buffer()?, buffer()?, count()?) => s.copy_if_into(&b, Compare::Less(1.0), &mut to, &mut n).queued());
    both!(refuses "Stream::partition" "Device::partition", s, (b, mut to, mut others) = (buffer()?, buffer()?, buffer()?) => s.partition(&b, Compare::Less(1.0), &mut to, &mut others).submitted());
    both!(refuses "Stream::partition_into" "Device::partition_into", s, (b, mut to, mut others, mut n) = (buffer()?, buffer()?, buffer()?, count()?) => s.partition_into(&b, Compare::Less(1.0), &mut to, &mut others, &mut n).queued());
    both!(refuses "Stream::unique" "Device::unique", s, (b, mut to) = (buffer()?, buffer()?) => s.unique(&b, &mut to).submitted());
    both!(refuses "Stream::unique_into" "Device::unique_into", s, (b, mut to, mut n) = (buffer()?, buffer()?, count()?) => s.unique_into(&b, &mut to, &mut n).queued());
    both!(refuses "Stream::run_length_encode" "Device::run_length_encode", s, (b, mut to, mut n) = (buffer()?, buffer()?, places()?) => s.run_length_encode(&b, &mut to, &mut n).submitted());
    both!(refuses "Stream::run_length_encode_into" "Device::run_length_encode_into", s, (b, mut to, mut n, mut c) = (buffer()?, buffer()?, places()?, count()?) => s.run_length_encode_into(&b, &mut to, &mut n, &mut c).queued());
    both!(refuses "Stream::select" "Device::select", s, (b, f, mut to) = (buffer()?, flags()?, buffer()?) => s.select(&b, &f, &mut to).submitted());
    both!(refuses "Stream::select_into" "Device::select_into", s, (b, f, mut to, mut n) = (buffer()?, flags()?, buffer()?, count()?) => s.select_into(&b, &f, &mut to, &mut n).queued());
    both!(refuses "Stream::partition_flagged" "Device::partition_flagged", s, (b, f, mut to, mut others) = (buffer()?, flags()?, buffer()?, buffer()?) => s.partition_flagged(&b, &f, &mut to, &mut others).submitted());
    both!(refuses "Stream::partition_flagged_into" "Device::partition_flagged_into", s, (b, f, mut to, mut others, mut n) = (buffer()?, flags()?, buffer()?, buffer()?, count()?) => s.partition_flagged_into(&b, &f, &mut to, &mut others, &mut n).queued());
    both!(refuses "Stream::positions" "Device::positions", s, (f, mut to) = (flags()?, places()?) => s.positions(&f, &mut to).submitted());
    both!(refuses "Stream::positions_into" "Device::positions_into", s, (f, mut to, mut n) = (flags()?, places()?, count()?) => s.positions_into(&f, &mut to, &mut n).queued());
    both!(refuses "Stream::histogram" "Device::histogram", s, (b, mut n) = (buffer()?, places()?) => s.histogram(&b, 0.0..=1.0, &mut n).queued());
    both!(refuses "Stream::histogram_between" "Device::histogram_between", s, (b, l, mut n) = (buffer()?, nine()?, places()?) => s.histogram_between(&b, &l, &mut n).queued());
    both!(refuses "Stream::segmented_reduce" "Device::segmented_reduce", s, (b, o, mut to) = (buffer()?, offsets()?, buffer()?) => s.segmented_reduce(&b, &o, ReduceOp::Sum, 0.0, &mut to).queued());
    both!(refuses "Stream::sum_rows" "Device::sum_rows", s, (b, mut to) = (buffer()?, buffer()?) => s.sum_rows(&b, 1, &mut to).queued());
    both!(refuses "Stream::arg_max_rows" "Device::arg_max_rows", s, (b, mut to) = (buffer()?, places()?) => s.arg_max_rows(&b, 1, &mut to).queued());
    both!(refuses "Stream::softmax_rows" "Device::softmax_rows", s, (b, mut to) = (buffer()?, buffer()?) => s.softmax_rows(&b, 4, &mut to).queued());
    both!(refuses "Stream::layer_norm_rows" "Device::layer_norm_rows", s, (b, mut to) = (buffer()?, buffer()?) => s.layer_norm_rows(&b, &b, &b, 1.0, &mut to).queued());
    both!(refuses "Stream::top_k" "Device::top_k", s, (b, mut to) = (buffer()?, buffer()?) => s.top_k(&b, &mut to).queued());
    both!(refuses "Stream::top_k_places" "Device::top_k_places", s, (b, mut to, mut at) = (buffer()?, buffer()?, places()?) => s.top_k_places(&b, &mut to, &mut at).queued());
    both!(refuses "Stream::bottom_k" "Device::bottom_k", s, (b, mut to) = (buffer()?, buffer()?) => s.bottom_k(&b, &mut to).queued());
    both!(refuses "Stream::bottom_k_places" "Device::bottom_k_places", s, (b, mut to, mut at) = (buffer()?, buffer()?, places()?) => s.bottom_k_places(&b, &mut to, &mut at).queued());
    both!(refuses "Stream::segmented_sort" "Device::segmented_sort", s, (mut b, o) = (buffer()?, offsets()?) => s.segmented_sort(&mut b, &o).queued());
    both!(refuses "Stream::segmented_sort_by_key" "Device::segmented_sort_by_key", s, (mut b, mut v, o) = (buffer()?, buffer()?, offsets()?) => s.segmented_sort_by_key(&mut b, &mut v, &o).queued());
    both!(refuses "Stream::segmented_sort_descending" "Device::segmented_sort_descending", s, (mut b, o) = (buffer()?, offsets()?) => s.segmented_sort_descending(&mut b, &o).queued());
    both!(refuses "Stream::segmented_sort_by_key_descending" "Device::segmented_sort_by_key_descending", s, (mut b, mut v, o) = (buffer()?, buffer()?, offsets()?) => s.segmented_sort_by_key_descending(&mut b, &mut v, &o).queued());
    each! { refuses:
        "Device::preload", device => |d| at_once(d.preload::<f32>(&[AlgorithmFamily::Scan]));
        "Device::preload_sequence", device => |d| at_once(d.preload_sequence::<f32>());
        "Device::preload_cast", device => |d| at_once(d.preload_cast::<f32, u8>());
        "Device::preload_gather", device => |d| at_once(d.preload_gather::<f32, u32>());
        "Device::preload_scatter", device => |d| at_once(d.preload_scatter::<f32, u32>());
        "Device::preload_transform", device => |d| at_once(d.preload_transform::<(gpu_await::In<f32>,)>(twice));
    }
    queue!("Queue::transform", q, (b, mut to) = (other.clone(), buffer()?) => q
        .transform(twice, (&*b,), &mut to));
    queue!("Queue::transform_in_place", q, mut b = buffer()? => q
        .transform_in_place(twice, (), &mut b));
    queue!("Queue::transform_flags", q, (b, mut to) = (buffer()?, flags()?) => q
        .transform_flags(transform!(|x| x.gt(0.0)), (&b,), &mut to));
    queue!("Queue::sequence", q, mut b = buffer()? => q.sequence(0.0, 1.0, &mut b));
    queue!("Queue::cast", q, (b, mut to) = (buffer()?, flags()?) => q.cast(&b, &mut to));
    queue!("Queue::gather", q, (b, i, mut to) = (other.clone(), index()?, buffer()?) => q
        .gather(&*b, &i, &mut to));
    queue!("Queue::scatter", q, (b, i, mut to) = (other.clone(), index()?, buffer()?) => q
        .scatter(&*b, &i, &mut to));
    queue!("Queue::sum", q, b = buffer()? => q.sum(&b));
    queue!("Queue::reduce", q, b = buffer()? => q.reduce(&b, ReduceOp::Sum, 0.0));
    queue!("Queue::reduce_into", q, (b, mut to) = (buffer()?, one()?) => q.reduce_into(&b, ReduceOp::Sum, 0.0, &mut to));
    queue!("Queue::min", q, b = buffer()? => q.min(&b));
    queue!("Queue::max", q, b = buffer()? => q.max(&b));
    queue!("Queue::arg_min", q, b = buffer()? => q.arg_min(&b));
    queue!("Queue::arg_max", q, b = buffer()? => q.arg_max(&b));
    queue!("Queue::sum_into", q, (b, mut to) = (buffer()?, one()?) => q.sum_into(&b, &mut to));
    queue!("Queue::min_into", q, (b, mut to) = (buffer()?, one()?) => q.min_into(&b, &mut to));
    queue!("Queue::max_into", q, (b, mut to) = (buffer()?, one()?) => q.max_into(&b, &mut to));
    queue!("Queue::arg_min_into", q, (b, mut to) = (buffer()?, count()?) => q.arg_min_into(&b, &mut to));
    queue!("Queue::arg_max_into", q, (b, mut to) = (buffer()?, count()?) => q.arg_max_into(&b, &mut to));
    queue!("Queue::dot", q, b = buffer()? => q.dot(&b, &b));
    queue!("Queue::dot_into", q, (b, mut to) = (buffer()?, one()?) => q.dot_into(&b, &b, &mut to));
    queue!("Queue::count_if", q, b = buffer()? => q.count_if(&b, Compare::Less(1.0)));
    queue!("Queue::count_if_into", q, (b, mut to) = (buffer()?, count()?) => q.count_if_into(&b, Compare::Less(1.0), &mut to));
    queue!("Queue::inclusive_scan", q, (b, mut to) = (buffer()?, buffer()?) => q.inclusive_scan(&b, ReduceOp::Sum, &mut to));
    queue!("Queue::exclusive_scan", q, (b, mut to) = (buffer()?, buffer()?) => q.exclusive_scan(&b, ReduceOp::Sum, 0.0, &mut to));
    queue!("Queue::sort", q, mut b = buffer()? => q.sort(&mut b));
    queue!("Queue::sort_descending", q, mut b = buffer()? => q.sort_descending(&mut b));
    queue!("Queue::sort_by_key", q, (mut b, mut v) = (buffer()?, buffer()?) => q.sort_by_key(&mut b, &mut v));
    queue!("Queue::sort_by_key_descending", q, (mut b, mut v) = (buffer()?, buffer()?) => q.sort_by_key_descending(&mut b, &mut v));
    queue!("Queue::copy_if", q, (b, mut to) = (buffer()?, buffer()?) => q.copy_if(&b, Compare::Less(1.0), &mut to));
    queue!("Queue::copy_if_into", q, (b, mut to, mut n) = (buffer()?, buffer()?, count()?) => q.copy_if_into(&b, Compare::Less(1.0), &mut to, &mut n));
    queue!("Queue::partition", q, (b, mut to, mut others) = (buffer()?, buffer()?, buffer()?) => q.partition(&b, Compare::Less(1.0), &mut to, &mut others));
    queue!("Queue::partition_into", q, (b, mut to, mut others, mut n) = (buffer()?, buffer()?, buffer()?, count()?) => q.partition_into(&b, Compare::Less(1.0), &mut to, &mut others, &mut n));
    queue!("Queue::unique", q, (b, mut to) = (buffer()?, buffer()?) => q.unique(&b, &mut to));
    queue!("Queue::unique_into", q, (b, mut to, mut n) = (buffer()?, buffer()?, count()?) => q.unique_into(&b, &mut to, &mut n));
    queue!("Queue::run_length_encode", q, (b, mut to, mut n) = (buffer()?, buffer()?, places()?) => q.run_length_encode(&b, &mut to, &mut n));
    queue!("Queue::run_length_encode_into", q, (b, mut to, mut n, mut c) = (buffer()?, buffer()?, places()?, count()?) => q.run_length_encode_into(&b, &mut to, &mut n, &mut c));
    queue!("Queue::select", q, (b, f, mut to) = (buffer()?, flags()?, buffer()?) => q.select(&b, &f, &mut to));
    queue!("Queue::select_into", q, (b, f, mut to, mut n) = (buffer()?, flags()?, buffer()?, count()?) => q.select_into(&b, &f, &mut to, &mut n));
    queue!("Queue::partition_flagged", q, (b, f, mut to, mut others) = (buffer()?, flags()?, buffer()?, buffer()?) => q.partition_flagged(&b, &f, &mut to, &mut others));
    queue!("Queue::partition_flagged_into", q, (b, f, mut to, mut others, mut n) = (buffer()?, flags()?, buffer()?, buffer()?, count()?) => q.partition_flagged_into(&b, &f, &mut to, &mut others, &mut n));
    queue!("Queue::positions", q, (f, mut to) = (flags()?, places()?) => q.positions(&f, &mut to));
    queue!("Queue::positions_into", q, (f, mut to, mut n) = (flags()?, places()?, count()?) => q.positions_into(&f, &mut to, &mut n));
    queue!("Queue::histogram", q, (b, mut n) = (buffer()?, places()?) => q.histogram(&b, 0.0..=1.0, &mut n));
    queue!("Queue::histogram_between", q, (b, l, mut n) = (buffer()?, nine()?, places()?) => q.histogram_between(&b, &l, &mut n));
    queue!("Queue::segmented_reduce", q, (b, o, mut to) = (buffer()?, offsets()?, buffer()?) => q.segmented_reduce(&b, &o, ReduceOp::Sum, 0.0, &mut to));
    queue!("Queue::sum_rows", q, (b, mut to) = (buffer()?, buffer()?) => q.sum_rows(&b, 1, &mut to));
    queue!("Queue::arg_max_rows", q, (b, mut to) = (buffer()?, places()?) => q.arg_max_rows(&b, 1, &mut to));
    queue!("Queue::softmax_rows", q, (b, mut to) = (buffer()?, buffer()?) => q.softmax_rows(&b, 4, &mut to));
    queue!("Queue::layer_norm_rows", q, (b, mut to) = (buffer()?, buffer()?) => q.layer_norm_rows(&b, &b, &b, 1.0, &mut to));
    queue!("Queue::top_k", q, (b, mut to) = (buffer()?, buffer()?) => q.top_k(&b, &mut to));
    queue!("Queue::top_k_places", q, (b, mut to, mut at) = (buffer()?, buffer()?, places()?) => q.top_k_places(&b, &mut to, &mut at));
    queue!("Queue::bottom_k", q, (b, mut to) = (buffer()?, buffer()?) => q.bottom_k(&b, &mut to));
    queue!("Queue::bottom_k_places", q, (b, mut to, mut at) = (buffer()?, buffer()?, places()?) => q.bottom_k_places(&b, &mut to, &mut at));
    queue!("Queue::segmented_sort", q, (mut b, o) = (buffer()?, offsets()?) => q.segmented_sort(&mut b, &o));
    queue!("Queue::segmented_sort_by_key", q, (mut b, mut v, o) = (buffer()?, buffer()?, offsets()?) => q.segmented_sort_by_key(&mut b, &mut v, &o));
    queue!("Queue::segmented_sort_descending", q, (mut b, o) = (buffer()?, offsets()?) => q.segmented_sort_descending(&mut b, &o));
    queue!("Queue::segmented_sort_by_key_descending", q, (mut b, mut v, o) = (buffer()?, buffer()?, offsets()?) => q.segmented_sort_by_key_descending(&mut b, &mut v, &o));
    Ok(list)
}
