//! Reductions of each segment of an array in one launch: one block per segment, or one warp for short segments.
#![forbid(unsafe_code)]

use std::sync::Arc;

use bytemuck::NoUninit;

use super::code;
use super::code::{LoadedImage, LoadedKernels};
use super::launch::AlgorithmLaunch;
use super::reduce_op::{Operator, ReduceBy, ReduceOp};
use super::scalar::Scalar;
use super::sequence::{Elements, Sequence};
use gpu_await::sibling::{Home, HostTwin, UntypedKernel, VerbParts};
use gpu_await::{ErrorDetail, Queue, Result, Writable};

const OP: &str = "segmented_reduce";
/// The most blocks of a grid.
const MOST_BLOCKS: u64 = i32::MAX as u64;
const WARP: u32 = 32;

struct SegmentKernels {
    /// The only kernel on a host device.
    blocks: Arc<UntypedKernel>,
    device: Option<SegmentTuning>,
}

struct SegmentTuning {
    warps: Arc<UntypedKernel>,
    blocks_threads: u32,
    warps_threads: u32,
    /// Elements that a warp takes at once.
    warp_tile: u32,
}

impl SegmentKernels {
    fn of<T: Scalar>(home: &Home, op: Operator) -> Result<Arc<SegmentKernels>> {
        let name = op.kernel();
        let (family, type_name) = op.image::<T>("segmented", "segmented_combined");
        LoadedKernels::get(home, (OP, T::NAME, name), || {
            let Some(image) = LoadedImage::of(home, family, type_name)? else {
                let blocks = code::twin(OP, twin::reduce::<T>(op));
                return Ok(SegmentKernels { blocks, device: None });
            };
            let tuning = SegmentTuning {
                warps: image.kernel(&format!("{name}_warps"))?,
                blocks_threads: image.fact(&format!("{name}_blocks_threads")),
                warps_threads: image.fact(&format!("{name}_warps_threads")),
                warp_tile: image.fact(&format!("{name}_warp_tile")),
            };
            let blocks = image.kernel(&format!("{name}_blocks"))?;
            Ok(SegmentKernels { blocks, device: Some(tuning) })
        })
    }

    /// The kernel to use, and its grid.
    fn grid(&self, elements: u64, segments: u64) -> (&Arc<UntypedKernel>, (u32, u32)) {
        let blocks = |blocks: u64| blocks.min(MOST_BLOCKS) as u32;
        match &self.device {
            None => (&self.blocks, (1, 1)),
            Some(tuning) if elements / segments <= u64::from(tuning.warp_tile) => {
                let warps = u64::from(tuning.warps_threads / WARP);
                (&tuning.warps, (blocks(segments.div_ceil(warps)), tuning.warps_threads))
            }
            Some(tuning) => (&self.blocks, (blocks(segments), tuning.blocks_threads)),
        }
    }
}

pub(super) fn segmented_reduce<T: Scalar>(
    queue: &Queue<'_>,
    x: &impl Sequence<T>,
    offsets: &impl Sequence<u64>,
    op: impl ReduceBy<T>,
    init: T,
    out: &mut impl Writable<T>,
) -> Result<()> {
    match op.operator() {
        op @ Operator::Of(ReduceOp::Sum) => {
            reduce_segments(queue, x, offsets, (op, init.total()), out)
        }
        op => reduce_segments(queue, x, offsets, (op, init.computed()), out),
    }
}

