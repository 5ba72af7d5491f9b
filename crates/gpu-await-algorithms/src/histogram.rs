//! Histograms: the number of elements in each bin.
//!
//! There are two launches: one zeroes the counts, one counts the elements, in shared memory if the bins fit there. On a host device there
//! is one launch.
#![forbid(unsafe_code)]

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::code;
use super::code::{LoadedImage, LoadedKernels};
use super::launch::{AlgorithmLaunch, Inputs};
use super::scalar::Scalar;
use super::sequence::{ElementCount, Elements, Sequence};
use gpu_await::sibling::{Home, HostTwin, Span, UntypedKernel, VerbParts};
use gpu_await::{Error, ErrorDetail, Queue, Readable, Result, Writable};

/// Threads of a zeroing block, and the most blocks.
const INIT_THREADS: u32 = 256;
const INIT_MOST_BLOCKS: u64 = 1024;
/// The most elements that a block counts, in 32 bits, leaving room for another tile.
const BLOCK_COUNTS: u64 = 1 << 31;

struct HistogramKernels {
    count: Arc<UntypedKernel>,
    device: Option<HistogramTuning>,
}

struct HistogramTuning {
    init: Arc<UntypedKernel>,
    /// For more bins than shared memory can hold.
    global: Arc<UntypedKernel>,
    shared_bins: u32,
    threads: u32,
    tile: u32,
    shared_active_blocks: u32,
    global_active_blocks: u32,
}

/// The input and the output of a histogram.
struct Histogram<'k> {
    op: &'static str,
    /// The kernel's name in the image.
    kernel: &'static str,
    twin: fn() -> HostTwin,
    inputs: Inputs<'k>,
    bins: u32,
    counts: Span<'k>,
    length: ElementCount<'k>,
}

impl HistogramKernels {
    fn of<T: Scalar>(home: &Home, histogram: &Histogram<'_>) -> Result<Arc<HistogramKernels>> {
        let Histogram { op, kernel, twin, .. } = histogram;
        LoadedKernels::get(home, (op, T::NAME, ""), || {
            let Some(image) = LoadedImage::of(home, "histogram", T::EQUAL_AS)? else {
                let count = code::twin(op, twin());
                return Ok(HistogramKernels { count, device: None });
            };
            let threads = image.fact(&format!("{kernel}_threads"));
            let count = image.kernel(&format!("{kernel}_shared"))?;
            let global = image.kernel(&format!("{kernel}_global"))?;
            let tuning = HistogramTuning {
                init: image.kernel("histogram_init")?,
                shared_bins: image.fact("shared_bins"),
                threads,
                tile: image.fact(&format!("{kernel}_tile")),
                shared_active_blocks: count.active_blocks(threads)?,
                global_active_blocks: global.active_blocks(threads)?,
                global,
            };
            Ok(HistogramKernels { count, device: Some(tuning) })
        })
    }
}

impl HistogramTuning {
    /// Blocks for this many elements. A block counts in 32 bits: beyond that there are more blocks than are resident.
    fn blocks(&self, elements: u64, most_blocks: u64) -> u32 {
        let tiles = elements.div_ceil(u64::from(self.tile));
        let least = elements.div_ceil(BLOCK_COUNTS);
        tiles.min(most_blocks.max(least)) as u32
    }
}

impl Histogram<'_> {
    /// Poisons the outputs, and returns the error.
    fn refuse(&self, error: Error) -> Error {
        AlgorithmLaunch::new(self.op).overwrites(&self.counts).refuse(error)
    }

    fn put<T: Scalar>(&self, queue: &Queue<'_>) -> Result<()> {
        let Histogram { op, inputs, counts, length, .. } = self;
        let memory = inputs.memory().chain([counts]).chain(length.memory());
        queue.check_memory(memory)?;
        let kernels = HistogramKernels::of::<T>(queue.home(), self)?;
        let launch = AlgorithmLaunch::new(op).inputs(inputs);
        let Some(tuning) = &kernels.device else {
            let launch = launch.overwrites(counts).length(length);
            return launch.run(queue, &kernels.count, (1, 1));
        };
        let bins = u64::from(self.bins);
        let zero = AlgorithmLaunch::new(op).overwrites(counts).value(bins);
        let blocks = bins.div_ceil(u64::from(INIT_THREADS)).min(INIT_MOST_BLOCKS) as u32;
        zero.run(queue, &tuning.init, (blocks, INIT_THREADS))?;
        let launch = launch.updates(counts).length(length);
        if length.most == 0 {
            return launch.run_nothing(queue);
        }
        let (kernel, active_blocks) = match self.bins <= tuning.shared_bins {
            true => (&kernels.count, tuning.shared_active_blocks),
            false => (&tuning.global, tuning.global_active_blocks),
        };
        let most_blocks = u64::from(active_blocks) * u64::from(queue.multiprocessors());
        let blocks = tuning.blocks(length.most as u64, most_blocks);
        launch.run(queue, kernel, (blocks, tuning.threads))
    }
}

