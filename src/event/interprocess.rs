//! A driver event that several processes share.
//!
//! Another process may record it again at any time, so it proves nothing about a ticket and is never a marker. A stream waits for it, and
//! the host waits for a marker behind that wait.

use std::sync::Arc;

use crate::backend::{EventOptions, Query, RawEvent};
use crate::error::{ErrorDetail, Result};
use crate::runtime::Engine;
use crate::thread::role;

/// Destroyed with its last reference, in this process only.
pub(crate) struct SharedEvent {
    engine: Arc<Engine>,
    raw: RawEvent,
}

impl SharedEvent {
    /// Creates an event to be exported.
    pub(crate) fn new(engine: &Arc<Engine>, blocking_sync: bool) -> Result<Arc<Self>> {
        check(engine)?;
        let options = EventOptions { timing: false, blocking_sync, interprocess: true };
        let raw = engine.backend.event_create(options).map_err(|code| engine.refused(code))?;
        Ok(Arc::new(SharedEvent { engine: engine.clone(), raw }))
    }

    /// Opens an event that another process exported.
    ///
    /// # Safety
    /// The other process keeps the event as long as this is used.
    pub(crate) unsafe fn import(engine: &Arc<Engine>, handle: &[u8; 64]) -> Result<Arc<Self>> {
        check(engine)?;
        // SAFETY: the caller vouches for the other process.
        let raw = unsafe { engine.backend.event_import(handle) };
        let raw = raw.map_err(|code| engine.refused(code))?;
        Ok(Arc::new(SharedEvent { engine: engine.clone(), raw }))
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn raw(&self) -> RawEvent {
        self.raw
    }

    pub(crate) fn export(&self) -> Result<[u8; 64]> {
        // SAFETY: the event lives as long as this.
        let handle = unsafe { self.engine.backend.event_export(self.raw) };
        handle.map_err(|code| self.engine.refused(code))
    }

    /// Whether the last record, by any process, is complete; pending where no query is possible.
    pub(crate) fn query(&self) -> Result<Query> {
        if let Some(lost) = self.engine.state.lost() {
            return Err(lost.clone());
        }
        if !role::may_call_driver() {
            return Ok(Query::Pending);
        }
        // SAFETY: the event lives as long as this.
        let answer = unsafe { self.engine.backend.event_query(self.raw) };
        answer.map_err(|code| self.engine.refused(code))
    }
}

fn check(engine: &Engine) -> Result<()> {
    role::check("making an event")?;
    engine.check_open()?;
    if engine.limits.interprocess_events {
        return Ok(());
    }
    let (what, device) = ("an event shared between processes", engine.label().to_owned());
    Err(ErrorDetail::Unsupported { what, device }.into())
}

impl Drop for SharedEvent {
    fn drop(&mut self) {
        if !self.engine.is_usable() {
            return;
        }
        let (keeper, raw) = (self.engine.clone(), self.raw);
        self.engine.background.act(move || {
            // SAFETY: this process made or opened the handle, and nothing here uses it any more. Its waits
            // and records may be pending.
            if unsafe { keeper.backend.event_destroy(raw) }.is_err() {
                keeper.state.count_unreturned();
            }
        });
    }
}
