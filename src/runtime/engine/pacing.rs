//! When a device's poller and its tasks look, and what they learned about that.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use crate::runtime::attention::Attention;
use crate::runtime::clock::Clock;
use crate::runtime::device_state::DeviceState;
use gpu_await_protocol::cadence;
use gpu_await_protocol::checkers::Checkers;

pub(crate) struct Pacing {
    /// Wakes the poller.
    pub(crate) attention: Arc<Attention>,
    /// The device's time, and the moments at which the poller wakes tasks.
    pub(crate) clock: Arc<Clock>,
    /// Permits for tasks that check for themselves, or stay awake.
    pub(crate) checkers: CachePadded<Checkers>,
    /// How long the poller rests between two rounds, at least.
    ///
    /// ORDERING: Relaxed, like the next: a guess.
    rest_ns: AtomicU64,
    /// How long a task took lately from being woken to check to being polled.
    lag_ns: AtomicU64,
}

impl Pacing {
    pub(super) fn new(state: &Arc<DeviceState>, stepped: bool) -> Self {
        let attention = Arc::new(Attention::new(state, stepped));
        let clock = if stepped { Clock::of_steps() } else { Clock::of_poller(&attention) };
        Pacing {
            attention,
            clock,
            checkers: CachePadded::new(Checkers::new()),
            rest_ns: AtomicU64::new(cadence::REST_LEAST_NS),
            lag_ns: AtomicU64::new(0),
        }
    }

    /// How long the poller rests between two rounds, at least, in nanoseconds.
    #[inline]
    pub(crate) fn rest_ns(&self) -> u64 {
        self.rest_ns.load(Ordering::Relaxed)
    }

    /// Records how long a round of the poller took, which alone calls this.
    pub(crate) fn spent(&self, ns: u64) {
        self.rest_ns.store(cadence::rest(ns), Ordering::Relaxed);
    }

    /// How long a task took lately from being woken to check to being polled.
    #[inline]
    pub(crate) fn lag_ns(&self) -> u64 {
        self.lag_ns.load(Ordering::Relaxed)
    }

    /// A task was polled so long after it was woken to check.
    pub(crate) fn learn_lag(&self, ns: u64) {
        self.lag_ns.store(cadence::lag(self.lag_ns(), ns), Ordering::Relaxed);
    }
}
