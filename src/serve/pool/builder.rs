//! Which streams a pool has, and its limits.
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::{IN_FLIGHT_A_STREAM, MAX_WAITING, PoolCore, PoolState, StreamPool};
use crate::device::Device;
use crate::error::{ErrorDetail, Result};
use crate::serve::admission::{Admission, Class};
use crate::thread::role;

/// Options for making a [`StreamPool`].
#[must_use = "a builder does nothing until `build`"]
#[derive(Debug, Default)]
pub struct StreamPoolBuilder {
    pub(super) groups: Vec<(Device, usize, bool)>,
    pub(super) max_in_flight: Option<usize>,
    pub(super) max_waiting: Option<usize>,
}

impl StreamPoolBuilder {
    /// Adds `n` streams of a device.
    pub fn streams(mut self, device: &Device, n: usize) -> Self {
        self.groups.push((device.clone(), n, false));
        self
    }

    /// Adds `n` streams of the device's highest priority, for
    /// [`acquire_high_priority`](StreamPool::acquire_high_priority); others get none of them, unless
    /// there are no others.
    pub fn high_priority_streams(mut self, device: &Device, n: usize) -> Self {
        self.groups.push((device.clone(), n, true));
        self
    }

    /// How many requests may be in flight at once, on all streams together; at least 1, and 4 for
    /// each stream unless said otherwise.
    ///
    /// The driver takes about a thousand launches a stream and then blocks the calling thread: keep
    /// this times the launches of a request below that, for each stream.
    pub fn max_in_flight(mut self, requests: usize) -> Self {
        self.max_in_flight = Some(requests.max(1));
        self
    }

    /// How many requests may wait for a permit: further ones are refused at once, which is better
    /// than an answer that comes too late. 1024 unless said otherwise.
    pub fn max_waiting(mut self, requests: usize) -> Self {
        self.max_waiting = Some(requests);
        self
    }

    /// Makes the streams and the pool.
    ///
    /// # Blocking
    /// As [`Device::stream`].
    ///
    /// # Errors
    /// [`ErrorDetail::TooFew`]: no stream. A device that is lost or closed.
    pub fn build(self) -> Result<StreamPool> {
        role::check("making streams")?;
        let mut slots = Vec::new();
        for (device, n, high_priority) in &self.groups {
            let (lowest, highest) = device.priority_range();
            let (priority, class) = if *high_priority {
                (highest, Class::High)
            } else {
                (0.min(lowest), Class::Normal)
            };
            for _ in 0..*n {
                let name = format!("pool {}", slots.len());
                let stream = device.stream_builder().priority(priority).name(&name).build()?;
                slots.push((stream, class));
            }
        }
        if slots.is_empty() {
            let what = "streams of a pool";
            return Err(ErrorDetail::TooFew { what, found: 0, least: 1 }.into());
        }
        let limit = self.max_in_flight.unwrap_or(IN_FLIGHT_A_STREAM * slots.len());
        let max_waiting = self.max_waiting.unwrap_or(MAX_WAITING);
        let admission = Admission::new(limit, max_waiting, slots.iter().map(|(_, class)| *class));
        let book = Mutex::new(PoolState { admission, draining: Vec::new(), gone: None });
        let engine_id = |slot: usize| slots[slot].0.engine().id;
        let is_first = |slot: &usize| (0..*slot).all(|other| engine_id(other) != engine_id(*slot));
        let devices = (0..slots.len()).filter(is_first).collect();
        Ok(StreamPool {
            shared: Arc::new(PoolCore { slots, devices, watches: OnceLock::new(), book }),
        })
    }
}

impl Device {
    /// Makes a pool of `n` streams of this device; [`StreamPool::builder`] has options.
    ///
    /// # Blocking
    /// As [`stream`](Self::stream).
    ///
    /// # Errors
    /// As [`StreamPoolBuilder::build`].
    pub fn streams(&self, n: usize) -> Result<StreamPool> {
        StreamPool::builder().streams(self, n).build()
    }
}
