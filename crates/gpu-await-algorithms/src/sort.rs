//! Radix sorts, in place and stable.
//!
//! | elements | launches |
//! |---|---|
//! | at most a tile, or on a host device | one |
//! | more | zero the counts, count the digits of all passes, sum the counts; then one pass per byte of the key |
//!
//! A pass goes over the elements in portions, because the look-back counts in 30 bits; its state is zeroed before each portion, or once for
//! all portions if it is small. Keys move back and forth between their memory and a scratch array of the same size.
//!
//! From 2^32 elements on, other kernels are used, which count in 64 bits.
//!
//! Types are sorted by their bits, as unsigned words of their width: an argument of the kernels encodes the order of these bits, ascending
//! or descending. Floating point numbers are in the order of [`f32::total_cmp`].
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::code;
use super::code::{LoadedImage, LoadedKernels};
use super::launch::AlgorithmLaunch;
use super::scalar::Scalar;
use super::sequence::{ElementCount, Elements, SequenceMut};
use gpu_await::sibling::{Home, HostTwin, Span, UntypedKernel, VerbParts};
use gpu_await::{
    DeviceKind, Element, Error, ErrorDetail, Grid, In, InOut, Queue, Result, TwinFn, Writable,
};

/// How many values a digit has.
const DIGITS: u64 = 256;
/// The size of a word that the zeroing launch writes at once.
const ZEROED: u64 = 16;
const INIT_THREADS: u32 = 256;
const INIT_MOST_BLOCKS: u64 = 1024;
/// The largest look-back state of all passes together that is zeroed by one launch.
const AT_ONCE_BYTES: u64 = 16 << 20;
/// The most elements that one pass of the look-back counts.
const PORTION: u64 = (1 << 28) - 1;

struct SortKernels {
    small: Arc<UntypedKernel>,
    passes: Option<SortPasses>,
}

struct SortPasses {
    init: Arc<UntypedKernel>,
    count: Arc<UntypedKernel>,
    offsets: Arc<UntypedKernel>,
    pass: Arc<UntypedKernel>,
    small_threads: u32,
    small_tile: u32,
    count_threads: u32,
    count_tile: u32,
    count_active_blocks: u32,
    offsets_threads: u32,
    pass_threads: u32,
    pass_tile: u32,
    /// The size of a counter in bytes.
    place_bytes: u64,
}

/// The keys to be sorted, and their values.
struct Sorted<'k> {
    op: &'static str,
    keys: Span<'k>,
    values: Option<(Span<'k>, usize)>,
    length: ElementCount<'k>,
    order: Order,
}

/// How keys of a width are ordered.
#[derive(Clone, Copy)]
pub(super) struct Order {
    width: usize,
    if_negative: u64,
    always: u64,
}

/// The parameters of a pass, as the kernel reads them.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Portion {
    first: u64,
    if_negative: u64,
    always: u64,
    items: i32,
    bit: i32,
}

impl Order {
    pub(super) fn of<K: Scalar>(descending: bool) -> Self {
        let always = if descending { !K::ALWAYS } else { K::ALWAYS };
        Order { width: size_of::<K>(), if_negative: K::IF_NEGATIVE, always }
    }

    pub(super) fn push(self, launch: AlgorithmLaunch<'_>) -> AlgorithmLaunch<'_> {
        // Little-endian, like every GPU: the first bytes are the word of the keys' width.
        let launch = launch.bytes(&self.if_negative.to_le_bytes()[..self.width]);
        launch.bytes(&self.always.to_le_bytes()[..self.width])
    }
}

impl Sorted<'_> {
    fn arrays(&self) -> AlgorithmLaunch<'_> {
        let launch = AlgorithmLaunch::new(self.op).updates(&self.keys);
        self.values.iter().fold(launch, |launch, (values, _)| launch.updates(values))
    }

    /// Poisons the memory to be sorted, and returns the error.
    fn refuse(&self, error: Error) -> Error {
        self.arrays().refuse(error)
    }
}

