//! A permit of a stream pool, held by the handles of one of its streams.
//!
//! | state | left by |
//! |---|---|
//! | held by handles, which report their submissions | the drop of the last one |
//! | in use by the device | completion of the submitted work, or the loss of the device |
//! | released | – |
//!
//! # Invariants
//! 1. A permit is released once, and not before the device has finished everything that its handles submitted
//!    (`a_permit_is_released_when_the_device_has_finished`).
//! 2. Other users' work on the same stream does not delay a permit (`a_permit_does_not_wait_for_others_on_its_stream`).
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Wake, Waker};

use gpu_await_protocol::sync::Mutex;

use crate::op::Op;
use crate::runtime::{Point, Progress};
use crate::thread::exit;
use gpu_await_protocol::sweep::SweepGate;

/// The owner that permits are returned to.
pub(crate) trait Permits: Send + Sync {
    fn give_back(&self, permit: usize);
}

/// A permit; after its drop it is released when the device has finished.
pub(crate) struct Permit {
    /// The last ticket that the handles submitted; 0 before.
    last: AtomicU64,
    /// `None` once it is returned.
    held: Option<HeldPermit>,
}

/// A permit that has not been returned.
struct HeldPermit {
    stream: Arc<Progress>,
    permit: usize,
    weight: u32,
    permits: Arc<dyn Permits>,
}

impl HeldPermit {
    fn give_back(self) {
        // ORDERING: Relaxed: a statistic.
        self.stream.device().permits.fetch_sub(self.weight.into(), Ordering::Relaxed);
        self.permits.give_back(self.permit);
    }
}

impl Permit {
    /// A permit with that weight.
    pub(crate) fn new(
        stream: Arc<Progress>,
        permit: usize,
        weight: u32,
        permits: Arc<dyn Permits>,
    ) -> Self {
        // ORDERING: Relaxed: a statistic.
        stream.device().permits.fetch_add(weight.into(), Ordering::Relaxed);
        let held = Some(HeldPermit { stream, permit, weight, permits });
        Permit { last: AtomicU64::new(0), held }
    }

    /// Notes that a handle submitted `ticket`.
    pub(crate) fn submitted(&self, ticket: u64) {
        // ORDERING: Relaxed: read by the drop of the last handle, which comes after this one's.
        self.last.fetch_max(ticket, Ordering::Relaxed);
    }

    /// Notes that a submission failed, perhaps with a part of it on the stream.
    pub(crate) fn failed(&self) {
        if let Some(held) = &self.held {
            self.submitted(held.stream.timeline.submitted());
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let last = *self.last.get_mut();
        let Some(held) = self.held.take() else { return };
        // After `main` the driver is not queried any more.
        if held.stream.is_settled(last) || exit::begun() {
            held.give_back();
            return;
        }
        let mut op = Op::until(Point { stream: held.stream.clone(), ticket: last });
        op.never_check();
        let return_ = Return { gate: SweepGate::new(), op: Mutex::new(Some((op, held))) };
        Arc::new(return_).look();
    }
}

/// Returns a permit once the device has finished its work. It is its own waker.
struct Return {
    gate: SweepGate,
    /// `None` during a poll, and once complete.
    op: Mutex<Option<(Op<()>, HeldPermit)>>,
}

impl Return {
    /// Returns the permit if the device has finished; otherwise waits for that. Only one check runs at a
    /// time, even if the check itself wakes this.
    fn look(self: &Arc<Self>) {
        self.gate.run(|| {
            let waker = Waker::from(self.clone());
            // Taken out, because the poll may wake others, which is foreign code. The gate excludes other checks.
            let Some((mut op, held)) = self.op.lock().take() else { return };
            // Complete or lost: the device will not touch the permit's memory again.
            if Pin::new(&mut op).poll(&mut Context::from_waker(&waker)).is_ready() {
                held.give_back();
            } else {
                *self.op.lock() = Some((op, held));
            }
        });
    }
}

impl Wake for Return {
    fn wake(self: Arc<Self>) {
        self.look();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.look();
    }
}
