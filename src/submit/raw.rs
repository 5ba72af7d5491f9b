//! The driver calls of an operation, on its own stream and with memory of its own footprint.
//!
//! This is the only caller of the backend's functions that touch memory.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Arc;

use crate::backend::host::POISON;
use crate::backend::{
    Arguments, Backend, DeviceKind, DevicePtr, DriverResult, Function, HostCallback, HostPtr,
    KernelCall, LaunchShape, Pattern, Place, RawStream, RowCopy,
};
use crate::error::{DriverCode, Error};
use crate::event::interprocess::SharedEvent;
use crate::memory::reclaim::claim::Claim;
use crate::memory::view::Span;
use crate::runtime::event_pool::EventHandle;
use crate::runtime::progress::{Overlap, Overlapping};
use crate::runtime::stream_state::{StreamState, Turn};
use crate::runtime::traced_op::{Note, TracedWork};
use crate::thread::role;
use crate::thread::role::Role;

/// Why a driver call of an operation failed.
pub(crate) enum Refusal {
    Driver(DriverCode),
    OutOfMemory {
        asked_bytes: u64,
    },
    /// The user's code that puts work on the stream failed.
    Foreign(Error),
    /// The device was closed while the submitter waited for its turn.
    Closed,
}

impl From<DriverCode> for Refusal {
    fn from(code: DriverCode) -> Self {
        Refusal::Driver(code)
    }
}

/// The driver, as an operation's closure sees it: its own stream, and the memory in its footprint.
pub(crate) struct Raw<'a> {
    pub(super) stream: &'a Arc<StreamState>,
    pub(super) backend: &'a dyn Backend,
    pub(super) raw: RawStream,
    /// The kind of the calls, if the operation is traced.
    pub(super) note: Option<&'a Cell<Note>>,
}

impl<'a> Raw<'a> {
    /// The driver, on the stream of a turn.
    #[inline]
    pub(crate) fn of(turn: &Turn<'a, '_>) -> Self {
        Raw::noting(turn, None)
    }

    /// The same, with a note of the calls.
    #[inline(always)]
    pub(super) fn noting(turn: &Turn<'a, '_>, note: Option<&'a Cell<Note>>) -> Self {
        let stream = turn.stream;
        Raw { stream, backend: &*stream.engine.backend, raw: stream.driver.raw, note }
    }
}

