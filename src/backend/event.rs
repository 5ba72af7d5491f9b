//! Driver calls for events.

use super::{DriverResult, EventOptions, Query, RawEvent, RawStream};

/// Part of [`Backend`](super::Backend), whose contract the unsafe functions share.
pub(crate) trait EventCalls {
    fn event_create(&self, options: EventOptions) -> DriverResult<RawEvent>;
    unsafe fn event_export(&self, event: RawEvent) -> DriverResult<[u8; 64]>;
    /// The exporting process keeps the event alive while this one uses it.
    unsafe fn event_import(&self, handle: &[u8; 64]) -> DriverResult<RawEvent>;
    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()>;
    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()>;
    /// Records behind everything on the device, including other libraries' work.
    unsafe fn event_record_all(&self, event: RawEvent) -> DriverResult<()>;
    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<Query>;
    /// Negative if `start` was reached later.
    unsafe fn event_elapsed_ms(&self, start: RawEvent, end: RawEvent) -> DriverResult<f32>;
}
