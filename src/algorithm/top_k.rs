//! The greatest elements, or the least, in their order, and where they are.
//!
//! A copy of the elements is sorted, with their places if these are asked for, and the first are taken: one launch to number them,
//! those of the sort, one to take. On a host device there is one launch.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::code::{AlgorithmKernel, Algorithms, LoadedImage};
use super::launch::AlgorithmLaunch;
use super::scalar::Scalar;
use super::sequence::{ElementCount, Elements, Sequence};
use crate::backend::HostTwin;
use crate::batch::queue::Queue;
use crate::device::home::Home;
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::buffer::DeviceBuffer;
use crate::memory::view::{Span, View, Writable};

const THREADS: u32 = 256;
const MOST_BLOCKS: u64 = 4096;

struct TopKernels {
    /// On a host device the one that there is.
    take: Arc<AlgorithmKernel>,
    numbered: Option<[NumberedKernels; 2]>,
}

/// For places of a width.
struct NumberedKernels {
    number: Arc<AlgorithmKernel>,
    take: Arc<AlgorithmKernel>,
}

/// What is taken from, and where it goes.
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
        Algorithms::get(home, (op, T::NAME, "top_k"), || {
            let Some(image) = LoadedImage::of(home, "top_k", T::WORD)? else {
                let take = AlgorithmKernel::twin(op, twin::top::<T>(descending));
                return Ok(TopKernels { take, numbered: None });
            };
            let of = |width: &str| {
                let number = image.kernel(&format!("number_{width}"))?;
                Ok::<_, Error>(NumberedKernels {
                    number,
                    take: image.kernel(&format!("take_{width}"))?,
                })
            };
            let numbered = Some([of("u32")?, of("u64")?]);
            Ok(TopKernels { take: image.kernel("take")?, numbered })
        })
    }
}

fn grid(elements: usize) -> (u32, u32) {
    ((elements as u64).div_ceil(u64::from(THREADS)).min(MOST_BLOCKS) as u32, THREADS)
}

impl Top<'_> {
    /// Poisons what would have been written, and hands the error back.
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
            return wrong("the input", *k, length.most);
        }
        match places {
            Some((_, found)) if found != k => wrong("the array of places", *k, *found),
            _ => {
                let places = places.iter().map(|(places, _)| places.memory);
                let memory = [x.memory, out.memory].into_iter().chain(places);
                queue.check_memory(memory.chain(length.memory()))
            }
        }
    }

    /// As many as there are, which may be less than there is room for.
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
        let kernels = TopKernels::of::<T>(queue.home(), op, *descending)?;
        let k_there = *k as u64;
        let launch = || AlgorithmLaunch::new(op);
        let Some(numbered) = &kernels.numbered else {
            let launch = self.takes(launch().reads(x));
            let launch = if places.is_some() { launch } else { launch.nothing() };
            return launch.length(length).run(queue, &kernels.take, (1, 1));
        };
        let mut keys = queue.empty::<T>(length.most)?;
        if places.is_none() {
            queue.copy(&View::<T>::over(x.clone(), length.most), &mut keys)?;
            let keys = keys.span_mut();
            queue.sort_span::<T>(op, &keys, None, length, *descending)?;
            let launch = self.takes(launch().reads(&keys)).value(k_there).length(length);
            return launch.run(queue, &kernels.take, grid(*k));
        }
        let is_wide = length.most as u64 > u64::from(u32::MAX);
        let (of, width) = (&numbered[usize::from(is_wide)], if is_wide { 8 } else { 4 });
        let mut numbers: DeviceBuffer<u8> = queue.empty(length.most * width)?;
        let (keys, numbers) = (keys.span_mut(), numbers.span_mut());
        let number = launch().reads(x).overwrites(&keys).overwrites(&numbers);
        number.value(length.most as u64).run(queue, &of.number, grid(length.most))?;
        queue.sort_span::<T>(op, &keys, Some((numbers.clone(), width)), length, *descending)?;
        let launch = self.takes(launch().reads(&keys).reads(&numbers));
        launch.value(k_there).length(length).run(queue, &of.take, grid(*k))
    }
}

fn out<'k, T>(memory: &'k mut impl Writable<T>) -> (Span<'k>, usize) {
    let len = memory.len();
    (memory.span_mut(), len)
}

impl Queue<'_> {
    /// See [`Stream::top_k`](crate::Stream::top_k).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn top_k<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        greatest: &mut impl Writable<T>,
    ) -> Result<()> {
        self.here();
        self.top::<T>(("top_k", true), x.elements(), out(greatest), None)
    }

    /// See [`Stream::top_k_places`](crate::Stream::top_k_places).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn top_k_places<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        greatest: &mut impl Writable<T>,
        places: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.here();
        let places = Some(out(places));
        self.top::<T>(("top_k_places", true), x.elements(), out(greatest), places)
    }

    /// See [`Stream::bottom_k`](crate::Stream::bottom_k).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn bottom_k<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        least: &mut impl Writable<T>,
    ) -> Result<()> {
        self.here();
        self.top::<T>(("bottom_k", false), x.elements(), out(least), None)
    }

    /// See [`Stream::bottom_k_places`](crate::Stream::bottom_k_places).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn bottom_k_places<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        least: &mut impl Writable<T>,
        places: &mut impl Writable<u64>,
    ) -> Result<()> {
        self.here();
        let places = Some(out(places));
        self.top::<T>(("bottom_k_places", false), x.elements(), out(least), places)
    }

    fn top<T: Scalar>(
        &self,
        (op, descending): (&'static str, bool),
        Elements { span: x, length }: Elements<'_>,
        out: (Span<'_>, usize),
        places: Option<(Span<'_>, usize)>,
    ) -> Result<()> {
        let is_empty = out.1 == 0;
        let top = Top { op, x, length, out, places, descending };
        let checked = top.check(self);
        let put = checked.and_then(|()| if is_empty { Ok(()) } else { top.put::<T>(self) });
        put.map_err(|error| top.refuse(error))
    }
}

/// Any of them on the CPU.
mod twin {
    use super::{HostTwin, Scalar};
    use crate::algorithm::sequence::counted;
    use crate::algorithm::sort::rank;
    use crate::backend::Grid;
    use crate::kernel::signature::{In, InOut, TwinFn};

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
