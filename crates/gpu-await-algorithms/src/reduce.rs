//! Reductions of an array to one value.
//!
//! | elements | launches |
//! |---|---|
//! | at most a tile, or on a host device | `NAME_single` |
//! | more | `NAME_tiles`, one value per block; `NAME_last`, which reduces those to one |
//!
//! The number of blocks depends only on the device and the number of elements, so a floating point result is the same from run to run.
#![forbid(unsafe_code)]

use std::sync::Arc;

use bytemuck::{NoUninit, Zeroable};

use super::code;
use super::code::{LoadedImage, LoadedKernels};
use super::compare::{Compare, Within};
use super::launch::{AlgorithmLaunch, Inputs};
use super::reduce_op::{BitMasks, Operator, ReduceOp};
use super::scalar::{Scalar, is_greater, is_less};
use super::sequence::{ElementCount, Elements, Sequence};
use gpu_await::sibling::{Home, HostTwin, ResultTarget, Span, UntypedKernel, VerbParts};
use gpu_await::{
    Element, ErrorDetail, Grid, In, Lent, Out, Queue, Readable, Result, TwinFn, Value, Writable,
};

/// Blocks for each that the device holds at once, as in CUB: blocks that end early make room for others.
const ROUNDS: u32 = 5;

/// The kernels of a reduction.
pub(super) struct ReduceKernels {
    single: Arc<UntypedKernel>,
    tiles: Option<ReduceTiles>,
}

struct ReduceTiles {
    kernel: Arc<UntypedKernel>,
    last: Arc<UntypedKernel>,
    single_threads: u32,
    single_tile: u32,
    threads: u32,
    tile: u32,
    partial_bytes: u32,
    active_blocks: u32,
}

/// The input of a reduction, and its kernels.
pub(super) struct Reduction<'k> {
    /// The operation's name in errors.
    op: &'static str,
    /// The kernel's name in the image.
    kernel: &'static str,
    /// The image's family, and the type that it is for.
    image: (&'static str, &'static str),
    twin: fn() -> HostTwin,
    inputs: Inputs<'k>,
    length: ElementCount<'k>,
    /// Arguments of the final kernels, after all the others.
    ends_with: Inputs<'k>,
    /// Arguments of all of its kernels, after those.
    operator: Inputs<'k>,
}

impl<'k> Reduction<'k> {
    fn new<T: Scalar>(op: &'static str, x: &'k impl Sequence<T>, twin: fn() -> HostTwin) -> Self {
        let Elements { span, length } = x.elements();
        let (image, inputs) = (("reduce", T::NAME), Inputs::of(span));
        let (ends_with, operator) = (Inputs::default(), Inputs::default());
        Reduction { op, kernel: op, image, twin, inputs, length, ends_with, operator }
    }

    pub(super) fn sum<T: Scalar>(x: &'k impl Sequence<T>) -> Self {
        let sum = Reduction::new("sum", x, twin::sum::<T>);
        sum.ending_with(T::Total::zeroed()).ending_with(0_u32)
    }

    pub(super) fn min<T: Scalar>(x: &'k impl Sequence<T>) -> Self {
        Reduction::new("min", x, twin::min::<T>).ending_with(T::GREATEST)
    }

    pub(super) fn max<T: Scalar>(x: &'k impl Sequence<T>) -> Self {
        Reduction::new("max", x, twin::max::<T>).ending_with(T::LEAST)
    }

    pub(super) fn arg_min<T: Scalar>(x: &'k impl Sequence<T>) -> Self {
        Reduction::new("arg_min", x, twin::arg_min::<T>)
    }

    pub(super) fn arg_max<T: Scalar>(x: &'k impl Sequence<T>) -> Self {
        Reduction::new("arg_max", x, twin::arg_max::<T>)
    }

    /// A reduction to one element.
    pub(super) fn by<T: Scalar>(x: &'k impl Sequence<T>, op: Operator, init: T) -> Self {
        let reduction = |twin| Reduction::new("reduce", x, twin);
        let reduction = match op {
            Operator::Of(ReduceOp::Sum) => {
                let sum = reduction(twin::sum_as_element::<T>);
                sum.ending_with(init.total()).ending_with(1_u32)
            }
            other => {
                let twin = match other {
                    Operator::Of(ReduceOp::Min) => twin::min::<T>,
                    Operator::Of(ReduceOp::Max) => twin::max::<T>,
                    Operator::Of(_) => twin::product::<T>,
                    Operator::Bits(_) => twin::bits::<T>,
                };
                reduction(twin).ending_with(init.computed())
            }
        };
        let image = op.image::<T>("reduce", "reduce_combined");
        Reduction { kernel: op.kernel(), image, operator: op.arguments(), ..reduction }
    }

