//! The largest or smallest elements, in order, and their positions.
//!
//! | elements | launches |
//! |---|---|
//! | few, or of 64 bits, or many wanted | a copy is sorted, with positions if requested, and the first are taken |
//! | many | a radix select of words that hold an element and its position; the selected words are sorted and unpacked |
//! | on a host device | one |
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::code;
use super::code::{LoadedImage, LoadedKernels};
use super::launch::AlgorithmLaunch;
use super::scalar::Scalar;
use super::sequence::{ElementCount, Elements};
use super::sort;
use gpu_await::sibling::{Home, HostTwin, Span, UntypedKernel, VerbParts};
use gpu_await::{Error, ErrorDetail, Queue, Result, Writable};

const THREADS: u32 = 256;
const MOST_BLOCKS: u64 = 4096;

/// With at least this many elements, and if at most one in this many is wanted, not all are sorted.
const MANY: usize = 1 << 19;
const FEW_OF: usize = 16;
/// A candidate's memory is a multiple of this many words, so that each is aligned for vector loads.
const ALIGNED_WORDS: usize = 32;
/// One candidate is kept per this many elements; beyond that the elements are read again.
const CANDIDATE_OF: usize = 128;

struct TopKernels {
    /// The only kernel on a host device.
    take: Arc<UntypedKernel>,
    numbered: Option<[NumberedKernels; 2]>,
    select: Option<TopSelect>,
}

/// The kernels of a radix select, for elements of up to 32 bits.
struct TopSelect {
    init: Arc<UntypedKernel>,
    count: Arc<UntypedKernel>,
    filter: Arc<UntypedKernel>,
    last: Arc<UntypedKernel>,
    unpack: Arc<UntypedKernel>,
    passes: u32,
    state_bytes: u32,
    threads: u32,
    tile: u32,
    active_blocks: u32,
}

/// The parameters of a pass, as the kernels read them.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct TopPass {
    if_negative: u64,
    always: u64,
    k: u32,
    buffer_items: u32,
    pass: u32,
    padding: u32,
}

/// The kernels for one width of positions.
struct NumberedKernels {
    number: Arc<UntypedKernel>,
    take: Arc<UntypedKernel>,
}

