//! What the [watchdog](crate::watchdog) sees of a communicator.
//!
//! | a call, or a launch | is watched |
//! |---|---|
//! | is being made, and may wait for other ranks | as the one call of that time |
//! | has returned | as pending work, until it is known to be complete |
#![forbid(unsafe_code)]

use std::time::Instant;

use parking_lot::MutexGuard;

use super::{Shared, State, lost_device};
use crate::error::{Error, LostCause};
use crate::watchdog;

impl Shared {
    /// Has the watchdog look after a call until it [ends](Self::end_call), or is entered.
    pub(super) fn begin_call(&self) -> Result<Instant, Error> {
        let now = Instant::now();
        let mut state = self.state.lock();
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

    pub(super) fn watch(&self, mut state: MutexGuard<'_, State>) {
        let is_new = !std::mem::replace(&mut state.watched, true);
        drop(state);
        if is_new {
            watchdog::watch(self.this.clone());
        }
    }

    /// Looks after what is pending. False: there is nothing, and it is not watched any more.
    pub(crate) fn look(&self) -> bool {
        for local in &self.ranks {
            // Asks the device.
            let _in_flight = local.stream.backlog();
        }
        self.ask_launches();
        let oldest = {
            let mut state = self.state.lock();
            self.forget_complete(&mut state);
            if let Some(cause) = state.input_failed.take() {
                drop(state);
                self.fail(cause);
                return true;
            }
            let pending = state.pending.front().map(|pending| pending.since);
            let Some(oldest) = pending.into_iter().chain(state.calling).min() else {
                state.watched = false;
                return false;
            };
            oldest
        };
        let lost = self.ranks.iter().find_map(|local| lost_device(&local.device));
        let late = self.limit().filter(|limit| oldest.elapsed() > *limit);
        let late = late.map(|limit| LostCause::TimedOut { limit });
        if let Some(cause) = lost.or_else(|| self.transport.look()).or(late) {
            self.fail(cause);
        }
        true
    }
}