    /// The sum of the products of two arrays' elements.
    pub(super) fn dot<T: Scalar>(x: &'k impl Readable<T>, y: &'k impl Readable<T>) -> Result<Self> {
        let (op, expected, found) = ("dot", x.len(), y.len());
        if expected != found {
            let what = "the second array";
            return Err(ErrorDetail::WrongLength { op, what, expected, found }.into());
        }
        let products = Reduction::new(op, x, twin::dot::<T>);
        Ok(Reduction { inputs: products.inputs.and(y.span()), ..products })
    }

    pub(super) fn count_if<T: Scalar>(x: &'k impl Sequence<T>, condition: Compare<T>) -> Self {
        let Within { from, to, is_not } = condition.within();
        let counted = Reduction::new("count_if", x, twin::count_if::<T>);
        Reduction { inputs: counted.inputs.value(from).value(to).value(is_not), ..counted }
    }

    fn ending_with<V: NoUninit>(self, value: V) -> Self {
        Reduction { ends_with: self.ends_with.value(value), ..self }
    }

    fn memory(&self) -> impl Iterator<Item = &Span<'k>> {
        self.inputs.memory().chain(self.length.memory())
    }
}

impl ReduceKernels {
    fn of<T: Scalar>(
        home: &Home,
        Reduction { op, kernel: name, image, twin, .. }: &Reduction<'_>,
    ) -> Result<Arc<ReduceKernels>> {
        LoadedKernels::get(home, (op, T::NAME, name), || {
            let Some(image) = LoadedImage::of(home, image.0, image.1)? else {
                return Ok(ReduceKernels { single: code::twin(op, twin()), tiles: None });
            };
            let fact = |fact: &str| image.fact(&format!("{name}_{fact}"));
            let kernel = image.kernel(&format!("{name}_tiles"))?;
            let threads = fact("tiles_threads");
            let active_blocks = kernel.active_blocks(threads)?;
            let tiles = ReduceTiles {
                kernel,
                last: image.kernel(&format!("{name}_last"))?,
                single_threads: fact("single_threads"),
                single_tile: fact("single_tile"),
                threads,
                tile: fact("tile"),
                partial_bytes: fact("partial_bytes"),
                active_blocks,
            };
            Ok(ReduceKernels {
                single: image.kernel(&format!("{name}_single"))?,
                tiles: Some(tiles),
            })
        })
    }

    /// Reduces the inputs to one value.
    fn put(
        &self,
        queue: &Queue<'_>,
        Reduction { op, inputs, length, ends_with, operator, .. }: &Reduction<'_>,
        target: &ResultTarget<'_>,
    ) -> Result<()> {
        let most = length.most as u64;
        let tiles = match &self.tiles {
            Some(tiles) if most > u64::from(tiles.single_tile) => tiles,
            tiles => {
                let threads = tiles.as_ref().map_or(1, |tiles| tiles.single_threads);
                let launch = AlgorithmLaunch::new(op).inputs(inputs).target(target).length(length);
                let launch = launch.inputs(ends_with).inputs(operator);
                return launch.run(queue, &self.single, (1, threads));
            }
        };
        let refuse = |error| AlgorithmLaunch::new(op).target(target).refuse(error);
        // Those of the device, even in a partition: the number of blocks determines the order of combination, and every run must give the same bits.
        let most_blocks = ROUNDS * tiles.active_blocks * queue.multiprocessors_of_device();
        let blocks = tiles.blocks(most, most_blocks);
        let bytes = blocks as usize * tiles.partial_bytes as usize;
        let mut partials = queue.scratch::<u8>(op, bytes).map_err(refuse)?;
        let partials = partials.span_mut();
        let first = AlgorithmLaunch::new(op).inputs(inputs).overwrites(&partials).length(length);
        let first = first.inputs(operator);
        first.run(queue, &tiles.kernel, (blocks, tiles.threads)).map_err(refuse)?;
        let last =
            AlgorithmLaunch::new(op).reads(&partials).target(target).length(length).value(blocks);
        let last = last.inputs(ends_with).inputs(operator);
        last.run(queue, &tiles.last, (1, tiles.single_threads))
    }
}

