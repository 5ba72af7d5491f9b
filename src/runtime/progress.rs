//! How far a stream is, and whether its device is lost: the parts of a stream and of a device that outlive them.
//!
//! Buffers remember their users, futures and events their points; all of them may live much longer than the stream. They keep this small
//! object, and reach the stream through it while one of its tickets is pending.
//!
//! | a ticket is | so the stream |
//! |---|---|
//! | complete | is not needed, and may be gone |
//! | pending | exists: a handle keeps it, or the owner of the device's streams does (see below) |
//! | neither, and will never be known to be complete | is gone with its lost device or dropped stepper, or waits for a lost device |
//!
//! A device's own state is as small, and knows none of its streams:
//!
//! | the device is | until |
//! |---|---|
//! | healthy | the first call that reports a sticky code; or for ever |
//! | lost | – |
//!
//! In the child of a fork the parent's devices are lost; the cause is written down when it is first asked for.
//!
//! Streams of a device are kept by its poller, or by a stepped device's stepper; at the end of the process they are never released.
//!
//! # Invariants
//! 1. No stream is released while one of its tickets is pending and its device may still complete it
//!    (`a_dropped_stream_orders_what_comes_behind`).
//! 2. Nothing here keeps a stream, its device, or the owner of an adopted stream (`readers_that_go_leave_no_stream`,
//!    `a_device_goes_before_what_it_read`).
//! 3. A stream whose last reference was taken here, perhaps under a lock, ends on another thread (`a_stream_reached_under_a_lock_ends_elsewhere`).
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};

use crossbeam_utils::CachePadded;

use crate::backend::DeviceKind;
use crate::error::{Error, ErrorDetail, Result};
use gpu_await_protocol::ready_tasks::ReadyTasks;
use gpu_await_protocol::timeline::{Timeline, Track};
use gpu_await_protocol::wait_queue::LossFlag;

/// A stream's id, its tickets, and a reference to it while it exists.
pub(crate) struct Progress<S> {
    pub(crate) id: u64,
    pub(crate) timeline: Timeline,
    pub(super) device: Arc<DeviceState>,
    pub(super) stream: Weak<S>,
    /// Whether the stream waits for another device, as far as is known. Written under the lock of the
    /// stream's list of those waits.
    pub(super) waits_for_others: AtomicBool,
    /// Why the stream makes no further progress, though its device works. Set before the stream is released for that reason.
    pub(super) stuck: OnceLock<Error>,
}

/// What a point needs from its stream while that exists.
pub(crate) trait PointStream: fmt::Debug + Sized {
    /// Ends the stream on a thread that holds no lock.
    fn end_elsewhere(self);

    /// Whether `ticket` is complete or never will be.
    fn is_settled(&self, ticket: u64) -> bool;

    /// Asks the device about the stream's progress, behind a marker for `ticket`; where no driver call may be made, the poller asks. Never blocks.
    fn ask_after(self: &Arc<Self>, ticket: u64);

    /// The host will wait for `ticket`, which had no holder when later work was submitted.
    fn expect(&self, ticket: u64);

    /// The error for another device that waits for `ticket`, if this stream waits for a lost device.
    fn dependency_lost(&self, ticket: u64) -> Option<Error>;
}

/// A stream reached through a weak reference. All its other owners may let go meanwhile, and the holder of this may hold locks.
pub(crate) struct StreamRef<S: PointStream>(Option<Arc<S>>);

impl<S: PointStream> StreamRef<S> {
    pub(super) fn through(stream: &Weak<S>) -> Option<Self> {
        stream.upgrade().map(|stream| StreamRef(Some(stream)))
    }

    /// The stream itself. The caller must hold no lock: dropping it may end the stream.
    pub(crate) fn unlocked(mut self) -> Arc<S> {
        self.0.take().expect("there until it is dropped")
    }
}

impl<S: PointStream> Clone for StreamRef<S> {
    fn clone(&self) -> Self {
        StreamRef(self.0.clone())
    }
}

