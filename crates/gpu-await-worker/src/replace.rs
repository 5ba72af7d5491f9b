//! [`Replace`]: when a process is replaced by another one, without a death (pure).
//!
//! | what a process did since it took the calls, or since no other one could be started | it is replaced |
//! |---|---|
//! | fewer calls, fewer bytes, less time than each limit that is set | no |
//! | as many, or as long | yes |
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// When a serving process is replaced by another one, without losing a call: against what grows with use (memory that
/// a library leaks, a fragmented pool). See [`WorkerBuilder::replace`](crate::WorkerBuilder::replace).
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use gpu_await_worker::Replace;
/// let daily = Replace { time: Some(Duration::from_secs(24 * 3600)), ..Replace::default() };
/// assert_eq!((daily.calls, daily.drain), (None, Duration::from_secs(600)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replace {
    /// After this many calls sent to it. Never.
    pub calls: Option<u64>,
    /// After this many bytes of payloads, of requests and responses. Never.
    pub payload_bytes: Option<u64>,
    /// This long after it took over the calls. Never.
    pub time: Option<Duration>,
    /// How long a replaced process has to answer its remaining calls. 10 minutes. Calls not answered by then are lost, or sent
    /// again, as if the process had died, and are not blamed. A suspect ([`Call::idempotent`](crate::Call::idempotent)) that runs in the
    /// standby that is to take over gets as long before that, from when the replacement was asked for.
    pub drain: Duration,
}

impl Default for Replace {
    fn default() -> Self {
        let (calls, payload_bytes, time) = (None, None, None);
        Replace { calls, payload_bytes, time, drain: Duration::from_secs(600) }
    }
}

impl Replace {
    /// Whether it ever happens by itself.
    pub(crate) fn is_set(&self) -> bool {
        self.calls.is_some() || self.payload_bytes.is_some() || self.time.is_some()
    }

    /// Why a process that did this is to be replaced, if it is.
    pub(crate) fn why(&self, used: &Used, now: Instant) -> Option<&'static str> {
        let is_over = |limit: Option<u64>, used| limit.is_some_and(|limit| used >= limit);
        if is_over(self.calls, used.calls) {
            Some("calls")
        } else if is_over(self.payload_bytes, used.payload_bytes) {
            Some("bytes of payloads")
        } else {
            self.due(used).filter(|due| *due <= now).map(|_| "time")
        }
    }

    /// When its time limit is reached.
    pub(crate) fn due(&self, used: &Used) -> Option<Instant> {
        self.time.map(|time| used.since + time)
    }
}

/// How much a process was used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    pub(crate) since: Instant,
    pub(crate) calls: u64,
    pub(crate) payload_bytes: u64,
}

impl Used {
    pub(crate) fn new(since: Instant) -> Self {
        Used { since, calls: 0, payload_bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_replaces_a_process() {
        let start = Instant::now();
        let hour = Duration::from_secs(3600);
        let used = |calls, payload_bytes| Used { since: start, calls, payload_bytes };
        let none = Replace::default();
        let all = Replace { calls: Some(3), payload_bytes: Some(100), time: Some(hour), ..none };
        for (policy, used, after, why) in [
            (none, used(u64::MAX, u64::MAX), 1000 * hour, None),
            (all, used(2, 99), hour / 2, None),
            (all, used(3, 0), Duration::ZERO, Some("calls")),
            (all, used(0, 100), Duration::ZERO, Some("bytes of payloads")),
            (all, used(0, 0), hour, Some("time")),
            (Replace { calls: None, ..all }, used(9, 0), Duration::ZERO, None),
        ] {
            assert_eq!(policy.why(&used, start + after), why, "{policy:?} {used:?}");
        }
    }
}