impl ReduceTiles {
    /// Blocks for this many elements: each has as many tiles as the others, or the device would wait for those with one more.
    fn blocks(&self, elements: u64, most_blocks: u32) -> u32 {
        let tiles = elements.div_ceil(u64::from(self.tile));
        let of_each = tiles.div_ceil(u64::from(most_blocks));
        tiles.div_ceil(of_each) as u32
    }
}

pub(super) fn to_memory<T: Scalar, R: Element>(
    queue: &Queue<'_>,
    reduction: &Reduction<'_>,
    out: &mut impl Writable<R>,
) -> Result<()> {
    let (op, found) = (reduction.op, out.len());
    let out = out.span_mut();
    let target = ResultTarget::memory(out.clone());
    let refuse = |error| AlgorithmLaunch::new(op).target(&target).refuse(error);
    if found != 1 {
        let what = "the output";
        return Err(refuse(ErrorDetail::WrongLength { op, what, expected: 1, found }.into()));
    }
    queue.check_memory(reduction.memory().chain([&out])).map_err(refuse)?;
    let kernels = ReduceKernels::of::<T>(queue.home(), reduction).map_err(refuse)?;
    kernels.put(queue, reduction, &target)
}

pub(super) fn to_host<T: Scalar, R: Element, H: Send + 'static>(
    queue: &Queue<'_>,
    reduction: &Reduction<'_>,
    read: impl FnOnce(R) -> H + Send + 'static,
) -> Result<Lent<H>> {
    queue.check_memory(reduction.memory())?;
    let kernels = ReduceKernels::of::<T>(queue.home(), reduction)?;
    let put = |target: &ResultTarget<'_>| kernels.put(queue, reduction, target);
    // Zeroes, which pinned memory holds anyway: any value could be a result.
    queue.to_host(reduction.op, R::zeroed(), put, |value| Ok(read(value)))
}

/// [`Reduction::dot`], which poisons the output if it is refused.
pub(super) fn dot_into<'k, T: Scalar>(
    x: &'k impl Readable<T>,
    y: &'k impl Readable<T>,
    out: &mut impl Writable<T::Total>,
) -> Result<Reduction<'k>> {
    let refuse = |error| AlgorithmLaunch::new("dot").overwrites(&out.span_mut()).refuse(error);
    Reduction::dot(x, y).map_err(refuse)
}

/// The position of an element; `u64::MAX` means none.
pub(super) fn place(at: u64) -> Option<usize> {
    usize::try_from(at).ok().filter(|_| at != u64::MAX)
}

/// The reductions on the CPU.
pub(super) mod twin {
    use super::{
        BitMasks, Element, Grid, HostTwin, In, Out, ReduceOp, Scalar, TwinFn, Value, Within,
        is_greater, is_less,
    };
    use crate::scalar::ScalarParts;
    use crate::sequence::counted;

    /// Elements that are combined in sequence; longer arrays are split in halves, so that rounding errors stay small.
    const RUN: usize = 256;

    /// `None` for no elements.
    pub(crate) fn combined<I: Copy, A>(
        x: &[I],
        of: &impl Fn(I) -> A,
        combine: &impl Fn(A, A) -> A,
    ) -> Option<A> {
        if x.len() <= RUN {
            return x.iter().map(|x| of(*x)).reduce(combine);
        }
        let (left, right) = x.split_at((x.len() / 2).next_multiple_of(RUN));
        let (left, right) = (combined(left, of, combine)?, combined(right, of, combine)?);
        Some(combine(left, right))
    }

    /// `init` combined with all elements.
    pub(crate) fn combined_with<I: Copy, A>(
        init: A,
        x: &[I],
        of: &impl Fn(I) -> A,
        combine: &impl Fn(A, A) -> A,
    ) -> A {
        match combined(x, of, combine) {
            Some(all) => combine(init, all),
            None => init,
        }
    }

    pub(super) fn sum<T: Scalar>() -> HostTwin {
        sum_as::<T, T::Total>(|sum| sum)
    }

    pub(super) fn sum_as_element<T: Scalar>() -> HostTwin {
        sum_as::<T, T>(T::of_total)
    }

