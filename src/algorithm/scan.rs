//! Scans: for each element, the sum, the least or the greatest of those up to it.
//!
//! Two launches: the state of the tiles is made, then each tile is scanned and looks back at those before it. On a host device
//! one.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::code::{AlgorithmKernel, Algorithms, LoadedImage};
use super::launch::AlgorithmLaunch;
use super::lookback::Lookback;
use super::reduce_op::ReduceOp;
use super::scalar::{Extremes, Scalar};
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
    fn of<T: Scalar>(home: &Home, kind: &'static str, op: ReduceOp) -> Result<Arc<ScanKernels>> {
        Algorithms::get(home, (kind, op.name(), T::NAME), || {
            let Some(image) = LoadedImage::of(home, "scan", T::NAME)? else {
                let scan = AlgorithmKernel::twin(kind, twin::<T>(op));
                return Ok(ScanKernels { scan, lookback: None });
            };
            let lookback = Lookback::of(&image, "scan_init", op.name())?;
            let scan = image.kernel(&format!("{}_{kind}", op.name()))?;
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
        op: ReduceOp,
        out: &mut impl Writable<T>,
    ) -> Result<()> {
        self.here();
        self.scan(x.elements(), (op, None), out)
    }

    /// See [`Stream::exclusive_scan`](crate::Stream::exclusive_scan).
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn exclusive_scan<T: Scalar>(
        &self,
        x: &impl Sequence<T>,
        op: ReduceOp,
        init: T,
        out: &mut impl Writable<T>,
    ) -> Result<()> {
        self.here();
        self.scan(x.elements(), (op, Some(init)), out)
    }

    pub(super) fn scan<T: Scalar>(
        &self,
        Elements { span, length }: Elements<'_>,
        (op, init): (ReduceOp, Option<T>),
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
            return launch.value(init).run(self, &kernels.scan, (1, 1));
        };
        let tiles = length.most.div_ceil(lookback.tile as usize) as u32;
        let mut state = lookback.state(self, tiles).map_err(refuse)?;
        let state = state.span_mut();
        lookback.begin(self, name, &state, tiles).map_err(refuse)?;
        let launch = AlgorithmLaunch::new(name).reads(&span).writes(&out, counts);
        let mut launch = launch.updates(&state).length(&length);
        if let Some(init) = init {
            launch = launch.value(init.computed());
        }
        launch.run(self, &kernels.scan, (tiles, lookback.threads))
    }
}

/// Either scan on the CPU: exclusive, if the flag is set.
fn twin<T: Scalar>(op: ReduceOp) -> HostTwin {
    let combine = move |so_far: T::Computed, x| match op {
        ReduceOp::Sum => op.combine::<T>(so_far, x),
        ReduceOp::Min => so_far.least_of(x),
        ReduceOp::Max => so_far.greatest_of(x),
    };
    let scan = move |_: &Grid,
                     x: &[T],
                     out: &mut [T],
                     _most: u64,
                     len: &[u64],
                     exclusive: u32,
                     init: T::Computed| {
        let mut so_far = (exclusive != 0).then_some(init);
        for (x, out) in counted(x, len).iter().zip(out) {
            let x = x.computed();
            let with = so_far.map_or(x, |so_far| combine(so_far, x));
            *out = T::rounded(so_far.filter(|_| exclusive != 0).unwrap_or(with));
            so_far = Some(with);
        }
    };
    TwinFn::<(In<T>, InOut<T>, u64, In<u64>, u32, Value<T::Computed>)>::erase(scan)
}
