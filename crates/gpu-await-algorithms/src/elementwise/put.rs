//! The elementwise verbs of a [`Queue`].
#![forbid(unsafe_code)]

use std::any::TypeId;
use std::sync::Arc;

use smallvec::SmallVec;

use super::arithmetic::Arithmetic;
use super::formula::{Formula, gives_flags};
use super::loaded::{Blueprint, ElementwiseKernel, KernelId};
use super::number_kind::NumberKind;
use super::operand::{PassedArray, PassedOperands, Written};
use super::operands::Operands;
use super::prepared::{LoadFormula, kernel_of};
use super::ptx::{Recipe, THREADS};
use super::twin;
use gpu_await::sibling::{Home, Span, VerbParts};
use gpu_await::{ErrorDetail, Queue, Readable, Result, Shape2, Writable};

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
    KernelId { of, element, scalars: SmallVec::new(), flags: false, rows: false }
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

/// An array that indices point into, with its length.
type PointedInto<'k> = (Span<'k>, usize);

/// Puts a launch on the queue's stream: for `count` elements, with the arguments, then the array that these point into.
fn put<'k>(
    queue: &Queue<'_>,
    (op, count): (&'static str, usize),
    mut passed: PassedOperands<'k>,
    elsewhere: Option<PointedInto<'k>>,
    kernel: LoadFormula,
) -> Result<()> {
    let shape = passed.arrays.iter().find_map(|array| array.shape);
    if let Some(error) = misfit(op, &passed.arrays, count, shape) {
        return Err(passed.footprint.poison(error.into()));
    }
    let arrays = passed.arrays.iter().map(|array| &array.span);
    let checked = queue.check_memory(arrays.chain(elsewhere.iter().map(|(span, _)| span)));
    checked.map_err(|error| passed.footprint.poison(error))?;
    if count == 0 {
        return queue.put_nothing(&passed.footprint);
    }
    let kernel = kernel(queue.home(), &passed.scalars, shape.is_some());
    let kernel = kernel.map_err(|error| passed.footprint.poison(error))?;
    let tiling = kernel.tiling();
    // Arrays without rows are treated as rows without gaps.
    let pitch_bytes = |array: &PassedArray<'_>| {
        let columns = shape.map_or(0, |shape| shape.columns());
        let pitch = array.shape.map_or(columns, |shape| shape.pitch()) as u64;
        pitch * u64::from(array.element_bytes)
    };
    let fits = |array: &PassedArray<'_>| {
        let starts = [array.span.address(), pitch_bytes(array)];
        starts.into_iter().all(|start| tiling.fits(start, array.element_bytes))
    };
    let whole = shape.is_none_or(|shape| shape.columns().is_multiple_of(tiling.lanes as usize));
    let aligned = whole && passed.arrays.iter().all(fits);
    passed.args.push_value(&(count as u64).to_ne_bytes());
    passed.args.push_value(&u32::from(aligned).to_ne_bytes());
    let mut tile = u64::from(tiling.tile());
    if let Some(shape) = shape {
        passed.args.push_value(&(shape.columns() as u64).to_ne_bytes());
        for array in &passed.arrays {
            passed.args.push_value(&pitch_bytes(array).to_ne_bytes());
        }
        tile = u64::from(THREADS) * if aligned { u64::from(tiling.lanes) } else { 1 };
    }
    if let Some((span, len)) = &elsewhere {
        passed.touches(span);
        passed.args.push_value(&(*len as u64).to_ne_bytes());
    }
    let PassedOperands { args, footprint, .. } = &mut passed;
    kernel.launch(queue, footprint, (count as u64).div_ceil(tile), args)
}

/// The error in the lengths of rows, which must all have one shape, or of arrays, which must all have the same length.
fn misfit(
    op: &'static str,
    arrays: &[PassedArray<'_>],
    count: usize,
    shape: Option<Shape2>,
) -> Option<ErrorDetail> {
    let of_rows = |array: &PassedArray<'_>| {
        let (found, expected) = (array.shape?, shape?);
        let wrong = |what, expected: usize, found: usize| {
            (found != expected).then_some(ErrorDetail::WrongLength { op, what, expected, found })
        };
        let columns = wrong("a row", expected.columns(), found.columns());
        columns.or(wrong("a column", expected.rows(), found.rows()))
    };
    let of_all = |array: &PassedArray<'_>| {
        let (source_len, destination_len) = (array.len, count);
        let detail = ErrorDetail::LengthMismatch { op, source_len, destination_len };
        (source_len != destination_len).then_some(detail)
    };
    arrays.iter().find_map(of_rows).or_else(|| arrays.iter().find_map(of_all))
}

type Loaded = Result<Arc<ElementwiseKernel>>;

/// The kernels; the first caller loads each.
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
    output: impl Written<'k, T>,
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
    let count = passed.writes(output.array(), false);
    put(queue, ("transform", count), passed, None, kernel_of::<T, F, N>)
}

pub(crate) fn transform_in_place<'k, T: Arithmetic, F: Formula<N>, const N: usize>(
    queue: &Queue<'_>,
    formula: F,
    operands: impl Operands<'k, T, N, true>,
    updated: impl Written<'k, T>,
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
    let count = passed.writes(updated.array(), true);
    put(queue, ("transform_in_place", count), passed, None, kernel_of::<T, F, N>)
}

pub(crate) fn transform_flags<'k, T: Arithmetic, F: Formula<N>, const N: usize>(
    queue: &Queue<'_>,
    formula: F,
    operands: impl Operands<'k, T, N, false>,
    flags: impl Written<'k, u8>,
) -> Result<()> {
    const { assert!(gives_flags::<T, F, N>(), "a formula of `transform_flags` ends with a comparison") };
    let _ = formula;
    let mut passed = PassedOperands::new("transform_flags");
    operands.pass(&mut passed);
    let count = passed.writes(flags.array(), false);
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
    put(queue, ("sequence", count), passed, None, |home, _, _| kernel_of_sequence::<T>(home))
}

pub(crate) fn cast<T: Arithmetic, U: Arithmetic>(
    queue: &Queue<'_>,
    source: &impl Readable<T>,
    output: &mut impl Writable<U>,
) -> Result<()> {
    let mut passed = PassedOperands::new("cast");
    passed.reads(source);
    let count = passed.overwrites(output);
    put(queue, ("cast", count), passed, None, |home, _, _| kernel_of_cast::<T, U>(home))
}

/// Refuses an array of indices of another length than the elements that they place.
fn check_indices(op: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let what = "the array of indices";
    Err(ErrorDetail::WrongLength { op, what, expected, found }.into())
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
    check_indices("gather", indices.len(), count)
        .map_err(|error| passed.footprint.poison(error))?;
    put(queue, ("gather", count), passed, Some((span, source.len())), |home, _, _| {
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
    check_indices("scatter", indices.len(), count)
        .map_err(|error| passed.footprint.poison(error))?;
    put(queue, ("scatter", count), passed, Some((span, len)), |home, _, _| {
        kernel_of_scatter::<T, I>(home)
    })
}
