//! Selections of elements, in order; and run-length encoding: the first element and the length of each run.
//!
//! There are two launches for each part: one initialises the tile state, one selects in each tile and looks back at how many elements
//! earlier tiles selected. A part passes its count to the next part and, for runs, the length of its last run. On a host device there is
//! one launch.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_await::sibling::{
    Home, HostTwin, ResultTarget, Span, UntypedKernel, VerbParts, take_complete,
};
use gpu_await::{Error, ErrorDetail, Lent, Queue, Readable, Result, Writable};

use super::code;
use super::code::{LoadedImage, LoadedKernels};
use super::compare::{Compare, Within};
use super::launch::{AlgorithmLaunch, Inputs};
use super::lookback::Lookback;
use super::parts::{LEFT_BYTES, Parts, UNWRITTEN, count_of};
use super::scalar::Scalar;
use super::sequence::{ElementCount, Elements, Sequence};

struct SelectKernels {
    select: Arc<UntypedKernel>,
    device: Option<SelectTuning>,
}

struct SelectTuning {
    lookback: Lookback,
    most_of_part: u32,
}

/// Identifies a kernel.
#[derive(Clone, Copy)]
pub(super) struct Which {
    /// The operation's name in errors.
    op: &'static str,
    /// Its name in the image.
    entry: &'static str,
    /// The image's family, and the element type that it is for.
    family: &'static str,
    type_name: &'static str,
    /// The kernel that initialises the state of its tiles.
    init: &'static str,
    /// A part leaves a second number to the next.
    carries: bool,
    twin: fn() -> HostTwin,
}

/// The input and the outputs of a selection.
pub(super) struct Selection<'k> {
    inputs: Inputs<'k>,
    /// The outputs in the order of the kernel's parameters, with their lengths.
    outputs: [Option<(Span<'k>, usize)>; 2],
    /// The length of another input, which has one flag per element.
    flags: Option<usize>,
    /// The comparison of elements, passed after the outputs.
    condition: Option<(Vec<u8>, u32)>,
    length: ElementCount<'k>,
}

impl SelectKernels {
    fn of<T: Scalar>(home: &Home, which: &Which) -> Result<Arc<SelectKernels>> {
        LoadedKernels::get(home, (which.entry, which.family, T::NAME), || {
            let Some(image) = LoadedImage::of(home, which.family, which.type_name)? else {
                return Ok(SelectKernels {
                    select: code::twin(which.op, (which.twin)()),
                    device: None,
                });
            };
            let tuning = SelectTuning {
                lookback: Lookback::of(&image, which.init, which.entry)?,
                most_of_part: image.fact(&format!("{}_part", which.entry)),
            };
            Ok(SelectKernels { select: image.kernel(which.entry)?, device: Some(tuning) })
        })
    }
}

impl<'k> Selection<'k> {
    /// Selects by the elements alone.
    fn of<T>(x: &'k impl Sequence<T>, outputs: [Option<(Span<'k>, usize)>; 2]) -> Self {
        let Elements { span, length } = x.elements();
        Selection { inputs: Inputs::of(span), outputs, flags: None, condition: None, length }
    }

    /// Selects by a condition on the values.
    fn compared<T: Scalar>(self, condition: Compare<T>) -> Self {
        let Within { from, to, is_not } = condition.within();
        let bounds = [bytemuck::bytes_of(&from), bytemuck::bytes_of(&to)].concat();
        Selection { condition: Some((bounds, is_not)), ..self }
    }

    /// Selects by an array of flags of the same length.
    fn flagged(self, flags: &'k impl Readable<u8>) -> Self {
        Selection { inputs: self.inputs.and(flags.span()), flags: Some(flags.len()), ..self }
    }

    /// A launch with all arguments before the state.
    fn launch(&self, op: &'static str) -> AlgorithmLaunch<'_> {
        let launch = AlgorithmLaunch::new(op).inputs(&self.inputs);
        let launch =
            self.outputs.iter().flatten().fold(launch, |launch, (out, _)| launch.updates(out));
        match &self.condition {
            Some((bounds, is_not)) => {
                let (from, to) = bounds.split_at(bounds.len() / 2);
                launch.bytes(from).bytes(to).value(*is_not)
            }
            None => launch,
        }
    }

    /// Called before anything is allocated for it. Each output must be able to hold all elements: the number selected is not
    /// known in advance.
    fn check(&self, queue: &Queue<'_>, op: &'static str) -> Result<()> {
        let expected = self.length.most;
        if let Some(found) = self.flags.filter(|found| *found != expected) {
            return Err(ErrorDetail::WrongLength {
                op,
                what: "the array of flags",
                expected,
                found,
            }
            .into());
        }
        let mut lengths = self.outputs.iter().flatten().map(|(_, len)| *len);
        match lengths.find(|found| *found < expected) {
            Some(found) => Err(ErrorDetail::WrongLength {
                op,
                what: "an output (which must take all elements)",
                expected,
                found,
            }
            .into()),
            None => {
                let outputs = self.outputs.iter().flatten().map(|(out, _)| out);
                queue.check_memory(self.inputs.memory().chain(outputs).chain(self.length.memory()))
            }
        }
    }

    /// Poisons the outputs, and returns the error.
    fn refuse(&self, op: &'static str, target: Option<&ResultTarget<'_>>, error: Error) -> Error {
        let launch = target.into_iter().fold(AlgorithmLaunch::new(op), AlgorithmLaunch::target);
        self.outputs
            .iter()
            .flatten()
            .fold(launch, |launch, (out, _)| launch.updates(out))
            .refuse(error)
    }
}

