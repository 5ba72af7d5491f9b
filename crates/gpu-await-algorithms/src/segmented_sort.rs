//! Sorts of each segment of an array, in place and stable.
//!
//! The segment offsets are made monotonic first, so that no two segments overlap. Two launches follow: one for segments that fit a warp,
//! one for longer ones, a block each. On a host device there is one launch.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::code;
use super::code::{LoadedImage, LoadedKernels};
use super::launch::AlgorithmLaunch;
use super::reduce_op::ReduceOp;
use super::scalar::Scalar;
use super::scan;
use super::scan::ScanBy;
use super::sequence::{ElementCount, Elements, Sequence, SequenceMut};
use super::sort::{Order, check_values};
use gpu_await::sibling::{Home, HostTwin, Span, UntypedKernel, VerbParts};
use gpu_await::{Element, Error, Queue, Result, Writable};

/// The most blocks of a grid: a block processes one segment after another.
const MOST_BLOCKS: u64 = 1 << 16;

struct SegmentSortKernels {
    /// The only kernel on a host device.
    warps: Arc<UntypedKernel>,
    device: Option<SegmentSortTuning>,
}

struct SegmentSortTuning {
    blocks: Arc<UntypedKernel>,
    warps_threads: u32,
    blocks_threads: u32,
    /// Segments that a block of the first kernel handles at once.
    warps: u32,
    /// The length of the longest of these.
    warp_tile: u32,
}

/// The input of the sort, and the segments' beginnings.
struct SegmentSort<'k> {
    op: &'static str,
    keys: Span<'k>,
    values: Option<(Span<'k>, usize)>,
    length: ElementCount<'k>,
    offsets: Span<'k>,
    offsets_length: ElementCount<'k>,
    order: Order,
}

impl SegmentSortKernels {
    fn of<K: Scalar>(
        home: &Home,
        (op, value_bytes): (&'static str, Option<usize>),
        descending: bool,
    ) -> Result<Arc<SegmentSortKernels>> {
        let value = match value_bytes {
            None => "",
            Some(4) => "u32",
            Some(_) => "u64",
        };
        LoadedKernels::get(home, (op, K::NAME, value), || {
            let words =
                if value.is_empty() { K::WORD.to_owned() } else { format!("{}_{value}", K::WORD) };
            let Some(image) = LoadedImage::of(home, "segmented_sort", &words)? else {
                let twin = match value_bytes {
                    None => twin::keys::<K>(descending),
                    Some(4) => twin::pairs::<K, u32>(descending),
                    Some(_) => twin::pairs::<K, u64>(descending),
                };
                let warps = code::twin(op, twin);
                return Ok(SegmentSortKernels { warps, device: None });
            };
            let tuning = SegmentSortTuning {
                blocks: image.kernel("sort_blocks")?,
                warps_threads: image.fact("warps_threads"),
                blocks_threads: image.fact("blocks_threads"),
                warps: image.fact("warps"),
                warp_tile: image.fact("warp_tile"),
            };
            let warps = image.kernel("sort_warps")?;
            Ok(SegmentSortKernels { warps, device: Some(tuning) })
        })
    }
}

impl SegmentSort<'_> {
    /// Poisons the memory to be sorted, and returns the error.
    fn refuse(&self, error: Error) -> Error {
        self.arrays(AlgorithmLaunch::new(self.op)).refuse(error)
    }

    fn arrays<'l>(&'l self, launch: AlgorithmLaunch<'l>) -> AlgorithmLaunch<'l> {
        let launch = launch.updates(&self.keys);
        self.values.iter().fold(launch, |launch, (values, _)| launch.updates(values))
    }

    fn put<K: Scalar>(&self, queue: &Queue<'_>, descending: bool) -> Result<()> {
        let SegmentSort { op, keys, values, length, offsets, offsets_length, order } = self;
        let most = offsets_length.most;
        let others = values.iter().map(|(values, _)| values);
        let memory = [keys, offsets].into_iter().chain(others);
        queue.check_memory(memory.chain(length.memory()).chain(offsets_length.memory()))?;
        if most < 2 || length.most < 2 {
            let launch = self.arrays(AlgorithmLaunch::new(op)).length(length);
            return launch.reads(offsets).length(offsets_length).run_nothing(queue);
        }
        let value_bytes = values.as_ref().map(|(_, bytes)| *bytes);
        let kernels = SegmentSortKernels::of::<K>(queue.home(), (op, value_bytes), descending)?;
        let Some(tuning) = &kernels.device else {
            let launch = self.arrays(AlgorithmLaunch::new(op)).length(length);
            let launch = launch.reads(offsets).length(offsets_length);
            return launch.run(queue, &kernels.warps, (1, 1));
        };
        // Elements beyond the length that the device knows are not touched.
        let mut begins = match offsets_length.count {
            Some(_) => queue.zeros::<u64>(most)?,
            None => queue.scratch::<u64>(op, most)?,
        };
        let elements = Elements { span: offsets.clone(), length: offsets_length.clone() };
        let is_long = length.most > tuning.warp_tile as usize;
        let spare = if is_long { length.most } else { 0 };
        let mut other_keys = queue.scratch::<K>(op, spare)?;
        let mut other_values = queue.scratch::<u8>(op, spare * value_bytes.unwrap_or(0))?;
        scan::scan::<u64>(queue, elements, ScanBy::of(ReduceOp::Max, None), &mut begins)?;
        let begins = begins.span_mut();
        let segments = most as u64 - 1;
        let launch = self.arrays(AlgorithmLaunch::new(op));
        let launch = if values.is_some() { launch } else { launch.nothing() };
        let launch = launch.length(length).reads(&begins).length(offsets_length);
        let blocks = segments.div_ceil(u64::from(tuning.warps)).min(MOST_BLOCKS) as u32;
        order.push(launch).run(queue, &kernels.warps, (blocks, tuning.warps_threads))?;
        if !is_long {
            return Ok(());
        }
        let (other_keys, other_values) = (other_keys.span_mut(), other_values.span_mut());
        let launch = self.arrays(AlgorithmLaunch::new(op));
        let launch = match values {
            Some(_) => launch.overwrites(&other_keys).overwrites(&other_values),
            None => launch.nothing().overwrites(&other_keys).nothing(),
        };
        let launch = launch.length(length).reads(&begins).length(offsets_length);
        let blocks = segments.min(MOST_BLOCKS) as u32;
        order.push(launch).run(queue, &tuning.blocks, (blocks, tuning.blocks_threads))
    }
}

