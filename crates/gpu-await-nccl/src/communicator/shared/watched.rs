//! What the [watchdog](crate::watchdog) and a [transport](crate::transport) see of a communicator.
//!
//! | a call, or a launch | is watched |
//! |---|---|
//! | is being made, and may wait for other ranks | as the one call of that time |
//! | has returned | as pending work, until it is known to be complete |
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures::channel::oneshot;
use gpu_await::ErrorDetail;
use parking_lot::MutexGuard;

use super::{Shared, State};
use crate::error::{Error, LostCause};
use crate::stats;
use crate::transport::{CallOwner, LocalRank};
use crate::watchdog::{self, LookedAfter};

/// How long a call of several ranks waits while NCCL frees another communicator, which may never return.
const FREE: Duration = Duration::from_secs(1);

/// Some work of a communicator is pending, as of the watchdog's last look.
pub(super) struct Watched(());

impl Watched {
    fn new() -> Self {
        stats::quiet().begin();
        Watched(())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        stats::quiet().end();
    }
}

impl Shared {
    /// The communicator itself, as the transport knows it.
    pub(super) fn owner(&self) -> Weak<dyn CallOwner> {
        self.this.clone()
    }

    /// Has the watchdog look after a call until it [ends](Self::end_call) or is entered.
    pub(super) fn begin_call(&self) -> Result<Instant, Error> {
        let now = Instant::now();
        if let Some(cause) = self.transport.refusal() {
            self.fail(cause);
        }
        let mut state = self.state.lock();
        if let Some(cause) = state.input_failed.take() {
            drop(state);
            self.fail(cause);
            state = self.state.lock();
        }
        if let Some(cause) = state.lost.clone() {
            return Err(self.error(cause));
        }
        state.calling = Some(now);
        self.watch(state);
        Ok(now)
    }

    /// The call has returned, and nothing of it is pending.
    pub(super) fn end_call(&self) {
        self.state.lock().calling = None;
    }

    /// Has the watchdog look when a device is lost, even while nothing is pending: other ranks may already wait for this one's next call.
    pub(super) fn await_losses(&self) {
        let waker = Waker::from(Arc::new(LookNow(self.this.clone())));
        let awaits = |local: &LocalRank| {
            let mut loss = local.device.lost();
            // If it is lost already, the first call sees that.
            let _pending = Pin::new(&mut loss).poll(&mut Context::from_waker(&waker));
            loss
        };
        *self.losses.lock() = self.ranks.iter().map(awaits).collect();
    }

    pub(super) fn watch(&self, mut state: MutexGuard<'_, State>) {
        let is_new = state.watched.is_none();
        state.watched.get_or_insert_with(Watched::new);
        drop(state);
        if is_new {
            watchdog::watch(self.this.clone());
        }
        if self.ranks.len() > 1 {
            // After that: from here on nothing is freed.
            stats::quiet().pass(FREE);
        }
    }

    /// What has lost it on this process's side: its device is lost, or an input of a call failed after the call was made.
    pub(crate) fn own_failure(&self) -> Option<LostCause> {
        for local in &self.ranks {
            // This polls the device.
            let _in_flight = local.stream.backlog();
        }
        self.ask_launches();
        let lost = self.ranks.iter().find_map(lost_device);
        let mut state = self.state.lock();
        self.forget_complete(&mut state);
        lost.or_else(|| state.input_failed.take())
    }
}

impl CallOwner for Shared {
    fn fail(&self, cause: LostCause) -> LostCause {
        Shared::fail(self, cause)
    }
}

impl LookedAfter for Shared {
    fn look(&self) -> bool {
        let failed = self.own_failure();
        let oldest = {
            let mut state = self.state.lock();
            let pending = state.pending.front().map(|pending| pending.since);
            let Some(oldest) = pending.into_iter().chain(state.calling).min() else {
                state.watched = None;
                drop(state);
                if let Some(cause) = failed {
                    self.fail(cause);
                }
                return false;
            };
            oldest
        };
        let late = self.limit().filter(|limit| oldest.elapsed() > *limit);
        let late = late.map(|limit| LostCause::TimedOut { limit });
        if let Some(cause) = failed.or_else(|| self.transport.look()).or(late) {
            self.fail(cause);
        }
        true
    }
}

/// The waker of a device's loss: it runs on the thread that finds the loss, and leaves the rest to the watchdog.
struct LookNow(Weak<Shared>);

impl Wake for LookNow {
    fn wake(self: Arc<Self>) {
        watchdog::watch(self.0.clone());
    }
}

/// The end of this process is not a loss: peers learn of it from their connections.
fn lost_device(local: &LocalRank) -> Option<LostCause> {
    match pin!(local.device.lost()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(error) if !matches!(error.detail(), ErrorDetail::ProcessEnding { .. }) => {
            Some(LostCause::DeviceLost { rank: local.rank, error })
        }
        _ => None,
    }
}

impl State {
    /// Resolves when the communicator is lost, at once if it already is.
    pub(super) fn loss(&mut self) -> oneshot::Receiver<()> {
        let (waiter, loss) = oneshot::channel();
        self.waiters.retain(|waiter| !waiter.is_canceled());
        self.waiters.extend(self.lost.is_none().then_some(waiter));
        loss
    }
}