impl<S: PointStream> Deref for StreamRef<S> {
    type Target = Arc<S>;

    #[inline]
    fn deref(&self) -> &Arc<S> {
        self.0.as_ref().expect("there until it is dropped")
    }
}

impl<S: PointStream> Drop for StreamRef<S> {
    #[inline]
    fn drop(&mut self) {
        if let Some(last) = self.0.take().and_then(Arc::into_inner) {
            last.end_elsewhere();
        }
    }
}

/// The state of a ticket.
enum Standing<S: PointStream> {
    Complete,
    Pending(StreamRef<S>),
    /// Will never be known to be complete, and why.
    Never(Error),
}

impl<S> Progress<S> {
    pub(crate) fn device(&self) -> &Arc<DeviceState> {
        &self.device
    }

    /// Whether everything that was submitted is known to be complete.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_complete(self.timeline.submitted())
    }

    /// Whether something on the stream waits for another device, as far as is known.
    pub(crate) fn waits_for_others(&self) -> bool {
        // ORDERING: Relaxed: set by the submitter of a ticket that the caller knows of.
        self.waits_for_others.load(Ordering::Relaxed)
    }

    pub(super) fn set_waits_for_others(&self, waits: bool) {
        // ORDERING: Relaxed: read by futures of this or a later ticket.
        self.waits_for_others.store(waits, Ordering::Relaxed);
    }

    /// The end of `ticket` of a stream that is gone.
    #[cold]
    pub(crate) fn outcome(&self, ticket: u64) -> Result<()> {
        // The stream was seen to be gone: synchronizes with its drop, to see what was known then.
        fence(Ordering::Acquire);
        if self.is_complete(ticket) {
            return Ok(());
        }
        let why = self.device.lost().or_else(|| self.stuck.get()).cloned();
        let closed = || ErrorDetail::Closed { device: self.device.label.clone() }.into();
        Err(why.unwrap_or_else(closed))
    }

    /// The error for another device that waits for `ticket`, if this device is lost first, or the stream is
    /// known to wait for a lost one.
    pub(super) fn lost_before(&self, ticket: u64) -> Option<Error> {
        if let Some(stuck) = self.stuck.get().filter(|_| !self.is_complete(ticket)) {
            return Some(stuck.clone());
        }
        let cause = self.device.lost().filter(|_| !self.is_complete(ticket))?;
        let (device, cause) = (self.device.label.clone(), cause.clone());
        Some(ErrorDetail::DependencyLost { device, cause }.into())
    }

    pub(crate) fn is_complete(&self, ticket: u64) -> bool {
        self.timeline.is_complete(ticket)
    }
}

impl<S: PointStream> Progress<S> {
    /// The stream, unless it is gone.
    #[inline]
    pub(crate) fn stream(&self) -> Option<StreamRef<S>> {
        StreamRef::through(&self.stream)
    }

    /// The state of `ticket`, as far as it is known.
    fn standing(&self, ticket: u64) -> Standing<S> {
        if self.is_complete(ticket) {
            return Standing::Complete;
        }
        match self.stream() {
            Some(stream) => Standing::Pending(stream),
            None => self.outcome(ticket).map_or_else(Standing::Never, |()| Standing::Complete),
        }
    }

    /// The stream, for an operation on `device` that must wait for `ticket`; `None` if that is complete. An error if it never will be, because it
    /// waits for a lost device.
    pub(crate) fn pending_for(
        &self,
        device: &DeviceState,
        ticket: u64,
    ) -> Result<Option<StreamRef<S>>> {
        if (self.device.id != device.id || self.waits_for_others())
            && let Some(error) = self.dependency_lost(ticket)
        {
            return Err(error);
        }
        match self.standing(ticket) {
            Standing::Complete => Ok(None),
            Standing::Pending(stream) => Ok(Some(stream)),
            Standing::Never(error) => Err(error),
        }
    }

