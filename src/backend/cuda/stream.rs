//! The driver's stream calls.

use std::ffi::c_void;

use super::api::Handle;
use super::exclusive::Exclusive;
use super::{CudaBackend, NON_BLOCKING, driver, event_handle, newer, query, stream_handle};
use crate::backend::{
    DevicePtr, DriverResult, HostCallback, Query, RawEvent, RawPartition, RawStream, StreamCalls,
    StreamInfo, StreamOptions,
};

impl StreamCalls for CudaBackend {
    fn stream_create(&self, options: StreamOptions) -> DriverResult<RawStream> {
        let flags = if options.blocking { 0 } else { NON_BLOCKING };
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let _exclusive = Exclusive::begin();
        let mut stream: Handle = std::ptr::null_mut();
        match options.partition {
            Some(RawPartition { green, .. }) => {
                let (green, priority) = (green as Handle, options.priority);
                newer!(self.cuGreenCtxStreamCreate(&raw mut stream, green, flags, priority))
            }
            None => {
                driver!(self.cuStreamCreateWithPriority(&raw mut stream, flags, options.priority))
            }
        }?;
        Ok(RawStream(stream as u64))
    }

    unsafe fn stream_info(&self, stream: RawStream) -> DriverResult<StreamInfo> {
        let stream = stream_handle(stream);
        let _bound = self.bind()?;
        let _relaxed = self.api.relax();
        let (mut priority, mut flags) = (0, 0);
        let mut context: Handle = std::ptr::null_mut();
        driver!(self.cuStreamGetPriority(stream, &raw mut priority))?;
        driver!(self.cuStreamGetFlags(stream, &raw mut flags))?;
        let mut green: Handle = std::ptr::null_mut();
        match self.api.cuStreamGetCtx_v2 {
            // A green context is one on top of the context that this returns.
            Some(_) => {
                newer!(self.cuStreamGetCtx_v2(stream, &raw mut context, &raw mut green))
            }
            None => driver!(self.cuStreamGetCtx(stream, &raw mut context)),
        }?;
        let (context, green) = (context as u64, green as u64);
        Ok(StreamInfo { priority, blocking: flags & NON_BLOCKING == 0, context, green })
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> DriverResult<()> {
        driver!(self.cuStreamDestroy_v2(stream_handle(stream)))
    }

    unsafe fn stream_query(&self, stream: RawStream) -> DriverResult<Query> {
        let _bound = self.bind_for(stream)?;
        let _relaxed = self.api.relax();
        // SAFETY: the stream lives: the trait's contract.
        query("cuStreamQuery", unsafe { (self.api.cuStreamQuery)(stream_handle(stream)) })
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        driver!(self.cuStreamWaitEvent(stream_handle(stream), event_handle(event), 0))
    }

    unsafe fn write_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u64,
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        // Flag 0: with the barrier, so that earlier writes are visible first.
        driver!(self.cuStreamWriteValue64_v2(stream_handle(stream), word.0, value, 0))
    }

    unsafe fn host_fn(
        &self,
        stream: RawStream,
        callback: HostCallback,
        data: *mut c_void,
    ) -> DriverResult<()> {
        let _bound = self.bind_for(stream)?;
        driver!(self.cuLaunchHostFunc(stream_handle(stream), callback, data))
    }

    unsafe fn foreign(&self, _stream: RawStream, code: &mut dyn FnMut()) -> DriverResult<()> {
        let bound = self.bind()?;
        let relaxed = self.api.relax();
        code();
        drop(relaxed);
        // The code may have left another context current.
        let before = bound.restore.unwrap_or(self.raw_context);
        if self.api.current_context() != Ok(before) {
            self.api.set_context(before).ok();
        }
        std::mem::forget(bound);
        Ok(())
    }
}