fn into_target<T: Scalar>(
    queue: &Queue<'_>,
    which: &Which,
    selection: &Selection<'_>,
    target: &ResultTarget<'_>,
) -> Result<()> {
    let put = put::<T>(queue, which, selection, target);
    put.map_err(|error| selection.refuse(which.op, Some(target), error))
}

fn put<T: Scalar>(
    queue: &Queue<'_>,
    which: &Which,
    selection: &Selection<'_>,
    target: &ResultTarget<'_>,
) -> Result<()> {
    let (op, length) = (which.op, &selection.length);
    let kernels = SelectKernels::of::<T>(queue.home(), which)?;
    let Some(tuning) = &kernels.device else {
        let launch = selection.launch(op).target(target).length(length);
        return launch.run(queue, &kernels.select, (1, 1));
    };
    let lookback = &tuning.lookback;
    let asked = queue.home().part_of_selections();
    let parts = Parts::of(length.most as u64, tuning.most_of_part, (lookback.tile, asked));
    let mut state = lookback.state(queue, op, lookback.tiles_of(parts.most()))?;
    let state = state.span_mut();
    // What each part but the last leaves for the next.
    let left = (parts.count() as usize - 1) * (LEFT_BYTES / 8) as usize;
    let mut left = match left {
        0 => queue.scratch::<u64>(op, 0)?,
        _ => queue.full(left, UNWRITTEN)?,
    };
    let left = left.span_mut();
    let last = parts.count() - 1;
    for (at, place) in (0..).zip(parts.each()) {
        let [_, items] = place;
        let tiles = lookback.tiles_of(items);
        lookback.begin(queue, op, &state, tiles)?;
        let launch = selection.launch(op).updates(&state).length(length).value(place);
        let launch = if last > 0 { launch.part_of(&left) } else { launch };
        let launch = match at {
            0 => launch.nothing(),
            _ => launch.address(&left, (at - 1) * LEFT_BYTES),
        };
        let launch = match at == last {
            true => launch.target(target),
            false => launch.address(&left, at * LEFT_BYTES),
        };
        let launch = match (which.carries, at == last) {
            (true, false) => launch.address(&left, at * LEFT_BYTES + 8),
            (true, true) => launch.nothing(),
            (false, _) => launch,
        };
        launch.run(queue, &kernels.select, (tiles, lookback.threads))?;
    }
    Ok(())
}