    /// The same, including a lost device that this one waits for.
    pub(crate) fn dependency_lost(&self, ticket: u64) -> Option<Error> {
        let transitive = || self.stream().and_then(|stream| stream.dependency_lost(ticket));
        self.lost_before(ticket).or_else(transitive)
    }

    /// Whether `ticket` is not complete and, as far as is known, never will be.
    pub(crate) fn is_hopeless(&self, ticket: u64) -> bool {
        (self.stuck.get().is_some() || self.is_settled(ticket)) && !self.is_complete(ticket)
    }

    /// Whether `ticket` is complete or never will be.
    pub(crate) fn is_settled(&self, ticket: u64) -> bool {
        match self.standing(ticket) {
            Standing::Pending(stream) => stream.is_settled(ticket),
            Standing::Complete | Standing::Never(_) => true,
        }
    }

    /// Marks `ticket` as precisely as it can, since the host will wait for it; if that is imprecise, later tickets get better markers.
    pub(crate) fn expect(&self, ticket: u64) {
        if let Standing::Pending(stream) = self.standing(ticket) {
            stream.expect(ticket);
        }
    }

    /// Asks the device how far the stream is, unless `ticket` is known to be complete; where no driver call may be made, the poller asks. Never
    /// blocks.
    pub(crate) fn ask(&self, ticket: u64) {
        if let Standing::Pending(stream) = self.standing(ticket) {
            stream.ask_after(ticket);
        }
    }
}

impl<S> Track for Progress<S> {
    fn id(&self) -> u64 {
        self.id
    }

    fn is_complete(&self, ticket: u64) -> bool {
        self.timeline.is_complete(ticket)
    }
}

impl<S> PartialEq for Progress<S> {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl<S: PointStream> fmt::Debug for Progress<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stream() {
            Some(stream) => stream.fmt(f),
            None => write!(f, "stream {} of {}", self.id, self.device.label),
        }
    }
}

/// A device of the process was lost.
static ANY_LOST: AtomicBool = AtomicBool::new(false);

/// Whether any device of the process was lost: until then no one has to check which.
#[inline]
pub(crate) fn any_lost() -> bool {
    // ORDERING: Relaxed: a submission that races with a loss may be on either side of it.
    ANY_LOST.load(Ordering::Relaxed)
}

/// The figures of [`Device::stats`](crate::Device::stats).
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) lent_bytes: AtomicU64,
    pub(crate) quarantined_bytes: AtomicU64,
    pub(crate) wake_ups: AtomicU64,
    pub(crate) unreturned: AtomicU64,
    pub(crate) overlaps: OverlapCounters,
}

/// Where kernels may start before the preceding launch has ended: kernels that wait first, as those of formulas and algorithms do and kernels
/// declared `programmatic`. The choice never changes a result. See [`Overlaps`](crate::Overlaps) for what becomes of each launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Overlap {
    /// Nowhere: every launch and every edge is a full dependency. For finding a kernel that does not always wait.
    Off,
    /// On streams.
    #[default]
    Launches,
    /// On streams, and in [replayed batches](crate::Stream::replay) and [graphs](crate::Graph), from CUDA 12.3 on. For a GPU with one chain of small
    /// kernels alone, since others pay: on an H200 a replayed chain of 100 takes 0.83 of its time; 64 requests of 200 kernels at a time are served at
    /// 0.86 to 1.01 of the rate, and beside 8 such chains a neighbour's kernel has 1.12 to 1.29 times the p99 (`benches/overlap`).
    LaunchesAndEdges,
}

/// What became of the launch of a kernel that waits first; see [`Overlaps`](crate::Overlaps).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overlapping {
    Overlaps,
    BehindOtherWork,
    BehindSeveral,
    Shared,
    Traced,
    Refused,
    SwitchedOff,
}

/// One for each [`Overlapping`].
#[derive(Debug, Default)]
pub(crate) struct OverlapCounters([AtomicU64; 7]);

impl OverlapCounters {
    pub(crate) fn count(&self, what: Overlapping, launches: u64) {
        // ORDERING: Relaxed, here and below: statistics.
        self.0[what as usize].fetch_add(launches, Ordering::Relaxed);
    }

