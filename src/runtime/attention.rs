//! How a poller is notified, and the flags that it shares with its device.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use super::progress::DeviceState;
use crate::error::ErrorDetail;
use gpu_await_protocol::cadence;
use gpu_await_protocol::park::ParkState;

/// How long the poller keeps an idle stream once the device's last handle is gone.
const HURRY_NS: u64 = 50_000;

/// State that a device and its poller share.
pub(crate) struct Attention {
    device: Arc<DeviceState>,
    pub(super) park: ParkState,
    pub(super) thread: OnceLock<Thread>,
    stop: AtomicBool,
    ended: AtomicBool,
    /// Set when the device's last handle is gone: nothing will wait for its streams.
    hurries: AtomicBool,
    /// Counts the poller's decisions when to look next.
    pub(super) looks: AtomicU64,
    /// Whether the last such decision kept idle streams.
    lingers: AtomicBool,
}

impl Attention {
    /// For a device with a poller, or a `stepped` one.
    pub(super) fn new(device: &Arc<DeviceState>, stepped: bool) -> Self {
        Attention {
            device: device.clone(),
            park: ParkState::new(),
            thread: OnceLock::new(),
            stop: AtomicBool::new(false),
            ended: AtomicBool::new(stepped),
            hurries: AtomicBool::new(false),
            looks: AtomicU64::new(0),
            lingers: AtomicBool::new(false),
        }
    }

    /// Makes the poller look once more before it sleeps.
    pub(crate) fn call(&self) {
        self.call_before(0);
    }

    /// Makes the poller look no later than `due`.
    pub(crate) fn call_before(&self, due: u64) {
        if self.park.notify_before(due)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Makes the poller release idle streams soon: the device's last handle is gone.
    pub(crate) fn hurry(&self) {
        // ORDERING: Relaxed: the call below orders it before the poller's next look.
        self.hurries.store(true, Ordering::Relaxed);
        self.call();
    }

    pub(super) fn lingers_ns(&self) -> u64 {
        // ORDERING: Relaxed, as above.
        if self.hurries.load(Ordering::Relaxed) { HURRY_NS } else { cadence::LINGER_NS }
    }

    pub(super) fn looked(&self, lingers: bool) {
        self.lingers.store(lingers, Ordering::SeqCst);
        self.looks.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether the poller has decided again since `looks` and lingers on no idle stream, or has ended.
    pub(super) fn has_let_go(&self, looks: u64) -> bool {
        let looked = self.looks.load(Ordering::SeqCst) > looks;
        self.has_ended() || (looked && !self.lingers.load(Ordering::SeqCst))
    }

    /// Ends the poller's thread.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.call();
    }

    /// The process is ending: the device counts as lost, and its poller notifies the waiters and stops.
    pub(super) fn end_device(&self) {
        self.device.lose(|| ErrorDetail::ProcessEnding { what: "work on a device" }.into());
        self.stop();
    }

    /// Called in the child of a fork. Neither locks nor allocates.
    pub(super) fn leave_to_the_parent(&self) {
        self.device.leave_to_the_parent();
    }

    pub(super) fn must_stop(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// The poller has stopped looking.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }
}