/// The input and the outputs.
struct Top<'k> {
    op: &'static str,
    x: Span<'k>,
    length: ElementCount<'k>,
    out: (Span<'k>, usize),
    places: Option<(Span<'k>, usize)>,
    descending: bool,
}

impl TopKernels {
    fn of<T: Scalar>(home: &Home, op: &'static str, descending: bool) -> Result<Arc<TopKernels>> {
        LoadedKernels::get(home, (op, T::NAME, "top_k"), || {
            let Some(image) = LoadedImage::of(home, "top_k", T::WORD)? else {
                let take = code::twin(op, twin::top::<T>(descending));
                return Ok(TopKernels { take, numbered: None, select: None });
            };
            let of = |width: &str| {
                let number = image.kernel(&format!("number_{width}"))?;
                Ok::<_, Error>(NumberedKernels {
                    number,
                    take: image.kernel(&format!("take_{width}"))?,
                })
            };
            let numbered = Some([of("u32")?, of("u64")?]);
            let has_select = size_of::<T>() <= 4;
            let select = has_select.then(|| TopSelect::of(&image)).transpose()?;
            Ok(TopKernels { take: image.kernel("take")?, numbered, select })
        })
    }
}

impl TopSelect {
    /// Whether its 32 bits can count so many elements, up to the end of a tile that begins among them.
    fn counts(&self, elements: usize) -> bool {
        elements as u64 <= u64::from(u32::MAX - self.tile)
    }

    fn of(image: &LoadedImage) -> Result<Self> {
        let (filter, last) = (image.kernel("top_filter")?, image.kernel("top_last")?);
        let (count, threads) = (image.kernel("top_count")?, image.fact("threads"));
        let active = |kernel: &UntypedKernel| kernel.active_blocks(threads);
        let active_blocks = active(&count)?.min(active(&filter)?).min(active(&last)?);
        Ok(TopSelect {
            init: image.kernel("top_init")?,
            count,
            filter,
            last,
            unpack: image.kernel("top_unpack")?,
            passes: image.fact("passes"),
            state_bytes: image.fact("state_bytes"),
            threads,
            tile: image.fact("tile"),
            active_blocks,
        })
    }
}

fn grid(elements: usize) -> (u32, u32) {
    ((elements as u64).div_ceil(u64::from(THREADS)).min(MOST_BLOCKS) as u32, THREADS)
}

impl Top<'_> {
    /// Poisons the outputs, and returns the error.
    fn refuse(&self, error: Error) -> Error {
        let launch = AlgorithmLaunch::new(self.op).overwrites(&self.out.0);
        let launch =
            self.places.iter().fold(launch, |launch, (places, _)| launch.overwrites(places));
        launch.refuse(error)
    }

    fn check(&self, queue: &Queue<'_>) -> Result<()> {
        let Top { op, x, length, out: (out, k), places, .. } = self;
        let wrong = |what, expected, found| {
            Err(ErrorDetail::WrongLength { op, what, expected, found }.into())
        };
        if *k > length.most {
            return wrong("the input (at least as long as the output)", *k, length.most);
        }
        match places {
            Some((_, found)) if found != k => wrong("the array of places", *k, *found),
            _ => {
                let places = places.iter().map(|(places, _)| places);
                let memory = [x, out].into_iter().chain(places);
                queue.check_memory(memory.chain(length.memory()))
            }
        }
    }

    /// Passes the number of candidates, which may be less than the capacity.
    fn takes<'l>(&'l self, launch: AlgorithmLaunch<'l>) -> AlgorithmLaunch<'l> {
        let in_part = self.length.count.is_some();
        let launch = launch.writes(&self.out.0, in_part);
        match &self.places {
            Some((places, _)) => launch.writes(places, in_part),
            None => launch,
        }
    }

    fn put<T: Scalar>(&self, queue: &Queue<'_>) -> Result<()> {
        let Top { op, x, length, out: (_, k), places, descending } = self;
        if *k == 0 {
            let launch = self.takes(AlgorithmLaunch::new(op).reads(x));
            return launch.length(length).run_nothing(queue);
        }
        let kernels = TopKernels::of::<T>(queue.home(), op, *descending)?;
        let k_there = *k as u64;
        let launch = || AlgorithmLaunch::new(op);
        let Some(numbered) = &kernels.numbered else {
            let launch = self.takes(launch().reads(x));
            let launch = if places.is_some() { launch } else { launch.nothing() };
            return launch.length(length).run(queue, &kernels.take, (1, 1));
        };
        let (is_many, is_few) = (length.most >= MANY, *k <= length.most / FEW_OF);
        match &kernels.select {
            Some(select) if is_many && is_few && select.counts(length.most) => {
                return self.select::<T>(queue, select);
            }
            _ => {}
        }
        let mut keys = queue.scratch::<T>(op, length.most)?;
        if places.is_none() {
            queue.copy(&x.view::<T>(length.most)?, &mut keys)?;
            let keys = keys.span_mut();
            sort::sort_span::<T>(queue, op, &keys, None, length, *descending)?;
            let launch = self.takes(launch().reads(&keys)).value(k_there).length(length);
            return launch.run(queue, &kernels.take, grid(*k));
        }
        let is_wide = length.most as u64 > u64::from(u32::MAX);
        let (of, width) = (&numbered[usize::from(is_wide)], if is_wide { 8 } else { 4 });
        let mut numbers = queue.scratch::<u8>(op, length.most * width)?;
        let (keys, numbers) = (keys.span_mut(), numbers.span_mut());
        let number = launch().reads(x).overwrites(&keys).overwrites(&numbers);
        number.value(length.most as u64).run(queue, &of.number, grid(length.most))?;
        sort::sort_span::<T>(
            queue,
            op,
            &keys,
            Some((numbers.clone(), width)),
            length,
            *descending,
        )?;
        let launch = self.takes(launch().reads(&keys).reads(&numbers));
        launch.value(k_there).length(length).run(queue, &of.take, grid(*k))
    }
}

