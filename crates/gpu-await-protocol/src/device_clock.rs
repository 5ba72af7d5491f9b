//! [`DeviceClock`]: device times converted to the host's clock (pure).
//!
//! An anchor is a moment on the device that the host knows to lie between two readings of its own clock. It is placed midway between them,
//! with half the distance as its error. Between two anchors the clocks are assumed to run evenly; beyond the last anchor at the same rate,
//! plus a drift. (Not at the rate of the last two anchors: when these are close together, their errors dominate.)
//!
//! # Invariants
//! 1. If the clocks do run evenly, a time is off by at most the larger error of the anchors around it, or, beyond the last anchor, by its
//!    error plus the drift (`within_the_error_of_its_anchors`).
//! 2. The order of device times is kept on the host's clock (`the_order_of_the_device_is_kept`).
#![forbid(unsafe_code)]

use std::collections::VecDeque;

/// How many anchors are remembered.
const ANCHORS: usize = 64;

/// How far the two clocks may drift apart where the drift is not known, as a fraction.
const DRIFT: f64 = 1e-4;

/// A moment of both clocks, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Anchor {
    device_ns: f64,
    host_ns: f64,
    error_ns: f64,
}

/// A time on the host's clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostTime {
    /// The time, in nanoseconds of the host.
    pub ns: f64,
    /// The largest error of the time.
    pub error_ns: f64,
}

/// Moments known on both clocks.
#[derive(Debug, Default)]
pub struct DeviceClock {
    /// In order of time.
    anchors: VecDeque<Anchor>,
}

impl DeviceClock {
    /// Enters a moment of the device, between two readings of the host's clock; not before the last anchor.
    pub fn anchor(&mut self, device_ns: f64, (before, after): (u64, u64)) {
        let (before, after) = (before as f64, after as f64);
        let host_ns = f64::midpoint(before, after);
        let is_later = |last: &Anchor| last.device_ns < device_ns && last.host_ns < host_ns;
        if !self.anchors.back().is_none_or(is_later) {
            return;
        }
        if self.anchors.len() == ANCHORS {
            self.anchors.pop_front();
        }
        self.anchors.push_back(Anchor { device_ns, host_ns, error_ns: (after - before) / 2.0 });
    }

    /// The host's time at a moment of the device; `None` without an anchor.
    pub fn host_time(&self, device_ns: f64) -> Option<HostTime> {
        let behind = self.anchors.partition_point(|anchor| anchor.device_ns <= device_ns);
        let before = behind.checked_sub(1).and_then(|before| self.anchors.get(before));
        let (at, rate, error_ns) = match (before, self.anchors.get(behind)) {
            (Some(a), Some(b)) => {
                let rate = (b.host_ns - a.host_ns) / (b.device_ns - a.device_ns);
                (a, rate, a.error_ns.max(b.error_ns))
            }
            (Some(end), None) | (None, Some(end)) => {
                (end, 1.0, end.error_ns + (device_ns - end.device_ns).abs() * DRIFT)
            }
            (None, None) => return None,
        };
        Some(HostTime { ns: at.host_ns + (device_ns - at.device_ns) * rate, error_ns })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn within_the_error_of_its_anchors(
            rate in 0.9999_f64..1.0001,
            anchors in prop::collection::vec((1_000_u64..1_000_000_000, 2_u64..20_000, 0.0_f64..1.0), 2..100),
            at in -0.5_f64..1.5,
        ) {
            let mut clock = DeviceClock::default();
            let (mut device, mut last) = (0.0, 0);
            let of_device = |device: f64| 5e9 + device * rate;
            let mut times = Vec::new();
            for (gap, window, place) in anchors {
                device += gap as f64;
                // The window lies around the moment, wherever in it that is, and behind the last one.
                let before = ((of_device(device) - window as f64 * place) as u64).max(last);
                let after = (of_device(device) + window as f64 * (1.0 - place)).ceil() as u64;
                clock.anchor(device, (before, after));
                last = after;
                times.push(device);
            }
            let first = times[times.len().saturating_sub(ANCHORS)];
            let device = first + (device - first) * at;
            let found = clock.host_time(device).expect("anchors");
            let off = (found.ns - of_device(device)).abs();
            // A nanosecond of rounding.
            prop_assert!(off <= found.error_ns + 1.0, "{off} ns off, and not {}", found.error_ns);
        }

        #[test]
        fn the_order_of_the_device_is_kept(
            anchors in prop::collection::vec((1_u64..1_000_000, 0_u64..5_000, 1_u64..5_000), 0..80),
            times in prop::collection::vec(-1e6_f64..1e8, 2..20),
        ) {
            let mut clock = DeviceClock::default();
            let (mut device, mut host) = (0.0, 0);
            for (gap, window, rest) in anchors {
                device += gap as f64;
                clock.anchor(device, (host, host + window));
                host += window + rest;
            }
            let mut times = times;
            times.sort_by(f64::total_cmp);
            let seen: Vec<f64> =
                times.iter().filter_map(|at| Some(clock.host_time(*at)?.ns)).collect();
            // A nanosecond of rounding.
            prop_assert!(seen.is_sorted_by(|a, b| a <= &(b + 1.0)), "{seen:?}");
        }
    }
}
