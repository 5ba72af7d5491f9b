//! The elementwise verbs of a [`Queue`].
#![forbid(unsafe_code)]

use std::any::TypeId;
use std::sync::Arc;

use smallvec::SmallVec;

use super::arithmetic::Arithmetic;
use super::formula::{Formula, gives_flags};
use super::loaded::{Blueprint, ElementwiseKernel, KernelId};
use super::number_kind::NumberKind;
use super::operand::PassedOperands;
use super::operands::Operands;
use super::prepared::kernel_of;
use super::ptx::Recipe;
use super::twin;
use gpu_await::sibling::{Home, Span, VerbParts};
use gpu_await::{ErrorDetail, Queue, Readable, Result, Writable};

/// A type of indices: `u32` or `u64`. Sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a type of indices",
    label = "not a type of indices",
    note = "`u32` and `u64` are"
)]
pub trait Index: Arithmetic + Into<u64> {}
impl Index for u32 {}
impl Index for u64 {}

/// Stand for algorithms in a [`KernelId`].
struct CastTo<T>(std::marker::PhantomData<T>);
struct SequenceOf;
struct GatherBy<I>(std::marker::PhantomData<I>);
struct ScatterBy<I>(std::marker::PhantomData<I>);

fn id<Algorithm: 'static, T: 'static>() -> KernelId {
    let (of, element) = (TypeId::of::<Algorithm>(), TypeId::of::<T>());
    KernelId { of, element, scalars: SmallVec::new(), flags: false }
}

/// The unsigned integer of the same size.
fn bits_of(kind: NumberKind) -> NumberKind {
    match kind.bytes() {
        1 => NumberKind::U8,
        2 => NumberKind::U16,
        4 => NumberKind::U32,
        _ => NumberKind::U64,
    }
}

/// An array, with its length, that indices point into.
type PointedInto<'k> = (Span<'k>, usize);

/// Puts a launch on the queue's stream: for `count` elements, with the arguments, then an array that these point into.
fn put<'k>(
    queue: &Queue<'_>,
    (op, count): (&'static str, usize),
    mut passed: PassedOperands<'k>,
    elsewhere: Option<PointedInto<'k>>,
    kernel: fn(&Home, &[bool]) -> Loaded,
) -> Result<()> {
    if let Some((_, len, _)) = passed.arrays.iter().find(|(_, len, _)| *len != count) {
        let (source_len, destination_len) = (*len, count);
        let error = ErrorDetail::LengthMismatch { op, source_len, destination_len }.into();
        return Err(passed.footprint.poison(error));
    }
    let arrays = passed.arrays.iter().map(|(span, ..)| span);
    let checked = queue.check_memory(arrays.chain(elsewhere.iter().map(|(span, _)| span)));
    checked.map_err(|error| passed.footprint.poison(error))?;
    if count == 0 {
        return queue.put_nothing(&passed.footprint);
    }
    let kernel = kernel(queue.home(), &passed.scalars);
    let kernel = kernel.map_err(|error| passed.footprint.poison(error))?;
    let tiling = kernel.tiling();
    let fits = |(span, _, bytes): &(Span<'_>, usize, u32)| tiling.fits(span.address(), *bytes);
    let aligned = passed.arrays.iter().all(fits);
    passed.args.push_value(&(count as u64).to_ne_bytes());
    passed.args.push_value(&u32::from(aligned).to_ne_bytes());
    if let Some((span, len)) = &elsewhere {
        passed.touches(span);
        passed.args.push_value(&(*len as u64).to_ne_bytes());
    }
    let PassedOperands { args, footprint, .. } = &mut passed;
    kernel.launch(queue, footprint, count as u64, args)
}

type Loaded = Result<Arc<ElementwiseKernel>>;

/// The kernels; the first to ask for one loads it.
pub(crate) fn kernel_of_sequence<T: Arithmetic>(home: &Home) -> Loaded {
    ElementwiseKernel::get(home, id::<SequenceOf, T>(), &|loader| {
        let recipe = Recipe::Sequence { kind: T::KIND };
        loader.load(&Blueprint { name: "sequence", recipe, twin: twin::sequence::<T>() })
    })
}

pub(crate) fn kernel_of_cast<T: Arithmetic, U: Arithmetic>(home: &Home) -> Loaded {
    ElementwiseKernel::get(home, id::<CastTo<U>, T>(), &|loader| {
        let recipe = Recipe::Cast { from: T::KIND, to: U::KIND };
        loader.load(&Blueprint { name: "cast", recipe, twin: twin::cast::<T, U>() })
    })
}

pub(crate) fn kernel_of_gather<T: Arithmetic, I: Index>(home: &Home) -> Loaded {
    ElementwiseKernel::get(home, id::<GatherBy<I>, T>(), &|loader| {
        let recipe = Recipe::Gather { bits: bits_of(T::KIND), index: I::KIND };
        loader.load(&Blueprint { name: "gather", recipe, twin: twin::gather::<T, I>() })
    })
}

pub(crate) fn kernel_of_scatter<T: Arithmetic, I: Index>(home: &Home) -> Loaded {
    ElementwiseKernel::get(home, id::<ScatterBy<I>, T>(), &|loader| {
        let recipe = Recipe::Scatter { bits: bits_of(T::KIND), index: I::KIND };
        loader.load(&Blueprint { name: "scatter", recipe, twin: twin::scatter::<T, I>() })
    })
}

pub(crate) fn transform<'k, T: Arithmetic, F: Formula<N>, const N: usize>(
    queue: &Queue<'_>,
    formula: F,
    operands: impl Operands<'k, T, N, false>,
    output: &'k mut impl Writable<T>,
) -> Result<()> {
    const {
        assert!(
            !gives_flags::<T, F, N>(),
            "a formula that ends with a comparison is for `transform_flags`"
        )
    };
    let _ = formula;
    let mut passed = PassedOperands::new("transform");
    operands.pass(&mut passed);
    let count = passed.overwrites(output);
    put(queue, ("transform", count), passed, None, kernel_of::<T, F, N>)
}