pub(super) fn to_host<T: Scalar>(
    queue: &Queue<'_>,
    (which, selection): &(Which, Selection<'_>),
) -> Result<Lent<usize>> {
    let checked = selection.check(queue, which.op);
    checked.map_err(|error| selection.refuse(which.op, None, error))?;
    let put = |target: &ResultTarget<'_>| into_target::<T>(queue, which, selection, target);
    let (op, most) = (which.op, selection.length.most);
    queue.to_host(op, UNWRITTEN, put, move |count: u64| count_of(op, count, most))
}

pub(super) fn to_memory<T: Scalar>(
    queue: &Queue<'_>,
    (which, selection): &(Which, Selection<'_>),
    count: &mut impl Writable<u64>,
) -> Result<()> {
    let (op, found) = (which.op, count.len());
    let checked = match found {
        1 => selection.check(queue, op).and_then(|()| queue.check_memory([&count.span_mut()])),
        _ => {
            let what = "the count";
            Err(ErrorDetail::WrongLength { op, what, expected: 1, found }.into())
        }
    };
    let refuse =
        |count: Span<'_>, error| selection.refuse(op, Some(&ResultTarget::memory(count)), error);
    checked.map_err(|error| refuse(count.span_mut(), error))?;
    let verifies = queue.home().verifies() && !queue.is_recording_graph();
    if verifies {
        let filled = queue.fill(count, UNWRITTEN);
        filled.map_err(|error| refuse(count.span_mut(), error))?;
    }
    into_target::<T>(queue, which, selection, &ResultTarget::memory(count.span_mut()))?;
    if verifies {
        // In verify mode the download is complete when it returns.
        let found = take_complete(queue.download(count)?)?[0];
        let counted = count_of(op, found, selection.length.most);
        counted.map_err(|error| refuse(count.span_mut(), error))?;
    }
    Ok(())
}

fn typed<T: Scalar>(op: &'static str, entry: &'static str, twin: fn() -> HostTwin) -> Which {
    let (family, init) = ("select", "select_init");
    Which { op, entry, family, type_name: T::NAME, init, carries: false, twin }
}

fn by_width<T: Scalar>(op: &'static str, entry: &'static str, twin: fn() -> HostTwin) -> Which {
    let (family, init) = ("select_flagged", "select_init");
    Which { op, entry, family, type_name: T::WORD, init, carries: false, twin }
}

fn out<'k, T>(memory: &'k mut impl Writable<T>) -> Option<(Span<'k>, usize)> {
    let len = memory.len();
    Some((memory.span_mut(), len))
}

pub(super) fn copy_if<'k, T: Scalar>(
    x: &'k impl Sequence<T>,
    compare: Compare<T>,
    selected: &'k mut impl Writable<T>,
) -> (Which, Selection<'k>) {
    let selection = Selection::of(x, [out(selected), None]).compared(compare);
    (typed::<T>("copy_if", "select_if", twin::copy_if::<T>), selection)
}

pub(super) fn partition<'k, T: Scalar>(
    x: &'k impl Sequence<T>,
    compare: Compare<T>,
    selected: &'k mut impl Writable<T>,
    others: &'k mut impl Writable<T>,
) -> (Which, Selection<'k>) {
    let selection = Selection::of(x, [out(selected), out(others)]).compared(compare);
    (typed::<T>("partition", "partition_if", twin::partition::<T>), selection)
}

pub(super) fn unique<'k, T: Scalar>(
    x: &'k impl Sequence<T>,
    selected: &'k mut impl Writable<T>,
) -> (Which, Selection<'k>) {
    let selection = Selection::of(x, [out(selected), None]);
    (typed::<T>("unique", "unique", twin::unique::<T>), selection)
}

pub(super) fn select<'k, T: Scalar>(
    x: &'k impl Sequence<T>,
    flags: &'k impl Readable<u8>,
    selected: &'k mut impl Writable<T>,
) -> (Which, Selection<'k>) {
    let selection = Selection::of(x, [out(selected), None]).flagged(flags);
    (by_width::<T>("select", "select_flagged", twin::select::<T>), selection)
}

pub(super) fn partition_flagged<'k, T: Scalar>(
    x: &'k impl Sequence<T>,
    flags: &'k impl Readable<u8>,
    selected: &'k mut impl Writable<T>,
    others: &'k mut impl Writable<T>,
) -> (Which, Selection<'k>) {
    let selection = Selection::of(x, [out(selected), out(others)]).flagged(flags);
    (
        by_width::<T>("partition_flagged", "partition_flagged", twin::partition_flagged::<T>),
        selection,
    )
}

pub(super) fn positions<'k>(
    flags: &'k impl Sequence<u8>,
    places: &'k mut impl Writable<u64>,
) -> (Which, Selection<'k>) {
    let selection = Selection::of(flags, [out(places), None]);
    (by_width::<u8>("positions", "select_places", twin::positions), selection)
}

pub(super) fn run_lengths<'k, T: Scalar>(
    x: &'k impl Sequence<T>,
    keys: &'k mut impl Writable<T>,
    lengths: &'k mut impl Writable<u64>,
) -> (Which, Selection<'k>) {
    let which = Which {
        op: "run_length_encode",
        entry: "run_lengths",
        family: "runs",
        type_name: T::EQUAL_AS,
        init: "runs_init",
        carries: true,
        twin: twin::run_lengths::<T>,
    };
    (which, Selection::of(x, [out(keys), out(lengths)]))
}

/// The selections on the CPU.
mod twin {
    use super::{HostTwin, Scalar, Within};
    use crate::scalar::ScalarParts;
    use crate::sequence::counted;
    use gpu_await::{Grid, In, InOut, Out, TwinFn, Value};

