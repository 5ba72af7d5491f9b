//! [`AlgorithmLaunch`]: one kernel launch of an algorithm, with the memory that it touches, before it is submitted.
#![forbid(unsafe_code)]

use std::sync::Arc;

use bytemuck::NoUninit;
use gpu_await::sibling::{ArgBlock, Footprint, ResultTarget, Span, UntypedKernel, VerbParts};
use gpu_await::{Error, Queue, Result};
use smallvec::SmallVec;

use super::sequence::ElementCount;

/// The arguments of a launch, in the order of the kernel's parameters.
pub(super) struct AlgorithmLaunch<'k> {
    footprint: Footprint<'k>,
    args: ArgBlock,
}

/// The first arguments of every kernel of an operation: memory that it reads, then values.
#[derive(Clone, Default)]
pub(super) struct Inputs<'k> {
    /// An array, since that is covariant.
    reads: [Option<Span<'k>>; 2],
    values: SmallVec<[SmallVec<[u8; 8]>; 2]>,
}

impl<'k> Inputs<'k> {
    pub(super) fn of(span: Span<'k>) -> Self {
        Inputs { reads: [Some(span), None], ..Inputs::default() }
    }

    pub(super) fn memory(&self) -> impl Iterator<Item = &Span<'k>> {
        self.reads.iter().flatten()
    }

    pub(super) fn and(mut self, span: Span<'k>) -> Self {
        self.reads[1] = Some(span);
        self
    }

    pub(super) fn value<V: NoUninit>(self, value: V) -> Self {
        self.bytes(bytemuck::bytes_of(&value))
    }

    pub(super) fn bytes(mut self, value: &[u8]) -> Self {
        self.values.push(SmallVec::from_slice(value));
        self
    }
}

impl<'k> AlgorithmLaunch<'k> {
    /// Makes a launch that errors call `op`.
    pub(super) fn new(op: &'static str) -> Self {
        AlgorithmLaunch { footprint: Footprint::new(op), args: ArgBlock::default() }
    }

    pub(super) fn inputs(self, inputs: &Inputs<'k>) -> Self {
        let mut launch = inputs.reads.iter().flatten().fold(self, AlgorithmLaunch::reads);
        inputs.values.iter().for_each(|value| launch.args.push_value(value));
        launch
    }

    pub(super) fn reads(mut self, span: &Span<'k>) -> Self {
        self.footprint.reads(span);
        self.memory(span)
    }

    pub(super) fn overwrites(mut self, span: &Span<'k>) -> Self {
        self.footprint.overwrites(span);
        self.memory(span)
    }

    pub(super) fn updates(mut self, span: &Span<'k>) -> Self {
        self.footprint.updates(span);
        self.memory(span)
    }

    /// Memory that is overwritten or, where only the device knows how much of it, perhaps in part.
    pub(super) fn writes(self, span: &Span<'k>, in_part: bool) -> Self {
        if in_part { self.updates(span) } else { self.overwrites(span) }
    }

    /// Reads and writes some of the memory, at addresses that are passed separately.
    pub(super) fn part_of(mut self, span: &Span<'k>) -> Self {
        self.footprint.updates(span);
        self
    }

    /// An address inside memory that was already passed to the launch.
    pub(super) fn address(mut self, span: &Span<'k>, offset_bytes: u64) -> Self {
        self.args.push_memory(span.address() + offset_bytes, 0);
        self
    }

    fn memory(mut self, span: &Span<'k>) -> Self {
        self.args.push_memory(span.address(), span.size_bytes());
        self
    }

    pub(super) fn target(mut self, target: &ResultTarget<'k>) -> Self {
        target.enter(&mut self.footprint, &mut self.args);
        self
    }

    /// Passes a null pointer in place of memory.
    pub(super) fn nothing(mut self) -> Self {
        self.args.push_memory(0, 0);
        self
    }

    pub(super) fn value<V: NoUninit>(self, value: V) -> Self {
        self.bytes(bytemuck::bytes_of(&value))
    }

    pub(super) fn bytes(mut self, value: &[u8]) -> Self {
        self.args.push_value(value);
        self
    }

    /// Passes the maximum number of elements, and where the device has the actual number.
    pub(super) fn length(self, length: &ElementCount<'k>) -> Self {
        let launch = self.value(length.most as u64);
        match &length.count {
            Some(count) => launch.reads(count),
            None => launch.nothing(),
        }
    }

    /// Puts the launch on the queue's stream.
    pub(super) fn run(
        mut self,
        queue: &Queue<'_>,
        kernel: &Arc<UntypedKernel>,
        grid: (u32, u32),
    ) -> Result<()> {
        kernel.launch(queue, &mut self.footprint, &self.args, grid)
    }

    /// The checks of [`run`](Self::run), for an operation with nothing to run.
    pub(super) fn run_nothing(self, queue: &Queue<'_>) -> Result<()> {
        queue.put_nothing(&self.footprint)
    }

    /// Poisons the outputs, and returns the error.
    pub(super) fn refuse(self, error: Error) -> Error {
        self.footprint.poison(error)
    }
}