    fn sum_as<T: Scalar, R: Element>(as_result: fn(T::Total) -> R) -> HostTwin {
        let sum = move |_: &Grid,
                        x: &[T],
                        out: &mut [R],
                        _most: u64,
                        len: &[u64],
                        init: T::Total,
                        _as_element: u32| {
            let sum = combined_with(init, counted(x, len), &T::total, &T::add_totals);
            out[0] = as_result(sum);
        };
        TwinFn::<(In<T>, Out<R>, u64, In<u64>, Value<T::Total>, u32)>::erase(sum)
    }

    pub(super) fn dot<T: Scalar>() -> HostTwin {
        let dot = |_: &Grid, x: &[T], y: &[T], out: &mut [T::Total], _most: u64, _len: &[u64]| {
            let places: Vec<usize> = (0..x.len()).collect();
            let product = |at: usize| T::multiply_totals(x[at].total(), y[at].total());
            let nothing = <T::Total as bytemuck::Zeroable>::zeroed();
            out[0] = combined_with(nothing, &places, &product, &T::add_totals);
        };
        TwinFn::<(In<T>, In<T>, Out<T::Total>, u64, In<u64>)>::erase(dot)
    }

    pub(super) fn min<T: Scalar>() -> HostTwin {
        by::<T>(|a, b| ReduceOp::Min.combine::<T>(a, b))
    }

    pub(super) fn max<T: Scalar>() -> HostTwin {
        by::<T>(|a, b| ReduceOp::Max.combine::<T>(a, b))
    }

    pub(super) fn product<T: Scalar>() -> HostTwin {
        by::<T>(|a, b| ReduceOp::Product.combine::<T>(a, b))
    }

    fn by<T: Scalar>(combine: fn(T::Computed, T::Computed) -> T::Computed) -> HostTwin {
        let reduced =
            move |_: &Grid, x: &[T], out: &mut [T], _most: u64, len: &[u64], init: T::Computed| {
                out[0] = T::rounded(combined_with(init, counted(x, len), &T::computed, &combine));
            };
        TwinFn::<(In<T>, Out<T>, u64, In<u64>, Value<T::Computed>)>::erase(reduced)
    }

    pub(super) fn bits<T: Scalar>() -> HostTwin {
        let reduced = |_: &Grid,
                       x: &[T],
                       out: &mut [T],
                       _most: u64,
                       len: &[u64],
                       init: T::Computed,
                       if_both: u64,
                       if_one: u64| {
            let masks = BitMasks { if_both, if_one };
            let combine = |a, b| masks.combine(a, b);
            out[0] = T::rounded(combined_with(init, counted(x, len), &T::computed, &combine));
        };
        TwinFn::<(In<T>, Out<T>, u64, In<u64>, Value<T::Computed>, u64, u64)>::erase(reduced)
    }

    pub(super) fn arg_min<T: Scalar>() -> HostTwin {
        place_of::<T>(is_less)
    }

    pub(super) fn arg_max<T: Scalar>() -> HostTwin {
        place_of::<T>(is_greater)
    }

    type Before<T> = fn(&T, &T) -> bool;

    fn place_of<T: Scalar>(before: Before<T::Computed>) -> HostTwin {
        let found = move |_: &Grid, x: &[T], out: &mut [u64], _most: u64, len: &[u64]| {
            let mut best: Option<(usize, T::Computed)> = None;
            for (at, x) in counted(x, len).iter().enumerate() {
                if best.is_none_or(|(_, found)| before(&x.computed(), &found)) {
                    best = Some((at, x.computed()));
                }
            }
            out[0] = best.map_or(u64::MAX, |(at, _)| at as u64);
        };
        TwinFn::<(In<T>, Out<u64>, u64, In<u64>)>::erase(found)
    }

    pub(super) fn count_if<T: Scalar>() -> HostTwin {
        type Bound<T> = Value<<T as ScalarParts>::Computed>;
        let count = |_: &Grid,
                     x: &[T],
                     from: T::Computed,
                     to: T::Computed,
                     is_not: u32,
                     out: &mut [u64],
                     _most: u64,
                     len: &[u64]| {
            let within = Within { from, to, is_not };
            let holds = |x: &&T| within.holds(&x.computed());
            out[0] = counted(x, len).iter().filter(holds).count() as u64;
        };
        TwinFn::<(In<T>, Bound<T>, Bound<T>, u32, Out<u64>, u64, In<u64>)>::erase(count)
    }
}
