//! Scans: for each element, the combination of all elements up to it.
//!
//! | what | launches |
//! |---|---|
//! | a scan | one initialises the tile state; one scans each tile and looks back at the tiles before it, as far as they have come |
//! | in one order, of more than a tile, where the order shows | one combines each tile, one scans the results, one scans each tile starting from the result before it |
//! | on a host device | one |
//!
//! # Invariants
//! 1. With [`Reproducible`](super::reduce_op::Reproducible) equal elements give equal bits (`tests/one_at_a_time/reproducible.rs::the_same_bits_in_every_run`).
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::code;
use super::code::{LoadedImage, LoadedKernels};
use super::launch::AlgorithmLaunch;
use super::lookback::Lookback;
use super::reduce_op::{BitMasks, Operator, ReduceBy};
use super::scalar::Scalar;
use super::sequence::{Elements, counted};
use gpu_await::sibling::{Home, HostTwin, UntypedKernel, VerbParts};
use gpu_await::{ErrorDetail, Grid, In, InOut, Queue, Result, TwinFn, Value, Writable};

struct ScanKernels {
    scan: Arc<UntypedKernel>,
    lookback: Option<Lookback>,
}

/// The kernels of a scan in one order.
struct OrderedScanKernels {
    tiles: Arc<UntypedKernel>,
    prefixes: Arc<UntypedKernel>,
    behind: Arc<UntypedKernel>,
    threads: u32,
}

/// What a scan does with each element.
#[derive(Clone, Copy)]
pub(super) struct ScanBy<T> {
    op: Operator,
    /// The value before all elements of an exclusive scan.
    init: Option<T>,
    in_order: bool,
}

impl<T: Scalar> ScanBy<T> {
    pub(super) fn of(op: impl ReduceBy<T>, init: Option<T>) -> Self {
        let operator = op.operator();
        ScanBy { op: operator, init, in_order: op.is_reproducible() && operator.rounds::<T>() }
    }

    fn kind(&self) -> &'static str {
        if self.init.is_some() { "exclusive" } else { "inclusive" }
    }

    /// The last arguments of the kernels that write.
    fn arguments<'k>(&self, launch: AlgorithmLaunch<'k>) -> AlgorithmLaunch<'k> {
        let launch = match self.init {
            Some(init) => launch.value(init.computed()),
            None => launch,
        };
        launch.inputs(&self.op.arguments())
    }
}

impl OrderedScanKernels {
    fn of<T: Scalar>(home: &Home, by: &ScanBy<T>) -> Result<Arc<Self>> {
        let (kind, name) = (by.kind(), by.op.kernel());
        let key = if by.init.is_some() { "exclusive in order" } else { "inclusive in order" };
        LoadedKernels::get(home, (key, name, T::NAME), || {
            let (family, type_name) = by.op.image::<T>("scan", "scan_combined");
            let image = LoadedImage::of(home, family, type_name)?;
            let image = image.unwrap_or_else(|| unreachable!("a host device has no tiles"));
            Ok(OrderedScanKernels {
                tiles: image.kernel(&format!("{name}_tiles"))?,
                prefixes: image.kernel(&format!("{name}_prefixes"))?,
                behind: image.kernel(&format!("{name}_{kind}_behind"))?,
                threads: image.fact(&format!("{name}_threads")),
            })
        })
    }
}

impl ScanKernels {
    fn of<T: Scalar>(home: &Home, by: &ScanBy<T>) -> Result<Arc<ScanKernels>> {
        let (kind, op) = (by.kind(), by.op);
        let name = op.kernel();
        LoadedKernels::get(home, (kind, name, T::NAME), || {
            let (family, type_name) = op.image::<T>("scan", "scan_combined");
            let Some(image) = LoadedImage::of(home, family, type_name)? else {
                let scan = code::twin(kind, twin::<T>(op));
                return Ok(ScanKernels { scan, lookback: None });
            };
            let lookback = Lookback::of(&image, "scan_init", name)?;
            let scan = image.kernel(&format!("{name}_{kind}"))?;
            Ok(ScanKernels { scan, lookback: Some(lookback) })
        })
    }
}