pub(crate) fn transform_in_place<'k, T: Arithmetic, F: Formula<N>, const N: usize>(
    queue: &Queue<'_>,
    formula: F,
    operands: impl Operands<'k, T, N, true>,
    updated: &'k mut impl Writable<T>,
) -> Result<()> {
    const {
        assert!(
            !gives_flags::<T, F, N>(),
            "a formula that ends with a comparison is for `transform_flags`"
        )
    };
    let _ = formula;
    let mut passed = PassedOperands::new("transform_in_place");
    operands.pass(&mut passed);
    let count = passed.updates(updated);
    put(queue, ("transform_in_place", count), passed, None, kernel_of::<T, F, N>)
}

pub(crate) fn transform_flags<'k, T: Arithmetic, F: Formula<N>, const N: usize>(
    queue: &Queue<'_>,
    formula: F,
    operands: impl Operands<'k, T, N, false>,
    flags: &'k mut impl Writable<u8>,
) -> Result<()> {
    const { assert!(gives_flags::<T, F, N>(), "a formula of `transform_flags` ends with a comparison") };
    let _ = formula;
    let mut passed = PassedOperands::new("transform_flags");
    operands.pass(&mut passed);
    let count = passed.overwrites(flags);
    put(queue, ("transform_flags", count), passed, None, kernel_of::<T, F, N>)
}

pub(crate) fn sequence<T: Arithmetic>(
    queue: &Queue<'_>,
    start: T,
    step: T,
    output: &mut impl Writable<T>,
) -> Result<()> {
    let mut passed = PassedOperands::new("sequence");
    passed.number(start);
    passed.number(step);
    let count = passed.overwrites(output);
    put(queue, ("sequence", count), passed, None, |home, _| kernel_of_sequence::<T>(home))
}

pub(crate) fn cast<T: Arithmetic, U: Arithmetic>(
    queue: &Queue<'_>,
    source: &impl Readable<T>,
    output: &mut impl Writable<U>,
) -> Result<()> {
    let mut passed = PassedOperands::new("cast");
    passed.reads(source);
    let count = passed.overwrites(output);
    put(queue, ("cast", count), passed, None, |home, _| kernel_of_cast::<T, U>(home))
}

pub(crate) fn gather<T: Arithmetic, I: Index>(
    queue: &Queue<'_>,
    source: &impl Readable<T>,
    indices: &impl Readable<I>,
    output: &mut impl Writable<T>,
) -> Result<()> {
    let mut passed = PassedOperands::new("gather");
    passed.reads(indices);
    let count = passed.overwrites(output);
    let span = source.span();
    passed.footprint.reads(&span);
    put(queue, ("gather", count), passed, Some((span, source.len())), |home, _| {
        kernel_of_gather::<T, I>(home)
    })
}

pub(crate) fn scatter<T: Arithmetic, I: Index>(
    queue: &Queue<'_>,
    source: &impl Readable<T>,
    indices: &impl Readable<I>,
    target: &mut impl Writable<T>,
) -> Result<()> {
    let mut passed = PassedOperands::new("scatter");
    passed.reads(source);
    passed.reads(indices);
    let (count, len) = (source.len(), target.len());
    let span = target.span_mut();
    passed.footprint.updates(&span);
    put(queue, ("scatter", count), passed, Some((span, len)), |home, _| {
        kernel_of_scatter::<T, I>(home)
    })
}
