//! The streams of a pool, and its limits.
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gpu_await_protocol::sync::Mutex;

use super::{Asks, IN_FLIGHT_A_STREAM, MAX_WAITING, PoolCore, PoolSlot, PoolState, StreamPool};
use crate::device::Device;
use crate::device::partition::Partition;
use crate::error::{ErrorDetail, Result};
use crate::thread::role;
use gpu_await_protocol::admission::{Admission, Class, ShareLimits};

/// Options for making a [`StreamPool`].
#[must_use = "a builder does nothing until `build`"]
#[derive(Debug, Default)]
pub struct StreamPoolBuilder {
    pub(super) groups: Vec<PoolGroup>,
    pub(super) max_in_flight: Option<usize>,
    pub(super) max_waiting: Option<usize>,
    patience: Option<Duration>,
    name: Option<String>,
    shares: Vec<PoolShare>,
}

/// Streams that a pool starts with.
#[derive(Debug)]
pub(super) struct PoolGroup {
    device: Device,
    partition: Option<Partition>,
    count: usize,
    high_priority: bool,
}

/// A share of a [`StreamPool`]: a group of requests with its own queue and a part of the permits.
///
/// Busy shares divide the time for which permits are held by their [parts](Self::part). That keeps a share
/// from starving, but not from being late: a short request behind long ones on its stream holds its permit as
/// long as they do. A share of long kernels beside one of short kernels with deadlines needs a
/// [limit](Self::max_in_flight) as well.
#[must_use = "a share does nothing until a builder has it"]
#[derive(Clone, Debug)]
pub struct PoolShare {
    name: String,
    part: u32,
    max_in_flight: Option<usize>,
}

impl PoolShare {
    /// Makes a share of part 1, without a limit of its own.
    pub fn new(name: &str) -> Self {
        PoolShare { name: name.to_owned(), part: 1, max_in_flight: None }
    }

    /// Sets its part of the time for which permits are held, relative to the other shares with waiting
    /// requests; at least 1.
    pub fn part(mut self, part: u32) -> Self {
        self.part = part.max(1);
        self
    }

    /// Limits how many permits its requests may hold at once, even while no other share wants any; at least
    /// 1.
    ///
    /// A part divides permits as they are released; this limit bounds the share's work ahead of the others *on the
    /// device*, which finishes what it has begun. A share of long kernels beside one of short kernels needs
    /// both.
    ///
    /// All shares use the same streams, and a permit goes to the stream that the fewest requests share: a
    /// short request may land behind a long one while another stream is about to be free. To keep them apart,
    /// give the long ones their own pool or a proportional [weight](StreamPool::with_weight), or the short
    /// ones [high-priority streams](StreamPoolBuilder::high_priority_streams).
    pub fn max_in_flight(mut self, permits: usize) -> Self {
        self.max_in_flight = Some(permits.max(1));
        self
    }
}

impl StreamPoolBuilder {
    /// Adds `n` streams of a device.
    pub fn streams(self, device: &Device, n: usize) -> Self {
        self.add(device, None, n, false)
    }

    /// Adds `n` streams in a partition; [`StreamPool::move_to`] moves the pool's streams to another one.
    pub fn streams_in(self, partition: &Partition, n: usize) -> Self {
        self.add(partition.device(), Some(partition), n, false)
    }

    /// Adds `n` streams of the device's highest priority, for requests
    /// [of high priority](StreamPool::with_high_priority); others use them only if there are no other streams.
    pub fn high_priority_streams(self, device: &Device, n: usize) -> Self {
        self.add(device, None, n, true)
    }

    fn add(
        mut self,
        device: &Device,
        partition: Option<&Partition>,
        count: usize,
        high_priority: bool,
    ) -> Self {
        let (device, partition) = (device.clone(), partition.cloned());
        self.groups.push(PoolGroup { device, partition, count, high_priority });
        self
    }