pub(super) fn scan<T: Scalar>(
    queue: &Queue<'_>,
    Elements { span, length }: Elements<'_>,
    by: ScanBy<T>,
    out: &mut impl Writable<T>,
) -> Result<()> {
    let name = if by.init.is_some() { "exclusive_scan" } else { "inclusive_scan" };
    let found = out.len();
    let out = out.span_mut();
    let refuse = |error| AlgorithmLaunch::new(name).overwrites(&out).refuse(error);
    if found != length.most {
        let (what, expected) = ("the output", length.most);
        return Err(refuse(ErrorDetail::WrongLength { op: name, what, expected, found }.into()));
    }
    let memory = [&span, &out].into_iter().chain(length.memory());
    queue.check_memory(memory).map_err(refuse)?;
    let counts = length.count.is_some();
    let scans = || AlgorithmLaunch::new(name).reads(&span).writes(&out, counts);
    if found == 0 {
        return scans().length(&length).run_nothing(queue);
    }
    let kernels = ScanKernels::of(queue.home(), &by).map_err(refuse)?;
    let Some(lookback) = &kernels.lookback else {
        let launch = scans().length(&length).value(u32::from(by.init.is_some()));
        let init = by.init.map_or(T::LEAST, T::computed);
        let launch = launch.value(init).inputs(&by.op.arguments());
        return launch.run(queue, &kernels.scan, (1, 1));
    };
    let tiles = lookback.tiles_of(length.most as u64);
    if by.in_order && tiles > 1 {
        // The result of each tile that another one follows.
        let combined = queue.scratch::<T::Computed>(name, tiles as usize - 1);
        let (mut combined, kernels) = combined
            .and_then(|combined| Ok((combined, OrderedScanKernels::of(queue.home(), &by)?)))
            .map_err(refuse)?;
        let (combined, threads) = (combined.span_mut(), kernels.threads);
        let launch = AlgorithmLaunch::new(name).reads(&span).overwrites(&combined);
        let launch = launch.length(&length);
        launch.run(queue, &kernels.tiles, (tiles - 1, threads)).map_err(refuse)?;
        let launch = AlgorithmLaunch::new(name).updates(&combined).length(&length);
        launch.run(queue, &kernels.prefixes, (1, threads)).map_err(refuse)?;
        let launch = by.arguments(scans().reads(&combined).length(&length));
        return launch.run(queue, &kernels.behind, (tiles, threads));
    }
    let mut state = lookback.state(queue, name, tiles).map_err(refuse)?;
    let state = state.span_mut();
    lookback.begin(queue, name, &state, tiles).map_err(refuse)?;
    let launch = by.arguments(scans().updates(&state).length(&length));
    launch.run(queue, &kernels.scan, (tiles, lookback.threads))
}

/// Either scan on the CPU: exclusive if the flag is set.
fn twin<T: Scalar>(op: Operator) -> HostTwin {
    let Operator::Of(op) = op else { return bits_twin::<T>() };
    let scan = move |_: &Grid,
                     x: &[T],
                     out: &mut [T],
                     _most: u64,
                     len: &[u64],
                     exclusive: u32,
                     init: T::Computed| {
        let init = (exclusive != 0).then_some(init);
        put::<T>(counted(x, len), out, init, |a, b| op.combine::<T>(a, b));
    };
    TwinFn::<(In<T>, InOut<T>, u64, In<u64>, u32, Value<T::Computed>)>::erase(scan)
}

fn bits_twin<T: Scalar>() -> HostTwin {
    let scan = |_: &Grid,
                x: &[T],
                out: &mut [T],
                _most: u64,
                len: &[u64],
                exclusive: u32,
                init: T::Computed,
                if_both: u64,
                if_one: u64| {
        let (init, masks) = ((exclusive != 0).then_some(init), BitMasks { if_both, if_one });
        put::<T>(counted(x, len), out, init, |a, b| masks.combine(a, b));
    };
    TwinFn::<(In<T>, InOut<T>, u64, In<u64>, u32, Value<T::Computed>, u64, u64)>::erase(scan)
}

/// Exclusive, if there is an `init`.
fn put<T: Scalar>(
    x: &[T],
    out: &mut [T],
    init: Option<T::Computed>,
    combine: impl Fn(T::Computed, T::Computed) -> T::Computed,
) {
    let mut so_far = init;
    for (x, out) in x.iter().zip(out) {
        let x = x.computed();
        let with = so_far.map_or(x, |so_far| combine(so_far, x));
        *out = T::rounded(so_far.filter(|_| init.is_some()).unwrap_or(with));
        so_far = Some(with);
    }
}