    /// Writes the selected elements and, if wanted, the others; returns how many were selected.
    fn split<T: Copy>(
        x: &[T],
        chosen: impl Fn(usize) -> bool,
        selected: &mut [T],
        mut others: Option<&mut [T]>,
    ) -> u64 {
        let (mut taken, mut left) = (0, 0);
        for (at, x) in x.iter().enumerate() {
            if chosen(at) {
                selected[taken] = *x;
                taken += 1;
            } else if let Some(others) = &mut others {
                others[left] = *x;
                left += 1;
            }
        }
        taken as u64
    }

    type Bound<T> = Value<<T as ScalarParts>::Computed>;

    pub(super) fn copy_if<T: Scalar>() -> HostTwin {
        let twin = |_: &Grid,
                    x: &[T],
                    out: &mut [T],
                    from: T::Computed,
                    to: T::Computed,
                    is_not: u32,
                    count: &mut [u64],
                    _: u64,
                    len: &[u64]| {
            let (x, within) = (counted(x, len), Within { from, to, is_not });
            count[0] = split(x, |at| within.holds(&x[at].computed()), out, None);
        };
        TwinFn::<(In<T>, InOut<T>, Bound<T>, Bound<T>, u32, Out<u64>, u64, In<u64>)>::erase(twin)
    }

    pub(super) fn partition<T: Scalar>() -> HostTwin {
        let twin = |_: &Grid,
                    x: &[T],
                    out: &mut [T],
                    others: &mut [T],
                    from: T::Computed,
                    to: T::Computed,
                    is_not: u32,
                    count: &mut [u64],
                    _: u64,
                    len: &[u64]| {
            let (x, within) = (counted(x, len), Within { from, to, is_not });
            count[0] = split(x, |at| within.holds(&x[at].computed()), out, Some(others));
        };
        TwinFn::<(
            In<T>,
            InOut<T>,
            InOut<T>,
            Bound<T>,
            Bound<T>,
            u32,
            Out<u64>,
            u64,
            In<u64>,
        )>::erase(twin)
    }

    pub(super) fn unique<T: Scalar>() -> HostTwin {
        let twin = |_: &Grid, x: &[T], out: &mut [T], count: &mut [u64], _: u64, len: &[u64]| {
            let x = counted(x, len);
            let is_first = |at: usize| at == 0 || x[at].computed() != x[at - 1].computed();
            count[0] = split(x, is_first, out, None);
        };
        TwinFn::<(In<T>, InOut<T>, Out<u64>, u64, In<u64>)>::erase(twin)
    }

    pub(super) fn run_lengths<T: Scalar>() -> HostTwin {
        let twin = |_: &Grid,
                    x: &[T],
                    keys: &mut [T],
                    lengths: &mut [u64],
                    count: &mut [u64],
                    _: u64,
                    len: &[u64]| {
            let x = counted(x, len);
            let runs = x.chunk_by(|a, b| a.computed() == b.computed());
            count[0] = 0;
            for (run, (key, length)) in runs.zip(keys.iter_mut().zip(lengths)) {
                (*key, *length) = (run[run.len() - 1], run.len() as u64);
                count[0] += 1;
            }
        };
        TwinFn::<(In<T>, InOut<T>, InOut<u64>, Out<u64>, u64, In<u64>)>::erase(twin)
    }

    pub(super) fn select<T: Scalar>() -> HostTwin {
        let twin = |_: &Grid,
                    x: &[T],
                    flags: &[u8],
                    out: &mut [T],
                    count: &mut [u64],
                    _: u64,
                    len: &[u64]| {
            count[0] = split(counted(x, len), |at| flags[at] != 0, out, None);
        };
        TwinFn::<(In<T>, In<u8>, InOut<T>, Out<u64>, u64, In<u64>)>::erase(twin)
    }

    pub(super) fn partition_flagged<T: Scalar>() -> HostTwin {
        let twin = |_: &Grid,
                    x: &[T],
                    flags: &[u8],
                    out: &mut [T],
                    others: &mut [T],
                    count: &mut [u64],
                    _: u64,
                    len: &[u64]| {
            count[0] = split(counted(x, len), |at| flags[at] != 0, out, Some(others));
        };
        TwinFn::<(In<T>, In<u8>, InOut<T>, InOut<T>, Out<u64>, u64, In<u64>)>::erase(twin)
    }

    pub(super) fn positions() -> HostTwin {
        let twin =
            |_: &Grid, flags: &[u8], out: &mut [u64], count: &mut [u64], _: u64, len: &[u64]| {
                let flags = counted(flags, len);
                let places: Vec<u64> = (0..flags.len() as u64).collect();
                count[0] = split(&places, |at| flags[at] != 0, out, None);
            };
        TwinFn::<(In<u8>, InOut<u64>, Out<u64>, u64, In<u64>)>::erase(twin)
    }
}