    /// Limits how many requests may be in flight at once, on all streams together; at least 1, by default 4
    /// per stream.
    ///
    /// The driver queues about a thousand launches per stream and then blocks the calling thread: keep this
    /// limit times the launches of a request below that, per stream.
    pub fn max_in_flight(mut self, requests: usize) -> Self {
        self.max_in_flight = Some(requests.max(1));
        self
    }

    /// Limits how many requests of each share may wait for a permit; more are refused at once, which
    /// is better than an answer that comes too late. 1024 by default.
    pub fn max_waiting(mut self, requests: usize) -> Self {
        self.max_waiting = Some(requests);
        self
    }

    /// Sets how long callers wait for an *answer*: [`acquire`](StreamPool::acquire) is then
    /// [`acquire_by`](StreamPool::acquire_by) with a deadline that far away. Without it, requests
    /// wait as long as it takes, and under overload permits go to callers that are about to give up. Set it
    /// to the time limit of the service.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Names the pool in errors and events.
    pub fn name(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    /// Adds a share, for [`with_share`](StreamPool::with_share). Requests that name no share form another
    /// one, of part 1.
    ///
    /// While several shares have waiting requests, the next permit goes to the share whose permits were held
    /// for the shortest time, divided by its part. Of two shares with the same name the later one counts.
    pub fn share(mut self, share: PoolShare) -> Self {
        self.shares.retain(|known| known.name != share.name);
        self.shares.push(share);
        self
    }

    /// Makes the streams and the pool.
    ///
    /// # Blocking
    /// As [`Device::stream`].
    ///
    /// # Errors
    /// [`ErrorDetail::TooFew`]: no stream. A device that is lost or closed.
    #[track_caller]
    pub fn build(self) -> Result<StreamPool> {
        role::check("making streams")?;
        let mut slots = Vec::new();
        for PoolGroup { device, partition, count, high_priority } in &self.groups {
            let (lowest, highest) = device.priority_range();
            let (priority, class) = if *high_priority {
                (highest, Class::High)
            } else {
                (0.min(lowest), Class::Normal)
            };
            for _ in 0..*count {
                let name = format!("pool {}", slots.len());
                let stream = device.stream_builder().priority(priority).name(&name);
                let stream = match partition {
                    Some(partition) => stream.partition(partition).build()?,
                    None => stream.build()?,
                };
                let engine = stream.engine().clone();
                slots.push(PoolSlot { engine, class, stream: Mutex::new(stream) });
            }
        }
        if slots.is_empty() {
            let what = "streams of a pool";
            return Err(ErrorDetail::TooFew { what, found: 0, least: 1 }.into());
        }
        let limit = self.max_in_flight.unwrap_or(IN_FLIGHT_A_STREAM * slots.len());
        let max_waiting = self.max_waiting.unwrap_or(MAX_WAITING);
        let mut shares = vec![PoolShare::new("")];
        shares.extend(self.shares);
        let limits = shares.iter().map(|share| ShareLimits {
            part: share.part,
            limit: share.max_in_flight.map_or(u64::MAX, |permits| permits as u64),
        });
        let classes = slots.iter().map(|slot| slot.class);
        let admission = Admission::new(limit as u64, max_waiting, classes, limits);
        let book = PoolState { admission, draining: Vec::new(), gone: None, next_deadline: None };
        let engine_id = |slot: usize| slots[slot].engine.state.id;
        let is_first = |slot: &usize| (0..*slot).all(|other| engine_id(other) != engine_id(*slot));
        let devices = (0..slots.len()).filter(is_first).collect();
        let shared = PoolCore {
            clock: slots[0].engine.pacing.clock.clone(),
            slots,
            moving: Mutex::default(),
            devices,
            watches: OnceLock::new(),
            name: self.name.map(Into::into),
            share_names: shares.into_iter().map(|share| share.name.into()).collect(),
            book: Mutex::new(book),
        };
        let asks = Asks { class: Class::Normal, share: 0, weight: 1, patience: self.patience };
        Ok(StreamPool { shared: Arc::new(shared), asks })
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
    #[track_caller]
    pub fn streams(&self, n: usize) -> Result<StreamPool> {
        StreamPool::builder().streams(self, n).build()
    }
}