    pub(crate) fn of(&self, what: Overlapping) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
pub(crate) struct DeviceState {
    /// Process-unique and never reused.
    pub(crate) id: u64,
    pub(crate) kind: DeviceKind,
    /// `cuda:0`, `host:3`: for messages.
    pub(crate) label: String,
    /// Padded away from what every submission reads, like the next.
    pub(crate) ready_tasks: CachePadded<ReadyTasks>,
    /// Requests that hold a permit of a stream pool on one of its streams.
    pub(crate) permits: CachePadded<AtomicU64>,
    pub(crate) counters: CachePadded<Counters>,
    pub(super) loss: LossFlag,
    /// Why it is lost; written before `loss` is set, unless a fork set it.
    cause: OnceLock<Error>,
}

impl DeviceState {
    pub(crate) fn new(id: u64, kind: DeviceKind, label: String) -> Self {
        let (ready_tasks, loss) = (CachePadded::new(ReadyTasks::new()), LossFlag::new());
        let permits = CachePadded::new(AtomicU64::new(0));
        let (counters, cause) = (CachePadded::default(), OnceLock::new());
        DeviceState { id, kind, label, ready_tasks, permits, counters, loss, cause }
    }

    /// The loss, if it was declared.
    #[inline]
    pub(crate) fn lost(&self) -> Option<&Error> {
        // ORDERING: set before `loss`: a thread that could know of this device's loss sees it.
        if any_lost() && self.loss.is_set() { Some(self.cause()) } else { None }
    }

    #[cold]
    fn cause(&self) -> &Error {
        self.cause.get_or_init(|| ErrorDetail::Forked { device: self.label.clone() }.into())
    }

    /// Declares it lost in the child of a fork. Neither locks nor allocates.
    pub(super) fn leave_to_the_parent(&self) {
        // ORDERING: Relaxed: before the store of `loss`, which releases.
        ANY_LOST.store(true, Ordering::Relaxed);
        self.loss.set();
    }

    /// Declares the device lost, unless it is; returns the first cause.
    pub(crate) fn lose(&self, cause: impl FnOnce() -> Error) -> &Error {
        let cause = self.cause.get_or_init(cause);
        // ORDERING: Relaxed, as above.
        ANY_LOST.store(true, Ordering::Relaxed);
        self.loss.set();
        cause
    }

    /// Counts a resource that the driver refused to take back: it leaks.
    pub(crate) fn count_unreturned(&self) {
        // ORDERING: Relaxed: a statistic.
        self.counters.unreturned.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether it is lost and the caller is the one that notifies the waiters.
    pub(crate) fn tells_of_loss(&self) -> bool {
        self.loss.tell()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct EndsElsewhere<'s> {
        ended_elsewhere: &'s AtomicBool,
    }

    impl PointStream for EndsElsewhere<'_> {
        fn end_elsewhere(self) {
            self.ended_elsewhere.store(true, Ordering::Relaxed);
        }

        fn is_settled(&self, _: u64) -> bool {
            false
        }

        fn ask_after(self: &Arc<Self>, _: u64) {}

        fn expect(&self, _: u64) {}

        fn dependency_lost(&self, _: u64) -> Option<Error> {
            None
        }
    }

    #[test]
    fn a_stream_reached_under_a_lock_ends_elsewhere() {
        for reached_last in [true, false] {
            let ended_elsewhere = AtomicBool::new(false);
            let handle = Arc::new(EndsElsewhere { ended_elsewhere: &ended_elsewhere });
            let reached = StreamRef::through(&Arc::downgrade(&handle)).expect("it is there");
            if reached_last {
                drop(handle);
                drop(reached.clone());
                assert!(!ended_elsewhere.load(Ordering::Relaxed), "one is left");
                drop(reached);
            } else {
                drop(reached);
                drop(handle);
            }
            assert_eq!(ended_elsewhere.load(Ordering::Relaxed), reached_last);
        }
    }
}