impl Raw<'_> {
    /// Updates the note of the calls.
    #[inline(always)]
    fn noted(&self, note: impl FnOnce(&mut Note)) {
        if let Some(cell) = self.note {
            let mut known = cell.get();
            note(&mut known);
            cell.set(known);
        }
    }

    #[inline(always)]
    pub(super) fn moved(&self, work: TracedWork, bytes: u64) {
        self.noted(|note| {
            note.work = work;
            note.bytes += bytes;
        });
    }

    /// The driver's handle of the stream.
    pub(super) fn handle(&self) -> u64 {
        self.raw.0
    }

    /// Allocates in stream order, from the stream's freed memory or from the driver. The claim owns the
    /// memory.
    // STREAM: memory that the stream freed was used only on it, in front of here. Memory taken over from
    // others is freed here, behind its last uses: those are complete, or waited for in front of here.
    pub(crate) fn alloc(&self, claim: &mut Claim<'_>) -> std::result::Result<DevicePtr, Refusal> {
        const INVALID_VALUE: i32 = 1;
        const OUT_OF_MEMORY: i32 = 2;
        if let Some(ptr) = claim.ptr() {
            return self.renew(ptr, claim.block()).map(|()| ptr);
        }
        if let Some(event) = claim.behind() {
            // SAFETY: the driver stream is the stream's, and the claim keeps the event.
            unsafe { self.backend.stream_wait_event(self.raw, event.raw()) }?;
        }
        // SAFETY: nothing else uses these blocks, and every use of them is in front of here.
        claim.free_blocks(|ptr| unsafe { self.backend.free(self.raw, ptr) })?;
        // SAFETY: the driver stream is the stream's.
        let allocated = unsafe { self.backend.alloc(self.raw, claim.block()) };
        let ptr = allocated.map_err(|code| match code.code {
            // Only the size can be invalid: no device has so much memory.
            OUT_OF_MEMORY | INVALID_VALUE => Refusal::OutOfMemory { asked_bytes: claim.asked() },
            _ => code.into(),
        })?;
        claim.allocated(ptr);
        Ok(ptr)
    }

    /// On a host device, fills reused memory like fresh memory, so that reads of unwritten memory are noticed.
    fn renew(&self, ptr: DevicePtr, bytes: u64) -> std::result::Result<(), Refusal> {
        if self.backend.kind() != DeviceKind::Host {
            return Ok(());
        }
        let pattern = Pattern { bytes: [POISON; 16], len: 1 };
        // SAFETY: the claim owns `bytes` bytes there.
        unsafe { self.backend.fill(self.raw, ptr, pattern, bytes) }?;
        Ok(())
    }

    pub(crate) fn copy_to_device(
        &self,
        dst: DevicePtr,
        src: HostPtr,
        bytes: u64,
    ) -> DriverResult<()> {
        self.moved(TracedWork::ToDevice, bytes);
        // SAFETY: the caller put `dst` into the footprint or allocated it in this operation, and
        // lent the block of `src`: both outlive the ticket. STREAM: hazards ordered this stream
        // behind every other use of `dst`.
        unsafe { self.backend.copy_to_device(self.raw, dst, src, bytes) }
    }

    pub(crate) fn copy_to_host(
        &self,
        dst: HostPtr,
        src: DevicePtr,
        bytes: u64,
    ) -> DriverResult<()> {
        self.moved(TracedWork::ToHost, bytes);
        // SAFETY: as in `copy_to_device`, in the other direction.
        unsafe { self.backend.copy_to_host(self.raw, dst, src, bytes) }
    }

    /// Copies between two ranges of the footprint; the source may belong to another device.
    pub(crate) fn copy(&self, dst: &Span<'_>, src: &Span<'_>) -> DriverResult<()> {
        let bytes = dst.range.end - dst.range.start;
        self.moved(TracedWork::Copy, bytes);
        let (to, from) = (dst.ptr(), src.ptr());
        let peer = &src.memory.engine;
        if peer.state.id == self.stream.engine.state.id {
            // SAFETY: both ranges are in the footprint and hold `bytes` bytes.
            return unsafe { self.backend.copy_on_device(self.raw, to, from, bytes) };
        }
        let context = peer.backend.context();
        // SAFETY: both ranges are in the footprint and hold `bytes` bytes; the source's context
        // lives as long as its allocation. STREAM: hazards ordered this stream behind the
        // source's writer on the other device.
        unsafe { self.backend.copy_from_peer(self.raw, to, from, context, bytes) }
    }

    /// Copies rows between ranges of the footprint and lent memory.
    pub(crate) fn copy_rows(&self, copy: &RowCopy) -> DriverResult<()> {
        let RowCopy { to, from, row_bytes, rows, .. } = *copy;
        if copy.is_contiguous() {
            let bytes = rows * row_bytes;
            match (to, from) {
                (Place::Device(to), Place::Host(from)) => {
                    return self.copy_to_device(to, from, bytes);
                }
                (Place::Host(to), Place::Device(from)) => {
                    return self.copy_to_host(to, from, bytes);
                }
                (Place::Device(to), Place::Device(from)) => {
                    self.moved(TracedWork::Copy, bytes);
                    // SAFETY: both ranges are in the footprint and hold `bytes` bytes.
                    return unsafe { self.backend.copy_on_device(self.raw, to, from, bytes) };
                }
                (Place::Host(_), Place::Host(_)) => {}
            }
        }
        self.moved(
            match (to, from) {
                (Place::Device(_), Place::Host(_)) => TracedWork::ToDevice,
                (Place::Host(_), _) => TracedWork::ToHost,
                (Place::Device(_), Place::Device(_)) => TracedWork::Copy,
            },
            rows * row_bytes,
        );
        // SAFETY: as in `copy_to_device`, for the extent of the rows on either side.
        unsafe { self.backend.copy_rows(self.raw, copy) }
    }

    pub(crate) fn fill(&self, dst: DevicePtr, pattern: Pattern, count: u64) -> DriverResult<()> {
        self.moved(TracedWork::Fill, count * pattern.len as u64);
        // SAFETY: `dst` holds `count` patterns, see `copy_to_device`.
        unsafe { self.backend.fill(self.raw, dst, pattern, count) }
    }

    // Inlined, so that nothing is noted unless the operation is traced.
    #[inline(always)]
    pub(crate) fn launch(
        &self,
        function: &Function,
        shape: &LaunchShape,
        args: Arguments<'_>,
    ) -> DriverResult<()> {
        self.noted(|note| note.launch(&shape.grid));
        let launched = match function.waits_first() | shape.cooperative {
            true => self.launch_apart(function, shape, args),
            false => self.launch_as(function, shape, args),
        };
        launched.inspect_err(|_| self.demand_full())
    }

    /// Launches a kernel that waits first, and so may overlap with the launch in front of it, or a cooperative one, which overlaps with none.
    #[cold]
    #[inline(never)]
    fn launch_apart(
        &self,
        function: &Function,
        shape: &LaunchShape,
        args: Arguments<'_>,
    ) -> DriverResult<()> {
        let (overlap, ticket) =
            (&self.stream.overlap, self.stream.progress.timeline.submitted() + 1);
        if shape.cooperative || shape.grid.has_clusters() {
            overlap.demand_full(ticket);
            return self.launch_as(function, shape, args);
        }
        let fate = match () {
            () if self.stream.engine.options.overlap == Overlap::Off => Overlapping::SwitchedOff,
            () if self.stream.driver.may_have_work_of_others() => Overlapping::Shared,
            () if self.stream.engine.tracer.is_on() => Overlapping::Traced,
            () if overlap.may_overlap(ticket) => Overlapping::Overlaps,
            () => Overlapping::BehindOtherWork,
        };
        let overlaps = fate == Overlapping::Overlaps;
        self.launch_as(function, &LaunchShape { overlaps, ..*shape }, args)?;
        overlap.launched(ticket, overlaps);
        self.stream.engine.state.counters.overlaps.count(fate, 1);
        Ok(())
    }

    /// Has the next launch wait for everything in front of a refused one.
    #[cold]
    fn demand_full(&self) {
        self.stream.overlap.demand_full(self.stream.progress.timeline.submitted() + 1);
    }

    #[inline(always)]
    fn launch_as(
        &self,
        function: &Function,
        shape: &LaunchShape,
        args: Arguments<'_>,
    ) -> DriverResult<()> {
        // SAFETY: the kernel's declaration vouches that for arguments that its preconditions
        // admit, and these were checked, it stays inside the memory they name; all of that is in
        // the footprint. The kernel object, which keeps the function loaded, is kept by the
        // footprint or outlives the engine's work (see `Kernel`).
        unsafe { self.backend.launch(self.raw, function, shape, args) }
    }

    /// Launches a captured kernel, whose graph the caller keeps.
    pub(super) fn launch_call(&self, call: &KernelCall) -> DriverResult<()> {
        self.moved(TracedWork::Foreign, 0);
        // SAFETY: the library put the kernel with these arguments on a stream for the caller, which declares the same
        // memory for this operation as it did then; the graph keeps the kernel loaded.
        unsafe { self.backend.launch_call(call, self.raw) }
    }

    pub(crate) fn host_fn(&self, callback: HostCallback, data: *mut c_void) -> DriverResult<()> {
        self.moved(TracedWork::HostFn, 0);
        // SAFETY: the caller's `data` is a counted reference that the callback returns.
        unsafe { self.backend.host_fn(self.raw, callback, data) }
    }

    /// Runs the user's code that puts work on the stream. It must not unwind.
    #[inline]
    pub(super) fn foreign(&self, code: impl FnOnce()) -> DriverResult<()> {
        self.moved(TracedWork::Foreign, 0);
        let mut code = Some(code);
        let mut run = || {
            if let Some(code) = code.take() {
                let _role = role::enter(Role::Enqueuing);
                code();
            }
        };
        // SAFETY: the driver stream is the stream's; the caller of `enqueue` vouches for the work that the code
        // puts on it.
        unsafe { self.backend.foreign(self.raw, &mut run) }
    }

    /// Waits for the last record of an interprocess event.
    pub(crate) fn wait_shared(&self, event: &SharedEvent) -> DriverResult<()> {
        // SAFETY: the driver stream is the stream's, and the event lives for the length of the call; the
        // driver keeps everything that the wait needs.
        unsafe { self.backend.stream_wait_event(self.raw, event.raw()) }
    }

    pub(crate) fn record_shared(&self, event: &SharedEvent) -> DriverResult<()> {
        // SAFETY: as above; it is not a marker.
        unsafe { self.backend.event_record(event.raw(), self.raw) }
    }

    pub(super) fn record(&self, event: &EventHandle) -> DriverResult<()> {
        // SAFETY: the handle keeps the event, and nothing is pending on a pooled event.
        unsafe { self.backend.event_record(event.raw(), self.raw) }
    }
}
