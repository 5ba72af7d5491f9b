//! When a worker of a group that was given up begins anew, as a probe of its GPU (pure).
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | not due | the worker was not given up, or it is being probed, or closed | `given_up` → due |
//! | due, at | it is given up: other workers of the group have its calls; it begins anew then | `is_due`, `stop` → not due |
//!
//! The delays go on where those of [`Restart`] stopped, and grow as these do: the third start in a row that failed was the last one that calls
//! waited for. A probe is a start like any other; a worker that it brings back takes calls from the moment that it serves.
//!
//! # Invariants
//! 1. Between two probes lies a delay that never shrinks until a process has served for [`Restart::settled`], and never grows beyond
//!    [`Restart::most_delay`] (`probes_back_off`).
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use crate::restart::Restart;

/// Without a delay in the policy, a GPU that is gone would be probed all the time.
const LEAST: Duration = Duration::from_millis(10);

/// When to probe next.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Probe {
    /// How often in a row it was given up.
    failures: u32,
    due: Option<Instant>,
}

impl Probe {
    /// The worker was given up.
    pub(crate) fn given_up(&mut self, now: Instant, policy: &Restart) {
        let doublings = self.failures.saturating_add(2);
        let factor = 1u32.checked_shl(doublings).unwrap_or(u32::MAX);
        let delay = policy.first_delay.saturating_mul(factor).min(policy.most_delay).max(LEAST);
        self.failures = self.failures.saturating_add(1);
        self.due = Some(now + delay);
    }

    /// A process of it has served for long enough.
    pub(crate) fn settled(&mut self) {
        self.failures = 0;
    }

    /// It begins anew for another reason, or never again.
    pub(crate) fn stop(&mut self) {
        self.due = None;
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Whether it is to begin anew now; true only once.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.due.is_some_and(|due| due <= now);
        if is_due {
            self.due = None;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_back_off() {
        let policy = Restart::default();
        let (mut probe, mut now) = (Probe::default(), Instant::now());
        let mut delays = Vec::new();
        for _ in 0..40 {
            probe.given_up(now, &policy);
            let due = probe.due().unwrap();
            delays.push(due - now);
            assert!(!probe.is_due(due - Duration::from_nanos(1)));
            now = due;
            assert!(probe.is_due(now) && !probe.is_due(now));
        }
        assert_eq!(delays[..3], [400, 800, 1600].map(Duration::from_millis));
        assert!(delays.is_sorted() && delays[39] == policy.most_delay);
        probe.settled();
        probe.given_up(now, &policy);
        assert_eq!(probe.due(), Some(now + delays[0]));
        probe.stop();
        assert!(!probe.is_due(now + policy.most_delay));
        // A policy without delays does not probe continuously.
        let at_once = Restart { first_delay: Duration::ZERO, ..policy };
        probe.given_up(now, &at_once);
        assert_eq!(probe.due(), Some(now + LEAST));
    }
}
