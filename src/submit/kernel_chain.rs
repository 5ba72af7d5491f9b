//! [`KernelChain`]: the kernels of another library's call, captured once and launched on their own from then on.
//!
//! The arguments of captured kernels belong to their graph, which the chain keeps: the driver copies arguments at the launch.

use std::any::Any;

use super::captured::{CapturedGraph, captured};
use super::raw::{Raw, Refusal};
use super::raw_queue::RawQueue;
use crate::backend::KernelCall;
use crate::error::Result;

/// The kernels that a call consists of, each behind the one before.
pub struct KernelChain {
    calls: Vec<KernelCall>,
    _graph: CapturedGraph,
}

impl KernelChain {
    /// Captures the work of `call`; `None` if that is anything but a chain of kernels, or cannot be captured. `keep` keeps the
    /// kernels loaded.
    #[must_use]
    pub fn capture<O: Any + Send>(
        queue: &RawQueue<'_>,
        keep: impl FnOnce() -> O,
        call: impl FnOnce(u64) -> Result<()>,
    ) -> Option<Self> {
        let stream = queue.raw.stream;
        let calls = |raw: &Raw<'_>| call(raw.handle()).map_err(Refusal::Foreign);
        let engine = &stream.engine;
        let note = |refusal: &Refusal| {
            if let Refusal::Driver(code) = refusal {
                engine.does_without(*code);
            }
        };
        let raw = captured(stream, calls).inspect_err(note).ok()?;
        let graph = CapturedGraph::new(stream, raw, vec![Box::new(keep())]);
        let calls = graph.kernels().inspect_err(|code| engine.does_without(*code)).ok()??;
        Some(KernelChain { calls, _graph: graph })
    }

    /// Launches the kernels on the queue's stream.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The operation declares the same memory as the operation of the captured call, and the kept value keeps the kernels loaded.
    pub unsafe fn launch(&self, queue: &RawQueue<'_>) -> Result<()> {
        let mut launches = self.calls.iter().map(|call| queue.raw.launch_call(call));
        launches.try_for_each(|launched| launched.map_err(|code| queue.raw.stream.refused(code)))
    }
}

/// Whether the work of a call is captured for a graph.
#[must_use]
pub fn is_captured(queue: &RawQueue<'_>) -> bool {
    queue.recorder.is_some()
}

/// The partition that a call is made in: a number that is unique on the device while the partition lives, and its multiprocessors.
#[must_use]
pub fn partition_of(queue: &RawQueue<'_>) -> Option<(u64, u32)> {
    queue.raw.stream.driver.partition().map(|share| (share.id(), share.multiprocessors()))
}
