//! The state of a device that outlives it: small, and without its streams.
//!
//! | state | left by |
//! |---|---|
//! | healthy | the first call that reports a sticky code; or never |
//! | lost | – |
//!
//! In the child of a fork its parent's devices are lost, for a cause that is written down when somebody asks.
#![forbid(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use crate::backend::DeviceKind;
use crate::error::{Error, ErrorDetail};
use gpu_await_protocol::ready_tasks::ReadyTasks;
use gpu_await_protocol::wait_queue::LossFlag;

/// A device of the process was lost.
static ANY_LOST: AtomicBool = AtomicBool::new(false);

/// Whether a device of the process was lost: until then nobody has to look whose.
#[inline]
pub(crate) fn any_lost() -> bool {
    // ORDERING: Relaxed: what is submitted beside a loss may be on either side of it.
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

/// Where kernels may start while the launch in front of them still ends: those that wait first, as formulas and algorithms do and kernels that are declared
/// `programmatic`. No choice changes a result. See [`Overlaps`](crate::Overlaps) for what becomes of each launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Overlap {
    /// Nowhere: every launch and every edge is a full one. For finding a kernel that only sometimes waits.
    Off,
    /// On streams.
    #[default]
    Launches,
    /// On streams, and in [replayed batches](crate::Stream::replay) and [graphs](crate::Graph). For a GPU that one chain of small kernels has for itself,
    /// because who shares it pays: on an H200 a replayed chain of 100 takes 0.83 of its time; 64 requests of 200 kernels at a time are served at 0.86
    /// to 1.01 of the rate, and beside 8 such chains the p99 of a neighbour's kernel is 1.12 to 1.29 times as long (`benches/overlap`). From CUDA 12.3 on.
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
    /// Apart from what every submission reads, like the next.
    pub(crate) ready_tasks: CachePadded<ReadyTasks>,
    /// Requests that hold a permit of a stream pool on one of its streams.
    pub(crate) permits: CachePadded<AtomicU64>,
    pub(crate) counters: CachePadded<Counters>,
    loss: LossFlag,
    /// Why it is lost; there before `loss` is set, unless a fork has set it.
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
    pub(crate) fn lost(&self) -> Option<&Error> {
        if self.loss.is_set() { Some(self.cause()) } else { None }
    }

    #[cold]
    fn cause(&self) -> &Error {
        self.cause.get_or_init(|| ErrorDetail::Forked { device: self.label.clone() }.into())
    }

    /// Declares it lost in the child of a fork. Neither locks nor allocates.
    pub(super) fn leave_to_the_parent(&self) {
        self.loss.set();
        // ORDERING: Relaxed, as above.
        ANY_LOST.store(true, Ordering::Relaxed);
    }

    /// Declares the device lost, unless it is; returns the first cause.
    pub(crate) fn lose(&self, cause: impl FnOnce() -> Error) -> &Error {
        let cause = self.cause.get_or_init(cause);
        self.loss.set();
        // ORDERING: Relaxed, as above.
        ANY_LOST.store(true, Ordering::Relaxed);
        cause
    }

    /// Counts something that the driver refused to take back: it leaks.
    pub(crate) fn count_unreturned(&self) {
        // ORDERING: Relaxed: a statistic.
        self.counters.unreturned.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether it is lost and the caller is the one that notifies the waiters.
    pub(crate) fn tells_of_loss(&self) -> bool {
        self.loss.tell()
    }
}