/// `init` as the kernels compute with it.
fn reduce_segments<T: Scalar, A: NoUninit>(
    queue: &Queue<'_>,
    x: &impl Sequence<T>,
    offsets: &impl Sequence<u64>,
    (op, init): (Operator, A),
    out: &mut impl Writable<T>,
) -> Result<()> {
    let Elements { span: x, length } = x.elements();
    let Elements { span: offsets, length: offsets_length } = offsets.elements();
    let found = out.len();
    let out = out.span_mut();
    let refuse = |error| AlgorithmLaunch::new(OP).overwrites(&out).refuse(error);
    let expected = offsets_length.most.saturating_sub(1);
    if found != expected {
        let (op, what) = (OP, "the output");
        return Err(refuse(ErrorDetail::WrongLength { op, what, expected, found }.into()));
    }
    let memory = [&x, &offsets, &out].into_iter();
    let memory = memory.chain(length.memory()).chain(offsets_length.memory());
    queue.check_memory(memory).map_err(refuse)?;
    let launch = AlgorithmLaunch::new(OP).reads(&x).length(&length).reads(&offsets);
    let launch = launch.writes(&out, offsets_length.count.is_some());
    let launch = launch.length(&offsets_length).value(init).inputs(&op.arguments());
    if found == 0 {
        return launch.run_nothing(queue);
    }
    let kernels = SegmentKernels::of::<T>(queue.home(), op).map_err(refuse)?;
    let (kernel, grid) = kernels.grid(length.most as u64, found as u64);
    launch.run(queue, kernel, grid)
}

/// The reductions on the CPU.
mod twin {
    use std::fmt::Debug;

    use bytemuck::Pod;

    use super::{HostTwin, Operator, ReduceOp, Scalar};
    use crate::reduce::twin::combined_with;
    use crate::reduce_op::BitMasks;
    use crate::sequence::counted;
    use gpu_await::{Grid, In, InOut, TwinFn, Value};

    pub(super) fn reduce<T: Scalar>(op: Operator) -> HostTwin {
        match op {
            Operator::Of(ReduceOp::Sum) => plain::<T, T::Total>(|init, x| {
                T::of_total(combined_with(init, x, &T::total, &T::add_totals))
            }),
            Operator::Of(op) => plain::<T, T::Computed>(move |init, x| {
                let combine = |a, b| op.combine::<T>(a, b);
                T::rounded(combined_with(init, x, &T::computed, &combine))
            }),
            Operator::Bits(_) => bits::<T>(),
        }
    }

    fn plain<T: Scalar, A: Pod + Debug + Send + Sync>(
        reduced: impl Fn(A, &[T]) -> T + Send + Sync + 'static,
    ) -> HostTwin {
        let twin = move |_: &Grid,
                         x: &[T],
                         _most: u64,
                         len: &[u64],
                         offsets: &[u64],
                         out: &mut [T],
                         _offsets_most: u64,
                         offsets_len: &[u64],
                         init: A| {
            let (x, offsets) = (counted(x, len), counted(offsets, offsets_len));
            each(x, offsets, out, |x| reduced(init, x));
        };
        type Params<T, A> = (In<T>, u64, In<u64>, In<u64>, InOut<T>, u64, In<u64>, Value<A>);
        TwinFn::<Params<T, A>>::erase(twin)
    }

    fn bits<T: Scalar>() -> HostTwin {
        let twin = |_: &Grid,
                    x: &[T],
                    _most: u64,
                    len: &[u64],
                    offsets: &[u64],
                    out: &mut [T],
                    _offsets_most: u64,
                    offsets_len: &[u64],
                    init: T::Computed,
                    if_both: u64,
                    if_one: u64| {
            let (x, offsets) = (counted(x, len), counted(offsets, offsets_len));
            let masks = BitMasks { if_both, if_one };
            let combine = |a, b| masks.combine(a, b);
            each(x, offsets, out, |x| T::rounded(combined_with(init, x, &T::computed, &combine)));
        };
        type Params<T, A> =
            (In<T>, u64, In<u64>, In<u64>, InOut<T>, u64, In<u64>, Value<A>, u64, u64);
        TwinFn::<Params<T, T::Computed>>::erase(twin)
    }

    fn each<T>(x: &[T], offsets: &[u64], out: &mut [T], reduced: impl Fn(&[T]) -> T) {
        let inside = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX).min(x.len());
        for (ends, out) in offsets.windows(2).zip(out) {
            let begin = inside(ends[0]);
            *out = reduced(&x[begin..inside(ends[1]).max(begin)]);
        }
    }
}