impl SortKernels {
    fn of<K: Scalar>(
        home: &Home,
        value_bytes: Option<usize>,
        is_wide: bool,
        (op, descending): (&'static str, bool),
    ) -> Result<Arc<SortKernels>> {
        let value = match value_bytes {
            None => "",
            Some(4) => "u32",
            Some(_) => "u64",
        };
        let key = if home.kind() == DeviceKind::Host {
            // Each type has its twin.
            (op, K::NAME, value)
        } else {
            (if is_wide { "sort wide" } else { "sort" }, K::WORD, value)
        };
        LoadedKernels::get(home, key, || {
            let parts = [K::WORD, value, if is_wide { "wide" } else { "" }];
            let words: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
            let words = words.join("_");
            let Some(image) = LoadedImage::of(home, "sort", &words)? else {
                let twin = match value_bytes {
                    None => twin::keys::<K>(descending),
                    Some(4) => twin::pairs::<K, u32>(descending),
                    Some(_) => twin::pairs::<K, u64>(descending),
                };
                return Ok(SortKernels { small: code::twin(op, twin), passes: None });
            };
            let count = image.kernel("sort_count")?;
            let count_threads = image.fact("count_threads");
            let passes = SortPasses {
                init: image.kernel("sort_init")?,
                count_active_blocks: count.active_blocks(count_threads)?,
                count,
                offsets: image.kernel("sort_offsets")?,
                pass: image.kernel("sort_pass")?,
                small_threads: image.fact("small_threads"),
                small_tile: image.fact("small_tile"),
                count_threads,
                count_tile: image.fact("count_tile"),
                offsets_threads: image.fact("offsets_threads"),
                pass_threads: image.fact("pass_threads"),
                pass_tile: image.fact("pass_tile"),
                place_bytes: u64::from(image.fact("place_bytes")),
            };
            Ok(SortKernels { small: image.kernel("sort_small")?, passes: Some(passes) })
        })
    }
}

/// The layout, in bytes, of a sort's bookkeeping memory, and its size.
struct SortScratch {
    lookback_bytes: u64,
    at_once: bool,
    bins: u64,
    counters: u64,
    all: u64,
}

impl SortPasses {
    fn books(&self, most: u64, passes: u64) -> SortScratch {
        let portions = most.div_ceil(self.portion());
        let blocks = most.min(self.portion()).div_ceil(u64::from(self.pass_tile));
        let lookback_bytes = blocks * DIGITS * 4;
        let at_once = lookback_bytes * passes * portions <= AT_ONCE_BYTES;
        let bins = if at_once { lookback_bytes * passes * portions } else { lookback_bytes };
        let counters = bins + portions * passes * DIGITS * self.place_bytes;
        let all = (counters + portions * passes * 4).next_multiple_of(ZEROED);
        SortScratch { lookback_bytes, at_once, bins, counters, all }
    }

    /// Elements per portion: whole tiles.
    fn portion(&self) -> u64 {
        PORTION / u64::from(self.pass_tile) * u64::from(self.pass_tile)
    }