impl Top<'_> {
    fn select<T: Scalar>(&self, queue: &Queue<'_>, by: &TopSelect) -> Result<()> {
        let Top { op, x, length, out: (_, k), places, descending } = self;
        let buffer_items = (length.most / CANDIDATE_OF).next_multiple_of(ALIGNED_WORDS);
        let mut state = queue.scratch::<u8>(op, by.state_bytes as usize)?;
        let mut buffers = queue.scratch::<u64>(op, 2 * buffer_items)?;
        let mut found = queue.scratch::<u64>(op, *k)?;
        let (state, buffers) = (state.span_mut(), buffers.span_mut());
        let found = found.span_mut();
        let always = if *descending { !T::ALWAYS } else { T::ALWAYS };
        let (if_negative, buffer_items) = (T::IF_NEGATIVE, buffer_items as u32);
        let of = |pass| {
            let k = *k as u32;
            TopPass { if_negative, always, k, buffer_items, pass, padding: 0 }
        };
        let launch = || AlgorithmLaunch::new(op);
        let words = u64::from(by.state_bytes / 4);
        let zero = launch().overwrites(&state).value(words);
        zero.run(queue, &by.init, grid(words as usize))?;
        let tiles = length.most.div_ceil(by.tile as usize) as u32;
        let most_blocks = by.active_blocks * queue.multiprocessors();
        let blocks = (tiles.min(most_blocks), by.threads);
        let count = launch().reads(x).updates(&state).length(length).value(of(0));
        count.run(queue, &by.count, blocks)?;
        for pass in 1..=by.passes {
            let launch = launch().reads(x);
            // Each writes some of it; all that is read has been written before.
            let launch = match pass {
                1 => launch.overwrites(&found).overwrites(&buffers),
                _ => launch.updates(&found).updates(&buffers),
            };
            let launch = launch.updates(&state).length(length).value(of(pass));
            let kernel = if pass == by.passes { &by.last } else { &by.filter };
            launch.run(queue, kernel, blocks)?;
        }
        let there = ElementCount { most: *k, ..length.clone() };
        sort::sort_span::<u64>(queue, op, &found, None, &there, false)?;
        let launch = self.takes(launch().reads(&found));
        let launch = if places.is_some() { launch } else { launch.nothing() };
        launch.length(length).value(of(0)).run(queue, &by.unpack, grid(*k))
    }
}

pub(super) fn out<'k, T>(memory: &'k mut impl Writable<T>) -> (Span<'k>, usize) {
    let len = memory.len();
    (memory.span_mut(), len)
}

pub(super) fn top<T: Scalar>(
    queue: &Queue<'_>,
    (op, descending): (&'static str, bool),
    Elements { span: x, length }: Elements<'_>,
    out: (Span<'_>, usize),
    places: Option<(Span<'_>, usize)>,
) -> Result<()> {
    let top = Top { op, x, length, out, places, descending };
    let put = top.check(queue).and_then(|()| top.put::<T>(queue));
    put.map_err(|error| top.refuse(error))
}

/// Any of these algorithms on the CPU.
mod twin {
    use super::{HostTwin, Scalar};
    use crate::sequence::counted;
    use crate::sort::rank;
    use gpu_await::{Grid, In, InOut, TwinFn};

    pub(super) fn top<T: Scalar>(descending: bool) -> HostTwin {
        let twin =
            move |_: &Grid, x: &[T], out: &mut [T], places: &mut [u64], _most: u64, len: &[u64]| {
                let x = counted(x, len);
                let mut order: Vec<usize> = (0..x.len()).collect();
                order.sort_by_key(|at| rank(&x[*at], descending));
                for (out, at) in out.iter_mut().zip(&order) {
                    *out = x[*at];
                }
                for (place, at) in places.iter_mut().zip(order) {
                    *place = at as u64;
                }
            };
        TwinFn::<(In<T>, InOut<T>, InOut<u64>, u64, In<u64>)>::erase(twin)
    }
}
