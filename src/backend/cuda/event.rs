//! The driver's event calls.

use super::api::{Handle, IpcHandle};
use super::exclusive::Exclusive;
use super::{CudaBackend, driver, event_handle, newer, query, stream_handle};
use crate::backend::{DriverResult, EventCalls, EventOptions, Query, RawEvent, RawStream};

impl EventCalls for CudaBackend {
    fn event_create(&self, options: EventOptions) -> DriverResult<RawEvent> {
        const BLOCKING_SYNC: u32 = 1;
        const DISABLE_TIMING: u32 = 2;
        const INTERPROCESS: u32 = 4;
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let flag = |set, flag| if set { flag } else { 0 };
        let flags = flag(options.blocking_sync, BLOCKING_SYNC)
            | flag(!options.timing, DISABLE_TIMING)
            | flag(options.interprocess, INTERPROCESS);
        let _exclusive = Exclusive::begin();
        let mut event: Handle = std::ptr::null_mut();
        driver!(self.cuEventCreate(&raw mut event, flags))?;
        Ok(RawEvent(event as u64))
    }

    unsafe fn event_export(&self, event: RawEvent) -> DriverResult<[u8; 64]> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut handle = IpcHandle([0; 64]);
        driver!(self.cuIpcGetEventHandle(&raw mut handle, event_handle(event)))?;
        Ok(handle.0)
    }

    unsafe fn event_import(&self, handle: &[u8; 64]) -> DriverResult<RawEvent> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let mut event: Handle = std::ptr::null_mut();
        driver!(self.cuIpcOpenEventHandle(&raw mut event, IpcHandle(*handle)))?;
        Ok(RawEvent(event as u64))
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        driver!(self.cuEventDestroy_v2(event_handle(event)))
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        driver!(self.cuEventRecord(event_handle(event), stream_handle(stream)))
    }

    unsafe fn event_record_all(&self, event: RawEvent) -> DriverResult<()> {
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        newer!(self.cuCtxRecordEvent(self.raw_context as Handle, event_handle(event)))
    }

    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<Query> {
        let _relaxed = self.api.relax();
        // SAFETY: the event lives: the trait's contract.
        query("cuEventQuery", unsafe { (self.api.cuEventQuery)(event_handle(event)) })
    }

    unsafe fn event_elapsed_ms(&self, start: RawEvent, end: RawEvent) -> DriverResult<f32> {
        let _relaxed = self.api.relax();
        let mut ms = 0.0;
        driver!(self.cuEventElapsedTime(&raw mut ms, event_handle(start), event_handle(end)))?;
        Ok(ms)
    }
}