    /// Zeroes some of the bookkeeping memory.
    fn zero(
        &self,
        queue: &Queue<'_>,
        op: &'static str,
        books: &Span<'_>,
        (from, bytes): (u64, u64),
        are_new: bool,
    ) -> Result<()> {
        let words = bytes.div_ceil(ZEROED);
        let blocks = words.div_ceil(u64::from(INIT_THREADS)).min(INIT_MOST_BLOCKS) as u32;
        let launch = AlgorithmLaunch::new(op);
        let launch = if are_new {
            launch.overwrites(books)
        } else {
            launch.part_of(books).address(books, from)
        };
        launch.value(words).run(queue, &self.init, (blocks, INIT_THREADS))
    }
}

/// Sorts keys in another algorithm's memory, with values of this many bytes.
pub(super) fn sort_span<K: Scalar>(
    queue: &Queue<'_>,
    op: &'static str,
    keys: &Span<'_>,
    values: Option<(Span<'_>, usize)>,
    length: &ElementCount<'_>,
    descending: bool,
) -> Result<()> {
    let (keys, length, order) = (keys.clone(), length.clone(), Order::of::<K>(descending));
    let sorted = Sorted { op, keys, values, length, order };
    sort_all::<K>(queue, &sorted, descending)
}

pub(super) fn sort_keys<T: Scalar>(
    queue: &Queue<'_>,
    op: &'static str,
    keys: &mut impl SequenceMut<T>,
    descending: bool,
) -> Result<()> {
    let Elements { span: keys, length } = keys.elements_mut();
    let order = Order::of::<T>(descending);
    let sorted = Sorted { op, keys, values: None, length, order };
    sort_all::<T>(queue, &sorted, descending)
}

pub(super) fn sort_pairs<K: Scalar, V: Element>(
    queue: &Queue<'_>,
    op: &'static str,
    keys: &mut impl SequenceMut<K>,
    values: &mut impl Writable<V>,
    descending: bool,
) -> Result<()> {
    let Elements { span: keys, length } = keys.elements_mut();
    let lengths = (length.most, values.len());
    let values = values.span_mut();
    let checked = check_values::<V>(op, &values, lengths);
    let (values, order) = (Some((values, size_of::<V>())), Order::of::<K>(descending));
    let sorted = Sorted { op, keys, values, length, order };
    checked.map_err(|error| sorted.refuse(error))?;
    sort_all::<K>(queue, &sorted, descending)
}

fn sort_all<K: Scalar>(queue: &Queue<'_>, sorted: &Sorted<'_>, descending: bool) -> Result<()> {
    let Sorted { op, keys, values, length, .. } = sorted;
    if length.most < 2 {
        return sorted.arrays().length(length).run_nothing(queue);
    }
    let value_bytes = values.as_ref().map(|(_, bytes)| *bytes);
    let is_wide = length.most as u64 > u64::from(u32::MAX);
    let others = values.iter().map(|(values, _)| values).chain(length.memory());
    let checked = queue.check_memory([keys].into_iter().chain(others));
    let kernels = checked
        .and_then(|()| SortKernels::of::<K>(queue.home(), value_bytes, is_wide, (op, descending)));
    let put = kernels.and_then(|kernels| match &kernels.passes {
        None => sorted.arrays().length(length).run(queue, &kernels.small, (1, 1)),
        Some(passes) if length.most <= passes.small_tile as usize => {
            let launch = AlgorithmLaunch::new(op).updates(keys).address(keys, 0);
            let launch = match values {
                Some((values, _)) => launch.updates(values).address(values, 0),
                None => launch.nothing().nothing(),
            };
            let launch = sorted.order.push(launch.length(length));
            launch.run(queue, &kernels.small, (1, passes.small_threads))
        }
        Some(passes) => sort_in_passes::<K>(queue, passes, sorted),
    });
    put.map_err(|error| sorted.refuse(error))
}

fn sort_in_passes<K: Scalar>(
    queue: &Queue<'_>,
    by: &SortPasses,
    sorted: &Sorted<'_>,
) -> Result<()> {
    let Sorted { op, keys, values, length, order } = sorted;
    let (most, passes) = (length.most as u64, order.width as u64);
    let books_of = by.books(most, passes);
    let mut books = queue.scratch::<u8>(op, books_of.all as usize)?;
    let books = books.span_mut();
    let mut other_keys = queue.scratch::<K>(op, length.most)?;
    let value_bytes = values.as_ref().map_or(0, |(_, bytes)| *bytes);
    let mut other_values = queue.scratch::<u8>(op, length.most * value_bytes)?;
    let has_values = values.is_some();
    if passes % 2 == 1 {
        // With an odd number of passes it ends in the right place only if it begins in the other.
        queue.copy(&keys.view::<K>(length.most)?, &mut other_keys)?;
        if let Some((values, _)) = values {
            let bytes = values.view::<u8>(length.most * value_bytes)?;
            queue.copy(&bytes, &mut other_values)?;
        }
    }
    by.zero(queue, op, &books, (0, books_of.all), true)?;
    let (other_keys, other_values) = (other_keys.span_mut(), other_values.span_mut());
    let (mut from, mut to) = (
        (keys, values.as_ref().map(|(values, _)| values)),
        (&other_keys, has_values.then_some(&other_values)),
    );
    if passes % 2 == 1 {
        std::mem::swap(&mut from, &mut to);
    }
    let most_blocks = u64::from(by.count_active_blocks) * u64::from(queue.multiprocessors());
    let blocks = most.div_ceil(u64::from(by.count_tile)).min(most_blocks);
    let count =
        AlgorithmLaunch::new(op).part_of(&books).address(&books, books_of.bins).reads(from.0);
    let count = order.push(count.length(length));
    count.run(queue, &by.count, (blocks as u32, by.count_threads))?;
    let offsets = AlgorithmLaunch::new(op).part_of(&books).address(&books, books_of.bins);
    offsets.run(queue, &by.offsets, (passes as u32, by.offsets_threads))?;
    let portions = most.div_ceil(by.portion());
    for pass in 0..passes {
        for portion in 0..portions {
            let step = pass * portions + portion;
            let lookback = if books_of.at_once { step * books_of.lookback_bytes } else { 0 };
            if !books_of.at_once && step > 0 {
                by.zero(queue, op, &books, (0, books_of.lookback_bytes), false)?;
            }
            let bins =
                |portion: u64| books_of.bins + (portion * passes + pass) * DIGITS * by.place_bytes;
            let first = portion * by.portion();
            let items = (most - first).min(by.portion());
            let launch = AlgorithmLaunch::new(op).part_of(&books).address(&books, lookback);
            let launch = launch.address(&books, books_of.counters + 4 * (portion * passes + pass));
            let launch = match portion + 1 < portions {
                true => launch.address(&books, bins(portion + 1)),
                false => launch.nothing(),
            };
            // A partial write, since each portion writes some of it; in the end all is written.
            let launch = launch.address(&books, bins(portion)).overwrites(to.0).reads(from.0);
            let launch = match (to.1, from.1) {
                (Some(to), Some(from)) => launch.overwrites(to).reads(from),
                _ => launch.nothing().nothing(),
            };
            let Order { if_negative, always, .. } = *order;
            let (items_there, bit) = (items as i32, 8 * pass as i32);
            let of = Portion { first, if_negative, always, items: items_there, bit };
            let launch = launch.length(length).value(of);
            let blocks = items.div_ceil(u64::from(by.pass_tile)) as u32;
            launch.run(queue, &by.pass, (blocks, by.pass_threads))?;
        }
        std::mem::swap(&mut from, &mut to);
    }
    Ok(())
}

/// The place of a key's bits in the order.
pub(super) fn rank<K: Scalar>(key: &K, descending: bool) -> u64 {
    let (bits, ones) = (key.key_bits(), u64::MAX >> (64 - 8 * size_of::<K>()));
    let is_negative = bits > ones >> 1;
    let rank = bits ^ if is_negative { K::IF_NEGATIVE } else { 0 } ^ K::ALWAYS;
    if descending { !rank & ones } else { rank }
}

/// Refuses values that differ in number from the keys, or are misaligned as words: a kernel, like its twin, moves them as unsigned integers of
/// their size, whatever their type.
pub(super) fn check_values<V>(
    op: &'static str,
    values: &Span<'_>,
    (expected, found): (usize, usize),
) -> Result<()> {
    const {
        assert!(
            size_of::<V>() == 4 || size_of::<V>() == 8,
            "values that are sorted by keys have 4 or 8 bytes: sort the numbers of others, and gather those"
        )
    };
    let (what, ptr, alignment) = ("the values", values.address(), size_of::<V>() as u64);
    if expected != found {
        return Err(ErrorDetail::WrongLength { op, what, expected, found }.into());
    }
    if !ptr.is_multiple_of(alignment) {
        return Err(ErrorDetail::Misaligned { op, what, ptr, alignment }.into());
    }
    Ok(())
}

/// The sorts on the CPU.
mod twin {
    use bytemuck::Pod;

    use super::{Grid, HostTwin, In, InOut, Scalar, TwinFn, rank};

    fn len_of<T>(x: &[T], len: &[u64]) -> usize {
        super::super::sequence::counted(x, len).len()
    }

    pub(super) fn keys<K: Scalar>(descending: bool) -> HostTwin {
        let sort = move |_: &Grid, keys: &mut [K], _most: u64, len: &[u64]| {
            let len = len_of(keys, len);
            keys[..len].sort_by_key(|key| rank(key, descending));
        };
        TwinFn::<(InOut<K>, u64, In<u64>)>::erase(sort)
    }

    /// Values as words.
    pub(super) fn pairs<K: Scalar, V: Pod>(descending: bool) -> HostTwin {
        let sort = move |_: &Grid, keys: &mut [K], values: &mut [V], _most: u64, len: &[u64]| {
            let len = len_of(keys, len);
            let (keys, values) = (&mut keys[..len], &mut values[..len]);
            let mut pairs: Vec<(K, V)> = keys.iter().copied().zip(values.iter().copied()).collect();
            pairs.sort_by_key(|(key, _)| rank(key, descending));
            let places = keys.iter_mut().zip(values);
            for ((key, value), pair) in places.zip(pairs) {
                (*key, *value) = pair;
            }
        };
        TwinFn::<(InOut<K>, InOut<V>, u64, In<u64>)>::erase(sort)
    }
}
