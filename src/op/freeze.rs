//! Making a buffer read-only.
//!
//! # Invariants
//! 1. A [`Frozen`] is handed out only when everything that writes the buffer has completed successfully, so its readers need no wait
//!    (`a_frozen_buffer_is_ready_when_its_writers_are`).
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::error::refused::Refused;
use crate::memory::Element;
use crate::memory::allocation::NOBODY;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::frozen::Frozen;
use crate::memory::view::{Readable, Span};
use crate::op::{HostValue, Op};
use crate::runtime::Point;
use crate::submit::{Dependencies, Footprint, LateOutcomes};
use gpu_await_protocol::block_hazards::Blocks;
use gpu_await_protocol::hazard::Mode;

impl<T: Element> DeviceBuffer<T> {
    /// Makes the buffer read-only, for readers on many streams; see [`Frozen`]. Puts nothing on a stream.
    /// Ready proves that everything that wrote the buffer is *complete on the device*.
    ///
    /// # Ownership
    /// The buffer moves in; if the call is refused, [`accepted`](Op::accepted) hands it back. If the future
    /// fails later or is dropped, the memory is freed when every use of it is complete.
    ///
    /// # Errors
    /// Part of the buffer was never written, or its producer failed
    /// ([`ErrorDetail::Upstream`](crate::ErrorDetail::Upstream)); a graph that uses the buffer in each launch
    /// ([`ErrorDetail::KeptByGraph`](crate::ErrorDetail::KeptByGraph)); a lost or closed device.
    pub fn freeze(self) -> Op<Frozen<T>> {
        match before_host("freeze", &self.span(), Mode::Read) {
            Err(error) => Op::refused(Refused { error, value: Some(self) }),
            Ok((writers, on)) => {
                // Checked again: the driver may refuse a list that was not yet on its stream.
                let frozen = HostValue::later(move || {
                    check("freeze", &self.span()).map(|()| Frozen::new(self))
                });
                Op::behind_uses(writers, frozen.if_none_failed(on))
            }
        }
    }
}

/// The points to wait for before `op` lets the host access the memory in that mode, and the outcomes that its contents depend on: other
/// libraries' work may fail when it runs.
pub(crate) fn before_host(
    op: &'static str,
    memory: &Span<'_>,
    mode: Mode,
) -> Result<(Vec<Point>, Option<Box<Dependencies>>)> {
    let Span { memory: allocation, range, .. } = memory;
    allocation.engine.check_open()?;
    allocation.check_is_in_no_graph(range, op)?;
    let mut footprint = Footprint::new(op);
    footprint.reads(memory);
    // Before the contents are checked, so that a failure in between is reported too.
    let on = LateOutcomes::of_inputs(&footprint);
    footprint.check_contents()?;
    let mut points = Vec::new();
    allocation.with_hazards(|hazards| {
        hazards.dependencies(&Blocks::Range(range), mode, NOBODY, |used| {
            if !used.is_complete() {
                points.push(used.clone());
            }
        });
    });
    Ok((points, on))
}

/// Rejects unreadable memory, with an error naming `op`.
pub(super) fn check(op: &'static str, memory: &Span<'_>) -> Result<()> {
    let mut footprint = Footprint::new(op);
    footprint.reads(memory);
    footprint.check_contents()
}