/// The number of bins, as the kernels count them; at least one.
fn bins_of(op: &'static str, counts: usize) -> Result<u32> {
    let bins = u32::try_from(counts).ok().filter(|bins| (1..=i32::MAX as u32).contains(bins));
    bins.ok_or_else(|| {
        let values = format!("counts.len() = {counts}");
        let requirement = "0 < counts.len() < 2^31";
        ErrorDetail::Precondition { kernel: op.to_owned(), requirement, values }.into()
    })
}

pub(super) fn histogram<T: Scalar>(
    queue: &Queue<'_>,
    x: &impl Sequence<T>,
    range: RangeInclusive<T>,
    counts: &mut impl Writable<u64>,
) -> Result<()> {
    let (op, found) = ("histogram", counts.len());
    let (Elements { span, length }, counts) = (x.elements(), counts.span_mut());
    let refuse = |error| AlgorithmLaunch::new(op).overwrites(&counts).refuse(error);
    let bins = bins_of(op, found).map_err(refuse)?;
    let (lower, upper) = range.into_inner();
    let Some([first, second, scale]) = T::even_bins(lower, upper, bins) else {
        let values = format!("range = {lower:?}..={upper:?}");
        // Floats are the ones whose bits are not ordered like integers.
        let requirement = match T::IF_NEGATIVE {
            0 => "a range that does not end before it begins",
            _ => "a finite range that is neither empty nor too narrow for its bins",
        };
        let kernel = op.to_owned();
        return Err(refuse(ErrorDetail::Precondition { kernel, requirement, values }.into()));
    };
    let inputs = Inputs::of(span).value(first).value(second).value(scale).value(bins);
    let twin = twin::even::<T>;
    let histogram = Histogram { op, kernel: "even", twin, inputs, bins, counts, length };
    histogram.put::<T>(queue).map_err(|error| histogram.refuse(error))
}

pub(super) fn histogram_between<T: Scalar>(
    queue: &Queue<'_>,
    x: &impl Sequence<T>,
    levels: &impl Readable<T>,
    counts: &mut impl Writable<u64>,
) -> Result<()> {
    let (op, found, expected) = ("histogram_between", counts.len(), levels.len());
    let (Elements { span, length }, counts) = (x.elements(), counts.span_mut());
    let refuse = |error| AlgorithmLaunch::new(op).overwrites(&counts).refuse(error);
    let bins = bins_of(op, found).map_err(refuse)?;
    if found + 1 != expected {
        let (what, expected, found) = ("the array of levels", found + 1, expected);
        return Err(refuse(ErrorDetail::WrongLength { op, what, expected, found }.into()));
    }
    // Floats are compared as floats.
    let flip = if T::IF_NEGATIVE == 0 { T::ALWAYS } else { 0 };
    let flip = &flip.to_le_bytes()[..size_of::<T>()];
    let inputs = Inputs::of(span).and(levels.span()).bytes(flip).value(bins);
    let twin = twin::between::<T>;
    let histogram = Histogram { op, kernel: "between", twin, inputs, bins, counts, length };
    histogram.put::<T>(queue).map_err(|error| histogram.refuse(error))
}

/// The histograms on the CPU.
mod twin {
    use super::{HostTwin, Scalar};
    use crate::scalar::ScalarParts;
    use crate::sequence::counted;
    use gpu_await::{Grid, In, Out, TwinFn, Value};

    type Bound<T> = Value<<T as ScalarParts>::Computed>;

    pub(super) fn even<T: Scalar>() -> HostTwin {
        let twin = |_: &Grid,
                    x: &[T],
                    lower: T::Computed,
                    upper: T::Computed,
                    scale: T::Computed,
                    bins: u32,
                    counts: &mut [u64],
                    _: u64,
                    len: &[u64]| {
            let range = [lower, upper, scale];
            count(counted(x, len), counts, |x| x.even_bin(&range, bins));
        };
        type Params<T> = (In<T>, Bound<T>, Bound<T>, Bound<T>, u32, Out<u64>, u64, In<u64>);
        TwinFn::<Params<T>>::erase(twin)
    }

    pub(super) fn between<T: Scalar>() -> HostTwin {
        let twin = |_: &Grid,
                    x: &[T],
                    levels: &[T],
                    _flip: T,
                    bins: u32,
                    counts: &mut [u64],
                    _: u64,
                    len: &[u64]| {
            let level = |at: usize| levels[at].computed();
            count(counted(x, len), counts, |x| {
                let (x, last) = (x.computed(), bins as usize);
                if !(x >= level(0) && x <= level(last)) {
                    return None;
                }
                // The same search as the kernel's, so that unsorted levels give the same result.
                let (mut from, mut to) = (0, last - 1);
                while from < to {
                    let middle = from + (to - from) / 2;
                    if level(middle + 1) <= x { from = middle + 1 } else { to = middle }
                }
                Some(from)
            });
        };
        TwinFn::<(In<T>, In<T>, Value<T>, u32, Out<u64>, u64, In<u64>)>::erase(twin)
    }

    fn count<T: Copy>(x: &[T], counts: &mut [u64], bin: impl Fn(T) -> Option<usize>) {
        counts.fill(0);
        for bin in x.iter().filter_map(|x| bin(*x)) {
            counts[bin] += 1;
        }
    }
}
