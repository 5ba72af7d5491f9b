//! [`AlgorithmLaunch`]: one kernel launch of an algorithm, with the memory that it touches, before it is submitted.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytemuck::NoUninit;
use smallvec::SmallVec;

use super::code::AlgorithmKernel;
use super::sequence::ElementCount;
use crate::backend::{ArgBlock, Grid, LaunchShape};
use crate::batch::queue::Queue;
use crate::batch::settle::{Lent, Settled};
use crate::error::{Error, Result};
use crate::memory::Element;
use crate::memory::allocation::Allocation;
use crate::memory::pinned::PinnedBuffer;
use crate::memory::pinned_pool::PinnedBlock;
use crate::memory::view::{Span, Writable};
use crate::op::{HostValue, Values};
use crate::submit::{Footprint, KernelLaunch, wrong_device};

/// The arguments of a launch, in the order of the kernel's parameters.
pub(super) struct AlgorithmLaunch<'k> {
    footprint: Footprint<'k>,
    args: ArgBlock,
}

/// The first arguments of every kernel of an operation: memory that it reads, then values.
#[derive(Clone, Default)]
pub(super) struct Inputs<'k> {
    /// An array, as it is covariant.
    reads: [Option<Span<'k>>; 2],
    values: SmallVec<[SmallVec<[u8; 8]>; 2]>,
}

impl<'k> Inputs<'k> {
    pub(super) fn of(span: Span<'k>) -> Self {
        Inputs { reads: [Some(span), None], ..Inputs::default() }
    }

    pub(super) fn memory(&self) -> impl Iterator<Item = &'k Arc<Allocation>> {
        self.reads.iter().flatten().map(|span| span.memory)
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

/// The destination of a result.
#[derive(Clone)]
pub(super) enum ResultTarget<'k> {
    Memory(Span<'k>),
    Pinned(&'k Arc<PinnedBlock>, u64),
}

impl<'k> AlgorithmLaunch<'k> {
    /// A launch that errors call `op`.
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

    /// Memory that is overwritten, or, where the device alone knows how much of it, perhaps in part.
    pub(super) fn writes(self, span: &Span<'k>, in_part: bool) -> Self {
        if in_part { self.updates(span) } else { self.overwrites(span) }
    }

    /// Reads and writes some of the memory, at addresses that are passed apart.
    pub(super) fn part_of(mut self, span: &Span<'k>) -> Self {
        self.footprint.updates(span);
        self
    }

    /// An address inside of memory that the launch was passed before.
    pub(super) fn address(mut self, span: &Span<'k>, offset_bytes: u64) -> Self {
        self.args.push_memory(span.ptr().offset(offset_bytes).0, 0);
        self
    }

    fn memory(mut self, span: &Span<'k>) -> Self {
        self.args.push_memory(span.ptr().0, span.range.end - span.range.start);
        self
    }

    pub(super) fn target(mut self, target: &ResultTarget<'k>) -> Self {
        match target {
            ResultTarget::Memory(span) => return self.overwrites(span),
            ResultTarget::Pinned(block, bytes) => {
                self.footprint.lends(block);
                self.args.push_memory(block.device().0, *bytes);
            }
        }
        self
    }

    /// No memory: a null pointer.
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

    /// The most elements that there are, and where the device has their number.
    pub(super) fn length(self, length: &ElementCount<'k>) -> Self {
        let launch = self.value(length.most as u64);
        match &length.count {
            Some(count) => launch.reads(count),
            None => launch.nothing(),
        }
    }

    /// Puts it on the queue's stream.
    pub(super) fn run(
        mut self,
        queue: &Queue<'_>,
        kernel: &Arc<AlgorithmKernel>,
        (blocks, threads): (u32, u32),
    ) -> Result<()> {
        // ORDERING: Relaxed, twice: a hint, as for any kernel.
        if !kernel.launched.load(Ordering::Relaxed) {
            kernel.launched.store(true, Ordering::Relaxed);
            self.footprint.may_block();
        }
        let grid = Grid {
            grid_dim: [blocks, 1, 1],
            block_dim: [threads, 1, 1],
            cluster_dim: [1, 1, 1],
            shared_mem_bytes: 0,
        };
        let shape = LaunchShape { overlaps: kernel.waits_first, ..LaunchShape::plain(grid) };
        let launch =
            KernelLaunch { code: kernel, function: &kernel.function, shape, args: &self.args };
        Ok(queue.submit_launch(&mut self.footprint, &launch)?)
    }

    /// The checks of [`run`](Self::run), for an operation with nothing to run.
    pub(super) fn run_nothing(self, queue: &Queue<'_>) -> Result<()> {
        queue.submit_nothing(&self.footprint)
    }

    /// Poisons the outputs, and returns the error.
    pub(super) fn refuse(self, error: Error) -> Error {
        self.footprint.poison(error)
    }
}

impl Queue<'_> {
    /// Refuses memory of another device, before anything is loaded, allocated or put on the stream for an operation.
    pub(super) fn check_memory<'m>(
        &self,
        memory: impl IntoIterator<Item = &'m Arc<Allocation>>,
    ) -> Result<()> {
        let engine = self.stream().engine();
        match memory.into_iter().find(|memory| memory.engine().id != engine.id) {
            Some(other) => Err(wrong_device("a buffer", engine, other.engine())),
            None => Ok(()),
        }
    }
}

/// Has `put` write one value, which the host reads when that is complete.
///
/// On a GPU the kernel writes it to pinned memory, where `unwritten` stands before. On a host device, where kernels reach device
/// memory only, it is downloaded.
pub(super) fn to_host<R: Element, H: Send + 'static>(
    queue: &Queue<'_>,
    is_gpu: bool,
    unwritten: R,
    put: impl FnOnce(&ResultTarget<'_>) -> Result<()>,
    read: impl FnOnce(R) -> Result<H> + Send + 'static,
) -> Result<Lent<H>> {
    if !is_gpu {
        let mut out = queue.empty::<R>(1)?;
        put(&ResultTarget::Memory(out.span_mut()))?;
        let Lent(Settled { value, points }) = queue.download(&out)?;
        let value = value.make(|value| read(value[0]));
        return Ok(Lent(Settled { value, points }));
    }
    let mut result = PinnedBuffer::<R>::new(&queue.home().pinned, 1)?;
    result[0] = unwritten;
    put(&ResultTarget::Pinned(result.block(), result.size_bytes()))?;
    let value = HostValue::later(move || read(result[0]));
    Ok(Lent::to(queue.stream(), queue.last_ticket(), queue.proved(value)))
}
