//! Scans: for each element, the combination of all elements up to it.
//!
//! There are two launches: one initialises the tile state, one scans each tile and looks back at the tiles before it. On a host device
//! there is one launch.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::code::{AlgorithmKernel, Algorithms, LoadedImage};
use super::launch::AlgorithmLaunch;
use super::lookback::Lookback;
use super::reduce_op::{BitMasks, Operator, ReduceBy};
use super::scalar::Scalar;
use super::sequence::{Elements, Sequence, counted};
use crate::backend::{Grid, HostTwin};
use crate::batch::queue::Queue;
use crate::device::home::Home;
use crate::error::{ErrorDetail, Result};
use crate::kernel::signature::{In, InOut, TwinFn, Value};
use crate::memory::view::Writable;

struct ScanKernels {
    scan: Arc<AlgorithmKernel>,
    lookback: Option<Lookback>,
}

impl ScanKernels {
    fn of<T: Scalar>(home: &Home, kind: &'static str, op: Operator) -> Result<Arc<ScanKernels>> {
        let name = op.kernel();
        Algorithms::get(home, (kind, name, T::NAME), || {
            let (family, type_name) = op.image::<T>("scan", "scan_combined");
            let Some(image) = LoadedImage::of(home, family, type_name)? else {
                let scan = AlgorithmKernel::twin(kind, twin::<T>(op));
                return Ok(ScanKernels { scan, lookback: None });
            };
            let lookback = Lookback::of(&image, "scan_init", name)?;
            let scan = image.kernel(&format!("{name}_{kind}"))?;
            Ok(ScanKernels { scan, lookback: Some(lookback) })
        })
    }
}

impl Queue<'_> {
    /// See [`Stream::inclusive_scan`](crate::Stream::inclusive_scan).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn inclusive_scan<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        op: impl ReduceBy<T>,
        out: &mut impl Writable<T>,
    ) -> Result<()> {
        let _place = self.composed_here();
        self.scan(x.elements(), (op.operator(), None), out)
    }

    /// See [`Stream::exclusive_scan`](crate::Stream::exclusive_scan).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn exclusive_scan<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        op: impl ReduceBy<T>,
        init: T,
        out: &mut impl Writable<T>,
    ) -> Result<()> {
        let _place = self.composed_here();
        self.scan(x.elements(), (op.operator(), Some(init)), out)
    }

    pub(super) fn scan<T: Scalar>(
        &self,
        Elements { span, length }: Elements<'_>,
        (op, init): (Operator, Option<T>),
        out: &mut impl Writable<T>,
    ) -> Result<()> {
        let name = if init.is_some() { "exclusive_scan" } else { "inclusive_scan" };
        let found = out.len();
        let out = out.span_mut();
        let refuse = |error| AlgorithmLaunch::new(name).overwrites(&out).refuse(error);
        if found != length.most {
            let (what, expected) = ("the output", length.most);
            return Err(refuse(
                ErrorDetail::WrongLength { op: name, what, expected, found }.into(),
            ));
        }
        let memory = [span.memory, out.memory].into_iter().chain(length.memory());
        self.check_memory(memory).map_err(refuse)?;
        let counts = length.count.is_some();
        if found == 0 {
            let launch = AlgorithmLaunch::new(name).reads(&span).writes(&out, counts);
            return launch.length(&length).run_nothing(self);
        }
        let kind = if init.is_some() { "exclusive" } else { "inclusive" };
        let kernels = ScanKernels::of::<T>(self.home(), kind, op).map_err(refuse)?;
        let Some(lookback) = &kernels.lookback else {
            let launch = AlgorithmLaunch::new(name).reads(&span).writes(&out, counts);
            let launch = launch.length(&length).value(u32::from(init.is_some()));
            let init = init.map_or(T::LEAST, T::computed);
            let launch = launch.value(init).inputs(&op.arguments());
            return launch.run(self, &kernels.scan, (1, 1));
        };
        let tiles = length.most.div_ceil(lookback.tile as usize) as u32;
        let mut state = lookback.state(self, name, tiles).map_err(refuse)?;
        let state = state.span_mut();
        lookback.begin(self, name, &state, tiles).map_err(refuse)?;
        let launch = AlgorithmLaunch::new(name).reads(&span).writes(&out, counts);
        let mut launch = launch.updates(&state).length(&length);
        if let Some(init) = init {
            launch = launch.value(init.computed());
        }
        let launch = launch.inputs(&op.arguments());
        launch.run(self, &kernels.scan, (tiles, lookback.threads))
    }
}

/// Either scan on the CPU: exclusive, if the flag is set.
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