pub(super) fn sort_keys<T: Scalar>(
    queue: &Queue<'_>,
    op: &'static str,
    x: &mut impl SequenceMut<T>,
    offsets: &impl Sequence<u64>,
    descending: bool,
) -> Result<()> {
    let Elements { span: keys, length } = x.elements_mut();
    let Elements { span: offsets, length: offsets_length } = offsets.elements();
    let order = Order::of::<T>(descending);
    let sort = SegmentSort { op, keys, values: None, length, offsets, offsets_length, order };
    let put = sort.put::<T>(queue, descending);
    put.map_err(|error| sort.refuse(error))
}

pub(super) fn sort_pairs<K: Scalar, V: Element>(
    queue: &Queue<'_>,
    op: &'static str,
    (keys, values): (&mut impl SequenceMut<K>, &mut impl Writable<V>),
    offsets: &impl Sequence<u64>,
    descending: bool,
) -> Result<()> {
    let Elements { span: keys, length } = keys.elements_mut();
    let Elements { span: offsets, length: offsets_length } = offsets.elements();
    let lengths = (length.most, values.len());
    let values = values.span_mut();
    let checked = check_values::<V>(op, &values, lengths);
    let values = Some((values, size_of::<V>()));
    let order = Order::of::<K>(descending);
    let sort = SegmentSort { op, keys, values, length, offsets, offsets_length, order };
    let put = checked.and_then(|()| sort.put::<K>(queue, descending));
    put.map_err(|error| sort.refuse(error))
}

/// The sorts on the CPU.
mod twin {
    use std::ops::Range;

    use bytemuck::Pod;

    use super::{HostTwin, Scalar};
    use crate::sequence::counted;
    use crate::sort::rank;
    use gpu_await::{Grid, In, InOut, TwinFn};

    /// No segment begins before the previous one ends.
    fn segments(offsets: &[u64], len: usize) -> impl Iterator<Item = Range<usize>> {
        let mut last = 0;
        let begins = offsets.iter().map(move |offset| {
            last = last.max(usize::try_from(*offset).map_or(len, |offset| offset.min(len)));
            last
        });
        begins.clone().zip(begins.skip(1)).map(|(begin, end)| begin..end)
    }

    pub(super) fn keys<K: Scalar>(descending: bool) -> HostTwin {
        let sort = move |_: &Grid,
                         keys: &mut [K],
                         _most: u64,
                         len: &[u64],
                         offsets: &[u64],
                         _offsets_most: u64,
                         offsets_len: &[u64]| {
            let len = counted(keys, len).len();
            for segment in segments(counted(offsets, offsets_len), len) {
                keys[segment].sort_by_key(|key| rank(key, descending));
            }
        };
        TwinFn::<(InOut<K>, u64, In<u64>, In<u64>, u64, In<u64>)>::erase(sort)
    }

    /// Values as words.
    pub(super) fn pairs<K: Scalar, V: Pod>(descending: bool) -> HostTwin {
        let sort = move |_: &Grid,
                         keys: &mut [K],
                         values: &mut [V],
                         _most: u64,
                         len: &[u64],
                         offsets: &[u64],
                         _offsets_most: u64,
                         offsets_len: &[u64]| {
            let len = counted(keys, len).len();
            for segment in segments(counted(offsets, offsets_len), len) {
                let (keys, values) = (&mut keys[segment.clone()], &mut values[segment]);
                let mut pairs: Vec<(K, V)> =
                    keys.iter().copied().zip(values.iter().copied()).collect();
                pairs.sort_by_key(|(key, _)| rank(key, descending));
                for ((key, value), pair) in keys.iter_mut().zip(values).zip(pairs) {
                    (*key, *value) = pair;
                }
            }
        };
        TwinFn::<(InOut<K>, InOut<V>, u64, In<u64>, In<u64>, u64, In<u64>)>::erase(sort)
    }
}
